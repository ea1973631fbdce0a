"""What a collector gets from a whole mesh: one trace for each trajectory, and the metrics that
docs/metrics.md has."""

import asyncio
from collections import defaultdict

import aiohttp
import pytest
import treadle
from opentelemetry.proto.metrics.v1.metrics_pb2 import Metric
from opentelemetry.proto.trace.v1.trace_pb2 import Span
from support.collector import Collector, collecting, labels_of, points_of
from support.conditions import until_said
from support.fake_sglang import FakeSglang, fake_sglang
from support.mesh_in_process import QUICK, generate
from support.processes import ServiceProcess, StartService, free_port
from support.prometheus import entries, series_of
from support.scheduler import SchedulerClient, scheduler_client
from treadle.scheduler.v1 import scheduler_pb2 as pb

SERVICES = {
    f"treadle-{name}"
    for name in (
        "scheduler",
        "sidecar",
        "predictor",
        "placement",
        "migrator",
        "rollout",
        "tools",
        "gateway",
    )
}
# Of a trajectory's trace: a plan is about all trajectories, and has a trace of its own.
ON_THE_WAY = SERVICES - {"treadle-placement", "treadle-gateway"}
TOKENS = 4
READY_S = 120.0  # a service may have to compile its kernels first
TOOL = {"code": "import time; time.sleep(0.5); print(1)"}
KINDS = {"sum": "counter", "gauge": "gauge", "histogram": "histogram"}


class Mesh:
    """A mesh of processes that send their telemetry to `endpoint`."""

    def __init__(self, start: StartService, endpoint: str) -> None:
        self._start, self._endpoint = start, endpoint
        self._processes: list[ServiceProcess] = []
        self.scheduler, self.http = (f"127.0.0.1:{free_port()}" for _ in range(2))

    async def start(self) -> None:
        """All but the sidecars."""
        # Long trajectories, so that a move is worth its time.
        predictor = await self._service("predictor", PRIOR_MEDIAN_TOKENS="4000")
        placement, rollout = await self._service("placement"), await self._service("rollout")
        tools = await self._service("tools", BUILTIN="python", CORES="2")
        migrator = await self._service("migrator", SCHEDULER=self.scheduler)
        peers = {"PREDICTOR": predictor, "PLACEMENT": placement, "ROLLOUT": rollout, "TOOLS": tools}
        await self._service(
            "scheduler", LISTEN=self.scheduler, MIGRATOR=migrator, PLAN_EVERY_EVENTS="2", **peers
        )

    async def ask_over_http(self) -> None:
        """Start a gateway, and have it play a trajectory of one turn."""
        await self._service("gateway", SCHEDULER=self.scheduler, HTTP_LISTEN=self.http)
        body = {
            "input_ids": [5, 6, 7],
            "sampling_params": {"max_new_tokens": TOKENS},
            "session_id": "s",
        }
        async with aiohttp.ClientSession(f"http://{self.http}", raise_for_status=True) as http:
            await (await http.post("/generate", json=body)).read()
            await (await http.delete("/sessions/s")).read()

    async def start_sidecar(self, name: str, engine: FakeSglang) -> None:
        """Of an engine, with one slot."""
        own = {
            "ENGINE_ID": name,
            "ENGINE_URL": engine.url,
            "SCHEDULER": self.scheduler,
            "SLOTS": "1",
        }
        await self._service("sidecar", **own, DECODE_BASE_S="0.01", PREFILL_TOKENS_PER_S="10000")

    async def stop(self) -> None:
        """Drain all, so that their last metrics and spans are sent."""
        for process in self._processes:
            process.terminate()
        codes = await asyncio.gather(*(process.wait() for process in self._processes))
        assert codes == [0] * len(codes), [
            process.stderr_text()[-2000:] for process in self._processes
        ]

    async def _service(self, service: str, **own: str) -> str:
        variables = {f"TREADLE_{service.upper()}_{name}": value for name, value in own.items()}
        variables["TREADLE_OTLP_ENDPOINT"] = self._endpoint
        process = await self._start(f"treadle_{service}", variables, ready_within_s=READY_S)
        self._processes.append(process)
        return process.address


async def play(mesh: Mesh, control: SchedulerClient, second: FakeSglang) -> str:
    """A rollout of six samples with tools; between two of its turns an engine comes, and some move
    there. The id of one that has moved."""
    waiting, goes_on = 0, asyncio.Event()

    async def agent(trajectory: treadle.Trajectory, _: treadle.Prompt) -> float:
        nonlocal waiting
        await generate(trajectory, TOKENS)
        assert (await trajectory.tool("python", TOOL)).status == "ok"
        await generate(trajectory, TOKENS)
        waiting += 1
        await goes_on.wait()  # a tool of the agent's own: who is in a tool call may move
        await generate(trajectory, TOKENS)
        return 1.0

    async def trajectories() -> list[pb.Trajectory]:
        return list(
            (await control.call("ListTrajectories", pb.ListTrajectoriesRequest())).trajectories
        )

    async with treadle.Client(mesh.scheduler, retry=QUICK) as client:
        prompts = [
            treadle.Prompt(f"p{number}", list(range(number, number + 20))) for number in range(2)
        ]
        rollout = asyncio.create_task(client.rollout(prompts, agent, samples_per_prompt=3))
        try:
            await until_said(trajectories, lambda _: waiting == 6)
            await mesh.start_sidecar("e1", second)
            moved = await until_said(
                trajectories, lambda all_of_them: any(each.migrations for each in all_of_them)
            )
            goes_on.set()
            result = await rollout
        finally:
            rollout.cancel()
        assert [each.outcome for each in result.trajectories] == ["finished"] * 6
        await client.get_batch(result.rollout_id)
        return next(each.trajectory_id for each in moved if each.migrations)


def trace_of(collector: Collector, trajectory_id: str) -> list[tuple[str, Span]]:
    """All spans of a trajectory's trace."""
    [root] = [
        span
        for _, span in collector.spans
        if span.name == "trajectory" and labels_of(span)["treadle.trajectory_id"] == trajectory_id
    ]
    assert not root.parent_span_id
    return [(service, span) for service, span in collector.spans if span.trace_id == root.trace_id]


def entries_sent(collector: Collector) -> list[str]:
    """Return the entries of docs/metrics.md, as the services sent them."""
    sent: defaultdict[str, list[tuple[str, Metric]]] = defaultdict(list)
    for (service, _, name), metric in collector.metrics.items():
        sent[name].append((service.removeprefix("treadle-"), metric))
    written = []
    for name, metrics in sorted(sent.items()):
        metric = metrics[0][1]
        kind = KINDS[metric.WhichOneof("data") or ""]
        services = sorted({service for service, _ in metrics})
        labels = sorted(
            {
                label
                for _, each in metrics
                for point in points_of(each)
                for label in labels_of(point)
            }
        )
        where = "all" if len(services) == len(SERVICES) else ", ".join(services)
        written.append(
            f"`{series_of(name, kind, metric.unit)}` (`{name}`), {kind} of "
            f"{metric.unit.strip('{}')}"
            + (f" by {', '.join(labels).replace('.', '_')}" if labels else "")
            + ("" if name.startswith(f"treadle.{where}.") else f", from {where}")
            + f": {metric.description}."
        )
    return written


@pytest.mark.timeout(600)
async def test_a_rollout_with_tools_and_moves_is_seen_in_every_service(
    start_service: StartService,
) -> None:
    """GIVEN   eight services and a collector; one engine, beside which a second one starts between two
    turns
    WHEN    a rollout of six samples calls tools, some of them move, and all services are stopped
    Result: the trace of one that moved goes through all services but placement, and on to both
    engines; each of its
            spans hangs under the trajectory's own. docs/metrics.md has each metric, as it was sent,
            and no other; no
            metric has the id of a trajectory or a rollout"""
    async with (
        collecting() as (collector, endpoint),
        fake_sglang() as first,
        fake_sglang() as second,
    ):
        mesh = Mesh(start_service, endpoint)
        await mesh.start()
        await mesh.start_sidecar("e0", first)
        async with scheduler_client(mesh.scheduler) as control:
            await control.until_registered(1)
            await mesh.ask_over_http()
            moved = await play(mesh, control, second)
        await mesh.stop()

    assert {service for service, _ in collector.spans} == SERVICES
    trace = trace_of(collector, moved)
    assert {service for service, _ in trace} == ON_THE_WAY
    spans_of_it = {span.span_id for _, span in trace}
    assert not [
        span.name
        for _, span in trace
        if span.parent_span_id not in spans_of_it and span.name != "trajectory"
    ]
    names = {span.name for _, span in trace}
    assert {
        "predict",
        "step_finished process",
        "tool_finished process",
        "migration_ended process",
    } <= names
    for engine in (first, second):
        spans = {
            header.split("-")[2]
            for header in engine.traceparents
            if trace[0][1].trace_id.hex() in header
        }
        generating = {span.span_id.hex() for _, span in trace if span.name.endswith("/Generate")}
        assert spans & generating
    assert {
        labels_of(span)["treadle.engine_id"] for _, span in trace if span.name.endswith("/Generate")
    } == {"e0", "e1"}

    values = {
        v
        for m in collector.metrics.values()
        for point in points_of(m)
        for v in labels_of(point).values()
    }
    known = {
        labels_of(span).get(f"treadle.{kind}_id")
        for _, span in collector.spans
        for kind in ("trajectory", "rollout")
    }
    assert not values & known
    sent = entries_sent(collector)
    assert entries() == sent, "\n".join(f"- {entry}" for entry in sent)
