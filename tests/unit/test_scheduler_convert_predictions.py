"""Answers of other services on their way through the scheduler: predictions and plans."""

import numpy as np
import pytest
from support.control import Scenario, all_of
from treadle.common.v1.estimate_pb2 import Quantiles
from treadle.placement.v1 import placement_pb2
from treadle.predictor.v1 import predictor_pb2
from treadle_core.actions import AnnounceClosed, AnnouncePredicted, AskPrediction
from treadle_core.model import Estimate
from treadle_placement.convert import columns_of
from treadle_scheduler.convert import fact_of, predictions_arrived, predictions_request
from treadle_scheduler.convert_engines import plan_arrived, plan_request


@pytest.mark.parametrize(
    ("estimator", "learned"),
    [(predictor_pb2.ESTIMATOR_MODEL, True), (predictor_pb2.ESTIMATOR_SIBLINGS, False)],
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
    (event,) = predictions_arrived(
        asks, predictor_pb2.BatchPredictRemainingResponse(predictions=[said])
    )
    (told,) = all_of(scenario.send(event), AnnouncePredicted)
    fact = fact_of(told).trajectory_predicted
    assert (fact.model_version, fact.learned, fact.remaining_tokens.p90) == ("v7", learned, 3.0)


def test_a_plan_says_the_engine_of_each_trajectory_and_one_of_other_trajectories_is_none() -> None:
    scenario = Scenario()
    for name in ("e0", "e1"):
        scenario.engine(name)
    for name in ("a", "b", "c"):
        scenario.open(name)
    scenario.advance(1.0)
    ask = scenario.plans[-1]
    said = placement_pb2.PlanPlacementResponse(engine_int32=np.array([1, 0, 1], "<i4").tobytes())
    engine_of = plan_arrived(ask, said).engine_of
    assert engine_of is not None and engine_of.tolist() == [1, 0, 1]
    for wrong in ([0, 1], [0, 1, 2], [0, 1, -1]):
        with pytest.raises(ValueError, match="a plan of"):
            plan_arrived(
                ask,
                placement_pb2.PlanPlacementResponse(engine_int32=np.array(wrong, "<i4").tobytes()),
            )


def test_the_question_for_a_plan_says_in_columns_what_is_known_of_each_trajectory() -> None:
    """One trajectory has run a step, another has not, and samples of one prompt share it."""
    scenario = Scenario(engines=("e0", "e1"))
    for sample, name in enumerate(("a", "b")):
        scenario.open(name, prompt_id="p", sample=sample)
    scenario.finish(scenario.step("a", 0))
    scenario.advance(1.0)
    ask = scenario.plans[-1]
    columns = columns_of(plan_request(ask))
    for column, field in {
        "lengths": "remaining_tokens",
        "contexts": "context_tokens",
        "current": "current",
        "room_tokens": "room_tokens",
        "observed_tokens": "observed_tokens",
        "tool_s": "tool_s",
        "log_sigma": "log_sigma",
        "started": "started",
        "read": "read",
        "prompts": "prompts",
    }.items():
        assert columns[column].tolist() == getattr(ask.work, field).tolist(), column
    assert sorted(columns["started"].tolist()) == [False, True]


def test_what_tools_took_is_told_to_the_predictor_and_what_they_will_take_comes_back() -> None:
    scenario = Scenario(engines=("e0",))
    scenario.open("t")
    scenario.finish(scenario.step("t", 0))
    scenario.finish(scenario.step("t", 1, tool_s=4.0, context_tokens=180))
    ask = all_of(scenario.heard, AskPrediction)[-1]
    (query,) = predictions_request([ask], "trace of {}".format).queries
    assert (query.tool_time.seconds, query.context_tokens, query.traceparent) == (
        4,
        190,
        "trace of t",
    )

    said = Quantiles(p10=1.0, p50=2.0, p90=3.0)
    answer = predictor_pb2.Prediction(
        trajectory_id="t",
        remaining_tokens=said,
        remaining_tool_s=said,
        remaining_observed_tokens=said,
    )
    (event,) = predictions_arrived(
        [ask], predictor_pb2.BatchPredictRemainingResponse(predictions=[answer])
    )
    assert event.prediction.remaining_turns is None
    assert (
        event.prediction.remaining_tool_s
        == event.prediction.remaining_observed_tokens
        == Estimate(1.0, 2.0, 3.0)
    )

    (told,) = all_of(scenario.close("t"), AnnounceClosed)
    closed = fact_of(told).trajectory_closed
    assert (closed.observed_tokens, closed.tool_time.seconds) == (70, 4)
