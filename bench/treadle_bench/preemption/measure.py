"""What a preemption costs: SGLang's own against abort and resume, on one real engine on a CPU, as JSON.

.venv/bin/python -m treadle_bench.preemption.measure --engine-python .venv-engine/bin/python --model FOLDER

Starts an engine that runs one request at a time with priority scheduling. A short request preempts a long one in both
ways. Printed are the tokens that were computed again, and the seconds from the end of the short request to the next
token of the long one.
"""

import argparse
import asyncio
import json
import os
import sys
import time
import uuid
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import aiohttp
from treadle_cli.mesh.services import free_ports
from treadle_sidecar.engine.client import EngineClient, EngineLost, EngineRefused, EngineRequest
from treadle_sidecar.engine.process import EngineSpec, start_engine, stop_engine

START_DEADLINE_S = 240.0
PROMPT_TOKENS = 200
CUT_AFTER_TOKENS = 60
LONG_TOKENS = 100
SHORT_TOKENS = 8
REPEATS = 3
PRIORITY_FLAGS = (
    *("--enable-priority-scheduling", "--default-priority-value", "0"),
    *("--priority-scheduling-preemption-threshold", "1"),
    # Of the same flag the last wins: one running request, so that the second must displace the first.
    *("--max-running-requests", "1"),
)


def prompt(number: int) -> list[int]:
    """Token ids that share no page of KV with another prompt of this run."""
    return [3 + (number * 7919 + position * 31 + position * position) % 40_000 for position in range(PROMPT_TOKENS)]


async def stream(
    url: str, ids: list[int], count: int, priority: int, arrivals: asyncio.Queue[float] | None = None
) -> dict[str, Any]:
    """One request to the engine itself. Puts the time of each chunk into `arrivals`; returns its last meta_info."""
    body = {
        "rid": uuid.uuid4().hex,
        "input_ids": ids,
        "sampling_params": {"max_new_tokens": count, "temperature": 0.0, "ignore_eos": True},
        "stream": True,
        "priority": priority,
    }
    meta: dict[str, Any] = {}
    async with (
        aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(None)) as session,
        session.post(f"{url}/generate", json=body) as response,
    ):
        async for line in response.content:
            if line.startswith(b"data: {"):
                if arrivals is not None:
                    arrivals.put_nowait(time.monotonic())
                meta = json.loads(line[6:])["meta_info"]
    return meta


async def total_prefilled(session: aiohttp.ClientSession, url: str) -> int:
    """Prompt tokens that the engine has computed since its start."""
    async with session.get(f"{url}/v1/loads?include=core") as response:
        return int((await response.json())["loads"][0]["total_prefill_uncached_tokens"])


async def native(url: str, number: int) -> dict[str, float]:
    """The engine preempts the long request itself."""
    arrivals: asyncio.Queue[float] = asyncio.Queue()
    async with aiohttp.ClientSession() as session:
        long = asyncio.create_task(stream(url, prompt(number), LONG_TOKENS, 0, arrivals))
        for _ in range(CUT_AFTER_TOKENS):
            await arrivals.get()
        before = await total_prefilled(session, url)
        await stream(url, prompt(number + 1), SHORT_TOKENS, 10)
        ended = time.monotonic()
        while (resumed := await arrivals.get()) < ended:  # chunks that came before the preemption
            pass
        meta = await long
        computed = await total_prefilled(session, url) - before - PROMPT_TOKENS
    return {"recomputed_tokens": computed, "resumed_s": resumed - ended, "retractions": meta["num_retractions"]}


async def by_abort(engine: EngineClient, url: str, number: int) -> dict[str, float]:
    """Abort the long request, run the short one, send prompt and output again, as the sidecar does."""
    ids = prompt(number)
    params = {"max_new_tokens": LONG_TOKENS, "temperature": 0.0, "ignore_eos": True}
    rid = uuid.uuid4().hex
    async for chunk in engine.generate(EngineRequest(rid, list(ids), params, "default")):
        ids += chunk.token_ids
        if len(ids) == PROMPT_TOKENS + CUT_AFTER_TOKENS:
            await engine.abort(rid)
    await stream(url, prompt(number + 1), SHORT_TOKENS, 10)
    ended = time.monotonic()
    async for chunk in engine.generate(EngineRequest(uuid.uuid4().hex, ids, params, "default")):
        resumed_s = time.monotonic() - ended
        return {"recomputed_tokens": len(ids) - chunk.cached_tokens, "resumed_s": resumed_s, "sent_again": len(ids)}
    raise RuntimeError("the engine sent nothing")


async def measure(url: str) -> dict[str, list[dict[str, float]]]:
    """Both ways alternating, after one request that warms the engine up."""
    engine = EngineClient(url, stall_s=120.0)
    try:
        ends_at = time.monotonic() + START_DEADLINE_S
        while True:
            try:
                await engine.describe()
                break
            except (EngineLost, EngineRefused):
                if time.monotonic() > ends_at:
                    raise
                await asyncio.sleep(0.5)
        await stream(url, prompt(9000), 4, 0)
        results: dict[str, list[dict[str, float]]] = {"native_preemption": [], "abort_and_resume": []}
        for repeat in range(REPEATS):
            results["native_preemption"].append(await native(url, 100 + 10 * repeat))
            results["abort_and_resume"].append(await by_abort(engine, url, 105 + 10 * repeat))
        return results
    finally:
        await engine.close()


def main() -> None:
    """Print one JSON object on stdout; the engine is stopped afterwards."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--engine-python", type=Path, required=True)
    parser.add_argument("--model", required=True)
    arguments = parser.parse_args()
    (port,) = free_ports(1)
    with TemporaryDirectory() as folder:
        spec = EngineSpec(
            engine_id="measured",
            port=port,
            cpu=True,
            model_path=arguments.model,
            venv_python=arguments.engine_python.absolute(),
            cores=(max(os.sched_getaffinity(0)),),
            kv_tokens=16_000,
            hicache_dir=Path(folder) / "kv",
            extra_args=PRIORITY_FLAGS,
        )
        process = start_engine(spec, Path(folder) / "log")
        try:
            results = asyncio.run(measure(f"http://127.0.0.1:{port}"))
        except (EngineLost, EngineRefused) as error:
            sys.stderr.write((Path(folder) / "log").read_text()[-4000:])
            raise SystemExit(f"preemption: {error}") from None
        finally:
            stop_engine(process)
    print(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
