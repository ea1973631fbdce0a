"""Policy.reserve at the scheduler service: a trajectory begins when its engine has room for what it may grow to."""

import asyncio
import uuid
from typing import Any

import grpc
import grpc.aio
import pytest
from support.rpc import error_of
from support.scheduler import SchedulerClient, scheduler
from treadle.scheduler.v1 import scheduler_pb2 as pb


async def reserve(client: SchedulerClient) -> None:
    policy = pb.Policy(
        ordering=pb.ORDERING_PROGRESSIVE, placement=pb.PLACEMENT_RULE_PLANNED, migrate=True, preempt=True, reserve=True
    )
    await client.call("SetPolicy", pb.SetPolicyRequest(request_id=uuid.uuid4().hex, policy=policy))


def ask(trajectory_id: str, request_id: str = "") -> pb.ScheduleStepRequest:
    return pb.ScheduleStepRequest(
        request_id=request_id or uuid.uuid4().hex,
        trajectory_id=trajectory_id,
        turn=0,
        context_tokens=10,
        max_new_tokens=8,
    )


async def close(client: SchedulerClient, trajectory_id: str) -> None:
    await client.call(
        "CloseTrajectory",
        pb.CloseTrajectoryRequest(
            request_id=uuid.uuid4().hex, trajectory_id=trajectory_id, outcome=pb.OUTCOME_CANCELLED
        ),
    )


async def test_a_second_trajectory_waits_for_room_and_begins_when_the_first_has_ended(nats_url: str) -> None:
    """The engine holds 400 tokens of KV; an unpredicted trajectory is expected to grow by 512, of which 0.7 count.
    Result: one ticket, one call that hangs, and its ticket once the first trajectory is closed."""
    async with scheduler(nats_url) as client:
        await client.register("e0", kv_tokens_capacity=400)
        await reserve(client)
        first, second = await client.open("first"), await client.open("second")

        ticket = (await client.call("ScheduleStep", ask(first.trajectory_id))).ticket
        assert ticket.engine_id == "e0"
        waiting: asyncio.Task[Any] = asyncio.create_task(client.call("ScheduleStep", ask(second.trajectory_id)))
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1.5):  # three ticks of the scheduler
                await asyncio.shield(waiting)
        await close(client, first.trajectory_id)

        assert (await waiting).ticket.trajectory_id == "second"


async def test_who_waits_too_long_is_told_to_ask_again_and_gets_the_ticket_issued_meanwhile(nats_url: str) -> None:
    async with scheduler(nats_url) as client:
        await client.register("e0", kv_tokens_capacity=400)
        await reserve(client)
        await client.open("first")
        await client.open("second")
        await client.call("ScheduleStep", ask("first"))
        request = ask("second", "the-same-request")

        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await client.stub.ScheduleStep(request, timeout=0.8)
        code, reason, _, retry_after_s = error_of(raised.value)
        assert (code, reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "STEP_HELD")
        assert retry_after_s is not None
        await close(client, "first")

        assert (await client.call("ScheduleStep", request)).ticket.trajectory_id == "second"


async def test_closing_a_trajectory_that_waits_forgets_its_request(nats_url: str) -> None:
    async with scheduler(nats_url) as client:
        await client.register("e0", kv_tokens_capacity=400)
        await reserve(client)
        for name in ("first", "second", "third"):
            await client.open(name)
        await client.call("ScheduleStep", ask("first"))
        with pytest.raises(grpc.aio.AioRpcError):
            await client.stub.ScheduleStep(ask("second"), timeout=0.5)
        await close(client, "second")
        await close(client, "first")

        assert (await client.call("ScheduleStep", ask("third"))).ticket.trajectory_id == "third"
