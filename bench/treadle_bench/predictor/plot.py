"""The picture of `bench predictor`: a row of panels for each data set, a line for each estimator, by steps seen."""

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from treadle_cli.report.palette import INK

from treadle_bench.bench import Figures
from treadle_bench.pictures import SERIES, legend_above, sheet, style
from treadle_bench.predictor.page import LEVELS, ORDER, SHOWN, TOLERANCE, Row

STEPS = (0, 1, 2, 4, 8)
ROW_IN, HEAD_IN = 2.5, 1.5  # height of a row of panels, and of what is above them


def draw(found: Figures, file: Path) -> None:
    """Write the picture."""
    rows = found["rows"]
    data = list(dict.fromkeys(row["data"] for row in rows))
    note = (
        f"By steps seen, each prompt by fits without it. Backbone {found['backbone']}, frozen. Shade: 95% over "
        f"prompts of the learned one; at the right ±{100 * TOLERANCE:.0f} points."
    )
    height_in = HEAD_IN + ROW_IN * len(data)
    with sheet("Who knows what is left", note, file, height_in=height_in, top=1 - HEAD_IN / height_in) as figure:
        figure.subplots_adjust(left=0.05, hspace=0.55, wspace=0.22)
        panels = figure.subplots(len(data), len(SHOWN) + 1, squeeze=False)
        for line, of in zip(panels, data, strict=True):
            own = [row for row in rows if row["data"] == of]
            for axes, (score, title) in zip(line, SHOWN.items(), strict=False):
                _plot_score(axes, own, score)
                axes.set_title(title, size=9, loc="left")
            _plot_quantiles(line[-1], [row for row in own if row["estimator"] == "learned"])
            line[-1].set_title("learned: truths below its quantiles", size=9, loc="left")
            line[0].annotate(of, (0, 1), (0, 22), "axes fraction", "offset points", weight="bold", size=10)
            for axes in line:
                axes.set_xticks(STEPS)
                style(axes)
        for axes in panels[-1]:
            axes.set_xlabel("steps seen")
        legend_above(figure, panels[0][0], 0.62 / height_in)


def _plot_score(axes: Axes, rows: Sequence[Row], score: str) -> None:
    for name, colour in zip(ORDER, SERIES, strict=True):
        own = [row for row in rows if row["estimator"] == name]
        steps, learned = [row["step"] for row in own], name == "learned"
        width, above = (2.2, 3) if learned else (1.0, 2)
        values = [row[score] for row in own]
        axes.plot(steps, values, color=colour, marker="o", markersize=3, label=name, linewidth=width, zorder=above)
        if learned and own:
            low, high = zip(*(row[f"{score}_interval"] for row in own), strict=True)
            axes.fill_between(steps, low, high, color=colour, alpha=0.15, linewidth=0)


def _plot_quantiles(axes: Axes, rows: Sequence[Row]) -> None:
    for score, level in LEVELS.items():
        axes.axhspan(level - TOLERANCE, level + TOLERANCE, color=INK, alpha=0.08, linewidth=0)
        steps, shares = [row["step"] for row in rows], [row[score] for row in rows]
        axes.plot(steps, shares, color=SERIES[0], marker="o", markersize=3)
    axes.set_ylim(0.0, 1.0)
    axes.set_yticks(list(LEVELS.values()))
