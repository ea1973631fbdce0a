"""Compare the plays of a run: rows of a table, one sentence, every loss; and print them.

Where arms played several epochs, the sentence gives the median of their ratios, one table holds
every epoch, and the others the median epoch. The page and the terminal show the same rows. A row
says which way is better, and every row in which the last arm (Treadle) did worse than the first
(the baseline) is named in `losses`: nothing is left out.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from rich.console import Console
from rich.table import Table

from treadle_cli.report.accounting import KINDS, PlayFigures
from treadle_cli.report.records import Run

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
            console.print(f"[yellow]{play.title}: {loss}[/yellow]")
    console.print(f"[bold]{headline(run)}[/bold] One run is an anecdote.")
    lost = losses(figures)
    if lost:
        console.print(
            f"{titles[-1]} did worse in: {'; '.join(lost)}.", style="dim", highlight=False
        )
    console.print(
        f"Report: {folder / 'report.html'} (and report.png, trajectories.jsonl, summary.json)",
        soft_wrap=True,
    )


def _table(title: str, table_rows: Sequence[Row], titles: Sequence[str]) -> Table:
    table = _empty_table(title, (*titles, "change"))
    for row in table_rows:
        style = _VERDICT_STYLE[row.verdict()]
        table.add_row(
            row.label,
            *[row.shown(value) for value in row.values],
            f"[{style}]{row.change()}[/{style}]",
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
        table.add_column(column, justify="right")
    return table
