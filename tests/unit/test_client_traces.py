"""The trace of a trajectory, as its calls carry it, with and without OpenTelemetry in the caller's
process."""

import json
import re
import subprocess
import sys

import pytest

# Prints the metadata of two calls about a trajectory, of a third one through an interceptor, and
# the spans sent.
SCRIPT = """
import asyncio, json, sys
if "not installed" in sys.argv:
    sys.modules["opentelemetry"] = None
import grpc
from treadle.connection import TrajectoryTrace

METHOD = "/treadle.test/Call"


class Echo(grpc.GenericRpcHandler):
    def service(self, details):
        async def answer(request, context):
            said = {key: value for key, value in details.invocation_metadata if key.startswith("trace")}
            return json.dumps(said).encode()

        return grpc.unary_unary_rpc_method_handler(answer)


async def call(trace, port, interceptors=()):
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", interceptors=list(interceptors)) as channel:
        return json.loads(await trace.bind(channel.unary_unary(METHOD))(b"", timeout=10))


async def main():
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((Echo(),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    spans, interceptors, caller = [], [], None
    if "not installed" not in sys.argv:
        from opentelemetry import trace as otel
        from opentelemetry.instrumentation.grpc import aio_client_interceptors
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import SimpleSpanProcessor
        from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

        if "set up" in sys.argv:
            exporter = InMemorySpanExporter()
            provider = TracerProvider()
            provider.add_span_processor(SimpleSpanProcessor(exporter))
            otel.set_tracer_provider(provider)
        interceptors = aio_client_interceptors(TracerProvider())
    if "set up" in sys.argv:
        with otel.get_tracer("test").start_as_current_span("caller") as span:
            caller = format(span.get_span_context().span_id, "016x")
            trace = TrajectoryTrace()
    else:
        trace = TrajectoryTrace()
    trace.name(trajectory_id="t-1")
    calls = [await call(trace, port), await call(trace, port), await call(trace, port, interceptors)]
    trace.end("finished")
    if "set up" in sys.argv:
        spans = [json.loads(each.to_json()) for each in exporter.get_finished_spans()]
    print(json.dumps({"calls": calls, "spans": spans, "caller": caller}))
    await server.stop(0)


asyncio.run(main())
"""


def ids_of(call: dict[str, str]) -> tuple[str, str]:
    """Trace and span of what a call carried."""
    found = re.fullmatch(r"00-([0-9a-f]{32})-([0-9a-f]{16})-0[13]", call["traceparent"])  # sampled
    assert found is not None
    return found[1], found[2]


@pytest.mark.parametrize("opentelemetry", ["set up", "not set up", "not installed"])
def test_all_calls_about_a_trajectory_belong_to_one_trace(opentelemetry: str) -> None:
    """GIVEN   a process that has set up OpenTelemetry, with a span active; one that has not; one
    without it
    WHEN    a trajectory makes two calls, and a third one on a channel with OpenTelemetry's
    interceptor
    Result: one trace, and one span above the first two, which is the trajectory's; the
    interceptor's own is above the
            third. The process that has set it up sends the trajectory's span, below the active one;
            the others ask the
            scheduler to send it"""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, opentelemetry], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    first, second, intercepted = said["calls"]
    assert first == second
    (trace_id, span_id), (trace_of_third, above_third) = ids_of(first), ids_of(intercepted)
    assert trace_of_third == trace_id
    assert (above_third != span_id) == (opentelemetry != "not installed")
    spans = {each["name"]: each for each in said["spans"]}
    if opentelemetry == "set up":
        assert "tracestate" not in first
        sent = spans["trajectory"]
        assert sent["context"]["span_id"] == f"0x{span_id}"
        assert sent["parent_id"] == f"0x{said['caller']}"
        assert sent["attributes"] == {"treadle.trajectory_id": "t-1", "treadle.outcome": "finished"}
    else:
        assert first["tracestate"] == intercepted["tracestate"] == "treadle=root"
        assert not spans
