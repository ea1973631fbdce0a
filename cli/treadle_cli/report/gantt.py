"""Draw what the Gantt charts of runs and of simulations share: bars, marks and frame on a page,
axes in a picture."""

import html
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import matplotlib as mpl
import plotly.graph_objects as go
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from treadle_cli.report.style import COLOURS, DRAWN_KINDS, FAINT, GRID, INK, MEANINGS

BAR_ROWS = 0.82  # height of a bar in rows; plotly would choose one from the distance between bars
MOVE = {
    "symbol": "diamond",
    "size": 8,
    "color": COLOURS["migration"],
    "line": {"width": 1, "color": "white"},
}
MAKESPAN = {"color": INK, "width": 1, "dash": "dash"}


def draw_bars(kind: str, bars: Sequence[tuple[int, float, float, str]], *, legend: bool) -> go.Bar:
    """Return bars of one kind. bars: row, start and end in seconds, and what the pointer shows, as
    HTML."""
    return go.Bar(
        x=[round(end_s - start_s, 4) for _, start_s, end_s, _ in bars],
        y=[row for row, _, _, _ in bars],
        base=[round(start_s, 4) for _, start_s, _, _ in bars],
        customdata=[
            f"{words}: {end_s - start_s:.2f} s from {start_s:.2f} s"
            for _, start_s, end_s, words in bars
        ],
        orientation="h",
        width=BAR_ROWS,
        name=kind,
        legendgroup=kind,
        showlegend=legend,
        marker={"color": COLOURS[kind], "line": {"width": 0}},
        hovertemplate=f"%{{customdata}}<br><b>{kind}</b>: {MEANINGS[kind]}<extra></extra>",
    )


def draw_marks(
    name: str, marks: Sequence[tuple[float, int, str]], marker: dict[str, Any], **more: Any
) -> go.Scatter:
    """Return marks. marks: second, row and the words that `hovertemplate` of `more` may show as
    customdata."""
    return go.Scatter(
        x=[second for second, _, _ in marks],
        y=[row for _, row, _ in marks],
        customdata=[words for _, _, words in marks],
        mode="markers",
        marker=marker,
        name=name,
        legendgroup=name,
        **more,
    )


def label_rows(
    figure: go.Figure, labels: Sequence[str], ends: tuple[float, float], **where: int
) -> None:
    """Name the rows of one panel. ends: of its axis, in rows."""
    figure.update_yaxes(
        tickvals=list(range(len(labels))),
        ticktext=[html.escape(label) for label in labels],
        range=ends,
        tickfont={"size": 10},
        **where,
    )


def make_html(
    figure: go.Figure, panels_px: int, *, more_px: int, legend_px: int, left_px: int, top_px: int
) -> str:
    """Frame the chart and return its HTML, plotly's script included.

    panels_px: height of the panels; more_px: of what is above and below; legend_px: from the panels
    to the legend.
    """
    legend_y = 1 + legend_px / panels_px
    figure.update_layout(
        barmode="overlay",
        height=panels_px + more_px,
        plot_bgcolor="white",
        paper_bgcolor="white",
        font={"family": "system-ui, sans-serif", "color": INK, "size": 12},
        legend={
            "orientation": "h",
            "y": legend_y,
            "yanchor": "bottom",
            "x": 0.0,
            "xanchor": "left",
        },
        margin={"l": left_px, "r": 20, "t": top_px, "b": 30},
    )
    figure.update_annotations(x=0.0, xanchor="left", font={"size": 13})
    config = {"displaylogo": False, "responsive": True}
    return str(figure.to_html(full_html=False, include_plotlyjs=True, config=config))


Spans = Sequence[tuple[str, float, float]]  # kind, start and end in seconds


def draw_row(
    axes: Axes,
    row: int,
    spans: Sequence[tuple[str, float, float]],
    moves: Sequence[float],
    height: float,
    **mark: Any,
) -> None:
    """Draw one trajectory in a picture. moves: seconds that a diamond marks."""
    for kind in DRAWN_KINDS:
        bars = [(start_s, end_s - start_s) for what, start_s, end_s in spans if what == kind]
        if bars:
            axes.broken_barh(bars, (row - height / 2, height), color=COLOURS[kind], linewidth=0)
    axes.plot(
        moves, [row] * len(moves), "D", color=COLOURS["migration"], markeredgecolor="white", **mark
    )


def add_legend(
    figure: Figure, handles: Sequence[Artist], at: tuple[float, float], **more: Any
) -> None:
    """Draw one line of handles below the heading of a picture, `at` its upper left corner."""
    figure.legend(
        handles=handles,
        loc="upper left",
        bbox_to_anchor=at,
        ncols=len(handles),
        frameon=False,
        **more,
    )


def use_font() -> AbstractContextManager[None]:
    """Use the font of pictures for what is drawn in the block. A dollar in a name begins no
    formula."""
    return mpl.rc_context(
        {
            "font.family": "DejaVu Sans",
            "font.size": 9,
            "text.color": INK,
            "axes.labelcolor": INK,
            "text.parse_math": False,
        }
    )


def tidy(axes: Axes, *, line: bool) -> None:
    """Clear the axes of a picture: no frame, faint ticks, a grid of seconds behind the data. line:
    keep the one below."""
    axes.spines[:].set_visible(False)
    axes.spines["bottom"].set(visible=line, color=GRID)
    axes.tick_params(length=0, colors=FAINT)
    axes.grid(axis="x", color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
