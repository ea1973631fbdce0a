"""Rollouts with one part of the system exchanged and everything else equal: Heddle's Figures 14, 15
and 16.

`rows`, one for each workload: `variants` has for every variant medians over seeds: `makespan_s`,
`tokens_per_s`, `p50_s` (when half of the trajectories had ended), `longest_queue_s` (all waiting of
the trajectory with most tokens) and `engines`. `ratio_to`: a variant's makespan over Treadle's,
above 1 Treadle is faster; `spread`: its range over seeds.

heddle14: which waiting step runs first. `crowded`: the same with half of the paper's 100 slots an
engine, so that steps have to wait; with a slot for every trajectory the order hardly matters.
heddle15: which engine runs a step, on engines of one GPU; migrations belong to the placement.
heddle16: engines of one degree and of mixed ones; `active` is Figure 16(b): how many trajectories
of the search workload had not ended at each time of `at_s`, first seed.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from treadle_core.model import Ordering, PlacementRule
from treadle_sim.systems import TREADLE, TREADLE_HOMOGENEOUS, RankScaling, System

from treadle_bench.bench import Bench, BenchOptions, Figures
from treadle_bench.page import describe_seeds, value_range
from treadle_bench.pictures import SERIES, draw_panels, draw_variants, sheet, style
from treadle_bench.rollouts import (
    DEGREES,
    SLOTS,
    TRACES,
    Batch,
    Job,
    Played,
    batches_for,
    find_bound,
    header,
    play_all,
)
from treadle_bench.summary import median_of, range_of

# Name of each variant, Treadle's first: its system, and the GPUs of each engine, 0 where the system
# allocates them.
Variants = Mapping[str, tuple[System, int]]

LLM = "Qwen3-14B"  # of the paper's ablations
CROWDED_SLOTS = SLOTS // 2
NO_SKEW = 10**9  # steps: no engine is ever that much busier, so the cached prefix always decides
CURVES = ("allocated", "Fix-1", "Fix-8")  # of 16(b)
SHOWN = "search"  # workload of 16(b), as in the paper
POINTS = 200


def _order_by(ordering: Ordering, *, preempt: bool, reserve: bool = True) -> System:
    policy = replace(TREADLE.policy, ordering=ordering, preempt=preempt, reserve=reserve)
    return replace(TREADLE, name=ordering.value, policy=policy)


def _place_by(
    rule: PlacementRule, skew_steps: int = TREADLE_HOMOGENEOUS.tuning.skew_steps
) -> System:
    policy = replace(TREADLE_HOMOGENEOUS.policy, placement=rule, migrate=False)
    tuning = replace(TREADLE_HOMOGENEOUS.tuning, skew_steps=skew_steps)
    return replace(TREADLE_HOMOGENEOUS, name=rule.value, policy=policy, tuning=tuning)


# Orderings that ignore the remaining work do not preempt; both readings of Autellix do, as Autellix
# does.
ORDERINGS: Variants = {
    "progressive": (TREADLE, 0),
    "FCFS": (_order_by(Ordering.FCFS, preempt=False), 0),
    "round-robin": (_order_by(Ordering.ROUND_ROBIN, preempt=False), 0),
    "least attained": (_order_by(Ordering.LEAST_ATTAINED, preempt=True), 0),
    "shortest first": (_order_by(Ordering.SHORTEST_FIRST, preempt=True), 0),
    "round-robin, no room held": (_order_by(Ordering.ROUND_ROBIN, preempt=False, reserve=False), 0),
}
PLACEMENTS: Variants = {
    "planned": (TREADLE_HOMOGENEOUS, 1),
    "least load beyond a skew": (_place_by(PlacementRule.CACHE_AWARE), 1),
    "cache-aware": (_place_by(PlacementRule.CACHE_AWARE, NO_SKEW), 1),
    "pinned": (_place_by(PlacementRule.PINNED), 1),
    "least load": (_place_by(PlacementRule.LEAST_LOAD), 1),
    "rank scaling": (replace(TREADLE_HOMOGENEOUS, name="rank_scaling", planner=RankScaling), 1),
}
ALLOCATIONS: Variants = {
    "allocated": (TREADLE, 0),
    **{f"Fix-{degree}": (TREADLE_HOMOGENEOUS, degree) for degree in DEGREES},
}


async def play_variants(
    what: str, variants: Variants, options: BenchOptions, slots: int = SLOTS
) -> tuple[dict[str, Any], dict[str, dict[str, Played]]]:
    """The figures, and by workload and variant the rollout of the first seed. slots: of an engine;
    the number of trajectories stays. Raises TraceFileError, OSError."""
    scale = options.scale or 1.0
    batches = batches_for(LLM, scale, options, slots)
    first = next(iter(batches.values()))[0]
    possible = {
        name: each for name, each in variants.items() if not each[1] or first.gpus % each[1] == 0
    }
    jobs = (
        Job(batch, *each)
        for of_name in batches.values()
        for each in possible.values()
        for batch in of_name
    )
    done = await play_all(jobs, options, what)
    runs = {
        name: {
            variant: [done[Job(batch, *each)] for batch in of_name]
            for variant, each in possible.items()
        }
        for name, of_name in batches.items()
    }
    found = header(first, scale, options) | {"slots": slots}
    found["rows"] = [_row(name, batches[name], of_name) for name, of_name in runs.items()]
    return found, {
        name: {each: of_seeds[0] for each, of_seeds in of.items()} for name, of in runs.items()
    }


def _row(
    name: str, batches: Sequence[Batch], runs: Mapping[str, Sequence[Played]]
) -> dict[str, Any]:
    ours, *others = runs
    ratios = {
        each: [
            one.makespan_s / base.makespan_s
            for one, base in zip(runs[each], runs[ours], strict=True)
        ]
        for each in others
    }
    bounds = [find_bound(batch) for batch in batches]
    return {
        "workload": name,
        "bound_s": median_of(bound["bound_s"] for bound in bounds),
        "bound_by": bounds[0]["bound_by"],
        "variants": {each: _medians(of_seeds) for each, of_seeds in runs.items()},
        "ratio_to": {each: median_of(values) for each, values in ratios.items()},
        "spread": {each: range_of(values) for each, values in ratios.items()},
    }


def _medians(runs: Sequence[Played]) -> dict[str, Any]:
    return {
        **{
            key: median_of(getattr(one, key) for one in runs)
            for key in ("makespan_s", "tokens_per_s", "p50_s")
        },
        "longest_queue_s": median_of(one.longest["queue_s"] for one in runs),
        "engines": runs[0].engines,
    }


async def _measure_orderings(options: BenchOptions) -> dict[str, Any]:
    found, _ = await play_variants(f"heddle14, {SLOTS} slots", ORDERINGS, options)
    found["crowded"], _ = await play_variants(
        f"heddle14, {CROWDED_SLOTS} slots", ORDERINGS, options, CROWDED_SLOTS
    )
    return found


def _draw_orderings(found: Figures, file: Path) -> None:
    crowded = found["crowded"]
    note = (
        f"{LLM}, {found['gpus']} {found['accelerator']} GPUs, {describe_seeds(found['seeds'])}. "
        f"Left: {found['slots']} slots an engine; right: {crowded['slots']}."
    )
    panels = [
        [(title, found, key), (f"{title}, half the slots", crowded, key)]
        for title, key in (
            ("rollout seconds", "makespan_s"),
            ("seconds the longest waits", "longest_queue_s"),
        )
    ]
    draw_panels("Which step runs first", note, panels, file)


async def _measure_placements(options: BenchOptions) -> dict[str, Any]:
    return (await play_variants("heddle15", PLACEMENTS, options))[0]


def _draw_placements(found: Figures, file: Path) -> None:
    note = (
        f"{LLM} on {found['gpus']} {found['accelerator']} GPUs, one an engine; "
        f"{describe_seeds(found['seeds'])}. Right: when half of the trajectories had ended."
    )
    panels = [
        [
            ("tokens a second", found, "tokens_per_s"),
            ("seconds until half have ended", found, "p50_s"),
        ]
    ]
    draw_panels("Which engine runs a step", note, panels, file)


async def _measure_allocations(options: BenchOptions) -> dict[str, Any]:
    found, played = await play_variants("heddle16", ALLOCATIONS, options)
    name = TRACES if options.traces is not None else SHOWN
    runs = {each: run for each, run in played[name].items() if each in CURVES}
    at_s = np.linspace(0.0, max(run.makespan_s for run in runs.values()), POINTS)
    found["active"] = {"workload": name, "at_s": np.round(at_s, 3).tolist()} | {
        each: (
            len(run.finished_s) - np.searchsorted(np.sort(run.finished_s), at_s, side="right")
        ).tolist()
        for each, run in runs.items()
    }
    return found


def _best_single(found: Figures) -> Figures:
    return {"best_single": value_range(min(row["ratio_to"].values()) for row in found["rows"])}


def _draw_allocations(found: Figures, file: Path) -> None:
    active = found["active"]
    note = (
        f"{LLM}, {found['trajectories']:,} trajectories, {found['gpus']} {found['accelerator']} "
        "GPUs. Left: "
        f"{describe_seeds(found['seeds'])}. Right: {active['workload']}, seed {found['seeds'][0]}."
    )
    with sheet(
        "Engines of one degree, and of mixed degrees", note, file, height_in=4.2, top=0.71
    ) as figure:
        left, right = figure.subplots(1, 2)
        draw_variants(left, "rollout seconds", found["rows"], "makespan_s")
        place = (0.072, 0.85)
        figure.legend(
            loc="upper left",
            bbox_to_anchor=place,
            ncols=len(ALLOCATIONS),
            frameon=False,
            fontsize=8,
        )
        for name, colour in zip(CURVES, (SERIES[0], SERIES[1], SERIES[4]), strict=True):
            if name in active:
                right.plot(active["at_s"], active[name], color=colour, linewidth=2.0, label=name)
        style(
            right, "trajectories that have not ended", xlabel="seconds", ylim=(0, None), legend={}
        )


HEDDLE14 = Bench(
    "heddle14",
    "Heddle's Figure 14: which step runs first. Takes about 20 minutes, a few with --scale 0.25.",
    _measure_orderings,
    page=dict,
    draw=_draw_orderings,
)
HEDDLE15 = Bench(
    "heddle15",
    "Heddle's Figure 15: which engine runs a step. Takes about 10 minutes, a few with --scale "
    "0.25.",
    _measure_placements,
    page=dict,
    draw=_draw_placements,
)
HEDDLE16 = Bench(
    "heddle16",
    "Heddle's Figure 16: engines of one degree and of mixed degrees. Takes about 10 minutes.",
    _measure_allocations,
    page=_best_single,
    draw=_draw_allocations,
)
