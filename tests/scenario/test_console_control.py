"""Pause, resume and drain in the console's page: off by default, for whoever has the key, and for
nobody else."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest
from playwright.async_api import Browser
from support.conditions import until_said
from support.console import PHONE, SLOW_TOKEN_S, ConsoleMesh, Screen, chromium, console_mesh, screen
from support.processes import StartService
from support.secure_mesh import ANSWER_S, secure_mesh
from treadle.scheduler.v1 import scheduler_pb2 as pb
from treadle.scheduler.v1 import scheduler_pb2_grpc

pytestmark = pytest.mark.timeout(600)

KEY = "correct-horse-battery-staple"
ENGINES, EVENTS, SAID = "section[aria-labelledby=h-engines]", ".events", "#control-said"


@pytest.fixture
async def browser() -> AsyncIterator[Browser]:
    async with chromium() as started:
        yield started


async def type_key(shown: Screen, key: str = KEY) -> None:
    await shown.page.get_by_label("Control key").fill(key)
    await shown.page.get_by_role("button", name="Unlock pause and drain").click()


async def press(shown: Screen, name: str, answer: str = "") -> None:
    """A button, then one of the dialog that asks whether it is meant."""
    await shown.page.get_by_role("button", name=name).click()
    await shown.page.get_by_role("dialog").get_by_role("button", name=answer, exact=True).click()


async def paused(mesh: ConsoleMesh) -> list[bool]:
    return [each.load.paused for each in await mesh.control.registered()]


async def test_a_console_without_a_key_offers_nothing(
    start_service: StartService, browser: Browser
) -> None:
    async with console_mesh(start_service) as mesh, screen(browser, mesh.url) as shown:
        await shown.sees("e0", "e1", "healthy", within=ENGINES)
        assert await shown.page.locator("#control, main button").count() == 0


async def test_the_mesh_is_paused_and_resumed_from_the_page(
    start_service: StartService, browser: Browser
) -> None:
    """GIVEN   a page, and a rollout that runs
    WHEN    somebody types a wrong key and the right one, cancels a pause, confirms one, and resumes
    Result: the wrong key opens nothing; the cancelled pause changes nothing; engines are paused and
    say so in their
            table and among the events; the rollout stands, and ends after the resume with all its
            samples"""
    async with (
        console_mesh(start_service, control_key=KEY) as mesh,
        screen(browser, mesh.url) as shown,
    ):
        await shown.sees("e0", "e1", "healthy", within=ENGINES)
        await type_key(shown, "wrong-horse-battery-staple")
        await shown.sees("Not done: the key is not that of this console", within=SAID)
        await type_key(shown)
        await shown.sees("The key is right", within=SAID)
        await shown.holds(
            "() => document.activeElement.textContent.startsWith('Pause all 2 engines')"
        )
        mesh.pace(SLOW_TOKEN_S)
        playing = asyncio.create_task(mesh.play("step-1", prompts=8))
        await shown.sees("running", within="dl.figures")
        await press(shown, "Pause all 2 engines", "Cancel")
        frames = "requestAnimationFrame(() => requestAnimationFrame(next))"
        await shown.page.evaluate(f"() => new Promise((next) => {frames})")
        assert await shown.page.locator(SAID).text_content() == "The key is right.", (
            "nothing is under way"
        )
        assert await paused(mesh) == [False, False]
        await press(shown, "Pause all 2 engines", "Pause")
        await shown.sees("All engines are paused", within=SAID)
        await shown.sees("generates nothing until it is resumed", within=EVENTS)
        await shown.holds(f"() => document.querySelectorAll('{ENGINES} td .bad').length === 2")
        await shown.shoot("paused")
        sampled = [engine.sampled for engine in mesh.engines]
        await asyncio.sleep(1.0)
        assert [engine.sampled for engine in mesh.engines] == sampled and not playing.done()
        await press(shown, "Resume all 2 engines", "Resume")
        await shown.sees("generates again", within=EVENTS)
        mesh.pace()
        await playing
        await shown.sees("16 of 16", within="dl.figures")
        await shown.page.get_by_role("button", name="Forget the key").click()
        await shown.sees("The key is forgotten", within=SAID)
        assert await shown.page.get_by_role("button", name="Pause all").count() == 0
        assert all("401" in problem for problem in shown.problems), "of the wrong key"


async def test_an_engine_is_drained_and_used_again_from_the_page(
    start_service: StartService, browser: Browser
) -> None:
    """Result: the page says how many trajectories are left and when the engine is empty, the last
    engine is not drained and the page says why, and no step is lost."""
    async with (
        console_mesh(start_service, control_key=KEY) as mesh,
        screen(browser, mesh.url) as shown,
    ):
        await type_key(shown)
        mesh.pace(SLOW_TOKEN_S)
        playing = asyncio.create_task(mesh.play("step-1", prompts=10))
        await shown.sees("step-1-p", within="section[aria-labelledby=h-standing] tbody")
        await press(shown, "Drain e0", "Drain")
        await shown.sees("e0 gets no more steps", within=SAID)
        await shown.sees("gets no more steps;", within=EVENTS)
        mesh.pace()
        await shown.sees("is drained: it may be stopped", within=EVENTS)
        await shown.sees("drained, empty", within=ENGINES)
        await press(shown, "Drain e1", "Drain")
        await shown.sees("Not done: no engine but e1 takes steps now", within=SAID)
        await shown.shoot("drained")
        steps = mesh.engines[0].steps
        await playing
        await shown.sees("20 of 20", within="dl.figures")
        assert mesh.engines[0].steps == steps, "no step went there"
        await press(shown, "Use e0 again", "Use again")
        await shown.sees("takes steps again", within=EVENTS)
        await mesh.play("step-2", prompts=4)
        assert mesh.engines[0].steps > steps


async def test_the_key_stays_in_the_memory_of_the_page(
    start_service: StartService, browser: Browser
) -> None:
    """Result: it is in no storage, cookie or address, and a page that is loaded again asks for it
    again."""
    async with (
        console_mesh(start_service, control_key=KEY) as mesh,
        screen(browser, mesh.url) as shown,
    ):
        await type_key(shown)
        await shown.sees("The key is right", within=SAID)
        kept = await shown.page.evaluate(
            "() => JSON.stringify([{...localStorage}, {...sessionStorage}, document.cookie, "
            "location.href])"
        )
        assert KEY not in kept and KEY not in await shown.page.content()
        await shown.page.reload()
        await shown.sees("Unlock pause and drain", within=ENGINES)
        assert shown.problems == []


@pytest.mark.full
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
async def test_control_meets_wcag_aa_wide_and_on_a_phone(
    start_service: StartService, browser: Browser, dark: bool
) -> None:
    """Result: axe finds nothing before and after the key and in the dialog, whose first button has
    the focus and which ends by Escape without an effect; a phone does not scroll sideways."""
    async with console_mesh(start_service, control_key=KEY) as mesh:
        for size in ((1280, 900), PHONE):
            async with screen(browser, mesh.url, size=size, dark=dark) as shown:
                await shown.sees("healthy", within=ENGINES)
                assert await shown.violations() == []
                await type_key(shown)
                await shown.sees("The key is right", within=SAID)
                assert await shown.violations() == []
                await shown.page.get_by_role("button", name="Drain e0").press("Enter")
                await shown.holds("() => document.activeElement.id === 'confirm-no'")
                assert await shown.violations() == []
                wide = await shown.page.evaluate(
                    "() => document.documentElement.scrollWidth - window.innerWidth"
                )
                assert wide <= 0
                await shown.shoot(
                    f"control-{'phone' if size == PHONE else 'wide'}-{'dark' if dark else 'light'}",
                    whole=False,
                )
                await shown.page.keyboard.press("Escape")
                await shown.holds(
                    "() => document.activeElement.getAttribute('aria-label') === 'Drain e0'"
                )
        assert not any(each.draining for each in await mesh.control.registered())


async def test_with_certificates_the_console_acts_as_an_operator(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `treadle up --secure` starts it, with the key in its environment. Result: engines are
    paused, go on, and are drained."""
    monkeypatch.setenv("TREADLE_CONSOLE_CONTROL_KEY", KEY)
    async with secure_mesh(tmp_path) as mesh, aiohttp.ClientSession() as session:
        page, _, login = (await mesh.plane.start_console(base_port=0)).partition("/?")
        headers = {"Origin": page, "Authorization": f"Bearer {KEY}"}

        async def act(action: str, engine: str = "") -> list[tuple[bool, bool]]:
            """Whether each engine is paused, and drained, after it."""
            asked = {"action": action, "engine": engine}
            to = f"{page}/api/control?{login}"
            async with session.post(to, json=asked, headers=headers) as response:
                assert (response.status, await response.json()) == (200, {"errors": {}})
            return await standing()

        async def standing() -> list[tuple[bool, bool]]:
            async with mesh.channel("operator", "scheduler") as channel:
                stub = scheduler_pb2_grpc.SchedulerServiceStub(channel)
                listed = await stub.ListEngines(pb.ListEnginesRequest(), timeout=ANSWER_S)
            return [(each.load.paused, each.draining) for each in listed.engines]

        await act("pause")
        await until_said(standing, lambda said: said == [(True, False), (True, False)])
        await act("resume")
        await until_said(standing, lambda said: said == [(False, False), (False, False)])
        assert [drained for _, drained in await act("drain", "e0")] == [True, False]
        assert [drained for _, drained in await act("undrain", "e0")] == [False, False]
