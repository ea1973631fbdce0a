"""Answers of other services on their way through the scheduler: predictions and plans."""

import pytest
from support.control import Scenario, all_of
from treadle.common.v1.estimate_pb2 import Quantiles
from treadle.placement.v1 import placement_pb2
from treadle.predictor.v1 import predictor_pb2
from treadle_core.actions import AnnouncePredicted, AskPrediction
from treadle_scheduler.convert_peers import fact_of, plan_arrived, predictions_arrived


@pytest.mark.parametrize(
    ("estimator", "learned"), [(predictor_pb2.ESTIMATOR_MODEL, True), (predictor_pb2.ESTIMATOR_SIBLINGS, False)]
)
def test_the_fact_says_whether_a_learned_model_made_it(
    estimator: predictor_pb2.Estimator.ValueType, learned: bool
) -> None:
    scenario = Scenario()
    scenario.open("t")
    asks = all_of(scenario.heard, AskPrediction)
    said = predictor_pb2.Prediction(
        trajectory_id="t",
        remaining_tokens=Quantiles(p10=1.0, p50=2.0, p90=3.0),
        estimator=estimator,
        model_version="v7",
    )
    (event,) = predictions_arrived(asks, predictor_pb2.BatchPredictRemainingResponse(predictions=[said]))
    (told,) = all_of(scenario.send(event), AnnouncePredicted)
    fact = fact_of(told).trajectory_predicted
    assert (fact.model_version, fact.learned, fact.remaining_tokens.p90) == ("v7", learned, 3.0)


def test_a_plan_says_the_engine_of_each_trajectory_and_what_was_not_asked_about_is_passed_over() -> None:
    scenario = Scenario()
    for name in ("e0", "e1"):
        scenario.engine(name)
    for name in ("a", "b", "c"):
        scenario.open(name)
    scenario.advance(1.0)
    ask = scenario.plans[-1]
    groups = {"e1": ["c", "unknown"], "e0": ["a"], "e9": ["b"]}
    said = [placement_pb2.EngineGroup(engine_id=name, trajectory_ids=ids) for name, ids in groups.items()]
    arrived = plan_arrived(ask, placement_pb2.PlanPlacementResponse(groups=said))
    assert arrived.engine_of is not None
    assert dict(zip(ask.work.trajectory_ids, arrived.engine_of.tolist(), strict=True)) == {"a": 0, "b": -1, "c": 1}
