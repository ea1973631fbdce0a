"""Plays the recorded answers of an estimator in a simulated rollout, to judge it by the
makespan."""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from treadle_core.model import Estimate
from treadle_sim.predictors import Answer, Predictor
from treadle_sim.workloads.workload import Workload


@dataclass(frozen=True, slots=True)
class Recorded:
    """Tokens left, as an estimator said after `turn` finished steps, when `gen_tokens` were
    sampled."""

    turn: int
    gen_tokens: int
    remaining: Estimate


class RecordedPredictor(Predictor):
    """Repeats the recorded answers of an estimator that is not part of the simulator, to judge it
    by the rollouts.

    Between answers, and after the last, a quantile is what it was less what was sampled since, as
    the controller counts. Turns are not predicted. answers: of each trajectory of the workload, by
    rising turn. Raises ValueError if a trajectory has none of turn 0.
    """

    def __init__(self, workload: Workload, answers: Sequence[Sequence[Recorded]]) -> None:
        if len(answers) != len(workload.trajectories) or not all(
            own and own[0].turn == 0 for own in answers
        ):
            raise ValueError("answers must begin at turn 0 for every trajectory of the workload")
        super().__init__(workload)
        self._answers = answers

    def predict(self, index: int, turn: int, gen_tokens: int) -> Answer:
        own = self._answers[index]
        last = own[bisect_right(own, turn, key=lambda answer: answer.turn) - 1]
        since = gen_tokens - last.gen_tokens
        room = self.room(gen_tokens)
        quantiles = (last.remaining.p10, last.remaining.p50, last.remaining.p90)
        return Answer(Estimate(*(min(max(0.0, each - since), room) for each in quantiles)))
