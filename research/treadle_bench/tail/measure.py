"""What could still shorten the tail of a rollout: speculative decoding.

Public traces as `bench real` draws them, few trajectories and one a slot. With speculation all
engines verify n-gram drafts where that gives more tokens a second.

Keys: `accepted`: tokens that a verification yields, measured (`acceptance.py`). `gains`: tokens a
second with drafts over those without, by engine, batch and ended siblings, where contexts are
short. `cells`: one row a cell, medians over `seeds`. `ratio_to_treadle`: makespan of Treadle
without drafts over that with them. `ratio_to_best_baseline`: the best baseline at its best degree
over Treadle, both with drafts. Above 1 Treadle with drafts is faster. `ratio_to_best_before`: the
same, both without. `ratio_of_baselines`: what drafts give the best baseline.
"""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from treadle_cli.exits import UsageProblem
from treadle_sim.engine_model import Speculation
from treadle_sim.systems import TREADLE

from treadle_bench.bench import Bench, BenchOptions
from treadle_bench.heddle12.measure import merge_seeds
from treadle_bench.real.measure import BASELINES, HOST_SHARE, LLM, SOURCES
from treadle_bench.rollouts import (
    ACCELERATOR,
    SAMPLES,
    SLOTS,
    Batch,
    Job,
    Played,
    play_all,
    setting_of,
)
from treadle_bench.summary import rounded
from treadle_bench.tail.acceptance import measure_acceptance, speculation_of
from treadle_bench.tail.page import draw, page_values

TRACES = ("swebench", "claude_code", "tau")
LOADS = (0.3, 1.0)
TOOL_SHARES = (1.0, 0.1)
SMALL_GPUS, LARGE_GPUS = 8, 64
# Cells on LARGE_GPUS: trace, load, tools. The others would take an hour.
LARGE = (("claude_code", 0.3, 1.0), ("claude_code", 0.3, 0.1), ("tau", 0.3, 0.1))
BATCHES = (1, 8, 32, 64, 128)  # of `gains`


async def measure(options: BenchOptions) -> dict[str, Any]:
    """--scale: part of the GPUs. Raises UsageProblem without --data, PublicTraceError, OSError."""
    if options.data is None:
        raise UsageProblem(
            "tail needs --data, the folder of public traces that docs/traces.md names"
        )
    accepted = measure_acceptance(options.data)
    speculation = speculation_of(accepted)
    wanted = [(*cell, SMALL_GPUS) for cell in itertools.product(TRACES, LOADS, TOOL_SHARES)]
    wanted += [(*cell, LARGE_GPUS) for cell in LARGE]
    rows: list[dict[str, Any]] = []
    for trace, load, tools, all_gpus in wanted:
        gpus = max(2 * round(0.5 * all_gpus * (options.scale or 1.0)), 2)
        batches = [
            make_batch(trace, gpus, load, tools, seed, options.data) for seed in options.seeds
        ]
        rows.append(await play_cell(trace, load, batches, speculation, options))
    first = make_batch(TRACES[0], SMALL_GPUS, LOADS[0], 1.0, options.seed, options.data)
    return {
        "accelerator": ACCELERATOR,
        "model": LLM,
        "seeds": options.seeds,
        "scale": options.scale,
        "accepted": accepted,
        "gains": find_gains(first, speculation),
        "cells": rows,
    }


def make_batch(trace: str, gpus: int, load: float, tools: float, seed: int, data: Path) -> Batch:
    """As `bench real` draws it. load: trajectories for each slot."""
    prompts = max(round(load * SLOTS * gpus / SAMPLES), 1)
    return Batch(
        SOURCES[trace], LLM, gpus, prompts, seed, data=data, tool_share=tools, host_share=HOST_SHARE
    )


async def play_cell(
    trace: str,
    load: float,
    batches: Sequence[Batch],
    speculation: Speculation,
    options: BenchOptions,
) -> dict[str, Any]:
    """Play one cell with and without drafts, and return its row, from a batch for each seed."""
    first = batches[0]
    what = f"{trace}, {first.gpus} GPUs, {load:g} a slot, tools x {first.tool_share:g}"
    jobs = {batch: jobs_of(batch, speculation) for batch in batches}
    done = await play_all((job for of in jobs.values() for job in of), options, what)
    merged = merge_seeds([_make_row(batch, speculation, done) for batch in batches])
    options.progress.print(f"{what}: {merged['ratio_to_treadle']}", highlight=False)
    return {"trace": trace, "load": load, "tools": first.tool_share, **merged}


def jobs_of(batch: Batch, speculation: Speculation) -> list[Job]:
    """Treadle, and every baseline at each degree, with and without drafts."""
    drafting = replace(batch, speculation=speculation)
    degrees = [degree for degree in setting_of(batch).degrees() if degree > 1]
    return [Job(batch, TREADLE), Job(drafting, TREADLE)] + [
        Job(each, system, degree)
        for each in (batch, drafting)
        for system in BASELINES
        for degree in degrees
    ]


def _make_row(batch: Batch, speculation: Speculation, done: Mapping[Job, Played]) -> dict[str, Any]:
    """Compare what one seed took."""
    drafting = replace(batch, speculation=speculation)
    before, after = done[Job(batch, TREADLE)], done[Job(drafting, TREADLE)]
    plain, rival = _best_baseline(batch, done), _best_baseline(drafting, done)
    return {
        "gpus": batch.gpus,
        "trajectories": batch.trajectories,
        "ratio_to_treadle": before.makespan_s / after.makespan_s,
        "ratio_to_best_baseline": done[rival].makespan_s / after.makespan_s,
        "ratio_to_best_before": done[plain].makespan_s / before.makespan_s,
        "ratio_of_baselines": done[plain].makespan_s / done[rival].makespan_s,
        "treadle_s": before.makespan_s,
        "drafting_s": after.makespan_s,
        "engines": before.engines,
        "best_baseline": rival.system.name,
        "degree": rival.degree,
        "best_baseline_s": done[rival].makespan_s,
        "p50_s": {
            "treadle": before.p50_s,
            "drafting": after.p50_s,
            "best_baseline": done[rival].p50_s,
        },
        "last": after.last,
    }


def _best_baseline(batch: Batch, done: Mapping[Job, Played]) -> Job:
    return min(
        (job for job in done if job.batch == batch and job.degree),
        key=lambda job: done[job].makespan_s,
    )


def find_gains(batch: Batch, speculation: Speculation) -> list[dict[str, Any]]:
    """Tokens a second with the best length of draft over those without, of contexts so short that
    reading KV takes no time; longer ones gain more. drafts: 0 where none gains. needed: tokens that
    a verification of the shortest draft must yield to gain anything."""
    most, shortest = len(speculation.accepted_tokens[0]) - 1, min(speculation.draft_tokens)
    rows = []
    for model, n, siblings in itertools.product(setting_of(batch).models, BATCHES, (0, most)):
        costs = {
            drafts: model.curve.decode_s(n * (drafts + 1))
            for drafts in (0, *speculation.draft_tokens)
        }
        gains = {
            drafts: speculation.accepted(drafts, siblings) * costs[0] / costs[drafts]
            for drafts in costs
        }
        drafts = max(gains, key=lambda each: gains[each])
        row = {"gpus": model.gpus, "batch": n, "siblings": siblings, "drafts": drafts}
        rows.append(row | rounded({"gain": gains[drafts], "needed": costs[shortest] / costs[0]}))
    return rows


BENCH = Bench(
    "tail",
    "What could still shorten a rollout's tail (--data): speculative decoding, with accepted "
    "lengths measured on recorded samples; simulated H200s. Takes about 10 minutes a seed.",
    measure,
    page=page_values,
    draw=draw,
)
