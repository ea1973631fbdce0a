"""What a run's forecasts cost: whether any step waited for one.

A forecast is asked for when a step has ended, and made while its tool runs. Had the next step waited, it would be in
an engine's queue only after the forecast had come, so each that was there before is the proof that nothing waits; and
the way from a step's request to a queue would be as long as a forecast takes. Pure functions.
"""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from treadle_cli.records import TrajectoryRecord


@dataclass(frozen=True)
class ForecastFigures:
    """learned: made by a learned model. overtaken: of `forecasts`, came when the next step was in a queue already.
    forecast_s: median from the end of a step to its forecast; queued_s: median from a client's request of the next step
    to the step in an engine's queue, the wait for room included."""

    forecasts: int = 0
    learned: int = 0
    overtaken: int = 0
    forecast_s: float = 0.0
    queued_s: float = 0.0


def forecast_figures(trajectories: Sequence[TrajectoryRecord]) -> ForecastFigures:
    """Of one arm; zeros where nothing was told."""
    told = [forecast for trajectory in trajectories for forecast in trajectory.forecasts]
    waits_s = [wait_s for trajectory in trajectories for wait_s in _waits_s(trajectory)]
    return ForecastFigures(
        forecasts=len(told),
        learned=sum(forecast.learned for forecast in told),
        overtaken=sum(f.next_queued_s is not None and f.next_queued_s < f.came_s for f in told),
        forecast_s=statistics.median([f.came_s - f.asked_s for f in told]) if told else 0.0,
        queued_s=statistics.median(waits_s) if waits_s else 0.0,
    )


def _waits_s(trajectory: TrajectoryRecord) -> list[float]:
    """From the request of each step but the first to that step in a queue."""
    asked_s: dict[int, float] = {}
    for span in trajectory.spans:
        if span.kind == "queue":
            asked_s[span.turn] = min(span.start_s, asked_s.get(span.turn, span.start_s))
    return [
        forecast.next_queued_s - asked_s[forecast.turn]
        for forecast in trajectory.forecasts
        if forecast.turn and forecast.turn in asked_s and forecast.next_queued_s is not None
    ]
