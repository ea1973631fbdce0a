"""Groups that keep their first samples: Treadle that knows how many a group keeps, against Treadle
that does not, in the simulator.

Each group ends once so many of its samples have finished, and its others are ended (RollArt's
redundant rollouts; DARTS' early stopping of saturated prompts, §4.3.1). Rollouts of public traces
in --data, and of two parametric workloads, run on GPUS engines of one H200 with SLOTS slots, with
LOAD samples for each slot. (Of claude_code, single contexts fit on no such engine.)

Keys of a cell, over `seeds`: `ratio`: makespan without the knowledge over the makespan with it,
geometric mean; `spread`: its range. `mean_ratio`: the same of the mean end of a trajectory.
`tokens_ratio`: of all tokens that were sampled. `least`, `geomean`: of the cells' ratios with the
predictor that ships, siblings.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, geometric_mean
from typing import Any

from treadle_core.tuning import Tuning
from treadle_sim.cluster import Cluster
from treadle_sim.driver import Driver
from treadle_sim.engine_model import engine_model
from treadle_sim.predictors import make_predictor
from treadle_sim.systems import TREADLE

from treadle_bench.bench import Bench, BenchOptions, Figures
from treadle_bench.real.measure import HOST_SHARE, LLM, PARAMETRIC, SOURCES, two_epochs
from treadle_bench.rollouts import ACCELERATOR, play_each
from treadle_bench.summary import rounded

GPUS, SLOTS, LOAD = 4, 20, 3
TOO_LONG = ("claude_code",)
GROUPS = ((16, 8), (8, 6))  # samples that begin, and that are kept
SHIPPED = "siblings"
PREDICTORS = (SHIPPED, "noisy")


@dataclass(frozen=True, slots=True)
class Job:
    """One rollout. told: whether the scheduler knows how many samples a group keeps."""

    trace: str
    seed: int
    data: Path | None
    samples: int
    keep: int
    predictor: str
    told: bool


@dataclass(frozen=True, slots=True)
class Ended:
    """When the rollout and, in the mean, a trajectory ended, and the tokens that were sampled."""

    makespan_s: float
    mean_s: float
    tokens: int


async def measure(options: BenchOptions) -> dict[str, Any]:
    """Without --data the two parametric workloads alone. Raises PublicTraceError, OSError."""
    public = [trace for trace in SOURCES if trace not in TOO_LONG]
    traces = [*(public if options.data is not None else ()), *PARAMETRIC]
    keys = [
        (trace, *sizes, predictor)
        for trace in traces
        for sizes in GROUPS
        for predictor in PREDICTORS
    ]
    jobs = {
        (key, told): [
            Job(key[0], seed, options.data, *key[1:], told=told) for seed in options.seeds
        ]
        for key in keys
        for told in (False, True)
    }
    every = [job for some in jobs.values() for job in some]
    done = await play_each(every, play_job, options, "groups")
    cells = [
        {
            "trace": key[0],
            "samples": key[1],
            "keep": key[2],
            "predictor": key[3],
            **_compare(*([done[job] for job in jobs[key, told]] for told in (False, True))),
        }
        for key in keys
    ]
    ratios = [cell["ratio"] for cell in cells if cell["predictor"] == SHIPPED]
    return {
        "accelerator": ACCELERATOR,
        "model": LLM,
        "engines": GPUS,
        "slots": SLOTS,
        "load": LOAD,
        "seeds": options.seeds,
        "cells": cells,
        "least": min(ratios),
        "geomean": rounded(geometric_mean(ratios)),
    }


def _compare(today: Sequence[Ended], told: Sequence[Ended]) -> dict[str, Any]:
    pairs = list(zip(today, told, strict=True))
    ratios = [before.makespan_s / after.makespan_s for before, after in pairs]
    return rounded(
        {
            "ratio": geometric_mean(ratios),
            "spread": [min(ratios), max(ratios)],
            "mean_ratio": geometric_mean(before.mean_s / after.mean_s for before, after in pairs),
            "tokens_ratio": geometric_mean(before.tokens / after.tokens for before, after in pairs),
        }
    )


def play_job(job: Job) -> Ended:
    """Play one rollout in this process."""
    prompts = round(LOAD * SLOTS * GPUS / job.samples)
    work, before = two_epochs(job.trace, LLM, prompts, job.samples, job.seed, job.data)
    now = replace(work, group_keep=job.keep)
    model = engine_model(LLM, ACCELERATOR, 1, SLOTS)
    model = replace(model, host_kv_tokens=int(HOST_SHARE * model.kv_tokens))
    driver = Driver(
        now,
        Cluster((model,) * GPUS),
        TREADLE.policy,
        Tuning(),
        make_predictor(job.predictor, now, job.seed, before),
        call_tokens=TREADLE.call_tokens,
        paced=TREADLE.paced,
        tells_groups=job.told,
    )
    times = driver.run().times
    return Ended(
        max(each.finished_s for each in times),
        fmean(each.finished_s for each in times),
        sum(each.gen_tokens for each in times),
    )


def page(figures: Figures) -> Figures:
    """Return what the page says beside the figures: the cells of each trace and size, by
    predictor."""
    rows: dict[tuple[str, int], dict[str, Any]] = {}
    for cell in figures["cells"]:
        rows.setdefault((cell["trace"], cell["samples"]), {})[cell["predictor"]] = cell
    return {"rows": list(rows.values())}


BENCH = Bench(
    "groups",
    "Rollouts whose groups keep their first samples, with and without the scheduler's knowledge of "
    "it, simulated, on public traces with --data. Takes 15 minutes with 3 repeats.",
    measure,
    page=page,
)
