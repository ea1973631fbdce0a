"""The tools service itself: time of an invocation, many sessions at once, and a bursty trace live
and simulated.

Starts a real service with its sandboxes and a nats-server, and calls it over loopback. The trace is
a small coding batch: commands that sleep, on more cores than the machine has, since sleeping takes
none.
"""

import asyncio
import json
import os
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from statistics import median
from typing import Any, NamedTuple, TypeAlias

import grpc
import grpc.aio
import numpy as np
from treadle.tools.v1 import tools_pb2, tools_pb2_grpc
from treadle_cli.exits import UsageProblem
from treadle_cli.mesh.checks import require_bubblewrap
from treadle_core.tools.action import CPU_CORES, Fixed

from treadle_bench.bench import BenchOptions
from treadle_bench.processes import run_service
from treadle_bench.summary import rounded
from treadle_bench.tools.elastic_cores import ElasticCores, equal_machines
from treadle_bench.tools.setting import Setting
from treadle_bench.tools.trace import Call, Trace, play

Tools: TypeAlias = "tools_pb2_grpc.ToolsServiceAsyncStub"

MS = 1_000.0
CALL_TIMEOUT_S = 60.0
WARM_UP = 50  # calls that are not counted; the first ones start the warm sandboxes
STEPS = 4  # of each session
CORES = 6  # of the tools service in the replay


async def measure(options: BenchOptions, setting: Setting) -> dict[str, Any]:
    """The figures; `missing` says why nothing could be measured. Raises ProcessError,
    grpc.aio.AioRpcError."""
    try:
        require_bubblewrap()
    except UsageProblem as problem:
        return {"missing": str(problem).splitlines()[0]}
    found: dict[str, Any] = {"missing": None, "load_1m": round(os.getloadavg()[0], 1)}
    async with _run_tools(options) as tools:
        found["invoke"] = await time_invocations(tools, setting, "agent")
        found["fresh"] = await time_invocations(tools, setting, "")
        found["sessions"] = await run_sessions(tools, setting)
    async with _run_tools(options, CORES=str(CORES)) as tools:
        found["replay"] = await replay_trace(
            tools, draw_burst(setting.live_trajectories, options.seed)
        )
    return found


@asynccontextmanager
async def _run_tools(options: BenchOptions, **settings: str) -> AsyncIterator[Tools]:
    async with (
        run_service("tools", options, BUILTIN="python,frozen_lake", **settings) as service,
        grpc.aio.insecure_channel(service.address) as channel,
    ):
        yield tools_pb2_grpc.ToolsServiceStub(channel)


async def time_invocations(tools: Tools, setting: Setting, trajectory_id: str) -> dict[str, float]:
    """Milliseconds of a trivial snippet for the caller, one call after the other. Calls of one
    trajectory share a sandbox; with an empty `trajectory_id` each has a fresh one."""
    took_s: list[float] = []
    overhead_s: list[float] = []
    for _ in range(WARM_UP + setting.live_calls):
        began = time.perf_counter()
        result = await _invoke(tools, {"code": "1 + 1"}, tool="python", trajectory_id=trajectory_id)
        took_s.append(time.perf_counter() - began)
        overhead_s.append(_seconds(result.timing.overhead))
    p50_s, p99_s = np.quantile(took_s[WARM_UP:], (0.5, 0.99)).tolist()
    overhead_ms = median(overhead_s[WARM_UP:]) * MS
    found = {"p50_ms": p50_s * MS, "p99_ms": p99_s * MS, "overhead_p50_ms": overhead_ms}
    return rounded({**found, "calls": float(setting.live_calls)})


async def run_sessions(tools: Tools, setting: Setting) -> dict[str, float]:
    """Open all sessions at once. A session is ok when all its steps and its end succeed."""
    everyone_open = asyncio.Barrier(setting.sessions)

    async def play_one(seed: int) -> bool:
        opening = tools_pb2.OpenSessionRequest(
            request_id=uuid.uuid4().hex,
            tool="frozen_lake",
            arguments_json=json.dumps({"seed": seed}),
        )
        try:
            try:
                session_id = (
                    await tools.OpenSession(opening, timeout=CALL_TIMEOUT_S)
                ).session.session_id
            finally:
                # also after a failure, so that the others do not wait forever
                await everyone_open.wait()
            results = [
                await _invoke(tools, {"action": "left"}, session_id=session_id)
                for _ in range(STEPS)
            ]
            closing = tools_pb2.CloseSessionRequest(
                request_id=uuid.uuid4().hex, session_id=session_id
            )
            await tools.CloseSession(closing, timeout=CALL_TIMEOUT_S)
        except grpc.aio.AioRpcError:
            return False
        return all(result.status == tools_pb2.RESULT_STATUS_OK for result in results)

    began = time.perf_counter()
    ended = await asyncio.gather(*(play_one(seed) for seed in range(setting.sessions)))
    took_s = time.perf_counter() - began
    return {
        "asked": float(len(ended)),
        "ok": float(sum(ended)),
        "steps": float(STEPS),
        "took_s": round(took_s, 2),
    }


def draw_burst(trajectories: int, seed: int) -> tuple[Trace, ...]:
    """A small coding batch: a few commands for each trajectory, the last as long as a test run."""
    rng = np.random.default_rng([seed, trajectories, 7])
    traces = []
    for at in range(trajectories):
        count = int(rng.integers(3, 7))
        generating = rng.exponential(0.25, count).round(3).tolist()
        seconds = np.minimum(rng.lognormal(-2.2, 0.8, count), 1.0).round(3).tolist()
        seconds[-1] = round(float(min(rng.lognormal(-0.5, 0.6), 2.0)), 3)
        calls = [
            Call(gen, {CPU_CORES: Fixed(1)}, each)
            for gen, each in zip(generating, seconds, strict=True)
        ]
        traces.append(Trace(f"live-{at}", "coding", tuple(calls)))
    return tuple(traces)


class _Lived(NamedTuple):
    """A call as its caller saw it. queue_s: the part of `completion_s` in the service's queue."""

    trajectory_id: str
    at: int
    completion_s: float
    queue_s: float
    slept_s: float


async def replay_trace(tools: Tools, traces: Sequence[Trace]) -> dict[str, Any]:
    """Play the trace through the service and through the simulator. The simulator's overhead of an
    action is the live median: of the service, the calls over loopback, and the start and end of a
    snippet."""
    for _ in range(WARM_UP):
        await _invoke(tools, {"code": "1"}, tool="python")
    lived: list[_Lived] = []
    ends_s: list[float] = []

    async def play_one(trace: Trace) -> None:
        name = trace.trajectory_id
        for at, call in enumerate(trace.calls):
            await asyncio.sleep(call.generation_s)
            asked_s = time.perf_counter()
            snippet = {"code": f"import time; time.sleep({call.single_unit_s})"}
            result = await _invoke(tools, snippet, tool="python", trajectory_id=name)
            took_s = time.perf_counter() - asked_s
            lived.append(
                _Lived(name, at, took_s, _seconds(result.timing.queue), call.single_unit_s)
            )
        ends_s.append(time.perf_counter() - began)

    began = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for trace in traces:
            group.create_task(play_one(trace))
    overhead_s = median(each.completion_s - each.queue_s - each.slept_s for each in lived)
    nodes = equal_machines(1, CORES, 0)
    simulated = play(
        traces, lambda timeline, report: ElasticCores(timeline, report, nodes, overhead_s)
    )
    simulated_s_of = {
        (record.asked.trace.trajectory_id, record.asked.at): record.completion_s
        for record in simulated.records
    }
    errors = [
        abs(simulated_s_of[each.trajectory_id, each.at] / each.completion_s - 1.0) for each in lived
    ]
    live_s = float(np.mean([each.completion_s for each in lived]))
    simulated_s = float(np.mean(list(simulated_s_of.values())))
    live_end_s, simulated_end_s = max(ends_s), max(simulated.ends_s.values())
    found = {
        "cores": CORES,
        "trajectories": len(traces),
        "actions": len(lived),
        "overhead_ms": overhead_s * MS,
        "queue_s": float(np.mean([each.queue_s for each in lived])),
        "live_act_s": live_s,
        "simulated_act_s": simulated_s,
        "act_error_pct": round(100.0 * (simulated_s / live_s - 1.0), 2),
        "action_error_p50_pct": round(100.0 * float(np.median(errors)), 2),
        "live_makespan_s": live_end_s,
        "simulated_makespan_s": simulated_end_s,
        "makespan_error_pct": round(100.0 * (simulated_end_s / live_end_s - 1.0), 2),
    }
    return rounded(found)


async def _invoke(tools: Tools, arguments: dict[str, str], **target: str) -> tools_pb2.ToolResult:
    """target: the session, or the tool and the trajectory."""
    request = tools_pb2.InvokeRequest(
        request_id=uuid.uuid4().hex, arguments_json=json.dumps(arguments)
    )
    for field, value in target.items():
        setattr(request, field, value)
    return (await tools.Invoke(request, timeout=CALL_TIMEOUT_S)).result


def _seconds(duration: Any) -> float:
    return float(duration.ToNanoseconds()) / 1e9
