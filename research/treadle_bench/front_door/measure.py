"""Measure what the front door costs.

A request goes through gateway, scheduler and sidecar, and the same one straight to the engine, by
turns on one real engine.

A conversation has TURNS turns. Each is asked twice, straight and through the gateway, as a stream
and greedily, one after the other, which of them is first changing each time; the two ways have KV
of their own (the mesh salts it), so that neither finds what the other has computed. The first turn
opens a trajectory; later ones go on with it.

Keys: `first_token_added_ms`: median over the later turns of the time to the first token through the
gateway, minus that of the same turn straight; `_quarter`, `_three_quarters`: quartiles;
`opening_added_ms`: of first turns. `per_token_added_us`: the same of the time from the first to the
last token, over the tokens between. `equal_tokens`: whether all answers have the same token ids;
`equal_logprobs`: largest difference between logprobs. `requests_per_s`: of AT_ONCE callers that ask
for SHORT_TOKENS each, and `straight_requests_per_s`.
"""

import asyncio
import json
import random
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import aiohttp
import numpy as np

from treadle_bench.bench import Bench, BenchOptions
from treadle_bench.processes import run_mesh
from treadle_bench.summary import rounded

TURNS = 4
CONVERSATIONS = 10  # a repeat
PROMPT_TOKENS, OBSERVED_TOKENS, SAMPLED_TOKENS = 128, 32, 32
AT_ONCE, ASKED, SHORT_TOKENS = 16, 128, 4
LOWEST_TOKEN, HIGHEST_TOKEN = 100, 40_000
TIMEOUT_S = 600.0
MS, US = 1e3, 1e6
WAYS = ("straight", "gateway")


@dataclass(frozen=True)
class Turn:
    """One answer, with the seconds from the request to its first and to its last token."""

    token_ids: list[int]
    logprobs: list[float]
    first_s: float
    last_s: float


class Caller:
    """Asks one HTTP server."""

    def __init__(self, http: aiohttp.ClientSession, url: str) -> None:
        self._http, self._url = http, url

    async def ask(self, prompt: list[int], tokens: int, session: str) -> Turn:
        """A greedy answer of exactly so many tokens, as a stream."""
        body = {
            "input_ids": prompt,
            "sampling_params": {"max_new_tokens": tokens, "temperature": 0.0, "ignore_eos": True},
            "return_logprob": True,
            "stream": True,
        }
        ids: list[int] = []
        logprobs: list[float] = []
        began_s = time.perf_counter()
        first_s = 0.0
        headers = {"X-Session-ID": session}
        async with self._http.post(
            f"{self._url}/generate", json=body, headers=headers, raise_for_status=True
        ) as answer:
            async for line in answer.content:
                if line.startswith(b"data: {"):
                    chunk = json.loads(line[6:])
                    meta = chunk["meta_info"]
                    # or the new tokens alone
                    whole = len(chunk["output_ids"]) >= meta["completion_tokens"]
                    ids = chunk["output_ids"] if whole else ids + chunk["output_ids"]
                    entries = [entry[0] for entry in meta["output_token_logprobs"]]
                    logprobs = entries if whole else logprobs + entries
                    first_s = first_s or time.perf_counter() - began_s
        return Turn(ids, logprobs, first_s, time.perf_counter() - began_s)

    async def end(self, session: str) -> None:
        """Of the gateway: close what the session has open."""
        async with self._http.delete(f"{self._url}/sessions/{session}", raise_for_status=True):
            pass


async def measure(options: BenchOptions) -> dict[str, Any]:
    """Raises ProcessError."""
    plan = options.engines
    plan = replace(plan, count=1, cores=plan.cores[:1], slots=AT_ONCE, weights="float")
    conversations = 2 if options.quick else CONVERSATIONS
    pairs: list[tuple[int, Turn, Turn]] = []  # number of the turn, straight, through the gateway
    rates: dict[str, list[float]] = {way: [] for way in WAYS}
    timeout = aiohttp.ClientTimeout(TIMEOUT_S)
    # SGLang closes idle ones after 5 s
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=2.0)
    async with (
        # A sidecar sees no straight request, so its probes would run beside one, slow it down and
        # change its batch.
        run_mesh(plan, options, front_door=True, probes=False) as mesh,
        aiohttp.ClientSession(
            timeout=timeout,
            connector=connector,
            read_bufsize=2**22,
            headers={"Authorization": f"Bearer {mesh.engines[0].key}"},  # of the engine
        ) as http,
    ):
        callers = {
            "straight": Caller(http, mesh.engines[0].url),
            "gateway": Caller(http, f"http://{mesh.where.http}"),
        }
        for repeat in range(options.repeats + 1):
            rng = random.Random(f"{options.seed}/{repeat}")
            found = [
                pair
                for each in range(conversations)
                for pair in await _converse(callers, rng, f"{repeat}-{each}")
            ]
            asked = {way: await _ask_many(callers[way], rng, way) for way in _order(repeat)}
            if repeat > 0:  # the first repeat is not counted
                pairs += found
                for way, rate in asked.items():
                    rates[way].append(rate)
            options.progress.print(f"repeat {repeat} of {options.repeats}", highlight=False)
    return summarize(pairs, rates)


async def _converse(
    callers: Mapping[str, Caller], rng: random.Random, name: str
) -> list[tuple[int, Turn, Turn]]:
    context, found = _draw(rng, PROMPT_TOKENS), []
    for number in range(TURNS):
        turns = {
            way: await callers[way].ask(context, SAMPLED_TOKENS, name) for way in _order(number)
        }
        found.append((number, turns["straight"], turns["gateway"]))
        context = context + turns["straight"].token_ids + _draw(rng, OBSERVED_TOKENS)
    await callers["gateway"].end(name)
    return found


async def _ask_many(caller: Caller, rng: random.Random, way: str) -> float:
    """Requests a second of AT_ONCE callers."""
    prompts = [_draw(rng, OBSERVED_TOKENS) for _ in range(ASKED)]

    async def keep_asking() -> None:
        while prompts:
            await caller.ask(prompts.pop(), SHORT_TOKENS, "")

    began_s = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for _ in range(AT_ONCE):
            group.create_task(keep_asking())
    return ASKED / (time.perf_counter() - began_s)


def summarize(
    pairs: list[tuple[int, Turn, Turn]], rates: Mapping[str, list[float]]
) -> dict[str, Any]:
    """The figures of the bench."""
    later = [(straight, gateway) for number, straight, gateway in pairs if number > 0]
    added = [(gateway.first_s - straight.first_s) * MS for straight, gateway in later]
    opening = [
        (gateway.first_s - straight.first_s) * MS
        for number, straight, gateway in pairs
        if number == 0
    ]
    decode = [
        ((gateway.last_s - gateway.first_s) - (straight.last_s - straight.first_s))
        / (SAMPLED_TOKENS - 1)
        * US
        for _, straight, gateway in pairs
    ]
    apart = [
        abs(one - other)
        for _, straight, gateway in pairs
        for one, other in zip(straight.logprobs, gateway.logprobs, strict=True)
    ]
    return rounded(
        {
            "first_token_added_ms": float(np.median(added)),
            "first_token_added_ms_quarter": float(np.quantile(added, 0.25)),
            "first_token_added_ms_three_quarters": float(np.quantile(added, 0.75)),
            "opening_added_ms": float(np.median(opening)),
            "first_token_straight_ms": float(
                np.median([straight.first_s * MS for straight, _ in later])
            ),
            "per_token_added_us": float(np.median(decode)),
            "equal_tokens": all(
                straight.token_ids == gateway.token_ids for _, straight, gateway in pairs
            ),
            "equal_logprobs": max(apart),
            "requests_per_s": float(np.median(rates["gateway"])),
            "straight_requests_per_s": float(np.median(rates["straight"])),
            "turns": len(pairs),
        },
        6,
    )


def _order(number: int) -> tuple[str, ...]:
    return WAYS if number % 2 else WAYS[::-1]


def _draw(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(LOWEST_TOKEN, HIGHEST_TOKEN) for _ in range(count)]


BENCH = Bench(
    "front-door",
    "What a request through the gateway costs against the same one straight to the engine, by "
    "turns. Takes about 10 minutes on 2 cores.",
    measure,
    engines=1,
    decides=("services/gateway",),
)
