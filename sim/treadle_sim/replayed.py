"""A predictor whose answers were given before: what an estimator said of each trajectory after so many steps.

Purpose: estimators that are not part of the simulator are judged by the rollouts that they lead to. Between answers,
and after the last, a quantile is what it was less what was sampled since, as the controller counts. Turns are not
predicted.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from treadle_core.model import Estimate

from treadle_sim.predictors import Answer, Totals
from treadle_sim.workload import Workload


@dataclass(frozen=True, slots=True)
class Said:
    """After `turn` finished steps, when `gen_tokens` were sampled: tokens left."""

    turn: int
    gen_tokens: int
    remaining: Estimate


class Replayed:
    """See the module. said: of each trajectory of the workload, by rising turn. Raises ValueError where a trajectory
    has none of turn 0."""

    def __init__(self, workload: Workload, said: Sequence[Sequence[Said]]) -> None:
        if len(said) != len(workload.trajectories) or not all(each and each[0].turn == 0 for each in said):
            raise ValueError("said must begin at turn 0 for every trajectory of the workload")
        self._totals = Totals(workload)
        self._said = said
        self._turns = [[each.turn for each in of] for of in said]

    def predict(self, index: int, turn: int, gen_tokens: int) -> Answer:
        last = self._said[index][bisect_right(self._turns[index], turn) - 1]
        since = gen_tokens - last.gen_tokens
        room = self._totals.room(gen_tokens)
        quantiles = (last.remaining.p10, last.remaining.p50, last.remaining.p90)
        return Estimate(*(min(max(0.0, each - since), room) for each in quantiles)), None

    def finished(self, index: int) -> None:
        """Learns nothing."""
