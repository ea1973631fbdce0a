"""Values and picture of the page of `tail`: what drafts bring in each cell, and where they lose."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from matplotlib.lines import Line2D
from treadle_cli.report.style import COLOURS, INK

from treadle_bench.page import describe_seeds, value_range
from treadle_bench.pictures import sheet, style
from treadle_bench.real.page import name_cell

Row = Mapping[str, Any]

TO_TREADLE, TO_BEST, TO_BEST_BEFORE = (
    "ratio_to_treadle",
    "ratio_to_best_baseline",
    "ratio_to_best_before",
)
ALIKE = 0.005  # of a makespan: less is called nothing
LOOKS: Mapping[str, tuple[str, dict[str, Any]]] = {
    TO_TREADLE: (
        "Treadle without drafts",
        {"marker": "o", "color": COLOURS["decode"], "markersize": 8},
    ),
    TO_BEST: (
        "best baseline, with the same drafts",
        {"marker": "s", "color": COLOURS["queue"], "fillstyle": "none"},
    ),
}


def page_values(found: Mapping[str, Any]) -> dict[str, Any]:
    """For the template."""
    rows = found["cells"]
    return {
        "name_cell": name_cell,
        "summary": summarise(rows),
        "losses": [say_loss(row) for row in rows if row[TO_TREADLE] < 1.0 - ALIKE],
        "behind": [say_behind(row) for row in rows if row[TO_BEST] < 1.0 - ALIKE],
        "half_treadle": median(row["p50_s"]["drafting"] / row["drafting_s"] for row in rows),
        "half_baseline": median(
            row["p50_s"]["best_baseline"] / row["best_baseline_s"] for row in rows
        ),
        "batches": list(dict.fromkeys(row["batch"] for row in found["gains"])),
        "by_engine": group_gains(found["gains"]),
    }


def summarise(rows: Sequence[Row]) -> dict[str, Any]:
    """Return geometric means, ranges, and how many cells drafts make faster, leave alone and make
    slower."""
    faster = sum(row[TO_TREADLE] > 1.0 + ALIKE for row in rows)
    slower = sum(row[TO_TREADLE] < 1.0 - ALIKE for row in rows)
    return {
        "faster": faster,
        "alike": len(rows) - faster - slower,
        "slower": slower,
        **{
            key: {"mean": _mean(rows, key), "range": value_range(row[key] for row in rows)}
            for key in (TO_TREADLE, TO_BEST, TO_BEST_BEFORE, "ratio_of_baselines")
        },
    }


def _mean(rows: Sequence[Row], key: str) -> float:
    return math.exp(math.fsum(math.log(row[key]) for row in rows) / len(rows))


def say_loss(row: Row) -> str:
    """As in "tau, 8 GPUs, 0.3 a slot, tools × 1: 0.97"."""
    return f"{row['trace']}, {name_cell(row)}: {row[TO_TREADLE]:.2f}"


def say_behind(row: Row) -> str:
    """Who is ahead of Treadle where both speculate, and what stood there before."""
    rival = f"{row['best_baseline']} on engines of {row['degree']}"
    return (
        f"{row['trace']}, {name_cell(row)}: {row[TO_BEST]:.2f} ({rival}); "
        f"{row[TO_BEST_BEFORE]:.2f} without drafts"
    )


def group_gains(gains: Sequence[Row]) -> list[tuple[int, int, list[Row]]]:
    """GPUs of an engine, ended siblings, and the gain at each batch."""
    lines: dict[tuple[int, int], list[Row]] = {}
    for row in gains:
        lines.setdefault((row["gpus"], row["siblings"]), []).append(row)
    return [(*key, rows) for key, rows in lines.items()]


def draw(found: Mapping[str, Any], file: Path) -> None:
    """Write the picture."""
    rows = found["cells"]
    seeds = describe_seeds(found["seeds"])
    note = f"Makespan over that of Treadle with drafts: right of 1 it is faster. {seeds}."
    height_in = 1.5 + 0.3 * len(rows)
    top = 1 - 1.15 / height_in
    with sheet("What could shorten the tail", note, file, height_in=height_in, top=top) as figure:
        figure.subplots_adjust(left=0.29)
        axes = figure.subplots()
        axes.axvline(1.0, color=INK, linewidth=1.0)
        for at, row in enumerate(rows):
            for key, (_label, look) in LOOKS.items():
                axes.plot(row[key], at, linestyle="", **look)
        axes.set_yticks(range(len(rows)), [f"{row['trace']}, {name_cell(row)}" for row in rows])
        style(axes, "speculation", ylim=(len(rows) - 0.5, -0.5))
        handles = [
            Line2D([], [], linestyle="", label=label, **look) for label, look in LOOKS.values()
        ]
        place = (0.008, 1.0 - 0.62 / height_in)
        figure.legend(
            handles=handles, loc="upper left", bbox_to_anchor=place, ncols=len(LOOKS), frameon=False
        )
