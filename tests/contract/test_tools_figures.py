"""What the tools service says of its actions: figures as an OTLP collector gets them, and facts on the bus."""

import asyncio
from typing import Any

import grpc.aio
from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2, metrics_service_pb2_grpc
from opentelemetry.proto.metrics.v1.metrics_pb2 import Metric
from support.conditions import until
from support.processes import StartService
from support.tools import tools
from treadle.telemetry.v1.facts_pb2 import Fact
from treadle.tools.v1 import tools_pb2 as pb
from treadle_runtime.bus import open_bus


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


async def test_figures_and_facts_of_actions_say_what_they_took(start_service: StartService, nats_url: str) -> None:
    """
    GIVEN   one core
    WHEN    a snippet runs, two of 0.3 s at the same time, one that fails, a session stays open, the service is stopped
    Result: the collector has each action's times by tool and status, what cores were held and used, what is held;
            each is published as started and finished with its queue, overhead and execution times, and one waited"""
    collector, trajectory_id = Collector(), "t-1"
    published: list[Fact] = []
    server = grpc.aio.server()
    metrics_service_pb2_grpc.add_MetricsServiceServicer_to_server(collector, server)  # type: ignore[no-untyped-call]
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    settings = {"OTLP_ENDPOINT": f"http://127.0.0.1:{port}", "CORES": "1"}
    async with tools(start_service, "python", "frozen_lake", **settings) as calls:
        await calls.python("1", trajectory_id=trajectory_id)
        code = "import time; sum(range(10**6)); time.sleep(0.3)"
        both = await asyncio.gather(*(calls.python(code, trajectory_id=trajectory_id) for _ in range(2)))
        await calls.python("1 / 0")
        await calls.open("frozen_lake")
        calls.process.terminate()
        assert await calls.process.wait() == 0, calls.process.stderr_text()
    await server.stop(0)
    assert collector.services == {"treadle-tools"}
    for name in ("action.queue", "action.overhead", "action.execution"):
        counted = {(labels["tool"], labels["status"]): point.count for labels, point in collector.points(name)}
        assert counted == {("python", "ok"): 3, ("python", "tool_error"): 1, ("frozen_lake", "ok"): 1}
    assert all(point.sum > 0 for _, point in collector.points("action.execution"))
    held = {labels["tool"]: point.as_double for labels, point in collector.points("cores.held")}
    assert min(held["python"], held["frozen_lake"]) > 0
    capacity = {labels["dimension"]: point.as_int for labels, point in collector.points("capacity")}
    assert capacity["cpu_cores"] == 1
    assert {labels["dimension"] for labels, _ in collector.points("waiting")} == {"cpu_cores", "memory_bytes"}

    async def receive(fact: Fact) -> None:
        published.append(fact)

    async with open_bus(nats_url, "test") as bus:
        await bus.subscribe(["tool_started", "tool_finished"], receive, replay=True)
        await until(lambda: len(published) >= 10)
    started = [fact.tool_started for fact in published if fact.HasField("tool_started")][:3]
    finished = [fact.tool_finished for fact in published if fact.HasField("tool_finished")][:3]
    assert [fact.trajectory_id for fact in started] == [trajectory_id] * 3
    assert [fact.status for fact in finished] == [pb.RESULT_STATUS_OK] * 3
    assert started[0].expected_time.ToNanoseconds() == 0
    assert started[1].expected_time.ToNanoseconds() > 0
    queued = sorted(result.timing.queue.ToTimedelta().total_seconds() for result in both)
    assert queued[0] < queued[1] >= 0.15
    assert all(result.timing.execution.ToTimedelta().total_seconds() >= 0.3 for result in both)
    assert finished[-1].timing in [result.timing for result in both]
