"""Is the simulator honest? The same work through two live engines, and through the simulator with their profile.

One mesh of two engines, each on a core of its own. First the engines and the control plane's latencies are measured
(fidelity_profile.py, fidelity_control.py), then each policy plays the traces live and simulated (fidelity_stage.py),
and what differs is counted (fidelity_figures.py).
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from treadle_sim.measured_profile import MeasuredEngine
from treadle_sim.trace_file import TraceFileError, read_traces
from treadle_sim.workload import Workload

from treadle_cli.bench import fidelity_picture
from treadle_cli.bench.fidelity_figures import between, figures, rounded
from treadle_cli.bench.fidelity_stage import Pair, Stage
from treadle_cli.bench.fidelity_trace import token_ids, workload
from treadle_cli.bench.options import BenchOptions
from treadle_cli.demo.warmup import warm_engines
from treadle_cli.mesh import Mesh, MeshPlan
from treadle_cli.problems import UsageProblem
from treadle_cli.processes import ProcessTree
from treadle_cli.startboard import StartBoard

ENGINES = 2
TRACES = 2  # the plays take turns on so many; with more repeats each is played again
POLICIES = ("verl", "treadle")  # systems of the simulator: pinned and in order of arrival; the product's own
MS = 1e3
US = 1e6


async def run(options: BenchOptions) -> dict[str, Any]:
    """Measures, plays, compares. repeats: live plays under each policy. Raises ProcessError, TreadleError,
    UsageProblem for a trace file that cannot be read."""
    works = _workloads(options)
    folder = Path(tempfile.mkdtemp(prefix="treadle-bench-"))
    pairs: list[Pair] = []
    try:
        async with ProcessTree(folder / "logs", hurry=options.hurry) as tree:
            with StartBoard(options.progress) as board:
                mesh = await Mesh.start(MeshPlan(options.engines, folder / "state"), tree, board)
                await warm_engines(mesh.engines, token_ids(works[0].trajectories[0], "warm")[0])
            options.progress.print("measuring the engines, about a minute", highlight=False)
            stage = await Stage.of(mesh, options.seed)
            for number in range(options.repeats):
                for name in POLICIES:
                    pairs.append(await stage.pair(works[number % len(works)], name, number))
                    options.progress.print(_line(pairs[-1]), highlight=False)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if options.pictures is not None:
        fidelity_picture.draw(pairs, options.pictures)
    return report(pairs, stage)


def report(pairs: Sequence[Pair], stage: Stage) -> dict[str, Any]:
    """makespan_rel_err and time_corr are the worst of all plays."""
    rows = [
        {
            "policy": pair.policy,
            "trace": pair.workload.name,
            **figures(pair.live, pair.simulated),
            "slowness": [rounded(factor) for factor in pair.slowness],
            "other_programs_share": rounded(pair.others_share),
        }
        for pair in pairs
    ]
    again = [
        {"policy": policy, "trace": trace}
        | between([pair.live for pair in pairs if (pair.policy, pair.workload.name) == (policy, trace)])
        for policy, trace in dict.fromkeys((pair.policy, pair.workload.name) for pair in pairs)
    ]
    latencies = stage.control.latencies
    return {
        "makespan_rel_err": max((row["makespan_rel_err"] for row in rows), key=abs),
        "time_corr": min(row["time_corr"] for row in rows),
        "service_corr": min(row["service_corr"] for row in rows),
        "plays": rows,
        "live_against_live": [row for row in again if "time_corr" in row],
        "engines": [_engine_row(f"engine-{at}", engine) for at, engine in enumerate(stage.measured)],
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


def _line(pair: Pair) -> str:
    return (
        f"{pair.workload.name} {pair.policy}: live {pair.live.makespan_s:.1f} s, simulated "
        f"{pair.simulated.makespan_s:.1f} s, other programs took {pair.others_share:.0%}"
    )


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
        "decode_fit_err_median": rounded(measured.decode_error.median),
        "decode_fit_err_p90": rounded(measured.decode_error.p90),
    }
    if prefill_error is not None:
        row["prefill_fit_err_median"] = rounded(prefill_error.median)
        row["prefill_fit_err_p90"] = rounded(prefill_error.p90)
    return row
