"""Heddle's Figure 12: three workloads on three models, every system on the same 64 GPUs.

`cells`: one seed at the paper's size, 100 trajectories for each engine of the degree that the paper gives its baselines
(1, 1 and 2 GPUs for 8B, 14B and 32B), so 6,400 or 3,200. `dense_cells`: the 32B with 6,400. `small`: cells of a
quarter of the GPUs and the trajectories, medians over `repeats` seeds with their range, where the first seed is that
of `cells`. With --scale all of it is one size: that part, over `repeats` seeds.

A cell: `policy` gives makespans in seconds, a baseline's at the degree that suits it best (`degree`);
`ratio_to_X` is X's makespan over Treadle's: above 1 Treadle is faster. `ratio_to` has every baseline,
`ratio_at_paper_degree` the same at the paper's degree, `spread` least and greatest of the ratios over seeds.
`bound_by`: what no schedule beats, `work` or the longest trajectory (`tail`, or `tools` where most of it is tools).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median, median_low
from typing import Any

from treadle_sim.systems import BASELINES, HEDDLE, ORACLE, TREADLE, TREADLE_WHOLE_TURNS

from treadle_bench.options import BenchOptions
from treadle_bench.rollouts import (
    ACCELERATOR,
    GPUS,
    SMALL_SCALE,
    Batch,
    Job,
    Played,
    batch_for,
    floor,
    play_all,
    setting,
    workloads,
)

NAME = "heddle12"
PAPER_DEGREE = {"Qwen3-8B": 1, "Qwen3-14B": 1, "Qwen3-32B": 2}
DENSE = ("Qwen3-32B",)  # models whose batch would be smaller than the others', played with as many too
PLANNED = (HEDDLE, TREADLE, TREADLE_WHOLE_TURNS, ORACLE)
DIGITS = 4


async def run(options: BenchOptions) -> dict[str, Any]:
    """See the module. Raises TraceFileError, OSError."""
    seeds = [options.seed + repeat for repeat in range(options.repeats)]
    found: dict[str, Any] = {"accelerator": ACCELERATOR, "predictor": "noisy", "repeats": options.repeats}
    if options.scale is not None:
        found |= await _size(options.scale, seeds, options)
    else:
        found |= await _size(1.0, seeds[:1], options)
        found["small"] = await _size(SMALL_SCALE, seeds, options)
    return found


async def _size(scale: float, seeds: Sequence[int], options: BenchOptions) -> dict[str, Any]:
    sizes = [(llm, PAPER_DEGREE[llm]) for llm in PAPER_DEGREE] + [(llm, 1) for llm in DENSE]
    cells = {
        (name, llm, fill): [batch_for(name, llm, scale, seed, options, degree=fill) for seed in seeds]
        for name in workloads(options)
        for llm, fill in sizes
    }
    jobs = [job for batches in cells.values() for batch in batches for job in jobs_of(batch)]
    what = f"heddle12 on {round(GPUS * scale)} GPUs"
    done = dict(zip(jobs, await play_all(jobs, options, what), strict=True))
    rows: dict[bool, list[dict[str, Any]]] = {True: [], False: []}
    for (_name, llm, fill), batches in cells.items():
        rows[fill == PAPER_DEGREE[llm]].append(merged([cell_of(batch, done) for batch in batches]))
    return {
        "gpus": round(GPUS * scale),
        "scale": scale,
        "seeds": list(seeds),
        "cells": rows[True],
        "dense_cells": rows[False],
    }


def jobs_of(batch: Batch) -> list[Job]:
    """Every baseline at every degree that holds the batch, and the systems that allocate."""
    degrees = setting(batch).degrees()
    return [Job(batch, system, degree) for system in BASELINES for degree in degrees] + [
        Job(batch, system) for system in PLANNED
    ]


def cell_of(batch: Batch, done: Mapping[Job, Played]) -> dict[str, Any]:
    """One cell of one seed."""
    policy: dict[str, float] = {}
    degree: dict[str, int] = {}
    engines: dict[str, str] = {}
    at_paper_degree: dict[str, float] = {}
    of: dict[str, Played] = {}
    for system in BASELINES:
        runs = {job.degree: one for job, one in done.items() if job.batch == batch and job.system is system}
        degree[system.name] = min(runs, key=lambda each: runs[each].makespan_s)
        of[system.name] = runs[degree[system.name]]
        if PAPER_DEGREE[batch.llm] in runs:
            at_paper_degree[system.name] = runs[PAPER_DEGREE[batch.llm]].makespan_s
    for system in PLANNED:
        of[system.name] = done[Job(batch, system)]
        engines[system.name] = of[system.name].engines
    policy = {name: one.makespan_s for name, one in of.items()}
    treadle_s = policy[TREADLE.name]
    best = min((system.name for system in BASELINES), key=lambda name: policy[name])
    floor_here = floor(batch)
    last = of[TREADLE.name].last
    return {
        "workload": batch.workload,
        "model": batch.llm,
        "trajectories": batch.trajectories,
        "policy": policy,
        "degree": degree,
        "engines": engines,
        "policy_at_paper_degree": at_paper_degree,
        "paper_degree": PAPER_DEGREE[batch.llm],
        "best_baseline": best,
        "ratio_to_best_baseline": policy[best] / treadle_s,
        "ratio_to_verl": policy["verl"] / treadle_s,
        "ratio_to_slime": policy["slime"] / treadle_s,
        "ratio_to_heddle": policy[HEDDLE.name] / treadle_s,
        "ratio_to_oracle": policy[ORACLE.name] / treadle_s,
        "whole_turns_to_best_baseline": policy[best] / policy[TREADLE_WHOLE_TURNS.name],
        "ratio_to_bound": floor_here.bound_s / treadle_s,
        "ratio_to": {system.name: policy[system.name] / treadle_s for system in BASELINES},
        "ratio_at_paper_degree": {name: each / treadle_s for name, each in at_paper_degree.items()},
        "bound_s": floor_here.bound_s,
        "bound_by": floor_here.bound_by,
        "work_s": floor_here.work_s,
        "alone_s": floor_here.alone_s,
        "p50_s": {name: one.p50_s for name, one in of.items()},
        "tokens_per_s": {name: one.tokens_per_s for name, one in of.items()},
        "last": {"queue_s": last.queue_s, "prefill_s": last.prefill_s, "decode_s": last.decode_s}
        | {"tool_s": last.tool_s, "move_s": last.move_s},
        "migrations": of[TREADLE.name].migrations,
        "took_s": of[TREADLE.name].took_s,
    }


def merged(cells: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Medians over seeds of what is a number, the commonest of what is not, and the range of the ratios."""
    spread = {
        key: [_rounded(min(of_seeds)), _rounded(max(of_seeds))]
        for key in cells[0]
        if key.startswith("ratio_to_")
        for of_seeds in [[cell[key] for cell in cells]]
    }
    return {**_middle(cells), "spread": spread if len(cells) > 1 else None}


def _middle(values: Sequence[Any]) -> Any:
    first = values[0]
    if isinstance(first, dict):
        return {key: _middle([value[key] for value in values]) for key in first}
    if isinstance(first, str):
        return max(sorted(set(values)), key=values.count)
    return _rounded(float(median(values))) if isinstance(first, float) else median_low(values)


def _rounded(value: float) -> float:
    return round(value, DIGITS)
