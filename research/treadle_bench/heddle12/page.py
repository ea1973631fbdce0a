"""What the page of heddle12 says of its cells: the aims that are reached, the paper's ratios, and
where Treadle loses. And the picture: makespans over the bound, a panel for each workload, a row for
each model."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from treadle_cli.report.style import COLOURS, FAINT, INK

from treadle_bench.page import describe_seeds, seconds, value_range
from treadle_bench.pictures import sheet, style

Cell = Mapping[str, Any]
Cells = Sequence[Cell]

# Speedups that the paper gives over its nine cells: least and greatest (Heddle §7.1).
PAPER = {"verl": (1.4, 2.3), "verl*": (1.1, 2.4), "slime": (1.2, 2.5)}
NOTHING_TO_WIN = (
    1.05  # times the bound: a best baseline below leaves less than any predictor's error
)
ALIKE = 0.98  # ratios above are not called a loss

TAIL_AIM = 1.5  # times the best baseline, where the longest trajectory sets the bound
LEAST_AIM = 0.98  # times the best baseline, in every cell
ORACLE_AIM = 0.9  # of the speed of the same planner that knows every length
PAPER_AIMS = {"slime": 2.5, "verl": 2.3}  # at the degree at which the paper runs them (Heddle §7.1)


def page_values(found: Mapping[str, Any]) -> dict[str, Any]:
    """For the template."""
    cells = found["cells"]
    tail = _of_tail(cells)
    return {
        "small": found.get("small"),
        "scale": None if "small" in found else found["scale"],
        "where_it_loses": where_it_loses,
        "aims": check_aims(found),
        "paper": PAPER,
        "compared": {name: _compare_with_paper(name, cells) for name in PAPER},
        "tail_cells": len(tail),
        "reached": value_range(cell["ratio_to_bound"] for cell in cells),
        "oracle_reached": value_range(cell["bound_s"] / cell["policy"]["oracle"] for cell in cells),
    }


def where_it_loses(cell: Cell) -> str:
    """One line: which system is faster than Treadle and why, from the figures of the cell alone."""
    policy, treadle_s, oracle_s = (
        cell["policy"],
        cell["policy"]["treadle"],
        cell["policy"]["oracle"],
    )
    faster = {
        name: treadle_s / policy[name] - 1.0
        for name in cell["ratio_to"]
        if policy[name] < treadle_s
    }
    if policy["heddle"] < treadle_s:
        faster["Heddle as printed"] = treadle_s / policy["heddle"] - 1.0
    rest = (
        f"{treadle_s / cell['bound_s'] - 1.0:.0%} above the bound; the oracle takes "
        f"{seconds(oracle_s)} s"
    )
    if not faster:
        return f"nowhere. {rest}"
    who = ", ".join(
        f"{name} by {by:.1%}" for name, by in sorted(faster.items(), key=lambda item: -item[1])
    )
    best_s = min(
        policy[name] for name in policy if name not in ("treadle", "treadle-whole-turns", "oracle")
    )
    if best_s < NOTHING_TO_WIN * cell["bound_s"]:
        why = "there is nothing to win: the best is within 5% of the bound"
    elif oracle_s < ALIKE * best_s:
        why = "because of the predictor's error: the oracle is faster"
    elif oracle_s > ALIKE * treadle_s:
        why = "because of the plan: the oracle is no faster"
    else:
        why = "because of the plan and of the predictor's error"
    last = cell["last"]
    parts = {
        "waited": last["queue_s"],
        "decoded for": last["decode_s"],
        "ran tools for": last["tool_s"],
    }
    story = ", ".join(f"{name} {seconds(value)} s" for name, value in parts.items())
    return f"to {who}; {why}. {rest}. Treadle's last trajectory {story}"


def check_aims(found: Mapping[str, Any]) -> list[list[str]]:
    """A row for each aim: the aim, how many cells of each size reach it, and how many where every
    length is known."""
    sizes = [size["cells"] for size in (found, found.get("small")) if size]
    cells = found["cells"]
    to_best = "ratio_to_best_baseline"
    rows = [
        [f"at least {TAIL_AIM} times the best baseline where the tail sets the bound"]
        + [_count([cell[to_best] for cell in _of_tail(size)], TAIL_AIM) for size in sizes]
        + [_count(_oracle_to_best(_of_tail(cells)), TAIL_AIM)],
        [f"at least {LEAST_AIM} times the best baseline everywhere"]
        + [_count([cell[to_best] for cell in size], LEAST_AIM) for size in sizes]
        + [_count(_oracle_to_best(cells), LEAST_AIM)],
        [f"at least {ORACLE_AIM} of the oracle's speed"]
        + [_count([cell["ratio_to_oracle"] for cell in size], ORACLE_AIM) for size in sizes]
        + [""],
    ]
    for name, aim in PAPER_AIMS.items():
        ratios = ((cell["ratio_at_paper_degree"] for cell in size) for size in sizes)
        counts = [
            _count([each[name] for each in of_size if name in each], aim) for of_size in ratios
        ]
        rows.append(
            [f"at least {aim} times {name} at the paper's degree, as in the paper", *counts, ""]
        )
    return rows


def _compare_with_paper(name: str, cells: Cells) -> list[str]:
    """Over baseline `name`: Heddle as printed and Treadle at the paper's degree, Treadle at the
    baseline's best one."""
    at_paper_degree = [cell for cell in cells if name in cell["policy_at_paper_degree"]]
    return [
        value_range(
            cell["policy_at_paper_degree"][name] / cell["policy"]["heddle"]
            for cell in at_paper_degree
        ),
        value_range(cell["ratio_at_paper_degree"][name] for cell in at_paper_degree),
        value_range(cell["ratio_to"][name] for cell in cells),
    ]


def _of_tail(cells: Cells) -> Cells:
    return [cell for cell in cells if cell["bound_by"] == "tail"]


def _oracle_to_best(cells: Cells) -> list[float]:
    return [cell["policy"][cell["best_baseline"]] / cell["policy"]["oracle"] for cell in cells]


def _count(values: Sequence[float], aim: float) -> str:
    if not values:
        return "no such cell"
    return f"{sum(value >= aim for value in values)} of {len(values)} cells ({value_range(values)})"


LOOKS: Mapping[str, dict[str, Any]] = {
    "verl": {"marker": "s", "color": "#9AA3AF"},
    "sticky": {"marker": "^", "color": "#9AA3AF"},
    "verl*": {"marker": "D", "color": "#9AA3AF"},
    "slime": {"marker": "v", "color": "#9AA3AF"},
    "affinity-las": {"marker": "<", "color": "#6B7280"},
    "pausing": {"marker": ">", "color": "#6B7280"},
    "heddle": {"marker": "o", "color": COLOURS["queue"]},
    "oracle": {"marker": "o", "color": COLOURS["prefill"], "fillstyle": "none"},
    "treadle-whole-turns": {"marker": "o", "color": COLOURS["decode"], "fillstyle": "none"},
    "treadle": {"marker": "o", "color": COLOURS["decode"], "markersize": 9},
}
# on the upper line of a row; baselines are below
UPPER = ("heddle", "oracle", "treadle", "treadle-whole-turns")
BASELINES_LOWER = 0.2  # of a row's height
ROOM_FOR_WORDS = 1.35  # of the width of a panel


def draw(found: Mapping[str, Any], file: Path) -> None:
    """Write the picture."""
    cells = found["cells"]
    names = list(dict.fromkeys(cell["workload"] for cell in cells))
    note = (
        f"Makespan over a bound that no schedule beats (1). {found['gpus']} {found['accelerator']} "
        f"GPUs, {describe_seeds(found['seeds'])}. Baselines at their best degree; pale: verl, "
        f"verl* and slime at the paper's."
    )
    with sheet(
        "How far above the bound each system ends", note, file, height_in=4.8, top=0.74
    ) as figure:
        panels = figure.subplots(1, len(names), sharey=True, squeeze=False)[0]
        for axes, name in zip(panels, names, strict=True):
            _panel(axes, [cell for cell in cells if cell["workload"] == name])
        handles = [Line2D([], [], linestyle="", label=name, **look) for name, look in LOOKS.items()]
        figure.legend(
            handles=handles,
            loc="upper left",
            bbox_to_anchor=(0.008, 0.88),
            ncols=len(LOOKS),
            frameon=False,
        )


def _panel(axes: Axes, cells: Cells) -> None:
    axes.axvline(1.0, color=INK, linewidth=1.0)
    right = 1.0
    for row, cell in enumerate(cells):
        at = {policy: value / cell["bound_s"] for policy, value in cell["policy"].items()}
        pale = {
            name: cell["policy_at_paper_degree"].get(name, 0.0) / cell["bound_s"] for name in PAPER
        }
        right = max(
            right,
            *pale.values(),
            *(each for name, each in at.items() if name not in UPPER or name == "treadle"),
        )
        for name, value in pale.items():
            if value:
                axes.plot(
                    value, row + BASELINES_LOWER, **{**LOOKS[name], "color": COLOURS["other"]}
                )
        for name, look in LOOKS.items():
            if name in at:
                axes.plot(
                    at[name],
                    row + (0.0 if name in UPPER else BASELINES_LOWER),
                    linestyle="",
                    **look,
                )
        text = (
            f"{cell['ratio_to_best_baseline']:.2f}× the best baseline · bound by {cell['bound_by']}"
        )
        axes.annotate(
            text, (1.0, row), xytext=(6, 12), textcoords="offset points", size=8, color=FAINT
        )
    heddle = [cell["policy"]["heddle"] / cell["bound_s"] for cell in cells]
    right = 1.0 + (ROOM_FOR_WORDS if max(heddle) > right else 1.06) * (right - 1.0)
    for row, value in enumerate(heddle):
        if (
            value > right
        ):  # a point so far away would squeeze all others, so its value is written instead
            words = {"ha": "right", "va": "center", "size": 8, "color": LOOKS["heddle"]["color"]}
            axes.text(right, row, f"heddle {value:.1f} →", **words)
    axes.set_yticks(range(len(cells)), [cell["model"] for cell in cells])
    limits = (1.0 - 0.06 * (right - 1.0), right)
    style(
        axes,
        cells[0]["workload"],
        xlim=limits,
        ylim=(len(cells) - 0.5, -0.6),
        xlabel="makespan / bound",
    )
