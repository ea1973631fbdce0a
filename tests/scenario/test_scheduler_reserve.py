"""Policy.reserve at the scheduler service: a trajectory begins when its engine has room for what it
may grow to."""

import asyncio
from collections.abc import AsyncIterator

import grpc
import pytest
from support.conditions import until_said
from support.fake_sglang import FakeSglang
from support.rpc import refusal_of
from support.scheduler import SchedulerClient, scheduler
from support.sidecar_in_process import sidecar


@pytest.fixture
async def client(nats_url: str) -> AsyncIterator[SchedulerClient]:
    """The engine holds 400 tokens of KV, and has a ticket out for `first`; `second` and `third` are
    open.

    An unpredicted trajectory is expected to grow by 512 tokens, of which 0.7 count.
    """
    async with scheduler(nats_url) as client:
        await client.register("e0", kv_tokens_capacity=400)
        await client.set_policy(migrate=True, preempt=True, reserve=True)
        for name in ("first", "second", "third"):
            await client.open(name)
        assert (await client.step("first", 0)).engine_id == "e0"
        yield client


async def test_a_second_trajectory_waits_for_room_and_begins_when_the_first_has_ended(
    client: SchedulerClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("treadle_scheduler.driver.TICK_S", 0.05)
    waiting = asyncio.create_task(client.step("second", 0))
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.7):  # more than a tick
            await asyncio.shield(waiting)
    await client.close("first")
    assert (await waiting).trajectory_id == "second"


async def test_who_waits_too_long_is_told_to_ask_again_and_gets_the_ticket_issued_meanwhile(
    client: SchedulerClient,
) -> None:
    held = await until_said(
        lambda: refusal_of(client.step("second", 0, request_id="the-same-request", timeout_s=0.8)),
        # which a busy machine may come to first
        lambda said: said.code is not grpc.StatusCode.DEADLINE_EXCEEDED,
    )
    assert (held.code, held.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "STEP_HELD")
    assert held.retry_after_s is not None
    await client.close("first")
    assert (await client.step("second", 0, request_id="the-same-request")).trajectory_id == "second"


async def test_closing_a_trajectory_that_waits_forgets_its_request(client: SchedulerClient) -> None:
    await refusal_of(client.step("second", 0, timeout_s=0.5))
    await client.close("second")
    await client.close("first")
    assert (await client.step("third", 0)).trajectory_id == "third"


async def test_an_expired_ticket_that_no_step_has_used_gives_up_its_slot(
    nats_url: str, engine: FakeSglang
) -> None:
    """Its client has no job and never calls Generate. Result: the real sidecar knows no such step,
    and the step that waits for the only slot gets its ticket."""
    async with (
        scheduler(nats_url, ticket_ttl_s=1.0) as client,
        sidecar(nats_url, engine.url, scheduler=client.address, slots=1),
    ):
        await client.until_registered(1)
        for name in ("gone", "waiting"):
            await client.open(name)
        await client.step("gone", 0)
        assert (await client.step("waiting", 0, timeout_s=60.0)).trajectory_id == "waiting"
