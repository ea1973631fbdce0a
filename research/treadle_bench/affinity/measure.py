"""RollArt's affinity (Figure 4a/b): which accelerators suit which work, and what it gains to route
work by that.

Qwen3-8B, engines of one GPU; 6 H20 cost about as much as 2 H800. `alone`: a prefill-heavy and a
decode-heavy task on each pool; `ratio`: makespan on the suited pool over that on the other, as
RollArt gives it. `sweep`: makespan on H800 over that on H20, by tokens read for each token written.
`mixed`: both tasks at once on both pools, for each system and routing: none, by the task's tag, or
by the prefill and decode seconds of an earlier epoch.

A batch depends on its arguments alone; routing only adds hardware tags.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.ticker import FuncFormatter
from rich.progress import Progress
from treadle_cli.report.style import FAINT
from treadle_sim.cluster import Cluster
from treadle_sim.driver import Driver
from treadle_sim.engine_model import EngineModel, engine_model
from treadle_sim.predictors import Noisy
from treadle_sim.systems import PAUSING, TREADLE, VERL, System
from treadle_sim.workloads import parametric
from treadle_sim.workloads.parametric import LogNormal, Parameters
from treadle_sim.workloads.workload import TrajectoryWork, Workload

from treadle_bench.bench import Bench, BenchOptions, Figures
from treadle_bench.pictures import SERIES, draw_groups, sheet, style
from treadle_bench.summary import median_of, range_of, rounded

LLM = "Qwen3-8B"
BANDWIDTH, COMPUTE = "H20", "H800"
POOLS = {BANDWIDTH: 6, COMPUTE: 2}  # GPUs that cost about the same (RollArt §3.1)
SLOTS = 32  # contexts of the prefill-heavy task that fit beside the weights of an H800
SAMPLES = 8  # of a prompt (RollArt §7.1)
BLOCK = 3 * SAMPLES  # divides evenly among the engines of any pool, in the order of arrival
PROMPTS = 48  # of a task; enough that steps queue on both pools
MAX_CONTEXT_TOKENS = 32_768

# RollArt describes FrozenLake and GEM-math by turns and thinking only, so these numbers are
# choices: many turns with long observations and short answers, and few turns with long thinking.
PREFILL_HEAVY = Parameters(
    tokens_median=150.0,
    tokens_sigma=0.3,
    steps_median=12.0,
    steps_elasticity=1.0,
    steps_sigma=0.1,
    step_tokens_sigma=0.4,
    prompt_tokens=LogNormal(500.0, 0.2, 2_000.0),
    obs_tokens=LogNormal(600.0, 0.4, 3_000.0),
    tool_mean_s={LLM.lower(): 0.1},
    tool_sigma=0.5,
    tool_limit_s=5.0,
)
DECODE_HEAVY = replace(
    PREFILL_HEAVY,
    tokens_median=3_000.0,
    tokens_sigma=0.35,
    steps_median=2.0,
    steps_elasticity=0.3,
    steps_sigma=0.2,
    step_tokens_sigma=0.5,
    prompt_tokens=LogNormal(300.0, 0.2, 2_000.0),
    obs_tokens=LogNormal(60.0, 0.4, 500.0),
    tool_mean_s={LLM.lower(): 0.05},
)
TASKS = {"prefill-heavy": (PREFILL_HEAVY, COMPUTE), "decode-heavy": (DECODE_HEAVY, BANDWIDTH)}

Play = Callable[[Sequence[TrajectoryWork], Sequence[str], System, int], float]

PAPER = {"prefill-heavy": (0.53, 0.53), "decode-heavy": (0.49, 0.79)}
# Tokens read for one written. The sum of both is constant, so that KV never limits; the first
# prompt is read too.
SWEEP = (0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 60.0)
SWEEP_STEPS, SWEEP_TOKENS = 8, 7_000.0
# of ln tokens written: small, so that work and not the longest trajectory sets the makespan
SWEEP_SIGMA = 0.2
ROUTINGS = UNROUTED, BY_TAG, BY_RATIO = ("unrouted", "by the task's tag", "by measured ratio")
SYSTEMS = (VERL, PAUSING, TREADLE)
PAGE = {
    "paper": PAPER,
    "routings": ROUTINGS,
    "samples": SAMPLES,
    "bandwidth": BANDWIDTH,
    "compute": COMPUTE,
}
ALONE = PAUSING  # it reserves KV for running trajectories, so that memory is not compared


async def measure(options: BenchOptions) -> dict[str, Any]:
    """--traces does not apply."""
    seeds = options.seeds
    prompts = max(2, round(PROMPTS * (options.scale or 1.0)))
    with Progress(console=options.progress, transient=True) as progress:
        task = progress.add_task(
            "affinity",
            total=len(seeds) * (2 * len(TASKS) + 3 * len(SYSTEMS)) + len(POOLS) * len(SWEEP),
        )

        def play(
            works: Sequence[TrajectoryWork], pools: Sequence[str], system: System, seed: int
        ) -> float:
            progress.advance(task)
            return _makespan_s(Workload("affinity", tuple(works)), pools, system, seed)

        alone = [_play_alone(name, seeds, prompts, play) for name in TASKS]
        sweep = [_play_sweep(read, options.seed, prompts, play) for read in SWEEP]
        mixed = [row for system in SYSTEMS for row in _play_mixed(system, seeds, prompts, play)]
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


def _makespan_s(workload: Workload, pools: Sequence[str], system: System, seed: int) -> float:
    engines = tuple(engine_model(LLM, name, 1, SLOTS) for name in pools for _ in range(POOLS[name]))
    predictor = None if system.predictor == "none" else Noisy(workload, seed)
    driver = Driver(
        workload, Cluster(engines), system.policy, system.tuning, predictor, paced=system.paced
    )
    return driver.run().makespan_s


def _play_alone(name: str, seeds: Sequence[int], prompts: int, play: Play) -> dict[str, Any]:
    kind, suited = TASKS[name]
    other = COMPUTE if suited == BANDWIDTH else BANDWIDTH
    drawn = {seed: draw_works(kind, prompts, seed, name) for seed in seeds}
    of = {
        pool: [play(works, [pool], ALONE, seed) for seed, works in drawn.items()]
        for pool in (suited, other)
    }
    return {
        "task": name,
        "suited": suited,
        "read_per_written": median_of(prefill_over_decode(works) for works in drawn.values()),
        "s": {pool: median_of(times) for pool, times in of.items()},
        **_ratio_to(of[other], of[suited]),
    }


def _play_sweep(read: float, seed: int, prompts: int, play: Play) -> dict[str, float]:
    written = SWEEP_TOKENS / (1.0 + read)
    obs = read * written / (SWEEP_STEPS - 1)  # nobody reads what the last step's tool returns
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
    works = draw_works(kind, prompts, seed, "sweep")
    taken_s = {pool: play(works, [pool], ALONE, seed) for pool in POOLS}
    ratio = taken_s[COMPUTE] / taken_s[BANDWIDTH]
    return {"read_per_written": rounded(prefill_over_decode(works)), "ratio": rounded(ratio)}


def _play_mixed(
    system: System, seeds: Sequence[int], prompts: int, play: Play
) -> list[dict[str, Any]]:
    of: dict[str, list[float]] = {routing: [] for routing in ROUTINGS}
    for seed in seeds:
        both = {name: draw_works(kind, prompts, seed, name) for name, (kind, _) in TASKS.items()}
        before = [
            work
            for name, (kind, _) in TASKS.items()
            for work in draw_works(kind, prompts, seed, name, epoch=1)
        ]
        plain = interleave(list(both.values()))
        by_tag = interleave([tag(works, TASKS[name][1]) for name, works in both.items()])
        for routing, works in (
            (UNROUTED, plain),
            (BY_TAG, by_tag),
            (BY_RATIO, route(plain, before)),
        ):
            of[routing].append(play(works, list(POOLS), system, seed))
    return [
        {
            "system": system.name,
            "routing": routing,
            "s": median_of(times),
            **_ratio_to(of[UNROUTED], times),
        }
        for routing, times in of.items()
    ]


def _ratio_to(base: Sequence[float], times: Sequence[float]) -> dict[str, Any]:
    ratios = [one / other for one, other in zip(times, base, strict=True)]
    return {"ratio": median_of(ratios), "spread": range_of(ratios)}


def draw_works(
    kind: Parameters, prompts: int, seed: int, name: str, *, epoch: int = 0
) -> tuple[TrajectoryWork, ...]:
    """A batch of one task."""
    return parametric.draw(
        name, kind, prompts, SAMPLES, seed, epoch, LLM.lower(), math.inf, MAX_CONTEXT_TOKENS
    )


def tag(works: Sequence[TrajectoryWork], accelerator: str) -> list[TrajectoryWork]:
    """Let the trajectories run on engines of that accelerator only."""
    return [replace(work, hardware_tags=(accelerator,)) for work in works]


def interleave(tasks: Sequence[Sequence[TrajectoryWork]]) -> list[TrajectoryWork]:
    """The tasks in turns, BLOCK trajectories of one at a time."""
    longest = max(len(works) for works in tasks)
    return [
        work
        for at in range(0, longest, BLOCK)
        for works in tasks
        for work in works[at : at + BLOCK]
    ]


def route(
    works: Sequence[TrajectoryWork], earlier: Sequence[TrajectoryWork]
) -> list[TrajectoryWork]:
    """Assign each prompt to an accelerator by its cost in the epoch `earlier`: those that gain most
    go to COMPUTE until both pools have the same work. If work could be divided, no other split of
    two pools would end sooner."""
    models = {name: engine_model(LLM, name, 1, SLOTS) for name in POOLS}
    costs: dict[str, dict[str, float]] = defaultdict(lambda: dict.fromkeys(POOLS, 0.0))
    for work in earlier:
        for name, model in models.items():
            costs[work.prompt_id][name] += work_s(work, model) / POOLS[name]
    order = sorted(costs, key=lambda prompt: costs[prompt][COMPUTE] / costs[prompt][BANDWIDTH])
    to_compute = np.concatenate([[0.0], np.cumsum([costs[prompt][COMPUTE] for prompt in order])])
    all_left = np.cumsum([costs[prompt][BANDWIDTH] for prompt in order])
    left = np.concatenate([[all_left[-1]], all_left[-1] - all_left])
    count = int(np.argmin(np.maximum(to_compute, left)))
    chosen = set(order[:count])
    return [
        replace(work, hardware_tags=(COMPUTE if work.prompt_id in chosen else BANDWIDTH,))
        for work in works
    ]


def work_s(work: TrajectoryWork, model: EngineModel) -> float:
    """Seconds of an engine with a full batch that a trajectory takes if its prefix is always
    cached."""
    curve, context, cached, seconds_ = model.curve, work.prompt_tokens, 0, 0.0
    batch = min(float(model.slots), model.kv_tokens / max(1, work.prompt_tokens + work.gen_tokens))
    for step in work.steps:
        seconds_ += curve.prefill_s(context - cached, cached)
        seconds_ += step.gen_tokens * (
            curve.decode_s(batch) / batch + curve.per_kv_token_s * context
        )
        cached = context + step.gen_tokens
        context = cached + step.obs_tokens
    return seconds_


def prefill_over_decode(works: Sequence[TrajectoryWork]) -> float:
    """Tokens read, each once, over tokens written."""
    read = sum(
        work.prompt_tokens + sum(step.obs_tokens for step in work.steps[:-1]) for work in works
    )
    return read / sum(work.gen_tokens for work in works)


def draw(found: Figures, file: Path) -> None:
    """Write the picture."""
    note = (
        f"{LLM}, {POOLS[BANDWIDTH]} {BANDWIDTH} against {POOLS[COMPUTE]} {COMPUTE}, which cost "
        "about the same."
    )
    with sheet("Which accelerators suit which work", note, file, height_in=4.0, top=0.76) as figure:
        left, right = figure.subplots(1, 2)
        sweep = [(row["read_per_written"], row["ratio"]) for row in found["sweep"]]
        left.plot(*zip(*sweep, strict=True), "o-", color=SERIES[0], linewidth=2.0)
        left.axhline(1.0, color=FAINT, linewidth=1.0)
        title = f"seconds of {COMPUTE} over {BANDWIDTH}"
        style(left, title, xscale="log", xlabel="tokens read for one written", ylim=(0, None))
        left.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        systems = list(dict.fromkeys(row["system"] for row in found["mixed"]))
        times = {
            name: [row["s"] for row in found["mixed"] if row["routing"] == name]
            for name in ROUTINGS
        }
        draw_groups(
            right, "both tasks on both pools: rollout seconds", systems, times, (FAINT, *SERIES)
        )
        right.legend(frameon=False, fontsize=8)


BENCH = Bench(
    "affinity",
    "RollArt's Figure 4: work on H20 against work on H800, and routing between them. Takes about "
    "2 minutes.",
    measure,
    page=lambda found: PAGE,
    draw=draw,
)
