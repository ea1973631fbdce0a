"""How far a simulated rollout is from live ones of the same work, trajectory by trajectory. Pure functions.

All trajectories open at time 0, so a trajectory's time is when it ended. Live, a step's prefill begins when its sidecar
admits it, simulated when the engine computes it: what lies between counts there as prefill and here as queue. Live
plays differ among themselves, so each figure is a mean over them, and `live_*` says how far they are from each other:
what no simulator can be nearer than.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from statistics import fmean
from typing import Any

import numpy as np

from treadle_bench.fidelity.live import Play
from treadle_bench.fidelity.stage import Case

PARTS = ("queue", "prefill", "decode", "tool")


def figures(case: Case) -> dict[str, Any]:
    """makespan_rel_err: simulated over the mean of live, minus 1. Correlations are Pearson's over trajectories."""
    plays, simulated = case.plays, case.simulated
    live_s = fmean(play.makespan_s for play in plays)
    times = np.mean([_ends(play) for play in plays], axis=0)
    errors = np.abs(_ends(simulated) / times - 1.0)
    live_pairs = list(itertools.combinations(plays, 2))
    found: dict[str, Any] = {
        "live_makespan_s": [round(play.makespan_s, 2) for play in plays],
        "simulated_makespan_s": round(simulated.makespan_s, 2),
        "makespan_rel_err": rounded(simulated.makespan_s / live_s - 1.0),
        "time_corr": rounded(fmean(correlation(_ends(play), _ends(simulated)) for play in plays)),
        "time_corr_of_each": [rounded(correlation(_ends(play), _ends(simulated))) for play in plays],
        "service_corr": rounded(fmean(correlation(_served(play), _served(simulated)) for play in plays)),
        "time_abs_err_median": rounded(float(np.median(errors))),
        "time_abs_err_p90": rounded(float(np.quantile(errors, 0.9))),
        "same_engine": rounded(fmean(same_engine(play, simulated) for play in plays)),
        "parts_live_s": parts(plays),
        "parts_simulated_s": parts([simulated]),
        "preemptions": [sum(played.preemptions for played in play.trajectories) for play in (*plays, simulated)],
        "migrations": [play.migrations for play in (*plays, simulated)],
        "other_programs_share": [rounded(live.others_share) for live in case.lives],
    }
    if live_pairs:
        found["live_time_corr"] = rounded(fmean(correlation(_ends(one), _ends(other)) for one, other in live_pairs))
        found["live_same_engine"] = rounded(fmean(same_engine(one, other) for one, other in live_pairs))
    return found


def correlation(one: np.ndarray, other: np.ndarray) -> float:
    """Pearson's."""
    return float(np.corrcoef(one, other)[0, 1])


def _ends(play: Play) -> np.ndarray:
    return np.array([played.finished_s for played in play.trajectories])


def _served(play: Play) -> np.ndarray:
    return np.array([played.service_s for played in play.trajectories])


def parts(plays: Sequence[Play]) -> dict[str, float]:
    """Mean seconds of a trajectory by part; `other` is what no part covers: calls of the control plane."""
    all_played = [played for play in plays for played in play.trajectories]
    seconds = {part: fmean(played.part_s(part) for played in all_played) for part in PARTS}
    seconds["other"] = fmean(played.finished_s for played in all_played) - sum(seconds.values())
    return {part: round(value, 2) for part, value in seconds.items()}


def same_engine(one: Play, other: Play) -> float:
    """Share of steps that ran on the same engine in both, under the names of engines that suit best: they are alike."""
    sides = [[engine for played in play.trajectories for engine in played.engines] for play in (one, other)]
    names = sorted({*sides[0], *sides[1]})
    return max(
        fmean(dict(zip(names, renamed, strict=True))[a] == b for a, b in zip(*sides, strict=True))
        for renamed in itertools.permutations(names)
    )


def rounded(value: float) -> float:
    """To a hundredth of a percent."""
    return round(value, 4)
