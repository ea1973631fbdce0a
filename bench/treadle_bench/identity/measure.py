"""What certificates and sealed tickets cost: two meshes of this machine, one of them in plaintext, measured by turns.

ScheduleStep: first tickets of trajectories, one after the other and MANY at once, TURN on one mesh, then TURN on the
other, which of them begins changing each time. A step: from the request for its ticket to its last token, on a
real engine of each mesh, by turns too. The figures are medians, and medians of the ratio within neighbouring turns.
"""

from __future__ import annotations

import asyncio
import time
import uuid
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
MANY = 8  # tickets at once
STEPS = 3  # of each mesh, a repeat
PROMPT = list(range(1000, 1128))
OUTPUT_TOKENS = 32  # about 2 s on one core
DEADLINE_S = 60.0
MESHES = ("plaintext", "certificates")


Times = dict[str, list[float]]  # of each mesh


class Caller(NamedTuple):
    """Of one mesh."""

    client: Client
    scheduler: scheduler_pb2_grpc.SchedulerServiceAsyncStub


async def measure(options: BenchOptions) -> dict[str, float]:
    """Raises ProcessError, grpc.aio.AioRpcError."""
    plan = replace(options.engines, count=1, cores=options.engines.cores[:1])
    # In seconds; of tickets the median of each turn.
    tickets, at_once, steps = [Times({name: [] for name in MESHES}) for _ in range(3)]
    async with AsyncExitStack() as stack:
        callers = {name: await _start(plan, name, options, stack) for name in MESHES}
        for repeat in range(options.repeats + 1):
            for turn in range(TURNS):
                for name in MESHES if turn % 2 else MESHES[::-1]:
                    for together, kept in ((1, tickets), (MANY, at_once)):
                        rounds = [await _time_tickets(callers[name], together) for _ in range(TURN // together)]
                        if repeat > 0:  # the first repeat is not counted
                            kept[name].append(float(np.median(rounds)))
            for number in range(STEPS):
                for name in MESHES if number % 2 else MESHES[::-1]:
                    time_s = await _time_step(callers[name])
                    if repeat > 0:
                        steps[name].append(time_s)
            options.progress.print(f"repeat {repeat} of {options.repeats}", highlight=False)
    return summarize(tickets, at_once, steps)


def summarize(tickets: Times, at_once: Times, steps: Times) -> dict[str, float]:
    """Times in milliseconds, shares in percent."""
    figures = {}
    for what, times in (("schedule_step", tickets), (f"schedule_step_{MANY}_at_once", at_once), ("step", steps)):
        ratios = np.array(times["certificates"]) / np.array(times["plaintext"])
        for name in MESHES:
            figures[f"{what}_{name}_p50_ms"] = round(float(np.median(times[name])) * MS, 3)
        for suffix, quantile in (("", 0.5), ("_quarter", 0.25), ("_three_quarters", 0.75)):
            figures[f"{what}_added_pct{suffix}"] = round(float(np.quantile(ratios, quantile) - 1) * 100, 2)
    return {**figures, "turns": float(len(tickets["plaintext"])), "steps": float(len(steps["plaintext"]))}


async def _start(plan: EnginePlan, name: str, options: BenchOptions, stack: AsyncExitStack) -> Caller:
    mesh = await stack.enter_async_context(run_mesh(plan, options, secure=name == "certificates"))
    await mesh.set_policy(AT_ONCE)
    folder = None if mesh.certificates is None else mesh.certificates / "client-default"
    client = await stack.enter_async_context(Client(mesh.where.scheduler, tls_folder=folder))
    certificates = None if folder is None else Certificates(folder)
    channel = await stack.enter_async_context(open_channel(mesh.where.scheduler, "scheduler", certificates))
    return Caller(client, scheduler_pb2_grpc.SchedulerServiceStub(channel))


async def _time_tickets(caller: Caller, together: int) -> list[float]:
    """Of tickets that are asked for at the same time."""
    ids = [await _open(caller) for _ in range(together)]
    times_s = await asyncio.gather(*(_time_ticket(caller, trajectory_id) for trajectory_id in ids))
    for trajectory_id in ids:
        closing = pb.CloseTrajectoryRequest(
            request_id=uuid.uuid4().hex, trajectory_id=trajectory_id, outcome=pb.OUTCOME_CANCELLED
        )
        await caller.scheduler.CloseTrajectory(closing, timeout=DEADLINE_S)
    return times_s


async def _open(caller: Caller) -> str:
    opening = pb.OpenTrajectoryRequest(request_id=uuid.uuid4().hex, prompt_id="bench", prompt_tokens=len(PROMPT))
    return (await caller.scheduler.OpenTrajectory(opening, timeout=DEADLINE_S)).trajectory.trajectory_id


async def _time_ticket(caller: Caller, trajectory_id: str) -> float:
    request = pb.ScheduleStepRequest(
        request_id=uuid.uuid4().hex,
        trajectory_id=trajectory_id,
        context_tokens=len(PROMPT),
        max_new_tokens=OUTPUT_TOKENS,
    )
    begun_s = time.perf_counter()
    await caller.scheduler.ScheduleStep(request, timeout=DEADLINE_S)
    return time.perf_counter() - begun_s


async def _time_step(caller: Caller) -> float:
    async with await caller.client.open(prompt_id="bench", sample=0, prompt=PROMPT) as trajectory:
        begun_s = time.perf_counter()
        async for _ in trajectory.generate(Sampling(max_new_tokens=OUTPUT_TOKENS, temperature=0.0)):
            pass
        return time.perf_counter() - begun_s


BENCH = Bench(
    "identity",
    "What certificates and sealed tickets cost: ScheduleStep and a step, against a mesh in plaintext, by turns. Takes "
    "about 10 minutes on 2 cores.",
    measure,
    engines=1,
)
