"""Heddle's Figure 16: engines of one degree against engines of mixed degrees, under Treadle. The keys: ablation.py.

`active` is Figure 16(b): how many trajectories of the search workload had not ended at each time of `at_s`, first seed.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from treadle_sim.systems import TREADLE, TREADLE_HOMOGENEOUS

from treadle_bench.ablation import LLM, Variant, ablate, page_values
from treadle_bench.bench import Bench, BenchOptions, Figures
from treadle_bench.page import describe_seeds, value_range
from treadle_bench.pictures import SERIES, draw_variants, sheet, style
from treadle_bench.rollouts import DEGREES, TRACES, Job, batch_for, play_all

SHOWN = "search"  # workload of 16(b), as in the paper
POINTS = 200
ALLOCATED = "allocated"
CURVES = (ALLOCATED, "Fix-1", "Fix-8")
VARIANTS = (
    Variant(ALLOCATED, TREADLE),
    *(Variant(f"Fix-{degree}", TREADLE_HOMOGENEOUS, degree) for degree in DEGREES),
)


async def measure(options: BenchOptions) -> dict[str, Any]:
    """Raises TraceFileError, OSError."""
    found = await ablate("heddle16", VARIANTS, options)
    name = TRACES if options.traces is not None else SHOWN
    batch = batch_for(name, LLM, found["scale"], options.seed, options)
    shown = [variant for variant in VARIANTS if variant.name in CURVES and not batch.gpus % (variant.degree or 1)]
    jobs = [Job(batch, variant.system, variant.degree, curve=True) for variant in shown]
    runs = await play_all(jobs, options, "heddle16 (b)")
    at_s = np.linspace(0.0, max(run.makespan_s for run in runs), POINTS)
    found["active"] = {"workload": name, "at_s": np.round(at_s, 3).tolist()}
    for variant, run in zip(shown, runs, strict=True):
        ended = np.searchsorted(np.sort(run.finished_s), at_s, side="right")
        found["active"][variant.name] = (len(run.finished_s) - ended).tolist()
    return found


def _page(found: Figures) -> Figures:
    best_single = value_range(min(row["ratio_to"].values()) for row in found["rows"])
    return {**page_values(found, ("Fix-1", "Fix-8")), "best_single": f"{best_single}×", "found": found}


def draw(found: Figures, file: Path) -> None:
    """Write the picture."""
    active = found["active"]
    note = (
        f"{LLM}, {found['trajectories']:,} trajectories, {found['gpus']} {found['accelerator']} GPUs. Left: "
        f"{describe_seeds(found['seeds'])}. Right: {active['workload']}, seed {found['seeds'][0]}."
    )
    with sheet("Engines of one degree, and of mixed degrees", note, file, height_in=4.2, top=0.71) as figure:
        left, right = figure.subplots(1, 2)
        draw_variants(left, "rollout seconds", found["rows"], "makespan_s")
        place = (0.072, 0.85)
        figure.legend(loc="upper left", bbox_to_anchor=place, ncols=len(VARIANTS), frameon=False, fontsize=8)
        for name, colour in zip(CURVES, (SERIES[0], SERIES[1], SERIES[4]), strict=True):
            if name in active:
                right.plot(active["at_s"], active[name], color=colour, linewidth=2.0, label=name)
        right.set_xlabel("seconds")
        right.set_ylim(bottom=0)
        right.legend(frameon=False)
        style(right, "trajectories that have not ended")


BENCH = Bench(
    "heddle16",
    "Heddle's Figure 16: engines of one degree and of mixed degrees. Takes about 10 minutes.",
    measure,
    page=_page,
    draw=draw,
)
