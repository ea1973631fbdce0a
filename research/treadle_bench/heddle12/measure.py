"""Heddle's Figure 12: three workloads on three models, every system on the same 64 GPUs.

`cells`: one seed at the paper's size, 100 trajectories for each engine of the degree that the paper
gives its baselines
(1, 1 and 2 GPUs for 8B, 14B and 32B), so 6,400 or 3,200. `dense_cells`: the 32B with 6,400.
`small`: cells with a
quarter of GPUs and trajectories, medians over `repeats` seeds with their range; the first seed is
that of `cells`. With
--scale there is one size, over `repeats` seeds.

A cell: `policy` has makespans in seconds, a baseline's at its best degree (`degree`). `ratio_to_X`:
X's makespan over Treadle's, above 1 Treadle is faster. `ratio_to`: every baseline.
`ratio_at_paper_degree`: the same at the paper's degree. `spread`: range of the ratios over seeds.
`bound_by`: what sets the lower bound: `work`, the longest trajectory (`tail`), or `tools` where
most of that trajectory is tools.
"""

from collections.abc import Mapping, Sequence
from statistics import median, median_low
from typing import Any

from treadle_sim.systems import BASELINES, HEDDLE, ORACLE, TREADLE, TREADLE_WHOLE_TURNS

from treadle_bench.bench import Bench, BenchOptions
from treadle_bench.heddle12.page import draw, page_values
from treadle_bench.rollouts import (
    ACCELERATOR,
    GPUS,
    SMALL_SCALE,
    Batch,
    Job,
    Played,
    batch_for,
    find_bound,
    play_all,
    setting_of,
    workloads,
)
from treadle_bench.summary import range_of, rounded

PAPER_DEGREE = {"Qwen3-8B": 1, "Qwen3-14B": 1, "Qwen3-32B": 2}
# models with fewer trajectories than the others, which are also played with as many
DENSE = ("Qwen3-32B",)
PLANNED = (HEDDLE, TREADLE, TREADLE_WHOLE_TURNS, ORACLE)


async def measure(options: BenchOptions) -> dict[str, Any]:
    """Raises TraceFileError, OSError."""
    found: dict[str, Any] = {
        "accelerator": ACCELERATOR,
        "predictor": "noisy",
        "repeats": options.repeats,
    }
    if options.scale is not None:
        return found | await _play_size(options.scale, options.seeds, options)
    found |= await _play_size(1.0, options.seeds[:1], options)
    return found | {"small": await _play_size(SMALL_SCALE, options.seeds, options)}


async def _play_size(scale: float, seeds: Sequence[int], options: BenchOptions) -> dict[str, Any]:
    gpus = round(GPUS * scale)
    cells = {
        (name, llm, degree): [
            batch_for(name, llm, scale, seed, options, degree=degree) for seed in seeds
        ]
        for name in workloads(options)
        for llm, degree in (*PAPER_DEGREE.items(), *((llm, 1) for llm in DENSE))
    }
    jobs = {batch: _jobs_of(batch) for batches in cells.values() for batch in batches}
    done = await play_all(
        (job for of in jobs.values() for job in of), options, f"heddle12 on {gpus} GPUs"
    )
    rows: dict[bool, list[dict[str, Any]]] = {True: [], False: []}
    for (_name, llm, degree), batches in cells.items():
        made = [_make_cell(batch, {job: done[job] for job in jobs[batch]}) for batch in batches]
        rows[degree == PAPER_DEGREE[llm]].append(merge_seeds(made))
    return {
        "gpus": gpus,
        "scale": scale,
        "seeds": list(seeds),
        "cells": rows[True],
        "dense_cells": rows[False],
    }


def _jobs_of(batch: Batch) -> list[Job]:
    """Every baseline at every degree whose engines hold the batch, and the systems that allocate
    engines."""
    degrees = setting_of(batch).degrees()
    return [
        *(Job(batch, system, degree) for system in BASELINES for degree in degrees),
        *(Job(batch, system) for system in PLANNED),
    ]


def _make_cell(batch: Batch, done: Mapping[Job, Played]) -> dict[str, Any]:
    """One cell of one seed, from its rollouts."""
    degree: dict[str, int] = {}
    at_paper_degree: dict[str, float] = {}
    of: dict[str, Played] = {}
    for system in BASELINES:
        runs = {job.degree: one for job, one in done.items() if job.system is system}
        degree[system.name] = min(runs, key=lambda each: runs[each].makespan_s)
        of[system.name] = runs[degree[system.name]]
        if PAPER_DEGREE[batch.llm] in runs:
            at_paper_degree[system.name] = runs[PAPER_DEGREE[batch.llm]].makespan_s
    of |= {system.name: done[Job(batch, system)] for system in PLANNED}
    policy = {name: one.makespan_s for name, one in of.items()}
    treadle = of[TREADLE.name]
    ratio_to = {name: policy[name] / treadle.makespan_s for name in policy}
    best = min(degree, key=lambda name: policy[name])
    bound = find_bound(batch)
    return {
        "workload": batch.workload,
        "model": batch.llm,
        "trajectories": batch.trajectories,
        "policy": policy,
        "degree": degree,
        "engines": {system.name: of[system.name].engines for system in PLANNED},
        "policy_at_paper_degree": at_paper_degree,
        "paper_degree": PAPER_DEGREE[batch.llm],
        "best_baseline": best,
        "ratio_to_best_baseline": ratio_to[best],
        **{f"ratio_to_{name}": ratio_to[name] for name in ("verl", "slime", "heddle", "oracle")},
        "whole_turns_to_best_baseline": policy[best] / policy[TREADLE_WHOLE_TURNS.name],
        "ratio_to_bound": bound["bound_s"] / treadle.makespan_s,
        "ratio_to": {name: ratio_to[name] for name in degree},
        "ratio_at_paper_degree": {
            name: each / treadle.makespan_s for name, each in at_paper_degree.items()
        },
        **bound,
        "p50_s": {name: one.p50_s for name, one in of.items()},
        "tokens_per_s": {name: one.tokens_per_s for name, one in of.items()},
        "last": treadle.last,
        "migrations": treadle.migrations,
        "took_s": treadle.took_s,
    }


def merge_seeds(cells: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Medians over seeds of numbers, the commonest of strings, and the range of the ratios."""
    ratios = [key for key in cells[0] if key.startswith("ratio_to_")]
    spread = {key: range_of(cell[key] for cell in cells) for key in ratios}
    return {**_merge(cells), "spread": spread if len(cells) > 1 else None}


def _merge(values: Sequence[Any]) -> Any:
    first = values[0]
    if isinstance(first, dict):
        return {key: _merge([value[key] for value in values]) for key in first}
    if isinstance(first, str):
        return max(sorted(set(values)), key=values.count)
    return rounded(float(median(values))) if isinstance(first, float) else median_low(values)


BENCH = Bench(
    "heddle12",
    "Heddle's Figure 12: coding, search and math on three models and 64 GPUs, every system and the "
    "bound; --scale for a part of it. Takes about an hour on 2 cores.",
    measure,
    page=page_values,
    draw=draw,
)
