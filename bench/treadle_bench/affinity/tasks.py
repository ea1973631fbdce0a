"""Two tasks on either side of what RollArt tells apart, and how their trajectories are sent to accelerators.

Invariants: a batch depends on its arguments alone; routing only adds hardware tags, no trajectory is lost or changed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from treadle_sim.engine_model import EngineModel, engine_model
from treadle_sim.workloads.parametric import LogNormal, Parameters, draw
from treadle_sim.workloads.workload import TrajectoryWork

LLM = "Qwen3-8B"
BANDWIDTH, COMPUTE = "H20", "H800"
POOLS = {BANDWIDTH: 6, COMPUTE: 2}  # GPUs that cost about the same (RollArt §3.1)
SLOTS = 32  # so many contexts of the prefill-heavy task fit beside the weights of an H800
SAMPLES = 8  # of a prompt (RollArt §7.1)
BLOCK = 3 * SAMPLES  # goes into any pool's engines evenly, in the order of arrival
PROMPTS = 48  # of a task: both pools have to queue
MAX_CONTEXT_TOKENS = 32_768

# FrozenLake and GEM-math of RollArt are told apart by turns and thinking alone; the numbers here are chosen to lie on
# either side. Many turns, long observations and a short answer; few turns with long thinking.
PREFILL_HEAVY = Parameters(
    tokens_median=150.0,
    tokens_sigma=0.3,
    within_prompt=0.45,
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
DECODE_HEAVY = Parameters(
    tokens_median=3_000.0,
    tokens_sigma=0.35,
    within_prompt=0.45,
    steps_median=2.0,
    steps_elasticity=0.3,
    steps_sigma=0.2,
    step_tokens_sigma=0.5,
    prompt_tokens=LogNormal(300.0, 0.2, 2_000.0),
    obs_tokens=LogNormal(60.0, 0.4, 500.0),
    tool_mean_s={LLM.lower(): 0.05},
    tool_sigma=0.5,
    tool_limit_s=5.0,
)
TASKS = {"prefill-heavy": (PREFILL_HEAVY, COMPUTE), "decode-heavy": (DECODE_HEAVY, BANDWIDTH)}


def works_of(kind: Parameters, prompts: int, seed: int, name: str, *, epoch: int = 0) -> tuple[TrajectoryWork, ...]:
    """A batch of one task."""
    return draw(name, kind, prompts, SAMPLES, seed, epoch, LLM.lower(), math.inf, MAX_CONTEXT_TOKENS)


def tagged(works: Sequence[TrajectoryWork], accelerator: str) -> list[TrajectoryWork]:
    """The same, for engines of that accelerator alone."""
    return [replace(work, hardware_tags=(accelerator,)) for work in works]


def interleaved(tasks: Sequence[Sequence[TrajectoryWork]]) -> list[TrajectoryWork]:
    """Both tasks by turns, BLOCK of one at a time."""
    longest = max(len(works) for works in tasks)
    return [work for at in range(0, longest, BLOCK) for works in tasks for work in works[at : at + BLOCK]]


def routed(works: Sequence[TrajectoryWork], earlier: Sequence[TrajectoryWork]) -> list[TrajectoryWork]:
    """Prompts to accelerators by what they took in `earlier`: those to COMPUTE whose work is the cheaper there the
    more, until both pools have the same to do. For two pools no other split ends sooner, work being divisible."""
    models = {name: engine_model(LLM, name, 1, SLOTS) for name in POOLS}
    costs: dict[str, dict[str, float]] = {}
    for work in earlier:
        of_prompt = costs.setdefault(work.prompt_id, dict.fromkeys(POOLS, 0.0))
        for name, model in models.items():
            of_prompt[name] += work_s(work, model) / POOLS[name]
    order = sorted(costs, key=lambda prompt: costs[prompt][COMPUTE] / costs[prompt][BANDWIDTH])
    to_compute = np.concatenate([[0.0], np.cumsum([costs[prompt][COMPUTE] for prompt in order])])
    all_left = np.cumsum([costs[prompt][BANDWIDTH] for prompt in order])
    left = np.concatenate([[all_left[-1]], all_left[-1] - all_left])
    count = int(np.argmin(np.maximum(to_compute, left)))
    chosen = set(order[:count])
    return [replace(work, hardware_tags=(COMPUTE if work.prompt_id in chosen else BANDWIDTH,)) for work in works]


def work_s(work: TrajectoryWork, model: EngineModel) -> float:
    """Seconds of an engine whose batch is full that a trajectory takes, its prefix always cached."""
    curve, context, seconds_ = model.curve, work.prompt_tokens, 0.0
    cached = 0
    batch = min(float(model.slots), model.kv_tokens / max(1, work.prompt_tokens + work.gen_tokens))
    for step in work.steps:
        seconds_ += curve.prefill_s(context - cached, cached)
        seconds_ += step.gen_tokens * (curve.decode_s(batch) / batch + curve.per_kv_token_s * context)
        cached = context + step.gen_tokens
        context = cached + step.obs_tokens
    return seconds_


def prefill_over_decode(works: Sequence[TrajectoryWork]) -> float:
    """Tokens to read, each once, over tokens written."""
    read = sum(work.prompt_tokens + sum(step.obs_tokens for step in work.steps[:-1]) for work in works)
    return read / sum(work.gen_tokens for work in works)
