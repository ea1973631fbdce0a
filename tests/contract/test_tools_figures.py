"""The tools service's figures as an OTLP collector gets them."""

from typing import Any

import grpc.aio
from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2, metrics_service_pb2_grpc
from opentelemetry.proto.metrics.v1.metrics_pb2 import Metric
from support.processes import StartService
from support.tools import tools


class Collector(metrics_service_pb2_grpc.MetricsServiceServicer):
    """Keeps the newest of each figure, with its service."""

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
        metric = self.metrics[f"treadle.tools.{name}"]
        data = getattr(metric, metric.WhichOneof("data") or "")
        return [({each.key: each.value.string_value for each in p.attributes}, p) for p in data.data_points]


async def test_figures_of_actions_cores_and_memory_reach_the_collector(start_service: StartService) -> None:
    """
    WHEN    two snippets run, one of which fails, a session stays open, and the service is stopped
    Result: the collector has each action's times by tool and status, what cores were held and used, what is held
    """
    collector = Collector()
    server = grpc.aio.server()
    metrics_service_pb2_grpc.add_MetricsServiceServicer_to_server(collector, server)  # type: ignore[no-untyped-call]
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    settings = {"OTLP_ENDPOINT": f"http://127.0.0.1:{port}", "CORES": "2"}
    async with tools(start_service, "python", "frozen_lake", **settings) as calls:
        await calls.python("sum(range(10**6))")
        await calls.python("1 / 0")
        await calls.open("frozen_lake")
        calls.process.terminate()
        assert await calls.process.wait() == 0, calls.process.stderr_text()
    await server.stop(0)
    assert collector.services == {"treadle-tools"}
    for name in ("action.queue", "action.overhead", "action.execution"):
        counted = {(labels["tool"], labels["status"]): point.count for labels, point in collector.points(name)}
        assert counted == {("python", "ok"): 1, ("python", "tool_error"): 1, ("frozen_lake", "ok"): 1}
    assert all(point.sum > 0 for _, point in collector.points("action.execution"))
    held = {labels["tool"]: point.as_double for labels, point in collector.points("cores.held")}
    assert min(held["python"], held["frozen_lake"]) > 0
    capacity = {labels["dimension"]: point.as_int for labels, point in collector.points("capacity")}
    assert capacity["cpu_cores"] == 2
    assert {labels["dimension"] for labels, _ in collector.points("waiting")} == {"cpu_cores", "memory_bytes"}
