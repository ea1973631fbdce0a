"""What could still shorten the tail of a rollout: speculative decoding, and merging engines that have fallen idle.

Public traces as `bench real` draws them, few trajectories and one a slot. Variants of Treadle: `speculation`, all
engines verify n-gram drafts where that gives more tokens a second; `merging-2s`, `merging-7s`, idle engines become one
of a higher degree on the same GPUs after a switch of so many seconds; `both`: speculation and merging in 2 s.

Keys: `accepted`: tokens that a verification yields, measured (`acceptance.py`). `gains`: tokens a second with drafts
over those without, by engine, batch and ended siblings, where contexts are short. `cells`: one row a cell and variant,
medians over `seeds`. `ratio_to_treadle`: makespan of Treadle without the variant over that with it;
`ratio_to_best_baseline`: the best baseline at its best degree, with the same speculation, over Treadle with the
variant. Above 1 Treadle with the variant is faster. `ratio_to_best_before`: the same without any variant.
`ratio_of_baselines`: what the variant's speculation gives the best baseline. `merges`: engines that were merged into
being. `draining`: as `cells`, where engines with at most DRAINED trajectories are merged too, which interrupts them.
"""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from treadle_cli.problems import UsageProblem
from treadle_sim.engine_model import Speculation
from treadle_sim.merging import Merging
from treadle_sim.systems import TREADLE, System

from treadle_bench.bench import Bench, BenchOptions
from treadle_bench.heddle12.measure import merge_seeds
from treadle_bench.real.measure import BASELINES, HOST_SHARE, LLM, SOURCES
from treadle_bench.rollouts import ACCELERATOR, SAMPLES, SLOTS, Batch, Job, Played, play_all, setting_of
from treadle_bench.summary import rounded
from treadle_bench.tail.acceptance import measure_acceptance, speculation_of
from treadle_bench.tail.page import draw, page_values

TRACES = ("swebench", "claude_code", "tau")
LOADS = (0.3, 1.0)
TOOL_SHARES = (1.0, 0.1)
SMALL_GPUS, LARGE_GPUS = 8, 64
# Cells on LARGE_GPUS: trace, load, tools. The others would take an hour.
LARGE = (("claude_code", 0.3, 1.0), ("claude_code", 0.3, 0.1), ("tau", 0.3, 0.1))
DRAINED = 4
BATCHES = (1, 8, 32, 64, 128)  # of `gains`


def _merging(name: str, switch_s: float, most_left: int = 0) -> System:
    return replace(TREADLE, name=name, title=f"Treadle, {name}", merging=Merging(switch_s, most_left))


MERGING_2S, MERGING_7S = _merging("merging-2s", 2.0), _merging("merging-7s", 7.0)
DRAINING = _merging("draining-2s", 2.0, DRAINED)
# Of each variant: the system, and whether engines speculate.
VARIANTS: Mapping[str, tuple[System, bool]] = {
    "speculation": (TREADLE, True),
    "merging-2s": (MERGING_2S, False),
    "merging-7s": (MERGING_7S, False),
    "both": (MERGING_2S, True),
    "draining-2s": (DRAINING, False),
}


async def measure(options: BenchOptions) -> dict[str, Any]:
    """--scale: part of the GPUs. Raises UsageProblem without --data, PublicTraceError, OSError."""
    if options.data is None:
        raise UsageProblem("tail needs --data, the folder of public traces that docs/traces.md names")
    accepted = measure_acceptance(options.data)
    speculation = speculation_of(accepted)
    wanted = [(*cell, SMALL_GPUS) for cell in itertools.product(TRACES, LOADS, TOOL_SHARES)]
    wanted += [(*cell, LARGE_GPUS) for cell in LARGE]
    rows: list[dict[str, Any]] = []
    for trace, load, tools, all_gpus in wanted:
        gpus = max(2 * round(0.5 * all_gpus * (options.scale or 1.0)), 2)
        batches = [make_batch(trace, gpus, load, tools, seed, options.data) for seed in options.seeds]
        rows += await play_cell(trace, load, batches, speculation, options)
    first = make_batch(TRACES[0], SMALL_GPUS, LOADS[0], 1.0, options.seed, options.data)
    return {
        "accelerator": ACCELERATOR,
        "model": LLM,
        "seeds": options.seeds,
        "scale": options.scale,
        "drained": DRAINED,
        "accepted": accepted,
        "gains": find_gains(first, speculation),
        "cells": [row for row in rows if row["variant"] != DRAINING.name],
        "draining": [row for row in rows if row["variant"] == DRAINING.name],
    }


def make_batch(trace: str, gpus: int, load: float, tools: float, seed: int, data: Path) -> Batch:
    """As `bench real` draws it. load: trajectories for each slot."""
    prompts = max(round(load * SLOTS * gpus / SAMPLES), 1)
    return Batch(SOURCES[trace], LLM, gpus, prompts, seed, data=data, tool_share=tools, host_share=HOST_SHARE)


async def play_cell(
    trace: str, load: float, batches: Sequence[Batch], speculation: Speculation, options: BenchOptions
) -> list[dict[str, Any]]:
    """The rows of one cell, from a batch for each seed."""
    first = batches[0]
    what = f"{trace}, {first.gpus} GPUs, {load:g} a slot, tools x {first.tool_share:g}"
    jobs = {batch: jobs_of(batch, speculation) for batch in batches}
    done = await play_all((job for of in jobs.values() for job in of), options, what)
    rows = []
    for variant in VARIANTS:
        merged = merge_seeds([_make_row(batch, variant, speculation, done) for batch in batches])
        rows.append({"trace": trace, "load": load, "tools": first.tool_share, "variant": variant, **merged})
    says = ", ".join(f"{row['variant']} {row['ratio_to_treadle']}" for row in rows)
    options.progress.print(f"{what}: {says}", highlight=False)
    return rows


def jobs_of(batch: Batch, speculation: Speculation) -> list[Job]:
    """Treadle with and without each variant, and every baseline with and without drafts at each degree."""
    drafting = replace(batch, speculation=speculation)
    degrees = [degree for degree in setting_of(batch).degrees() if degree > 1]
    jobs = [Job(batch, TREADLE)]
    jobs += [Job(drafting if speculates else batch, system) for system, speculates in VARIANTS.values()]
    return jobs + [
        Job(each, system, degree) for each in (batch, drafting) for system in BASELINES for degree in degrees
    ]


def _make_row(batch: Batch, variant: str, speculation: Speculation, done: Mapping[Job, Played]) -> dict[str, Any]:
    """One variant of one seed."""
    system, speculates = VARIANTS[variant]
    played_on = replace(batch, speculation=speculation) if speculates else batch
    before, after = done[Job(batch, TREADLE)], done[Job(played_on, system)]
    plain, rival = _best_baseline(batch, done), _best_baseline(played_on, done)
    return {
        "gpus": batch.gpus,
        "trajectories": batch.trajectories,
        "ratio_to_treadle": before.makespan_s / after.makespan_s,
        "ratio_to_best_baseline": done[rival].makespan_s / after.makespan_s,
        "ratio_to_best_before": done[plain].makespan_s / before.makespan_s,
        "ratio_of_baselines": done[plain].makespan_s / done[rival].makespan_s,
        "treadle_s": before.makespan_s,
        "variant_s": after.makespan_s,
        "engines": before.engines,
        "best_baseline": rival.system.name,
        "degree": rival.degree,
        "best_baseline_s": done[rival].makespan_s,
        "p50_s": {"treadle": before.p50_s, "variant": after.p50_s, "best_baseline": done[rival].p50_s},
        "last": after.last,
        "merges": after.merges,
    }


def _best_baseline(batch: Batch, done: Mapping[Job, Played]) -> Job:
    return min((job for job in done if job.batch == batch and job.degree), key=lambda job: done[job].makespan_s)


def find_gains(batch: Batch, speculation: Speculation) -> list[dict[str, Any]]:
    """Tokens a second with the best length of draft over those without, of contexts so short that reading KV takes no
    time; longer ones gain more. drafts: 0 where none gains. needed: tokens that a verification of the shortest draft
    must yield to gain anything."""
    most, shortest = len(speculation.accepted_tokens[0]) - 1, min(speculation.draft_tokens)
    rows = []
    for model, n, siblings in itertools.product(setting_of(batch).models, BATCHES, (0, most)):
        costs = {drafts: model.curve.decode_s(n * (drafts + 1)) for drafts in (0, *speculation.draft_tokens)}
        gains = {drafts: speculation.accepted(drafts, siblings) * costs[0] / costs[drafts] for drafts in costs}
        drafts = max(gains, key=lambda each: gains[each])
        row = {"gpus": model.gpus, "batch": n, "siblings": siblings, "drafts": drafts}
        rows.append(row | rounded({"gain": gains[drafts], "needed": costs[shortest] / costs[0]}))
    return rows


BENCH = Bench(
    "tail",
    "What could still shorten a rollout's tail (--data): speculative decoding, with accepted lengths measured on "
    "recorded samples, and merging idle engines; simulated H200s. Takes about 15 minutes a seed.",
    measure,
    page=page_values,
    draw=draw,
)
