"""The look that the simulated figures share: a titled sheet, quiet axes, lines and bars in the product's colours."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from treadle_cli.report.palette import COLOURS, FAINT, GRID, INK

WIDTH_IN, DPI = 11.0, 150
BARS_WIDTH = 0.84  # of the place that a group of bars has
# In the order in which series are drawn; the first is ours.
SERIES = (
    COLOURS["decode"],
    COLOURS["queue"],
    COLOURS["tool"],
    COLOURS["migration"],
    COLOURS["prefill"],
    FAINT,
    COLOURS["other"],
)


@contextmanager
def figure_with(title: str, note: str, file: Path, *, height_in: float, top: float) -> Iterator[Figure]:
    """A sheet with a title and a note, written to `file` in the end; what the body draws lies below `top`."""
    with mpl.rc_context({"font.family": "DejaVu Sans", "font.size": 9, "text.color": INK, "axes.labelcolor": INK}):
        figure = Figure(figsize=(WIDTH_IN, height_in), dpi=DPI, facecolor="white")
        figure.subplots_adjust(left=0.08, right=0.985, top=top, bottom=0.42 / height_in, wspace=0.12)
        yield figure
        figure.text(0.015, 1.0 - 0.30 / height_in, title, size=15, weight="bold")
        figure.text(0.015, 1.0 - 0.55 / height_in, note, color=FAINT)
        figure.savefig(file)


def tidy(axes: Axes) -> None:
    """No frame, faint ticks, a grid behind."""
    for side in ("top", "right", "left", "bottom"):
        axes.spines[side].set_visible(False)
    axes.tick_params(length=0, which="both", colors=FAINT)
    axes.grid(color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)


def bars(axes: Axes, title: str, rows: Sequence[Mapping[str, Any]], key: str) -> None:
    """A group of bars for each row of an ablation, one for each variant, ours first. The legend is the caller's."""
    names = list(rows[0]["variants"])
    width = BARS_WIDTH / len(names)
    for at, name in enumerate(names):
        places = np.arange(len(rows)) + (at - 0.5 * (len(names) - 1)) * width
        heights = [row["variants"].get(name, {}).get(key, 0.0) for row in rows]
        axes.bar(places, heights, 0.9 * width, color=SERIES[at % len(SERIES)], label=name)
    axes.set_xticks(range(len(rows)), [row["workload"] for row in rows])
    axes.set_title(title, loc="left", size=10, weight="bold")
    tidy(axes)
    axes.grid(visible=False, axis="x")


def draw_bars(
    title: str, note: str, panels: Sequence[Sequence[tuple[str, Mapping[str, Any], str]]], file: Path
) -> None:
    """Panels of bars, rows by columns, each a title, what an ablation found, and the key of its heights."""
    height_in = 1.3 + 2.6 * len(panels)
    with figure_with(title, note, file, height_in=height_in, top=1.0 - 1.25 / height_in) as figure:
        figure.subplots_adjust(hspace=0.35)
        sheet = figure.subplots(len(panels), len(panels[0]), squeeze=False)
        for axes, (name, found, key) in zip(sheet.flat, (panel for row in panels for panel in row), strict=True):
            bars(axes, name, found["rows"], key)
        handles, labels = sheet[0][0].get_legend_handles_labels()
        place = (0.008, 1.0 - 0.58 / height_in)
        figure.legend(handles, labels, loc="upper left", bbox_to_anchor=place, ncols=len(labels), frameon=False)


__all__ = ["COLOURS", "FAINT", "INK", "SERIES", "bars", "draw_bars", "figure_with", "tidy"]
