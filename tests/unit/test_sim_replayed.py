"""A predictor that repeats what was said before."""

from collections.abc import Sequence

import pytest
from treadle_core.model import Estimate
from treadle_sim.cluster import homogeneous
from treadle_sim.driver import Driver
from treadle_sim.engine_model import engine_model
from treadle_sim.predictors import Oracle, Predictor, Recorded, RecordedPredictor
from treadle_sim.systems import TREADLE_HOMOGENEOUS
from treadle_sim.workloads.workload import Step, TrajectoryWork, Workload

ESTIMATE = Estimate(100.0, 300.0, 900.0)


def workload(*lengths: int, cap: int = 0) -> Workload:
    return Workload(
        "made",
        tuple(
            TrajectoryWork(f"p{at}", 0, 50, (Step(length // 2, 5, 0.1), Step(length - length // 2, 5, 0.1)))
            for at, length in enumerate(lengths)
        ),
        cap,
    )


def test_an_answer_holds_until_the_next_less_what_was_sampled_since() -> None:
    said = RecordedPredictor(
        workload(1_000), [[Recorded(0, 0, ESTIMATE), Recorded(2, 500, Estimate(10.0, 20.0, 30.0))]]
    )
    assert said.predict(0, 0, 0) == (ESTIMATE, None)
    assert said.predict(0, 1, 250)[0] == Estimate(0.0, 50.0, 650.0)
    assert said.predict(0, 2, 500)[0] == Estimate(10.0, 20.0, 30.0)
    assert said.predict(0, 7, 515)[0] == Estimate(0.0, 5.0, 15.0)


def test_nothing_is_said_beyond_the_cap() -> None:
    assert RecordedPredictor(workload(1_000, cap=400), [[Recorded(0, 0, ESTIMATE)]]).predict(0, 1, 200)[0] == Estimate(
        0, 100, 200
    )


@pytest.mark.parametrize("said", [[], [[]], [[Recorded(1, 10, ESTIMATE)]]])
def test_a_trajectory_without_an_answer_at_its_opening_is_refused(said: list[list[Recorded]]) -> None:
    with pytest.raises(ValueError, match="must begin at turn 0"):
        RecordedPredictor(workload(1_000), said)


def test_who_repeats_the_truth_leads_to_the_rollout_of_who_knows_it_but_for_the_turns() -> None:
    """Lengths from 200 to 20,000 tokens on engines of one slot. Result: the truth, told beforehand, is as good as the
    oracle that is asked; the reverse of it is not."""
    lengths = [200 * (at + 1) for at in range(100)]
    batch = workload(*lengths)
    cluster = homogeneous(engine_model("Qwen3-14B", "H200", 1, 4), 2)

    def makespan_s(told: Sequence[int] | None) -> float:
        predictor: Predictor = Oracle(batch)
        if told is not None:
            predictor = RecordedPredictor(
                batch, [[Recorded(0, 0, Estimate(float(each), float(each), float(each)))] for each in told]
            )
        system = TREADLE_HOMOGENEOUS
        return Driver(batch, cluster, system.policy, system.tuning, predictor).run().makespan_s

    known = makespan_s(None)
    assert makespan_s(lengths) == pytest.approx(known, rel=0.03)
    assert makespan_s(lengths[::-1]) > 1.05 * known
