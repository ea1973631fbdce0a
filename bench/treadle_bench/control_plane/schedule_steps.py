"""ScheduleStep on its own: the first ticket of open trajectories, as at the start of a rollout.

Each repeat opens fresh trajectories, asks for their tickets, and closes them; only the asking is timed. Nothing is
generated.
"""

import asyncio
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from treadle.scheduler.v1 import scheduler_pb2

from treadle_bench.options import BenchOptions
from treadle_bench.samples import Samples

if TYPE_CHECKING:
    from treadle.scheduler.v1.scheduler_pb2_grpc import SchedulerServiceAsyncStub

SEQUENTIAL = 128  # trajectories a repeat; 5 repeats give 640 samples, enough for a 99th percentile
IN_FLIGHT = 32
BURST = 512  # trajectories a repeat with IN_FLIGHT calls at once: half a second's work
CONTEXT_TOKENS, MAX_NEW_TOKENS = 256, 64
DEADLINE_S = 30.0


@dataclass(frozen=True)
class ScheduleTimes:
    """sequential_s, in_flight_s: of single calls.

    per_s: calls a second with IN_FLIGHT at once, the median of the repeats.
    """

    sequential_s: Samples
    in_flight_s: Samples
    per_s: float


async def measure_schedule(scheduler: "SchedulerServiceAsyncStub", options: BenchOptions) -> ScheduleTimes:
    """One repeat more than asked for is run first and thrown away."""
    sequential_s, in_flight_s, rates = Samples(), Samples(), Samples()
    for repeat in range(options.repeats + 1):
        one_by_one = await _opened(scheduler, SEQUENTIAL)
        alone_s = [await _ask(scheduler, trajectory_id) for trajectory_id in one_by_one]
        await _close(scheduler, one_by_one)
        burst = await _opened(scheduler, BURST)
        begun_s = time.perf_counter()
        together_s = await _ask_all(scheduler, burst)
        elapsed_s = time.perf_counter() - begun_s
        await _close(scheduler, burst)
        if repeat > 0:
            sequential_s += alone_s
            in_flight_s += together_s
            rates.append(len(burst) / elapsed_s)
            options.progress.print(
                f"ScheduleStep {repeat}/{options.repeats}: {rates[-1]:.0f} a second", highlight=False
            )
    return ScheduleTimes(sequential_s, in_flight_s, rates.median)


async def open_trajectory(scheduler: "SchedulerServiceAsyncStub", prompt_tokens: int) -> str:
    """Opens one and gives its id."""
    request = scheduler_pb2.OpenTrajectoryRequest(
        request_id=uuid.uuid4().hex, prompt_id="bench", prompt_tokens=prompt_tokens
    )
    return (await scheduler.OpenTrajectory(request, timeout=DEADLINE_S)).trajectory.trajectory_id


async def close_trajectory(scheduler: "SchedulerServiceAsyncStub", trajectory_id: str) -> None:
    """Closes one as no longer wanted."""
    request = scheduler_pb2.CloseTrajectoryRequest(
        request_id=uuid.uuid4().hex, trajectory_id=trajectory_id, outcome=scheduler_pb2.OUTCOME_CANCELLED
    )
    await scheduler.CloseTrajectory(request, timeout=DEADLINE_S)


async def _opened(scheduler: "SchedulerServiceAsyncStub", count: int) -> list[str]:
    async with asyncio.TaskGroup() as group:
        opening = [group.create_task(open_trajectory(scheduler, CONTEXT_TOKENS)) for _ in range(count)]
    return [task.result() for task in opening]


async def _close(scheduler: "SchedulerServiceAsyncStub", trajectory_ids: list[str]) -> None:
    async with asyncio.TaskGroup() as group:
        for trajectory_id in trajectory_ids:
            group.create_task(close_trajectory(scheduler, trajectory_id))


async def _ask(scheduler: "SchedulerServiceAsyncStub", trajectory_id: str) -> float:
    """Seconds that one ticket took."""
    request = scheduler_pb2.ScheduleStepRequest(
        request_id=uuid.uuid4().hex,
        trajectory_id=trajectory_id,
        turn=0,
        context_tokens=CONTEXT_TOKENS,
        max_new_tokens=MAX_NEW_TOKENS,
    )
    begun_s = time.perf_counter()
    await scheduler.ScheduleStep(request, timeout=DEADLINE_S)
    return time.perf_counter() - begun_s


async def _ask_all(scheduler: "SchedulerServiceAsyncStub", trajectory_ids: list[str]) -> list[float]:
    left: Iterator[str] = iter(trajectory_ids)
    times_s: list[float] = []

    async def worker() -> None:
        for trajectory_id in left:
            times_s.append(await _ask(scheduler, trajectory_id))  # noqa: PERF401 - workers share the list

    async with asyncio.TaskGroup() as group:
        for _ in range(IN_FLIGHT):
            group.create_task(worker())
    return times_s
