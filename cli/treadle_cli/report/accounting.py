"""Compute the figures of a play from the spans of its trajectories: where the time went, and what
forecasts cost.

The seconds of a trajectory by kind, `other` included, add up to its wall time exactly: where spans
overlap (a migration during a tool call) the moment counts once, for the first kind in PRECEDENCE;
hidden migration time is a figure of its own. A forecast is made while the tool runs. A step that
was queued before its forecast came shows that steps do not wait for forecasts.
"""

import itertools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from treadle_cli.report.records import PlayRecord, TrajectoryRecord


@dataclass(frozen=True)
class ForecastFigures:
    """Figures of forecasts. learned: forecasts of a learned model. overtaken: forecasts that came
    after the next step had been queued.

    forecast_s: median from the end of a step to its forecast. queued_s: median from a client's
    request of a step until the step is in an engine's queue, admission included.
    """

    forecasts: int = 0
    learned: int = 0
    overtaken: int = 0
    forecast_s: float = 0.0
    queued_s: float = 0.0


def forecast_figures(trajectories: Sequence[TrajectoryRecord]) -> ForecastFigures:
    """Return the figures of one play; zeros where it has no forecasts."""
    forecasts = [forecast for trajectory in trajectories for forecast in trajectory.forecasts]
    waits_s = [wait_s for trajectory in trajectories for wait_s in _waits_s(trajectory)]
    return ForecastFigures(
        forecasts=len(forecasts),
        learned=sum(forecast.learned for forecast in forecasts),
        overtaken=sum(
            f.next_queued_s is not None and f.next_queued_s < f.came_s for f in forecasts
        ),
        forecast_s=statistics.median([f.came_s - f.asked_s for f in forecasts])
        if forecasts
        else 0.0,
        queued_s=statistics.median(waits_s) if waits_s else 0.0,
    )


def _waits_s(trajectory: TrajectoryRecord) -> list[float]:
    """Return the seconds from the request of each step, the first aside, until it is in a queue."""
    latest_first = sorted(trajectory.spans, key=lambda span: -span.start_s)
    # the earliest stays
    asked_s = {span.turn: span.start_s for span in latest_first if span.kind == "queue"}
    return [
        forecast.next_queued_s - asked_s[forecast.turn]
        for forecast in trajectory.forecasts
        if forecast.turn and forecast.turn in asked_s and forecast.next_queued_s is not None
    ]


PRECEDENCE = ("decode", "prefill", "queue", "tool", "migration")
OTHER = "other"  # control-plane calls, transfer, and the agent's own code
KINDS = (*PRECEDENCE, OTHER)
TAIL_SHARE = 0.1  # "the longest tenth": what a synchronous rollout waits for


@dataclass(frozen=True)
class PlayFigures:
    """Figures of one play. `time_s` sums over trajectories, so it is many times the makespan.

    tail_queue_share: of the wall time of the tenth with the most generated tokens, the part spent
    queueing (Heddle, fig. 4). hidden_migration_s: migration time during which the tool of the
    trajectory ran. engine_last_token_s: when each engine did its last work; until the makespan it
    was idle.
    """

    arm: str
    epoch: int
    makespan_s: float
    trajectories: int
    finished: int
    failed: int
    gen_tokens: int
    tokens_per_s: float
    median_finish_s: float
    mean_finish_s: float
    tail_queue_share: float
    mean_reward: float
    preemptions: int
    migrations: int
    failed_migrations: int
    lost_engines: int
    time_s: dict[str, float]
    hidden_migration_s: float
    engine_last_token_s: dict[str, float]
    other_programs_share: float
    forecasts: ForecastFigures


def time_by_kind(trajectory: TrajectoryRecord) -> dict[str, float]:
    """Return the seconds of each of KINDS between the trajectory's opening and its end; their sum
    is its wall time."""
    seconds = dict.fromkeys(KINDS, 0.0)
    start_s, end_s = trajectory.opened_s, trajectory.finished_s
    clipped = [(max(s.start_s, start_s), min(s.end_s, end_s), s.kind) for s in trajectory.spans]
    spans = [span for span in clipped if span[0] < span[1] and span[2] in PRECEDENCE]
    cuts = sorted({start_s, end_s, *(span[0] for span in spans), *(span[1] for span in spans)})
    for left, right in itertools.pairwise(cuts):
        active = {kind for begin, end, kind in spans if begin <= left and end >= right}
        seconds[next((kind for kind in PRECEDENCE if kind in active), OTHER)] += right - left
    return seconds


def play_figures(play: PlayRecord, trajectories: Sequence[TrajectoryRecord]) -> PlayFigures:
    """Return the figures of one play; `trajectories` are its own, at least one."""
    times = [time_by_kind(trajectory) for trajectory in trajectories]
    time_s = {kind: sum(seconds[kind] for seconds in times) for kind in KINDS}
    gen_tokens = sum(trajectory.gen_tokens for trajectory in trajectories)
    finishes = [trajectory.finished_s for trajectory in trajectories]
    migrations = [span for t in trajectories for span in t.spans if span.kind == "migration"]
    migration_s = sum(max(0.0, span.end_s - span.start_s) for span in migrations)
    return PlayFigures(
        arm=play.arm,
        epoch=play.epoch,
        makespan_s=play.makespan_s,
        trajectories=len(trajectories),
        finished=sum(t.outcome in ("finished", "truncated") for t in trajectories),
        failed=sum(t.outcome == "failed" for t in trajectories),
        gen_tokens=gen_tokens,
        tokens_per_s=gen_tokens / play.makespan_s if play.makespan_s > 0 else 0.0,
        median_finish_s=statistics.median(finishes),
        mean_finish_s=statistics.fmean(finishes),
        tail_queue_share=tail_queue_share(trajectories),
        mean_reward=statistics.fmean(t.reward or 0.0 for t in trajectories),
        preemptions=sum(t.preemptions for t in trajectories),
        migrations=sum(t.migrations for t in trajectories),
        failed_migrations=len(play.failed_migrations),
        lost_engines=sum(t.lost_engines for t in trajectories),
        time_s=time_s,
        hidden_migration_s=max(0.0, migration_s - time_s["migration"]),
        engine_last_token_s=_engine_ends(trajectories),
        other_programs_share=play.other_programs_share,
        forecasts=forecast_figures(trajectories),
    )


def tail_queue_share(trajectories: Sequence[TrajectoryRecord]) -> float:
    """Return the queue seconds over the wall seconds of the tenth (rounded up) with the most
    generated tokens; 0 for no time."""
    count = math.ceil(len(trajectories) * TAIL_SHARE)
    longest = sorted(trajectories, key=lambda t: t.gen_tokens, reverse=True)[:count]
    wall_s = sum(t.finished_s - t.opened_s for t in longest)
    return sum(time_by_kind(t)["queue"] for t in longest) / wall_s if wall_s > 0 else 0.0


def _engine_ends(trajectories: Sequence[TrajectoryRecord]) -> dict[str, float]:
    worked = [
        span
        for trajectory in trajectories
        for span in trajectory.spans
        if span.kind in ("prefill", "decode")
    ]
    # the latest stays
    ends = {span.engine_id: span.end_s for span in sorted(worked, key=lambda span: span.end_s)}
    return dict(sorted(ends.items()))
