"""The forecasts of a run: from facts to records."""

from typing import Any

import pytest
from treadle.telemetry.v1 import facts_pb2
from treadle_cli.demo.collect import CollectedFacts

START_S = 1_000.0
LEARNED, SIBLINGS = "20261122-101500", "siblings-3"


def fact(time_s: float, **body: Any) -> facts_pb2.Fact:
    made = facts_pb2.Fact(fact_id=f"f{time_s}", **body)
    made.time.FromMicroseconds(round(1e6 * time_s))
    return made


@pytest.fixture
def facts() -> CollectedFacts:
    """Opened, forecast, a step that is put back after a preemption, its forecast after the next step is queued."""
    steps = [facts_pb2.StepRef(trajectory_id="t", turn=turn) for turn in (0, 1)]
    first = facts_pb2.TrajectoryPredicted(trajectory_id="t", turn=0, model_version=SIBLINGS)
    second = facts_pb2.TrajectoryPredicted(trajectory_id="t", turn=1, model_version=LEARNED, learned=True)
    collected = CollectedFacts()
    for each in (
        fact(START_S + 0.5, trajectory_predicted=first),
        fact(START_S + 1.0, step_queued=facts_pb2.StepQueued(step=steps[0])),
        fact(START_S + 1.5, step_queued=facts_pb2.StepQueued(step=steps[0])),
        fact(START_S + 3.0, step_finished=facts_pb2.StepFinished(step=steps[0])),
        fact(START_S + 3.2, step_queued=facts_pb2.StepQueued(step=steps[1])),
        fact(START_S + 3.4, trajectory_predicted=second),
        fact(START_S + 3.4, trajectory_predicted=second),
    ):
        collected.add(each)
    return collected


def test_each_forecast_stands_beside_the_step_that_it_followed_and_the_next(facts: CollectedFacts) -> None:
    first, second = facts.forecast_records({"t": START_S}, START_S)["t"]
    assert (first.turn, first.model_version, first.learned) == (0, SIBLINGS, False)
    assert (second.turn, second.model_version, second.learned) == (1, LEARNED, True)
    assert (first.asked_s, first.came_s, first.next_queued_s) == pytest.approx((0.0, 0.5, 1.0))
    assert (second.asked_s, second.came_s, second.next_queued_s) == pytest.approx((3.0, 3.4, 3.2))


def test_a_forecast_of_an_unknown_step_is_left_out(facts: CollectedFacts) -> None:
    assert facts.forecast_records({}, START_S)["t"][0].turn == 1  # nobody saw it open
    facts.finished_s.clear()
    assert facts.forecast_records({}, START_S) == {}
