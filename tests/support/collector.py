"""An OTLP collector in this process, which keeps the figures that services send."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc.aio
from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2, metrics_service_pb2_grpc
from opentelemetry.proto.metrics.v1.metrics_pb2 import Metric


class Collector(metrics_service_pb2_grpc.MetricsServiceServicer):
    """Keeps the newest of each figure, and which services have sent any."""

    def __init__(self) -> None:
        self.metrics: dict[str, Metric] = {}
        self.services: set[str] = set()

    async def Export(
        self, request: metrics_service_pb2.ExportMetricsServiceRequest, context: Any
    ) -> metrics_service_pb2.ExportMetricsServiceResponse:
        del context
        for resource in request.resource_metrics:
            self.services |= {a.value.string_value for a in resource.resource.attributes if a.key == "service.name"}
            self.metrics |= {metric.name: metric for scope in resource.scope_metrics for metric in scope.metrics}
        return metrics_service_pb2.ExportMetricsServiceResponse()

    def points(self, name: str) -> list[tuple[dict[str, str], Any]]:
        """Labels and value of each point of a figure."""
        metric = self.metrics[name]
        data = getattr(metric, metric.WhichOneof("data") or "")
        return [({each.key: each.value.string_value for each in p.attributes}, p) for p in data.data_points]


@asynccontextmanager
async def collecting() -> AsyncIterator[tuple[Collector, str]]:
    """A collector and its endpoint."""
    collector = Collector()
    async with serving(collector, metrics_service_pb2_grpc.add_MetricsServiceServicer_to_server) as endpoint:
        yield collector, endpoint


@asynccontextmanager
async def serving(servicer: object, add: Callable[[Any, grpc.aio.Server], None]) -> AsyncIterator[str]:
    """The endpoint of a servicer of OTLP."""
    server = grpc.aio.server()
    add(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        await server.stop(0)
