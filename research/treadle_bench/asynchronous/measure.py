"""Asynchronous training: rollouts that never stop, for a trainer that takes batches of groups and
publishes weights, with and without the rules of `treadle_core.rollouts.pacing`.

Groups of 8 samples of six workloads run on four simulated engines of one H200 with SLOTS slots. A
batch has two samples for each slot. `trainer`: its time to train one, over the time in which full
engines decode one. A group is dropped, and its tokens are lost, once the weights are more than
`bound` versions newer than those of its first prefill. `fill`: samples that may run or wait, for
each slot; `counted`: whether a group counts with all of its samples until the last has ended, or
with those that have not. Each baseline has the best of its fills, and no rules; what ships has one
fill for all cells.

Keys of a cell, means over `seeds`: `samples_h`: trained samples an hour. `neutral_h`: trained
tokens an hour over the workload's mean length: samples alone would reward dropping long ones.
`dropped_share`: of tokens. `staleness_mean`: versions. `bias`: mean length of trained samples over
the workload's, less 1. `upper_neutral_h`: engines always full, nothing dropped, and no more than
the trainer takes. `ratio_samples`, `ratio_neutral`: over the baseline that is best by that figure.
`geomean_neutral_bound1`, `geomean_neutral_bound2`, `least_neutral`: of the policy SHIPPED.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from statistics import fmean, geometric_mean
from typing import Any

from treadle_core.tuning import Tuning
from treadle_sim.cluster import Cluster
from treadle_sim.driver import Driver
from treadle_sim.engine_model import engine_model
from treadle_sim.predictors import make_predictor
from treadle_sim.systems import (
    LEAST_ATTAINED,
    PAUSING,
    SLIME,
    STICKY,
    TREADLE,
    TREADLE_ASYNCHRONOUS,
    System,
)
from treadle_sim.training import Counted, Trained, TrainingPlan
from treadle_sim.workloads.workload import TrajectoryWork, Workload

from treadle_bench.bench import Bench, BenchOptions
from treadle_bench.real.measure import HOST_SHARE, LLM, PARAMETRIC, SOURCES, two_epochs
from treadle_bench.rollouts import ACCELERATOR, play_each
from treadle_bench.summary import rounded

GPUS, SLOTS, GROUP = 4, 20, 8
SAMPLES_A_SLOT = 2  # of a batch
BOUNDS, TRAINERS = (1, 2, 4), (0.5, 1.0)
BATCHES, WARM_UP = 10, 6
# Groups that a workload must have, over those of its batches: the rest may be dropped.
SPARE_GROUPS = 2.2
SPARES = 3  # samples of a prompt that may replace others
ENDLESS = 1_000_000  # a bound that nothing misses
FILL = 1.3  # of what ships
# A way that has less than this share of the best baseline with the first seed is played with no
# other.
NEAR = 0.9


@dataclass(frozen=True, slots=True)
class Way:
    """A way to run an asynchronous rollout. counted, paced, late_z: see TrainingPlan. once: with
    the first seed alone, as its plans or predictions take minutes."""

    name: str
    system: System
    fills: tuple[float, ...] = (1.0, 2.0)
    predictor: str = "none"
    counted: Counted = Counted.GROUPS
    paced: bool = False
    late_z: float = math.inf
    once: bool = False


SAMPLES = Counted.SAMPLES
BASELINES = (
    Way("sticky", STICKY),
    Way("sticky_samples", STICKY, (1.0,), counted=SAMPLES),
    Way("least_load", SLIME),
    Way("least_attained", LEAST_ATTAINED),
    Way("pausing", PAUSING),
)
SHIPPED = "paced"
OURS = TREADLE_ASYNCHRONOUS
WAYS = (
    Way("default_policy", TREADLE, (2.0,), "siblings", once=True),
    Way("free", OURS, (FILL,), counted=SAMPLES),
    Way(SHIPPED, OURS, (FILL,), counted=SAMPLES, paced=True),
    Way("paced_late", OURS, (FILL,), "siblings", SAMPLES, paced=True, late_z=0.5, once=True),
)


@dataclass(frozen=True, slots=True)
class Job:
    """One training. train_s: of a batch."""

    trace: str
    seed: int
    data: Path | None
    way: Way
    fill: float
    bound: int
    train_s: float
    batches: int = BATCHES


async def measure(options: BenchOptions) -> dict[str, Any]:
    """Without --data the two parametric workloads alone. --quick: one bound, few batches. Raises
    PublicTraceError, OSError."""
    traces = [*(SOURCES if options.data is not None else ()), *PARAMETRIC]
    bounds, batches = (BOUNDS[:1], 3) if options.quick else (BOUNDS, BATCHES)
    full = {
        (trace, seed): Job(
            trace, seed, options.data, Way("full", STICKY), 3.0, ENDLESS, 0.0, batches
        )
        for trace in traces
        for seed in options.seeds
    }
    upper = await play_each(full.values(), play_job, options, "full engines")
    cells: list[dict[str, Any]] = []
    for trace in traces:
        for bound in bounds:
            for trainer in TRAINERS:
                best = {key: upper[job] for key, job in full.items() if key[0] == trace}
                cells += await _play_cell(trace, bound, trainer, best, batches, options)
    ratios = {
        bound: [
            cell["ratio_neutral"]
            for cell in cells
            if cell["policy"] == SHIPPED and cell["bound"] == bound
        ]
        for bound in bounds
    }
    return {
        "accelerator": ACCELERATOR,
        "model": LLM,
        "engines": GPUS,
        "slots": SLOTS,
        "seeds": options.seeds,
        "shipped": SHIPPED,
        "cells": cells,
        "least_neutral": min(min(of_bound) for of_bound in ratios.values()),
        **{
            f"geomean_neutral_bound{bound}": rounded(geometric_mean(of_bound))
            for bound, of_bound in ratios.items()
        },
    }


async def _play_cell(
    trace: str,
    bound: int,
    trainer: float,
    upper: Mapping[tuple[str, int], Trained],
    batches: int,
    options: BenchOptions,
) -> list[dict[str, Any]]:
    """The rows of all ways of one cell."""
    jobs: dict[tuple[Way, float], list[Job]] = {
        (way, fill): [
            Job(trace, seed, options.data, way, fill, bound, trainer * one.step_s, batches)
            for (_, seed), one in upper.items()
        ]
        for way in (*BASELINES, *WAYS)
        for fill in way.fills
    }
    what = f"{trace}, bound {bound}, trainer {trainer:g}"
    first = {key: some[0] for key, some in jobs.items()}
    done = await play_each(first.values(), play_job, options, what)
    best = {
        figure: max(
            getattr(done[job], figure) for (way, _), job in first.items() if way in BASELINES
        )
        for figure in ("samples_h", "neutral_h")
    }
    for (way, fill), job in first.items():
        near = any(getattr(done[job], figure) >= NEAR * best[figure] for figure in best)
        if way.once or (not near and way.name != SHIPPED):
            jobs[way, fill] = [job]
    done |= await play_each(
        (job for some in jobs.values() for job in some[1:]), play_job, options, what
    )
    rows = [
        _row(trace, bound, trainer, way, fill, [done[job] for job in some])
        for (way, fill), some in jobs.items()
    ]
    names = {way.name for way in BASELINES}
    base = {
        key: max(row[key] for row in rows if row["policy"] in names and row["seeds"] == len(upper))
        for key in ("samples_h", "neutral_h")
    }
    taken_h = SAMPLES_A_SLOT * GPUS * SLOTS * 3600.0
    limit = fmean(min(one.neutral_h, taken_h / (trainer * one.step_s)) for one in upper.values())
    for row in rows:
        row["upper_neutral_h"] = rounded(limit)
        row["ratio_samples"] = rounded(row["samples_h"] / base["samples_h"])
        row["ratio_neutral"] = rounded(row["neutral_h"] / base["neutral_h"])
    shipped = next(row for row in rows if row["policy"] == SHIPPED)
    options.progress.print(f"{what}: {shipped['ratio_neutral']}", highlight=False)
    return rows


def _row(
    trace: str, bound: int, trainer: float, way: Way, fill: float, found: Sequence[Trained]
) -> dict[str, Any]:
    return {
        "trace": trace,
        "bound": bound,
        "trainer": trainer,
        "fill": fill,
        "counted": way.counted.value,
        "policy": way.name,
        "seeds": len(found),
        **rounded(
            {
                "samples_h": fmean(one.samples_h for one in found),
                "neutral_h": fmean(one.neutral_h for one in found),
                "neutral_h_range": [fun(one.neutral_h for one in found) for fun in (min, max)],
                "dropped_share": fmean(one.dropped_share for one in found),
                "staleness_mean": fmean(one.staleness for one in found),
                "bias": fmean(one.bias for one in found),
            }
        ),
    }


def play_job(job: Job) -> Trained:
    """Play one training in this process."""
    groups = SAMPLES_A_SLOT * SLOTS * GPUS // GROUP
    prompts = math.ceil(groups * (job.batches + WARM_UP + 3) * SPARE_GROUPS)
    now, before = _make_workload(job.trace, prompts, job.seed, job.data)
    model = engine_model(LLM, ACCELERATOR, 1, SLOTS)
    model = replace(model, host_kv_tokens=int(HOST_SHARE * model.kv_tokens))
    plan = TrainingPlan(
        groups,
        job.train_s,
        round(job.fill * SLOTS * GPUS),
        job.bound,
        job.batches,
        WARM_UP,
        counted=job.way.counted,
        spares=SPARES,
        paced=job.way.paced,
        late_z=job.way.late_z,
    )
    name, system = job.way.predictor, job.way.system
    driver = Driver(
        now,
        Cluster((model,) * GPUS),
        system.policy,
        Tuning(),
        None if name == "none" else make_predictor(name, now, job.seed, before),
        call_tokens=system.call_tokens,
        paced=system.paced,
        training=plan,
    )
    driver.run()
    assert driver.training is not None
    return driver.training.result()


@lru_cache(maxsize=2)
def _make_workload(
    trace: str, prompts: int, seed: int, data: Path | None
) -> tuple[Workload, tuple[TrajectoryWork, ...]]:
    """Return the groups of a training, none of which comes twice, and those of an earlier one."""
    return two_epochs(trace, LLM, prompts, GROUP + SPARES, seed, data)


BENCH = Bench(
    "async",
    "Asynchronous training on simulated H200s: trained samples and tokens an hour by bound, "
    "trainer and policy, on public traces with --data. Takes hours; --quick takes minutes.",
    measure,
)
