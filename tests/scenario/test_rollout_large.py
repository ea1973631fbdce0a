"""Batches larger than a message, and tokens larger than their store: real processes over real
nats-servers."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import grpc.aio
import pytest
from support.finished_trajectories import CALL_S, RolloutCalls, finished
from support.nats_server import NatsServer
from support.processes import StartService
from support.rpc import error_of
from treadle.scheduler.v1 import scheduler_pb2, scheduler_pb2_grpc

LONG = 131_072  # sampled tokens: 1.2 MB with log-probabilities and mask
MIB = 1024 * 1024


async def test_a_group_of_sixteen_long_trajectories_settles_and_comes_whole(
    start_service: StartService,
) -> None:
    """Sixteen workers submit 128k tokens at once, one of them a million: 28 MB, where a message may
    have 16.

    Result: all are kept; the batch streams token for token, and again after SIGKILL of the service
    in the middle of it.
    """
    group = [finished(f"t{i}", sample=i, sampled=1_000_000 if i == 7 else LONG) for i in range(16)]
    service = await start_service("treadle_rollout")
    async with grpc.aio.insecure_channel(service.address) as channel:
        calls = RolloutCalls(channel)
        await calls.create(samples=16)
        verdicts = await asyncio.gather(*(calls.submit(trajectory) for trajectory in group))
        assert all(verdict.kept for verdict in verdicts) and any(
            verdict.group_settled for verdict in verdicts
        )
        request = calls.request("b", wait=True)
        broken = calls.stub.StreamBatch(request, timeout=CALL_S)
        assert await broken.read() is not grpc.aio.EOF
        service.kill()
        with pytest.raises(grpc.aio.AioRpcError):
            while await broken.read() is not grpc.aio.EOF:
                pass
    service = await start_service("treadle_rollout")
    async with grpc.aio.insecure_channel(service.address) as channel:
        batch = await RolloutCalls(channel).stream("b", wait=True)
    assert (
        sorted(batch.groups[0].trajectories, key=lambda each: each.sample) == group
        and batch.exhausted
    )


@pytest.fixture
def small_nats(tmp_path: Path) -> Iterator[NatsServer]:
    server = NatsServer(tmp_path / "small", max_file_store=12 * MIB)
    server.start()
    yield server
    server.kill()


async def test_tokens_that_fill_their_store_wait_and_never_take_the_schedulers_room(
    small_nats: NatsServer, start_service: StartService
) -> None:
    """JetStream holds 12 MiB, of which tokens may have 8 and facts 1. Workers submit 12 long
    trajectories, 14 MB.

    Result: those that find no room are refused, with RetryInfo; the scheduler goes on writing; each
    batch that is taken and confirmed lets more of them in; every trajectory that was accepted comes
    out once, token for token.
    """
    common = {"TREADLE_NATS_URL": small_nats.url, "TREADLE_FACTS_BYTES": str(MIB)}
    service = await start_service(
        "treadle_rollout", {**common, "TREADLE_ROLLOUT_PAYLOAD_BYTES": str(8 * MIB)}
    )
    scheduler = await start_service("treadle_scheduler", common)
    async with (
        grpc.aio.insecure_channel(service.address) as channel,
        grpc.aio.insecure_channel(scheduler.address) as control,
    ):
        calls, opened = RolloutCalls(channel), scheduler_pb2_grpc.SchedulerServiceStub(control)
        waiting = {f"t{i}": finished(f"t{i}", f"p{i}", sampled=LONG) for i in range(12)}
        submitted = dict(waiting)
        await calls.create(prompts=12)
        taken: dict[str, object] = {}
        for number in range(12):
            for name in list(waiting):
                try:
                    await calls.submit(waiting[name])
                    del waiting[name]
                except grpc.aio.AioRpcError as error:
                    assert error_of(error)[:2] == (
                        grpc.StatusCode.RESOURCE_EXHAUSTED,
                        "PAYLOADS_FULL",
                    )
                    assert error_of(error).retry_after_s
            assert waiting or number
            for sample in range(20):
                request = scheduler_pb2.OpenTrajectoryRequest(
                    request_id=f"{number}-{sample}", prompt_id="p", sample=sample, prompt_tokens=1
                )
                await opened.OpenTrajectory(request, timeout=CALL_S)
            batch = await calls.stream(f"b{number}", 2)
            taken |= {t.trajectory_id: t for group in batch.groups for t in group.trajectories}
            await calls.confirm(f"b{number}")
            if batch.exhausted:
                break
    assert number > 1 and taken == submitted
