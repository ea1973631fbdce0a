"""The tools service itself: what an invocation takes, many sessions at once, and a bursty trace live and simulated.

Starts a real service with its sandbox and a nats-server of its own, over loopback, from a process of its own. The trace
is a coding batch made small: commands that sleep, on more cores than the machine has, since sleeping takes none.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import sys
import tempfile
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio
import numpy as np
from treadle.tools.v1 import tools_pb2, tools_pb2_grpc
from treadle_cli.mesh.checks import require_bubblewrap
from treadle_cli.mesh.embedded_nats import start_nats
from treadle_cli.mesh.processes import ProcessTree
from treadle_cli.mesh.services import HOST
from treadle_cli.problems import UsageProblem
from treadle_core.tools.action import CPU_CORES, Fixed
from treadle_sim.tools.cores import ElasticCores, equal_machines
from treadle_sim.tools.trace import Call, Trace, play

from treadle_bench.options import BenchOptions
from treadle_bench.samples import Samples
from treadle_bench.tools.setting import DIGITS, Setting, rounded

if TYPE_CHECKING:
    from treadle.tools.v1.tools_pb2_grpc import ToolsServiceAsyncStub

MS = 1_000.0
START_TIMEOUT_S, CALL_TIMEOUT_S = 60.0, 60.0
WARM_UP = 50  # calls that are not counted: the first fill the pool of cells
STEPS = 4  # of each session
CORES = 6  # that the gateway hands out in the replay
STAGE = 2


async def run(options: BenchOptions, setting: Setting) -> dict[str, Any]:
    """What was measured; `missing` says why nothing was. Raises ProcessError, grpc.aio.AioRpcError."""
    try:
        require_bubblewrap()
    except UsageProblem as problem:
        return {"missing": str(problem).splitlines()[0]}
    found: dict[str, Any] = {"missing": None, "load_1m": round(os.getloadavg()[0], 1)}
    async with _service(options) as tools:
        found["invoke"] = await invocations(tools, setting, "agent")
        found["fresh"] = await invocations(tools, setting, "")
        found["sessions"] = await sessions(tools, setting)
    async with _service(options, CORES=str(CORES)) as tools:
        found["replay"] = await replayed(tools, bursty(setting.live_trajectories, options.seed))
    return found


@asynccontextmanager
async def _service(options: BenchOptions, **settings: str) -> AsyncIterator[ToolsServiceAsyncStub]:
    """A fresh tools service; settings in upper case."""
    folder = Path(tempfile.mkdtemp(prefix="treadle-bench-"))
    ready = folder / "ready.json"
    try:
        async with ProcessTree(folder / "logs", hurry=options.hurry) as tree:
            _, nats_url = await start_nats(tree, folder, dict(os.environ))
            own = {"LISTEN": f"{HOST}:0", "READY_FILE": str(ready), "BUILTIN": "python,frozen_lake", **settings}
            env = {
                **os.environ,
                "TREADLE_NATS_URL": nats_url,
                **{f"TREADLE_TOOLS_{name}": value for name, value in own.items()},
            }
            child = tree.start("tools", [sys.executable, "-m", "treadle_tools"], env=env, stage=STAGE)

            async def address() -> str | None:
                return str(json.loads(ready.read_text())["address"]) if ready.exists() else None

            where = await child.until(address, "ready file", START_TIMEOUT_S)
            async with grpc.aio.insecure_channel(where) as channel:
                yield tools_pb2_grpc.ToolsServiceStub(channel)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


async def invocations(tools: ToolsServiceAsyncStub, setting: Setting, trajectory_id: str) -> dict[str, float]:
    """Milliseconds of a trivial snippet, one call after the other, as the caller sees them. trajectory_id: whose calls
    they are, which then run in one sandbox; empty: nobody's, each in a fresh one."""
    samples, overhead_s = Samples(), Samples()
    for at in range(WARM_UP + setting.live_calls):
        began = time.perf_counter()
        result = await _python(tools, "1 + 1", trajectory_id)
        if at >= WARM_UP:
            samples.append(time.perf_counter() - began)
            overhead_s.append(_seconds(result.timing.overhead))
    return rounded(
        {
            "p50_ms": samples.quantile(0.5) * MS,
            "p99_ms": samples.quantile(0.99) * MS,
            "overhead_p50_ms": overhead_s.median * MS,
            "calls": float(len(samples)),
        }
    )


async def sessions(tools: ToolsServiceAsyncStub, setting: Setting) -> dict[str, float]:
    """Sessions that are all open at once; one is ok when every step of it and its end are."""
    everyone_open = asyncio.Barrier(setting.sessions)

    async def one(seed: int) -> bool:
        session_id = ""
        try:
            opened = await tools.OpenSession(
                tools_pb2.OpenSessionRequest(
                    request_id=uuid.uuid4().hex, tool="frozen_lake", arguments_json=json.dumps({"seed": seed})
                ),
                timeout=CALL_TIMEOUT_S,
            )
            session_id = opened.session.session_id
        except grpc.aio.AioRpcError:
            return False
        finally:
            await everyone_open.wait()  # also one that failed: the others do not wait for it
        try:
            for _ in range(STEPS):
                request = tools_pb2.InvokeRequest(
                    request_id=uuid.uuid4().hex, session_id=session_id, arguments_json=json.dumps({"action": "left"})
                )
                answer = await tools.Invoke(request, timeout=CALL_TIMEOUT_S)
                if answer.result.status != tools_pb2.RESULT_STATUS_OK:
                    return False
            closing = tools_pb2.CloseSessionRequest(request_id=uuid.uuid4().hex, session_id=session_id)
            await tools.CloseSession(closing, timeout=CALL_TIMEOUT_S)
        except grpc.aio.AioRpcError:
            return False
        return True

    began = time.perf_counter()
    ended = await asyncio.gather(*(one(seed) for seed in range(setting.sessions)))
    took_s = time.perf_counter() - began
    return {"asked": float(len(ended)), "ok": float(sum(ended)), "steps": float(STEPS), "took_s": round(took_s, 2)}


def bursty(trajectories: int, seed: int) -> tuple[Trace, ...]:
    """A coding batch made small: a burst of a few commands each, the last as long as a test run."""
    rng = np.random.default_rng([seed, trajectories, 7])
    traces = []
    for at in range(trajectories):
        count = int(rng.integers(3, 7))
        generating = rng.exponential(0.25, count).round(3).tolist()
        seconds = np.minimum(rng.lognormal(-2.2, 0.8, count), 1.0).round(3).tolist()
        seconds[-1] = round(float(min(rng.lognormal(-0.5, 0.6), 2.0)), 3)
        calls = [Call(gen, {CPU_CORES: Fixed(1)}, each) for gen, each in zip(generating, seconds, strict=True)]
        traces.append(Trace(f"live-{at}", "coding", tuple(calls)))
    return tuple(traces)


@dataclass(frozen=True)
class _Lived:
    """A call as its caller saw it: seconds until its answer, of which it waited in the gateway's queue."""

    trajectory_id: str
    at: int
    completion_s: float
    queue_s: float
    slept_s: float


async def replayed(tools: ToolsServiceAsyncStub, traces: Sequence[Trace]) -> dict[str, Any]:
    """The same trace through the gateway and through the simulator, which is told what an action takes beyond its
    sleep: the gateway's own, the way there and back, a snippet's first and last lines."""
    for _ in range(WARM_UP):
        await _python(tools, "1", "")
    lived: list[_Lived] = []
    ends_s: list[float] = []

    async def one(trace: Trace) -> None:
        for at, call in enumerate(trace.calls):
            await asyncio.sleep(call.generation_s)
            asked_s = time.perf_counter()
            result = await _python(tools, f"import time; time.sleep({call.single_unit_s})", trace.trajectory_id)
            took_s = time.perf_counter() - asked_s
            lived.append(_Lived(trace.trajectory_id, at, took_s, _seconds(result.timing.queue), call.single_unit_s))
        ends_s.append(time.perf_counter() - began)

    began = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for trace in traces:
            group.create_task(one(trace))
    overhead_s = Samples(each.completion_s - each.queue_s - each.slept_s for each in lived).median
    nodes = equal_machines(1, CORES, 0)
    simulated = play(traces, lambda timeline, report: ElasticCores(timeline, report, nodes, overhead_s))
    told_s = {(record.asked.trace.trajectory_id, record.asked.at): record.completion_s for record in simulated.records}
    errors = [abs(told_s[each.trajectory_id, each.at] / each.completion_s - 1.0) for each in lived]
    live_s, simulated_s = float(np.mean([each.completion_s for each in lived])), float(np.mean(list(told_s.values())))
    live_end_s, simulated_end_s = max(ends_s), max(simulated.ends_s.values())
    return {
        "cores": CORES,
        "trajectories": len(traces),
        "actions": len(lived),
        "overhead_ms": round(overhead_s * MS, DIGITS),
        "queue_s": round(float(np.mean([each.queue_s for each in lived])), DIGITS),
        "live_act_s": round(live_s, DIGITS),
        "simulated_act_s": round(simulated_s, DIGITS),
        "act_error_pct": round(100.0 * (simulated_s / live_s - 1.0), 2),
        "action_error_p50_pct": round(100.0 * float(np.median(errors)), 2),
        "live_makespan_s": round(live_end_s, DIGITS),
        "simulated_makespan_s": round(simulated_end_s, DIGITS),
        "makespan_error_pct": round(100.0 * (simulated_end_s / live_end_s - 1.0), 2),
    }


async def _python(tools: ToolsServiceAsyncStub, code: str, trajectory_id: str) -> tools_pb2.ToolResult:
    request = tools_pb2.InvokeRequest(
        request_id=uuid.uuid4().hex,
        tool="python",
        arguments_json=json.dumps({"code": code}),
        trajectory_id=trajectory_id,
    )
    return (await tools.Invoke(request, timeout=CALL_TIMEOUT_S)).result


def _seconds(duration: Any) -> float:
    return float(duration.ToNanoseconds()) / 1e9
