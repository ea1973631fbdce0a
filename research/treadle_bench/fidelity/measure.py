"""How close the simulator is: the same work on two live engines, and in the simulator with their
measured profile.

One mesh of two engines, each on its own core. First the engines and the control plane are measured
(profile.py). Then each policy plays each trace, several times live and once simulated (stage.py),
and the plays are compared trajectory by trajectory.

All trajectories open at time 0, so a trajectory's time is when it ended. A live step's prefill
begins when its sidecar admits it, a simulated one when the engine computes it: the time between
counts as prefill live, and as queue in the simulator. Live plays differ from each other, so each
figure is a mean over them, and `live_*` gives the same figure between live plays: no simulator can
be closer.
"""

import itertools
from collections.abc import Sequence
from statistics import fmean
from typing import Any

import numpy as np
from treadle_cli.demo.run import warm_engines
from treadle_cli.exits import UsageProblem
from treadle_core.ranking.estimator import correlation
from treadle_sim.fitting import MeasuredEngine
from treadle_sim.workloads.workload import TraceFileError, Workload, read_traces

from treadle_bench.bench import Bench, BenchOptions
from treadle_bench.fidelity.live import Play, make_workload, token_ids
from treadle_bench.fidelity.plot import PARTS, draw
from treadle_bench.fidelity.stage import Case, Stage
from treadle_bench.processes import run_mesh
from treadle_bench.summary import rounded

ENGINES = 2
TRACES = 2
POLICIES = ("verl", "treadle")  # systems of the simulator: pinned and in order of arrival; Treadle
MS = 1e3
US = 1e6


async def measure(options: BenchOptions) -> dict[str, Any]:
    """repeats: live plays of each trace under each policy. Raises ProcessError, TreadleError, and
    UsageProblem for a trace file that cannot be read."""
    works = _workloads(options)
    async with run_mesh(options.engines, options) as mesh:
        await warm_engines(mesh.engines, token_ids(works[0].trajectories[0], "warm")[0])
        options.progress.print("measuring the engines, about a minute", highlight=False)
        stage = await Stage.measure(mesh, options.seed)
        cases = await _play_cases(stage, works, options)
    if options.pictures is not None:
        draw(cases, options.pictures / "fidelity.png")
    return _report(cases, stage)


async def _play_cases(stage: Stage, works: Sequence[Workload], options: BenchOptions) -> list[Case]:
    """Rounds of one live play of every trace under every policy, with a pulse before each; then all
    simulated plays."""
    lives: dict[tuple[str, Workload], list[Play]] = {
        (name, work): [] for work in works for name in POLICIES
    }
    pulses = itertools.count()
    for number in range(options.repeats):
        for (name, work), plays in lives.items():
            await stage.pulse(next(pulses))
            plays.append(play := await stage.play(work, name, number))
            line = (
                f"{work.name} {name}: {play.makespan_s:.1f} s, other programs took "
                f"{play.others_share:.0%}"
            )
            options.progress.print(line, highlight=False)
    return [
        Case(name, work, plays, stage.simulate(work, name)) for (name, work), plays in lives.items()
    ]


def _workloads(options: BenchOptions) -> list[Workload]:
    if options.traces is None:
        return [make_workload(options.seed + number) for number in range(TRACES)]
    try:
        return [Workload(options.traces.stem, read_traces(options.traces))]
    except (TraceFileError, OSError) as error:
        raise UsageProblem(f"--traces: {error}") from error


def _report(cases: Sequence[Case], stage: Stage) -> dict[str, Any]:
    """makespan_rel_err and time_corr are the worst of all cases, each the mean over its live
    plays."""
    rows = [
        {"policy": case.policy, "trace": case.workload.name, **compare_plays(case)}
        for case in cases
    ]
    latencies = stage.control.latencies
    return {
        "makespan_rel_err": max((row["makespan_rel_err"] for row in rows), key=abs),
        "time_corr": min(row["time_corr"] for row in rows),
        "service_corr": min(row["service_corr"] for row in rows),
        "cases": rows,
        "engines": [
            _engine_row(f"engine-{at}", engine) for at, engine in enumerate(stage.measured)
        ],
        "slowness": rounded([list(factors) for factors in stage.slowness]),
        "latencies_ms": {
            "rpc": round(latencies.rpc_s * MS, 1),
            "predict": round(latencies.predict_s * MS, 1),
            "plan": round(latencies.plan_s * MS, 1),
            "pass": round(stage.pass_s * MS, 1),
            "move": round(stage.control.link.fixed_s * MS, 1),
        },
    }


def _engine_row(engine_id: str, measured: MeasuredEngine) -> dict[str, Any]:
    curve = measured.engine.curve
    row = {
        "engine": engine_id,
        "batch_sizes": list(curve.batch_sizes),
        "step_ms": [round(step_s * MS, 1) for step_s in curve.step_s],
        "kv_token_us": round(curve.per_kv_token_s * US, 2),
        "prefill_fixed_ms": round(curve.prefill_fixed_s * MS, 1),
        "prefill_token_us": round(curve.prefill_token_s * US, 1),
        "prefill_pair_us": round(curve.prefill_pair_s * US, 3),
        "prefill_square_us": round(curve.prefill_square_s * US, 3),
    }
    for part, error in (("decode", measured.decode_error), ("prefill", measured.prefill_error)):
        if error is not None:
            row[f"{part}_fit_err_median"] = rounded(error.median)
            row[f"{part}_fit_err_p90"] = rounded(error.p90)
    return row


def compare_plays(case: Case) -> dict[str, Any]:
    """makespan_rel_err: simulated over the mean of live, minus 1. Correlations are Pearson's over
    trajectories."""
    plays, simulated = case.plays, case.simulated
    live_s = fmean(play.makespan_s for play in plays)
    errors = np.abs(simulated.ends_s / np.mean([play.ends_s for play in plays], axis=0) - 1.0)
    correlations = [correlation(play.ends_s, simulated.ends_s) for play in plays]
    found: dict[str, Any] = {
        "live_makespan_s": [round(play.makespan_s, 2) for play in plays],
        "simulated_makespan_s": round(simulated.makespan_s, 2),
        "makespan_rel_err": simulated.makespan_s / live_s - 1.0,
        "time_corr": fmean(correlations),
        "time_corr_of_each": correlations,
        "service_corr": fmean(correlation(play.service_s, simulated.service_s) for play in plays),
        "time_abs_err_median": float(np.median(errors)),
        "time_abs_err_p90": float(np.quantile(errors, 0.9)),
        "same_engine": fmean(same_engine(play, simulated) for play in plays),
        "parts_live_s": _mean_parts(plays),
        "parts_simulated_s": _mean_parts([simulated]),
        "preemptions": [
            sum(played.preemptions for played in play.trajectories) for play in (*plays, simulated)
        ],
        "migrations": [play.migrations for play in (*plays, simulated)],
        "other_programs_share": [play.others_share for play in plays],
    }
    if pairs := list(itertools.combinations(plays, 2)):
        found["live_time_corr"] = fmean(
            correlation(one.ends_s, other.ends_s) for one, other in pairs
        )
        found["live_same_engine"] = fmean(same_engine(one, other) for one, other in pairs)
    return rounded(found)


def same_engine(one: Play, other: Play) -> float:
    """Fraction of steps that ran on the same engine in both plays. The engines are alike, so their
    names in one play are permuted to give the greatest fraction."""
    sides = [
        [engine for played in play.trajectories for engine in played.engines]
        for play in (one, other)
    ]
    names = sorted({*sides[0], *sides[1]})
    return max(
        fmean(dict(zip(names, renamed, strict=True))[a] == b for a, b in zip(*sides, strict=True))
        for renamed in itertools.permutations(names)
    )


def _mean_parts(plays: Sequence[Play]) -> dict[str, float]:
    """Mean seconds of a trajectory by part. `other`: what no part covers, which is calls of the
    control plane."""
    all_played = [played for play in plays for played in play.trajectories]
    seconds = {part: fmean(played.part_s(part) for played in all_played) for part in PARTS}
    seconds["other"] = fmean(played.finished_s for played in all_played) - sum(seconds.values())
    return {part: round(value, 2) for part, value in seconds.items()}


BENCH = Bench(
    "fidelity",
    "The same rollout on two live engines and in the simulator, on the profile measured on them. "
    "--repeats: live plays of each policy. Takes 2 minutes, and 2 a repeat, on 2 cores.",
    measure,
    engines=ENGINES,
)
