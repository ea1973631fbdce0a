"""A makespan that no schedule whatever beats on a budget of GPUs: the denominator of every figure.

The larger of two: the trajectory that takes longest alone on the engine that is fastest for it, its tools included and
everything cached but what must be prefilled once; and all work at the best throughput a GPU that any batch of any
degree reaches, with no idle moment. Both use the simulated curves themselves, not the planner's line.
"""

from __future__ import annotations

import numpy as np

from treadle_sim.engine_model import EngineModel
from treadle_sim.workloads.workload import TrajectoryWork, Workload


def lower_bound_s(workload: Workload, models: tuple[EngineModel, ...], gpus: int) -> float:
    """Seconds; models: the engines that there could be, of which those that hold nothing are left out."""
    usable = [model for model in models if model.kv_tokens > 0 and model.gpus <= gpus]
    return max(longest_alone_s(workload, usable), work_s(workload, usable, gpus))


def longest_alone_s(workload: Workload, models: list[EngineModel]) -> float:
    """The slowest trajectory where nothing disturbs it."""
    return max(min(alone_s(work, model) for model in models) for work in workload.trajectories)


def alone_s(work: TrajectoryWork, model: EngineModel) -> float:
    """Seconds of one trajectory on an empty engine."""
    curve = model.curve
    step_s = curve.decode_s(1.0)
    context, cached, seconds = work.prompt_tokens, 0, 0.0
    for step in work.steps:
        seconds += curve.prefill_s(context - cached, cached)
        seconds += (step.gen_tokens - 1) * (step_s + curve.per_kv_token_s * (context + 0.5 * step.gen_tokens))
        seconds += step.tool_s
        total = context + step.gen_tokens
        cached = (total - 1) // model.page_tokens * model.page_tokens
        context = total + step.obs_tokens
    return seconds


def work_s(workload: Workload, models: list[EngineModel], gpus: int) -> float:
    """All work spread evenly over GPUs that are never idle: each part at the degree that is cheapest for it."""
    decoded = sum(work.gen_tokens - len(work.steps) for work in workload.trajectories)  # a prefill yields the first
    new = sum(work.prompt_tokens for work in {w.prompt_id: w for w in workload.trajectories}.values())
    kv = 0.0
    for work in workload.trajectories:
        context = work.prompt_tokens
        for number, step in enumerate(work.steps):
            kv += (step.gen_tokens - 1) * (context + 0.5 * step.gen_tokens)
            context += step.gen_tokens + step.obs_tokens
            if number + 1 < len(work.steps):
                new += step.obs_tokens
    decode = min(
        model.gpus * min(model.curve.decode_s(float(n)) / n for n in np.arange(1, model.slots + 1)) for model in models
    )
    read = min(model.gpus * model.curve.per_kv_token_s for model in models)
    prefill = min(model.gpus * model.curve.prefill_token_s for model in models)
    return (decoded * decode + kv * read + new * prefill) / gpus
