"""What the pictures of all figures share: a titled sheet, plain axes, bars, and the product's
colours."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from treadle_cli.report.gantt import use_font
from treadle_cli.report.style import COLOURS, FAINT, GRID

WIDTH_IN, DPI = 11.0, 150
BARS_WIDTH = 0.84  # fraction of a group's width that its bars take
# In the order in which series are drawn; the first is Treadle's.
SERIES = (
    *(COLOURS[part] for part in ("decode", "queue", "tool", "migration", "prefill")),
    FAINT,
    COLOURS["other"],
)


@contextmanager
def sheet(
    title: str, note: str, file: Path, *, height_in: float, top: float, width_in: float = WIDTH_IN
) -> Iterator[Figure]:
    """A figure with a title and a note, which is written to `file` when the block ends. top: where
    the axes end, as a fraction of the height."""
    with use_font():
        figure = Figure(figsize=(width_in, height_in), dpi=DPI, facecolor="white")
        figure.subplots_adjust(
            left=0.08, right=0.985, top=top, bottom=0.42 / height_in, wspace=0.12
        )
        yield figure
        figure.text(0.015, 1.0 - 0.30 / height_in, title, size=15, weight="bold")
        figure.text(0.015, 1.0 - 0.55 / height_in, note, color=FAINT)
        figure.savefig(file)


def style(
    axes: Axes,
    title: str = "",
    *,
    size: float = 10,
    legend: Mapping[str, Any] | None = None,
    **settings: Any,
) -> None:
    """No frame, faint ticks, a grid behind the data, a title at the left. legend: how it looks;
    None: there is none. settings: of the axes, by the names that `Axes.set` knows."""
    axes.set(**settings)
    if legend is not None:
        axes.legend(frameon=False, **legend)
    for side in ("top", "right", "left", "bottom"):
        axes.spines[side].set_visible(False)
    axes.tick_params(length=0, which="both", colors=FAINT)
    axes.grid(color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    if title:
        axes.set_title(title, loc="left", size=size, weight="bold")


def draw_groups(
    axes: Axes,
    title: str,
    groups: Sequence[str],
    heights: Mapping[str, Sequence[float]],
    colours: Sequence[str] = SERIES,
) -> None:
    """One group of bars for each of `groups`, with a bar for each series of `heights`. The caller
    draws the legend."""
    width = BARS_WIDTH / len(heights)
    for at, (name, of_series) in enumerate(heights.items()):
        places = np.arange(len(groups)) + (at - 0.5 * (len(heights) - 1)) * width
        axes.bar(places, of_series, 0.9 * width, color=colours[at % len(colours)], label=name)
    style(axes, title, xticks=range(len(groups)), xticklabels=groups)
    axes.grid(visible=False, axis="x")


def draw_variants(axes: Axes, title: str, rows: Sequence[Mapping[str, Any]], key: str) -> None:
    """The value `key` of each variant, grouped by workload; `rows` as `ablation.ablate` gives
    them."""
    names = list(rows[0]["variants"])
    heights = {
        name: [row["variants"].get(name, {}).get(key, 0.0) for row in rows] for name in names
    }
    draw_groups(axes, title, [row["workload"] for row in rows], heights)


def draw_panels(
    title: str,
    note: str,
    panels: Sequence[Sequence[tuple[str, Mapping[str, Any], str]]],
    file: Path,
) -> None:
    """Panels of variants, rows by columns: each a title, the figures of an ablation, and the key of
    its heights."""
    height_in = 1.3 + 2.6 * len(panels)
    with sheet(title, note, file, height_in=height_in, top=1.0 - 1.25 / height_in) as figure:
        figure.subplots_adjust(hspace=0.35)
        grid = figure.subplots(len(panels), len(panels[0]), squeeze=False)
        for axes, (name, found, key) in zip(
            grid.flat, (panel for row in panels for panel in row), strict=True
        ):
            draw_variants(axes, name, found["rows"], key)
        legend_above(figure, grid[0][0], 0.58 / height_in)


def legend_above(figure: Figure, axes: Axes, below_top: float) -> None:
    """One line with the series of `axes`, under the note of the sheet. below_top: fraction of the
    height."""
    handles, labels = axes.get_legend_handles_labels()
    place = (0.008, 1.0 - below_top)
    figure.legend(
        handles, labels, loc="upper left", bbox_to_anchor=place, ncols=len(labels), frameon=False
    )
