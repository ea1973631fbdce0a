"""NATS goes away under the rollout service and comes back with its store."""

import asyncio

import grpc
import grpc.aio
import pytest
from support.conditions import until
from support.finished_trajectories import CALL_S, finished, members, rollout_service
from support.nats_server import NatsServer
from support.rpc import refusal_of


@pytest.mark.usefixtures("impatient")
async def test_a_submission_that_nats_did_not_take_can_be_repeated_and_counts_once(nats_server: NatsServer) -> None:
    """A worker submits while NATS is away, is told so, and retries until it is back; a trainer waits all the while.

    The first try may have reached the store without its acknowledgement. Result: one trajectory, in one batch.
    """
    async with rollout_service(nats_server.url) as calls:
        await calls.create(prompts=2)
        await calls.submit(finished("t0", "p0"))
        async with asyncio.TaskGroup() as group:
            waiting = group.create_task(calls.batch("b", 2, wait=True))
            await until(lambda: not waiting.done())
            nats_server.kill()
            refusal = await refusal_of(calls.submit(finished("t1", "p1"), "one"))
            assert refusal[:2] == (grpc.StatusCode.UNAVAILABLE, "BUS_UNAVAILABLE")
            nats_server.start()
            verdict = None
            async with asyncio.timeout(CALL_S):
                while verdict is None:
                    try:
                        verdict = await calls.submit(finished("t1", "p1"), "one")
                    except grpc.aio.AioRpcError as error:
                        assert error.code() is grpc.StatusCode.UNAVAILABLE
        assert verdict.kept
        assert members(waiting.result()) == [["t0"], ["t1"]]
        rollout = await calls.get()
    assert [group.received for group in rollout.groups] == [1, 1]
