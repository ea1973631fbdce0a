"""The console's page in a real Chromium: many engines, jobs and tools of long names, a long time,
odd browsers."""

import re
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import treadle_console
from playwright.async_api import Browser
from support.console import Screen, chromium, screen, start_console
from support.processes import StartService, free_port
from support.scheduler import SchedulerClient, scheduler
from treadle.engine.v1 import engine_pb2
from treadle.scheduler.v1 import scheduler_pb2 as pb
from treadle.telemetry.v1 import facts_pb2
from treadle.tools.v1 import tools_pb2
from treadle_runtime.bus import Bus
from treadle_runtime.facts import make_fact
from treadle_runtime.fields import duration

pytestmark = pytest.mark.timeout(600)

KEY = "correct-horse-battery-staple"
ENGINES, JOBS, TOOLS, TRAJECTORIES = 16, 6, 12, 40
PAGES = (
    "#/",
    "#/trajectories",
    "#/steps",
    "#/tail",
    "#/t/{id}",
    "#/compare/{rollout}-0/{rollout}-1",
)
LONG = "_of_the_long_horizon_software_engineering"  # no place at which a line breaks by itself
ROLLOUT, MODEL = f"step{LONG}", "Qwen/Qwen3-235B-A22B-Instruct-2507-FP8"

# What sticks out of the window, is cut by what it stands in, or can be scrolled sideways.
CUT = """() => [...document.querySelectorAll("body *")].filter((each) => {
  const box = each.getBoundingClientRect();
  if (!box.width || each.closest(".hidden, .skip, svg, option")) return false;
  const style = getComputedStyle(each);
  const inner = style.display === "inline" ? 0 : each.scrollWidth - each.clientWidth;
  return box.right > window.innerWidth + 0.5 || box.left < -0.5 || (inner > 1 && style.overflowX !== "visible");
}).map((each) => `${each.tagName} ${each.className} ${each.textContent.trim().slice(0, 60)}`)"""

# What has the focus, where all of it is below the header.
COVERED = """() => {
  const [at, header] = [document.activeElement, document.querySelector("header")].map((e) => e.getBoundingClientRect());
  const below = document.activeElement.closest("main") && at.bottom <= header.bottom;
  return below ? [`${document.activeElement.tagName} ${document.activeElement.textContent.trim().slice(0, 60)}`] : [];
}"""


@pytest.fixture
async def browser() -> AsyncIterator[Browser]:
    async with chromium() as started:
        yield started


@asynccontextmanager
async def crowded(start: StartService, nats_url: str, bus: Bus) -> AsyncIterator[str]:
    """A console of a scheduler with engines and jobs, and of facts about trajectories and tools.
    Its address."""
    async with scheduler(nats_url) as control:
        for number in range(ENGINES):
            await _register(
                control, f"rack-{number:02}{LONG}-engine" if number % 2 else f"e{number}"
            )
        for number in range(JOBS):
            job = f"search_{number}{LONG}" if number % 2 else f"fit-{number}"
            await control.call("OpenJob", pb.OpenJobRequest(request_id=uuid.uuid4().hex, job=job))
        await _tell_tools(bus)
        for number in range(TRAJECTORIES):
            opened = await control.open(
                f"trajectory-{number}{LONG}",
                prompt_id=f"p-{number}{LONG}",
                rollout_id=f"{ROLLOUT}-{number % 2}",
            )
            await _tell(
                bus,
                step_queued=facts_pb2.StepQueued(
                    step=_step(opened.trajectory_id), priority=1e3 + number
                ),
            )
        _, url, _ = await start_console(start, control.address, KEY)
        yield url


async def _register(control: SchedulerClient, name: str) -> None:
    said = await control.register(
        name,
        slot_limit=256,
        model=MODEL,
        tensor_parallel=8,
        hardware_tags=["h200", "nvlink"],
        weight_version=f"policy{LONG}-000123",
    )
    load = engine_pb2.Load(
        running_steps=200,
        waiting_steps=1234,
        slot_limit=256,
        kv_tokens_used=10_000_000,
        kv_tokens_capacity=12_345_678,
        decode_tokens_per_s=12345.6,
        oldest_wait_s=3.2,
        engine_healthy=True,
        weight_version=f"policy{LONG}-000123",
    )
    load.measured_at.GetCurrentTime()
    await control.call(
        "RenewEngineLease",
        pb.RenewEngineLeaseRequest(lease_id=said.lease_id, engine_id=name, load=load),
    )


def _step(id: str) -> facts_pb2.StepRef:
    return facts_pb2.StepRef(
        ticket_id=uuid.uuid4().hex, trajectory_id=id, engine_id=f"rack-01{LONG}-engine"
    )


async def _tell(bus: Bus, **kind: object) -> None:
    await bus.publish(make_fact("test", **kind))  # type: ignore[arg-type]
    await bus.flush()


async def _tell_tools(bus: Bus) -> None:
    """And a plan."""
    for number in range(TOOLS):
        timing = tools_pb2.ActionTiming(
            queue=duration(3.0), overhead=duration(2.0), execution=duration(400.0)
        )
        name = f"mcp-{number}{LONG}" if number % 2 else f"python{number}"
        await _tell(bus, tool_finished=facts_pb2.ToolFinished(tool=name, timing=timing))
    engines = [
        facts_pb2.PlanMade.Engine(
            engine_id=f"rack-{number:02}{LONG}-engine",
            trajectories=400,
            predicted_time=duration(9999.0),
        )
        for number in range(ENGINES)
    ]
    await _tell(
        bus,
        plan_made=facts_pb2.PlanMade(
            engines=engines, trajectories=6400, predicted_makespan=duration(9999.0)
        ),
    )


async def _go(shown: Screen, page: str) -> None:
    await shown.go(page.format(id=f"trajectory-1{LONG}", rollout=ROLLOUT))
    await shown.holds(f"() => document.body.dataset.rows === '{TRAJECTORIES}'")
    await shown.holds("() => !document.querySelector('main').textContent.includes('Asking')")


async def test_nothing_is_cut_or_scrolls_sideways(
    start_service: StartService, nats_url: str, bus: Bus, browser: Browser
) -> None:
    """On a laptop, a larger screen and a phone, without the key and with it. Result: no page and no
    table of it is wider than its place, no text is cut, nothing has the focus below the header, and
    bars do not move for a person who asks for less motion."""
    async with crowded(start_service, nats_url, bus) as url:
        for size in ((1280, 900), (1440, 900), (390, 844)):
            async with screen(browser, url, size=size) as shown:
                for page in PAGES:
                    await _go(shown, page)
                    assert await shown.page.evaluate(CUT) == [], (page, size)
                await _go(shown, "#/")
                moves = (
                    "() => getComputedStyle(document.querySelector('svg.bar "
                    "rect')).transitionDuration"
                )
                assert await shown.page.evaluate(moves) == "0s"
                await shown.page.get_by_label("Control key").fill(KEY)
                await shown.page.get_by_role("button", name="Unlock pause and drain").click()
                await shown.sees("The key is right")
                assert await shown.page.evaluate(CUT) == [], size
                assert await _covered(shown) == []


async def _covered(shown: Screen) -> list[str]:
    """What a keyboard reaches on its way up from a button to one that is below the header, and is
    so still."""
    found = []
    for number in range(1, 9):
        await shown.page.evaluate(
            """(number) => {
              const buttons = document.querySelectorAll("[aria-labelledby=h-engines] td button");
              window.scrollBy(0, buttons[number - 1].getBoundingClientRect().top - 8);
              buttons[number].focus({ preventScroll: true });
            }""",
            number,
        )
        await shown.page.keyboard.press("Shift+Tab")
        found += await shown.page.evaluate(COVERED)
    return found


@pytest.mark.parametrize("theme", [":root {", ':root[data-theme="dark"]'])
def test_every_colour_of_a_bar_stands_out_from_its_panel(theme: str) -> None:
    """WCAG 2.2, 1.4.11: a contrast of 3. Axe looks at text alone."""
    style = (Path(treadle_console.__file__).parent / "static" / "style.css").read_text()
    colours = dict(re.findall(r"--(\w+): #(\w{6})", style[style.index(theme) :].partition("}")[0]))

    def luminance(name: str) -> float:
        parts = (int(colours[name][at : at + 2], 16) / 255 for at in (0, 2, 4))
        red, green, blue = (
            part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts
        )
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue

    for name in (
        "queue",
        "prefill",
        "decode",
        "preempted",
        "tool",
        "move",
        "held",
        "weights",
        "control",
        "rest",
    ):
        lower, higher = sorted((luminance(name), luminance("panel")))
        assert (higher + 0.05) / (lower + 0.05) >= 3.0, name


async def test_a_page_of_another_clock_goes_on(
    start_service: StartService, browser: Browser, bus: Bus
) -> None:
    """The scheduler's clock is a minute before the console's. Result: the page shows its
    trajectories and answers."""
    _, url, _ = await start_console(start_service, f"127.0.0.1:{free_port()}")
    fact = make_fact(
        "test", trajectory_opened=facts_pb2.TrajectoryOpened(trajectory_id="t", prompt_id="p")
    )
    fact.time.seconds += 60
    await bus.publish(fact)
    await bus.flush()
    async with screen(browser, url) as shown:
        await shown.holds("() => document.body.dataset.rows === '1'")
        await shown.go("#/trajectories")
        await shown.sees("1 of 1", within=".controls")


async def test_a_page_forgets_what_the_console_has_forgotten(
    start_service: StartService, browser: Browser, bus: Bus
) -> None:
    """More rollouts and tools than are kept, while a page is open. Result: it shows what a new page
    shows."""
    _, url, _ = await start_console(start_service, f"127.0.0.1:{free_port()}")
    count = "document.querySelectorAll('[aria-labelledby=h-steps] tbody tr').length"
    async with screen(browser, url) as shown, screen(browser, url) as late:
        await shown.go("#/steps")
        for first in (0, 150):
            for number in range(first, first + 150):
                opened = facts_pb2.TrajectoryOpened(
                    trajectory_id=f"t{number}", rollout_id=f"step-{number}"
                )
                await bus.publish(make_fact("test", trajectory_opened=opened))
                await bus.publish(
                    make_fact("test", tool_started=facts_pb2.ToolStarted(tool=f"tool-{number}"))
                )
            await bus.flush()
            await shown.sees(f"step-{first + 149}", within="tbody")
        await late.page.reload()
        await late.go("#/steps")
        await late.sees("step-299", within="tbody")
        assert await shown.page.evaluate(count) == await late.page.evaluate(count) == 200
        for each in (shown, late):
            await each.go("#/")
        tools = "document.querySelectorAll('[aria-labelledby=h-tools] tbody tr').length"
        assert await shown.page.evaluate(tools) == await late.page.evaluate(tools) == 200


async def test_words_that_are_looked_for_stay_in_their_field(
    start_service: StartService, browser: Browser, bus: Bus
) -> None:
    _, url, _ = await start_console(start_service, f"127.0.0.1:{free_port()}")
    for name in ("one", "two"):
        await _tell(bus, trajectory_opened=facts_pb2.TrajectoryOpened(trajectory_id=name))
    async with screen(browser, url) as shown:
        await shown.holds("() => document.body.dataset.rows === '2'")
        await shown.go("#/trajectories")
        await shown.page.fill("#find", "one")
        await shown.sees("1 of 2", within=".controls")
        await shown.go("#/")
        await shown.sees("The mesh now")
        await shown.go("#/trajectories")
        await shown.sees("1 of 2", within=".controls")
        assert await shown.page.input_value("#find") == "one"


async def test_the_page_on_long_tails_asks_again(
    start_service: StartService, browser: Browser
) -> None:
    """The console is away when the page asks. Result: it says so, and answers once the console is
    back."""
    process, url, settings = await start_console(start_service, f"127.0.0.1:{free_port()}")
    async with screen(browser, url) as shown:
        await shown.sees("Live", within="#status")
        process.kill()
        await shown.go("#/tail")
        await shown.sees("the console does not answer", within="main")
        await start_service("treadle_console", settings)
        await shown.sees("5.02 means", within="dl.figures")
        assert await shown.page.locator("main .bad").count() == 0


async def test_a_page_that_may_store_nothing_still_shows_the_mesh(
    start_service: StartService, browser: Browser
) -> None:
    """As where the browser blocks the data of sites."""
    _, url, _ = await start_console(start_service, f"127.0.0.1:{free_port()}")
    async with screen(browser, url) as shown:
        await shown.page.add_init_script(
            "Object.defineProperty(window, 'localStorage', { get() { throw new DOMException('', "
            "'SecurityError'); } })"
        )
        await shown.page.reload()
        await shown.sees("Live", within="#status")
        await shown.page.click("#theme")
        await shown.sees("Theme: light", within="#theme")
        assert shown.problems == []


async def test_who_forgets_the_key_is_at_its_field(
    start_service: StartService, browser: Browser
) -> None:
    """The button that had the focus is gone."""
    _, url, _ = await start_console(start_service, f"127.0.0.1:{free_port()}", KEY)
    async with screen(browser, url) as shown:
        await shown.page.get_by_label("Control key").fill(KEY)
        await shown.page.keyboard.press("Enter")
        await shown.sees("The key is right")
        await shown.page.get_by_role("button", name="Forget the key").press("Enter")
        await shown.holds("() => document.activeElement.id === 'key'")


async def test_who_opens_the_printed_url_stays_in_without_its_token(
    start_service: StartService, browser: Browser
) -> None:
    """Result: the address bar shows no token, no script can read the cookie, the page goes on after
    a reload, and another browser sees nothing."""
    token = "correct-horse-battery-staple"
    nobody = f"127.0.0.1:{free_port()}"
    _, url, _ = await start_console(start_service, nobody, login_token=token)
    async with screen(browser, f"{url}/?token={token}#") as shown:
        await shown.sees("Live", within="#status")
        for _ in range(2):
            assert await shown.page.evaluate("location.href + document.cookie") == f"{url}/#/"
            await shown.page.reload()
            await shown.sees("Live", within="#status")
        assert shown.problems == []
    async with screen(browser, url) as shown:
        await shown.sees("?token=")


async def test_a_trajectory_that_nobody_knows_has_a_page_that_says_so(
    start_service: StartService, nats_url: str, browser: Browser
) -> None:
    """Result: the page names it, offers no command about it, and a link without an id says what is
    missing."""
    async with scheduler(nats_url) as control:
        _, url, _ = await start_console(start_service, control.address)
        async with screen(browser, url) as shown:
            await shown.go("#/t/nobody")
            await shown.sees("nobody", within="main .bad")
            assert await shown.page.locator("main code").count() == 0
            await shown.go("#/t/")
            await shown.sees("trajectory_id", within="main .bad")
