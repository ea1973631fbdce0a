"""What the page of `real` says of its cells: the aims that are reached, and where Treadle loses and
why. And the picture: a panel for each trace, a row for each cell, makespans over Treadle's."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import geometric_mean
from typing import Any

from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from treadle_cli.report.style import COLOURS, INK

from treadle_bench.page import describe_seeds, seconds, value_range
from treadle_bench.pictures import sheet, style

Cell = Mapping[str, Any]

LEAST_AIM, MEAN_AIM, KV_AIM = 0.98, 1.20, 1.40  # times the best baseline
TOLD_AIM, RECOMPUTED_AIM = 1.02, 1.25
ALIKE = 0.02  # of a makespan: less is not called a cause

LOOKS: Mapping[str, dict[str, Any]] = {
    "best baseline": {"marker": "o", "color": COLOURS["decode"], "markersize": 8},
    "Treadle that knows ended siblings": {
        "marker": "s",
        "color": COLOURS["queue"],
        "fillstyle": "none",
    },
    "Treadle told every length": {"marker": "o", "color": COLOURS["prefill"], "fillstyle": "none"},
    "bound": {"marker": "|", "color": INK, "markersize": 11},
}
# one for each look
KEYS = ("ratio_to_best_baseline", "ratio_to_siblings", "ratio_to_oracle", "ratio_to_bound")


def page_values(found: Mapping[str, Any]) -> dict[str, Any]:
    """For the template."""
    cells = found["cells"]
    return {
        "aims": check_aims(found),
        "name_cell": name_cell,
        "losses": [
            (cell["trace"], name_cell(cell), why) for cell in cells if (why := explain_loss(cell))
        ],
        "by_siblings": value_range(cell["ratio_to_siblings"] for cell in cells),
        "by_told": value_range(1.0 / cell["ratio_to_oracle"] for cell in cells),
        "siblings_by_told": value_range(
            cell["ratio_to_siblings"] / cell["ratio_to_oracle"] for cell in cells
        ),
        "one_seed": sum(len(cell["seeds"]) < len(found["seeds"]) for cell in cells),
    }


def name_cell(cell: Cell) -> str:
    """As in "64 GPUs, 3 a slot, tools × 0.1"."""
    return f"{cell['gpus']} GPUs, {cell['load']:g} a slot, tools × {cell['tools']:g}"


def check_aims(found: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Each aim, and how many cells reach it."""
    cells = found["cells"]
    to_best = "ratio_to_best_baseline"
    full = [cell for cell in cells if cell["kv_demand"] > 1.0]
    return [
        (
            f"at least {LEAST_AIM} times the best baseline everywhere",
            _count(cells, to_best, least=LEAST_AIM),
        ),
        (
            f"a geometric mean of at least {MEAN_AIM:.2f}",
            f"{found['geomean']:.2f}; {_reach(cells)} if every rollout ended on its bound",
        ),
        (
            f"at least {KV_AIM} where engines cannot hold the KV of all slots",
            f"{_count(full, to_best, least=KV_AIM)}; {_reach(full)} if every rollout ended on its "
            f"bound, which leaves room for {KV_AIM} in {sum(map(_has_room, full))}",
        ),
        (
            f"told every length, at most {TOLD_AIM} times as long",
            _count(cells, "ratio_to_oracle", most=TOLD_AIM),
        ),
        (
            f"at most {RECOMPUTED_AIM} times the tokens that the best baseline prefills again",
            _count(cells, "recomputed_ratio", most=RECOMPUTED_AIM),
        ),
    ]


def _count(
    cells: Iterable[Cell], key: str, *, least: float = 0.0, most: float = float("inf")
) -> str:
    values = [cell[key] for cell in cells]
    if not values:
        return "no such cell"
    return (
        f"{sum(least <= value <= most for value in values)} of {len(values)} cells "
        f"({value_range(values)})"
    )


def _reach(cells: Iterable[Cell]) -> str:
    """The geometric mean of a schedule that would end every cell on its bound."""
    found = list(map(_most, cells))
    return f"{geometric_mean(found):.2f}" if found else "nothing"


def _has_room(cell: Cell) -> bool:
    return _most(cell) >= KV_AIM


def _most(cell: Cell) -> float:
    """The ratio to the best baseline of a rollout that would end on its bound."""
    return float(cell["ratio_to_best_baseline"] / cell["ratio_to_bound"])


def explain_loss(cell: Cell) -> str:
    """Who is faster than Treadle, by how much and why; nothing where no baseline is."""
    ratio, best, told = (
        cell["ratio_to_best_baseline"],
        cell["best_baseline"],
        cell["ratio_to_oracle"],
    )
    if ratio >= 1.0:
        return ""
    if cell["ratio_to_bound"] > (1.0 - ALIKE) * ratio:
        why = "within 2% of the bound"
    elif told < ratio:
        why = "because of the predictor's error: told every length, Treadle is faster than it"
    elif told < 1.0 - ALIKE:
        why = "because of the plan and of the predictor's error"
    else:
        why = "because of the plan: told every length, Treadle is no faster"
    last = cell["last"]
    parts = {
        "waited": "queue_s",
        "prefilled": "prefill_s",
        "decoded": "decode_s",
        "ran tools": "tool_s",
    }
    story = ", ".join(f"{name} {seconds(last[key])} s" for name, key in parts.items())
    return f"{best} is faster by {1.0 / ratio - 1.0:.1%}, {why}. Treadle's last trajectory {story}"


def draw(found: Mapping[str, Any], file: Path) -> None:
    """Write the picture."""
    cells = found["cells"]
    names = list(dict.fromkeys(cell["trace"] for cell in cells))
    rows = list(
        dict.fromkeys(map(name_cell, sorted(cells, key=lambda cell: (cell["gpus"], cell["load"]))))
    )
    note = (
        "Makespan over Treadle's: right of 1 it is slower than Treadle. "
        f"{describe_seeds(found['seeds'])}, and range."
    )
    height_in = 1.5 + 0.3 * len(rows)
    with sheet(
        "Public traces on simulated H200s",
        note,
        file,
        height_in=height_in,
        top=1 - 1.15 / height_in,
    ) as figure:
        figure.subplots_adjust(left=0.19)
        panels = figure.subplots(1, len(names), sharey=True, squeeze=False)[0]
        for axes, name in zip(panels, names, strict=True):
            _panel(axes, name, rows, [cell for cell in cells if cell["trace"] == name])
        handles = [
            Line2D([], [], linestyle="", label=label, **look) for label, look in LOOKS.items()
        ]
        place = (0.008, 1.0 - 0.62 / height_in)
        figure.legend(
            handles=handles, loc="upper left", bbox_to_anchor=place, ncols=len(LOOKS), frameon=False
        )


def _panel(axes: Axes, name: str, rows: Sequence[str], cells: Sequence[Cell]) -> None:
    axes.axvline(1.0, color=INK, linewidth=1.0)
    for cell in cells:
        row = rows.index(name_cell(cell))
        if cell["spread"]:
            axes.plot(cell["spread"][KEYS[0]], (row, row), color=COLOURS["decode"], linewidth=1.5)
        for key, look in zip(KEYS, LOOKS.values(), strict=True):
            axes.plot(cell[key], row, linestyle="", **look)
    axes.set_yticks(range(len(rows)), rows)
    style(axes, name, ylim=(len(rows) - 0.5, -0.5), xlabel="makespan / Treadle's")
