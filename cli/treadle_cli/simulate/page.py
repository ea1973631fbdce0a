"""simulate.html: the comparison as one self-contained page; every engine and bar tells its figures on hover.

plotly's script is inside, so that nothing is loaded from anywhere: about 5 MB.
"""

from __future__ import annotations

import html
from pathlib import Path

import numpy as np
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from treadle_cli.report.page import STYLE
from treadle_cli.report.palette import COLOURS, GRID, INK, MEANINGS
from treadle_cli.simulate.comparison import Comparison
from treadle_cli.simulate.scene import Panel, Scene
from treadle_cli.simulate.sentences import Told
from treadle_cli.simulate.terminal import tables

KINDS = ("queue", "prefill", "decode", "tool")
BAR_ROWS = 0.82  # height of a bar in rows
ROW_PX, STRIP_PX, GAP_PX = 16, 110, 40
BATCH_SCALE = [[0.0, "#FFFFFF"], [0.001, "#C9D6E2"], [0.3, "#5B7FA3"], [1.0, "#0B2545"]]
PREFILL_SCALE = [[0.0, "rgba(86,180,233,0)"], [1.0, COLOURS["prefill"]]]
FOLDED_CELLS = 2  # cells of the picture in one of the page, which zooms but need not weigh more for it


def write_page(scene: Scene, title: str, facts: str, comparison: Comparison, told: Told, path: Path) -> None:
    """Writes it."""
    heading = html.escape(title)
    drawing = _drawing(scene).to_html(
        full_html=False, include_plotlyjs=True, config={"displaylogo": False, "responsive": True}
    )
    lost = f"<h2>Where treadle loses</h2>{_list(told.losses)}" if told.losses else ""
    long, meanwhile = tables(comparison)
    sections = [
        f"<h1>{heading}</h1>",
        f"<p class=facts>{html.escape(facts)}</p>",
        f"<p>{html.escape(told.bound)}</p><p>{html.escape(told.verdict)}</p>",
        "<p>Strips: engines, each as high as it has GPUs, darker the more sequences decode. Below: the longest "
        "trajectories, the same in every panel. Hover for figures; drag to zoom.</p>",
        drawing,
        f"<h2>How long</h2>{_table(long)}"
        "<p class=small>The ratios: how many times as fast as another, its makespan over the system's own.</p>",
        f"<h2>Meanwhile</h2>{_table(meanwhile)}",
        lost,
        f"<h2>What to know</h2>{_list(told.notes)}",
    ]
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{heading}</title>'
    body = "\n".join(sections)
    path.write_text(
        f'<!doctype html><html lang="en"><head>{head}<style>{STYLE}</style></head>'
        f"<body><main>{body}</main></body></html>\n"
    )


def _drawing(scene: Scene) -> go.Figure:
    heights = [px for panel in scene.panels for px in (STRIP_PX, ROW_PX * (len(panel.bars) + 1))]
    total = sum(heights) + GAP_PX * len(heights)
    titles = [
        text
        for panel in scene.panels
        for text in (f"<b>{html.escape(panel.title)}</b> · {panel.engines} · {panel.makespan_s:.1f} s", "")
    ]
    figure = make_subplots(
        rows=len(heights),
        cols=1,
        shared_xaxes="all",
        row_heights=heights,
        vertical_spacing=GAP_PX / total,
        subplot_titles=titles,
    )
    for index, panel in enumerate(scene.panels):
        strip, rows = 2 * index + 1, 2 * index + 2
        for heat in _strip(panel, scene):
            figure.add_trace(heat, row=strip, col=1)
        figure.update_yaxes(autorange="reversed", showticklabels=False, row=strip, col=1)
        for kind in KINDS:
            figure.add_trace(_bars(panel, kind, legend=index == 0), row=rows, col=1)
        figure.add_trace(_moves(panel, legend=index == 0), row=rows, col=1)
        labels = [bars.label for bars in panel.bars]
        figure.update_yaxes(
            tickvals=list(range(len(labels))),
            ticktext=labels,
            range=[len(labels) - 0.4, -0.6],
            tickfont={"size": 10},
            row=rows,
            col=1,
        )
        for row in (strip, rows):
            figure.add_vline(x=panel.makespan_s, line={"color": INK, "width": 1, "dash": "dash"}, row=row, col=1)
            figure.add_vline(x=scene.bound_s, line={"color": "#CC3D3D", "width": 1, "dash": "dot"}, row=row, col=1)
    figure.update_xaxes(
        gridcolor=GRID, zeroline=False, ticksuffix=" s", range=[0, scene.end_s * 1.03], showticklabels=True
    )
    for strip in range(1, len(heights), 2):
        figure.update_xaxes(showticklabels=False, row=strip, col=1)
    figure.update_layout(
        barmode="overlay",
        height=total + 100,
        plot_bgcolor="white",
        paper_bgcolor="white",
        font={"family": "system-ui, sans-serif", "color": INK, "size": 12},
        legend={"orientation": "h", "y": 1 + 34 / total, "yanchor": "bottom", "x": 0.0, "xanchor": "left"},
        margin={"l": 210, "r": 20, "t": 80, "b": 30},
    )
    figure.update_annotations(x=0.0, xanchor="left", font={"size": 13})
    return figure


def _strip(panel: Panel, scene: Scene) -> tuple[go.Heatmap, go.Heatmap]:
    """Sequences that decode, and over them the share of prefill."""
    edges = scene.cells_s[::FOLDED_CELLS]
    batch = np.stack([_folded(lane.batch) for lane in panel.lanes])
    prefill = np.stack([_folded(lane.prefill) for lane in panel.lanes])
    rows = np.concatenate([[0], np.cumsum([lane.gpus for lane in panel.lanes])])
    names = [[f"{lane.engine_id}, {lane.gpus} GPUs"] * batch.shape[1] for lane in panel.lanes]
    where = {"x": np.round(edges, 3).tolist(), "y": rows.tolist(), "showscale": False}
    decoding = go.Heatmap(
        **where,
        z=np.round(batch, 2).tolist(),
        text=names,
        customdata=np.round(prefill, 3).tolist(),
        zmin=0.0,
        zmax=scene.most_batch,
        colorscale=BATCH_SCALE,
        hovertemplate="%{text} at %{x:.1f} s: %{z:.1f} decode, prefill %{customdata:.0%} of the time<extra></extra>",
    )
    shares = np.round(prefill, 3).tolist()
    return decoding, go.Heatmap(**where, z=shares, zmin=0.0, zmax=1.0, colorscale=PREFILL_SCALE, hoverinfo="skip")


def _folded(cells: np.ndarray) -> np.ndarray:
    return np.asarray(cells.reshape(-1, FOLDED_CELLS).mean(axis=1))


def _bars(panel: Panel, kind: str, *, legend: bool) -> go.Bar:
    spans = [(row, bars.label, span) for row, bars in enumerate(panel.bars) for span in bars.spans if span.what == kind]
    return go.Bar(
        x=[round(span.end_s - span.start_s, 4) for _, _, span in spans],
        base=[round(span.start_s, 4) for _, _, span in spans],
        y=[row for row, _, _ in spans],
        customdata=[
            f"{html.escape(label)}<br>{panel.lanes[span.engine].engine_id}: {span.end_s - span.start_s:.2f} s from "
            f"{span.start_s:.2f} s"
            for _, label, span in spans
        ],
        orientation="h",
        width=BAR_ROWS,
        name=kind,
        legendgroup=kind,
        showlegend=legend,
        marker={"color": COLOURS[kind], "line": {"width": 0}},
        hovertemplate=f"%{{customdata}}<br><b>{kind}</b>: {MEANINGS[kind]}<extra></extra>",
    )


def _moves(panel: Panel, *, legend: bool) -> go.Scatter:
    moves = [(moved_s, row) for row, bars in enumerate(panel.bars) for moved_s in bars.moved_s]
    return go.Scatter(
        x=[moved_s for moved_s, _ in moves],
        y=[row for _, row in moves],
        mode="markers",
        marker={"symbol": "diamond", "size": 8, "color": COLOURS["migration"], "line": {"width": 1, "color": "white"}},
        name="other engine",
        legendgroup="moved",
        showlegend=legend,
        hovertemplate="goes on with another engine at %{x:.2f} s<extra></extra>",
    )


def _table(rows: list[tuple[str, ...]]) -> str:
    first, *others = ("".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in row) for row, tag in _tagged(rows))
    return "<table><tr>" + "</tr><tr>".join([first, *others]) + "</tr></table>"


def _tagged(rows: list[tuple[str, ...]]) -> list[tuple[tuple[str, ...], str]]:
    return [(row, "td" if index else "th") for index, row in enumerate(rows)]


def _list(items: tuple[str, ...]) -> str:
    return "<ul>" + "".join(f"<li>{html.escape(item)}</li>" for item in items) + "</ul>"
