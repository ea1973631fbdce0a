"""Whether the console keeps up: a real one and a page in a real Chromium, while facts of many
trajectories come.

TRAJECTORIES are opened, and then take steps: FACTS_PER_S facts in all, as a busy mesh publishes.
Each second one more fact is published whose time is the present. The page is behind by the time
from that until it has drawn a state with this fact in it: NATS, the console, the stream, and the
page's script and picture are all in it, as is waiting for the next message, of which there are two
a second. Memory is what processes have for themselves (USS), at the end.

Needs Chromium: TREADLE_TEST_CHROMIUM, or `chromium` on PATH; and `pip install playwright`.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import time
from typing import Any

import numpy as np
import psutil
from treadle.engine.v1 import engine_pb2
from treadle.telemetry.v1 import facts_pb2
from treadle_cli.exits import UsageProblem
from treadle_cli.mesh.processes import HOST, Ports
from treadle_runtime.bus import Bus, open_bus
from treadle_runtime.facts import make_fact
from treadle_runtime.fields import duration

from treadle_bench.bench import Bench, BenchOptions
from treadle_bench.processes import run_service

TRAJECTORIES = 6_400
FACTS_PER_S = 1_000
PROBES = 60  # a repeat, one a second
ENGINES = 16
DRAWN_WITHIN_MS = 60_000
MB = 1e6


async def measure(options: BenchOptions) -> dict[str, Any]:
    """Raises ProcessError; UsageProblem where there is no Chromium."""
    try:
        from playwright.async_api import async_playwright
    except ModuleNotFoundError as error:
        raise UsageProblem("this bench drives a browser: pip install playwright") from error
    browser_path = os.environ.get("TREADLE_TEST_CHROMIUM") or shutil.which("chromium")
    if browser_path is None:
        raise UsageProblem(
            "there is no Chromium: apt-get install chromium, or name one by TREADLE_TEST_CHROMIUM"
        )
    (port,) = Ports().choose(1)
    behind_s: list[float] = []
    async with (
        run_service(
            "console", options, HTTP_LISTEN=f"{HOST}:{port}", SCHEDULER=f"{HOST}:1"
        ) as service,
        open_bus(service.nats_url, "bench") as bus,
        async_playwright() as playwright,
    ):
        arguments = ["--disable-dev-shm-usage", *(["--no-sandbox"] if os.geteuid() == 0 else [])]
        browser = await playwright.chromium.launch(executable_path=browser_path, args=arguments)
        try:
            page = await browser.new_page(viewport={"width": 1280, "height": 900})
            await page.goto(f"http://{HOST}:{port}/")
            for number in range(TRAJECTORIES):
                opened = facts_pb2.TrajectoryOpened(
                    trajectory_id=f"t{number}", rollout_id="r", prompt_id=f"p{number}"
                )
                await bus.publish(make_fact("bench", trajectory_opened=opened))
            load = asyncio.create_task(_step(bus))
            try:
                drawn = f"() => document.body.dataset.rows === '{TRAJECTORIES}'"
                await page.wait_for_function(drawn, timeout=DRAWN_WITHIN_MS)
                for repeat in range(options.repeats):
                    for _ in range(PROBES):
                        await asyncio.sleep(1.0)
                        behind_s.append(await _behind_s(bus, page))
                    options.progress.print(
                        f"repeat {repeat + 1} of {options.repeats}", highlight=False
                    )
            finally:
                load.cancel()
                await asyncio.wait([load])
            other = await browser.new_page()
            began_s = time.monotonic()
            await other.goto(f"http://{HOST}:{port}/")
            await other.wait_for_function(drawn, timeout=DRAWN_WITHIN_MS)
            first_s = time.monotonic() - began_s
            memory = _memory_mb()
        finally:
            await browser.close()
    p50, p99, most = np.quantile(behind_s, (0.5, 0.99, 1.0)).tolist()
    return {
        "trajectories": TRAJECTORIES,
        "facts_per_s": FACTS_PER_S,
        "probes": len(behind_s),
        "behind_p50_s": round(p50, 3),
        "behind_p99_s": round(p99, 3),
        "behind_max_s": round(most, 3),
        "new_page_drawn_s": round(first_s, 2),
        **memory,
    }


async def _step(bus: Bus) -> None:
    """Steps of all trajectories in turn, each of two facts, at an even pace."""
    began_s, sent = time.monotonic(), 0
    while True:
        number, turn = sent // 2 % TRAJECTORIES, sent // 2 // TRAJECTORIES
        step = facts_pb2.StepRef(
            ticket_id=f"k{sent}",
            trajectory_id=f"t{number}",
            turn=turn,
            engine_id=f"e{number % ENGINES}",
        )
        started = facts_pb2.StepStarted(step=step, attempt=1, queue_time=duration(0.01))
        await bus.publish(make_fact("bench", step_started=started))
        finished = facts_pb2.StepFinished(step=step, output_tokens=100)
        finished.timing.CopyFrom(engine_pb2.StepTiming(prefill=duration(0.001)))
        await bus.publish(make_fact("bench", step_finished=finished))
        sent += 2
        early_s = began_s + sent / FACTS_PER_S - time.monotonic()
        if early_s > 0:
            await asyncio.sleep(early_s)


async def _behind_s(bus: Bus, page: Any) -> float:
    """From a fact's time until the page has drawn it."""
    fact = make_fact(
        "bench", engine_joined=facts_pb2.EngineJoined(info=engine_pb2.EngineInfo(engine_id="probe"))
    )
    at_ms = fact.time.ToMilliseconds()
    await bus.publish(fact)
    seen = (
        f"() => Number(document.body.dataset.events) >= {at_ms} "
        "&& Number(document.body.dataset.painted)"
    )
    painted = await page.wait_for_function(seen, timeout=DRAWN_WITHIN_MS)
    return (float(await painted.json_value()) - at_ms) / 1e3


def _memory_mb() -> dict[str, float]:
    pages, console = [], 0.0
    for child in psutil.Process().children(recursive=True):
        try:
            words, taken = " ".join(child.cmdline()), child.memory_full_info().uss / MB
        except psutil.NoSuchProcess:
            continue
        if "--type=renderer" in words:
            pages.append(taken)
        elif "treadle_console" in words:
            console = taken
    return {"page_mb": round(max(pages), 1), "console_mb": round(console, 1)}


BENCH = Bench(
    "console",
    "How far a page of the console is behind, and its memory: 6,400 trajectories and 1,000 facts a "
    "second in a real Chromium. Takes a minute a repeat.",
    measure,
    decides=("services/console",),
)
