"""Rollouts of public traces: Treadle against the best baseline, where nobody chose the workload for
it.

Each source is resampled to groups of 16 (`treadle_sim.workloads.resample`) on H200s that serve
Qwen3-14B, with 100 slots a GPU. `load`: trajectories for each slot. `tools`: the share of their
measured seconds that tools take. Every engine's host keeps twice as much KV as the engine, for
every system, as SGLang's HiCache does by default. A baseline runs on engines of one degree, and the
best degree counts; the first seed plays every degree, the others leave out those that were much
slower there. A cell with more than MOST_FOR_ALL_SEEDS trajectories plays the first seed only, and
there the first baseline plays every degree and the others leave out those that were much slower
with it.

After each cell the figures so far are written, and a run with --resume plays the cells that they
lack (`missing`).

Keys: `cells`: medians over `seeds`, with the range of each ratio in `spread`. `ratio_to_X`: X's
makespan over Treadle's, above 1 Treadle is faster: the best baseline's; `siblings`, Treadle that
guesses from a prompt's samples that have ended and nothing else; `oracle`, Treadle that is told
every length; `bound`, which no schedule beats, so below 1. `kv_demand`: KV of the trajectories that
slots admit, at their ends, over what the GPUs hold at the degree that holds most.
`recomputed_ratio`: tokens that Treadle prefilled again over those of the best baseline, both at
least RECOMPUTED_FLOOR of what a rollout has to prefill. `least`, `geomean`: of
ratio_to_best_baseline over cells.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean, geometric_mean
from typing import Any

from treadle_cli.exits import UsageProblem
from treadle_sim.systems import ORACLE, PAUSING, STICKY, TREADLE, VERL, VERL_STAR, System
from treadle_sim.workloads import parametric
from treadle_sim.workloads.resample import resample
from treadle_sim.workloads.workload import TrajectoryWork, Workload, groups

from treadle_bench.bench import Bench, BenchOptions
from treadle_bench.heddle12.measure import merge_seeds
from treadle_bench.public_traces import read_public
from treadle_bench.real.page import draw, page_values
from treadle_bench.rollouts import (
    ACCELERATOR,
    SAMPLES,
    SLOTS,
    Batch,
    Job,
    Played,
    find_bound,
    play_all,
    setting_of,
)
from treadle_bench.summary import rounded

LLM = "Qwen3-14B"
SOURCES = {
    "swebench": "swebench_verified_mini_gemini3",
    "claude_code": "claude_code_sessions_kvct",
    "mcpmark": "mcpmark",
    "tau": "tau_airline_gpt4o",
}
PARAMETRIC = ("math", "search")  # workloads that need no --data
LOADS = (0.3, 1.0, 3.0)
TOOL_SHARES = (1.0, 0.1)
GPUS = (8, 64)
HOST_SHARE = 2.0
RECOMPUTED_FLOOR = 0.01
MUCH_SLOWER = 0.15
MOST_FOR_ALL_SEEDS = 5_000
BASELINES = (VERL, VERL_STAR, STICKY, PAUSING)
SIBLINGS = replace(
    TREADLE,
    name="siblings",
    title="Treadle that knows siblings that have ended",
    predictor="siblings",
)
PLANNED = (TREADLE, SIBLINGS, ORACLE)


def two_epochs(
    trace: str, llm: str, prompts: int, samples: int, seed: int, data: Path | None
) -> tuple[Workload, tuple[TrajectoryWork, ...]]:
    """Return a rollout of a trace of SOURCES or PARAMETRIC, and the samples of an earlier one.
    Raises PublicTraceError, OSError."""
    size = (prompts, samples, seed)
    if trace in PARAMETRIC:
        now, before = (
            parametric.make(trace, *size, epoch=epoch, llm=llm.lower()) for epoch in (0, 1)
        )
    else:
        assert data is not None
        caps = {
            "max_gen_tokens": parametric.MAX_GEN_TOKENS,
            "max_context_tokens": parametric.MAX_CONTEXT_TOKENS,
        }
        works = read_public(SOURCES[trace], data)
        now, before = (resample(works, *size, epoch=epoch, name=trace, **caps) for epoch in (0, 1))
    return now, before.trajectories


async def measure(options: BenchOptions) -> dict[str, Any]:
    """--scale: part of the GPUs. Raises UsageProblem without --data and for --resume with figures
    of other options, PublicTraceError, OSError."""
    if options.data is None:
        raise UsageProblem(
            "real needs --data, the folder of public traces that docs/traces.md names"
        )
    asked = {
        "accelerator": ACCELERATOR,
        "model": LLM,
        "seeds": options.seeds,
        "scale": options.scale,
    }
    sizes = [max(2 * round(0.5 * gpus * (options.scale or 1.0)), 2) for gpus in GPUS]
    cells = _earlier_cells(asked, options)
    missing = [
        key
        for key in itertools.product(sizes, LOADS, SOURCES, TOOL_SHARES)
        if key not in map(_key, cells)
    ]
    while missing:
        gpus, load, name, share = missing.pop(0)
        batches = [_batch(name, gpus, load, share, seed, options.data) for seed in options.seeds]
        cells.append(await play_cell(name, load, batches, options))
        if options.pictures is not None:
            BENCH.write(_figures(asked, cells, len(missing)), options.pictures)
    return _figures(asked, cells, 0)


def _key(cell: Mapping[str, Any]) -> tuple[int, float, str, float]:
    return cell["gpus"], cell["load"], cell["trace"], cell["tools"]


def _earlier_cells(asked: Mapping[str, Any], options: BenchOptions) -> list[dict[str, Any]]:
    if options.earlier is None:
        return []
    for name, value in asked.items():
        if options.earlier.get(name) != value:
            raise UsageProblem(
                f"--resume: {name} is {options.earlier.get(name)} there and {value} here; use the "
                "same"
            )
    return list(options.earlier.get("cells", []))


def _figures(
    asked: Mapping[str, Any], cells: Sequence[Mapping[str, Any]], missing: int
) -> dict[str, Any]:
    ratios = [cell["ratio_to_best_baseline"] for cell in cells]
    return {
        **asked,
        "cells": sorted(
            cells,
            key=lambda cell: (list(SOURCES).index(cell["trace"]), *_key(cell)[:2], -cell["tools"]),
        ),
        "missing": missing,
        "least": min(ratios),
        "geomean": rounded(geometric_mean(ratios)),
    }


async def play_cell(
    name: str, load: float, batches: Sequence[Batch], options: BenchOptions
) -> dict[str, Any]:
    """One cell, from a batch for each seed."""
    first, *others = batches
    what = f"{name}, {first.gpus} GPUs, {load:g} a slot, tools x {first.tool_share:g}"
    if first.trajectories > MOST_FOR_ALL_SEEDS:
        others = []
        found = await play_all(_jobs_of(first, BASELINES[:1]), options, what)
        found |= await play_all(_play_near(found), options, what)
    else:
        found = await play_all(_jobs_of(first), options, what)
    again = {batch: _play_again(batch, found) for batch in others}
    done = await play_all((job for jobs in again.values() for job in jobs), options, what)
    made = [_make_cell(first, found)]
    made += [_make_cell(batch, {job: done[job] for job in jobs}) for batch, jobs in again.items()]
    cell = {"trace": name, "load": load, "tools": first.tool_share, **merge_seeds(made)}
    options.progress.print(f"{what}: {cell['ratio_to_best_baseline']}", highlight=False)
    return cell | {"seeds": [first.seed, *(batch.seed for batch in others)]}


def _batch(name: str, gpus: int, load: float, share: float, seed: int, data: Path) -> Batch:
    prompts = max(round(load * SLOTS * gpus / SAMPLES), 1)
    return Batch(
        SOURCES[name], LLM, gpus, prompts, seed, data=data, tool_share=share, host_share=HOST_SHARE
    )


def _jobs_of(batch: Batch, baselines: Sequence[System] = BASELINES) -> list[Job]:
    degrees = [degree for degree in setting_of(batch).degrees() if degree > 1]
    return [
        *(Job(batch, system) for system in PLANNED),
        *(Job(batch, system, degree) for system in baselines for degree in degrees),
    ]


def _near(found: Mapping[Job, Played]) -> list[Job]:
    """The baselines' jobs that were not much slower than the best of all."""
    best_s = min(one.makespan_s for job, one in found.items() if job.degree)
    return [
        job
        for job, one in found.items()
        if job.degree and one.makespan_s <= (1.0 + MUCH_SLOWER) * best_s
    ]


def _play_near(found: Mapping[Job, Played]) -> list[Job]:
    """The jobs of the other baselines at the degrees that were not much slower with the first
    one."""
    return [replace(job, system=system) for system in BASELINES[1:] for job in _near(found)]


def _play_again(batch: Batch, found: Mapping[Job, Played]) -> list[Job]:
    """The jobs of another seed: of each baseline its best degree of the first seed, and what was
    not much slower there than the best of all, which is every degree that could be the best now."""
    own_best = [
        min((job for job in found if job.system is system), key=lambda job: found[job].makespan_s)
        for system in BASELINES
    ]
    kept = [*(Job(batch, system) for system in PLANNED), *dict.fromkeys([*_near(found), *own_best])]
    return [replace(job, batch=batch) for job in kept]


def _make_cell(batch: Batch, done: Mapping[Job, Played]) -> dict[str, Any]:
    """One cell of one seed."""
    of = {
        system.name: min(
            (done[job] for job in done if job.system is system), key=lambda one: one.makespan_s
        )
        for system in (*BASELINES, *PLANNED)
    }
    degree = {
        system.name: min(
            (job for job in done if job.system is system), key=lambda job: done[job].makespan_s
        ).degree
        for system in BASELINES
    }
    best = min(degree, key=lambda name: of[name].makespan_s)
    treadle_s, least_tokens = of[TREADLE.name].makespan_s, least_prefill_tokens(batch)
    again = {
        name: max(one.prefilled_tokens / least_tokens - 1.0, RECOMPUTED_FLOOR)
        for name, one in of.items()
    }
    bound = find_bound(batch)
    return {
        "gpus": batch.gpus,
        "trajectories": batch.trajectories,
        "treadle_s": treadle_s,
        "best_baseline": best,
        "policy": {name: one.makespan_s for name, one in of.items()},
        "degree": degree,
        "engines": of[TREADLE.name].engines,
        "ratio_to_best_baseline": of[best].makespan_s / treadle_s,
        "ratio_to_oracle": of[ORACLE.name].makespan_s / treadle_s,
        "ratio_to_bound": bound["bound_s"] / treadle_s,
        "ratio_to_siblings": of[SIBLINGS.name].makespan_s / treadle_s,
        "recomputed": again,
        "recomputed_ratio": again[TREADLE.name] / again[best],
        "kv_demand": _kv_demand(batch),
        **bound,
        "p50_s": {name: one.p50_s for name, one in of.items()},
        "last": of[TREADLE.name].last,
        "took_s": math.fsum(one.took_s for one in done.values()),
        "migrations": of[TREADLE.name].migrations,
    }


def least_prefill_tokens(batch: Batch) -> int:
    """Tokens that any rollout prefills: each prompt once, what tools say, and a sampled token a
    turn."""
    works = setting_of(batch).workload.trajectories
    prompts = sum(of[0].prompt_tokens for of in groups(works).values())
    return prompts + sum(step.obs_tokens + 1 for work in works for step in work.steps[:-1])


def _kv_demand(batch: Batch) -> float:
    setting = setting_of(batch)
    at_once = min(batch.trajectories, batch.slots * batch.gpus)
    kv_tokens = batch.gpus * max(model.kv_tokens / model.gpus for model in setting.models)
    return (
        at_once
        * fmean(work.final_context_tokens for work in setting.workload.trajectories)
        / kv_tokens
    )


BENCH = Bench(
    "real",
    "Rollouts of four public traces (--data) on simulated H200s: Treadle that guesses and that is "
    "told, four baselines "
    "at their best degree, and the bound; --scale for fewer GPUs. Takes hours; --resume goes on.",
    measure,
    page=page_values,
    draw=draw,
)
