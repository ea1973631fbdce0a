"""Judges on GPUs that they share: a real tools service against fake engines that die of what SGLang
dies of."""

import asyncio
import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from support.conditions import until
from support.fake_memory_engine import FakeGpu, FakeMemoryEngine
from support.functions import start_declared
from support.processes import ServiceProcess, StartService
from support.rewards import RewardCalls, rewards_of
from treadle.tools.v1 import rewards_pb2 as pb

DONE = pb.REWARD_STATE_DONE
GPU_BYTES = 100
SERVER_BYTES = 60  # two of them are more than a GPU has
START_ANEW = "start it anew"


class Judged:
    """Services called `names` with a server on each GPU, a judge by_<name> of each, and the tools
    service before them.

    `a`, `b`: the servers of the first and of the last service on the first GPU.
    """

    process: ServiceProcess

    def __init__(self, start_service: StartService, folder: Path, names: str, gpus: int) -> None:
        self._start_service, self._folder = start_service, folder
        self.gpus = [FakeGpu(GPU_BYTES) for _ in range(gpus)]
        self.servers = {
            name: [
                FakeMemoryEngine(f"{name}{n}", [gpu], SERVER_BYTES)
                for n, gpu in enumerate(self.gpus)
            ]
            for name in names
        }
        self.engines = [server for servers in self.servers.values() for server in servers]
        self.a, self.b = self.servers[names[0]][0], self.servers[names[-1]][0]

    async def start(self) -> None:
        """Start the tools service, also after its end."""
        self.process = await start_declared(self._start_service, self._folder, self._declare())

    def _declare(self) -> dict[str, Any]:
        return {
            "gpus": {
                "gpu_bytes": GPU_BYTES,
                "nodes": {"n": list(range(len(self.gpus)))},
                "turn_s": 0.2,
                "watch_s": 0.2,
            },
            "gpu_service": [
                {
                    "name": name,
                    "bytes_per_gpu": {"1": SERVER_BYTES},
                    "servers": [
                        {"node": "n", "first": number, "degree": 1, "url": server.url}
                        for number, server in enumerate(servers)
                    ],
                }
                for name, servers in self.servers.items()
            ],
            "judge": [
                {"name": f"by_{name}", "prompt": "$text", "service": name} for name in self.servers
            ],
        }


@asynccontextmanager
async def judged(
    start_service: StartService,
    folder: Path,
    names: str = "ab",
    gpus: int = 1,
    *,
    saves_weights: bool = True,
) -> AsyncIterator[Judged]:
    """All of it, running. In the end no server has died, and no GPU was ever asked for more than it
    has."""
    mesh = Judged(start_service, folder, names, gpus)
    try:
        first, *others = mesh.servers.values()
        for server in first:
            server.saves_weights = saves_weights
            await server.start()
        await mesh.start()
        for before, server in zip(first * len(others), itertools.chain(*others), strict=True):
            await until_released(before)
            await server.start()
        yield mesh
        assert [server.died_of for server in mesh.engines] == [""] * len(mesh.engines)
        assert all(gpu.most_bytes <= GPU_BYTES for gpu in mesh.gpus)
    finally:
        for server in mesh.engines:
            await server.stop()


async def score(calls: RewardCalls, *judges: str) -> list[pb.Reward]:
    """One reward of each, all at once, once they have ended well."""
    accepted = [
        await calls.score(judge, {"text": str(number)}, job=judge)
        for number, judge in enumerate(judges)
    ]
    ended = await calls.ended(*(one.reward_id for one in accepted))
    assert [(one.state, one.error) for one in ended] == [(DONE, "")] * len(judges)
    return ended


async def until_released(engine: FakeMemoryEngine) -> None:
    """As the service does at its start with a server that nobody asks."""
    await until(lambda: engine.released, 60.0)


async def start_anew(engine: FakeMemoryEngine) -> None:
    await engine.stop()
    await engine.start()


async def test_services_that_share_a_gpu_are_brought_in_when_they_are_asked(
    start_service: StartService, tmp_path: Path
) -> None:
    """WHEN    two judges share one GPU that holds one of them, and are asked in turns, then both at
    once Result: every reward is scored, what is there is not brought again, memory is never
    exceeded, and nothing dies

    WHEN    the service is killed with a server in memory
    Result: the next one resumes only what is released
    """
    async with judged(start_service, tmp_path) as mesh:
        async with rewards_of(mesh.process) as calls:
            for judge in ("by_a", "by_a", "by_b", "by_a"):
                [ended] = await score(calls, judge)
                assert ended.score == 0.5
                assert ended.output.startswith(f"{judge[-1]}0 read '0'")
            mesh.a.answer_s = mesh.b.answer_s = 0.05
            await score(calls, *(["by_a", "by_b"] * 20))
            assert "resume,ask,ask,release" in ",".join(mesh.a.log)
            # what is asked at once is one batch
            assert max(mesh.a.most_at_once, mesh.b.most_at_once) > 1
        mesh.process.kill()
        await mesh.start()
        async with rewards_of(mesh.process) as calls:
            await score(calls, "by_a", "by_b", "by_a")


async def test_a_server_that_is_started_anew_is_known_to_hold_its_memory(
    start_service: StartService, tmp_path: Path
) -> None:
    """WHEN    of two servers of a GPU one that is released crashes and comes back, and later one in
    memory that is asked Result: the first is released again, and both can be asked; the second
    answers what waited for it"""
    async with judged(start_service, tmp_path) as mesh, rewards_of(mesh.process) as calls:
        await until_released(mesh.b)
        await start_anew(mesh.b)
        await until_released(mesh.b)
        await score(calls, "by_b")
        await score(calls, "by_a")
        await mesh.a.stop()
        pending = await calls.score("by_a", {"text": "while it is away"})
        await until(lambda: "a reward waits" in mesh.process.stderr_text())
        await mesh.a.start()
        assert (await calls.ended(pending.reward_id))[0].state == DONE
        await score(calls, "by_a")


async def test_a_service_takes_what_is_free_and_more_gpus_when_one_is_full(
    start_service: StartService, tmp_path: Path
) -> None:
    async with judged(start_service, tmp_path, gpus=2) as mesh, rewards_of(mesh.process) as calls:
        for engine in mesh.engines:
            engine.answer_s = 0.3
        await score(calls, *(["by_a", "by_b"] * 5))
        assert {engine.name[0] for engine in mesh.engines if "ask" in engine.log} == {"a", "b"}


async def test_a_kill_in_the_middle_of_a_change_costs_a_start_of_that_server(
    start_service: StartService, tmp_path: Path
) -> None:
    """WHEN    the service is killed while a server resumes Result: the next one does not touch that
    server, says so, and uses it again once it has been started anew"""
    async with judged(start_service, tmp_path, "a") as mesh:
        pending = await ask_while_it_changes(mesh)
        mesh.process.kill()
        mesh.a.may_change.set()
        await mesh.start()
        async with rewards_of(mesh.process) as calls:
            await until(lambda: START_ANEW in mesh.process.stderr_text(), 60.0)
            assert (await calls.get(pending.reward_id)).state == pb.REWARD_STATE_RUNNING
            await start_anew(mesh.a)
            assert (await calls.ended(pending.reward_id))[0].state == DONE


async def ask_while_it_changes(mesh: Judged) -> pb.Reward:
    """A reward of `a`, whose server has begun to resume and may not go on."""
    await until_released(mesh.a)
    mesh.a.may_change.clear()
    async with rewards_of(mesh.process) as calls:
        pending = await calls.score("by_a", {"text": "x"})
        await until(lambda: "resume" in mesh.a.log)
        return pending


async def test_a_release_that_a_kill_left_open_keeps_its_gpu_taken(
    start_service: StartService, tmp_path: Path
) -> None:
    """WHEN    the service is killed while a server of a shared GPU releases its memory for another
    one Result: the next service resumes the other one only after the first has been started anew
    and released again"""
    async with judged(start_service, tmp_path) as mesh:
        async with rewards_of(mesh.process) as calls:
            await score(calls, "by_b")
            mesh.b.may_change.clear()
            mesh.b.log.clear()
            pending = await calls.score("by_a", {"text": "x"})
            await until(lambda: "release" in mesh.b.log)
            mesh.process.kill()
        await mesh.start()
        async with rewards_of(mesh.process) as calls:
            await until(lambda: START_ANEW in mesh.process.stderr_text(), 60.0)
            mesh.b.may_change.set()
            assert "resume" not in mesh.a.log
            await start_anew(mesh.b)
            assert (await calls.ended(pending.reward_id))[0].state == DONE


async def test_a_drain_in_the_middle_of_a_change_waits_for_it(
    start_service: StartService, tmp_path: Path
) -> None:
    async with judged(start_service, tmp_path, "a") as mesh:
        pending = await ask_while_it_changes(mesh)
        mesh.process.terminate()
        await until(lambda: "draining" in mesh.process.stderr_text(), 60.0)
        # the drain cancels its caller before
        asyncio.get_running_loop().call_later(0.5, mesh.a.may_change.set)
        assert await mesh.process.wait() == 0, mesh.process.stderr_text()
        await mesh.start()
        async with rewards_of(mesh.process) as calls:
            assert (await calls.ended(pending.reward_id))[0].state == DONE
        assert mesh.a.log.count("start") == 1


async def test_a_server_that_would_lose_its_weights_is_not_released(
    start_service: StartService, tmp_path: Path
) -> None:
    async with (
        judged(start_service, tmp_path, "a", saves_weights=False) as mesh,
        rewards_of(mesh.process) as calls,
    ):
        pending = await calls.score("by_a", {"text": "x"})
        await until(lambda: "--enable-weights-cpu-backup" in mesh.process.stderr_text())
        assert (await calls.get(pending.reward_id)).state == pb.REWARD_STATE_RUNNING
        assert mesh.a.log == ["start"]
