"""Errors on the wire: what a client reads from a failed call, with our parser and with google.rpc's
own."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio
import pytest
import pytest_asyncio
from google.rpc import error_details_pb2
from grpc_status import rpc_status
from support.nats_server import NatsServer
from support.probe_service import ProbeSettings, plan, wire
from support.rpc import answer_of, error_of, refusal_of, status_of
from treadle.migrator.v1 import migrator_pb2, migrator_pb2_grpc
from treadle.placement.v1 import placement_pb2, placement_pb2_grpc
from treadle_runtime.server import serving

LIMIT = 65_536
BAD = b"\x0a\xff\xff"  # no message
PLAN = "/treadle.placement.v1.PlacementService/PlanPlacement"


pytestmark = pytest.mark.asyncio(loop_scope="module")


@asynccontextmanager
async def probe_channel(nats_url: str, upstream: str = "") -> AsyncIterator[grpc.aio.Channel]:
    """A channel to a probe service in this process."""
    settings = ProbeSettings(nats_url=nats_url, upstream=upstream, max_message_bytes=LIMIT)
    async with (
        serving(settings, wire) as server,
        grpc.aio.insecure_channel(server.address) as channel,
    ):
        yield channel


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def channel(shared_nats_url: str) -> AsyncIterator[grpc.aio.Channel]:
    async with probe_channel(shared_nats_url) as channel:
        yield channel


async def failure(channel: grpc.aio.Channel, what: str) -> grpc.aio.AioRpcError:
    """How the call fails."""
    with pytest.raises(grpc.aio.AioRpcError) as failed:
        await placement_pb2_grpc.PlacementServiceStub(channel).PlanPlacement(plan(what), timeout=10)
    return failed.value


async def test_a_google_rpc_parser_reads_our_errors(channel: grpc.aio.Channel) -> None:
    invalid = rpc_status.from_call(await failure(channel, "invalid"))
    full = rpc_status.from_call(await failure(channel, "full"))

    assert invalid is not None
    assert invalid.code == grpc.StatusCode.INVALID_ARGUMENT.value[0]
    assert invalid.message == "engines[0].slot_limit: must be >= 1, is 0"
    info, bad_request = error_details_pb2.ErrorInfo(), error_details_pb2.BadRequest()
    assert invalid.details[0].Unpack(info)
    assert (info.reason, info.domain, dict(info.metadata)) == (
        "INVALID_ARGUMENT",
        "probe.treadle",
        {"engine_id": "e0"},
    )
    assert invalid.details[1].Unpack(bad_request)
    violation = bad_request.field_violations[0]
    assert (violation.field, violation.description) == (
        "engines[0].slot_limit",
        "must be >= 1, is 0",
    )

    assert full is not None
    assert full.code == grpc.StatusCode.RESOURCE_EXHAUSTED.value[0]
    retry = error_details_pb2.RetryInfo()
    assert full.details[1].Unpack(retry)
    assert retry.retry_delay.ToMilliseconds() == 1500


async def test_core_exceptions_become_what_the_service_s_table_says_also_out_of_a_task_group(
    channel: grpc.aio.Channel,
) -> None:
    core = await failure(channel, "core")
    group = await failure(channel, "group")
    assert error_of(core) == (grpc.StatusCode.FAILED_PRECONDITION, "CORE_SAYS_NO", (), None)
    assert error_of(group) == (grpc.StatusCode.FAILED_PRECONDITION, "NOT_NOW", (), None)


async def test_a_bug_is_internal_and_does_not_leak_its_text(channel: grpc.aio.Channel) -> None:
    error = await failure(channel, "bug")
    assert error_of(error)[:2] == (grpc.StatusCode.INTERNAL, "INTERNAL")
    assert "a bug" not in (error.details() or "")
    assert "ZeroDivisionError" in (error.details() or "")


async def test_an_error_that_quotes_something_huge_still_arrives(channel: grpc.aio.Channel) -> None:
    error = await failure(channel, "long")
    assert error_of(error)[:2] == (grpc.StatusCode.NOT_FOUND, "THING_NOT_FOUND")
    assert "100000 characters" in status_of(error).message


async def test_a_call_without_deadline_is_refused(channel: grpc.aio.Channel) -> None:
    error = await refusal_of(
        placement_pb2_grpc.PlacementServiceStub(channel).PlanPlacement(plan(""))
    )
    assert error[:3] == (grpc.StatusCode.INVALID_ARGUMENT, "DEADLINE_REQUIRED", ("(deadline)",))


async def test_an_oversize_message_is_refused_with_its_size_and_the_limit(
    channel: grpc.aio.Channel,
) -> None:
    error = await failure(channel, "x" * 100_000)
    await placement_pb2_grpc.PlacementServiceStub(channel).PlanPlacement(
        plan("x" * 65_000), timeout=10
    )
    assert error_of(error)[:3] == (
        grpc.StatusCode.INVALID_ARGUMENT,
        "MESSAGE_TOO_LARGE",
        ("(message)",),
    )
    assert "100" in (error.details() or "")
    assert f"the limit is {LIMIT}" in (error.details() or "")


async def test_a_malformed_message_is_refused_by_unary_and_streaming_calls(
    channel: grpc.aio.Channel,
) -> None:
    plain: Any = channel  # the stubs type methods by their messages; these are bytes
    watch = plain.unary_stream("/treadle.migrator.v1.MigratorService/WatchMigration")
    for call in (plain.unary_unary(PLAN)(BAD, timeout=10), watch(BAD, timeout=10).read()):
        error = await refusal_of(call)
        assert error[:3] == (grpc.StatusCode.INVALID_ARGUMENT, "MESSAGE_MALFORMED", ("(message)",))


async def test_an_rpc_without_code_behind_it_is_unimplemented(channel: grpc.aio.Channel) -> None:
    stub = migrator_pb2_grpc.MigratorServiceStub(channel)
    plain: Any = channel
    failed = await refusal_of(stub.GetMigration(migrator_pb2.GetMigrationRequest(), timeout=10))
    unknown = await refusal_of(
        plain.unary_unary("/treadle.loom.v1.LoomService/Weave")(b"", timeout=10)
    )
    assert failed[:2] == (grpc.StatusCode.UNIMPLEMENTED, "UNIMPLEMENTED")
    assert unknown.code is grpc.StatusCode.UNIMPLEMENTED


async def test_a_stream_may_fail_after_its_first_message(channel: grpc.aio.Channel) -> None:
    watch = migrator_pb2_grpc.MigratorServiceStub(channel).WatchMigration(
        migrator_pb2.WatchMigrationRequest(migration_id="refuse")
    )
    assert await watch.read() is not grpc.aio.EOF
    error = await refusal_of(watch.read())
    assert error[:2] == (grpc.StatusCode.NOT_FOUND, "MIGRATION_NOT_FOUND")


class Cutting(placement_pb2_grpc.PlacementServiceServicer):
    """Answers as gRPC does for calls that still wait when their server ends."""

    async def PlanPlacement(
        self, request: placement_pb2.PlanPlacementRequest, context: Any
    ) -> placement_pb2.PlanPlacementResponse:
        del request
        await context.abort(grpc.StatusCode.CANCELLED)
        raise AssertionError


async def test_a_failure_of_an_asked_service_is_told_from_one_s_own(shared_nats_url: str) -> None:
    """A probe asks one that refuses, one that ends and cuts the call (CANCELLED), then one that is
    not there.

    Result: a refusal is this service's fault (INTERNAL), an absence is UNAVAILABLE with RetryInfo.
    """
    async with (
        serving(ProbeSettings(nats_url=shared_nats_url), wire) as upstream,
        probe_channel(shared_nats_url, upstream.address) as channel,
    ):
        refused = await failure(channel, "upstream:invalid")
    ending = grpc.aio.server()
    placement_pb2_grpc.add_PlacementServiceServicer_to_server(Cutting(), ending)
    port = ending.add_insecure_port("127.0.0.1:0")
    await ending.start()
    async with probe_channel(shared_nats_url, f"127.0.0.1:{port}") as channel:
        cut = await failure(channel, "upstream:")
    await ending.stop(0)
    async with probe_channel(shared_nats_url, upstream.address) as channel:
        absent = await failure(channel, "upstream:")
    assert error_of(refused)[:2] == (grpc.StatusCode.INTERNAL, "UPSTREAM_ERROR")
    for lost in (cut, absent):
        code, reason, _, retry_after_s = error_of(lost)
        assert (code, reason) == (grpc.StatusCode.UNAVAILABLE, "UPSTREAM_UNAVAILABLE")
        assert retry_after_s


@pytest.mark.usefixtures("impatient")
async def test_while_nats_is_away_a_recorded_mutation_is_unavailable_with_retry(
    nats_server: NatsServer,
) -> None:
    """The probe's CancelMigration records its answer; NATS is killed before the call and back after
    it.

    Result: UNAVAILABLE with RetryInfo; the repeat afterwards gets the answer of the one execution.
    """
    async with probe_channel(nats_server.url) as channel:
        stub = migrator_pb2_grpc.MigratorServiceStub(channel)
        request = migrator_pb2.CancelMigrationRequest(request_id="r-1")
        nats_server.kill()
        code, reason, _, retry_after_s = await refusal_of(stub.CancelMigration(request, timeout=30))
        nats_server.start()
        assert (code, reason) == (grpc.StatusCode.UNAVAILABLE, "BUS_UNAVAILABLE")
        assert retry_after_s
        response = await answer_of(lambda: stub.CancelMigration(request, timeout=30))
        assert response.migration.revision == 1
