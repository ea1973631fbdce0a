"""Rollouts with one part of the system exchanged and everything else equal: Heddle's Figures 14, 15 and 16(a).

`rows`, one for each workload: `variants` has for every variant medians over seeds: `makespan_s`, `tokens_per_s`,
`p50_s` (when half of the trajectories had ended), `longest_queue_s` (all waiting of the trajectory with most tokens)
and `engines`. `ratio_to`: a variant's makespan over Treadle's, above 1 Treadle is faster; `spread`: its range over
seeds. The tables of a page are in `ablation.md.j2`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from treadle_sim.systems import System

from treadle_bench.bench import BenchOptions, Figures
from treadle_bench.page import value_range
from treadle_bench.rollouts import ACCELERATOR, Batch, Job, Played, batch_for, find_bound, play_all, workloads
from treadle_bench.summary import median_of, range_of

LLM = "Qwen3-14B"  # of the paper's ablations


@dataclass(frozen=True, slots=True)
class Variant:
    """degree: GPUs of each engine, 0 where the system allocates engines itself."""

    name: str
    system: System
    degree: int = 0


async def ablate(
    what: str, variants: Sequence[Variant], options: BenchOptions, *, slots: int = 0, scale: float = 1.0
) -> dict[str, Any]:
    """Play every variant, Treadle's first, on every workload and seed. slots: of an engine, 0 for the usual number; the
    number of trajectories stays. Raises TraceFileError, OSError."""
    scale = options.scale or scale
    batches = {
        name: [_batch(name, scale, seed, slots, options) for seed in options.seeds] for name in workloads(options)
    }
    jobs = {
        (name, variant.name, batch.seed): Job(batch, variant.system, variant.degree)
        for name, of_name in batches.items()
        for batch in of_name
        for variant in variants
        if not variant.degree or batch.gpus % variant.degree == 0
    }
    done = dict(zip(jobs, await play_all(list(jobs.values()), options, what), strict=True))
    first = next(iter(batches.values()))[0]
    return {
        "model": LLM,
        "accelerator": ACCELERATOR,
        "gpus": first.gpus,
        "trajectories": first.trajectories,
        "slots": first.slots,
        "scale": scale,
        "seeds": options.seeds,
        "repeats": options.repeats,
        "rows": [_row(name, of_name, variants, done) for name, of_name in batches.items()],
    }


def _batch(name: str, scale: float, seed: int, slots: int, options: BenchOptions) -> Batch:
    batch = batch_for(name, LLM, scale, seed, options)
    return replace(batch, slots=slots or batch.slots)


def _row(
    name: str, batches: Sequence[Batch], variants: Sequence[Variant], done: Mapping[tuple[str, str, int], Played]
) -> dict[str, Any]:
    of = {
        variant.name: [done[name, variant.name, batch.seed] for batch in batches]
        for variant in variants
        if (name, variant.name, batches[0].seed) in done
    }
    treadle = of[variants[0].name]
    ratios = {
        each: [one.makespan_s / ours.makespan_s for one, ours in zip(runs, treadle, strict=True)]
        for each, runs in of.items()
        if runs is not treadle
    }
    bounds = [find_bound(batch) for batch in batches]
    return {
        "workload": name,
        "bound_s": median_of(each.bound_s for each in bounds),
        "bound_by": bounds[0].bound_by,
        "variants": {each: _medians(runs) for each, runs in of.items()},
        "ratio_to": {each: median_of(values) for each, values in ratios.items()},
        "spread": {each: range_of(values) for each, values in ratios.items()},
    }


def _medians(runs: Sequence[Played]) -> dict[str, Any]:
    return {
        "makespan_s": median_of(one.makespan_s for one in runs),
        "tokens_per_s": median_of(one.tokens_per_s for one in runs),
        "p50_s": median_of(one.p50_s for one in runs),
        "longest_queue_s": median_of(one.longest.queue_s for one in runs),
        "engines": runs[0].engines,
    }


def page_values(found: Figures, compared: Iterable[str]) -> dict[str, Any]:
    """For the template. `measured_ratio`: range of the ratios to the variants in `compared`. `lost`: by workload the
    variants that are faster than Treadle in the median, and by how much, fastest first."""
    names = list(compared)
    lost = {
        row["workload"]: sorted(
            ((name, 1.0 / value - 1.0) for name, value in row["ratio_to"].items() if value < 1.0),
            key=lambda each: -each[1],
        )
        for row in found["rows"]
    }
    ratios = [row["ratio_to"][name] for row in found["rows"] for name in names if name in row["ratio_to"]]
    return {"measured_ratio": f"{value_range(ratios)}×", "lost": {name: by for name, by in lost.items() if by}}
