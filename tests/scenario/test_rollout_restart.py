"""Killing the rollout service loses nothing that it acknowledged."""

import asyncio

import grpc.aio
import pytest
from support.finished_trajectories import CALL_S, RolloutCalls, finished, members
from support.processes import StartService
from treadle.rollout.v1 import rollout_pb2 as pb

LARGE = [("grpc.max_receive_message_length", -1)]


async def test_a_killed_service_gives_back_every_trajectory_it_acknowledged(
    start_service: StartService,
) -> None:
    """Three groups go in, one is taken, then SIGKILL. The next process over the same NATS goes on.

    Result: the two others come out token for token, once; the first batch's request_id still gives
    the first batch; a trajectory handed in again gets its first verdict; the rollout reads as
    before.
    """
    trajectories = {
        f"t{i}": finished(f"t{i}", f"p{i // 2}", i % 2, sampled=40_000) for i in range(6)
    }
    service = await start_service("treadle_rollout")
    async with grpc.aio.insecure_channel(service.address, options=LARGE) as channel:
        calls = RolloutCalls(channel)
        await calls.create(prompts=4, samples=2, staleness=1)
        verdicts = {
            name: await calls.submit(trajectory) for name, trajectory in trajectories.items()
        }
        first = await calls.batch("b0", 1, version=1)
        before = await calls.get()
        service.kill()
    service = await start_service("treadle_rollout")
    async with grpc.aio.insecure_channel(service.address, options=LARGE) as channel:
        calls = RolloutCalls(channel)
        assert await calls.get() == before
        assert await calls.batch("b0", 1, version=1) == first
        assert await calls.submit(trajectories["t0"], "again") == verdicts["t0"]
        rest = await calls.batch("b1", 4, version=1)
        assert members(first) + members(rest) == [["t0", "t1"], ["t2", "t3"], ["t4", "t5"]]
        for group in (*first.groups, *rest.groups):
            for trajectory in group.trajectories:
                assert trajectory == trajectories[trajectory.trajectory_id]
        assert members(await calls.batch("b2", 4, version=1)) == []
        for index in range(2):
            await calls.submit(finished(f"u{index}", "p3", index, versions=("1",)))
        last = await calls.batch("b3", 1, version=1, wait=True)
        assert members(last) == [["u0", "u1"]] and last.exhausted
        assert (await calls.get()).state == pb.ROLLOUT_STATE_FINISHED


async def test_a_service_that_is_told_to_stop_sends_those_away_who_wait(
    start_service: StartService,
) -> None:
    """A trainer waits for a batch and a watcher watches; SIGTERM must not hang on them.

    Result: both are told UNAVAILABLE, and the process ends with 0.
    """
    service = await start_service("treadle_rollout")
    async with grpc.aio.insecure_channel(service.address) as channel:
        calls = RolloutCalls(channel)
        await calls.create(prompts=2)
        watch = calls.stub.WatchRollout(pb.WatchRolloutRequest(rollout_id="r"))
        assert await watch.read() is not grpc.aio.EOF
        waiting = calls.stub.GetBatch(
            pb.GetBatchRequest(
                request_id="b", rollout_id="r", max_groups=1, wait=True, weight_version=7
            ),
            timeout=60,
        )
        async with asyncio.timeout(CALL_S):
            while (await calls.get()).revision == 0:  # until the waiting call has been heard
                pass
        service.terminate()
        assert await service.wait() == 0
        assert await waiting.code() is grpc.StatusCode.UNAVAILABLE
        with pytest.raises(grpc.aio.AioRpcError) as ended:
            while await watch.read() is not grpc.aio.EOF:  # what changed before
                pass
        assert ended.value.code() is grpc.StatusCode.UNAVAILABLE
