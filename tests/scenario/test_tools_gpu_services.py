"""Judges on GPUs that they share: a real tools service against fake engines that die of what SGLang dies of."""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
from support.conditions import until
from support.fake_memory_engine import FakeGpu, FakeMemoryEngine
from support.functions import start_declared
from support.processes import StartService
from support.rewards import RewardCalls
from treadle.tools.v1 import rewards_pb2 as pb

DONE = pb.REWARD_STATE_DONE
GPU_BYTES = 100


@asynccontextmanager
async def engines(*engines: FakeMemoryEngine) -> AsyncIterator[None]:
    """Started one after another, as a person would, each released before the next takes the GPU."""
    try:
        for engine in engines:
            await engine.start()
        yield
    finally:
        for engine in engines:
            await engine.stop()


def declared(
    services: Mapping[str, Sequence[FakeMemoryEngine]], nodes: dict[str, list[int]], turn_s: float
) -> dict[str, Any]:
    """Services of one GPU each, a server for each GPU, and a judge for each service."""
    places = [(node, number) for node, numbers in nodes.items() for number in numbers]
    return {
        "gpus": {"gpu_bytes": GPU_BYTES, "nodes": nodes, "turn_s": turn_s},
        "gpu_service": [
            {
                "name": name,
                "bytes_per_gpu": {"1": 60},
                "servers": [
                    {"node": node, "first": first, "degree": 1, "url": server.url}
                    for (node, first), server in zip(places, servers, strict=True)
                ],
            }
            for name, servers in services.items()
        ],
        "judge": [{"name": f"by_{name}", "prompt": "$text", "service": name} for name in services],
    }


async def score(calls: RewardCalls, *judges: str) -> list[pb.Reward]:
    """One reward of each, all at once, once they have ended."""
    accepted = [await calls.score(judge, {"text": str(number)}, job=judge) for number, judge in enumerate(judges)]
    return await calls.ended(*(one.reward_id for one in accepted))


def unharmed(*engines: FakeMemoryEngine) -> None:
    assert [engine.died_of for engine in engines] == [""] * len(engines)


async def test_services_that_share_a_gpu_are_brought_in_when_they_are_asked(
    start_service: StartService, tmp_path: Path
) -> None:
    """
    WHEN    two judges share one GPU that holds one of them, and are asked in turns, then both at once
    Result: every reward is scored, what is there is not brought again, memory is never exceeded, and nothing dies
    """
    gpu = FakeGpu(GPU_BYTES)
    a, b = FakeMemoryEngine("a", [gpu], 60), FakeMemoryEngine("b", [gpu], 60)
    async with engines(a):
        process = await start_declared(start_service, tmp_path, declared({"a": [a], "b": [b]}, {"n": [0]}, turn_s=0.2))
        async with grpc.aio.insecure_channel(process.address) as channel, engines_beside(a, b):
            calls = RewardCalls(channel)
            for judge in ("by_a", "by_a", "by_b", "by_a"):
                [ended] = await score(calls, judge)
                assert (ended.state, ended.score) == (DONE, 0.5), ended.error
                assert ended.output.startswith(f"{judge[-1]} read '0'")
            a.answer_s = b.answer_s = 0.05
            all_ended = await score(calls, *(["by_a", "by_b"] * 20))
            assert [one.state for one in all_ended] == [DONE] * 40
            unharmed(a, b)
            assert gpu.most_bytes <= GPU_BYTES
            assert "resume,ask,ask,release" in ",".join(a.log)
            assert max(a.most_at_once, b.most_at_once) > 1  # what is asked at once is one batch


@asynccontextmanager
async def engines_beside(first: FakeMemoryEngine, second: FakeMemoryEngine) -> AsyncIterator[None]:
    """The second server of a GPU starts once the service has released the first."""
    await until_released(first)
    async with engines(second):
        yield


async def until_released(engine: FakeMemoryEngine) -> None:
    """As the service does with a server that nobody asks."""
    await until(lambda: engine.released, 60.0)


async def test_a_restarted_service_knows_what_is_released(start_service: StartService, tmp_path: Path) -> None:
    """WHEN the service is killed with a server in memory. Result: the next one resumes only what is released."""
    gpu = FakeGpu(GPU_BYTES)
    a, b = FakeMemoryEngine("a", [gpu], 60), FakeMemoryEngine("b", [gpu], 60)
    declarations = declared({"a": [a], "b": [b]}, {"n": [0]}, turn_s=0.2)
    async with engines(a):
        process = await start_declared(start_service, tmp_path, declarations)
        async with engines_beside(a, b):
            async with grpc.aio.insecure_channel(process.address) as channel:
                assert [one.state for one in await score(RewardCalls(channel), "by_b", "by_a")] == [DONE, DONE]
            process.kill()
            process = await start_declared(start_service, tmp_path, declarations)
            async with grpc.aio.insecure_channel(process.address) as channel:
                ended = await score(RewardCalls(channel), "by_a", "by_b", "by_a")
                assert [one.state for one in ended] == [DONE] * 3
            unharmed(a, b)
            assert gpu.most_bytes <= GPU_BYTES


async def test_a_server_that_was_started_anew_is_known_to_hold_its_memory(
    start_service: StartService, tmp_path: Path
) -> None:
    gpu = FakeGpu(GPU_BYTES)
    a = FakeMemoryEngine("a", [gpu], 60)
    async with engines(a):
        process = await start_declared(start_service, tmp_path, declared({"a": [a]}, {"n": [0]}, turn_s=0.2))
        async with grpc.aio.insecure_channel(process.address) as channel:
            calls = RewardCalls(channel)
            assert (await score(calls, "by_a"))[0].state == DONE
            await a.stop()
            pending = await calls.score("by_a", {"text": "while it is away"})
            await asyncio.sleep(0.5)
            await a.start()
            [ended] = await calls.ended(pending.reward_id)
            assert ended.state == DONE
            assert (await score(calls, "by_a"))[0].state == DONE
            unharmed(a)


async def test_a_server_that_is_started_anew_while_it_is_released_is_released_again(
    start_service: StartService, tmp_path: Path
) -> None:
    """WHEN one of two servers of a GPU, neither of them asked, crashes and comes back. Result: both can be asked."""
    gpu = FakeGpu(GPU_BYTES)
    a, b = FakeMemoryEngine("a", [gpu], 60), FakeMemoryEngine("b", [gpu], 60)
    async with engines(a):
        process = await start_declared(start_service, tmp_path, declared({"a": [a], "b": [b]}, {"n": [0]}, turn_s=0.2))
        async with grpc.aio.insecure_channel(process.address) as channel, engines_beside(a, b):
            await until_released(b)
            await b.stop()
            await b.start()
            await until_released(b)
            assert [one.state for one in await score(RewardCalls(channel), "by_a", "by_b")] == [DONE, DONE]
            unharmed(a, b)
            assert gpu.most_bytes <= GPU_BYTES


async def test_a_service_takes_what_is_free_and_more_gpus_when_one_is_full(
    start_service: StartService, tmp_path: Path
) -> None:
    gpus = [FakeGpu(GPU_BYTES), FakeGpu(GPU_BYTES)]
    servers = {name: [FakeMemoryEngine(f"{name}{n}", [gpus[n]], 60) for n in range(2)] for name in ("a", "b")}
    async with engines(*servers["a"]):
        process = await start_declared(start_service, tmp_path, declared(servers, {"n": [0, 1]}, turn_s=0.2))
        async with (
            grpc.aio.insecure_channel(process.address) as channel,
            engines_beside(servers["a"][0], servers["b"][0]),
            engines_beside(servers["a"][1], servers["b"][1]),
        ):
            for engine in (*servers["a"], *servers["b"]):
                engine.answer_s = 0.3
            ended = await score(RewardCalls(channel), *(["by_a", "by_b"] * 5))
            assert [one.state for one in ended] == [DONE] * 10
            unharmed(*servers["a"], *servers["b"])
            asked = {engine.name for engine in (*servers["a"], *servers["b"]) if "ask" in engine.log}
            assert {name[0] for name in asked} == {"a", "b"}
            assert all(gpu.most_bytes <= GPU_BYTES for gpu in gpus)


async def test_a_kill_in_the_middle_of_a_change_costs_a_start_of_that_server(
    start_service: StartService, tmp_path: Path
) -> None:
    """
    WHEN    the service is killed while a server resumes
    Result: the next one does not touch that server, says so, and uses it again once it has been started anew
    """
    gpu = FakeGpu(GPU_BYTES)
    a = FakeMemoryEngine("a", [gpu], 60)
    declarations = declared({"a": [a]}, {"n": [0]}, turn_s=0.2)
    async with engines(a):
        process = await start_declared(start_service, tmp_path, declarations)
        async with grpc.aio.insecure_channel(process.address) as channel:
            await until_released(a)
            a.may_change.clear()
            pending = await RewardCalls(channel).score("by_a", {"text": "x"})
            await until(lambda: "resume" in a.log)
            process.kill()
            a.may_change.set()
        process = await start_declared(start_service, tmp_path, declarations)
        async with grpc.aio.insecure_channel(process.address) as channel:
            calls = RewardCalls(channel)
            await until(lambda: "start it anew" in process.stderr_text(), 60.0)
            assert (await calls.get(pending.reward_id)).state == pb.REWARD_STATE_RUNNING
            await a.stop()
            await a.start()
            assert (await calls.ended(pending.reward_id))[0].state == DONE
            unharmed(a)


async def test_a_release_that_a_kill_left_open_keeps_its_gpu_taken(start_service: StartService, tmp_path: Path) -> None:
    """
    WHEN    the service is killed while a server of a shared GPU releases its memory for another one
    Result: the next service resumes the other one only after the first has been started anew and released again
    """
    gpu = FakeGpu(GPU_BYTES)
    a, b = FakeMemoryEngine("a", [gpu], 60), FakeMemoryEngine("b", [gpu], 60)
    declarations = declared({"a": [a], "b": [b]}, {"n": [0]}, turn_s=0.2)
    async with engines(a):
        process = await start_declared(start_service, tmp_path, declarations)
        async with engines_beside(a, b):
            async with grpc.aio.insecure_channel(process.address) as channel:
                assert (await score(RewardCalls(channel), "by_b"))[0].state == DONE
                b.may_change.clear()
                b.log.clear()
                pending = await RewardCalls(channel).score("by_a", {"text": "x"})
                await until(lambda: "release" in b.log)
                process.kill()
            process = await start_declared(start_service, tmp_path, declarations)
            async with grpc.aio.insecure_channel(process.address) as channel:
                await until(lambda: "start it anew" in process.stderr_text(), 60.0)
                b.may_change.set()
                assert "resume" not in a.log
                await b.stop()
                await b.start()
                assert (await RewardCalls(channel).ended(pending.reward_id))[0].state == DONE
            unharmed(a, b)
            assert gpu.most_bytes <= GPU_BYTES


async def test_a_drain_in_the_middle_of_a_change_waits_for_it(start_service: StartService, tmp_path: Path) -> None:
    gpu = FakeGpu(GPU_BYTES)
    a = FakeMemoryEngine("a", [gpu], 60)
    declarations = declared({"a": [a]}, {"n": [0]}, turn_s=0.2)
    async with engines(a):
        process = await start_declared(start_service, tmp_path, declarations)
        async with grpc.aio.insecure_channel(process.address) as channel:
            await until_released(a)
            a.may_change.clear()
            pending = await RewardCalls(channel).score("by_a", {"text": "x"})
            await until(lambda: "resume" in a.log)
            process.terminate()
            await until(lambda: "draining" in process.stderr_text(), 60.0)
            asyncio.get_running_loop().call_later(0.5, a.may_change.set)  # the drain cancels its caller before
            assert await process.wait() == 0, process.stderr_text()
        process = await start_declared(start_service, tmp_path, declarations)
        async with grpc.aio.insecure_channel(process.address) as channel:
            assert (await RewardCalls(channel).ended(pending.reward_id))[0].state == DONE
            unharmed(a)
            assert a.log.count("start") == 1


async def test_a_server_that_would_lose_its_weights_is_not_released(
    start_service: StartService, tmp_path: Path
) -> None:
    gpu = FakeGpu(GPU_BYTES)
    a = FakeMemoryEngine("a", [gpu], 60)
    a.saves_weights = False
    async with engines(a):
        process = await start_declared(start_service, tmp_path, declared({"a": [a]}, {"n": [0]}, turn_s=0.2))
        async with grpc.aio.insecure_channel(process.address) as channel:
            calls = RewardCalls(channel)
            pending = await calls.score("by_a", {"text": "x"})
            await asyncio.sleep(1.0)
            assert (await calls.get(pending.reward_id)).state == pb.REWARD_STATE_RUNNING
            assert "--enable-weights-cpu-backup" in process.stderr_text()
            assert a.log == ["start"]


async def test_gpus_that_are_too_small_for_a_service_are_refused_at_start(
    start_service: StartService, tmp_path: Path
) -> None:
    document = declared({"a": [FakeMemoryEngine("a", [], 0)]}, {"n": [0]}, turn_s=1.0)
    with pytest.raises(AssertionError) as refused:
        document["gpus"]["gpu_bytes"] = 50
        await start_declared(start_service, tmp_path, document)
    assert "bytes_per_gpu" in str(refused.value).splitlines()[-1]
