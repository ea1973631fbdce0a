"""Shaping: which samples are trained, how many are started and how long they may be; what it gains
and what it costs.

None of these figures is a makespan of the same work: every scheme here changes which samples are
trained, in which order, or how stale they are. Simulated engines, as in every figure; a model of
learning that is stated as one (`treadle_bench.shaping.population`).

Keys: `cells`: rows of DARTS' Tables 3 to 5, by `table`, `name` and `mode` (`training.py`);
`speedup`: mean seconds of verl's steps over those of the scheme's. `darts_vs_verl`,
`darts_vs_tail_batching`: of Table 3's setting in mode `gradient`; `headline` has all modes. `fit`:
of the imitation. `sensitivity`: of the constants of learning. `patches`: rows of the lesson;
`patches_vs_static`, `patches_vs_paged`: seconds with all patches over those without. `latency`,
`redundancy`, `bounds`: RollArt's Figures 12a, 12b and 13.
"""

import asyncio
import multiprocessing
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ProcessPoolExecutor
from typing import Any, TypeVar

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from treadle_bench.bench import Bench, BenchOptions
from treadle_bench.shaping.agentic import (
    BOUNDS,
    LATENCIES,
    MORE_GROUPS,
    SIZES,
    bound_rows,
    latency_rows,
    measure_bound,
    measure_latency,
    measure_redundancy,
    redundancy_rows,
)
from treadle_bench.shaping.page import draw, page_values
from treadle_bench.shaping.patches import DYNAMIC, measure_patches
from treadle_bench.shaping.training import (
    GRADIENT,
    MODES,
    RATE,
    TAIL,
    Job,
    cells,
    fit_imitation,
    fit_jobs,
    in_mode,
    play_job,
    row_of,
    sensitivity,
)
from treadle_bench.summary import median_of, range_of

Key = TypeVar("Key")
QUICK_SHARE = 0.125  # of groups, prompts and engines


async def measure(options: BenchOptions) -> dict[str, Any]:
    """--traces does not apply. --scale: of groups, prompts and engines."""
    share = QUICK_SHARE if options.quick else options.scale or 1.0
    seeds = options.seeds
    to_fit = fit_jobs(share)
    done = await play(
        play_job, ((job, (job,)) for pair in to_fit.values() for job in pair), options, "fit"
    )
    fit = fit_imitation({key: _speedup(pair, done) for key, pair in to_fit.items()})
    tables = {
        (table, name, mode): tuple(
            [in_mode(job, mode, fit["imitation"]) for job in jobs] for jobs in pair
        )
        for table, of in cells(seeds, share).items()
        for name, pair in of.items()
        for mode in MODES
    }
    varied = sensitivity(options.seed, fit["imitation"], share)
    wanted = [job for pair in (*tables.values(), *varied.values()) for jobs in pair for job in jobs]
    done |= await play(
        play_job,
        ((job, (job,)) for job in dict.fromkeys(wanted) if job not in done),
        options,
        "steps",
    )
    rows = [row_of(*key, (pair[0], pair[1]), done) for key, pair in tables.items()]
    patches = measure_patches(seeds, share)
    all_patches = next(row for row in patches if row["name"] == DYNAMIC)
    headline = _headline(rows, tables, done)
    return {
        "darts_vs_verl": headline[GRADIENT]["darts_vs_verl"],
        "darts_vs_tail_batching": headline[GRADIENT]["darts_vs_tail_batching"],
        "patches_vs_static": all_patches["relative"],
        "patches_vs_paged": all_patches["to_paged"],
        "headline": headline,
        "seeds": seeds,
        "repeats": options.repeats,
        "scale": options.scale,
        "fit": fit,
        "rate": RATE,
        "cells": rows,
        "sensitivity": {
            name: round(_speedup((pair[0][0], pair[1][0]), done), 4)
            for name, pair in varied.items()
        },
        "patches": patches,
        "latency": latency_rows(
            await _by_seed(measure_latency, ((each,) for each in LATENCIES), options, share)
        ),
        "redundancy": redundancy_rows(
            await _by_seed(
                measure_redundancy,
                ((more, size) for more in MORE_GROUPS for size in SIZES),
                options,
                share,
            )
        ),
        "bounds": bound_rows(
            await _by_seed(measure_bound, ((bound,) for bound in BOUNDS), options, share)
        ),
    }


def _speedup(pair: tuple[Job, Job], done: Mapping[Job, Any]) -> float:
    """Seconds of a step of verl, the second of the pair, over those of the first."""
    ours, verl = (done[job]["seconds"] for job in pair)
    return float(verl / ours)


def _headline(
    rows: list[dict[str, Any]], tables: Mapping[Any, Any], done: Mapping[Job, Any]
) -> dict[str, Any]:
    """By mode: DARTS, and with a tuned budget, over verl and over tail batching."""
    found: dict[str, Any] = {}
    for mode in MODES:
        tail = [done[job]["seconds"] for job in tables["ablation", TAIL.name, mode][0]]
        found[mode] = {}
        for key, name in (("darts", "DARTS"), ("tuned", "DARTS, tuned budget")):
            own = [done[job]["seconds"] for job in tables["ablation", name, mode][0]]
            row = next(row for row in rows if (row["name"], row["mode"]) == (name, mode))
            ratios = [slow / fast for slow, fast in zip(tail, own, strict=True)]
            found[mode] |= {
                f"{key}_vs_verl": row["speedup"],
                f"{key}_vs_verl_spread": row["spread"],
            }
            found[mode] |= {f"{key}_vs_tail_batching": median_of(ratios)}
            found[mode] |= {f"{key}_vs_tail_batching_spread": range_of(ratios)}
    return found


async def _by_seed(
    call: Callable[..., dict[str, float]],
    points: Iterable[tuple[Any, ...]],
    options: BenchOptions,
    share: float,
) -> dict[tuple[Any, ...], list[dict[str, float]]]:
    """What the call gives at each point for each seed, in the order of seeds."""
    points = list(points)
    calls = (((point, seed), (*point, seed, share)) for point in points for seed in options.seeds)
    done = await play(call, calls, options, call.__name__.removeprefix("measure_"))
    return {point: [done[point, seed] for seed in options.seeds] for point in points}


async def play(
    call: Callable[..., Any],
    calls: Iterable[tuple[Key, tuple[Any, ...]]],
    options: BenchOptions,
    what: str,
) -> dict[Key, Any]:
    """Make calls in child processes, `options.workers` at a time, and in this process with one
    worker."""
    wanted = dict(calls)
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=options.progress, transient=True) as progress:
        task = progress.add_task(what, total=len(wanted))
        if options.workers <= 1:
            return {key: call(*wanted[key]) for key in progress.track(wanted, task_id=task)}
        loop = asyncio.get_running_loop()
        with ProcessPoolExecutor(
            options.workers, mp_context=multiprocessing.get_context("spawn")
        ) as pool:

            async def play_one(arguments: tuple[Any, ...]) -> Any:
                found = await loop.run_in_executor(pool, call, *arguments)
                progress.advance(task)
                return found

            async with asyncio.TaskGroup() as group:
                tasks = {
                    key: group.create_task(play_one(arguments)) for key, arguments in wanted.items()
                }
        return {key: each.result() for key, each in tasks.items()}


BENCH = Bench(
    "shaping",
    "DARTS' and RollArt's tables and a lesson's patches: which samples are trained, how many are "
    "started and how long they may be; with a model of learning. Takes about 20 minutes.",
    measure,
    page=page_values,
    draw=draw,
    decides=("core/treadle_core/rollouts", "research/treadle_bench/shaping"),
)
