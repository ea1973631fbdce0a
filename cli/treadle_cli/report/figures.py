"""Compute the figures of a play from the spans of its trajectories, and compare the plays of a run.

The seconds of a trajectory by kind, `other` included, add up to its wall time exactly: where spans
overlap (a migration during a tool call) the moment counts once, for the first kind in PRECEDENCE;
hidden migration time is a figure of its own. A forecast is made while the tool runs. A step that
was queued before its forecast came shows that steps do not wait for forecasts.

A comparison is rows of a table, one sentence, and every loss. Where arms played several epochs, the
sentence gives the median of their ratios, one table holds every epoch, and the others the median
epoch. The page and the terminal show the same rows. A row names which way is better, and every row
in which the last arm (Treadle) did worse than the first (the baseline) is named in `losses`:
nothing is left out.
"""

import itertools
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from rich.console import Console
from rich.table import Table
from rich.text import Text

from treadle_cli.exits import cell, printable
from treadle_cli.report.records import PlayRecord, Run, TrajectoryRecord


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


NOTABLE = 0.02  # relative difference below which two figures of one run count as equal

# Differences that no reader cares about: half a second, a few milliseconds of a call, two points.
FLOORS = {"s": 0.5, "ms": 5.0, "%": 0.02}

Better = Literal["lower", "higher", ""]


@dataclass(frozen=True)
class Row:
    """One figure of every arm, in their order. better: which way is better, empty where neither
    is."""

    label: str
    values: tuple[float, ...]
    unit: str
    better: Better

    def shown(self, value: float) -> str:
        """Return the value with its unit."""
        if self.unit == "%":
            return f"{100 * value:.0f} %"
        if self.unit == "":
            return f"{value:,.0f}" if value == round(value) else f"{value:.2f}"
        return f"{value:,.1f} {self.unit}"

    def change(self) -> str:
        """Return the change from the first arm to the last: "-12 %", "+3"; empty where there is
        nothing to compare."""
        if len(self.values) < 2:
            return ""
        first, last = self.values[0], self.values[-1]
        if self.unit == "%":
            return f"{100 * (last - first):+.0f} points"
        if first == 0:
            return "" if last < FLOORS.get(self.unit, 1.0) else f"{last:+.3g}"
        return f"{100 * (last - first) / first:+.0f} %"

    def verdict(self) -> Literal["better", "worse", "even"]:
        """Return how the last arm did against the first; "even" below NOTABLE or where neither way
        is better."""
        if len(self.values) < 2 or not self.better:
            return "even"
        first, last = self.values[0], self.values[-1]
        if abs(last - first) <= max(
            NOTABLE * max(abs(first), abs(last)), FLOORS.get(self.unit, 0.0)
        ):
            return "even"
        return "better" if (last < first) == (self.better == "lower") else "worse"


def _idle_s(play: PlayFigures) -> float:
    return sum(play.makespan_s - end_s for end_s in play.engine_last_token_s.values())


# Label, figure, unit and which way is better; most important first.
Compared = tuple[tuple[str, Callable[[PlayFigures], float], str, Better], ...]
COMPARED: Compared = (
    ("makespan", lambda a: a.makespan_s, "s", "lower"),
    ("median trajectory ends at", lambda a: a.median_finish_s, "s", "lower"),
    ("mean trajectory ends at", lambda a: a.mean_finish_s, "s", "lower"),
    ("queue share of the longest 10 %", lambda a: a.tail_queue_share, "%", "lower"),
    ("generated tokens", lambda a: a.gen_tokens, "", ""),
    ("tokens per second", lambda a: a.tokens_per_s, "tok/s", "higher"),
    ("idle engine time before the makespan", _idle_s, "s", "lower"),
    ("mean reward", lambda a: a.mean_reward, "", ""),
    ("trajectories that failed", lambda a: a.failed, "", "lower"),
    ("preemptions", lambda a: a.preemptions, "", ""),
    ("migrations", lambda a: a.migrations, "", ""),
    ("migrations cancelled or failed", lambda a: a.failed_migrations, "", "lower"),
    ("share of the cores used by other programs", lambda a: a.other_programs_share, "%", ""),
    ("steps continued after an engine was lost", lambda a: a.lost_engines, "", ""),
)
# Figures of what the predictor did, and that no step waited for it.
FORECASTS: Compared = (
    ("forecasts", lambda a: a.forecasts.forecasts, "", ""),
    ("forecasts by a learned model", lambda a: a.forecasts.learned, "", ""),
    ("step's end to its forecast (median)", lambda a: 1e3 * a.forecasts.forecast_s, "ms", ""),
    ("step's request to its queue (median)", lambda a: 1e3 * a.forecasts.queued_s, "ms", "lower"),
    ("steps in a queue before their forecast came", lambda a: a.forecasts.overtaken, "", ""),
)


def rows(figures: Sequence[PlayFigures]) -> list[Row]:
    """Return the comparison, most important first; forecasts are compared where an arm has any."""
    compared = COMPARED
    if any(arm.forecasts.forecasts for arm in figures):
        compared += FORECASTS
    return [
        Row(label, tuple(float(figure(arm)) for arm in figures), unit, better)
        for label, figure, unit, better in compared
    ]


def time_rows(figures: Sequence[PlayFigures]) -> list[Row]:
    """Return where the time went, all trajectories added up; the kinds sum to the last row."""
    better: dict[str, Better] = {"queue": "lower", "prefill": "lower", "other": "lower"}
    kinds = [
        Row(kind, tuple(arm.time_s[kind] for arm in figures), "s", better.get(kind, ""))
        for kind in KINDS
    ]
    total = Row("together", tuple(sum(arm.time_s.values()) for arm in figures), "s", "lower")
    return [*kinds, total]


def losses(figures: Sequence[PlayFigures]) -> list[str]:
    """Return one sentence for each figure in which the last arm did worse than the first."""
    found = []
    for row in (*rows(figures), *time_rows(figures)):
        if row.verdict() == "worse":
            first, last = row.shown(row.values[0]), row.shown(row.values[-1])
            found.append(f"{row.label}: {last} against {first} ({row.change()})")
    return found


def headline(run: Run) -> str:
    """Return the result in one sentence, of the median repeat where there are several."""
    first, last = run.compared[0], run.compared[-1]
    if first is last:
        return f"{first.title} took {first.makespan_s:.1f} s."
    seconds = f"{last.makespan_s:.1f} s against {first.makespan_s:.1f} s{_spread(run)}"
    if abs(first.makespan_s - last.makespan_s) <= NOTABLE * first.makespan_s:
        return (
            f"{last.title} and {first.title} took the same time within {100 * NOTABLE:.0f} %: "
            f"{seconds}."
        )
    share = abs(first.makespan_s - last.makespan_s) / first.makespan_s
    change = f"{100 * share:.0f} % {'sooner' if last.makespan_s < first.makespan_s else 'later'}"
    return f"{last.title} finished {change} than {first.title}: {seconds}."


def _spread(run: Run) -> str:
    ratios = [repeat.ratio for repeat in run.repeats]
    if len(ratios) < 2:
        return ""
    return (
        f", the median of {len(ratios)} epochs, whose ratios are {min(ratios):.2f} to "
        f"{max(ratios):.2f}"
    )


def epoch_rows(run: Run) -> list[tuple[str, list[str], str]]:
    """Return every epoch: its name, each arm's makespan in words (empty where it did not play), and
    the ratio."""
    plays = run.record.plays
    arms = dict.fromkeys((plays[0].arm, *(play.arm for play in plays)))
    ratios = {repeat.baseline.epoch: f"{repeat.ratio:.2f}" for repeat in run.repeats}
    median = run.median_repeat
    found = []
    for epoch in dict.fromkeys(play.epoch for play in plays):
        of_arm = {play.arm: f"{play.makespan_s:.1f} s" for play in plays if play.epoch == epoch}
        name = f"epoch {epoch}"
        if epoch not in ratios:
            name += ", teaches the predictor"
        elif median is not None and epoch == median.baseline.epoch and len(ratios) > 1:
            name += ", the median"
        found.append((name, [of_arm.get(arm, "") for arm in arms], ratios.get(epoch, "")))
    return found


_VERDICT_STYLE = {"better": "green", "worse": "red", "even": "dim"}


def print_report(console: Console, run: Run, figures: Sequence[PlayFigures], folder: Path) -> None:
    """Print the tables; paths come last, because that is where a reader looks."""
    titles = [play.title for play in run.compared]
    which = f", epoch {run.compared[0].epoch}" if run.repeats else ""
    console.print()
    console.print(_table(f"The arms compared{which}", rows(figures), titles))
    console.print(
        _table(f"Where the time went (all trajectories{which})", time_rows(figures), titles)
    )
    if run.repeats:
        console.print(_epochs_table(run, titles))
    for play in run.record.plays:
        for loss in play.engine_losses:
            console.print(Text(printable(f"{play.title}: {loss}"), "yellow"))
    console.print(Text.assemble((printable(headline(run)), "bold"), " One run is an anecdote."))
    lost = losses(figures)
    if lost:
        console.print(
            cell(f"{titles[-1]} did worse in: {'; '.join(lost)}."), style="dim", highlight=False
        )
    console.print(
        f"Report: {folder / 'report.html'} (and report.png, trajectories.jsonl, summary.json)",
        markup=False,
        soft_wrap=True,
    )


def _table(title: str, table_rows: Sequence[Row], titles: Sequence[str]) -> Table:
    table = _empty_table(title, (*titles, "change"))
    for row in table_rows:
        style = _VERDICT_STYLE[row.verdict()]
        table.add_row(
            row.label, *[row.shown(value) for value in row.values], Text(row.change(), style)
        )
    return table


def _epochs_table(run: Run, titles: Sequence[str]) -> Table:
    table = _empty_table("Makespan of every epoch", (*titles, "ratio"))
    for name, makespans, ratio in epoch_rows(run):
        table.add_row(name, *makespans, ratio)
    return table


def _empty_table(title: str, columns: Sequence[str]) -> Table:
    table = Table(
        "",
        title=title,
        title_justify="left",
        title_style="bold",
        box=None,
        pad_edge=False,
        padding=(0, 2, 0, 0),
    )
    for column in columns:
        table.add_column(cell(column), justify="right")
    return table
