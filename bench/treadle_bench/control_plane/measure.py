"""What the control plane costs, on a mesh of this machine with one real engine.

Two parts. ScheduleStep: first tickets of open trajectories, one call after the other and 32 in flight. Sidecar: the
same steps through Engine.Generate and through the engine's own HTTP, in turns. Both are measured from a process of
their own over loopback, so a figure holds the cost of a Python caller too.
"""

import os
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import grpc
import grpc.aio
from treadle.engine.v1 import engine_pb2_grpc
from treadle.scheduler.v1 import scheduler_pb2_grpc
from treadle_cli.mesh.engines import EnginePlan
from treadle_cli.mesh.mesh import Mesh, MeshPlan, StartBoard
from treadle_cli.mesh.processes import ProcessTree

from treadle_bench.control_plane.schedule_steps import ScheduleTimes, measure_schedule
from treadle_bench.control_plane.sidecar_steps import SidecarTimes, measure_sidecar
from treadle_bench.options import BenchOptions

if TYPE_CHECKING:
    from treadle.engine.v1.engine_pb2_grpc import EngineServiceAsyncStub
    from treadle.scheduler.v1.scheduler_pb2_grpc import SchedulerServiceAsyncStub

MS = 1000.0


async def run(options: BenchOptions) -> dict[str, float]:
    """Starts a mesh with one engine, measures, and stops it. Raises ProcessError, grpc.aio.AioRpcError."""
    folder = Path(tempfile.mkdtemp(prefix="treadle-bench-"))
    plan = MeshPlan(_one_engine(options), folder / "state")
    try:
        async with ProcessTree(folder / "logs", hurry=options.hurry) as tree:
            with StartBoard(options.progress) as board:
                mesh = await Mesh.start(plan, tree, board)
            async with (
                grpc.aio.insecure_channel(mesh.where.scheduler) as to_scheduler,
                grpc.aio.insecure_channel(next(iter(mesh.where.sidecars.values()))) as to_sidecar,
            ):
                scheduler: SchedulerServiceAsyncStub = scheduler_pb2_grpc.SchedulerServiceStub(to_scheduler)
                sidecar: EngineServiceAsyncStub = engine_pb2_grpc.EngineServiceStub(to_sidecar)
                steps = await measure_schedule(scheduler, options)
                tokens = await measure_sidecar(mesh, scheduler, sidecar, options)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return figures(steps, tokens)


def figures(steps: ScheduleTimes, tokens: SidecarTimes) -> dict[str, float]:
    """The keys of the bench; times in milliseconds, shares in percent."""
    return {
        "schedule_step_p50_ms": round(steps.sequential_s.quantile(0.50) * MS, 3),
        "schedule_step_p99_ms": round(steps.sequential_s.quantile(0.99) * MS, 3),
        "schedule_steps_per_s": round(steps.per_s, 1),
        "sidecar_first_token_added_ms": round(tokens.first_token_added_s * MS, 3),
        "sidecar_step_added_pct": round(tokens.step_added_fraction * 100, 3),
        "schedule_step_in_flight_p50_ms": round(steps.in_flight_s.quantile(0.50) * MS, 3),
        "schedule_step_in_flight_p99_ms": round(steps.in_flight_s.quantile(0.99) * MS, 3),
        "schedule_step_samples": float(len(steps.sequential_s)),
        "engine_first_token_ms": round(tokens.engine_first_token_s * MS, 3),
        "engine_step_ms": round(tokens.engine_step_s * MS, 3),
        "sidecar_step_added_ms_per_token": round(tokens.added_s_per_token * MS, 4),
        "sidecar_pairs": float(tokens.pairs),
        "cpus": float(len(os.sched_getaffinity(0))),
    }


def _one_engine(options: BenchOptions) -> EnginePlan:
    plan = options.engines
    return replace(plan, count=1, cores=plan.cores[:1])
