"""RollArt's Figures 12 and 13 on simulated engines: slow environments, redundant ones, and the
asynchronous bound.

Its 12a compares trajectory-level interaction, where each trajectory goes on by itself, with
batch-level interaction, where every turn waits for all environments. Its 12b starts more groups,
and more samples of each, than a step trains; the first ones count. Its 13 changes how many weight
versions a trajectory may be behind. The published text has no numbers for 12; 13 saves at most a
factor of 1.22 over a bound of 1.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from treadle_core.rollouts.group import FirstK
from treadle_sim.engine_model import engine_model
from treadle_sim.workloads import parametric
from treadle_sim.workloads.workload import TrajectoryWork, groups

from treadle_bench.shaping.asynchrony import Asynchronous, AsyncSetting
from treadle_bench.shaping.population import PROMPT_TOKENS, Policy, make_prompts
from treadle_bench.shaping.rounds import GroupWork, Round
from treadle_bench.summary import median_of, range_of, rounded

LLM, ACCELERATOR = "Qwen3-8B", "H800"
ENGINES, SLOTS = 32, 64  # RollArt 12b: 32 H800
GROUPS, KEEP = 64, 8  # a training batch of 512 in groups of 8 (RollArt §7.1)
CONTEXT_TOKENS = 32_768
# seconds: mean and deviation of a turn's
LATENCIES = ((1.0, 1.0), (2.0, 2.0), (5.0, 5.0), (10.0, 10.0), (10.0, 1.0))
MORE_GROUPS, SIZES = (1.0, 1.25, 1.5), (8, 10, 12)
BOUNDS = (1, 2, 3, 4, 5, 6)
# Of asynchronous training; choices. The trainer takes about half as long as the engines for a
# batch.
ASYNC_ENGINES, ASYNC_SLOTS, IN_FLIGHT, TRAIN_TOKEN_S = 8, 128, 128, 1.5e-5
ASYNC_STEPS, ASYNC_WARM_UP = 20, 5
BOUND_PAPER = 1.22


def measure_latency(
    latency: tuple[float, float], seed: int, share: float = 1.0
) -> dict[str, float]:
    """Seconds of a rollout of search agents whose environments take so long, by either kind of
    interaction."""
    works = _draw("search", round(GROUPS * share), KEEP, seed)
    rng = np.random.default_rng([seed, 12])
    mean, deviation = latency

    def slowed(work: TrajectoryWork) -> TrajectoryWork:
        waits = np.maximum(rng.normal(mean, deviation, len(work.steps)), 0.0)
        pairs = zip(work.steps, waits.tolist(), strict=True)
        return replace(
            work, steps=tuple(replace(step, tool_s=step.tool_s + wait_s) for step, wait_s in pairs)
        )

    grouped = [
        GroupWork(prompt, tuple(map(slowed, samples)), FirstK(KEEP))
        for prompt, samples in groups(works).items()
    ]
    each, batch = (_play(grouped, len(grouped), share, barrier) for barrier in (False, True))
    return {"trajectory_s": each, "batch_s": batch, "ratio": batch / each}


def measure_redundancy(
    more_groups: float, size: int, seed: int, share: float = 1.0
) -> dict[str, float]:
    """Seconds until GROUPS groups of KEEP math agents have come of so many more. More of either has
    all that fewer have."""
    needed = round(GROUPS * share)
    drawn = groups(_draw("math", math.ceil(needed * max(MORE_GROUPS)), max(SIZES), seed))
    chosen = list(drawn.items())[: math.ceil(needed * more_groups)]
    grouped = [GroupWork(prompt, tuple(samples[:size]), FirstK(KEEP)) for prompt, samples in chosen]
    return {"seconds": _play(grouped, needed, share, barrier=False)}


def measure_bound(bound: int, seed: int, share: float = 1.0) -> dict[str, float]:
    """A step of asynchronous training."""
    policy = Policy(make_prompts(2_048, seed), 0.0)
    rng = np.random.default_rng([seed, 13])

    def draw() -> Any:
        prompt = int(rng.integers(len(policy.prompts)))
        return policy.sample(prompt, rng.standard_normal(KEEP), rng.random(KEEP)).tokens

    engines, held = max(round(ASYNC_ENGINES * share), 1), round(IN_FLIGHT * share)
    setting = AsyncSetting(
        engine_model(LLM, ACCELERATOR, 1, ASYNC_SLOTS),
        engines,
        round(GROUPS * share),
        held,
        bound,
        TRAIN_TOKEN_S * ASYNC_ENGINES / engines,
        PROMPT_TOKENS,
    )
    result = Asynchronous(setting, draw, ASYNC_STEPS, ASYNC_WARM_UP).run()
    return {
        "step_s": result.step_s,
        "aborted_share": result.aborted_share,
        "staleness": result.staleness,
    }


def _draw(workload: str, prompts: int, size: int, seed: int) -> Sequence[TrajectoryWork]:
    made = parametric.make(
        workload, prompts, size, seed, llm=LLM.lower(), max_context_tokens=CONTEXT_TOKENS
    )
    return made.trajectories


def _play(grouped: Sequence[GroupWork], needed: int, share: float, barrier: bool) -> float:
    model = engine_model(LLM, ACCELERATOR, 1, SLOTS)
    return (
        Round(model, max(round(ENGINES * share), 1), grouped, needed, barrier=barrier).run().seconds
    )


def latency_rows(found: Mapping[tuple[Any, ...], list[dict[str, float]]]) -> list[dict[str, Any]]:
    """Rows of 12a, from what each latency gave for each seed."""
    return [
        {
            "mean_s": key[0][0],
            "deviation_s": key[0][1],
            **_medians(of),
            "spread": range_of(each["ratio"] for each in of),
        }
        for key, of in found.items()
    ]


def redundancy_rows(
    found: Mapping[tuple[Any, ...], list[dict[str, float]]],
) -> list[dict[str, Any]]:
    """Rows of 12b. speedup: over no redundancy, of the same seed."""
    base = found[(1.0, KEEP)]
    return [
        {"groups": key[0], "size": key[1], **_medians(of), **_speedup(base, of, "seconds")}
        for key, of in found.items()
    ]


def bound_rows(found: Mapping[tuple[Any, ...], list[dict[str, float]]]) -> list[dict[str, Any]]:
    """Rows of 13. speedup: over a bound of 1, of the same seed."""
    base = found[(BOUNDS[0],)]
    return [
        {"bound": key[0], **_medians(of), **_speedup(base, of, "step_s")}
        for key, of in found.items()
    ]


def _speedup(
    base: Iterable[Mapping[str, float]], of: Iterable[Mapping[str, float]], key: str
) -> dict[str, Any]:
    ratios = [slow[key] / fast[key] for slow, fast in zip(base, of, strict=True)]
    return {"speedup": median_of(ratios), "spread": range_of(ratios)}


def _medians(of: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return rounded({key: median_of(each[key] for each in of) for key in of[0]})
