"""Measures engines through the mesh that they will be used through, in the profile format of sim/README.md.

All engines are measured at the same time and by the same client as in the plays, because they share their cores with
the services and the client. Steps: batches of 1 to `slots` at each of DECODE_CONTEXTS, while the batch is whole.
Prefills: alone on the engine, first a prompt that nobody has seen, then the same context with something new behind it.
A pulse is one full batch: a shared machine is not always as fast as while its profile was taken.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from treadle import Client
from treadle.scheduler.v1.scheduler_pb2 import RegisteredEngine

from treadle_bench.fidelity.live import generate
from treadle_bench.fidelity.trace import HIGHEST_TOKEN_ID
from treadle_bench.samples import Samples

DECODE_CONTEXTS = (80, 400)  # tokens: a young trajectory of the trace, and an old one
DECODE_TOKENS = 20
PULSE_CONTEXT = 160
PREFILL_CONTEXTS = (64, 160, 400)
PREFILL_OBSERVED = (12, 30, 56)  # tokens put behind the context, one after the other
PREFILL_TOKENS = 4  # sampled after each
PREFILL_ROUNDS = 3
REST_S = 0.2  # between prefills, so that what the engine writes to storage is written

Rows = list[dict[str, float]]


@dataclass(frozen=True, slots=True)
class Measured:
    """profiles: by engine id, as fit_measured takes them. queue_s: what steps waited that found a slot free: two calls
    and no queue."""

    profiles: dict[str, dict[str, Any]]
    queue_s: Samples


async def measure(client: Client, engines: Sequence[RegisteredEngine], seed: int) -> Measured:
    """About a minute for five slots. Raises TreadleError, ValueError."""
    rng = random.Random(f"profile {seed}")
    ids = [engine.info.engine_id for engine in engines]
    decode: dict[str, Rows] = {engine_id: [] for engine_id in ids}
    prefill: dict[str, Rows] = {engine_id: [] for engine_id in ids}
    queue_s = Samples()
    slots = min(engine.info.slot_limit for engine in engines)
    for context, batch in itertools.product(DECODE_CONTEXTS, range(1, slots + 1)):
        for engine_id, rows in (await _batches(client, rng, ids, batch, context)).items():
            decode[engine_id] += rows
    for _, context in itertools.product(range(PREFILL_ROUNDS), PREFILL_CONTEXTS):
        async with asyncio.TaskGroup() as group:
            growing = [group.create_task(_growing(client, rng, engine_id, context)) for engine_id in ids]
        for engine_id, grown in zip(ids, growing, strict=True):
            prefill[engine_id] += grown.result()[0]
            queue_s += grown.result()[1]
    profiles = {
        engine.info.engine_id: _document(engine, decode[engine.info.engine_id], prefill[engine.info.engine_id])
        for engine in engines
    }
    return Measured(profiles, queue_s)


async def pulse(client: Client, engines: Sequence[RegisteredEngine], seed: str) -> dict[str, Rows]:
    """Decode rows of one full batch on each engine, in some 4 s. Raises TreadleError, ValueError."""
    slots = min(engine.info.slot_limit for engine in engines)
    ids = [engine.info.engine_id for engine in engines]
    return await _batches(client, random.Random(f"pulse {seed}"), ids, slots, PULSE_CONTEXT)


def decode_rows(came_s: Sequence[Sequence[float]], context: int) -> Rows:
    """A row of the profile for each sequence of a batch: seconds a token while all of them decode. came_s: when each
    token of each sequence came, the first after its prefill; context: tokens of each at its start."""
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
    async with asyncio.TaskGroup() as group:
        tasks = {
            engine_id: group.create_task(_batch(client, rng, engine_id, batch, context)) for engine_id in engine_ids
        }
    return {engine_id: decode_rows(task.result(), context) for engine_id, task in tasks.items()}


async def _batch(client: Client, rng: random.Random, engine_id: str, batch: int, context: int) -> list[list[float]]:
    """When each token of each sequence of a batch came."""
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(_alone(client, engine_id, _tokens(rng, context))) for _ in range(batch)]
    return [task.result() for task in tasks]


async def _alone(client: Client, engine_id: str, prompt: list[int]) -> list[float]:
    async with await client.open(
        prompt_id="profile", sample=0, prompt=prompt, pinned_engine_id=engine_id
    ) as trajectory:
        return await generate(trajectory, DECODE_TOKENS)


async def _growing(client: Client, rng: random.Random, engine_id: str, context: int) -> tuple[Rows, list[float]]:
    """Prefills of one growing context, and what each of its steps waited."""
    rows, queue_s = [], []
    async with await client.open(
        prompt_id="profile", sample=0, prompt=_tokens(rng, context), pinned_engine_id=engine_id
    ) as trajectory:
        for observed in (0, *PREFILL_OBSERVED):
            trajectory.observe(_tokens(rng, observed))
            length = len(trajectory.tokens)
            await generate(trajectory, PREFILL_TOKENS)
            step = trajectory.steps[-1]
            queue_s.append(step.queue_s)
            rows.append(
                {
                    "new_tokens": length - step.cached_tokens,
                    "cached_tokens": step.cached_tokens,
                    "seconds": step.prefill_s,
                }
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
