"""One engine on one core of a CPU with float and with 8-bit weights: how long a decode step takes,
and its logprobs.

The engines run at the same time on the same core and are asked in turn, so that all meet the
machine as it is at that moment. A step's milliseconds are given twice: `cpu`, the CPU time of all
the engine's processes, which other programs change little, and `wall`. Logprobs are of tokens that
the float32 engine sampled; each engine scores them in one pass.
"""

import asyncio
import random
import time
from collections import defaultdict
from contextlib import AsyncExitStack
from dataclasses import replace
from statistics import fmean, median
from typing import Any

import aiohttp
import psutil
from treadle_cli.exits import UsageProblem
from treadle_cli.mesh.engines import Engine

from treadle_bench.bench import Bench, BenchOptions
from treadle_bench.processes import run_engine

FLOAT32 = "float32"
VARIANTS = {
    FLOAT32: ("float", ("--dtype", "float32")),
    "float": ("float", ()),
    "int8": ("int8", ()),
}
BATCHES = (1, 4, 8, 16)
KV_TOKENS = 8000  # 16 sequences of 300 tokens, and the prompts that are scored
PROMPT_TOKENS, DECODE_TOKENS = 200, 30
HIGHEST_TOKEN_ID = 40_000  # below the vocabulary of any model that runs on a CPU here
QUESTIONS = (
    "Write a story about a lighthouse keeper.",
    "Explain how heap sort works, with code in Python.",
    "What is 17 times 23? Think step by step.",
    "List the capitals of ten European countries.",
    "Describe the water cycle to a child.",
)
SAMPLES, SAMPLE_TOKENS = 4, 100
TIMEOUT_S = 300.0


async def measure(options: BenchOptions) -> dict[str, Any]:
    """Seed, repeats and model apply. Takes 2 minutes to start, and then 1 minute a repeat. Raises
    UsageProblem."""
    if not options.engines.cores:
        raise UsageProblem("this bench measures engines on a CPU, and the machine has a GPU")
    start_s, memory_mib, engines = {}, {}, {}
    decode: dict[tuple[str, int], list[dict[str, float]]] = defaultdict(list)
    async with AsyncExitStack() as stack:
        http = await stack.enter_async_context(
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(TIMEOUT_S))
        )
        for name, (weights, flags) in VARIANTS.items():
            flags = ("--max-total-tokens", str(KV_TOKENS), *flags)
            plan = replace(options.engines, slots=max(BATCHES), weights=weights, flags=flags)
            began_s = time.monotonic()
            engines[name] = await stack.enter_async_context(run_engine(plan, options))
            start_s[name] = time.monotonic() - began_s
        for seed in options.seeds:
            for batch in BATCHES:
                for name, engine in engines.items():
                    decode[name, batch].append(
                        await _decode_ms(http, engine, batch, random.Random(f"{seed} {batch}"))
                    )
        for name, engine in engines.items():
            memory_mib[name] = (
                sum(each.memory_full_info().pss for each in _processes(engine)) / 2**20
            )
        logprobs = await _compare_logprobs(http, engines, options.seed)
    return {
        "repeats": options.repeats,
        "start_s": start_s,
        "memory_mib": memory_mib,
        "decode": [
            {
                "weights": name,
                "batch": batch,
                **_summary(rows),
                **_ratios(rows, decode[FLOAT32, batch]),
            }
            for (name, batch), rows in decode.items()
        ],
        "logprobs": logprobs,
    }


def _summary(rows: list[dict[str, float]]) -> dict[str, Any]:
    return {
        f"{kind}_ms": [median(each), min(each), max(each)]
        for kind in rows[0]
        if (each := [r[kind] for r in rows])
    }


def _ratios(rows: list[dict[str, float]], base: list[dict[str, float]]) -> dict[str, Any]:
    ratios = [one["cpu"] / other["cpu"] for one, other in zip(rows, base, strict=True)]
    return {f"cpu_over_{FLOAT32}": [median(ratios), min(ratios), max(ratios)]}


def _processes(engine: Engine) -> list[psutil.Process]:
    leader = psutil.Process(engine.child.pid)
    return [leader, *leader.children(recursive=True)]


def _cpu_s(processes: list[psutil.Process]) -> float:
    return sum(times.user + times.system for times in (each.cpu_times() for each in processes))


async def _decode_ms(
    http: aiohttp.ClientSession, engine: Engine, batch: int, rng: random.Random
) -> dict[str, float]:
    """Milliseconds of a step, over the steps in which the whole batch decodes."""
    came_s: list[list[float]] = [[] for _ in range(batch)]
    whole = asyncio.Event()  # every sequence decodes

    async def stream(number: int) -> None:
        prompt = [rng.randrange(HIGHEST_TOKEN_ID) for _ in range(PROMPT_TOKENS)]
        sampling = {
            "max_new_tokens": DECODE_TOKENS + batch,
            "temperature": 1.0,
            "sampling_seed": number,
        }
        body: dict[str, Any] = {
            "input_ids": prompt,
            "sampling_params": {**sampling, "ignore_eos": True},
            "stream": True,
        }
        body["return_logprob"] = True
        async with http.post(f"{engine.url}/generate", json=body, raise_for_status=True) as answer:
            async for line in answer.content:
                if line.startswith(b"data: {"):
                    came_s[number].append(time.perf_counter())
                    if all(came_s):
                        whole.set()

    processes = _processes(engine)
    streams = [asyncio.create_task(stream(number)) for number in range(batch)]
    await whole.wait()
    begun, begun_cpu_s = len(came_s[-1]), _cpu_s(processes)
    await asyncio.wait(streams, return_when=asyncio.FIRST_COMPLETED)
    cpu_s, times_s = _cpu_s(processes) - begun_cpu_s, came_s[-1][begun - 1 :]
    await asyncio.gather(*streams)
    steps = len(times_s) - 1
    return {"cpu": cpu_s / steps * 1e3, "wall": (times_s[-1] - times_s[0]) / steps * 1e3}


async def _compare_logprobs(
    http: aiohttp.ClientSession, engines: dict[str, Engine], seed: int
) -> list[dict[str, Any]]:
    """Each variant against float32: absolute differences, and the share of tokens that are
    likeliest in both."""

    async def ask(name: str, body: dict[str, Any]) -> Any:
        async with http.post(
            f"{engines[name].url}/generate", json=body, raise_for_status=True
        ) as answer:
            return await answer.json()

    scores: dict[str, list[tuple[float, int]]] = defaultdict(list)
    for number, question in enumerate(QUESTIONS * SAMPLES):
        text = f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
        sampling = {
            "max_new_tokens": SAMPLE_TOKENS,
            "temperature": 1.0,
            "sampling_seed": seed + number,
        }
        sampled = await ask(FLOAT32, {"text": text, "sampling_params": sampling})
        body = {
            "text": text + sampled["text"],
            "sampling_params": {"max_new_tokens": 0},
            "return_logprob": True,
        }
        body |= {
            "logprob_start_len": sampled["meta_info"]["prompt_tokens"] - 1,
            "top_logprobs_num": 1,
        }
        for name in engines:
            meta = (await ask(name, body))["meta_info"]
            scored = zip(
                meta["input_token_logprobs"][1:], meta["input_top_logprobs"][1:], strict=True
            )
            scores[name] += [(own[0], top[0][1]) for own, top in scored]
    rows = []
    for name in engines:
        pairs = list(zip(scores[name], scores[FLOAT32], strict=True))
        differences = sorted(abs(one[0] - other[0]) for one, other in pairs)
        same = fmean(one[1] == other[1] for one, other in pairs)
        rows.append(
            {
                "weights": name,
                "tokens": len(pairs),
                "mean": fmean(differences),
                "max": differences[-1],
            }
        )
        rows[-1] |= {"p99": differences[len(differences) * 99 // 100], "same_greedy": same}
    return rows


BENCH = Bench(
    "engine",
    "decode steps and logprobs of a CPU engine, float against 8-bit weights",
    measure,
    engines=1,
    decides=("services/sidecar/treadle_sidecar/sglang_cpu",),
)
