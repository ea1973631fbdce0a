"""Is the simulator honest? The same work through two live engines, and through the simulator with their profile.

One mesh of two engines, each on a core of its own. First the engines are measured (fidelity_profile.py) and the
control plane's latencies (fidelity_control.py); nothing is fitted to the plays. Then every policy plays the traces
live, each time with a control plane that was just started and KV caches that are empty, and the simulator plays them
with the same policy, slots, declared curves and estimator.
"""

from __future__ import annotations

import shutil
import tempfile
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc.aio
from rich.console import Console
from treadle import Client
from treadle.scheduler.v1 import scheduler_pb2 as pb
from treadle.scheduler.v1 import scheduler_pb2_grpc
from treadle_core.model import Policy
from treadle_sim.engine_model import EngineModel
from treadle_sim.measured_profile import MeasuredEngine
from treadle_sim.systems import SYSTEMS
from treadle_sim.trace_file import TraceFileError, read_traces
from treadle_sim.workload import Workload

from treadle_cli.bench import fidelity_picture
from treadle_cli.bench.fidelity_control import Control, measure_control, registered
from treadle_cli.bench.fidelity_figures import between, figures, rounded
from treadle_cli.bench.fidelity_live import Play, listening, play
from treadle_cli.bench.fidelity_profile import measure
from treadle_cli.bench.fidelity_simulated import engine_models, fitted, simulate
from treadle_cli.bench.fidelity_trace import token_ids, workload
from treadle_cli.bench.options import BenchOptions
from treadle_cli.bench.samples import Samples
from treadle_cli.demo.warmup import warm_engines
from treadle_cli.machine_share import OtherPrograms
from treadle_cli.mesh import Mesh, MeshPlan
from treadle_cli.problems import UsageProblem
from treadle_cli.processes import ProcessTree
from treadle_cli.startboard import StartBoard

ENGINES = 2
TRACES = 2  # the plays take turns on so many; with more repeats each is played again
POLICIES = ("verl", "treadle")  # systems of the simulator: pinned and in order of arrival; the product's own
CALL_TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True)
class Pair:
    """One live play, and the simulator's of the same. others_share: of the machine, that other programs took."""

    policy: str
    workload: Workload
    live: Play
    simulated: Play
    others_share: float


async def run(options: BenchOptions) -> dict[str, Any]:
    """Measures, plays, compares. repeats: live plays under each policy. Raises ProcessError, TreadleError,
    UsageProblem for a trace file that cannot be played."""
    works = _workloads(options)
    folder = Path(tempfile.mkdtemp(prefix="treadle-bench-"))
    try:
        async with ProcessTree(folder / "logs", hurry=options.hurry) as tree:
            with StartBoard(options.progress) as board:
                mesh = await Mesh.start(MeshPlan(options.engines, folder / "state"), tree, board)
                await warm_engines(mesh.engines, token_ids(works[0].trajectories[0], "warm")[0])
            options.progress.print("measuring the engines, about a minute", highlight=False)
            measured, models, control = await _measured(mesh, options.seed)
            pairs = await _pairs(mesh, works, models, control, options)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if options.pictures is not None:
        fidelity_picture.draw(pairs, options.pictures)
    return _report(pairs, measured, control)


def _workloads(options: BenchOptions) -> list[Workload]:
    if options.traces is None:
        return [workload(options.seed + number) for number in range(TRACES)]
    try:
        return [Workload(options.traces.stem, read_traces(options.traces))]
    except (TraceFileError, OSError) as error:
        raise UsageProblem(f"--traces: {error}") from error


async def _measured(mesh: Mesh, seed: int) -> tuple[Mapping[str, MeasuredEngine], list[EngineModel], Control]:
    engines = await registered(mesh.where.scheduler)
    async with Client(mesh.where.scheduler) as client:
        async with listening(mesh.nats_url) as heard:
            profile = await measure(client, engines, seed)
        control = await measure_control(mesh, client, engines, profile.queue_s, Samples(heard.predict_s))
    measured = fitted(profile.profiles)
    return measured, engine_models(engines, measured), control


async def _pairs(
    mesh: Mesh, works: Sequence[Workload], models: Sequence[EngineModel], control: Control, options: BenchOptions
) -> list[Pair]:
    pairs = []
    for number in range(options.repeats):
        work = works[number % len(works)]
        for name in POLICIES:
            system = SYSTEMS[name]
            with StartBoard(Console(quiet=True)) as board:
                mesh.board = board
                await mesh.renew_control_plane(preempt=system.policy.preempt)
            await _set_policy(mesh.where.scheduler, system.policy)
            others = OtherPrograms()
            async with listening(mesh.nats_url) as heard:
                trajectories = await play(mesh.where.scheduler, work, f"{work.name} {name} {number}")
            live = Play(trajectories, sum(move.moved for move in heard.migrations))
            pair = Pair(name, work, live, simulate(work, models, system, control), others.share())
            pairs.append(pair)
            options.progress.print(
                f"{work.name} {pair.policy}: live {live.makespan_s:.1f} s, simulated "
                f"{pair.simulated.makespan_s:.1f} s, other programs took {pair.others_share:.0%}",
                highlight=False,
            )
    return pairs


async def _set_policy(scheduler: str, policy: Policy) -> None:
    async with grpc.aio.insecure_channel(scheduler) as channel:
        stub = scheduler_pb2_grpc.SchedulerServiceStub(channel)
        request = pb.SetPolicyRequest(request_id=uuid.uuid4().hex, policy=policy_message(policy))
        await stub.SetPolicy(request, timeout=CALL_TIMEOUT_S)


def policy_message(policy: Policy) -> pb.Policy:
    """The simulator's policy as the live scheduler takes it."""
    return pb.Policy(
        ordering=pb.Ordering.Value(f"ORDERING_{policy.ordering.name}"),
        objective=pb.Objective.Value(f"OBJECTIVE_{policy.objective.name}"),
        placement=pb.PlacementRule.Value(f"PLACEMENT_RULE_{policy.placement.name}"),
        migrate=policy.migrate,
        preempt=policy.preempt,
        replanning=pb.Replanning.Value(f"REPLANNING_{policy.replanning.name}"),
        reserve=policy.reserve,
    )


def _report(pairs: Sequence[Pair], measured: Mapping[str, MeasuredEngine], control: Control) -> dict[str, Any]:
    """makespan_rel_err and time_corr are the worst of all plays."""
    rows = [
        {"policy": pair.policy, "trace": pair.workload.name, **figures(pair.live, pair.simulated)}
        | {"other_programs_share": rounded(pair.others_share)}
        for pair in pairs
    ]
    keys = dict.fromkeys((pair.policy, pair.workload.name) for pair in pairs)
    again = [
        {"policy": policy, "trace": trace} | between([pair.live for pair in pairs if _key(pair) == (policy, trace)])
        for policy, trace in keys
    ]
    return {
        "makespan_rel_err": max((row["makespan_rel_err"] for row in rows), key=abs),
        "time_corr": min(row["time_corr"] for row in rows),
        "service_corr": min(row["service_corr"] for row in rows),
        "plays": rows,
        "live_against_live": [row for row in again if "time_corr" in row],
        "engines": [_engine_row(engine_id, engine) for engine_id, engine in measured.items()],
        "latencies_ms": {
            "rpc": round(control.latencies.rpc_s * 1e3, 1),
            "predict": round(control.latencies.predict_s * 1e3, 1),
            "plan": round(control.latencies.plan_s * 1e3, 1),
            "move": round(control.link.fixed_s * 1e3, 1),
        },
    }


def _key(pair: Pair) -> tuple[str, str]:
    return pair.policy, pair.workload.name


def _engine_row(engine_id: str, measured: MeasuredEngine) -> dict[str, Any]:
    curve = measured.engine.curve
    return {
        "engine": engine_id,
        "batch_sizes": list(curve.batch_sizes),
        "step_ms": [round(step_s * 1e3, 1) for step_s in curve.step_s],
        "kv_token_us": round(curve.per_kv_token_s * 1e6, 2),
        "prefill_fixed_ms": round(curve.prefill_fixed_s * 1e3, 1),
        "prefill_token_us": round(curve.prefill_token_s * 1e6, 1),
        "prefill_pair_us": round(curve.prefill_pair_s * 1e6, 3),
        "decode_fit_err_median": rounded(measured.decode_error.median),
        "decode_fit_err_p90": rounded(measured.decode_error.p90),
        "prefill_fit_err_median": rounded(measured.prefill_error.median) if measured.prefill_error else 0.0,
        "prefill_fit_err_p90": rounded(measured.prefill_error.p90) if measured.prefill_error else 0.0,
    }
