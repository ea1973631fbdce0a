"""A prediction's way through the scheduler: from the predictor's answer to the fact that tells it."""

import pytest
from support.control import Scenario, all_of
from treadle.common.v1.estimate_pb2 import Quantiles
from treadle.predictor.v1 import predictor_pb2
from treadle_core.actions import AnnouncePredicted, AskPrediction
from treadle_scheduler.convert_peers import fact_of, predictions_arrived


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
