"""Is the simulator honest? The same work through two live engines, and through the simulator with their profile.

One mesh of two engines, each on a core of its own. First the engines and the control plane's latencies are measured
(fidelity_profile.py, fidelity_control.py), then each policy plays each trace, live some times and simulated once
(fidelity_stage.py), and what differs is counted (fidelity_figures.py).
"""

from __future__ import annotations

import itertools
import shutil
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from treadle_cli.demo.run import warm_engines
from treadle_cli.mesh.mesh import Mesh, MeshPlan, StartBoard
from treadle_cli.mesh.processes import ProcessTree
from treadle_cli.problems import UsageProblem
from treadle_sim.fitting.curves import MeasuredEngine
from treadle_sim.workloads.workload import TraceFileError, Workload, read_traces

from treadle_bench.fidelity import plot as fidelity_picture
from treadle_bench.fidelity.figures import figures, rounded
from treadle_bench.fidelity.stage import Case, LivePlay, Stage
from treadle_bench.fidelity.trace import token_ids, workload
from treadle_bench.options import BenchOptions

ENGINES = 2
TRACES = 2
POLICIES = ("verl", "treadle")  # systems of the simulator: pinned and in order of arrival; the product's own
MS = 1e3
US = 1e6


async def run(options: BenchOptions) -> dict[str, Any]:
    """Measures, plays, compares. repeats: live plays of each trace under each policy. Raises ProcessError,
    TreadleError, UsageProblem for a trace file that cannot be read."""
    works = _workloads(options)
    folder = Path(tempfile.mkdtemp(prefix="treadle-bench-"))
    try:
        async with ProcessTree(folder / "logs", hurry=options.hurry) as tree:
            with StartBoard(options.progress) as board:
                mesh = await Mesh.start(MeshPlan(options.engines, folder / "state"), tree, board)
                await warm_engines(mesh.engines, token_ids(works[0].trajectories[0], "warm")[0])
            options.progress.print("measuring the engines, about a minute", highlight=False)
            stage = await Stage.of(mesh, options.seed)
            cases = await _cases(stage, works, options)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if options.pictures is not None:
        fidelity_picture.draw(cases, options.pictures)
    return report(cases, stage)


async def _cases(stage: Stage, works: Sequence[Workload], options: BenchOptions) -> list[Case]:
    """Rounds of one live play of every trace under every policy, a pulse before each, and then all simulated."""
    lives: dict[tuple[int, str], list[LivePlay]] = defaultdict(list)
    for number in range(options.repeats):
        for at, name in itertools.product(range(len(works)), POLICIES):
            await stage.pulse(sum(map(len, lives.values())))
            live = await stage.play(works[at], name, number)
            lives[at, name].append(live)
            line = f"{works[at].name} {name}: {live.play.makespan_s:.1f} s, other programs took {live.others_share:.0%}"
            options.progress.print(line, highlight=False)
    played = [(works[at], name, tuple(plays)) for (at, name), plays in lives.items()]
    return [Case(name, work, plays, stage.simulated(work, name)) for work, name, plays in played]


def report(cases: Sequence[Case], stage: Stage) -> dict[str, Any]:
    """makespan_rel_err and time_corr are the worst of all cases, each the mean over its live plays."""
    rows = [{"policy": case.policy, "trace": case.workload.name, **figures(case)} for case in cases]
    latencies = stage.control.latencies
    return {
        "makespan_rel_err": max((row["makespan_rel_err"] for row in rows), key=abs),
        "time_corr": min(row["time_corr"] for row in rows),
        "service_corr": min(row["service_corr"] for row in rows),
        "cases": rows,
        "engines": [_engine_row(f"engine-{at}", engine) for at, engine in enumerate(stage.measured)],
        "slowness": [[rounded(factor) for factor in factors] for factors in stage.slowness],
        "latencies_ms": {
            "rpc": round(latencies.rpc_s * MS, 1),
            "predict": round(latencies.predict_s * MS, 1),
            "plan": round(latencies.plan_s * MS, 1),
            "move": round(stage.control.link.fixed_s * MS, 1),
        },
    }


def _workloads(options: BenchOptions) -> list[Workload]:
    if options.traces is None:
        return [workload(options.seed + number) for number in range(TRACES)]
    try:
        return [Workload(options.traces.stem, read_traces(options.traces))]
    except (TraceFileError, OSError) as error:
        raise UsageProblem(f"--traces: {error}") from error


def _engine_row(engine_id: str, measured: MeasuredEngine) -> dict[str, Any]:
    curve, prefill_error = measured.engine.curve, measured.prefill_error
    row = {
        "engine": engine_id,
        "batch_sizes": list(curve.batch_sizes),
        "step_ms": [round(step_s * MS, 1) for step_s in curve.step_s],
        "kv_token_us": round(curve.per_kv_token_s * US, 2),
        "prefill_fixed_ms": round(curve.prefill_fixed_s * MS, 1),
        "prefill_token_us": round(curve.prefill_token_s * US, 1),
        "prefill_pair_us": round(curve.prefill_pair_s * US, 3),
        "prefill_square_us": round(curve.prefill_square_s * US, 3),
        "decode_fit_err_median": rounded(measured.decode_error.median),
        "decode_fit_err_p90": rounded(measured.decode_error.p90),
    }
    if prefill_error is not None:
        row["prefill_fit_err_median"] = rounded(prefill_error.median)
        row["prefill_fit_err_p90"] = rounded(prefill_error.p90)
    return row
