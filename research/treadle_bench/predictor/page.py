"""What page and picture of `bench predictor` say of its rows: which estimator is ahead, and whether
quantiles hold.

The picture has a row of panels for each data set, and a line for each estimator, by steps seen.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from treadle_cli.report.style import INK

from treadle_bench.bench import Figures
from treadle_bench.pictures import SERIES, legend_above, sheet, style

Row = Mapping[str, Any]

ORDER = ("learned", "chosen", "siblings", "boosted", "numbers", "prompt-only", "history")
BASELINES = ("siblings", "boosted", "numbers", "prompt-only", "history")
SHOWN = {
    "recall_top10": "recall of the longest 10%",
    "pearson_log": "Pearson, log",
    "pinball": "pinball loss",
}
LOWER_IS_BETTER = ("pinball",)
LEVELS = {"below_p10": 0.1, "below_p50": 0.5, "below_p90": 0.9}
TOLERANCE = 0.05  # of a share below a quantile
STEPS = (0, 1, 2, 4, 8)
ROW_IN, HEAD_IN = 2.5, 1.5  # height of a row of panels, and of what is above them


def page_values(found: Figures) -> dict[str, Any]:
    """For the template. sections: the rows of each data set."""
    rows = [row for row in found["rows"] if row["estimator"] in ORDER]
    of_data = {
        data: [row for row in rows if row["data"] == data]
        for data in dict.fromkeys(row["data"] for row in rows)
    }
    return {
        "estimators": [name for name in ORDER if any(row["estimator"] == name for row in rows)],
        "sections": of_data,
        "shown": SHOWN,
        "levels": LEVELS,
        "traces": found.get("traces"),
        "latency": found if "p50_ms" in found else None,
        "compare_learned": compare_learned,
        "check_quantiles": check_quantiles,
        "describe_rise": describe_rise,
    }


def compare_learned(rows: Sequence[Row], score: str) -> str:
    """At which steps the learned estimator is ahead of every baseline, and which baseline is ahead
    at the others."""
    ahead, behind = [], []
    for step in dict.fromkeys(row["step"] for row in rows):
        of = {row["estimator"]: row[score] for row in rows if row["step"] == step}
        sign = -1.0 if score in LOWER_IS_BETTER else 1.0
        best = max((name for name in BASELINES if name in of), key=lambda name: sign * of[name])
        if "learned" in of and sign * of["learned"] > sign * of[best]:
            ahead.append(str(step))
        else:
            than = f", learned {of['learned']:.2f}" if "learned" in of else ""
            behind.append(f"{best} at step {step} ({of[best]:.2f}{than})")
    said = (
        f"learned is ahead of every baseline at step {', '.join(ahead)}"
        if ahead
        else "learned is nowhere ahead"
    )
    return said + (f"; ahead of it: {'; '.join(behind)}" if behind else "")


def check_quantiles(rows: Sequence[Row], estimator: str) -> str:
    """The steps and quantiles at which the share of true values below the quantile is off by more
    than TOLERANCE."""
    points = f"{round(100 * TOLERANCE)} points"
    off = [
        f"step {row['step']} {name.removeprefix('below_')} {row[name]:.2f}{_interval(row, name)}"
        for row in rows
        if row["estimator"] == estimator
        for name, level in LEVELS.items()
        if abs(row[name] - level) > TOLERANCE
    ]
    return f"off by more than {points}: {', '.join(off)}" if off else f"all within {points}"


def describe_rise(rows: Sequence[Row], score: str) -> str:
    """The learned estimator's score by step, and whether it rises over steps 0, 1 and 2."""
    values = {row["step"]: row[score] for row in rows if row["estimator"] == "learned"}
    said = ", ".join(f"step {step} {value:.2f}" for step, value in values.items())
    first = [values[step] for step in (0, 1, 2) if step in values]
    return (
        f"{said}: it {'rises' if first == sorted(set(first)) else 'does not rise'} over steps "
        "0, 1, 2"
    )


def _interval(row: Row, name: str) -> str:
    interval = row.get(f"{name}_interval")
    return "" if interval is None else f" ({interval[0]:.2f}–{interval[1]:.2f} over prompts)"


def draw(found: Figures, file: Path) -> None:
    """Write the picture."""
    rows = found["rows"]
    data = list(dict.fromkeys(row["data"] for row in rows))
    note = (
        f"By steps seen, each prompt by fits without it. Backbone {found['backbone']}, frozen. "
        f"Shade: 95% over prompts of the learned one; at the right ±{100 * TOLERANCE:.0f} points."
    )
    height_in = HEAD_IN + ROW_IN * len(data)
    with sheet(
        "Who knows what is left", note, file, height_in=height_in, top=1 - HEAD_IN / height_in
    ) as figure:
        figure.subplots_adjust(left=0.05, hspace=0.55, wspace=0.22)
        panels = figure.subplots(len(data), len(SHOWN) + 1, squeeze=False)
        for line, of in zip(panels, data, strict=True):
            own = [row for row in rows if row["data"] == of]
            for axes, (score, title) in zip(line, SHOWN.items(), strict=False):
                _plot_score(axes, own, score)
                axes.set_title(title, size=9, loc="left")
            _plot_quantiles(line[-1], [row for row in own if row["estimator"] == "learned"])
            line[-1].set_title("learned: truths below its quantiles", size=9, loc="left")
            line[0].annotate(
                of, (0, 1), (0, 22), "axes fraction", "offset points", weight="bold", size=10
            )
            for axes in line:
                style(axes, xticks=STEPS)
        for axes in panels[-1]:
            axes.set_xlabel("steps seen")
        legend_above(figure, panels[0][0], 0.62 / height_in)


def _plot_score(axes: Axes, rows: Sequence[Row], score: str) -> None:
    for name, colour in zip(ORDER, SERIES, strict=True):
        own = [row for row in rows if row["estimator"] == name]
        steps, learned = [row["step"] for row in own], name == "learned"
        width, above = (2.2, 3) if learned else (1.0, 2)
        values = [row[score] for row in own]
        axes.plot(
            steps,
            values,
            color=colour,
            marker="o",
            markersize=3,
            label=name,
            linewidth=width,
            zorder=above,
        )
        if learned and own:
            low, high = zip(*(row[f"{score}_interval"] for row in own), strict=True)
            axes.fill_between(steps, low, high, color=colour, alpha=0.15, linewidth=0)


def _plot_quantiles(axes: Axes, rows: Sequence[Row]) -> None:
    for score, level in LEVELS.items():
        axes.axhspan(level - TOLERANCE, level + TOLERANCE, color=INK, alpha=0.08, linewidth=0)
        steps, shares = [row["step"] for row in rows], [row[score] for row in rows]
        axes.plot(steps, shares, color=SERIES[0], marker="o", markersize=3)
    axes.set(ylim=(0.0, 1.0), yticks=list(LEVELS.values()))
