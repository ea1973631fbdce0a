"""How many files a step passes, traced through real services: what a reader must open to follow
it."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager

import pytest
import treadle
from support.conditions import until
from support.fake_sglang import fake_sglang
from support.mesh_in_process import QUICK, generate
from support.scheduler import scheduler
from support.sidecar_in_process import sidecar
from support.step_tracer import FACT_HEARD, PLANNED, PREDICTED, TICKET_USED, Leg, StepTracer
from treadle_core.tuning import Tuning
from treadle_predictor.config import PredictorSettings
from treadle_predictor.wire import wire as predictor_wire
from treadle_runtime.server import serving
from treadle_sidecar.engine import watch

MOST_FILES_TO_TICKET = 23
MOST_FILES = 45
MOST_PLAYS = 12
# A pause before each play: by then a plan is due at once, and what the play before has changed is
# stored.
PAUSE_S = Tuning().plan_interval_s + 0.2
RARELY_S = 3600.0  # leases and polls: on a slow machine each play would see them
LEGS = (
    ("generate -> ticket", TICKET_USED),
    ("ticket -> finished fact", FACT_HEARD),
    ("fact -> prediction and plan", None),
)


@asynccontextmanager
async def open_trajectory(nats_url: str) -> AsyncIterator[treadle.Trajectory]:
    """A trajectory of a mesh with a scheduler, a predictor and two engines with their sidecars."""
    async with AsyncExitStack() as stack:
        settings = PredictorSettings(nats_url=nats_url, listen="127.0.0.1:0")
        predictor = await stack.enter_async_context(serving(settings, predictor_wire))
        rare = {"leader_ttl_s": RARELY_S, "lease_ttl_s": RARELY_S}
        served = await stack.enter_async_context(
            scheduler(nats_url, predictor=predictor.address, **rare)
        )
        for name in ("e0", "e1"):
            engine = await stack.enter_async_context(fake_sglang())
            await stack.enter_async_context(
                sidecar(nats_url, engine.url, name, scheduler=served.address)
            )
        await served.until_registered(2)
        client = await stack.enter_async_context(treadle.Client(served.address, retry=QUICK))
        yield await client.open(prompt_id="p", sample=0, prompt=[5] * 40)


async def play(trajectory: treadle.Trajectory, tracer: StepTracer) -> Sequence[Leg]:
    """One turn, until what it has changed is predicted and planned."""
    await asyncio.sleep(PAUSE_S)
    with tracer.running():
        await generate(trajectory, 4)
        await until(
            lambda: tracer.has_seen(FACT_HEARD, PREDICTED, PLANNED), what="a prediction and a plan"
        )
    trajectory.observe([7] * 5)
    return tracer.cut(LEGS)


def files_of_each_leg(plays: Sequence[Sequence[Leg]]) -> dict[str, set[str]]:
    """The files that all plays have passed, by the name of the leg: others belong to background
    work."""
    return {
        legs[0].name: set.intersection(*(leg.files for leg in legs))
        for legs in zip(*plays, strict=True)
    }


def describe(legs: dict[str, set[str]]) -> str:
    lines = [f"{len(set().union(*legs.values()))} files"]
    for name, files in legs.items():
        lines += [f"{name}: {len(files)} files", *(f"    {file}" for file in sorted(files))]
    return "\n".join(lines)


async def test_a_step_passes_few_files(nats_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tracer = StepTracer()
    async with open_trajectory(nats_url) as trajectory:
        monkeypatch.setattr(watch, "POLL_S", RARELY_S)
        await generate(trajectory, 4)  # which opens connections
        plays = [await play(trajectory, tracer)]
        # Background work that comes often enough is seen in several plays in a row.
        while (wide := too_wide(files_of_each_leg(plays))) and len(plays) < MOST_PLAYS:
            plays.append(await play(trajectory, tracer))
    assert not wide, describe(files_of_each_leg(plays))


def too_wide(passed: dict[str, set[str]]) -> bool:
    """Whether a step passes more files than it may."""
    to_ticket, whole = passed["generate -> ticket"], set().union(*passed.values())
    return len(to_ticket) > MOST_FILES_TO_TICKET or len(whole) > MOST_FILES
