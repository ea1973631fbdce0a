"""What certificates and sealed tickets cost: two meshes of this machine, one of them in plaintext, measured by turns.

ScheduleStep: first tickets of trajectories that are opened and closed one after the other, TURN on one mesh, then TURN
on the other, which of them begins changing each time. A step: from the request for its ticket to its last token, on a
real engine of each mesh, by turns too. The figures are medians, and medians of the ratio within neighbouring turns.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from treadle import Client, Sampling
from treadle.certificates import Certificates, open_channel
from treadle.scheduler.v1 import scheduler_pb2 as pb
from treadle.scheduler.v1 import scheduler_pb2_grpc
from treadle_cli.mesh.engines import EnginePlan

from treadle_bench.bench import Bench, BenchOptions
from treadle_bench.control_plane.measure import AT_ONCE
from treadle_bench.processes import run_mesh

MS = 1000.0
TURN = 32  # tickets
TURNS = 40  # of each mesh, a repeat; one takes half a second, and its median varies by a tenth
STEPS = 3  # of each mesh, a repeat
PROMPT = list(range(1000, 1128))
OUTPUT_TOKENS = 32  # about 2 s on one core
DEADLINE_S = 60.0
MESHES = ("plaintext", "certificates")


class Caller(NamedTuple):
    """Of one mesh."""

    client: Client
    scheduler: scheduler_pb2_grpc.SchedulerServiceAsyncStub


async def measure(options: BenchOptions) -> dict[str, float]:
    """Raises ProcessError, grpc.aio.AioRpcError."""
    plan = replace(options.engines, count=1, cores=options.engines.cores[:1])
    tickets: dict[str, list[float]] = {name: [] for name in MESHES}  # the median of each turn, in seconds
    steps: dict[str, list[float]] = {name: [] for name in MESHES}
    async with AsyncExitStack() as stack:
        callers = {name: await _start(plan, name, options, stack) for name in MESHES}
        for repeat in range(options.repeats + 1):
            for turn in range(TURNS):
                for name in MESHES if turn % 2 else MESHES[::-1]:
                    times_s = [await _time_ticket(callers[name]) for _ in range(TURN)]
                    if repeat > 0:  # the first repeat is not counted
                        tickets[name].append(float(np.median(times_s)))
            for number in range(STEPS):
                for name in MESHES if number % 2 else MESHES[::-1]:
                    time_s = await _time_step(callers[name])
                    if repeat > 0:
                        steps[name].append(time_s)
            options.progress.print(f"repeat {repeat} of {options.repeats}", highlight=False)
    return summarize(tickets, steps)


def summarize(tickets: dict[str, list[float]], steps: dict[str, list[float]]) -> dict[str, float]:
    """Times in milliseconds, shares in percent."""

    def added_pct(times: dict[str, list[float]]) -> Sequence[float]:
        ratios = np.array(times["certificates"]) / np.array(times["plaintext"])
        return [round(float((quantile - 1) * 100), 2) for quantile in np.quantile(ratios, (0.25, 0.5, 0.75))]

    low, middle, high = added_pct(tickets)
    step_low, step_middle, step_high = added_pct(steps)
    return {
        **{f"schedule_step_{name}_p50_ms": round(float(np.median(tickets[name])) * MS, 3) for name in MESHES},
        "schedule_step_added_pct": middle,
        "schedule_step_added_pct_quarter": low,
        "schedule_step_added_pct_three_quarters": high,
        **{f"step_{name}_p50_ms": round(float(np.median(steps[name])) * MS, 1) for name in MESHES},
        "step_added_pct": step_middle,
        "step_added_pct_quarter": step_low,
        "step_added_pct_three_quarters": step_high,
        "turns": float(len(tickets["plaintext"])),
        "steps": float(len(steps["plaintext"])),
    }


async def _start(plan: EnginePlan, name: str, options: BenchOptions, stack: AsyncExitStack) -> Caller:
    mesh = await stack.enter_async_context(run_mesh(plan, options, secure=name == "certificates"))
    await mesh.set_policy(AT_ONCE)
    folder = None if mesh.certificates is None else mesh.certificates / "client-default"
    client = await stack.enter_async_context(Client(mesh.where.scheduler, tls_folder=folder))
    certificates = None if folder is None else Certificates(folder)
    channel = await stack.enter_async_context(open_channel(mesh.where.scheduler, "scheduler", certificates))
    return Caller(client, scheduler_pb2_grpc.SchedulerServiceStub(channel))


async def _time_ticket(caller: Caller) -> float:
    opening = pb.OpenTrajectoryRequest(request_id=uuid.uuid4().hex, prompt_id="bench", prompt_tokens=len(PROMPT))
    trajectory_id = (await caller.scheduler.OpenTrajectory(opening, timeout=DEADLINE_S)).trajectory.trajectory_id
    request = pb.ScheduleStepRequest(
        request_id=uuid.uuid4().hex,
        trajectory_id=trajectory_id,
        context_tokens=len(PROMPT),
        max_new_tokens=OUTPUT_TOKENS,
    )
    begun_s = time.perf_counter()
    await caller.scheduler.ScheduleStep(request, timeout=DEADLINE_S)
    took_s = time.perf_counter() - begun_s
    closing = pb.CloseTrajectoryRequest(
        request_id=uuid.uuid4().hex, trajectory_id=trajectory_id, outcome=pb.OUTCOME_CANCELLED
    )
    await caller.scheduler.CloseTrajectory(closing, timeout=DEADLINE_S)
    return took_s


async def _time_step(caller: Caller) -> float:
    async with await caller.client.open(prompt_id="bench", sample=0, prompt=PROMPT) as trajectory:
        begun_s = time.perf_counter()
        async for _ in trajectory.generate(Sampling(max_new_tokens=OUTPUT_TOKENS, temperature=0.0)):
            pass
        return time.perf_counter() - begun_s


BENCH = Bench(
    "identity",
    "What certificates and sealed tickets cost: ScheduleStep and a step, against a mesh in plaintext, by turns. Takes "
    "about 5 minutes on 2 cores.",
    measure,
    engines=1,
)
