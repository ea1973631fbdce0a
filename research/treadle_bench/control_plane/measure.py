"""What the control plane costs, on a mesh of this machine with one real engine.

ScheduleStep: first tickets of open trajectories, one call after the other and IN_FLIGHT at once.
Each repeat opens new trajectories, asks for their tickets and closes them; only the tickets are
timed, and nothing is generated.

With facts: IN_FLIGHT trajectories at once take TURNS steps each, and a fact that the step has
finished follows each ticket, as from a sidecar. The rate counts the time until the scheduler has
taken in the last fact.

Sidecar: the same steps through Engine.Generate and through the engine's own HTTP. The two alternate
(A B, then B A, so that a drift of the machine affects both alike), greedy and of fixed length, each
from a cold KV cache. The figure is the median of the differences within pairs. The engine is read
from a bare socket, so that no HTTP library adds to its time. Tickets are requested before the clock
starts.

All calls come from a Python process over loopback, so a figure includes what a Python caller costs.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import time
import uuid
from collections.abc import Coroutine, Iterable, Sequence
from dataclasses import replace
from statistics import median
from typing import Any, NamedTuple, TypeVar
from urllib.parse import urlsplit

import grpc.aio
import numpy as np
from treadle import Client, Trajectory
from treadle.common.v1 import tokens_pb2
from treadle.engine.v1 import engine_pb2, engine_pb2_grpc
from treadle.scheduler.v1 import scheduler_pb2, scheduler_pb2_grpc
from treadle.telemetry.v1 import facts_pb2
from treadle.types import pack_ids
from treadle_cli.mesh.engines import forget_caches
from treadle_cli.mesh.mesh import Mesh
from treadle_runtime.bus import Bus, open_bus
from treadle_runtime.facts import POSITIONS, STREAM, make_fact

from treadle_bench.bench import Bench, BenchOptions
from treadle_bench.processes import run_mesh

Done = TypeVar("Done")

MS = 1000.0
SEQUENTIAL = 128  # trajectories a repeat; 5 repeats give 640 samples, enough for a 99th percentile
IN_FLIGHT = 32
BURST = 512  # trajectories a repeat with IN_FLIGHT calls at once: half a second
CONTEXT_TOKENS, MAX_NEW_TOKENS = 256, 64
DEADLINE_S = 30.0
# The default but for its reserves of KV, by which a ticket would wait for room on the one engine.
AT_ONCE = scheduler_pb2.Policy(
    ordering=scheduler_pb2.ORDERING_PROGRESSIVE,
    placement=scheduler_pb2.PLACEMENT_RULE_PLANNED,
    migrate=True,
    preempt=True,
)
TURNS = 4  # of a trajectory, each with its fact
SCHEDULER = "scheduler"  # the name of its subscription to facts
POLL_S = 0.005

PROMPTS = 4  # a repeat
PROMPT_TOKENS = 128
OUTPUT_TOKENS = 32  # about 2 s on one core, where a token takes 60 ms
HIGHEST_TOKEN_ID = 40_000  # below the vocabulary of every model that the demo serves
STEP_DEADLINE_S = 300.0


async def measure(options: BenchOptions) -> dict[str, float]:
    """Raises ProcessError, grpc.aio.AioRpcError."""
    engine = replace(options.engines, count=1, cores=options.engines.cores[:1])
    async with (
        run_mesh(engine, options) as mesh,
        Client(mesh.where.scheduler) as client,
        grpc.aio.insecure_channel(mesh.where.scheduler) as to_scheduler,
        grpc.aio.insecure_channel(next(iter(mesh.where.sidecars.values()))) as to_sidecar,
        open_bus(mesh.nats_url, "bench") as bus,
    ):
        await mesh.set_policy(AT_ONCE)
        sidecar = engine_pb2_grpc.EngineServiceStub(to_sidecar)
        calls = Calls(client, scheduler_pb2_grpc.SchedulerServiceStub(to_scheduler), sidecar)
        schedule = await _measure_schedule(calls, bus, options)
        return summarize(schedule, await _measure_sidecar(mesh, calls, options))


class Calls(NamedTuple):
    """Who calls the mesh: the client opens and closes trajectories, and the stubs make the calls
    that are timed."""

    client: Client
    scheduler: scheduler_pb2_grpc.SchedulerServiceAsyncStub
    sidecar: engine_pb2_grpc.EngineServiceAsyncStub

    async def open(self, prompt: Sequence[int]) -> Trajectory:
        return await self.client.open(prompt_id="bench", sample=0, prompt=prompt)

    async def schedule(
        self, request: scheduler_pb2.ScheduleStepRequest
    ) -> scheduler_pb2.ScheduleStepResponse:
        return await self.scheduler.ScheduleStep(request, timeout=DEADLINE_S)


def _step(
    trajectory: Trajectory, max_new_tokens: int, turn: int = 0
) -> scheduler_pb2.ScheduleStepRequest:
    return scheduler_pb2.ScheduleStepRequest(
        request_id=uuid.uuid4().hex,
        trajectory_id=trajectory.trajectory_id,
        turn=turn,
        context_tokens=len(trajectory.tokens) + turn * max_new_tokens,
        max_new_tokens=max_new_tokens,
    )


class ScheduleTimes(NamedTuple):
    """sequential_s, in_flight_s: of single calls. rates: calls a second with IN_FLIGHT at once, one
    for each repeat. with_facts_s, rates_with_facts: the same where a fact follows each ticket."""

    sequential_s: list[float]
    in_flight_s: list[float]
    rates: list[float]
    with_facts_s: list[float]
    rates_with_facts: list[float]


class StepTime(NamedTuple):
    """Seconds from the request to the first token, and to the end."""

    first_token_s: float
    whole_s: float


def summarize(
    schedule: ScheduleTimes, pairs: Sequence[tuple[StepTime, StepTime]]
) -> dict[str, float]:
    """The figures: times in milliseconds, shares in percent. pairs: (engine alone, through the
    sidecar)."""

    def quantiles(name: str, times_s: Sequence[float]) -> dict[str, float]:
        p50, p99 = (
            round(float(np.quantile(times_s, quantile)) * MS, 3) for quantile in (0.50, 0.99)
        )
        return {f"{name}_p50_ms": p50, f"{name}_p99_ms": p99}

    first_added_s = median(through.first_token_s - alone.first_token_s for alone, through in pairs)
    step_added = median(through.whole_s / alone.whole_s - 1 for alone, through in pairs)
    added_s = median(through.whole_s - alone.whole_s for alone, through in pairs)
    return {
        **quantiles("schedule_step", schedule.sequential_s),
        "schedule_steps_per_s": round(median(schedule.rates), 1),
        "sidecar_first_token_added_ms": round(first_added_s * MS, 3),
        "sidecar_step_added_pct": round(step_added * 100, 3),
        **quantiles("schedule_step_in_flight", schedule.in_flight_s),
        **quantiles("step_with_facts", schedule.with_facts_s),
        "steps_with_facts_per_s": round(median(schedule.rates_with_facts), 1),
        "schedule_step_samples": float(len(schedule.sequential_s)),
        "engine_first_token_ms": round(median(alone.first_token_s for alone, _ in pairs) * MS, 3),
        "engine_step_ms": round(median(alone.whole_s for alone, _ in pairs) * MS, 3),
        "sidecar_step_added_ms_per_token": round(added_s / OUTPUT_TOKENS * MS, 4),
        "sidecar_pairs": float(len(pairs)),
        "cpus": float(len(os.sched_getaffinity(0))),
    }


async def _measure_schedule(calls: Calls, bus: Bus, options: BenchOptions) -> ScheduleTimes:
    """The first repeat is not counted."""
    prompt = [0] * CONTEXT_TOKENS
    found = ScheduleTimes([], [], [], [], [])
    for repeat in range(options.repeats + 1):
        sequential = await _gather(calls.open(prompt) for _ in range(SEQUENTIAL))
        alone_s = [await _time_ticket(calls, trajectory) for trajectory in sequential]
        burst = await _gather(calls.open(prompt) for _ in range(BURST))
        begun_s = time.perf_counter()
        together_s = await _time_tickets(calls, burst)
        rate = len(burst) / (time.perf_counter() - begun_s)
        await _gather(trajectory.close(outcome="cancelled") for trajectory in (*sequential, *burst))
        stepping = await _gather(calls.open(prompt) for _ in range(BURST))
        begun_s = time.perf_counter()
        with_facts_s = await _take_steps(calls, bus, stepping)
        rate_with_facts = len(with_facts_s) / (time.perf_counter() - begun_s)
        await _gather(trajectory.close(outcome="cancelled") for trajectory in stepping)
        if repeat > 0:
            found.sequential_s.extend(alone_s)
            found.in_flight_s.extend(together_s)
            found.rates.append(rate)
            found.with_facts_s.extend(with_facts_s)
            found.rates_with_facts.append(rate_with_facts)
            options.progress.print(
                f"ScheduleStep {repeat}/{options.repeats}: {rate:.0f} a second, "
                f"{rate_with_facts:.0f} with facts",
                highlight=False,
            )
    return found


async def _gather(calls: Iterable[Coroutine[Any, Any, Done]]) -> list[Done]:
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(call) for call in calls]
    return [task.result() for task in tasks]


async def _time_ticket(calls: Calls, trajectory: Trajectory) -> float:
    request = _step(trajectory, MAX_NEW_TOKENS)
    begun_s = time.perf_counter()
    await calls.schedule(request)
    return time.perf_counter() - begun_s


async def _time_tickets(calls: Calls, trajectories: Sequence[Trajectory]) -> list[float]:
    left = iter(trajectories)

    async def work() -> list[float]:
        return [await _time_ticket(calls, trajectory) for trajectory in left]

    return [
        time_s for times_s in await _gather(work() for _ in range(IN_FLIGHT)) for time_s in times_s
    ]


async def _take_steps(calls: Calls, bus: Bus, trajectories: Sequence[Trajectory]) -> list[float]:
    """Seconds of each ticket; returns once the scheduler has taken in the facts of all steps."""
    left, times_s = iter(trajectories), []

    async def work() -> None:
        for trajectory in left:
            for turn in range(TURNS):
                request = _step(trajectory, MAX_NEW_TOKENS, turn)
                begun_s = time.perf_counter()
                ticket = (await calls.schedule(request)).ticket
                times_s.append(time.perf_counter() - begun_s)
                step = facts_pb2.StepRef(
                    ticket_id=ticket.ticket_id,
                    trajectory_id=trajectory.trajectory_id,
                    turn=turn,
                    engine_id=ticket.engine_id,
                )
                finished = facts_pb2.StepFinished(
                    step=step, context_tokens=request.context_tokens, output_tokens=MAX_NEW_TOKENS
                )
                await bus.publish(make_fact("bench", step_finished=finished))

    await _gather(work() for _ in range(IN_FLIGHT))
    await bus.flush()
    last = (await bus.jetstream.stream_info(STREAM)).state.last_seq
    positions = await bus.key_value(POSITIONS)
    while True:
        if json.loads((await positions.get(SCHEDULER)).value or b"{}")["next"] > last:
            return times_s
        await asyncio.sleep(POLL_S)


async def _measure_sidecar(
    mesh: Mesh, calls: Calls, options: BenchOptions
) -> list[tuple[StepTime, StepTime]]:
    """PROMPTS pairs a repeat (engine alone, through the sidecar); a first pair is not counted."""
    rng = random.Random(options.seed)
    pairs: list[tuple[StepTime, StepTime]] = []
    for number in range(options.repeats * PROMPTS + 1):
        prompt = [rng.randrange(HIGHEST_TOKEN_ID) for _ in range(PROMPT_TOKENS)]
        times: dict[str, StepTime] = {}
        for side in ("alone", "through") if number % 2 else ("through", "alone"):
            await forget_caches(mesh.engines, mesh.kv.folder, mesh.board.note)
            step = (
                time_engine(mesh.engines[0].url, prompt, mesh.engines[0].key)
                if side == "alone"
                else _time_sidecar(calls, prompt)
            )
            times[side] = await step
        if number > 0:
            pairs.append((times["alone"], times["through"]))
        if number and number % PROMPTS == 0:
            options.progress.print(f"steps {number // PROMPTS}/{options.repeats}", highlight=False)
    return pairs


async def time_engine(url: str, prompt: list[int], key: str = "") -> StepTime:
    """One step at the engine's /generate, with the sidecar's parameters. key: of the engine; empty:
    it has none. Raises OSError, ValueError."""
    parts = urlsplit(url)
    sampling = {
        "max_new_tokens": OUTPUT_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "sampling_seed": 0,
    }
    body = json.dumps(
        {
            "rid": uuid.uuid4().hex,
            "input_ids": prompt,
            "sampling_params": {**sampling, "skip_special_tokens": False},
            "cache_salt": "bench",
            "stream": True,
            "return_logprob": True,
        }
    ).encode()
    head = (
        f"POST /generate HTTP/1.1\r\nHost: {parts.netloc}\r\nContent-Type: "
        f"application/json\r\nAuthorization: Bearer {key}\r\nConnection: close\r\n"
    )
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
    try:
        begun_s, first_s, received = time.perf_counter(), 0.0, 0
        writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        async with asyncio.timeout(STEP_DEADLINE_S):
            async for line in reader:
                if line.startswith(b"data: {"):
                    received = int(json.loads(line[6:])["meta_info"]["completion_tokens"])
                    first_s = first_s or time.perf_counter()
                elif line.startswith(b"data: [DONE]"):
                    break
        ended_s = time.perf_counter()
    finally:
        writer.close()
        await writer.wait_closed()
    if received != OUTPUT_TOKENS:
        raise ValueError(f"the engine gave {received} of {OUTPUT_TOKENS} tokens")
    return StepTime(first_s - begun_s, ended_s - begun_s)


async def _time_sidecar(calls: Calls, prompt: list[int]) -> StepTime:
    trajectory = await calls.open(prompt)
    request = engine_pb2.GenerateRequest(
        ticket=(await calls.schedule(_step(trajectory, OUTPUT_TOKENS))).ticket,
        prompt=tokens_pb2.TokenIds(int32_le=pack_ids(prompt)),
        sampling=tokens_pb2.SamplingParams(
            max_new_tokens=OUTPUT_TOKENS, temperature=0.0, ignore_eos=True
        ),
    )
    begun_s, first_s, received = time.perf_counter(), 0.0, 0
    async for event in calls.sidecar.Generate(request, timeout=STEP_DEADLINE_S):
        if event.WhichOneof("event") == "tokens":
            first_s = first_s or time.perf_counter()
            received += len(event.tokens.token_ids.int32_le) // 4
    ended_s = time.perf_counter()
    await trajectory.close(outcome="cancelled")
    if received != OUTPUT_TOKENS:
        raise ValueError(f"the sidecar gave {received} of {OUTPUT_TOKENS} tokens")
    return StepTime(first_s - begun_s, ended_s - begun_s)


BENCH = Bench(
    "control-plane",
    "What the control plane costs: ScheduleStep alone and 32 in flight, and a step through the "
    "sidecar against the engine's HTTP alone. Takes about 4 minutes on 2 cores.",
    measure,
    engines=1,
    decides=("services/scheduler", "services/sidecar"),
)
