"""Telemetry against an OTLP collector in this process: one trace from the client's call to the
handler of a fact."""

import json
from collections.abc import Iterator
from functools import partial
from typing import Any

import grpc.aio
from opentelemetry.proto.trace.v1.trace_pb2 import Span
from support.collector import collecting
from support.conditions import until
from support.facts import hear
from support.probe_service import PROBE, ProbeSettings, plan
from support.processes import ServiceProcess, StartService
from support.rpc import refusal_of
from treadle.migrator.v1 import migrator_pb2, migrator_pb2_grpc
from treadle.placement.v1 import placement_pb2_grpc
from treadle_runtime.bus import open_bus
from treadle_runtime.telemetry import Tracing, configure_tracing


def log_lines(text: str) -> Iterator[dict[str, Any]]:
    """The JSON lines of a service's stderr."""
    return (json.loads(line) for line in text.splitlines() if line.startswith("{"))


async def call(address: str, what: str) -> None:
    """Make the probe at `address` do `what`."""
    async with grpc.aio.insecure_channel(address) as channel:
        await placement_pb2_grpc.PlacementServiceStub(channel).PlanPlacement(plan(what), timeout=30)


async def test_one_trace_runs_through_two_services_and_on_to_the_handler_of_a_fact(
    start_service: StartService, nats_url: str
) -> None:
    """Probe A asks probe B; then B's slow call logs and publishes a fact, which this process
    handles.

    Result: A's server span → A's client span → B's server span are one trace; the log line of B's
    slow call carries the trace and span of its RPC, and the handler's span has the same trace and
    that span for a parent.
    """
    async with collecting() as (collector, endpoint):
        env = {"TREADLE_OTLP_ENDPOINT": endpoint, "TREADLE_PROBE_SLOW_S": "0.01"}
        second = await start_service(PROBE, env, service="probe")
        first = await start_service(
            PROBE, {**env, "TREADLE_PROBE_UPSTREAM": second.address}, service="probe"
        )
        tracing = configure_tracing(ProbeSettings(otlp_endpoint=endpoint))
        async with open_bus(nats_url, "test", tracer=tracing.tracer) as bus:
            heard = await hear(bus, "engine_lost")
            await call(first.address, "upstream:")
            await call(second.address, "slow")
            await until(lambda: heard)
        async with grpc.aio.insecure_channel(second.address) as channel:
            watch = migrator_pb2_grpc.MigratorServiceStub(channel).WatchMigration(
                migrator_pb2.WatchMigrationRequest()
            )
            assert len([response async for response in watch]) == 3
        await tracing.shutdown()
        for process in (first, second):
            process.terminate()
            assert await process.wait() == 0, process.stderr_text()

        server, client, consumer = (
            Span.SPAN_KIND_SERVER,
            Span.SPAN_KIND_CLIENT,
            Span.SPAN_KIND_CONSUMER,
        )
        (asked,) = collector.named("PlanPlacement", client)
        plans = {span.span_id: span for span in collector.named("PlanPlacement", server)}
        assert len(plans) == 3
        assert asked.parent_span_id in plans
        (answered,) = [span for span in plans.values() if span.parent_span_id == asked.span_id]
        assert answered.trace_id == asked.trace_id == plans[asked.parent_span_id].trace_id
        (handled,) = collector.named("engine_lost", consumer)
        slow = plans[handled.parent_span_id]
        assert handled.trace_id == slow.trace_id != asked.trace_id
        (line,) = [
            line for line in log_lines(second.stderr_text()) if line["event"] == "slow call begins"
        ]
        assert (line["trace_id"], line["span_id"]) == (slow.trace_id.hex(), slow.span_id.hex())
        assert line["service"] == "probe"
        assert len(collector.named("WatchMigration", server)) == 1
        assert {service for service, _ in collector.spans} == {"treadle-probe"}


async def test_a_collector_that_is_away_changes_nothing_for_callers_and_does_not_hold_up_the_end(
    start_service: StartService,
) -> None:
    process = await start_service(
        PROBE, {"TREADLE_OTLP_ENDPOINT": "http://127.0.0.1:9"}, service="probe"
    )
    await call(process.address, "")
    process.terminate()
    assert await process.wait(30) == 0


def logs_the_bug(process: ServiceProcess) -> bool:
    return "ZeroDivisionError" in process.stderr_text()


async def test_without_an_endpoint_nothing_is_traced_and_a_bug_is_logged_with_its_traceback(
    start_service: StartService,
) -> None:
    tracing = configure_tracing(ProbeSettings())
    assert tracing == Tracing(None)
    assert tracing.server_interceptor() is None
    assert list(tracing.client_interceptors()) == []
    for level in ("info", "error"):
        env = {"TREADLE_PROBE_SLOW_S": "0", "TREADLE_LOG_LEVEL": level}
        process = await start_service(PROBE, env, service="probe")
        await call(process.address, "slow")
        await refusal_of(call(process.address, "bug"))
        await until(partial(logs_the_bug, process))
        lines = list(log_lines(process.stderr_text()))
        assert all("trace_id" not in line for line in lines)
        assert {"serving", "slow call begins"} <= {
            line["event"] for line in lines
        } or level == "error"
        (bug,) = [line for line in lines if line["level"] == "error"]
        assert "Traceback" in bug["exception"] and bug["rpc"] == "PlanPlacement"
    assert lines == [bug], "of the level that is set"


async def test_the_console_format_is_for_people(start_service: StartService) -> None:
    process = await start_service(PROBE, {"TREADLE_LOG_FORMAT": "console"}, service="probe")
    await until(lambda: "serving" in process.stderr_text())
    assert not list(log_lines(process.stderr_text()))
