"""The forecasts of a run: from facts to records, and what the report says of them."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.runs import small_run, span, trajectory
from treadle.telemetry.v1 import facts_pb2
from treadle_cli.demo.collect import CollectedFacts
from treadle_cli.report.accounting import ForecastFigures, arm_figures, forecast_figures
from treadle_cli.report.comparison import rows
from treadle_cli.report.page import write_page
from treadle_cli.report.records import ForecastRecord, read_run, write_summary, write_trajectories

START_S = 1_000.0
LEARNED, SIBLINGS = "20261122-101500", "siblings-3"


def fact(time_s: float, **body: Any) -> facts_pb2.Fact:
    made = facts_pb2.Fact(fact_id=f"f{time_s}", **body)
    made.time.FromMicroseconds(round(1e6 * time_s))
    return made


def step(turn: int) -> facts_pb2.StepRef:
    return facts_pb2.StepRef(trajectory_id="t", turn=turn)


def collected() -> CollectedFacts:
    """Opened, forecast, a step, its forecast after the next step is queued."""
    facts = CollectedFacts()
    first = facts_pb2.TrajectoryPredicted(trajectory_id="t", turn=0, model_version=SIBLINGS)
    second = facts_pb2.TrajectoryPredicted(trajectory_id="t", turn=1, model_version=LEARNED, learned=True)
    told = [
        fact(START_S + 0.5, trajectory_predicted=first),
        fact(START_S + 1.0, step_queued=facts_pb2.StepQueued(step=step(0))),
        fact(START_S + 1.5, step_queued=facts_pb2.StepQueued(step=step(0))),  # put back after a preemption
        fact(START_S + 3.0, step_finished=facts_pb2.StepFinished(step=step(0))),
        fact(START_S + 3.2, step_queued=facts_pb2.StepQueued(step=step(1))),
        fact(START_S + 3.4, trajectory_predicted=second),
    ]
    for each in told:
        facts.add(each)
    return facts


def test_each_forecast_stands_beside_the_step_that_it_followed_and_the_next() -> None:
    first, second = collected().forecast_records({"t": START_S}, START_S)["t"]
    assert (first.turn, first.model_version, first.learned) == (0, SIBLINGS, False)
    assert (second.turn, second.model_version, second.learned) == (1, LEARNED, True)
    assert (first.asked_s, first.came_s, first.next_queued_s) == pytest.approx((0.0, 0.5, 1.0))
    assert (second.asked_s, second.came_s, second.next_queued_s) == pytest.approx((3.0, 3.4, 3.2))


def test_a_forecast_of_an_unknown_step_is_left_out() -> None:
    facts = collected()
    assert facts.forecast_records({}, START_S)["t"][0].turn == 1  # nobody saw it open
    facts.finished_s.clear()
    assert facts.forecast_records({}, START_S) == {}


def test_the_figures_say_who_forecast_and_whether_anything_waited() -> None:
    forecasts = (
        ForecastRecord(0, SIBLINGS, 0.0, 0.1, 0.5),
        ForecastRecord(1, LEARNED, 3.0, 3.4, 3.2, learned=True),
        ForecastRecord(2, LEARNED, 5.0, 5.2, None, learned=True),
    )
    told = replace(
        trajectory(
            "treadle", "p", 0, 5, 6.0, span("decode", 1, 3), span("tool", 3, 3.1, ""), span("queue", 3.15, 4, turn=1)
        ),
        forecasts=forecasts,
    )
    figures = forecast_figures([told])
    assert (figures.forecasts, figures.learned, figures.overtaken) == (3, 2, 1)
    assert figures.forecast_s == pytest.approx(0.2)
    assert figures.queued_s == pytest.approx(0.05)
    assert forecast_figures([replace(told, forecasts=())]) == ForecastFigures()


def test_forecasts_are_kept_in_the_folder_and_shown(tmp_path: Path) -> None:
    run = small_run()
    last = replace(run.trajectories[-1], forecasts=(ForecastRecord(1, LEARNED, 3.0, 3.4, 3.2, learned=True),))
    run = replace(run, trajectories=(*run.trajectories[:-1], last))
    write_trajectories(tmp_path, run.trajectories)
    write_summary(tmp_path, run.record, [])
    assert read_run(tmp_path) == run
    figures = [arm_figures(arm, run.of_arm(arm.arm)) for arm in run.record.arms]
    shown = {row.label: row.values for row in rows(figures)}
    assert shown["forecasts by a learned model"] == (0.0, 1.0)
    assert shown["step's end to its forecast (median)"] == pytest.approx((0.0, 400.0))
    write_page(run, figures, tmp_path / "report.html")
    assert "the next step was queued 0.200 s before it came" in (tmp_path / "report.html").read_text()


def test_a_run_without_forecasts_says_nothing_of_them() -> None:
    run = small_run()
    figures = [arm_figures(arm, run.of_arm(arm.arm)) for arm in run.record.arms]
    assert not any("forecast" in row.label for row in rows(figures))
