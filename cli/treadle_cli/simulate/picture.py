"""simulate.png: a panel a system on one time axis, above its engines, below its longest trajectories.

An engine's row is as high as it has GPUs, so that white in a strip is GPU time that nobody used.
"""

from __future__ import annotations

from pathlib import Path

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap, PowerNorm, to_rgb
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from treadle_cli.report.palette import COLOURS, FAINT, GRID, INK
from treadle_cli.simulate.scene import Panel, Scene

WIDTH_IN, DPI = 12.0, 110
STRIP_IN = 0.85  # height of a system's engines
ROW_IN = 0.15  # of a trajectory: a label of 6.5 points fits
TITLE_IN, HEAD_IN, FOOT_IN, GAP_IN = 0.36, 0.84, 0.36, 0.08
LEFT, RIGHT = 0.155, 0.975
BAR_KINDS = ("queue", "prefill", "decode", "tool")
# White is idle; one sequence can be told from none, which a linear scale to a hundred would hide.
BATCH_COLOURS = LinearSegmentedColormap.from_list("batch", ["#C9D6E2", "#5B7FA3", "#0B2545"])
BATCH_POWER = 0.5
PREFILL = COLOURS["prefill"]
BOUND = "#CC3D3D"


def draw(scene: Scene, title: str, facts: str, path: Path) -> None:
    """Writes the PNG."""
    heights = [STRIP_IN + GAP_IN + ROW_IN * (len(panel.bars) + 0.6) for panel in scene.panels]
    height = HEAD_IN + sum(heights) + TITLE_IN * len(heights) + FOOT_IN
    with mpl.rc_context({"font.family": "DejaVu Sans", "font.size": 9, "text.color": INK, "axes.labelcolor": INK}):
        figure = Figure(figsize=(WIDTH_IN, height), dpi=DPI, facecolor="white")
        top = height - HEAD_IN
        for index, (panel, panel_in) in enumerate(zip(scene.panels, heights, strict=True)):
            top -= TITLE_IN
            strip = figure.add_axes((LEFT, (top - STRIP_IN) / height, RIGHT - LEFT, STRIP_IN / height))
            bars_in = panel_in - STRIP_IN - GAP_IN
            bars = figure.add_axes((LEFT, (top - panel_in) / height, RIGHT - LEFT, bars_in / height))
            _strip(strip, panel, scene)
            _bars(bars, panel)
            for axes in (strip, bars):
                _frame(axes, panel, scene)
            bars.tick_params(labelbottom=index == len(heights) - 1)
            top -= panel_in
        figure.axes[-1].set_xlabel("seconds", loc="right", size=8, color=FAINT)
        figure.text(0.012, 1 - 0.30 / height, title, size=14.5, weight="bold")
        figure.text(0.012, 1 - 0.53 / height, facts, size=9, color=FAINT)
        _legend(figure, scene, height)
        figure.savefig(path)


def _strip(axes: Axes, panel: Panel, scene: Scene) -> None:
    edges = np.concatenate([[0], np.cumsum([lane.gpus for lane in panel.lanes])])
    norm = PowerNorm(BATCH_POWER, 0.0, scene.most_batch)
    cells = np.ones((len(panel.lanes), len(scene.cells_s) - 1, 3))
    for row, lane in enumerate(panel.lanes):
        colours = BATCH_COLOURS(norm(lane.batch))[:, :3]
        seen = np.clip(lane.batch, 0.0, 1.0)[:, None]  # a cell with less than one sequence on average fades
        share = lane.prefill[:, None]
        cells[row] = (1.0 - share) * (seen * colours + (1.0 - seen)) + share * np.array(to_rgb(PREFILL))
    axes.pcolormesh(scene.cells_s, edges, cells)
    for edge in edges[1:-1]:
        axes.axhline(edge, color="white", linewidth=0.6 if len(panel.lanes) <= 16 else 0.2)
    axes.set_ylim(edges[-1], 0)
    axes.set_yticks([])
    axes.set_ylabel(f"engines\n{panel.engines}", rotation=0, ha="right", va="center", size=8, color=INK, labelpad=6)
    axes.set_title(panel.title, loc="left", size=10.5, weight="bold", pad=5)
    axes.tick_params(labelbottom=False)


def _bars(axes: Axes, panel: Panel) -> None:
    for row, bars in enumerate(panel.bars):
        for kind in BAR_KINDS:
            spans = [(span.start_s, span.end_s - span.start_s) for span in bars.spans if span.what == kind]
            if spans:
                axes.broken_barh(spans, (row - 0.4, 0.8), color=COLOURS[kind], linewidth=0)
        axes.plot(
            bars.moved_s,
            [row] * len(bars.moved_s),
            "D",
            color=COLOURS["migration"],
            markersize=3.5,
            markeredgecolor="white",
            markeredgewidth=0.5,
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
    for side in ("top", "right", "left", "bottom"):
        axes.spines[side].set_visible(False)
    axes.tick_params(length=0, colors=FAINT)
    axes.grid(axis="x", color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)


def _legend(figure: Figure, scene: Scene, height: float) -> None:
    most = scene.most_batch
    handles: list[Patch | Line2D] = [
        Patch(facecolor="white", edgecolor=GRID, label="engine idle"),
        Patch(color=BATCH_COLOURS(PowerNorm(BATCH_POWER, 0.0, most)(1.0)), label="1 sequence"),
        Patch(color=BATCH_COLOURS(1.0), label=f"{most:.0f} sequences"),
        *(Patch(color=COLOURS[kind], label=kind) for kind in BAR_KINDS),
        Line2D([], [], marker="D", color=COLOURS["migration"], linestyle="", markersize=5, label="other engine"),
        Line2D([], [], color=INK, linestyle="--", linewidth=1.1, label="makespan"),
        Line2D(
            [], [], color=BOUND, linestyle=":", linewidth=1.5, label=f"no schedule ends before {scene.bound_s:.0f} s"
        ),
    ]
    figure.legend(
        handles=handles,
        loc="upper left",
        bbox_to_anchor=(0.004, 1 - 0.55 / height),
        ncols=len(handles),
        frameon=False,
        fontsize=8.5,
        handlelength=1.4,
        columnspacing=1.1,
    )
