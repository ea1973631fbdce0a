"""Heddle's Figure 16: engines of one degree against engines of mixed degrees, under Treadle. See ablation.py.

`active` is Figure 16(b): trajectories of the search workload that had not ended, for the first seed, at `at_s`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from treadle_sim.systems import TREADLE, TREADLE_HOMOGENEOUS

from treadle_bench.ablation import LLM, Variant, ablate, lines, losses, ratios
from treadle_bench.options import BenchOptions
from treadle_bench.page import MACHINE, command, paragraph, point, seeds
from treadle_bench.pictures import SERIES, bars, figure_with, tidy
from treadle_bench.rollouts import DEGREES, TRACES, Job, batch_for, play_all

NAME = "heddle16"
PAPER = "1.1–1.3×"
SHOWN = "search"  # in 16(b), as in the paper
POINTS = 200
ALLOCATED = "allocated"
CURVES = (ALLOCATED, "Fix-1", "Fix-8")
VARIANTS = (
    Variant(ALLOCATED, TREADLE),
    *(Variant(f"Fix-{degree}", TREADLE_HOMOGENEOUS, degree) for degree in DEGREES),
)


async def run(options: BenchOptions) -> dict[str, Any]:
    """See the module. Raises TraceFileError, OSError."""
    found = await ablate(NAME, VARIANTS, options)
    name = TRACES if options.traces is not None else SHOWN
    batch = batch_for(name, LLM, found["scale"], options.seed, options)
    shown = [variant for variant in VARIANTS if variant.name in CURVES and not batch.gpus % (variant.degree or 1)]
    jobs = [Job(batch, variant.system, variant.degree, curve=True) for variant in shown]
    runs = await play_all(jobs, options, f"{NAME} (b)")
    at_s = np.linspace(0.0, max(run.makespan_s for run in runs), POINTS)
    found["active"] = {
        "workload": name,
        "at_s": np.round(at_s, 3).tolist(),
        **{
            variant.name: (len(one.finished_s) - np.searchsorted(np.sort(one.finished_s), at_s, side="right")).tolist()
            for variant, one in zip(shown, runs, strict=True)
        },
    }
    return found


def page(found: Mapping[str, Any]) -> Iterator[str]:
    yield "# heddle16: engines of one degree, and of mixed degrees"
    yield ""
    yield from paragraph(
        f"`{command(NAME, found)}`, on {MACHINE}. {LLM}, {found['trajectories']:,} trajectories on {found['gpus']}",
        f"{found['accelerator']} GPUs. Fix-N: engines of N GPUs each; allocated: what the resource manager plans from",
        "another epoch of the same prompts. Placement, order and predictions are Treadle's in every column; an engine",
        f"has {found['slots']} slots for each of its GPUs.",
    )
    yield "![rollout time, and trajectories that have not ended](heddle16.png)"
    yield ""
    yield from lines(found, engines=True)
    yield ""
    yield "## What to know"
    yield ""
    theirs = ["Fix-1", "Fix-8"]
    yield from point(
        f"The paper reports {PAPER} over Fix-1 and Fix-8. Here, over the same two: {ratios(found, theirs)}; over the",
        f"best single degree: {_best_single(found)}.",
    )
    yield from losses(found)


def _best_single(found: Mapping[str, Any]) -> str:
    least = [min(row["ratio_to"].values()) for row in found["rows"]]
    return f"{min(least):.2f}–{max(least):.2f}×"


def draw(found: Mapping[str, Any], file: Path) -> None:
    active = found["active"]
    note = (
        f"{LLM}, {found['trajectories']:,} trajectories, {found['gpus']} {found['accelerator']} GPUs. Left: "
        f"{seeds(found)}. Right: {active['workload']}, seed {found['seeds'][0]}."
    )
    with figure_with("Engines of one degree, and of mixed degrees", note, file, height_in=4.2, top=0.71) as figure:
        left, right = figure.subplots(1, 2)
        bars(left, "rollout seconds", found["rows"], "makespan_s")
        place = (0.072, 0.85)
        figure.legend(loc="upper left", bbox_to_anchor=place, ncols=len(VARIANTS), frameon=False, fontsize=8)
        for name, colour in zip(CURVES, (SERIES[0], SERIES[1], SERIES[4]), strict=True):
            if name in active:
                right.plot(active["at_s"], active[name], color=colour, linewidth=2.0, label=name)
        right.set_title("trajectories that have not ended", loc="left", size=10, weight="bold")
        right.set_xlabel("seconds")
        right.set_ylim(bottom=0)
        right.legend(frameon=False)
        tidy(right)
