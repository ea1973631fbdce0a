"""What certificates and sealed tickets cost: two meshes of this machine, one of them in plaintext,
measured by turns.

ScheduleStep: first tickets of trajectories, one after the other and MANY at once, TURN on one mesh,
then TURN on the other, which of them begins changing each time. A step: from the request for its
ticket to its last token, on a real engine of each mesh, by turns too; outside: without what the
sidecar accounts for (queue, prefill, decode), which on shared cores varies by more than
certificates can cost. The figures are medians, and medians of the ratio within neighbouring turns.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from treadle.certificates import Certificates, open_channel
from treadle.common.v1.ticket_pb2 import Ticket
from treadle.common.v1.tokens_pb2 import SamplingParams, TokenIds
from treadle.engine.v1 import engine_pb2, engine_pb2_grpc
from treadle.scheduler.v1 import scheduler_pb2 as pb
from treadle.scheduler.v1 import scheduler_pb2_grpc
from treadle.types import pack_ids, seconds
from treadle_cli.mesh.engines import EnginePlan

from treadle_bench.bench import Bench, BenchOptions
from treadle_bench.control_plane.measure import AT_ONCE
from treadle_bench.processes import run_mesh

MS = 1000.0
TURN = 32  # tickets
TURNS = 40  # of each mesh, a repeat; one takes half a second, and its median varies by a tenth
MANY = 8  # tickets at once
STEPS = 5  # of each mesh, a repeat
PROMPT = list(range(1000, 1128))
OUTPUT_TOKENS = 32  # about 2 s on one core
DEADLINE_S = 60.0
MESHES = ("plaintext", "certificates")

Times = dict[str, list[float]]  # of each mesh


class Caller(NamedTuple):
    """Of one mesh."""

    scheduler: scheduler_pb2_grpc.SchedulerServiceAsyncStub
    engine: engine_pb2_grpc.EngineServiceAsyncStub


async def measure(options: BenchOptions) -> dict[str, float]:
    """Raises ProcessError, grpc.aio.AioRpcError."""
    plan = replace(options.engines, count=1, cores=options.engines.cores[:1])
    # In seconds; of tickets the median of each turn.
    tickets, at_once, steps, outside = (Times({name: [] for name in MESHES}) for _ in range(4))
    async with AsyncExitStack() as stack:
        callers = {name: await _start(plan, name, options, stack) for name in MESHES}
        for repeat in range(options.repeats + 1):
            for turn in range(TURNS):
                for name in MESHES if turn % 2 else MESHES[::-1]:
                    for together, kept in ((1, tickets), (MANY, at_once)):
                        rounds = [
                            await _time_tickets(callers[name], together)
                            for _ in range(TURN // together)
                        ]
                        if repeat > 0:  # the first repeat is not counted
                            kept[name].append(float(np.median(rounds)))
            for number in range(STEPS):
                for name in MESHES if number % 2 else MESHES[::-1]:
                    time_s, outside_s = await _time_step(callers[name])
                    if repeat > 0:
                        steps[name].append(time_s)
                        outside[name].append(outside_s)
            options.progress.print(f"repeat {repeat} of {options.repeats}", highlight=False)
    return summarize(tickets, at_once, steps, outside)


def summarize(tickets: Times, at_once: Times, steps: Times, outside: Times) -> dict[str, float]:
    """Times in milliseconds, shares in percent; step_outside_added_pct: of a step in plaintext."""
    figures = {}
    for what, times in (
        ("schedule_step", tickets),
        (f"schedule_step_{MANY}_at_once", at_once),
        ("step", steps),
    ):
        ratios = np.array(times["certificates"]) / np.array(times["plaintext"])
        for name in MESHES:
            figures[f"{what}_{name}_p50_ms"] = round(float(np.median(times[name])) * MS, 3)
        for suffix, quantile in (("", 0.5), ("_quarter", 0.25), ("_three_quarters", 0.75)):
            figures[f"{what}_added_pct{suffix}"] = round(
                float(np.quantile(ratios, quantile) - 1) * 100, 2
            )
    outside_s = {name: float(np.median(outside[name])) for name in MESHES}
    added_s = outside_s["certificates"] - outside_s["plaintext"]
    figures |= {f"step_outside_{name}_p50_ms": round(outside_s[name] * MS, 3) for name in MESHES}
    figures["step_outside_added_pct"] = round(
        added_s / float(np.median(steps["plaintext"])) * 100, 3
    )
    return {
        **figures,
        "turns": float(len(tickets["plaintext"])),
        "steps": float(len(steps["plaintext"])),
    }


async def _start(
    plan: EnginePlan, name: str, options: BenchOptions, stack: AsyncExitStack
) -> Caller:
    mesh = await stack.enter_async_context(run_mesh(plan, options, secure=name == "certificates"))
    await mesh.set_policy(AT_ONCE)
    certificates = (
        None if mesh.certificates is None else Certificates(mesh.certificates / "client-default")
    )
    to_scheduler, to_engine = [
        await stack.enter_async_context(open_channel(address, service, certificates))
        for address, service in (
            (mesh.where.scheduler, "scheduler"),
            (mesh.where.sidecars["engine-0"], "sidecar"),
        )
    ]
    return Caller(
        scheduler_pb2_grpc.SchedulerServiceStub(to_scheduler),
        engine_pb2_grpc.EngineServiceStub(to_engine),
    )


async def _time_tickets(caller: Caller, together: int) -> list[float]:
    """Of tickets that are asked for at the same time."""
    ids = [await _open(caller) for _ in range(together)]
    times_s = await asyncio.gather(*(_time_ticket(caller, trajectory_id) for trajectory_id in ids))
    for trajectory_id in ids:
        await _close(caller, trajectory_id)
    return times_s


async def _open(caller: Caller) -> str:
    opening = pb.OpenTrajectoryRequest(
        request_id=uuid.uuid4().hex, prompt_id="bench", prompt_tokens=len(PROMPT)
    )
    return (
        await caller.scheduler.OpenTrajectory(opening, timeout=DEADLINE_S)
    ).trajectory.trajectory_id


async def _close(caller: Caller, trajectory_id: str) -> None:
    closing = pb.CloseTrajectoryRequest(
        request_id=uuid.uuid4().hex, trajectory_id=trajectory_id, outcome=pb.OUTCOME_CANCELLED
    )
    await caller.scheduler.CloseTrajectory(closing, timeout=DEADLINE_S)


async def _time_ticket(caller: Caller, trajectory_id: str) -> float:
    begun_s = time.perf_counter()
    await _ask(caller, trajectory_id)
    return time.perf_counter() - begun_s


async def _ask(caller: Caller, trajectory_id: str) -> Ticket:
    request = pb.ScheduleStepRequest(
        request_id=uuid.uuid4().hex,
        trajectory_id=trajectory_id,
        context_tokens=len(PROMPT),
        max_new_tokens=OUTPUT_TOKENS,
    )
    return (await caller.scheduler.ScheduleStep(request, timeout=DEADLINE_S)).ticket


async def _time_step(caller: Caller) -> tuple[float, float]:
    """Of a step, and of it what its sidecar does not account for."""
    trajectory_id = await _open(caller)
    begun_s = time.perf_counter()
    request = engine_pb2.GenerateRequest(
        ticket=await _ask(caller, trajectory_id),
        prompt=TokenIds(int32_le=pack_ids(PROMPT)),
        sampling=SamplingParams(max_new_tokens=OUTPUT_TOKENS, temperature=0.0),
    )
    events = [event async for event in caller.engine.Generate(request, timeout=DEADLINE_S)]
    took_s = time.perf_counter() - begun_s
    await _close(caller, trajectory_id)
    timing = events[-1].finished.timing
    return took_s, took_s - seconds(timing.queue) - seconds(timing.prefill) - seconds(timing.decode)


BENCH = Bench(
    "identity",
    "What certificates and sealed tickets cost: ScheduleStep and a step, against a mesh in "
    "plaintext, by turns. Takes about 10 minutes on 2 cores.",
    measure,
    engines=1,
    decides=("runtime/treadle_runtime/identity",),
)
