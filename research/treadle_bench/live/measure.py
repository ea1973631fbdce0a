"""Rollouts of public traces on two live engines: Treadle against what frameworks do, and the
simulator beside it.

Each engine has a core of its own. Lengths, turns, tools' answers and tool times are forced from
traces in --data, with the same scale for all batches of a trace: consecutive turns are joined so
that a trajectory of the even batch has MEAN_TURNS, tokens are scaled so that it generates
MEAN_GEN_TOKENS, and tools take MEAN_TOOL_S.

A batch is PROMPTS prompts of a trace, chosen by their mean length, and SAMPLES samples of each
(`treadle_sim.workloads.resample`). `even`: prompts of about the median length; `skewed`: one prompt
is much longer than the others. The baseline plays epoch 0, which teaches the predictor. Each repeat
is another epoch, with other samples of the same prompts: Treadle plays it first, so that its
predictor knows none of its samples, then every baseline plays it. The simulator plays every epoch
too, on the engines as measured (stage.py of `treadle bench fidelity`), and its predictor knows the
same earlier plays.

Keys: `cells`: medians over the repeats. `pinned_s`, `sticky_s`, `router_s`, `treadle_s`: makespans
under pinned FCFS, under sticky least-loaded placement (prime-rl, SkyRL), under the cache-aware
policy of SGLang's router, and under Treadle. `best_baseline`: the one of least median. `ratio`: of
its makespan over Treadle's in the same repeat, above 1 Treadle is faster; `spread`: its range.
`simulated_ratio`: of the same two in the simulator; `told_ratio`: there, of Treadle that is told
every length. `makespans_s`, `simulated_s`: of every repeat. `pass_s`: find_pass_s of stage.py, the
mean of a round before each cell.
"""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median
from typing import Any

import numpy as np
from treadle_cli.demo.run import warm_engines
from treadle_cli.exits import UsageProblem
from treadle_sim.workloads.resample import resample
from treadle_sim.workloads.workload import Step, TrajectoryWork, Workload, groups

from treadle_bench.bench import Bench, BenchOptions, Figures
from treadle_bench.fidelity.live import token_ids
from treadle_bench.fidelity.stage import Stage
from treadle_bench.processes import run_mesh
from treadle_bench.public_traces import read_public
from treadle_bench.summary import rounded

ENGINES = 2
# Traces whose prompts and tools' answers are short enough for a CPU's prefill.
SOURCES = {"swebench": "swebench_verified_mini_gemini3", "tau": "tau_airline_gpt4o"}
PROMPTS, SAMPLES = 12, 4  # about five trajectories a slot, so that there is something to schedule
# Where a batch's prompts lie among all prompts of the trace, sorted by mean length.
SKEWS: Mapping[str, Sequence[float]] = {
    "even": tuple(np.linspace(0.35, 0.65, PROMPTS)),
    "skewed": (*np.linspace(0.1, 0.5, PROMPTS - 1), 0.97),
}
# Of a trajectory of the even batch: what makes a play of it take 30 seconds.
MEAN_TURNS, MEAN_GEN_TOKENS, MEAN_TOOL_S = 4, 80, 2.0
LEAST_PROMPT_TOKENS = 32
TREADLE, TOLD = "treadle", "told"  # TOLD: in the simulator alone
BASELINES = {"pinned": "verl", "sticky": "sticky", "router": "verl*"}  # systems of the simulator
NAMES = {TREADLE: TREADLE, **BASELINES}  # in the order of play


@dataclass(frozen=True, slots=True)
class Scale:
    """turns: consecutive ones that become one. tokens, seconds: factors."""

    turns: int
    tokens: float
    seconds: float

    def apply(self, work: TrajectoryWork) -> TrajectoryWork:
        """The trajectory, small enough for a CPU."""
        steps = tuple(
            self._join(work.steps[at : at + self.turns])
            for at in range(0, len(work.steps), self.turns)
        )
        prompt_tokens = max(round(self.tokens * work.prompt_tokens), LEAST_PROMPT_TOKENS)
        return replace(work, prompt_tokens=prompt_tokens, steps=steps)

    def _join(self, steps: Sequence[Step]) -> Step:
        return Step(
            gen_tokens=max(round(self.tokens * sum(step.gen_tokens for step in steps)), 1),
            obs_tokens=max(round(self.tokens * sum(step.obs_tokens for step in steps)), 1),
            tool_s=self.seconds * sum(step.tool_s for step in steps),
        )


def scale_of(works: Sequence[TrajectoryWork]) -> Scale:
    """The scale of a trace, from its even batch. Raises statistics.StatisticsError without
    trajectories."""
    turns = fmean(len(work.steps) for work in works)
    tool_s = fmean(sum(step.tool_s for step in work.steps) for work in works)
    return Scale(
        turns=max(round(turns / MEAN_TURNS), 1),
        tokens=MEAN_GEN_TOKENS / fmean(work.gen_tokens for work in works),
        seconds=MEAN_TOOL_S / tool_s if tool_s > 0 else 0.0,
    )


def make_epochs(
    works: Sequence[TrajectoryWork], trace: str, skew: str, seed: int, count: int
) -> list[Workload]:
    """`count` epochs of one batch, scaled. Raises ValueError for no trajectories."""
    even = _resample(works, "even", seed, 0)
    scale = scale_of(even)
    return [
        Workload(
            f"{trace}-{skew}-{epoch}", tuple(map(scale.apply, _resample(works, skew, seed, epoch)))
        )
        for epoch in range(count)
    ]


def _resample(
    works: Sequence[TrajectoryWork], skew: str, seed: int, epoch: int
) -> tuple[TrajectoryWork, ...]:
    by_prompt = groups(works)
    by_length = sorted(
        by_prompt, key=lambda prompt_id: fmean(work.gen_tokens for work in by_prompt[prompt_id])
    )
    chosen = {by_length[round(share * (len(by_length) - 1))] for share in SKEWS[skew]}
    sampled = resample(works, len(by_prompt), SAMPLES, seed, epoch=epoch).trajectories
    return tuple(work for work in sampled if work.prompt_id in chosen)


async def measure(options: BenchOptions) -> dict[str, Any]:
    """Raises UsageProblem without --data, PublicTraceError, OSError, ProcessError, TreadleError."""
    if options.data is None:
        raise UsageProblem(
            "live needs --data, the folder of public traces that docs/traces.md names"
        )
    traces = {name: read_public(source, options.data) for name, source in SOURCES.items()}
    cells = []
    async with run_mesh(options.engines, options) as mesh:
        first = make_epochs(traces["tau"], "tau", "even", options.seed, 1)[0]
        await warm_engines(mesh.engines, token_ids(first.trajectories[0], "warm")[0])
        options.progress.print("measuring the engines, about a minute", highlight=False)
        stage = await Stage.measure(mesh, options.seed)
        for number, (name, skew) in enumerate(itertools.product(traces, SKEWS)):
            epochs = make_epochs(traces[name], name, skew, options.seed, options.repeats + 1)
            await stage.pulse(number)
            played = await _play_epochs(stage, epochs, options)
            cell = {"trace": name, "skew": skew, **compare(played, simulate_epochs(stage, epochs))}
            cells.append(cell)
            options.progress.print(
                f"{name} {skew}: {cell['ratio']}, simulated {cell['simulated_ratio']}"
            )
    figures = {"repeats": options.repeats, "seed": options.seed, "slots": options.engines.slots}
    return {"cells": cells, **figures, "pass_s": rounded(stage.pass_s)}


Makespans = Mapping[str, Sequence[float]]  # of every repeat, by name of NAMES


async def _play_epochs(
    stage: Stage, epochs: Sequence[Workload], options: BenchOptions
) -> Makespans:
    await stage.play(epochs[0], BASELINES["pinned"], 0)
    found: dict[str, list[float]] = {name: [] for name in NAMES}
    for number, work in enumerate(epochs[1:], start=1):
        for name, system in NAMES.items():
            play = await stage.play(work, system, number, renew=False)
            found[name].append(play.makespan_s)
            line = (
                f"{work.name} {name}: {play.makespan_s:.1f} s, other programs took "
                f"{play.others_share:.0%}"
            )
            options.progress.print(line, highlight=False)
    return found


def simulate_epochs(stage: Stage, epochs: Sequence[Workload]) -> Makespans:
    """The same plays in the simulator."""
    found: dict[str, list[float]] = {name: [] for name in (*NAMES, TOLD)}
    earlier = list(epochs[0].trajectories)
    for work in epochs[1:]:
        for name, system in NAMES.items():
            found[name].append(stage.simulate(work, system, earlier).makespan_s)
        found[TOLD].append(stage.simulate(work, TREADLE, told=True).makespan_s)
        earlier += work.trajectories * len(NAMES)  # the live predictor has learned from every play
    return found


def compare(live: Makespans, simulated: Makespans) -> dict[str, Any]:
    """A cell's figures, see the keys above."""
    best = min(BASELINES, key=lambda name: median(live[name]))
    ratios, simulated_ratios = _ratios(live, best), _ratios(simulated, best)
    return rounded(
        {
            **{f"{name}_s": median(live[name]) for name in NAMES},
            "best_baseline": best,
            "ratio": median(ratios),
            "spread": [min(ratios), max(ratios)],
            "simulated_ratio": median(simulated_ratios),
            "told_ratio": median(_ratios(simulated, best, TOLD)),
            "makespans_s": {name: list(live[name]) for name in NAMES},
            "simulated_s": {name: list(simulated[name]) for name in (*NAMES, TOLD)},
        }
    )


def _ratios(makespans: Makespans, baseline: str, treadle: str = TREADLE) -> list[float]:
    pairs = zip(makespans[baseline], makespans[treadle], strict=True)
    return [baseline_s / treadle_s for baseline_s, treadle_s in pairs]


def page(figures: Figures) -> Figures:
    """What the page says beside the figures."""
    cells = figures["cells"]
    return {
        "off": max(abs(cell["simulated_ratio"] - cell["ratio"]) for cell in cells),
        "names": list(NAMES),
    }


BENCH = Bench(
    "live",
    "Rollouts of public traces (--data) on two live engines: Treadle, what frameworks do, and the "
    "simulator beside it. "
    "--repeats: epochs of each batch. Takes 8 minutes, and 13 a repeat, on 2 cores.",
    measure,
    engines=ENGINES,
    page=page,
)
