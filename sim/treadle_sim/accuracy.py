"""How good a predictor is, in the terms of Heddle §7.2: recall of the longest trajectories, and correlation.

Invariant: all trajectories run side by side at one speed, a token at a time and without tools, so that what a
predictor has heard by a step is what an untroubled rollout would have told it; those compared are the same ones for
every number of steps seen.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from treadle_core.ranking.estimator import correlation, recall_of_longest

from treadle_sim.predictors import Predictor
from treadle_sim.workloads.workload import Workload

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Accuracy:
    """After `turn` steps. recall: of the longest tenth, the share among the tenth that was predicted longest. pearson:
    of predicted and true total tokens; pearson_log: of their logarithms. bias: median of predicted over true."""

    turn: int
    trajectories: int
    recall: float
    pearson: float
    pearson_log: float
    bias: float


def accuracy(workload: Workload, predictor: Predictor, turns: int = 2) -> tuple[Accuracy, ...]:
    """After 0 to `turns` steps, of the trajectories that take more steps than that. Raises ValueError for none."""
    compared = [index for index, work in enumerate(workload.trajectories) if len(work.steps) > turns]
    if not compared:
        raise ValueError(f"no trajectory takes more than {turns} steps")
    total = np.array([workload.trajectories[index].gen_tokens for index in compared], np.float64)
    predicted = replay(workload, predictor, turns)[compared]
    return tuple(_compared(turn, total, predicted[:, turn]) for turn in range(turns + 1))


def replay(workload: Workload, predictor: Predictor, turns: int) -> Floats:
    """Predicted total tokens [trajectory, turn], medians; NaN where a trajectory had ended by then."""
    answers = np.full((len(workload.trajectories), turns + 1), np.nan)
    for gen_tokens, index, turn, last in _moments(workload):
        if last:
            predictor.finished(index)
            continue
        remaining, _ = predictor.predict(index, turn, gen_tokens)
        if turn <= turns:
            answers[index, turn] = gen_tokens + remaining.p50
    return answers


def _moments(workload: Workload) -> Sequence[tuple[int, int, int, bool]]:
    """(tokens sampled by then, trajectory, steps finished, whether it has ended), in the order of an even speed."""
    moments = []
    for index, work in enumerate(workload.trajectories):
        gen_tokens = 0
        moments.append((0, index, 0, False))
        for turn, step in enumerate(work.steps, start=1):
            gen_tokens += step.gen_tokens
            moments.append((gen_tokens, index, turn, turn == len(work.steps)))
    return sorted(moments)


def _compared(turn: int, total: Floats, predicted: Floats) -> Accuracy:
    return Accuracy(
        turn,
        len(total),
        recall_of_longest(total, predicted),
        correlation(total, predicted),
        correlation(np.log(total), np.log(np.maximum(predicted, 1.0))),
        float(np.median(predicted / total)),
    )
