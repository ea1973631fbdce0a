"""Forecasts beside the steps they are about: when each was asked for, when it came, and when the next step was in an
engine's queue. Pure.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from treadle.telemetry.v1.facts_pb2 import Fact, TrajectoryPredicted

from treadle_cli.records import ForecastRecord


@dataclass
class StepTimes:
    """Unix time, by (trajectory, turn): when a step was first queued at an engine, and when it last ended there."""

    queued_s: dict[tuple[str, int], float] = field(default_factory=dict)
    ended_s: dict[tuple[str, int], float] = field(default_factory=dict)

    def take(self, fact: Fact) -> None:
        """Keeps what a fact says of a step."""
        time_s = fact.time.ToMicroseconds() / 1e6
        if fact.HasField("step_queued"):
            step = fact.step_queued.step
            self.queued_s.setdefault((step.trajectory_id, step.turn), time_s)
        elif fact.HasField("step_finished"):
            step = fact.step_finished.step
            self.ended_s[step.trajectory_id, step.turn] = time_s


def forecasts_of(
    told: Iterable[tuple[float, TrajectoryPredicted]],
    steps: StepTimes,
    opened_s: Mapping[str, float],
    started_s: float,
) -> dict[str, tuple[ForecastRecord, ...]]:
    """By trajectory. told: forecasts with the unix time at which they came; opened_s: unix time by trajectory, when the
    first was asked for; started_s: unix time from which records count. A forecast of which it is not known what it
    followed is left out."""
    found: dict[str, list[ForecastRecord]] = {}
    for came_s, forecast in told:
        name, turn = forecast.trajectory_id, forecast.turn
        asked_s = steps.ended_s.get((name, turn - 1)) if turn else opened_s.get(name)
        if asked_s is None:
            continue
        queued_s = steps.queued_s.get((name, turn))
        found.setdefault(name, []).append(
            ForecastRecord(
                turn=turn,
                model_version=forecast.model_version,
                learned=forecast.learned,
                asked_s=asked_s - started_s,
                came_s=came_s - started_s,
                next_queued_s=None if queued_s is None else queued_s - started_s,
            )
        )
    return {name: tuple(records) for name, records in found.items()}
