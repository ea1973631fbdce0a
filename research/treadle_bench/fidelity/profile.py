"""Measures engines and the control plane of a mesh for its simulation, through the mesh itself.

All engines are measured at the same time and by the same client as in the plays, because they share
their cores with the services and the client. The profile has the format of sim/README.md. Decode
steps: batches of 1 to `slots` at each of DECODE_CONTEXTS, while the batch is whole. Prefills: alone
on the engine, first an unknown prompt, then the same context with new tokens behind it. A pulse is
one full batch: it shows how fast the machine is at that moment. Of the control plane: seconds of
tickets, predictions, plans and moves.
"""

import asyncio
import itertools
import math
import random
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import grpc.aio
import numpy as np
from treadle import Client
from treadle.migrator.v1 import migrator_pb2_grpc
from treadle.placement.v1 import placement_pb2, placement_pb2_grpc
from treadle.scheduler.v1 import scheduler_pb2_grpc
from treadle.scheduler.v1.scheduler_pb2 import RegisteredEngine
from treadle_cli.mesh.mesh import Mesh
from treadle_sim.cluster import Latencies, Link

from treadle_bench.fidelity.live import HIGHEST_TOKEN_ID, generate
from treadle_bench.moves import infos_of, move_away

DECODE_CONTEXTS = (80, 400)  # tokens: a young trajectory of the trace, and an old one
DECODE_TOKENS = 20
PULSE_CONTEXT = 160
PREFILL_CONTEXTS = (64, 160, 400)
PREFILL_OBSERVED = (12, 30, 56)  # tokens put behind the context, one after the other
PREFILL_TOKENS = 4  # sampled after each
PREFILL_ROUNDS = 3
REST_S = 0.2  # between prefills, so that the engine can finish its writes to storage
CALL_TIMEOUT_S = 30.0
PLANS, PLAN_TRAJECTORIES = 9, 32
MOVES, MOVE_CONTEXT, MOVE_TOKENS = 4, 200, 8
# What a plan needs to know of an engine, by the same name in what the sidecar registers.
PLACEMENT_KEYS = (
    "engine_id",
    "slot_limit",
    "kv_tokens_capacity",
    "tensor_parallel",
    "decode_curve",
)

Rows = list[dict[str, float]]


async def measure_engines(
    client: Client, engines: Sequence[RegisteredEngine], seed: int
) -> tuple[dict[str, dict[str, Any]], list[float]]:
    """A profile for `fit_measured` by engine id, and seconds in the queue of steps that found a
    slot free, which is the time of two calls. Takes about a minute for five slots. Raises
    TreadleError, ValueError."""
    rng = random.Random(f"profile {seed}")
    ids = [engine.info.engine_id for engine in engines]
    decode: dict[str, Rows] = defaultdict(list)
    prefill: dict[str, Rows] = defaultdict(list)
    queue_s: list[float] = []
    slots = min(engine.info.slot_limit for engine in engines)
    for context, batch in itertools.product(DECODE_CONTEXTS, range(1, slots + 1)):
        for engine_id, rows in (await _batches(client, rng, ids, batch, context)).items():
            decode[engine_id] += rows
    for _, context in itertools.product(range(PREFILL_ROUNDS), PREFILL_CONTEXTS):
        async with asyncio.TaskGroup() as group:
            growing = {
                each: group.create_task(_growing(client, rng, each, context)) for each in ids
            }
        for engine_id, grown in growing.items():
            rows, waited_s = grown.result()
            prefill[engine_id] += rows
            queue_s += waited_s
    found = {
        each: _document(engine, decode[each], prefill[each])
        for each, engine in zip(ids, engines, strict=True)
    }
    return found, queue_s


async def measure_pulse(
    client: Client, engines: Sequence[RegisteredEngine], seed: str
) -> dict[str, Rows]:
    """Decode rows of one full batch on each engine; takes about 4 s. Raises TreadleError,
    ValueError."""
    slots = min(engine.info.slot_limit for engine in engines)
    ids = [engine.info.engine_id for engine in engines]
    return await _batches(client, random.Random(f"pulse {seed}"), ids, slots, PULSE_CONTEXT)


def decode_rows(came_s: Sequence[Sequence[float]], context: int) -> Rows:
    """A row of the profile for each sequence of a batch: seconds of a token while all sequences
    decode. came_s: when each token of each sequence came, the first after its prefill. context:
    tokens of each sequence at its start."""
    whole_s, broken_s = max(times[0] for times in came_s), min(times[-1] for times in came_s)
    rows = []
    for times in came_s:
        within = [number for number, at_s in enumerate(times) if whole_s <= at_s <= broken_s]
        if len(within) > 1:
            first, last = within[0], within[-1]
            rows.append(
                {
                    "batch": len(came_s),
                    "kv_tokens": len(came_s) * (context + (first + last) / 2),
                    "step_s": (times[last] - times[first]) / (last - first),
                }
            )
    return rows


async def _batches(
    client: Client, rng: random.Random, engine_ids: Sequence[str], batch: int, context: int
) -> dict[str, Rows]:
    """The same batch on all engines at once."""

    async def generate_alone(engine_id: str, prompt: list[int]) -> list[float]:
        opening = client.open(
            prompt_id="profile", sample=0, prompt=prompt, pinned_engine_id=engine_id
        )
        async with await opening as trajectory:
            return await generate(trajectory, DECODE_TOKENS)

    async with asyncio.TaskGroup() as group:
        tasks = {
            engine_id: [
                group.create_task(generate_alone(engine_id, _tokens(rng, context)))
                for _ in range(batch)
            ]
            for engine_id in engine_ids
        }
    return {
        name: decode_rows([task.result() for task in of_engine], context)
        for name, of_engine in tasks.items()
    }


async def _growing(
    client: Client, rng: random.Random, engine_id: str, context: int
) -> tuple[Rows, list[float]]:
    """Prefill rows of one growing context, and the queue seconds of each of its steps."""
    rows, queue_s = [], []
    prompt = _tokens(rng, context)
    opening = client.open(prompt_id="profile", sample=0, prompt=prompt, pinned_engine_id=engine_id)
    async with await opening as trajectory:
        for observed in (0, *PREFILL_OBSERVED):
            trajectory.observe(_tokens(rng, observed))
            length = len(trajectory.tokens)
            await generate(trajectory, PREFILL_TOKENS)
            step = trajectory.steps[-1]
            queue_s.append(step.queue_s)
            cached = step.cached_tokens
            rows.append(
                {"new_tokens": length - cached, "cached_tokens": cached, "seconds": step.prefill_s}
            )
            await asyncio.sleep(REST_S)
    return rows, queue_s


def _tokens(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(HIGHEST_TOKEN_ID) for _ in range(count)]


def _document(engine: RegisteredEngine, decode: Rows, prefill: Rows) -> dict[str, Any]:
    info = engine.info
    return {
        "accelerator": "core",
        "llm": info.model.rpartition("/")[2],
        "gpus": max(1, info.tensor_parallel),
        "slots": info.slot_limit,
        "kv_tokens": info.kv_tokens_capacity,
        "kv_bytes_per_token": info.kv_bytes_per_token,
        "decode": decode,
        "prefill": prefill,
        "page_tokens": math.gcd(*(int(row["cached_tokens"]) for row in prefill)) or 1,
    }


@dataclass(frozen=True, slots=True)
class Control:
    """Latencies of the simulated control plane."""

    latencies: Latencies
    link: Link


async def measure_control(
    mesh: Mesh,
    client: Client,
    engines: Sequence[RegisteredEngine],
    queue_s: Sequence[float],
    predict_s: Sequence[float],
) -> Control:
    """queue_s: of steps that found a slot free. predict_s: from a step's end to the prediction that
    followed it. Raises statistics.StatisticsError where one is empty."""
    plan_s = await _time_plans(mesh.where.services["placement"], engines)
    moves_s = await _time_moves(mesh, client, engines)
    return Control(
        Latencies(predict_s=median(predict_s), plan_s=median(plan_s), rpc_s=median(queue_s)),
        Link(fixed_s=median(moves_s)),
    )


async def _time_plans(placement: str, engines: Sequence[RegisteredEngine]) -> list[float]:
    request = placement_pb2.PlanPlacementRequest(
        cost_model=placement_pb2.COST_MODEL_LINEAR_INTEGRAL
    )
    request.columns.CopyFrom(_columns_of_plan())
    for engine in engines:
        request.engines.add(**{key: getattr(engine.info, key) for key in PLACEMENT_KEYS})
    taken_s: list[float] = []
    async with grpc.aio.insecure_channel(placement) as channel:
        stub = placement_pb2_grpc.PlacementServiceStub(channel)
        for _ in range(PLANS + 1):
            begun_s = time.perf_counter()
            await stub.PlanPlacement(request, timeout=CALL_TIMEOUT_S)
            taken_s.append(time.perf_counter() - begun_s)
    return taken_s[1:]  # the first one compiles


def _columns_of_plan() -> placement_pb2.PlacedColumns:
    numbers = np.arange(PLAN_TRAJECTORIES)
    zeros = np.zeros(PLAN_TRAJECTORIES, "<f8").tobytes()
    return placement_pb2.PlacedColumns(
        remaining_tokens_float64=(50.0 + numbers).astype("<f8").tobytes(),
        context_tokens_float64=np.full(PLAN_TRAJECTORIES, 200.0, "<f8").tobytes(),
        current_engine_int32=np.full(PLAN_TRAJECTORIES, -1, "<i4").tobytes(),
        log_sigma_float64=zeros,
        room_tokens_float64=zeros,
        remaining_tool_s_float64=zeros,
        remaining_observed_tokens_float64=zeros,
        prompt_int32=numbers.astype("<i4").tobytes(),
        started_uint8=bytes(PLAN_TRAJECTORIES),
        unread_uint8=bytes(PLAN_TRAJECTORIES),
    )


async def _time_moves(
    mesh: Mesh, client: Client, engines: Sequence[RegisteredEngine]
) -> list[float]:
    """Seconds of moves, from the migrator, of a context of about MOVE_CONTEXT tokens between its
    steps."""
    taken_s: list[float] = []
    async with (
        grpc.aio.insecure_channel(mesh.where.services["migrator"]) as to_migrator,
        grpc.aio.insecure_channel(mesh.where.scheduler) as to_scheduler,
    ):
        migrator = migrator_pb2_grpc.MigratorServiceStub(to_migrator)
        scheduler = scheduler_pb2_grpc.SchedulerServiceStub(to_scheduler)
        for number in range(MOVES):
            prompt = [(number * MOVE_CONTEXT + at) % HIGHEST_TOKEN_ID for at in range(MOVE_CONTEXT)]
            async with await client.open(
                prompt_id="move", sample=number, prompt=prompt
            ) as trajectory:
                await generate(trajectory, MOVE_TOKENS)
                move = await move_away(migrator, scheduler, trajectory, infos_of(engines))
                taken_s.append(
                    float(move.ended_at.ToNanoseconds() - move.started_at.ToNanoseconds()) / 1e9
                )
    return taken_s
