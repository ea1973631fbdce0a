"""report.html: the run as one self-contained page (plotly's script is inside; nothing is loaded from anywhere).

Every bar tells its trajectory, turn, engine and seconds on hover; the arms share the time axis, so zooming one zooms
both.

The page's style sheet."""

import html
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from treadle_cli.report.accounting import ArmFigures
from treadle_cli.report.comparison import Row, headline, losses, rows, time_rows
from treadle_cli.report.palette import COLOURS, GRID, INK, MEANINGS, row_label
from treadle_cli.report.records import ForecastRecord, Run, RunRecord, TrajectoryRecord

STYLE = """
body{margin:0;background:#fff;color:#1b1f24;font:15px/1.5 system-ui,-apple-system,"Segoe UI",sans-serif}
main{max-width:1240px;margin:0 auto;padding:32px 24px 64px}
h1{font-size:26px;line-height:1.25;margin:0 0 6px}
h2{font-size:18px;margin:34px 0 8px}
p,ul{max-width:880px;margin:6px 0}
.facts,.small{color:#6b7280}
.small{font-size:13px}
.events{border-left:4px solid #cc3d8f;background:#fdf2f8;padding:2px 18px 12px;margin-top:18px}
.events h2{margin-top:12px}
.columns{display:flex;flex-wrap:wrap;gap:0 48px}
table{border-collapse:collapse;font-variant-numeric:tabular-nums}
th,td{padding:5px 14px 5px 0;border-bottom:1px solid #e5e7eb;text-align:right;white-space:nowrap}
th{font-weight:600}
td:first-child,th:first-child{text-align:left}
td i{display:inline-block;width:11px;height:11px;border-radius:2px;margin-right:8px}
td.better{color:#00795a;font-weight:600}
td.worse{color:#b4341f;font-weight:600}
"""


CALLED_OFF = "CANCELLED"  # the tool came back before the KV had moved: no fault, the source goes on
BAR_ROWS = 0.82  # height of a bar in rows; plotly would choose one from how far apart the bars lie
ROW_PX = 15  # height of a trajectory's row; its label is 10 px
PANEL_PX = 60  # title and margin of a panel
DRAWN_KINDS = ("queue", "prefill", "decode", "tool", "migration")
ANECDOTE = (
    "One run on one small machine is an anecdote: the next one differs by some percent in either direction, "
    "because sampling, the "
    "machine's other work and the order of arrivals all play in. The same seed gives the same requests, not the "
    "same batches, and "
    "bf16 arithmetic depends on the batch, so the arms may sample different tokens from some point on: compare "
    "tokens per second and "
    "shares beside the makespan. What SGLang on a CPU cannot show at all is the gain from cached KV on a GPU."
)


NOTHING_LOST = "<p>In none of the figures above, this time.</p>"


def write_page(run: Run, figures: Sequence[ArmFigures], path: Path) -> None:
    """Writes the page, about 5 MB of which nearly all is plotly's script."""
    record = run.record
    titles = [arm.title for arm in record.arms]
    lost = losses(figures) if len(figures) > 1 else []
    sections = [
        f"<h1>{html.escape(headline(figures, titles))}</h1>",
        f"<p class=facts>{html.escape(_facts(record, figures))}</p>",
        _events(record),
        "<h2>Every trajectory</h2>",
        "<p>Rows are sorted by finish. Hover a bar for its turn and engine; drag to zoom; click a kind in the "
        "legend to hide it.</p>",
        _gantt(run).to_html(full_html=False, include_plotlyjs=True, config={"displaylogo": False, "responsive": True}),
        "<div class=columns><div>",
        f"<h2>The arms compared</h2>{_table(rows(figures), titles)}",
        "</div><div>",
        f"<h2>Where the time went</h2>{_table(time_rows(figures), titles, swatches=True)}",
        f"<p class=small>{html.escape(_hidden(record, figures))}</p>",
        "</div></div>",
        f"<h2>Where {html.escape(titles[-1])} lost</h2>{_list(lost) if lost else NOTHING_LOST}",
        f"<h2>How to read it</h2>{_list(record.conditions)}<p>{html.escape(ANECDOTE)}</p>",
    ]
    title = html.escape(f"Treadle run {record.run_id}")
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{title}</title>'
    body = "\n".join(sections)
    path.write_text(
        f'<!doctype html><html lang="en"><head>{head}<style>{STYLE}</style></head>'
        f"<body><main>{body}</main></body></html>\n"
    )


def _facts(record: RunRecord, figures: Sequence[ArmFigures]) -> str:
    return (
        f"Run {record.run_id}, {record.started_at}: {figures[0].trajectories} trajectories an arm, engines "
        f"{', '.join(record.engines)} with {record.slots} slots each, {record.model}, seed {record.seed}; "
        f"{record.machine}."
    )


def _events(record: RunRecord) -> str:
    events = [f"{arm.title}: {loss}" for arm in record.arms for loss in arm.engine_losses]
    for arm in record.arms:
        reasons = Counter(line.rpartition(": ")[2] for line in arm.failed_migrations)
        events += [
            f"{arm.title}: {count} migrations ended as {why}" for why, count in reasons.items() if why != CALLED_OFF
        ]
    return f"<div class=events><h2>What went wrong</h2>{_list(events)}</div>" if events else ""


def _hidden(record: RunRecord, figures: Sequence[ArmFigures]) -> str:
    hidden = [
        f"{arm.title}: {figure.hidden_migration_s:.2f} s of migration ran behind tool calls and other work, and "
        "cost nothing."
        for arm, figure in zip(record.arms, figures, strict=True)
        if figure.hidden_migration_s > 0
    ]
    return " ".join(["The kinds add up to the trajectories' wall time: a moment counts once.", *hidden])


def _gantt(run: Run) -> go.Figure:
    arms = [(arm, run.of_arm(arm.arm)) for arm in run.record.arms]
    heights = [max(4, len(trajectories)) * ROW_PX + PANEL_PX for _, trajectories in arms]
    titles = [f"<b>{arm.title}</b> · {arm.policy} · {arm.makespan_s:.1f} s" for arm, _ in arms]
    spacing = 70 / sum(heights) if len(arms) > 1 else 0.0
    figure = make_subplots(
        rows=len(arms), cols=1, shared_xaxes="all", row_heights=heights, vertical_spacing=spacing, subplot_titles=titles
    )
    for panel, (arm, trajectories) in enumerate(arms, start=1):
        for kind in DRAWN_KINDS:
            bars = _bars(trajectories, kind)
            figure.add_trace(
                go.Bar(
                    **bars,
                    orientation="h",
                    width=BAR_ROWS,
                    name=kind,
                    legendgroup=kind,
                    showlegend=panel == 1 and kind != "migration",
                    marker={"color": COLOURS[kind], "line": {"width": 0}},
                    hovertemplate=f"%{{customdata}}<br><b>{kind}</b>: {MEANINGS[kind]}<extra></extra>",
                ),
                row=panel,
                col=1,
            )
        figure.add_trace(_moves(trajectories, legend=panel == len(arms)), row=panel, col=1)
        figure.add_trace(_forecasts(trajectories, legend=panel == len(arms)), row=panel, col=1)
        figure.add_vline(x=arm.makespan_s, line={"color": INK, "width": 1, "dash": "dash"}, row=panel, col=1)
        labels = [row_label(trajectory) for trajectory in trajectories]
        figure.update_yaxes(
            tickvals=list(range(len(labels))),
            ticktext=labels,
            range=[-0.8, len(labels) - 0.2],
            tickfont={"size": 10},
            row=panel,
            col=1,
        )
    figure.update_xaxes(gridcolor=GRID, zeroline=False, ticksuffix=" s", showticklabels=True, rangemode="tozero")
    figure.update_layout(
        barmode="overlay",
        height=sum(heights) + 90,
        plot_bgcolor="white",
        paper_bgcolor="white",
        font={"family": "system-ui, sans-serif", "color": INK, "size": 12},
        legend={"orientation": "h", "y": 1 + 28 / sum(heights), "yanchor": "bottom", "x": 0.0, "xanchor": "left"},
        margin={"l": 150, "r": 20, "t": 90, "b": 30},
    )
    figure.update_annotations(x=0.0, xanchor="left", font={"size": 13})
    return figure


def _bars(trajectories: Sequence[TrajectoryRecord], kind: str) -> dict[str, list[object]]:
    bars: dict[str, list[object]] = {"x": [], "y": [], "base": [], "customdata": []}
    for row, trajectory in enumerate(trajectories):
        for span in trajectory.spans:
            if span.kind != kind:
                continue
            bars["x"].append(round(span.end_s - span.start_s, 4))
            bars["base"].append(round(span.start_s, 4))
            bars["y"].append(row)
            where = f", {span.engine_id}" if span.engine_id else ""
            bars["customdata"].append(
                f"{html.escape(row_label(trajectory))}<br>turn {span.turn}{html.escape(where)}: "
                f"{span.end_s - span.start_s:.2f} s from {span.start_s:.2f} s"
            )
    return bars


def _moves(trajectories: Sequence[TrajectoryRecord], *, legend: bool) -> go.Scatter:
    moves = [
        (span.start_s, row, span.engine_id)
        for row, t in enumerate(trajectories)
        for span in t.spans
        if span.kind == "migration"
    ]
    return go.Scatter(
        x=[move[0] for move in moves],
        y=[move[1] for move in moves],
        customdata=[move[2] for move in moves],
        mode="markers",
        marker={"symbol": "diamond", "size": 8, "color": COLOURS["migration"], "line": {"width": 1, "color": "white"}},
        name="migration",
        legendgroup="migration",
        showlegend=legend,
        hovertemplate="moves to %{customdata} at %{x:.2f} s<extra></extra>",
    )


def _forecasts(trajectories: Sequence[TrajectoryRecord], *, legend: bool) -> go.Scatter:
    """Hidden until the reader asks for them: one a step is a lot."""
    told = [(forecast, row) for row, t in enumerate(trajectories) for forecast in t.forecasts]
    return go.Scatter(
        x=[forecast.came_s for forecast, _ in told],
        y=[row for _, row in told],
        customdata=[_told(forecast) for forecast, _ in told],
        mode="markers",
        marker={"symbol": "line-ns-open", "size": 9, "color": INK},
        name="forecast",
        legendgroup="forecast",
        showlegend=legend and bool(told),
        visible="legendonly",
        hovertemplate="%{customdata}<extra></extra>",
    )


def _told(forecast: ForecastRecord) -> str:
    after_s = forecast.came_s - forecast.asked_s
    said = f"forecast after {forecast.turn} steps by {html.escape(forecast.model_version)}, {after_s:.3f} s later"
    if forecast.next_queued_s is None:
        return said
    ahead_s = forecast.next_queued_s - forecast.came_s
    return f"{said}; the next step was queued {abs(ahead_s):.3f} s {'after' if ahead_s > 0 else 'before'} it came"


def _table(table: Sequence[Row], titles: Sequence[str], *, swatches: bool = False) -> str:
    head = "".join(f"<th>{html.escape(title)}</th>" for title in titles)
    lines = [f"<table><tr><th></th>{head}<th>change</th></tr>"]
    for row in table:
        swatch = f'<i style="background:{COLOURS[row.label]}"></i>' if swatches and row.label in COLOURS else ""
        cells = "".join(f"<td>{html.escape(row.shown(value))}</td>" for value in row.values)
        lines.append(
            f"<tr><td>{swatch}{html.escape(row.label)}</td>{cells}"
            f"<td class={row.verdict()}>{html.escape(row.change())}</td></tr>"
        )
    return "".join(lines) + "</table>"


def _list(items: Sequence[str]) -> str:
    return "<ul>" + "".join(f"<li>{html.escape(item)}</li>" for item in items) + "</ul>"
