"""Draw the Gantt picture as PNG: one panel a play on one time axis, a row a trajectory, and below
where the time went.

Rows are sorted by finish, so the upper edge of a panel is its completion curve. A migration or a
tool call lasts milliseconds on an axis of minutes: migrations carry a diamond so that they can be
seen.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from treadle_cli.report.accounting import KINDS, PlayFigures
from treadle_cli.report.gantt import add_legend, draw_row, tidy, use_font
from treadle_cli.report.palette import COLOURS, DRAWN_KINDS, FAINT, INK, row_label
from treadle_cli.report.records import PlayRecord, Run, TrajectoryRecord

WIDTH_IN = 13.0
ROW_IN = 0.145  # height of a trajectory's row: a label of 6.5 points fits
MOST_LABELLED_ROWS = 64  # beyond it row labels would overlap, and are left out
DPI = 150
MAKESPAN: dict[str, Any] = {"color": INK, "linestyle": "--", "linewidth": 1}
TITLE: dict[str, Any] = {"loc": "left", "size": 11, "weight": "bold"}


def draw_picture(run: Run, figures: Sequence[PlayFigures], path: Path) -> None:
    """Write the PNG."""
    plays = [(play, run.of_play(play)) for play in run.compared]
    rows = [max(4, len(trajectories)) * ROW_IN + 0.55 for _, trajectories in plays]
    share_in = 0.42 * len(plays) + 0.75
    height = sum(rows) + share_in + 1.95
    with use_font():
        figure = Figure(figsize=(WIDTH_IN, height), dpi=DPI, facecolor="white")
        grid = figure.add_gridspec(
            len(plays) + 1,
            1,
            height_ratios=[*rows, share_in],
            left=0.135,
            right=0.975,
            top=1 - 1.22 / height,
            bottom=0.42 / height,
            hspace=0.74 / (height / (len(plays) + 1)),
        )
        longest_s = max(play.makespan_s for play, _ in plays) * 1.06
        for index, (play, trajectories) in enumerate(plays):
            axes = figure.add_subplot(grid[index])
            _draw_play(axes, play, trajectories, longest_s, last=index == len(plays) - 1)
        _draw_shares(figure.add_subplot(grid[len(plays)]), run, figures)
        _draw_heading(figure, run, figures, height)
        figure.savefig(path)


def _draw_heading(figure: Figure, run: Run, figures: Sequence[PlayFigures], height: float) -> None:
    record = run.record
    spans = " → ".join(f"{play.title} {play.makespan_s:.1f} s" for play in run.compared)
    ratios = [repeat.ratio for repeat in run.repeats]
    if len(ratios) > 1:
        spans += (
            f"   (median of {len(ratios)} epochs; ratios "
            f"{', '.join(f'{ratio:.2f}' for ratio in ratios)})"
        )
    facts = (
        f"{figures[0].trajectories} trajectories a play on {len(record.engines)} engines of "
        f"{record.slots} slots · "
        f"{record.model} · seed {record.seed} · {record.machine}"
    )
    figure.text(0.015, 1 - 0.30 / height, f"Makespan: {spans}", size=15, weight="bold")
    figure.text(0.015, 1 - 0.54 / height, facts, size=9, color=FAINT)
    handles = [
        *(Patch(color=COLOURS[kind], label=kind) for kind in (*DRAWN_KINDS[:-1], "other")),
        Line2D(
            [],
            [],
            marker="D",
            color=COLOURS["migration"],
            linestyle="",
            markersize=5,
            label="migration",
        ),
        Line2D([], [], **MAKESPAN, label="makespan"),
    ]
    add_legend(figure, handles, (0.006, 1 - 0.56 / height), fontsize=9)


def _draw_play(
    axes: Axes,
    play: PlayRecord,
    trajectories: list[TrajectoryRecord],
    longest_s: float,
    *,
    last: bool,
) -> None:
    for row, trajectory in enumerate(trajectories):
        whole = (trajectory.opened_s, trajectory.finished_s - trajectory.opened_s)
        axes.broken_barh([whole], (row - 0.41, 0.82), color=COLOURS["other"])
        moves = [s.start_s for s in trajectory.spans if s.kind == "migration"]
        draw_row(
            axes,
            row,
            [(s.kind, s.start_s, s.end_s) for s in trajectory.spans],
            moves,
            0.82,
            ms=4,
            mew=0.6,
        )
    axes.axvline(play.makespan_s, **MAKESPAN)
    end = (play.makespan_s, 0.5)
    axes.annotate(
        f"{end[0]:.1f} s", end, xytext=(4, 0), textcoords="offset points", size=9, weight="bold"
    )
    axes.set_title(f"{play.title}   ·   {play.policy}", **TITLE)
    axes.set_xlim(0, longest_s)
    axes.set_ylim(-0.8, len(trajectories) - 0.2)
    labels = [row_label(trajectory) for trajectory in trajectories]
    if len(labels) > MOST_LABELLED_ROWS:
        labels = []
    axes.set_yticks(range(len(labels)), labels, size=6.5)
    if last:
        axes.set_xlabel("seconds from the start of the play", loc="right", size=8, color=FAINT)
    tidy(axes, line=True)


def _draw_shares(axes: Axes, run: Run, figures: Sequence[PlayFigures]) -> None:
    for row, play in enumerate(reversed(figures)):
        left = 0.0
        for kind in KINDS:
            seconds = play.time_s[kind]
            axes.barh(row, seconds, left=left, height=0.62, color=COLOURS[kind])
            if seconds > 0.06 * sum(play.time_s.values()):
                ink = "white" if kind in ("decode", "tool", "migration") else INK
                words = f"{kind} {seconds:.0f} s"
                axes.text(
                    left + seconds / 2, row, words, ha="center", va="center", size=8, color=ink
                )
            left += seconds
    axes.set_yticks(range(len(figures)), [play.title for play in reversed(run.compared)], size=9)
    axes.set_ylim(-0.6, len(figures) - 0.4)
    axes.set_title("Where the time went: all trajectories added up, seconds", **TITLE)
    tidy(axes, line=True)
