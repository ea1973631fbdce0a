"""A prefill-heavy and a decode-heavy task, and ways to route their trajectories to accelerators.

Invariants: a batch depends on its arguments alone; routing only adds hardware tags.
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
SLOTS = 32  # contexts of the prefill-heavy task that fit beside the weights of an H800
SAMPLES = 8  # of a prompt (RollArt §7.1)
BLOCK = 3 * SAMPLES  # divides evenly among the engines of any pool, in the order of arrival
PROMPTS = 48  # of a task; enough that steps queue on both pools
MAX_CONTEXT_TOKENS = 32_768

# RollArt describes FrozenLake and GEM-math by turns and thinking only, so these numbers are choices: many turns with
# long observations and short answers, and few turns with long thinking.
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


def draw_works(kind: Parameters, prompts: int, seed: int, name: str, *, epoch: int = 0) -> tuple[TrajectoryWork, ...]:
    """A batch of one task."""
    return draw(name, kind, prompts, SAMPLES, seed, epoch, LLM.lower(), math.inf, MAX_CONTEXT_TOKENS)


def tag(works: Sequence[TrajectoryWork], accelerator: str) -> list[TrajectoryWork]:
    """Let the trajectories run on engines of that accelerator only."""
    return [replace(work, hardware_tags=(accelerator,)) for work in works]


def interleave(tasks: Sequence[Sequence[TrajectoryWork]]) -> list[TrajectoryWork]:
    """The tasks in turns, BLOCK trajectories of one at a time."""
    longest = max(len(works) for works in tasks)
    return [work for at in range(0, longest, BLOCK) for works in tasks for work in works[at : at + BLOCK]]


def route(works: Sequence[TrajectoryWork], earlier: Sequence[TrajectoryWork]) -> list[TrajectoryWork]:
    """Assign each prompt to an accelerator by its cost in the epoch `earlier`: those that gain most go to COMPUTE until
    both pools have the same work. If work could be divided, no other split of two pools would end sooner."""
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
    """Seconds of an engine with a full batch that a trajectory takes if its prefix is always cached."""
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
    """Tokens read, each once, over tokens written."""
    read = sum(work.prompt_tokens + sum(step.obs_tokens for step in work.steps[:-1]) for work in works)
    return read / sum(work.gen_tokens for work in works)
