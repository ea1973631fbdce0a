"""The picture of heddle12: makespans over the bound, a panel for each workload, a row for each model."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from treadle_cli.report.palette import COLOURS, FAINT, INK

from treadle_bench.heddle12.page import PAPER
from treadle_bench.page import describe_seeds
from treadle_bench.pictures import sheet, style

LOOKS: Mapping[str, dict[str, Any]] = {
    "verl": {"marker": "s", "color": "#9AA3AF"},
    "verl*": {"marker": "D", "color": "#9AA3AF"},
    "slime": {"marker": "v", "color": "#9AA3AF"},
    "affinity-las": {"marker": "<", "color": "#6B7280"},
    "pausing": {"marker": ">", "color": "#6B7280"},
    "heddle": {"marker": "o", "color": COLOURS["queue"]},
    "oracle": {"marker": "o", "color": COLOURS["prefill"], "fillstyle": "none"},
    "treadle-whole-turns": {"marker": "o", "color": COLOURS["decode"], "fillstyle": "none"},
    "treadle": {"marker": "o", "color": COLOURS["decode"], "markersize": 9},
}
UPPER = ("heddle", "oracle", "treadle", "treadle-whole-turns")  # on the upper line of a row; baselines are below
BASELINES_LOWER = 0.2  # of a row's height
ROOM_FOR_WORDS = 1.35  # of the width of a panel


def draw(found: Mapping[str, Any], file: Path) -> None:
    """Write the picture."""
    cells = found["cells"]
    names = list(dict.fromkeys(cell["workload"] for cell in cells))
    note = (
        f"Makespan over a bound that no schedule beats (1). {found['gpus']} {found['accelerator']} GPUs, "
        f"{describe_seeds(found['seeds'])}. Baselines at their best degree; pale: verl, verl* and slime at the paper's."
    )
    with sheet("How far above the bound each system ends", note, file, height_in=4.8, top=0.74) as figure:
        panels = figure.subplots(1, len(names), sharey=True, squeeze=False)[0]
        for axes, name in zip(panels, names, strict=True):
            _panel(axes, [cell for cell in cells if cell["workload"] == name])
            style(axes, name)
        handles = [Line2D([], [], linestyle="", label=name, **look) for name, look in LOOKS.items()]
        figure.legend(handles=handles, loc="upper left", bbox_to_anchor=(0.008, 0.88), ncols=len(LOOKS), frameon=False)


def _panel(axes: Axes, cells: Sequence[Mapping[str, Any]]) -> None:
    axes.axvline(1.0, color=INK, linewidth=1.0)
    right = 1.0
    for row, cell in enumerate(cells):
        at = {policy: value / cell["bound_s"] for policy, value in cell["policy"].items()}
        pale = {name: cell["policy_at_paper_degree"].get(name, 0.0) / cell["bound_s"] for name in PAPER}
        right = max(
            right, *pale.values(), *(each for name, each in at.items() if name not in UPPER or name == "treadle")
        )
        for name, value in pale.items():
            if value:
                axes.plot(value, row + BASELINES_LOWER, **{**LOOKS[name], "color": COLOURS["other"]})
        for name, look in LOOKS.items():
            if name in at:
                axes.plot(at[name], row + (0.0 if name in UPPER else BASELINES_LOWER), linestyle="", **look)
        text = f"{cell['ratio_to_best_baseline']:.2f}× the best baseline · bound by {cell['bound_by']}"
        axes.annotate(text, (1.0, row), xytext=(6, 12), textcoords="offset points", size=8, color=FAINT)
    heddle = [cell["policy"]["heddle"] / cell["bound_s"] for cell in cells]
    right = 1.0 + (ROOM_FOR_WORDS if max(heddle) > right else 1.06) * (right - 1.0)
    for row, value in enumerate(heddle):
        if value > right:  # a point so far away would squeeze all others, so its value is written instead
            words = {"ha": "right", "va": "center", "size": 8, "color": LOOKS["heddle"]["color"]}
            axes.text(right, row, f"heddle {value:.1f} →", **words)
    axes.set_xlim(1.0 - 0.06 * (right - 1.0), right)
    axes.set_yticks(range(len(cells)), [cell["model"] for cell in cells])
    axes.set_ylim(len(cells) - 0.5, -0.6)
    axes.set_xlabel("makespan / bound")
