"""An estimator that is judged by rollouts in which its recorded answers are repeated."""

from collections.abc import Sequence

import pytest
from support.simulated import work
from treadle_core.model import Estimate
from treadle_sim.cluster import homogeneous
from treadle_sim.driver import Driver
from treadle_sim.engine_model import engine_model
from treadle_sim.predictors import Answer, Oracle, Predictor
from treadle_sim.systems import TREADLE_HOMOGENEOUS
from treadle_sim.workloads.workload import Workload

from treadle_bench.predictor.recorded import Recorded, RecordedPredictor

ESTIMATE = Estimate(100.0, 300.0, 900.0)


def two_turns(*lengths: int, cap: int = 0) -> Workload:
    works = (
        work(f"p{at}", 0, length // 2, length - length // 2) for at, length in enumerate(lengths)
    )
    return Workload("made", tuple(works), cap)


def test_answers_that_do_not_begin_at_the_opening_are_refused() -> None:
    without_opening: list[list[list[Recorded]]] = [[], [[]], [[Recorded(1, 10, ESTIMATE)]]]
    for said in without_opening:
        with pytest.raises(ValueError, match="must begin at turn 0"):
            RecordedPredictor(two_turns(1_000), said)


def test_an_answer_holds_until_the_next_less_what_was_sampled_since_and_within_the_cap() -> None:
    said = RecordedPredictor(
        two_turns(1_000), [[Recorded(0, 0, ESTIMATE), Recorded(2, 500, Estimate(10.0, 20.0, 30.0))]]
    )
    assert said.predict(0, 0, 0) == Answer(ESTIMATE)
    assert said.predict(0, 1, 250)[0] == Estimate(0.0, 50.0, 650.0)
    assert said.predict(0, 2, 500)[0] == Estimate(10.0, 20.0, 30.0)
    assert said.predict(0, 7, 515)[0] == Estimate(0.0, 5.0, 15.0)
    capped = RecordedPredictor(two_turns(1_000, cap=400), [[Recorded(0, 0, ESTIMATE)]])
    assert capped.predict(0, 1, 200)[0] == Estimate(0, 100, 200)


def test_who_repeats_the_truth_leads_to_the_rollout_of_who_knows_it_but_for_the_turns() -> None:
    """Lengths from 200 to 20,000 tokens on engines of one slot. Result: the truth, told beforehand,
    is as good as the oracle that is asked; the reverse of it is not."""
    lengths = [200 * (at + 1) for at in range(100)]
    batch = two_turns(*lengths)
    cluster = homogeneous(engine_model("Qwen3-14B", "H200", 1, 4), 2)

    def makespan_s(told: Sequence[int] | None) -> float:
        predictor: Predictor = Oracle(batch)
        if told is not None:
            predictor = RecordedPredictor(
                batch, [[Recorded(0, 0, Estimate(each, each, each))] for each in told]
            )
        system = TREADLE_HOMOGENEOUS
        return Driver(batch, cluster, system.policy, system.tuning, predictor).run().makespan_s

    known = makespan_s(None)
    assert makespan_s(lengths) == pytest.approx(known, rel=0.03)
    assert makespan_s(lengths[::-1]) > 1.02 * known
