"""Draw the page and the picture of a run from its folder. report.html is one page that loads
nothing (plotly's script is inside).

A bar of the page shows its trajectory, turn, engine and seconds when the pointer is on it; the
plays share the time axis. Words and tables stand in report.html.j2; this module prepares the
figures and draws the Gantt chart.
"""

import html
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import plotly.graph_objects as go
from plotly.subplots import make_subplots
from rich.console import Console

from treadle_cli.report.accounting import PlayFigures, play_figures
from treadle_cli.report.comparison import (
    epoch_rows,
    headline,
    losses,
    print_report,
    rows,
    time_rows,
)
from treadle_cli.report.gantt import MAKESPAN, MOVE, draw_bars, draw_marks, label_rows, make_html
from treadle_cli.report.palette import COLOURS, DRAWN_KINDS, GRID, INK, row_label
from treadle_cli.report.picture import draw_picture
from treadle_cli.report.records import (
    ForecastRecord,
    Run,
    SpanRecord,
    TrajectoryRecord,
    read_run,
    write_summary,
)
from treadle_cli.templates import render

CANCELLED = (
    "CANCELLED"  # the tool returned before the KV had moved: the source continues, nothing failed
)
ROW_PX = 15  # height of a trajectory's row; its label is 10 px
PANEL_PX = 60  # title and margin of a panel


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
    titles = [f"<b>{play.title}</b> · {play.policy} · {play.makespan_s:.1f} s" for play, _ in plays]
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
            (span.start_s, row, span.engine_id)
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
    said = (
        f"forecast after {forecast.turn} steps by {html.escape(forecast.model_version)}, "
        f"{after_s:.3f} s later"
    )
    if forecast.next_queued_s is None:
        return said
    ahead_s = forecast.next_queued_s - forecast.came_s
    return (
        f"{said}; the next step was queued {abs(ahead_s):.3f} s "
        f"{'after' if ahead_s > 0 else 'before'} it came"
    )
