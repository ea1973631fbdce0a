"""NATS goes away under the rollout service and comes back with its store."""

import asyncio
from functools import partial

import grpc
import pytest
from support.conditions import until
from support.finished_trajectories import finished, members, rollout_service
from support.nats_server import NatsServer
from support.rpc import answer_of, refusal_of, refused


@pytest.mark.usefixtures("impatient")
async def test_a_submission_that_nats_did_not_take_can_be_repeated_and_counts_once(
    nats_server: NatsServer,
) -> None:
    """A worker submits while NATS is away, is told so, and retries until it is back; a trainer
    waits all the while.

    The first try may have reached the store without its acknowledgement. Result: one trajectory, in
    one batch.
    """
    async with rollout_service(nats_server.url) as calls:
        await answer_of(partial(calls.create, prompts=2))
        await answer_of(partial(calls.submit, finished("t0", "p0")))
        async with asyncio.TaskGroup() as group:
            waiting = group.create_task(calls.batch("b", 2, wait=True))
            await until(lambda: not waiting.done())
            nats_server.kill()
            refusal = await refusal_of(calls.submit(finished("t1", "p1"), "one"))
            assert refusal[:2] == (grpc.StatusCode.UNAVAILABLE, "BUS_UNAVAILABLE")
            nats_server.start()
            verdict = await answer_of(lambda: calls.submit(finished("t1", "p1"), "one"))
        assert verdict.kept
        assert members(waiting.result()) == [["t0"], ["t1"]]
        rollout = await calls.get()
    assert [group.received for group in rollout.groups] == [1, 1]


@pytest.mark.usefixtures("impatient")
async def test_an_unconfirmed_batch_is_read_again_and_confirmed_once_nats_is_back(
    nats_server: NatsServer,
) -> None:
    """It is asked for during one outage, and confirmed during the next. Result: UNAVAILABLE;
    afterwards both RPCs give the same batch, and a repeated confirmation removes it."""
    async with rollout_service(nats_server.url) as calls:
        await answer_of(partial(calls.create, prompts=2))
        for number in range(2):
            await answer_of(partial(calls.submit, finished(f"t{number}", f"p{number}")))
        taken = await answer_of(partial(calls.batch, "b"))
        nats_server.kill()
        for read in (calls.batch, calls.stream):
            with refused("BUS_UNAVAILABLE", grpc.StatusCode.UNAVAILABLE):
                await read("b")
        nats_server.start()
        for read in (calls.batch, calls.stream):
            assert await answer_of(partial(read, "b")) == taken
        nats_server.kill()
        with refused("BUS_UNAVAILABLE", grpc.StatusCode.UNAVAILABLE):
            await calls.confirm("b")
        nats_server.start()
        await answer_of(lambda: calls.confirm("b"))
        with refused("BATCH_EXPIRED"):
            await calls.batch("b")
        assert members(await calls.stream("c", 2)) == [["t1"]]
