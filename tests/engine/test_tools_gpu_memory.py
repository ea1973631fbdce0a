"""SGLang's release and resume of GPU memory as the tools service uses them, and a judge, on a real
engine.

The engine is on the CPU, where there is no memory to give back: what is shown is the HTTP contract,
that a release waits for what runs, and that an engine answers as before once it is resumed.
"""

import asyncio
import json
import uuid
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import grpc.aio
import pytest
from support.conditions import until_said
from support.functions import start_declared
from support.processes import StartService
from support.real_engines import RealEngine
from support.rewards import RewardCalls
from treadle.tools.v1 import rewards_pb2
from treadle_tools.remote.gpus import EngineMemory

ANSWER_S = 120.0

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]


@pytest.fixture
async def memory() -> AsyncIterator[EngineMemory]:
    asking = EngineMemory()
    yield asking
    await asking.close()


async def chat(engine: RealEngine, max_tokens: int = 16) -> str:
    """What it says at temperature 0, computed anew: with KV of an earlier answer the sums are in
    another order, and of two tokens that are about as likely the other one may win."""
    messages = [{"role": "user", "content": "Count from one to a hundred in words."}]
    body = {
        "model": "default",
        "messages": messages,
        "temperature": 0,
        "max_tokens": max_tokens,
        "ignore_eos": True,
    }
    body["cache_salt"] = uuid.uuid4().hex
    timeout = aiohttp.ClientTimeout(ANSWER_S)
    async with (
        aiohttp.ClientSession(timeout=timeout) as session,
        session.post(f"{engine.url}/v1/chat/completions", json=body) as reply,
    ):
        return str(json.loads(await reply.text())["choices"][0]["message"]["content"])


async def running_requests(engine: RealEngine) -> int:
    async with (
        aiohttp.ClientSession() as session,
        session.get(f"{engine.url}/v1/loads?include=core") as reply,
    ):
        return sum(load["num_running_reqs"] for load in (await reply.json())["loads"])


async def test_an_engine_answers_as_before_once_it_is_resumed(
    engine: RealEngine, memory: EngineMemory
) -> None:
    before = await chat(engine)
    identity = await memory.identity(engine.url)
    for _ in range(2):
        await memory.release(engine.url)
        assert await memory.identity(engine.url) == identity
        await memory.resume(engine.url)
    assert await chat(engine) == before


async def test_a_release_waits_for_what_runs(engine: RealEngine, memory: EngineMemory) -> None:
    """A release that did not wait would end the engine's scheduler."""
    running = asyncio.create_task(chat(engine, max_tokens=96))
    await until_said(lambda: running_requests(engine), bool)
    await memory.release(engine.url)
    assert await running
    await memory.resume(engine.url)


async def test_a_judge_on_a_gpu_service_is_a_real_model(
    text_engine: RealEngine, start_service: StartService, tmp_path: Path
) -> None:
    """The service finds the engine in memory, releases it, and resumes it when a trajectory is to
    be judged."""
    server = {"node": "n", "first": 0, "degree": 1, "url": text_engine.url}
    service = {"name": "small", "bytes_per_gpu": {"1": 1}, "servers": [server]}
    judge = {
        "name": "judge",
        "service": "small",
        "max_tokens": 16,
        "score": r"(\d)",
        "high": 9,
        "prompt": "$text",
    }
    document = {
        "gpus": {"gpu_bytes": 1, "nodes": {"n": [0]}},
        "gpu_service": [service],
        "judge": [judge],
    }
    process = await start_declared(start_service, tmp_path, document)
    async with grpc.aio.insecure_channel(process.address) as channel:
        calls = RewardCalls(channel)
        accepted = [
            await calls.score("judge", {"text": "What is 2 + 2? Say the number."}) for _ in range(3)
        ]
        ended = await calls.ended(*(one.reward_id for one in accepted))
        assert [one.state for one in ended] == [rewards_pb2.REWARD_STATE_DONE] * 3, [
            one.error for one in ended
        ]
        assert all(0.0 <= one.score <= 1.0 and one.output for one in ended)
