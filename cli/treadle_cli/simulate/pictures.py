"""Draw simulations: simulate.png, and simulate.html, one page that loads nothing and shows figures
under the pointer.

One panel a system on a shared time axis, its engines above, the longest trajectories below. All
systems show the same trajectories in the same order, so that a row compares across systems; below
them comes the trajectory that ends last, unless it is one of them. An engine's row is as high as it
has GPUs, so that white in a strip is GPU time that was not used. A cell of a strip is the mean over
its time. The page holds plotly's script: about 5 MB.
"""

import html
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import plotly.graph_objects as go
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap, PowerNorm, to_rgb
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from plotly.subplots import make_subplots
from treadle_sim.cluster import engine_id
from treadle_sim.outcome import Span
from treadle_sim.systems import Run
from treadle_sim.workloads.workload import Workload

from treadle_cli.exits import printable
from treadle_cli.report import gantt
from treadle_cli.report.style import COLOURS, FAINT, GRID, INK, render
from treadle_cli.simulate.comparison import Comparison, sort_longest_first
from treadle_cli.simulate.output import Sentences, text_tables

MOST_BARS = 12  # trajectories of a panel
CELLS = 900  # cells of time: about one a pixel
Floats = npt.NDArray[np.float64]
WIDTH_IN, DPI = 12.0, 110
STRIP_IN = 0.85  # height of a system's engines
ROW_IN = 0.15  # height of a trajectory: a label of 6.5 points fits
TITLE_IN, HEAD_IN, FOOT_IN, GAP_IN = 0.36, 0.84, 0.36, 0.08
LEFT, RIGHT = 0.155, 0.975
BAR_KINDS = ("queue", "prefill", "decode", "tool")
# White is idle. One sequence looks different from none, which a linear scale to a hundred would
# hide.
BATCH_COLOURS = LinearSegmentedColormap.from_list("batch", ["#C9D6E2", "#5B7FA3", "#0B2545"])
BATCH_POWER = 0.5
BOUND = "#CC3D3D"
# Sizes of the page, in pixels.
ROW_PX, STRIP_PX, GAP_PX = 16, 110, 40
BATCH_SCALE = [[0.0, "#FFFFFF"], [0.001, "#C9D6E2"], [0.3, "#5B7FA3"], [1.0, "#0B2545"]]
PREFILL_SCALE = [[0.0, "rgba(86,180,233,0)"], [1.0, COLOURS["prefill"]]]
FOLDED_CELLS = 2  # cells of the picture in one of the page: zooming does not need them to be finer


@dataclass(frozen=True, slots=True)
class Bars:
    """Bars of one trajectory without gaps: time without a span is queue, also the wait for a
    ticket. moved_s: when it continued on another engine."""

    label: str
    spans: tuple[Span, ...]
    moved_s: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Lane:
    """Cells of one engine. batch: mean sequences that decode; prefill: share of the time that it
    prefills."""

    engine_id: str
    gpus: int
    batch: Floats
    prefill: Floats


@dataclass(frozen=True, slots=True)
class Panel:
    name: str
    title: str
    engines: str
    makespan_s: float
    lanes: tuple[Lane, ...]
    bars: tuple[Bars, ...]


@dataclass(frozen=True, slots=True)
class Scene:
    """All panels, on one axis from 0 to end_s. cells_s: edges of the cells."""

    panels: tuple[Panel, ...]
    cells_s: Floats
    bound_s: float

    @property
    def end_s(self) -> float:
        return float(self.cells_s[-1])

    @property
    def most_batch(self) -> float:
        """Return the largest mean batch of any cell."""
        return (
            max(
                (float(lane.batch.max()) for panel in self.panels for lane in panel.lanes),
                default=1.0,
            )
            or 1.0
        )


def make_scene(runs: Sequence[Run], workload: Workload, comparison: Comparison) -> Scene:
    """Return the scene of several runs. runs: of the systems to draw, with spans."""
    end_s = max(run.outcome.makespan_s for run in runs)
    edges = np.linspace(0.0, end_s, CELLS + 1)
    longest = sort_longest_first(workload)[:MOST_BARS]
    return Scene(
        panels=tuple(_panel(run, workload, edges, longest, comparison) for run in runs),
        cells_s=edges,
        bound_s=comparison.bound.lower_s,
    )


def _panel(
    run: Run, workload: Workload, edges: Floats, longest: list[int], comparison: Comparison
) -> Panel:
    times = run.outcome.times
    last = max(range(len(times)), key=lambda index: times[index].finished_s)
    shown = [(index, "") for index in longest] + ([] if last in longest else [(last, "last: ")])
    best = " (the best baseline)" if run.system.name == comparison.best_baseline else ""
    name, _, how = run.system.title.partition(": ")
    return Panel(
        name=run.system.name,
        title=f"{name}{best}" + (f": {how}" if how else ""),
        engines=run.cluster.describe(),
        makespan_s=run.outcome.makespan_s,
        lanes=tuple(
            Lane(engine_id(index), model.gpus, *average_cells(spans, edges))
            for index, (model, spans) in enumerate(
                zip(run.cluster.engines, run.outcome.engine_spans, strict=True)
            )
        ),
        bars=tuple(
            _trajectory_bars(workload, index, before, times[index].spans) for index, before in shown
        ),
    )


def _trajectory_bars(workload: Workload, index: int, before: str, spans: Sequence[Span]) -> Bars:
    work = workload.trajectories[index]
    ordered = sorted(spans, key=lambda span: span.start_s)
    waits = [
        Span("queue", before_s, span.start_s, span.engine)
        for before_s, span in zip([0.0, *(span.end_s for span in ordered)], ordered, strict=False)
        if span.start_s > before_s
    ]
    moved = tuple(
        later.start_s
        for earlier, later in itertools.pairwise(ordered)
        if later.engine != earlier.engine
    )
    return Bars(
        f"{before}{printable(work.prompt_id)} #{work.sample} · {work.gen_tokens:,} tok",
        (*waits, *ordered),
        moved,
    )


def average_cells(
    spans: Sequence[tuple[float, float, int]], edges: Floats
) -> tuple[Floats, Floats]:
    """Return the mean batch and the share of prefill between each two edges; spans in order of
    time, batch -1 for a prefill."""
    if not spans:
        return np.zeros(len(edges) - 1), np.zeros(len(edges) - 1)
    starts, ends, batches = (np.asarray(column, np.float64) for column in zip(*spans, strict=True))
    corners = np.column_stack([starts, ends]).ravel()
    width = np.diff(edges)

    def mean(weights: Floats) -> Floats:
        grown = np.cumsum(weights * (ends - starts))
        at_corners = np.column_stack([np.concatenate([[0.0], grown[:-1]]), grown]).ravel()
        return np.asarray(
            np.diff(np.interp(edges, corners, at_corners, left=0.0)) / width, np.float64
        )

    return mean(np.maximum(batches, 0.0)), np.clip(
        mean((batches < 0.0).astype(np.float64)), 0.0, 1.0
    )


def draw(scene: Scene, title: str, facts: str, path: Path) -> None:
    """Write the PNG."""
    heights = [STRIP_IN + GAP_IN + ROW_IN * (len(panel.bars) + 0.6) for panel in scene.panels]
    height = HEAD_IN + sum(heights) + TITLE_IN * len(heights) + FOOT_IN
    with gantt.use_font():
        figure = Figure(figsize=(WIDTH_IN, height), dpi=DPI, facecolor="white")
        top = height - HEAD_IN
        for index, (panel, panel_in) in enumerate(zip(scene.panels, heights, strict=True)):
            top -= TITLE_IN
            strip = figure.add_axes(
                (LEFT, (top - STRIP_IN) / height, RIGHT - LEFT, STRIP_IN / height)
            )
            bars_in = panel_in - STRIP_IN - GAP_IN
            bars = figure.add_axes(
                (LEFT, (top - panel_in) / height, RIGHT - LEFT, bars_in / height)
            )
            _strip(strip, panel, scene)
            _bars(bars, panel)
            for axes in (strip, bars):
                _frame(axes, panel, scene)
            bars.tick_params(labelbottom=index == len(heights) - 1)
            top -= panel_in
        figure.axes[-1].set_xlabel("seconds", loc="right", size=8, color=FAINT)
        figure.text(0.012, 1 - 0.30 / height, printable(title), size=14.5, weight="bold")
        figure.text(0.012, 1 - 0.53 / height, printable(facts), size=9, color=FAINT)
        _legend(figure, scene, height)
        figure.savefig(path)


def _strip(axes: Axes, panel: Panel, scene: Scene) -> None:
    edges = np.concatenate([[0], np.cumsum([lane.gpus for lane in panel.lanes])])
    norm = PowerNorm(BATCH_POWER, 0.0, scene.most_batch)
    cells = np.ones((len(panel.lanes), len(scene.cells_s) - 1, 3))
    for row, lane in enumerate(panel.lanes):
        colours = BATCH_COLOURS(norm(lane.batch))[:, :3]
        seen = np.clip(lane.batch, 0.0, 1.0)[:, None]  # paler below one sequence on average
        share = lane.prefill[:, None]
        cells[row] = (1.0 - share) * (seen * colours + (1.0 - seen)) + share * np.array(
            to_rgb(COLOURS["prefill"])
        )
    axes.pcolormesh(scene.cells_s, edges, cells)
    for edge in edges[1:-1]:
        axes.axhline(edge, color="white", linewidth=0.6 if len(panel.lanes) <= 16 else 0.2)
    axes.set_ylim(edges[-1], 0)
    axes.set_yticks([])
    axes.set_ylabel(
        f"engines\n{panel.engines}",
        rotation=0,
        ha="right",
        va="center",
        size=8,
        color=INK,
        labelpad=6,
    )
    axes.set_title(panel.title, loc="left", size=10.5, weight="bold", pad=5)
    axes.tick_params(labelbottom=False)


def _bars(axes: Axes, panel: Panel) -> None:
    for row, bars in enumerate(panel.bars):
        gantt.draw_row(
            axes,
            row,
            [(s.what, s.start_s, s.end_s) for s in bars.spans],
            bars.moved_s,
            0.8,
            ms=3.5,
            mew=0.5,
        )
    axes.set_ylim(len(panel.bars) - 0.4, -0.6)
    axes.set_yticks(range(len(panel.bars)), [bars.label for bars in panel.bars], size=6.5)


def _frame(axes: Axes, panel: Panel, scene: Scene) -> None:
    axes.set_xlim(0, scene.end_s * 1.07)
    axes.axvline(scene.bound_s, color=BOUND, linestyle=":", linewidth=1.8)
    axes.axvline(panel.makespan_s, color=INK, linestyle="--", linewidth=1.1)
    if axes.get_title(loc="left"):
        axes.annotate(
            f"{panel.makespan_s:.0f} s",
            (panel.makespan_s, 0.5),
            xycoords=("data", "axes fraction"),
            xytext=(5, 0),
            textcoords="offset points",
            size=11,
            weight="bold",
            va="center",
        )
    gantt.tidy(axes, line=False)


def _legend(figure: Figure, scene: Scene, height: float) -> None:
    most = scene.most_batch
    handles: list[Patch | Line2D] = [
        Patch(facecolor="white", edgecolor=GRID, label="engine idle"),
        Patch(color=BATCH_COLOURS(PowerNorm(BATCH_POWER, 0.0, most)(1.0)), label="1 sequence"),
        Patch(color=BATCH_COLOURS(1.0), label=f"{most:.0f} sequences"),
        *(Patch(color=COLOURS[kind], label=kind) for kind in BAR_KINDS),
        Line2D(
            [],
            [],
            marker="D",
            color=COLOURS["migration"],
            linestyle="",
            markersize=5,
            label="other engine",
        ),
        Line2D([], [], color=INK, linestyle="--", linewidth=1.1, label="makespan"),
        Line2D(
            [],
            [],
            color=BOUND,
            linestyle=":",
            linewidth=1.5,
            label=f"no schedule ends before {scene.bound_s:.0f} s",
        ),
    ]
    gantt.add_legend(
        figure,
        handles,
        (0.004, 1 - 0.55 / height),
        fontsize=8.5,
        handlelength=1.4,
        columnspacing=1.1,
    )


def write_page(
    scene: Scene, title: str, facts: str, comparison: Comparison, sentences: Sentences, path: Path
) -> None:
    """Write the HTML page."""
    how_long, meanwhile = text_tables(comparison)
    page = render(
        "treadle_cli.simulate",
        "page.html.j2",
        style=render("treadle_cli", "style.css.j2"),
        title=title,
        facts=facts,
        sentences=sentences,
        drawing=_page_drawing(scene),
        how_long=how_long,
        meanwhile=meanwhile,
    )
    path.write_text(page)


def _page_drawing(scene: Scene) -> str:
    heights = [px for panel in scene.panels for px in (STRIP_PX, ROW_PX * (len(panel.bars) + 1))]
    total = sum(heights) + GAP_PX * len(heights)
    titles = [
        text
        for panel in scene.panels
        for text in (
            f"<b>{html.escape(panel.title)}</b> · {panel.engines} · {panel.makespan_s:.1f} s",
            "",
        )
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
        for heat in _page_strip(panel, scene):
            figure.add_trace(heat, row=strip, col=1)
        figure.update_yaxes(autorange="reversed", showticklabels=False, row=strip, col=1)
        for kind in BAR_KINDS:
            figure.add_trace(_page_bars(panel, kind, legend=index == 0), row=rows, col=1)
        moves = [
            (moved_s, row, "") for row, bars in enumerate(panel.bars) for moved_s in bars.moved_s
        ]
        goes_on = "goes on with another engine at %{x:.2f} s<extra></extra>"
        moved = gantt.draw_marks(
            "other engine", moves, gantt.MOVE, hovertemplate=goes_on, showlegend=index == 0
        )
        figure.add_trace(moved, row=rows, col=1)
        labels = [bars.label for bars in panel.bars]
        gantt.label_rows(figure, labels, (len(labels) - 0.4, -0.6), row=rows, col=1)
        for row in (strip, rows):
            figure.add_vline(x=panel.makespan_s, line=gantt.MAKESPAN, row=row, col=1)
            figure.add_vline(
                x=scene.bound_s, line={"color": BOUND, "width": 1, "dash": "dot"}, row=row, col=1
            )
    figure.update_xaxes(
        gridcolor=GRID,
        zeroline=False,
        ticksuffix=" s",
        range=[0, scene.end_s * 1.03],
        showticklabels=True,
    )
    for strip in range(1, len(heights), 2):
        figure.update_xaxes(showticklabels=False, row=strip, col=1)
    return gantt.make_html(figure, total, more_px=100, legend_px=34, left_px=210, top_px=80)


def _page_strip(panel: Panel, scene: Scene) -> tuple[go.Heatmap, go.Heatmap]:
    """Return two layers: sequences that decode, and the share of prefill."""
    edges = scene.cells_s[::FOLDED_CELLS]
    batch = np.stack([_fold(lane.batch) for lane in panel.lanes])
    prefill = np.stack([_fold(lane.prefill) for lane in panel.lanes])
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
        hovertemplate="%{text} at %{x:.1f} s: %{z:.1f} decode, prefill %{customdata:.0%} of the "
        "time<extra></extra>",
    )
    shares = np.round(prefill, 3).tolist()
    return decoding, go.Heatmap(
        **where, z=shares, zmin=0.0, zmax=1.0, colorscale=PREFILL_SCALE, hoverinfo="skip"
    )


def _fold(cells: np.ndarray) -> np.ndarray:
    return np.asarray(cells.reshape(-1, FOLDED_CELLS).mean(axis=1))


def _page_bars(panel: Panel, kind: str, *, legend: bool) -> go.Bar:
    bars = [
        (row, s.start_s, s.end_s, f"{html.escape(bars.label)}<br>{panel.lanes[s.engine].engine_id}")
        for row, bars in enumerate(panel.bars)
        for s in bars.spans
        if s.what == kind
    ]
    return gantt.draw_bars(kind, bars, legend=legend)
