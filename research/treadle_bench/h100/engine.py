"""One SGLang engine asked over its own HTTP server, without a sidecar: what its decode steps,
prefills and preemptions take.

A decode step's time is the difference between two batches that differ in their length alone, over
the difference: what a request takes beside its steps cancels out. Prompts are cached before, and
are random tokens that no other row shares.
"""

import asyncio
import json
import random
import time
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from statistics import median
from typing import Any, NamedTuple

import aiohttp
from treadle_core.model import DecodeCurve
from treadle_runtime.http.sglang import IDLE_CONNECTION_S

from treadle_bench.fidelity.live import HIGHEST_TOKEN_ID

TIMEOUT_S = 300.0
SHORT_TOKENS, LONG_TOKENS = 8, 72
MS = 1e3
# Other requests while one is preempted: longer than the measurement takes; their prefill is over
# after FILL_S.
FILL_TOKENS, FILL_S = 4_000, 1.5
FILL_PRIORITY, SHORT_PRIORITY = 100, 1_000  # a difference of more than 10 preempts


class Tokens(NamedTuple):
    """A chunk of a stream. cached: prompt tokens whose KV the engine had."""

    token_ids: Sequence[int]
    cached: int
    finish: str


def open_session(key: str = "") -> aiohttp.ClientSession:
    """For any number of requests at once, on connections that are never as old as SGLang lets them
    be. key: of the engines; empty: they have none."""
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=IDLE_CONNECTION_S)
    return aiohttp.ClientSession(
        timeout=aiohttp.ClientTimeout(TIMEOUT_S),
        connector=connector,
        headers={"Authorization": f"Bearer {key}"} if key else None,
    )


def draw_tokens(rng: random.Random, count: int) -> list[int]:
    """Random token ids."""
    return [rng.randrange(HIGHEST_TOKEN_ID) for _ in range(count)]


class RawEngine:
    """An engine at `url`; every request is greedy and of exactly the length that is asked for."""

    def __init__(self, http: aiohttp.ClientSession, url: str) -> None:
        self._http = http
        self.url = url

    async def stream(
        self, input_ids: Sequence[int], tokens: int, *, rid: str = "", **more: object
    ) -> AsyncIterator[Tokens]:
        """The tokens as they come. more: fields of SGLang's request."""
        sampling = {"max_new_tokens": tokens, "temperature": 0.0, "ignore_eos": True}
        body = {
            "rid": rid or uuid.uuid4().hex,
            "input_ids": list(input_ids),
            "sampling_params": sampling,
            **more,
        }
        # as a trainer needs them, and as the sidecar asks
        body |= {"stream": True, "return_logprob": True}
        async with self._http.post(
            f"{self.url}/generate", json=body, raise_for_status=True
        ) as answer:
            async for line in answer.content:
                if line.startswith(b"data: {"):
                    chunk = json.loads(line[6:])
                    meta = chunk["meta_info"]
                    finish = (meta.get("finish_reason") or {}).get("type", "")
                    yield Tokens(chunk["output_ids"], meta.get("cached_tokens", 0), finish)

    async def batch(self, prompts: Sequence[Sequence[int]], tokens: int, **more: object) -> float:
        """Seconds in which all prompts get so many tokens, asked for in one request. more: fields
        of it."""
        sampling = {"max_new_tokens": tokens, "temperature": 0.0, "ignore_eos": True}
        body = {
            "input_ids": [list(prompt) for prompt in prompts],
            "sampling_params": sampling,
            **more,
        }
        began_s = time.perf_counter()
        async with self._http.post(
            f"{self.url}/generate", json=body, raise_for_status=True
        ) as answer:
            await answer.read()
        return time.perf_counter() - began_s

    async def abort(self, rid: str) -> None:
        """End a request; its stream ends with what was sampled."""
        async with self._http.post(
            f"{self.url}/abort_request", json={"rid": rid}, raise_for_status=True
        ):
            pass

    async def abort_all(self) -> None:
        """End all requests."""
        async with self._http.post(
            f"{self.url}/abort_request", json={"abort_all": True}, raise_for_status=True
        ):
            pass


async def measure_decode(
    engine: RawEngine, sizes: Sequence[tuple[int, Sequence[int]]], repeats: int, rng: random.Random
) -> list[dict[str, Any]]:
    """A row for each context and batch of `sizes`, batches in rising order: milliseconds of a step,
    and least and greatest of the repeats."""
    rows = []
    for context, batches in sizes:
        prompts: list[list[int]] = []
        for batch in batches:
            prompts += [draw_tokens(rng, context) for _ in range(batch - len(prompts))]
            await engine.batch(prompts, 1)
            steps_ms = []
            for _ in range(repeats):
                short_s = await engine.batch(prompts, SHORT_TOKENS)
                long_s = await engine.batch(prompts, LONG_TOKENS)
                steps_ms.append((long_s - short_s) / (LONG_TOKENS - SHORT_TOKENS) * MS)
            kv_tokens = batch * (context + (SHORT_TOKENS + LONG_TOKENS) // 2)
            row = {
                "context": context,
                "batch": batch,
                "kv_tokens": kv_tokens,
                "step_ms": median(steps_ms),
            }
            rows.append({**row, "spread_ms": [min(steps_ms), max(steps_ms)]})
    return rows


async def measure_prefill(
    engine: RawEngine, lengths: Sequence[int], repeats: int, rng: random.Random
) -> list[dict[str, Any]]:
    """A row for each length: seconds from a request of that many unknown tokens to its first token,
    alone."""
    rows = []
    for length in lengths:
        taken_s = [await engine.batch([draw_tokens(rng, length)], 1) for _ in range(repeats + 1)][
            1:
        ]
        seconds = median(taken_s)
        row = {"tokens": length, "seconds": seconds, "tokens_per_s": length / seconds}
        rows.append({**row, "spread_s": [min(taken_s), max(taken_s)]})
    return rows


def add_declared(
    decode: Sequence[dict[str, Any]], prefill: Sequence[dict[str, Any]], curve: DecodeCurve
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The same rows with what the curve says of them: `declared_ms` and `declared_s`."""

    def step_s(row: Mapping[str, Any]) -> float:
        each_s = curve.per_sequence_s * row["batch"] + curve.per_kv_token_s * row["kv_tokens"]
        return curve.base_s + float(each_s)

    def prefill_s(row: Mapping[str, Any]) -> float:
        tokens = int(row["tokens"])
        return tokens / curve.prefill_tokens_per_s + curve.prefill_pair_s * tokens * tokens / 2

    steps = [{**row, "declared_ms": step_s(row) * MS} for row in decode]
    return steps, [{**row, "declared_s": prefill_s(row)} for row in prefill]


@asynccontextmanager
async def fill_slots(engine: RawEngine, count: int, rng: random.Random) -> AsyncIterator[None]:
    """So many other requests decode on the engine within the block."""
    prompts = [draw_tokens(rng, SHORT_TOKENS) for _ in range(count)]
    filling = asyncio.create_task(engine.batch(prompts, FILL_TOKENS, priority=FILL_PRIORITY))
    await asyncio.sleep(FILL_S)
    try:
        yield
    finally:
        await engine.abort_all()
        await filling


async def resume_by_abort(
    engine: RawEngine, prompt: Sequence[int], ahead: int, rng: random.Random
) -> float:
    """Seconds from the end of a short request to the next token of the one that made room for it,
    as a sidecar does: abort, run the short one, send the first again with what it had."""
    rid = uuid.uuid4().hex
    tokens: list[int] = []
    async for chunk in engine.stream(prompt, ahead + LONG_TOKENS, rid=rid, priority=0):
        tokens += chunk.token_ids
        if len(tokens) >= ahead and not chunk.finish:
            await engine.abort(rid)
    await _run_short(engine, rng)
    began_s = time.perf_counter()
    async for _ in engine.stream([*prompt, *tokens], SHORT_TOKENS, priority=0):
        return time.perf_counter() - began_s
    raise ValueError("a request that was sent again ended without a token")


async def resume_by_priority(
    engine: RawEngine, prompt: Sequence[int], ahead: int, rng: random.Random
) -> float:
    """The same as SGLang does where all its slots are taken (--enable-priority-scheduling): the
    request of least priority makes room, and loses the KV of what it has sampled."""
    came_s: list[float] = []
    far_enough = asyncio.Event()

    async def run_victim() -> None:
        length = 0
        async for chunk in engine.stream(prompt, ahead + LONG_TOKENS, priority=0):
            came_s.append(time.perf_counter())
            length += len(chunk.token_ids)
            if length >= ahead:
                far_enough.set()

    victim = asyncio.create_task(run_victim())
    await far_enough.wait()
    await _run_short(engine, rng)
    ended_s = time.perf_counter()
    await victim
    after_s = [at_s for at_s in came_s if at_s > ended_s]
    if not after_s:
        raise ValueError("the request of least priority had ended before the short one did")
    return after_s[0] - ended_s


async def _run_short(engine: RawEngine, rng: random.Random) -> None:
    async for _ in engine.stream(
        draw_tokens(rng, SHORT_TOKENS), SHORT_TOKENS, priority=SHORT_PRIORITY
    ):
        pass


async def compare_streams(
    engine: RawEngine, streams: int, prompt_tokens: int, tokens: int, rng: random.Random
) -> dict[str, float]:
    """So many streams at once, straight from the engine: seconds to the first token and
    milliseconds of a token."""

    async def run_one(prompt: list[int]) -> tuple[float, float]:
        began_s = time.perf_counter()
        came_s = [time.perf_counter() - began_s async for _ in engine.stream(prompt, tokens)]
        return came_s[0], (came_s[-1] - came_s[0]) / (tokens - 1)

    pairs = await asyncio.gather(
        *(run_one(draw_tokens(rng, prompt_tokens)) for _ in range(streams))
    )
    return describe_streams(pairs)


def describe_streams(pairs: Sequence[tuple[float, float]]) -> dict[str, float]:
    """Medians over streams of seconds to the first token and of seconds of a token, the latter in
    milliseconds."""
    return {
        "first_s": median(first_s for first_s, _ in pairs),
        "token_ms": median(each for _, each in pairs) * MS,
    }
