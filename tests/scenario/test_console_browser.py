"""The console in a real Chromium: it shows what a mesh does, as it happens, to everybody, and harms
nobody."""

import asyncio
import json
import time
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest
import treadle
from playwright.async_api import Browser
from support.console import (
    PHONE,
    SLOW_TOKEN_S,
    TOKEN_S,
    chromium,
    console_mesh,
    renderer_bytes,
    screen,
    start_console,
)
from support.processes import StartService, free_port
from treadle.engine.v1 import engine_pb2
from treadle.scheduler.v1 import scheduler_pb2 as pb
from treadle.telemetry.v1 import facts_pb2
from treadle.tools.v1 import tools_pb2
from treadle_runtime.bus import Bus
from treadle_runtime.facts import make_fact
from treadle_runtime.fields import duration

pytestmark = pytest.mark.timeout(600)

MANY = 6_400  # trajectories of a large rollout
MOST_PAGE_BYTES = 300 * 1024**2
PAGES = ("#/", "#/trajectories", "#/steps", "#/tail")
FIRST = "[aria-labelledby=h-standing] tbody tr:first-child"
HOSTILE = "<img src=x onerror='window.taken=1'><script>window.taken=1</script>"


@pytest.fixture
async def browser() -> AsyncIterator[Browser]:
    async with chromium() as started:
        yield started


def pixels(name: str) -> str:
    """JavaScript: whether the picture has pixels of the colour of a kind of bar."""
    return f"""() => {{
      const canvas = document.querySelector(".gantt canvas");
      if (!canvas || !canvas.width) return false;
      const hex = getComputedStyle(canvas).getPropertyValue("--{name}").trim().slice(1);
      const [r, g, b] = [0, 2, 4].map((at) => parseInt(hex.slice(at, at + 2), 16));
      const data = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
      const same = (at) => data[at] === r && data[at + 1] === g && data[at + 2] === b;
      for (let at = 0; at < data.length; at += 4) if (same(at)) return true;
      return false;
    }}"""


def has_row(section: str, cells: dict[str, str]) -> str:
    """JavaScript: whether a table has a row whose cells, by their labels, are as these regular
    expressions say."""
    return f"""() => [...document.querySelectorAll("[aria-labelledby={section}] tbody tr")].some((row) =>
      Object.entries({json.dumps(cells)}).every(([name, pattern]) =>
        new RegExp(`^${{pattern}}$`).test(row.querySelector(`td[data-label="${{name}}"]`).textContent.trim())))"""


def drawn_s(name: str) -> str:
    """JavaScript: how many seconds of a kind of bar the picture shows, all lines together, to about
    one pixel each."""
    return f"""() => {{
      const canvas = document.querySelector(".gantt canvas");
      const hex = getComputedStyle(canvas).getPropertyValue("--{name}").trim().slice(1);
      const [r, g, b] = [0, 2, 4].map((at) => parseInt(hex.slice(at, at + 2), 16));
      const data = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
      let found = 0;
      for (let at = 0; at < data.length; at += 4) found += data[at] === r && data[at + 1] === g && data[at + 2] === b;
      const [, span_s] = canvas.ariaLabel.match(/over ([\\d.]+) s/);
      const high = canvas.height / Number(canvas.dataset.rows);
      return (found / high) * (Number(span_s) / canvas.width);
    }}"""


async def test_the_first_page_shows_a_mesh_at_work(
    start_service: StartService, browser: Browser
) -> None:
    """GIVEN   a mesh of all services before two engines, and a page that is open
    WHEN    a client runs a rollout of two turns with a tool between
    Result: while it runs the page shows engines with batch, queue, KV and weights, bars that grow,
    priorities, the plan
            with its bound and the job; after it, the straggler tax, the kept fraction, the tool and
            where its time
            went"""
    async with console_mesh(start_service) as mesh, screen(browser, mesh.url) as shown:
        await shown.sees("No trajectory has been opened")
        await shown.sees("e0", "e1", "healthy", within="section[aria-labelledby=h-engines]")
        mesh.pace(SLOW_TOKEN_S)
        playing = asyncio.create_task(mesh.play("step-1", prompts=6, keep=1))
        await shown.holds(pixels("decode"))
        await shown.sees("step-1-p", within="section[aria-labelledby=h-standing] tbody")
        await shown.sees(
            "no plan of these engines can end", within="section[aria-labelledby=h-plan]"
        )
        await shown.sees("fit-1", within="section[aria-labelledby=h-jobs]")
        await shown.holds(
            "() => document.querySelectorAll('[aria-labelledby=h-engines] svg.bar "
            "rect[width]').length > 0"
        )
        mesh.pace()
        await playing
        await shown.sees("python", within="section[aria-labelledby=h-tools]")
        bars = "[...document.querySelectorAll('[aria-labelledby=h-tools] svg.bar')]"
        spent = r"/^queue [\d.]+ s, overhead [\d.]+ s, execution (0\.[1-9]|[1-9])/"
        await shown.holds(
            f"() => {bars}.some((bar) => {spent}.test(bar.getAttribute('aria-label')))"
        )
        await shown.holds(pixels("tool"))
        await shown.sees("last tenth of step-1", "12 of 12", within="dl.figures")
        await shown.sees("sampled", within="dl.figures")
        await shown.sees("settled", within="section[aria-labelledby=h-events]")
        await shown.sees(
            "what a calibrated predictor has", within="section[aria-labelledby=h-calibration]"
        )
        mesh.pace(5 * TOKEN_S)  # busy for long enough to be seen so
        playing = asyncio.create_task(mesh.play("step-2", prompts=30))
        await shown.sees("step-2-p", within="section[aria-labelledby=h-standing] tbody")
        await shown.holds(pixels("tool"))
        before_s = await shown.page.evaluate(drawn_s("decode"))
        busy = {
            "batch": "2 of 2",
            "queue": r"[1-9]\d*",
            "KV": r"\d+(\.\d)? %",
            "weights": "default",
            "health": "healthy",
        }
        await shown.holds(has_row("h-engines", busy))
        await shown.holds(f"() => ({drawn_s('decode')})() > {before_s} + 0.5")
        await shown.shoot("mesh")
        mesh.pace()
        await playing
        assert shown.problems == []


async def test_preemptions_and_moves_show_as_they_happen(
    start_service: StartService, browser: Browser, bus: Bus
) -> None:
    """By facts, as the services publish them. Result: the state of the trajectory, an event with
    names, and a bar."""
    _, url, _ = await start_console(start_service, f"127.0.0.1:{free_port()}")
    async with screen(browser, url) as shown:
        step = facts_pb2.StepRef(ticket_id="k", trajectory_id="t1", engine_id="e0")
        other = facts_pb2.StepRef(ticket_id="k2", trajectory_id="t2", engine_id="e0")
        await tell(
            bus,
            trajectory_opened=facts_pb2.TrajectoryOpened(
                trajectory_id="t1", prompt_id="sum", sample=3
            ),
        )
        await tell(
            bus,
            trajectory_opened=facts_pb2.TrajectoryOpened(
                trajectory_id="t2", prompt_id="sum", sample=4
            ),
        )
        await tell(bus, step_queued=facts_pb2.StepQueued(step=step, priority=2.0))
        await tell(bus, step_queued=facts_pb2.StepQueued(step=other, priority=1.5))
        await shown.sees("sum #3", "2.00", "queued", within=FIRST)
        await tell(bus, step_queued=facts_pb2.StepQueued(step=other, priority=7.25))
        await shown.sees("sum #4", "7.25", within=FIRST)
        await tell(bus, step_started=facts_pb2.StepStarted(step=step, attempt=1))
        await shown.sees("1 running", within="dl.figures")
        await tell(
            bus,
            step_preempted=facts_pb2.StepPreempted(step=step, output_tokens=9, by_ticket_id="k2"),
        )
        await shown.sees("1 preempted", within="dl.figures")
        await shown.holds(pixels("rest"))
        await shown.sees("sum #3", "after 9 tokens, for sum #4", within=".events")
        await shown.holds(pixels("preempted"))
        began = make_fact(
            "test", engine_lost=facts_pb2.EngineLost(engine_id="e9", reason="LEASE_EXPIRED")
        )
        await bus.publish(began)
        moved = facts_pb2.MigrationEnded(
            trajectory_id="t1",
            source_engine_id="e0",
            target_engine_id="e1",
            moved=True,
            prefix_tokens=77,
        )
        moved.started_at.CopyFrom(began.time)
        await asyncio.sleep(1.0)  # what the move takes
        await tell(bus, migration_ended=moved)
        await shown.sees("77 tokens of KV from e0 to e1", "lease expired", within=".events")
        await shown.holds(pixels("move"))
        await shown.shoot("events")
        assert shown.problems == []


async def test_jobs_show_with_their_weights_and_shares(
    start_service: StartService, browser: Browser
) -> None:
    """Two jobs of weights 1 and 3 run at a time. Result: each has its share, and its tickets and
    trajectories."""
    async with (
        console_mesh(start_service) as mesh,
        screen(browser, mesh.url) as shown,
        treadle.Client(mesh.control.address, job="search", weight=3.0) as client,
        asyncio.TaskGroup() as group,
    ):
        mesh.pace(SLOW_TOKEN_S)
        group.create_task(mesh.play("step-1", prompts=12))
        group.create_task(replace(mesh, client=client).play("search-1", prompts=12))
        for job, weight, share in (("fit-1", "1.0", "25 %"), ("search", "3.0", "75 %")):
            cells = {
                "job": job,
                "weight": weight,
                "share now": share,
                "tickets": r"[1-9]\d*",
                "open": r"\d+",
            }
            await shown.holds(has_row("h-jobs", cells))
        await shown.shoot("jobs", within="section[aria-labelledby=h-jobs]")
        mesh.pace()


async def test_a_trajectory_has_a_page_with_its_ledger_decisions_and_steps(
    start_service: StartService, browser: Browser
) -> None:
    """Result: it is found by the words of its prompt, its page says what `treadle explain` says,
    and one that nobody knows has a page that says so."""
    async with console_mesh(start_service) as mesh, screen(browser, mesh.url) as shown:
        await mesh.play("step-1", prompts=2)
        await shown.go("#/trajectories")
        await shown.page.fill("#find", "step-1-p1")
        await shown.sees("2 of 4", within=".controls")
        await shown.page.click("main tbody tr a >> nth=0")
        await shown.sees("an engine sampled tokens", within="section[aria-labelledby=h-ledger]")
        await shown.sees("ticket", "placed", within="section[aria-labelledby=h-decisions]")
        await shown.holds(
            "() => document.querySelectorAll('[aria-labelledby=h-steps] tbody tr').length >= 2"
        )
        await shown.sees("treadle explain")
        await shown.holds(pixels("decode"))
        await shown.shoot("trajectory")
        await shown.go("#/t/nobody")
        await shown.sees("nobody")
        await shown.holds(
            "() => document.querySelector('main .bad')?.textContent.includes('nobody')"
        )


async def test_training_goes_step_by_step_and_two_steps_compare_side_by_side(
    start_service: StartService, browser: Browser
) -> None:
    async with console_mesh(start_service) as mesh, screen(browser, mesh.url) as shown:
        for number in (1, 2):
            await mesh.play(f"step-{number}", prompts=1 + number)
        await shown.go("#/steps")
        await shown.sees(
            "step-1", "step-2", "4 of 4", "6 of 6", within="section[aria-labelledby=h-steps]"
        )
        for name in ("step-1", "step-2"):
            await shown.page.check(f"input[aria-label='Compare {name}']")
        await shown.shoot("steps")
        await shown.page.click("#compare")
        await shown.sees(
            "step-1 and step-2", "mean trajectory ends at", "decode, seconds a trajectory"
        )
        assert await shown.page.locator(".gantt canvas").count() == 2
        await shown.holds(pixels("decode"))
        await shown.shoot("compare")
        await shown.go("#/compare/step-1/step-9")
        await shown.sees("knows no rollout step-9")


async def test_the_page_on_long_tails_answers_as_its_sliders_move(
    start_service: StartService, browser: Browser
) -> None:
    _, url, _ = await start_console(start_service, f"127.0.0.1:{free_port()}")
    async with screen(browser, url) as shown:
        await shown.go("#/tail")
        await shown.sees("5.02 means", within="dl.figures")  # K = 16, c = 1: the lesson prints 5.0
        await shown.page.locator("input[name=cap_percentile]").fill("0.95")
        await shown.page.locator("input[name=oversample]").fill("1.5")
        await shown.sees("with cap and more samples", within="table")
        await shown.sees("67 %", within="dl.figures")
        await shown.shoot("tail")
        assert shown.problems == []


async def test_names_from_prompts_and_tools_are_text_and_run_nothing(
    start_service: StartService, browser: Browser, bus: Bus
) -> None:
    """Ids of prompts, rollouts, tools and engines, reasons and job names are markup with scripts in
    it. Result: each is seen as it is written, no element of it is made, and no script runs."""
    _, url, _ = await start_console(start_service, f"127.0.0.1:{free_port()}")
    async with screen(browser, url) as shown:
        step = facts_pb2.StepRef(ticket_id=HOSTILE, trajectory_id=HOSTILE, engine_id=HOSTILE)
        opened = facts_pb2.TrajectoryOpened(
            trajectory_id=HOSTILE, prompt_id=HOSTILE, rollout_id=HOSTILE
        )
        await tell(bus, trajectory_opened=opened)
        await tell(bus, step_queued=facts_pb2.StepQueued(step=step, priority=1.0))
        await tell(bus, step_started=facts_pb2.StepStarted(step=step, attempt=1))
        await tell(bus, step_preempted=facts_pb2.StepPreempted(step=step, by_ticket_id=HOSTILE))
        await tell(bus, engine_lost=facts_pb2.EngineLost(engine_id=HOSTILE, reason=HOSTILE))
        await tell(
            bus,
            engine_joined=facts_pb2.EngineJoined(
                info=engine_pb2.EngineInfo(engine_id=HOSTILE, model=HOSTILE)
            ),
        )
        ended = facts_pb2.ToolFinished(
            trajectory_id=HOSTILE, tool=HOSTILE, status=tools_pb2.RESULT_STATUS_OK
        )
        await tell(bus, tool_started=facts_pb2.ToolStarted(trajectory_id=HOSTILE, tool=HOSTILE))
        await shown.sees("1 tool", within="dl.figures")
        await tell(bus, tool_finished=ended)
        engine = facts_pb2.PlanMade.Engine(
            engine_id=HOSTILE, trajectories=1, predicted_time=duration(1.0)
        )
        await tell(bus, plan_made=facts_pb2.PlanMade(engines=[engine], trajectories=1))
        await shown.sees(HOSTILE, within="section[aria-labelledby=h-plan]")
        await shown.sees(HOSTILE, within="section[aria-labelledby=h-tools]")
        await shown.page.hover(".gantt canvas", position={"x": 400, "y": 8})
        await shown.sees(HOSTILE, within=".tip")
        cards = "[...document.querySelectorAll('dl.figures div')]"
        assert await shown.page.evaluate(
            f"() => {cards}.every((card) => card.scrollWidth <= card.clientWidth)"
        )
        await shown.shoot("hostile")
        for address in (
            "#/trajectories",
            "#/steps",
            f"#/t/{HOSTILE}",
            f"#/compare/{HOSTILE}/{HOSTILE}",
        ):
            await shown.go("#/")
            await shown.page.evaluate("address => { window.location.hash = address; }", address)
            await shown.sees(HOSTILE[:20])
            assert await shown.page.locator("main img, main script").count() == 0
            assert await shown.page.evaluate("() => window.taken") is None
        assert not any("Content Security Policy" in each for each in shown.problems), (
            "nothing even tried"
        )


@pytest.mark.full
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
async def test_every_page_meets_wcag_aa_wide_and_on_a_phone(
    start_service: StartService, browser: Browser, bus: Bus, dark: bool
) -> None:
    """With rows in each table. Result: axe finds nothing, a phone scrolls down and not sideways,
    the first key reaches the link to the content, and the theme that the person chose is kept."""
    _, url, _ = await start_console(start_service, f"127.0.0.1:{free_port()}")
    await tell_rollout(bus, 12)
    for size, name in (((1280, 900), "wide"), (PHONE, "phone")):
        async with screen(browser, url, size=size, dark=dark) as shown:
            for address in (*PAGES, "#/t/t3", "#/compare/step-0/step-1"):
                await shown.go(address)
                await shown.holds("() => document.body.dataset.rows === '12'")
                await shown.sees("Live", within="#status")
                await shown.holds(
                    "() => !document.querySelector('main').textContent.includes('Asking')"
                )
                assert await shown.violations() == [], address
                wide = await shown.page.evaluate(
                    "() => document.documentElement.scrollWidth - window.innerWidth"
                )
                assert wide <= 0, (address, name)
                if dark or name == "phone":
                    page = address.removeprefix("#/").partition("/")[0] or "mesh"
                    await shown.shoot(f"{page}-{name}-{'dark' if dark else 'light'}")
            await shown.page.reload()
            await shown.page.keyboard.press("Tab")
            assert await shown.page.evaluate("() => document.activeElement.className") == "skip"
            await shown.page.click("#theme")
            await shown.page.reload()
            assert (
                await shown.page.evaluate("() => document.documentElement.dataset.theme") == "light"
            )


async def test_a_page_reconnects_by_itself_and_says_so(
    start_service: StartService, browser: Browser, bus: Bus
) -> None:
    """The console is killed and started again while a page is open. Result: the page says that the
    connection is lost, then shows what happened meanwhile, and nothing twice."""
    process, url, settings = await start_console(start_service, f"127.0.0.1:{free_port()}")
    async with screen(browser, url) as shown:
        await tell_rollout(bus, 5)
        await shown.holds("() => document.body.dataset.rows === '5'")
        await shown.sees("Live", within="#status")
        process.kill()
        await shown.sees("Connection lost", within="#status")
        await shown.shoot("lost")
        opened = facts_pb2.TrajectoryOpened(
            trajectory_id="late", prompt_id="p", rollout_id="step-0"
        )
        await tell(bus, trajectory_opened=opened)
        await start_service("treadle_console", settings)
        await shown.sees("Live", within="#status")
        await shown.holds("() => document.body.dataset.rows === '6'")


async def test_a_scheduler_that_is_away_is_a_warning_and_the_rest_goes_on(
    start_service: StartService, browser: Browser, bus: Bus
) -> None:
    async with console_mesh(start_service) as mesh, screen(browser, mesh.url) as shown:
        await shown.sees("healthy", within="section[aria-labelledby=h-engines]")
        mesh.scheduler.kill()
        await shown.sees("The scheduler does not answer", within="#banner")
        await tell_rollout(bus, 3)
        await shown.holds("() => document.body.dataset.rows === '3'")
        await shown.shoot("away")
        await start_service("treadle_scheduler", mesh.scheduler_settings)
        await shown.holds("() => document.querySelector('#banner').textContent === ''")


@pytest.mark.full
async def test_a_page_holds_a_large_rollout(
    start_service: StartService, browser: Browser, bus: Bus
) -> None:
    """6,400 trajectories of three steps each. Result: the page shows all, in less memory than it may
    take, and answers while it does."""
    _, url, _ = await start_console(start_service, f"127.0.0.1:{free_port()}")
    async with screen(browser, url) as shown:
        await tell_rollout(bus, MANY, rollouts=1)
        await shown.holds(f"() => document.body.dataset.rows === '{MANY}'")
        await shown.sees("6,400 of 6,400", within="dl.figures")
        assert renderer_bytes() < MOST_PAGE_BYTES
        await shown.shoot("large")
        await shown.go("#/trajectories")
        await shown.page.fill("#find", "t6399")
        await shown.sees("1 of 6,400", within=".controls")
        assert shown.problems == []


async def tell(bus: Bus, **kind: object) -> None:
    """Publish a fact of now."""
    await bus.publish(make_fact("test", **kind))  # type: ignore[arg-type]
    await bus.flush()


async def tell_rollout(bus: Bus, count: int, steps: int = 3, rollouts: int = 2) -> None:
    """Facts of trajectories that have ended: the n-th took as long as its number says."""
    ends_s = time.time()
    for number in range(count):
        id, rollout, engine = f"t{number}", f"step-{number % rollouts}", f"e{number % 2}"
        longest_s = 20.0 * (number + 1) / count
        at_s = ends_s - 60.0

        async def say(at_s: float, **kind: object) -> None:
            fact = make_fact("test", **kind)  # type: ignore[arg-type]
            fact.time.FromNanoseconds(round(at_s * 1e9))
            await bus.publish(fact)

        opened = facts_pb2.TrajectoryOpened(
            trajectory_id=id, rollout_id=rollout, prompt_id=f"p{number}"
        )
        await say(at_s, trajectory_opened=opened)
        for turn in range(steps):
            step = facts_pb2.StepRef(
                ticket_id=f"{id}.{turn}", trajectory_id=id, turn=turn, engine_id=engine
            )
            timing = engine_pb2.StepTiming(prefill=duration(0.05))
            timing.finished_at.FromNanoseconds(round((at_s + 0.8 * longest_s / steps) * 1e9))
            started = facts_pb2.StepStarted(step=step, attempt=1, queue_time=duration(0.01))
            await say(at_s, step_started=started)
            ended = facts_pb2.StepFinished(step=step, output_tokens=10, timing=timing)
            await say(at_s + 0.8 * longest_s / steps, step_finished=ended)
            at_s += longest_s / steps
        ledger = pb.Ledger(
            decode=duration(longest_s * 0.7), tool=duration(longest_s * 0.2), queue=duration(0.1)
        )
        closed = facts_pb2.TrajectoryClosed(
            trajectory_id=id,
            rollout_id=rollout,
            outcome=pb.OUTCOME_FINISHED,
            gen_tokens=10 * steps,
            turns=steps,
            ledger=ledger,
        )
        await say(at_s, trajectory_closed=closed)
    await bus.flush()
