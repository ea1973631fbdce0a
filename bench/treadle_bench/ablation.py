"""One part of the system exchanged, all else equal: the shape that Heddle's Figures 14, 15 and 16(a) share.

`rows`: a workload each; `variants` gives for every variant medians over seeds: `makespan_s`, `tokens_per_s`, `p50_s`
(when half of the trajectories had ended), `longest_queue_s` (all waiting of the trajectory with most tokens, over its
steps) and `engines`. `ratio_to`: a variant's makespan over ours, above 1 ours is faster; `spread` its range over seeds.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from treadle_sim.systems import System

from treadle_bench.options import BenchOptions
from treadle_bench.page import ratio, seconds, table
from treadle_bench.rollouts import ACCELERATOR, Batch, Job, Played, batch_for, floor, play_all, workloads

LLM = "Qwen3-14B"  # of the paper's ablations
DIGITS = 4


@dataclass(frozen=True, slots=True)
class Variant:
    """degree: of all engines, 0 where the system allocates."""

    name: str
    system: System
    degree: int = 0


async def ablate(
    what: str, variants: Sequence[Variant], options: BenchOptions, *, slots: int = 0, scale: float = 1.0
) -> dict[str, Any]:
    """Plays every variant, ours first, on every workload and seed. slots: of an engine, 0 for as many as usual; the
    trajectories stay. Raises TraceFileError, OSError."""
    scale = options.scale or scale
    seeds = [options.seed + repeat for repeat in range(options.repeats)]
    batches = {name: [_batch(name, scale, seed, slots, options) for seed in seeds] for name in workloads(options)}
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
        "seeds": seeds,
        "repeats": options.repeats,
        "rows": [_row(name, of_name, variants, done) for name, of_name in batches.items()],
    }


def _batch(name: str, scale: float, seed: int, slots: int, options: BenchOptions) -> Batch:
    batch = batch_for(name, LLM, scale, seed, options)
    return Batch(name, LLM, batch.gpus, batch.prompts, seed, slots=slots or batch.slots, traces=options.traces)


def _row(
    name: str, batches: Sequence[Batch], variants: Sequence[Variant], done: Mapping[tuple[str, str, int], Played]
) -> dict[str, Any]:
    of = {
        variant.name: [done[name, variant.name, batch.seed] for batch in batches]
        for variant in variants
        if (name, variant.name, batches[0].seed) in done
    }
    ours = of[variants[0].name]
    ratios = {
        each: [one.makespan_s / mine.makespan_s for one, mine in zip(runs, ours, strict=True)]
        for each, runs in of.items()
        if runs is not ours
    }
    floors = [floor(batch) for batch in batches]
    return {
        "workload": name,
        "bound_s": round(median(each.bound_s for each in floors), DIGITS),
        "bound_by": floors[0].bound_by,
        "variants": {each: _medians(runs) for each, runs in of.items()},
        "ratio_to": {each: round(median(values), DIGITS) for each, values in ratios.items()},
        "spread": {each: [round(min(values), DIGITS), round(max(values), DIGITS)] for each, values in ratios.items()},
    }


def _medians(runs: Sequence[Played]) -> dict[str, Any]:
    numbers = {
        "makespan_s": [one.makespan_s for one in runs],
        "tokens_per_s": [one.tokens_per_s for one in runs],
        "p50_s": [one.p50_s for one in runs],
        "longest_queue_s": [one.longest.queue_s for one in runs],
    }
    rounded: dict[str, Any] = {key: round(median(values), DIGITS) for key, values in numbers.items()}
    return rounded | {"engines": runs[0].engines}


def lines(found: Mapping[str, Any], *, queue: bool = False, engines: bool = False) -> Iterator[str]:
    """The tables of one `ablate`. queue: with the longest trajectory's waiting; engines: with those of the seed."""
    names = list(found["rows"][0]["variants"])
    yield "Rollout seconds · over ours, above 1 ours is faster (range over seeds)."
    yield ""
    yield from table(["", "bound, by", *names], (_times(row, names) for row in found["rows"]))
    if queue:
        yield ""
        yield "Seconds that the trajectory with most tokens waited, all its steps together:"
        yield ""
        waits = [[row["variants"][name]["longest_queue_s"] for name in names] for row in found["rows"]]
        yield from table(
            ["", *names],
            ([row["workload"], *map(seconds, each)] for row, each in zip(found["rows"], waits, strict=True)),
        )
    if engines:
        yield ""
        yield from table(
            ["", *names],
            ([row["workload"], *(row["variants"][name]["engines"] for name in names)] for row in found["rows"]),
        )


def _times(row: Mapping[str, Any], names: Sequence[str]) -> list[str]:
    shown = [row["workload"], f"{seconds(row['bound_s'])}, {row['bound_by']}"]
    for name in names:
        text = seconds(row["variants"][name]["makespan_s"]) if name in row["variants"] else ""
        if name in row["ratio_to"]:
            text += f" · {ratio(row['ratio_to'][name], row['spread'][name])}"
        shown.append(text if name in row["ratio_to"] else f"**{text}**")
    return shown


def losses(found: Mapping[str, Any], where: str = "") -> Iterator[str]:
    """A line for each workload in which a variant is faster than ours in the median."""
    any_lost = False
    for row in found["rows"]:
        faster = {name: 1.0 / value - 1.0 for name, value in row["ratio_to"].items() if value < 1.0}
        if faster:
            any_lost = True
            who = ", ".join(f"{name} by {by:.1%}" for name, by in sorted(faster.items(), key=lambda each: -each[1]))
            yield f"- **Where we lose**, {row['workload']}{where}: {who}."
    if not any_lost:
        yield f"- We lose to none of these{where or ' here'}."


def ratios(found: Mapping[str, Any], names: Sequence[str]) -> str:
    """Least and greatest of the ratios to some variants, as in 1.02–1.31×."""
    values = [row["ratio_to"][name] for row in found["rows"] for name in names if name in row["ratio_to"]]
    return f"{min(values):.2f}–{max(values):.2f}×"
