"""RollArt's affinity (Figure 4a/b): which accelerators suit which work, and what routing by it is worth.

Qwen3-8B, engines of one GPU; 6 H20 cost about as much as 2 H800. `alone`: a prefill-heavy and a decode-heavy task on
either; `ratio`: seconds on the better-suited over seconds on the other, as RollArt gives it. `sweep`: seconds of H800
over seconds of H20 for tokens read per token written. `mixed`: both tasks at once on both pools, by how trajectories
are routed: not at all, by the task's tag, or by the prefill:decode ratio that an earlier epoch had; `rows` of systems.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from matplotlib.ticker import FuncFormatter
from rich.progress import Progress
from treadle_sim.cluster import Cluster
from treadle_sim.driver import Driver
from treadle_sim.engine_model import engine_model
from treadle_sim.outcome import Outcome
from treadle_sim.predictors import Noisy
from treadle_sim.systems import PAUSING, TREADLE, VERL, System
from treadle_sim.workloads.parametric import LogNormal
from treadle_sim.workloads.workload import TrajectoryWork, Workload

from treadle_bench.affinity.tasks import (
    BANDWIDTH,
    COMPUTE,
    DECODE_HEAVY,
    LLM,
    POOLS,
    PROMPTS,
    SAMPLES,
    SLOTS,
    TASKS,
    interleaved,
    prefill_over_decode,
    routed,
    tagged,
    works_of,
)
from treadle_bench.options import BenchOptions
from treadle_bench.page import MACHINE, command, paragraph, point, ratio, seconds, table
from treadle_bench.pictures import FAINT, SERIES, figure_with, tidy

NAME = "affinity"
PAPER = {"prefill-heavy": (0.53, 0.53), "decode-heavy": (0.49, 0.79)}
DIGITS = 4
# Tokens read for one written. Their sum stays, so that memory binds nowhere; the first prompt is read too.
SWEEP = (0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 60.0)
SWEEP_STEPS, SWEEP_TOKENS = 8, 7_000.0
SWEEP_SIGMA = 0.2  # of the log of what is written: work shows, not the longest trajectory
UNROUTED, BY_TAG, BY_RATIO = "unrouted", "by the task's tag", "by measured ratio"
SYSTEMS = (VERL, PAUSING, TREADLE)
ALONE = PAUSING  # holds room for whoever has begun: memory is not what is compared


async def run(options: BenchOptions) -> dict[str, Any]:
    """See the module; --traces does not apply. Raises no errors of its own."""
    seeds = [options.seed + repeat for repeat in range(options.repeats)]
    prompts = max(2, round(PROMPTS * (options.scale or 1.0)))
    with Progress(console=options.progress, transient=True) as progress:
        total = len(seeds) * (2 * len(TASKS) + 3 * len(SYSTEMS)) + 2 * len(SWEEP)
        task = progress.add_task(NAME, total=total)

        def played(
            works: Sequence[TrajectoryWork], pools: Sequence[str], system: System, seed: int
        ) -> tuple[Outcome, Workload]:
            progress.advance(task)
            workload = Workload(NAME, tuple(works))
            return _play(workload, pools, system, seed), workload

        alone = [_alone(name, seeds, prompts, played) for name in TASKS]
        sweep = [_swept(read, options.seed, prompts, played) for read in SWEEP]
        mixed = [row for system in SYSTEMS for row in _mixed(system, seeds, prompts, played)]
    return {
        "model": LLM,
        "pools": POOLS,
        "slots": SLOTS,
        "trajectories": prompts * SAMPLES,
        "scale": options.scale or 1.0,
        "seeds": seeds,
        "repeats": options.repeats,
        "alone": alone,
        "sweep": sweep,
        "mixed": mixed,
    }


def _play(workload: Workload, pools: Sequence[str], system: System, seed: int) -> Outcome:
    engines = tuple(engine_model(LLM, name, 1, SLOTS) for name in pools for _ in range(POOLS[name]))
    predictor = None if system.predictor == "none" else Noisy(workload, seed)
    return Driver(workload, Cluster(engines), system.policy, system.tuning, predictor).run()


def _alone(name: str, seeds: Sequence[int], prompts: int, played: Any) -> dict[str, Any]:
    kind, suited = TASKS[name]
    other = COMPUTE if suited == BANDWIDTH else BANDWIDTH
    of: dict[str, list[float]] = {suited: [], other: []}
    read: list[float] = []
    for seed in seeds:
        works = works_of(kind, prompts, seed, name)
        for pool, times in of.items():
            times.append(played(works, [pool], ALONE, seed)[0].makespan_s)
        read.append(prefill_over_decode(works))
    ratios = [mine / theirs for mine, theirs in zip(of[suited], of[other], strict=True)]
    return {
        "task": name,
        "suited": suited,
        "read_per_written": round(median(read), DIGITS),
        "s": {pool: round(median(times), DIGITS) for pool, times in of.items()},
        "ratio": round(median(ratios), DIGITS),
        "spread": [round(min(ratios), DIGITS), round(max(ratios), DIGITS)],
    }


def _swept(read: float, seed: int, prompts: int, played: Any) -> dict[str, Any]:
    written = SWEEP_TOKENS / (1.0 + read)
    obs = read * written / (SWEEP_STEPS - 1)  # what the last step's tool answers is never read
    kind = replace(
        DECODE_HEAVY,
        tokens_median=written,
        tokens_sigma=SWEEP_SIGMA,
        steps_median=float(SWEEP_STEPS),
        steps_elasticity=0.0,
        steps_sigma=0.0,
        prompt_tokens=LogNormal(100.0, 0.0, 100.0),
        obs_tokens=LogNormal(obs, 0.2, 4.0 * obs),
    )
    works = works_of(kind, prompts, seed, "sweep")
    taken = {pool: played(works, [pool], ALONE, seed)[0].makespan_s for pool in POOLS}
    return {
        "read_per_written": round(prefill_over_decode(works), DIGITS),
        "ratio": round(taken[COMPUTE] / taken[BANDWIDTH], DIGITS),
    }


def _mixed(system: System, seeds: Sequence[int], prompts: int, played: Any) -> list[dict[str, Any]]:
    of: dict[str, list[float]] = {UNROUTED: [], BY_TAG: [], BY_RATIO: []}
    for seed in seeds:
        both = {name: works_of(kind, prompts, seed, name) for name, (kind, _) in TASKS.items()}
        before = [work for name, (kind, _) in TASKS.items() for work in works_of(kind, prompts, seed, name, epoch=1)]
        plain = interleaved(list(both.values()))
        by_tag = interleaved([tagged(works, TASKS[name][1]) for name, works in both.items()])
        for how, works in ((UNROUTED, plain), (BY_TAG, by_tag), (BY_RATIO, routed(plain, before))):
            of[how].append(played(works, list(POOLS), system, seed)[0].makespan_s)
    return [
        {
            "system": system.name,
            "routing": how,
            "s": round(median(times), DIGITS),
            "ratio": round(median(one / base for one, base in zip(times, of[UNROUTED], strict=True)), DIGITS),
            "spread": [
                round(least_or_most(one / base for one, base in zip(times, of[UNROUTED], strict=True)), DIGITS)
                for least_or_most in (min, max)
            ],
        }
        for how, times in of.items()
    ]


def page(found: Mapping[str, Any]) -> Iterator[str]:
    yield "# affinity: which accelerators suit which work"
    yield ""
    yield from paragraph(
        f"`{command(NAME, found)}`, on {MACHINE}. {LLM}, {POOLS[BANDWIDTH]} {BANDWIDTH} against {POOLS[COMPUTE]}",
        f"{COMPUTE}, which cost about the same; engines of one GPU and {SLOTS} slots; {found['trajectories']}",
        f"trajectories of a task, {SAMPLES} a prompt. The profiles of both cards are derived from data sheets and a",
        "roofline (`fit.md`), not measured: what can be confirmed is the direction, not the amount.",
    )
    yield "![crossover, and routing on a mixed pool](affinity.png)"
    yield ""
    yield "## One task on one pool (RollArt Figure 4a/b)"
    yield ""
    rows = []
    for row in found["alone"]:
        least, most = PAPER[row["task"]]
        paper = f"{least:.2f}" if least == most else f"{least:.2f}–{most:.2f}"
        rows.append(
            [
                row["task"],
                f"{row['read_per_written']:.1f}",
                *(seconds(row["s"][pool]) for pool in POOLS),
                row["suited"],
                ratio(row["ratio"], row["spread"]),
                paper,
            ]
        )
    heads = ["task", "tokens read for one written", f"{BANDWIDTH}, s", f"{COMPUTE}, s", "suited"]
    yield from table([*heads, "its time over the other's", "RollArt"], rows)
    yield ""
    yield from paragraph(
        "RollArt's tasks are FrozenLake (as low as 0.53 of the time on H800) and GEM-math (0.49–0.79 on H20). Their",
        "lengths are not given, so the tasks here lie on either side by choice, and the sweep says where the sides",
        "meet. Alone, trajectories run in order of arrival with room held for whoever has begun: memory is not what",
        "is compared.",
    )
    yield "## Tokens read for one written, and H800's time over H20's"
    yield ""
    yield from table(
        ["read for one written", *(f"{row['read_per_written']:.1f}" for row in found["sweep"])],
        [["H800 over H20", *(f"{row['ratio']:.2f}" for row in found["sweep"])]],
    )
    yield ""
    yield "## Both tasks at once on both pools"
    yield ""
    yield "Rollout seconds, and over the same system unrouted (below 1: routing is faster)."
    yield ""
    names = list(dict.fromkeys(row["routing"] for row in found["mixed"]))
    by = {(row["system"], row["routing"]): row for row in found["mixed"]}
    systems = list(dict.fromkeys(row["system"] for row in found["mixed"]))
    yield from table(
        ["", *names],
        (
            [
                system,
                *(
                    f"{seconds(by[system, name]['s'])} ({ratio(by[system, name]['ratio'], by[system, name]['spread'])})"
                    for name in names
                ),
            ]
            for system in systems
        ),
    )
    yield ""
    yield from point(
        "By tag: the prefill-heavy task on H800, the other on H20, whatever that does to the balance. By measured",
        "ratio: each prompt's prefill and decode seconds on either card, from an earlier epoch, and the split at",
        "which both pools have the same to do. This split is the bench's; the product takes tags and has no rule of",
        "its own that makes them.",
    )
    yield from point("A tagged trajectory waits for its pool while the other stands idle: routing needs work for both.")
    for system in systems:
        worse = [name for name in names[1:] if by[system, name]["ratio"] > 1.0]
        if worse:
            yield f"- **Where routing loses**, {system}: {', '.join(worse)}."


def draw(found: Mapping[str, Any], file: Path) -> None:
    note = f"{LLM}, {POOLS[BANDWIDTH]} {BANDWIDTH} against {POOLS[COMPUTE]} {COMPUTE}, which cost about the same."
    with figure_with("Which accelerators suit which work", note, file, height_in=4.0, top=0.76) as figure:
        left, right = figure.subplots(1, 2)
        left.plot(
            [row["read_per_written"] for row in found["sweep"]],
            [row["ratio"] for row in found["sweep"]],
            "o-",
            color=SERIES[0],
            linewidth=2.0,
        )
        left.axhline(1.0, color="#6B7280", linewidth=1.0)
        left.set_xscale("log")
        left.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        left.set_title(f"seconds of {COMPUTE} over {BANDWIDTH}", loc="left", size=10, weight="bold")
        left.set_xlabel("tokens read for one written")
        left.set_ylim(bottom=0)
        tidy(left)
        names = list(dict.fromkeys(row["routing"] for row in found["mixed"]))
        systems = list(dict.fromkeys(row["system"] for row in found["mixed"]))
        for at, name in enumerate(names):
            times = [row["s"] for row in found["mixed"] if row["routing"] == name]
            places = np.arange(len(systems)) + (at - 1) * 0.28
            right.bar(places, times, 0.25, color=(FAINT, SERIES[0], SERIES[1])[at], label=name)
        right.set_xticks(range(len(systems)), systems)
        right.set_title("both tasks on both pools: rollout seconds", loc="left", size=10, weight="bold")
        right.legend(frameon=False, fontsize=8)
        tidy(right)
        right.grid(visible=False, axis="x")
