"""Draw the report of a run from its folder: report.html, report.png, and tables in the terminal.

report.html is one page that loads nothing (plotly's script is inside); a bar of it shows its
trajectory, turn, engine and seconds when the pointer is on it, and the plays share the time axis.
Words and tables stand in report.html.j2; this module prepares the figures and draws the charts.
"""

import html
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import plotly.graph_objects as go
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from plotly.subplots import make_subplots
from rich.console import Console

from treadle_cli.exits import printable
from treadle_cli.options import print_json
from treadle_cli.report.figures import (
    KINDS,
    PlayFigures,
    epoch_rows,
    headline,
    losses,
    play_figures,
    print_report,
    rows,
    time_rows,
)
from treadle_cli.report.gantt import (
    MAKESPAN,
    MOVE,
    add_legend,
    draw_bars,
    draw_marks,
    draw_row,
    label_rows,
    make_html,
    tidy,
    use_font,
)
from treadle_cli.report.records import (
    SUMMARY_FILE,
    ForecastRecord,
    PlayRecord,
    Run,
    SpanRecord,
    TrajectoryRecord,
    read_run,
    write_summary,
)
from treadle_cli.report.style import COLOURS, DRAWN_KINDS, FAINT, GRID, INK, render, row_label

CANCELLED = (
    "CANCELLED"  # the tool returned before the KV had moved: the source continues, nothing failed
)
ROW_PX = 15  # height of a trajectory's row; its label is 10 px
PANEL_PX = 60  # title and margin of a panel
WIDTH_IN = 13.0
ROW_IN = 0.145  # height of a trajectory's row: a label of 6.5 points fits
MOST_LABELLED_ROWS = 64  # beyond it row labels would overlap, and are left out
DPI = 150
MAKESPAN_LINE: dict[str, Any] = {"color": INK, "linestyle": "--", "linewidth": 1}
TITLE: dict[str, Any] = {"loc": "left", "size": 11, "weight": "bold"}


def render_run(folder: Path, console: Console) -> None:
    """Read the run in `folder`, write report.html and report.png there, and print the tables.
    Raises RecordError."""
    run = read_run(folder)
    write_summary(
        folder,
        run.record,
        [asdict(play_figures(play, run.of_play(play))) for play in run.record.plays],
    )
    figures = [play_figures(play, run.of_play(play)) for play in run.compared]
    (folder / "report.html").write_text(_fill_page(run, figures))
    draw_picture(run, figures, folder / "report.png")
    print_report(console, run, figures, folder)


def print_summary(folder: Path) -> None:
    """Print the object that --json prints of a run: its summary.json, and its folder."""
    print_json({"folder": str(folder), **json.loads((folder / SUMMARY_FILE).read_text())})


def _fill_page(run: Run, figures: Sequence[PlayFigures]) -> str:
    """Return the page, of about 5 MB, nearly all of it plotly's script."""
    titles = [play.title for play in run.compared]
    return render(
        "treadle_cli.report",
        "report.html.j2",
        style=render("treadle_cli", "style.css.j2"),
        run=run.record,
        trajectories=figures[0].trajectories,
        headline=headline(run),
        epochs=epoch_rows(run) if run.repeats else [],
        shown=run.compared[0].epoch,
        titles=titles,
        events=_events(run),
        gantt=_gantt(run),
        rows=rows(figures),
        time_rows=time_rows(figures),
        colours=COLOURS,
        hidden=[
            (title, figure.hidden_migration_s)
            for title, figure in zip(titles, figures, strict=True)
            if figure.hidden_migration_s > 0
        ],
        losses=losses(figures),
    )


def _events(run: Run) -> list[str]:
    """Return a line for each engine that was lost, and the failed migrations by reason."""
    events = [f"{play.title}: {loss}" for play in run.record.plays for loss in play.engine_losses]
    for play in run.record.plays:
        reasons = Counter(line.rpartition(": ")[2] for line in play.failed_migrations)
        events += [
            f"{play.title}: {n} migrations ended as {why}"
            for why, n in reasons.items()
            if why != CANCELLED
        ]
    return events


def _gantt(run: Run) -> str:
    plays = [(play, run.of_play(play)) for play in run.compared]
    heights = [max(4, len(trajectories)) * ROW_PX + PANEL_PX for _, trajectories in plays]
    titles = [
        f"<b>{html.escape(play.title)}</b> · {html.escape(play.policy)} · {play.makespan_s:.1f} s"
        for play, _ in plays
    ]
    spacing = 70 / sum(heights) if len(plays) > 1 else 0.0
    figure = make_subplots(
        rows=len(plays),
        cols=1,
        shared_xaxes="all",
        row_heights=heights,
        vertical_spacing=spacing,
        subplot_titles=titles,
    )
    for panel, (play, trajectories) in enumerate(plays, start=1):
        where = {"row": panel, "col": 1}
        first, last = panel == 1, panel == len(plays)
        spans = [(row, t, span) for row, t in enumerate(trajectories) for span in t.spans]
        for kind in DRAWN_KINDS:
            bars = [
                (row, s.start_s, s.end_s, _describe_span(t, s))
                for row, t, s in spans
                if s.kind == kind
            ]
            figure.add_trace(draw_bars(kind, bars, legend=first and kind != "migration"), **where)
        moves = [
            (span.start_s, row, html.escape(span.engine_id))
            for row, _, span in spans
            if span.kind == "migration"
        ]
        moves_to = "moves to %{customdata} at %{x:.2f} s<extra></extra>"
        figure.add_trace(
            draw_marks("migration", moves, MOVE, hovertemplate=moves_to, showlegend=last), **where
        )
        figure.add_trace(_forecasts(trajectories, legend=last), **where)
        figure.add_vline(x=play.makespan_s, line=MAKESPAN, **where)
        labels = [row_label(trajectory) for trajectory in trajectories]
        label_rows(figure, labels, (-0.8, len(labels) - 0.2), **where)
    figure.update_xaxes(
        gridcolor=GRID, zeroline=False, ticksuffix=" s", showticklabels=True, rangemode="tozero"
    )
    return make_html(figure, sum(heights), more_px=90, legend_px=28, left_px=150, top_px=90)


def _forecasts(trajectories: Sequence[TrajectoryRecord], *, legend: bool) -> go.Scatter:
    """Return one mark a step, hidden until the reader clicks the legend."""
    marks = [
        (f.came_s, row, _describe_forecast(f))
        for row, t in enumerate(trajectories)
        for f in t.forecasts
    ]
    return draw_marks(
        "forecast",
        marks,
        {"symbol": "line-ns-open", "size": 9, "color": INK},
        hovertemplate="%{customdata}<extra></extra>",
        showlegend=legend and bool(marks),
        visible="legendonly",
    )


def _describe_span(trajectory: TrajectoryRecord, span: SpanRecord) -> str:
    where = f", {span.engine_id}" if span.engine_id else ""
    return f"{html.escape(row_label(trajectory))}<br>turn {span.turn}{html.escape(where)}"


def _describe_forecast(forecast: ForecastRecord) -> str:
    after_s = forecast.came_s - forecast.asked_s
    text = (
        f"forecast after {forecast.turn} steps by {html.escape(forecast.model_version)}, "
        f"{after_s:.3f} s later"
    )
    if forecast.next_queued_s is None:
        return text
    ahead_s = forecast.next_queued_s - forecast.came_s
    return (
        f"{text}; the next step was queued {abs(ahead_s):.3f} s "
        f"{'after' if ahead_s > 0 else 'before'} it came"
    )


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
        f"{record.slots} slots · {record.model} · seed {record.seed} · {record.machine}"
    )
    makespan = printable(f"Makespan: {spans}")
    figure.text(0.015, 1 - 0.30 / height, makespan, size=15, weight="bold")
    figure.text(0.015, 1 - 0.54 / height, printable(facts), size=9, color=FAINT)
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
        Line2D([], [], **MAKESPAN_LINE, label="makespan"),
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
    axes.axvline(play.makespan_s, **MAKESPAN_LINE)
    end = (play.makespan_s, 0.5)
    axes.annotate(
        f"{end[0]:.1f} s", end, xytext=(4, 0), textcoords="offset points", size=9, weight="bold"
    )
    axes.set_title(printable(f"{play.title}   ·   {play.policy}"), **TITLE)
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
    titles = [printable(play.title) for play in reversed(run.compared)]
    axes.set_yticks(range(len(figures)), titles, size=9)
    axes.set_ylim(-0.6, len(figures) - 0.4)
    axes.set_title("Where the time went: all trajectories added up, seconds", **TITLE)
    tidy(axes, line=True)
