"""How far a simulated rollout is from the live one, trajectory by trajectory. Pure functions.

All trajectories open at time 0, so a trajectory's time is when it ended. Live, a step's prefill begins when its sidecar
admits it, simulated when the engine computes it: what lies between counts there as prefill and here as queue, so these
two are also given together.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from treadle_cli.bench.fidelity_live import Play

PARTS = ("queue", "prefill", "decode", "tool")


def figures(live: Play, simulated: Play) -> dict[str, Any]:
    """Errors are simulated over live, minus 1; correlations are Pearson's over trajectories."""
    before = np.array([played.finished_s for played in live.trajectories])
    after = np.array([played.finished_s for played in simulated.trajectories])
    served_before = np.array([played.service_s for played in live.trajectories])
    served_after = np.array([played.service_s for played in simulated.trajectories])
    return {
        "live_makespan_s": round(live.makespan_s, 2),
        "simulated_makespan_s": round(simulated.makespan_s, 2),
        "makespan_rel_err": rounded(simulated.makespan_s / live.makespan_s - 1.0),
        "time_corr": rounded(float(np.corrcoef(before, after)[0, 1])),
        "service_corr": rounded(float(np.corrcoef(served_before, served_after)[0, 1])),
        "time_abs_err_median": rounded(float(np.median(np.abs(after / before - 1.0)))),
        "time_abs_err_p90": rounded(float(np.quantile(np.abs(after / before - 1.0), 0.9))),
        "mean_time_rel_err": rounded(float(after.mean() / before.mean() - 1.0)),
        "same_engine": rounded(same_engine(live, simulated)),
        "parts_live_s": parts(live),
        "parts_simulated_s": parts(simulated),
        "preemptions": [sum(played.preemptions for played in play.trajectories) for play in (live, simulated)],
        "migrations": [live.migrations, simulated.migrations],
    }


def parts(play: Play) -> dict[str, float]:
    """Mean seconds of a trajectory by part; `other` is what no part covers: calls of the control plane."""
    count = len(play.trajectories)
    seconds = {part: sum(played.part_s(part) for played in play.trajectories) / count for part in PARTS}
    seconds["other"] = sum(played.finished_s for played in play.trajectories) / count - sum(seconds.values())
    return {part: round(value, 2) for part, value in seconds.items()}


def same_engine(one: Play, other: Play) -> float:
    """Share of steps that ran on the same engine in both."""
    pairs = [
        (a, b)
        for left, right in zip(one.trajectories, other.trajectories, strict=True)
        for a, b in zip(left.engines, right.engines, strict=True)
    ]
    return sum(a == b for a, b in pairs) / len(pairs)


def between(plays: Sequence[Play]) -> dict[str, float]:
    """How far plays of one work under one policy are from each other: the ceiling for any simulator."""
    first, *others = plays
    if not others:
        return {}
    compared = [figures(first, other) for other in others]
    return {
        "makespan_rel_err": max((one["makespan_rel_err"] for one in compared), key=abs),
        "time_corr": min(one["time_corr"] for one in compared),
        "service_corr": min(one["service_corr"] for one in compared),
        "same_engine": min(one["same_engine"] for one in compared),
    }


def rounded(value: float) -> float:
    """To a hundredth of a percent."""
    return round(value, 4)
