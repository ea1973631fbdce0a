"""Fakes refuse as the services do: the same calls to both, and no reason with another code than the
contract gives it."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio
import pytest
from support.engine_steps import run_step, step_request, ticket
from support.fake_engine import FakeEngine, engine_port
from support.fake_scheduler import FakeScheduler
from support.fake_servicer import Port
from support.fake_sglang import fake_sglang
from support.reasons import RAISED, ROOT, by_contract, by_services, named_in, possible_codes
from support.rpc import RpcError, error_of
from support.scheduler import SchedulerClient, scheduler, scheduler_client
from support.sidecar_in_process import sidecar
from treadle.common.v1.tokens_pb2 import SamplingParams
from treadle.engine.v1 import engine_pb2, engine_pb2_grpc
from treadle.scheduler.v1 import scheduler_pb2 as pb
from treadle.scheduler.v1.scheduler_pb2_grpc import add_SchedulerServiceServicer_to_server

CALL_S = 20.0
Outcome = tuple[grpc.StatusCode, str, tuple[str, ...], bool] | str


async def outcome_of(call: Awaitable[object]) -> Outcome:
    """Code, reason, fields, and whether it says when to come again; OK where the call succeeds."""
    try:
        await call
    except grpc.aio.AioRpcError as error:
        found: RpcError = error_of(error)
        return found.code, found.reason, found.fields, found.retry_after_s is not None
    return "OK"


async def engine_outcomes(stub: engine_pb2_grpc.EngineServiceAsyncStub) -> dict[str, Outcome]:
    """Of calls to a sidecar of the engine e0."""

    def step(engine_id: str = "e0") -> engine_pb2.GenerateRequest:
        return step_request(ticket(engine_id), [5, 6, 7], SamplingParams(max_new_tokens=4))

    used, late, undated = step(), step(), step()
    late.ticket.expires_at.FromNanoseconds(time.time_ns() - 10**9)
    undated.ticket.ClearField("expires_at")
    steps = {"good": used, "used": used, "late": late, "undated": undated, "other": step("e1")}
    found = {name: await outcome_of(run_step(stub, request)) for name, request in steps.items()}
    calls: dict[str, Awaitable[object]] = {
        "abort": stub.Abort(
            engine_pb2.AbortRequest(request_id="a", ticket_id=used.ticket.ticket_id), timeout=CALL_S
        ),
        "export": stub.ExportPrefix(
            engine_pb2.ExportPrefixRequest(trajectory_id="gone"), timeout=CALL_S
        ),
        "release": stub.ReleasePrefix(
            engine_pb2.ReleasePrefixRequest(request_id="r", trajectory_id="gone"), timeout=CALL_S
        ),
        "load": stub.GetLoad(engine_pb2.GetLoadRequest(), timeout=CALL_S),
    }
    return found | {name: await outcome_of(call) for name, call in calls.items()}


async def test_the_fake_engine_refuses_what_a_sidecar_refuses(nats_url: str) -> None:
    fake = FakeEngine("e0")  # type: ignore[abstract]
    async with (
        fake_sglang() as sglang,
        sidecar(nats_url, sglang.url) as side,
        engine_port(fake),
        grpc.aio.insecure_channel(fake.address) as channel,
    ):
        real = await engine_outcomes(side.stub)
        assert await engine_outcomes(engine_pb2_grpc.EngineServiceStub(channel)) == real
    assert real["late"] == (grpc.StatusCode.PERMISSION_DENIED, "TICKET_EXPIRED", (), False)
    assert real["good"] == "OK"


async def scheduler_outcomes(
    calls: SchedulerClient, add_engine: Callable[[], Awaitable[object]]
) -> dict[str, Outcome]:
    """Of calls to a scheduler, which gets its engine in the middle."""
    found: dict[str, Outcome] = {}

    async def note(name: str, call: Awaitable[object]) -> None:
        found[name] = await outcome_of(call)

    await note("no prompt", calls.open("t", prompt_tokens=0))
    await note("open", calls.open("t"))
    await note("no engine", calls.step("t", 0))
    await add_engine()
    await note("unknown", calls.step("gone", 0))
    await note("late turn", calls.step("t", 1))
    out = await calls.step("t", 0, request_id="first")
    await note("again", calls.step("t", 0))
    await note("reused", calls.step("t", 0, request_id="first", max_new_tokens=9))
    await note("another", calls.step("t", 0, replaces_ticket_id="k"))
    await note("replaced", calls.step("t", 0, replaces_ticket_id=out.ticket_id))
    await note("close", calls.close("t"))
    await note("closed", calls.close("t"))
    await note("step of closed", calls.step("t", 1))
    await note("close unknown", calls.close("gone"))
    await note("read unknown", calls.trajectory("gone"))
    lease = pb.RenewEngineLeaseRequest(lease_id="gone", engine_id="e0")
    await note("lease", calls.call("RenewEngineLease", lease))
    return found


@asynccontextmanager
async def fake_calls() -> AsyncIterator[tuple[FakeScheduler, SchedulerClient]]:
    fake = FakeScheduler()  # type: ignore[abstract]
    async with (
        Port(add_SchedulerServiceServicer_to_server, fake) as address,
        scheduler_client(address) as calls,
    ):
        yield fake, calls


async def test_the_fake_scheduler_refuses_what_the_scheduler_refuses(nats_url: str) -> None:
    async with scheduler(nats_url) as calls, fake_calls() as (fake, fake_client):
        real = await scheduler_outcomes(calls, lambda: calls.register("e0"))

        async def add_engine() -> None:
            fake.engines["e0"] = "127.0.0.1:1"

        assert await scheduler_outcomes(fake_client, add_engine) == real
    assert "OK" not in {real[name] for name in ("again", "another", "closed", "lease")}


def test_services_give_each_reason_the_code_of_the_contract() -> None:
    raised, named = by_services(), by_contract()
    assert len(raised) > 40 and len(named) > 40
    assert {reason: raised[reason] for reason in raised.keys() & named.keys()} == {
        reason: named[reason] for reason in raised.keys() & named.keys()
    }


def test_the_contract_names_every_reason_of_a_step() -> None:
    """A client decides by them whether the step goes on."""
    sources = (ROOT / "services/sidecar/treadle_sidecar").rglob("*.py")
    raised = {reason for file in sources for _, reason in RAISED.findall(file.read_text())}
    assert len(raised) > 10
    assert not raised - by_contract().keys()


@pytest.mark.parametrize(
    "page", sorted((ROOT / "docs").glob("*.md")), ids=lambda page: str(page.stem)
)
def test_pages_give_each_reason_the_code_that_services_give_it(page: Any) -> None:
    wrong = [
        (reason, code)
        for reason, code in named_in(page.read_text())
        if (codes := possible_codes(reason)) and code not in codes
    ]
    assert not wrong
