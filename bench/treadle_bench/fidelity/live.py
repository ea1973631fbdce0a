"""Plays a workload on a live mesh, with steps of exactly the lengths that the workload says.

Every trajectory is opened first. When the scheduler has had its first tick, each one's loop runs by itself: generate
(greedy, end of sequence ignored, so that lengths hold), sleep for the tool, observe random tokens. The simulator's
clients begin in the same way. Times are the client's own, from the first opening.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import nats
from nats.aio.msg import Msg
from treadle import Client, Sampling, Span, Trajectory
from treadle.telemetry.v1.facts_pb2 import Fact, MigrationEnded
from treadle_sim.driver import TICK_S
from treadle_sim.workloads.workload import TrajectoryWork, Workload

from treadle_bench.fidelity.trace import token_ids

ALL_FACTS = "treadle.facts.>"
FIRST_STEPS_S = TICK_S + 0.05  # after the first opening: a tick, and the plan that is asked for at it


@dataclass(frozen=True, slots=True)
class Played:
    """One trajectory; seconds since the start of the play. spans: queue, prefill, decode and tool."""

    finished_s: float
    spans: tuple[Span, ...]
    preemptions: int
    cached_tokens: int

    def part_s(self, kind: str) -> float:
        """Seconds of all its spans of one kind."""
        return sum(span.end_s - span.start_s for span in self.spans if span.kind == kind)

    @property
    def service_s(self) -> float:
        """Seconds on engines."""
        return self.part_s("prefill") + self.part_s("decode")

    @property
    def engines(self) -> tuple[str, ...]:
        """Engine of each step, in order; a step that changed engines counts with its last."""
        last = {span.turn: span.engine_id for span in self.spans if span.kind == "decode"}
        return tuple(last[turn] for turn in sorted(last))


@dataclass(frozen=True, slots=True)
class Play:
    """One rollout, live or simulated; trajectories in the workload's order."""

    trajectories: tuple[Played, ...]
    migrations: int

    @property
    def makespan_s(self) -> float:
        """When the last trajectory ended."""
        return max(played.finished_s for played in self.trajectories)


@dataclass
class Heard:
    """What the bus told of: migrations that ended, and seconds from a step's end to the prediction that followed."""

    migrations: list[MigrationEnded] = field(default_factory=list)
    predict_s: list[float] = field(default_factory=list)
    _step_ends: dict[tuple[str, int], float] = field(default_factory=dict)
    _seen: set[str] = field(default_factory=set)

    def take(self, fact: Fact) -> None:
        """Keeps what counts; a fact that arrives twice counts once."""
        if fact.fact_id in self._seen:
            return
        self._seen.add(fact.fact_id)
        at_s = fact.time.ToMicroseconds() / 1e6
        if fact.HasField("migration_ended"):
            self.migrations.append(fact.migration_ended)
        elif fact.HasField("step_finished"):
            step = fact.step_finished.step
            self._step_ends[step.trajectory_id, step.turn + 1] = at_s
        elif fact.HasField("trajectory_predicted"):
            told = fact.trajectory_predicted
            ended_s = self._step_ends.get((told.trajectory_id, told.turn))
            if ended_s is not None:
                self.predict_s.append(at_s - ended_s)


@asynccontextmanager
async def listening(nats_url: str) -> AsyncIterator[Heard]:
    """Collects facts until the block ends. A plain subscription: it forgets with the block."""
    heard = Heard()
    client = await nats.connect(nats_url)

    async def on_message(message: Msg) -> None:
        heard.take(Fact.FromString(message.data))

    await client.subscribe(ALL_FACTS, cb=on_message)
    await client.flush()
    try:
        yield heard
    finally:
        await client.drain()


async def play(scheduler: str, workload: Workload, salt: str) -> tuple[Played, ...]:
    """All trajectories at once. salt: of the random tokens. Raises TreadleError, ValueError for a wrong length."""
    async with Client(scheduler) as client:
        started_s = time.time()
        opened = [await _open(client, workload, work, salt) for work in workload.trajectories]
        await asyncio.sleep(started_s + FIRST_STEPS_S - time.time())
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(_run(trajectory, work, observed, started_s))
                for work, (trajectory, observed) in zip(workload.trajectories, opened, strict=True)
            ]
    return tuple(task.result() for task in tasks)


async def _open(
    client: Client, workload: Workload, work: TrajectoryWork, salt: str
) -> tuple[Trajectory, list[list[int]]]:
    prompt, observed = token_ids(work, salt)
    trajectory = await client.open(
        prompt_id=work.prompt_id,
        sample=work.sample,
        prompt=prompt,
        rollout_id=workload.name,
        max_total_tokens=workload.max_total_tokens,
    )
    return trajectory, observed


async def _run(
    trajectory: Trajectory, work: TrajectoryWork, observed: Sequence[Sequence[int]], started_s: float
) -> Played:
    tools = []
    for turn, step in enumerate(work.steps):
        await generate(trajectory, step.gen_tokens)
        tool_began_s = time.time()
        await asyncio.sleep(step.tool_s)
        tools.append(Span("tool", tool_began_s, time.time(), "", turn))
        trajectory.observe(observed[turn])
    finished_s = time.time()
    await trajectory.close()
    spans = sorted((*trajectory.spans, *tools), key=lambda span: span.start_s)
    return Played(
        finished_s=finished_s - started_s,
        spans=tuple(
            Span(span.kind, span.start_s - started_s, span.end_s - started_s, span.engine_id, span.turn)
            for span in spans
        ),
        preemptions=sum(step.preemptions for step in trajectory.steps),
        cached_tokens=sum(step.cached_tokens for step in trajectory.steps),
    )


async def generate(trajectory: Trajectory, gen_tokens: int) -> list[float]:
    """One step of exactly so many tokens; unix seconds at which each chunk of it came. Raises ValueError."""
    sampling = Sampling(max_new_tokens=gen_tokens, temperature=0.0, ignore_eos=True)
    came_s = [time.time() async for _ in trajectory.generate(sampling)]
    if len(trajectory.steps[-1].token_ids) != gen_tokens:
        raise ValueError(f"a step came to {len(trajectory.steps[-1].token_ids)} tokens instead of {gen_tokens}")
    return came_s
