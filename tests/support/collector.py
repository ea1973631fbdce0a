"""An OTLP collector in this process, which keeps the spans and the metrics that services send."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc.aio
from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2, metrics_service_pb2_grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.metrics.v1.metrics_pb2 import Metric
from opentelemetry.proto.resource.v1.resource_pb2 import Resource
from opentelemetry.proto.trace.v1.trace_pb2 import Span


class Collector(metrics_service_pb2_grpc.MetricsServiceServicer):
    """spans: all, each with the name of its service. metrics: the newest, by service, instance and
    name."""

    def __init__(self) -> None:
        self.spans: list[tuple[str, Span]] = []
        self.metrics: dict[tuple[str, str, str], Metric] = {}

    async def Export(
        self, request: metrics_service_pb2.ExportMetricsServiceRequest, context: Any
    ) -> metrics_service_pb2.ExportMetricsServiceResponse:
        del context
        for sent in request.resource_metrics:
            service, instance = (
                _name(sent.resource, "service.name"),
                _name(sent.resource, "service.instance.id"),
            )
            for scope in sent.scope_metrics:
                self.metrics |= {
                    (service, instance, metric.name): metric for metric in scope.metrics
                }
        return metrics_service_pb2.ExportMetricsServiceResponse()

    def take_spans(self, request: trace_service_pb2.ExportTraceServiceRequest) -> None:
        """Keep what a call brought."""
        for sent in request.resource_spans:
            service = _name(sent.resource, "service.name")
            self.spans += [(service, span) for scope in sent.scope_spans for span in scope.spans]

    def points(self, name: str) -> list[tuple[dict[str, str], Any]]:
        """Labels and value of each point of a metric, of all processes."""
        found = [metric for (_, _, each), metric in self.metrics.items() if each == name]
        return [(labels_of(point), point) for metric in found for point in points_of(metric)]

    def named(self, part: str, kind: "Span.SpanKind.ValueType") -> list[Span]:
        """The spans of a kind whose name contains `part`."""
        return [span for _, span in self.spans if part in span.name and span.kind == kind]


class _Traces(trace_service_pb2_grpc.TraceServiceServicer):
    def __init__(self, collector: Collector) -> None:
        self._collector = collector

    async def Export(
        self, request: trace_service_pb2.ExportTraceServiceRequest, context: Any
    ) -> trace_service_pb2.ExportTraceServiceResponse:
        del context
        self._collector.take_spans(request)
        return trace_service_pb2.ExportTraceServiceResponse()


def points_of(metric: Metric) -> list[Any]:
    """The points of any kind of metric."""
    return list(getattr(metric, metric.WhichOneof("data") or "").data_points)


def labels_of(said: Any) -> dict[str, str]:
    """The attributes of a point or span that are texts."""
    return {
        each.key: each.value.string_value
        for each in said.attributes
        if each.value.HasField("string_value")
    }


def _name(resource: Resource, key: str) -> str:
    return labels_of(resource).get(key, "")


@asynccontextmanager
async def collecting(port: int = 0) -> AsyncIterator[tuple[Collector, str]]:
    """A collector and its endpoint; at a free port where none is given."""
    collector, server = Collector(), grpc.aio.server()
    add_metrics: Callable[..., None] = metrics_service_pb2_grpc.add_MetricsServiceServicer_to_server
    add_traces: Callable[..., None] = trace_service_pb2_grpc.add_TraceServiceServicer_to_server
    add_metrics(collector, server)
    add_traces(_Traces(collector), server)
    port = server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    try:
        yield collector, f"http://127.0.0.1:{port}"
    finally:
        await server.stop(0)
