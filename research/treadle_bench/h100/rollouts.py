"""The rollouts of `treadle bench h100`: one batch of trajectories, through Treadle and straight to
the engines.

Work: prompts of a trace in --data as in `treadle bench live`, with lengths for a GPU. Straight to
the engines means the same asyncio loop with SGLang's HTTP streams and no mesh: the engines
themselves order and admit, first come first served. PINNED: trajectories go to the engines in turn
and stay. LEAST: every step goes to the engine with the fewest steps of this rollout at that moment;
its KV comes from the shared storage, or is computed again.
"""

import asyncio
import math
import time
from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any

import numpy as np
from treadle_sim.workloads.resample import resample
from treadle_sim.workloads.workload import Step, TrajectoryWork, Workload, groups

from treadle_bench.fidelity.live import token_ids
from treadle_bench.h100.engine import RawEngine

TREADLE, PINNED, LEAST = "treadle", "pinned", "least"
NAMES = (TREADLE, PINNED, LEAST)  # in the order of play
LAST_TENTH = 0.1


def make_epochs(
    works: Sequence[TrajectoryWork],
    prompts: int,
    samples: int,
    turns: int,
    gen_tokens: int,
    context_tokens: int,
    tool_s: float,
    seed: int,
    count: int,
) -> list[Workload]:
    """`count` epochs of the same prompts, spread over all lengths of the trace. turns, gen_tokens,
    context_tokens, tool_s: means of a trajectory of the first epoch; context: of prompt and tools'
    answers together."""
    by_prompt = groups(works)
    by_length = sorted(
        by_prompt, key=lambda prompt: fmean(work.gen_tokens for work in by_prompt[prompt])
    )
    chosen = {
        by_length[round(share * (len(by_length) - 1))] for share in np.linspace(0.05, 0.95, prompts)
    }
    epochs = []
    for epoch in range(count):
        sampled = resample(works, len(by_prompt), samples, seed, epoch=epoch).trajectories
        epochs.append([work for work in sampled if work.prompt_id in chosen])
    first = epochs[0]
    every = max(round(fmean(len(work.steps) for work in first) / turns), 1)
    given = fmean(work.final_context_tokens - work.gen_tokens for work in first)
    of_tools_s = fmean(sum(step.tool_s for step in work.steps) for work in first)
    factors = (
        gen_tokens / fmean(work.gen_tokens for work in first),
        context_tokens / given,
        tool_s / of_tools_s if of_tools_s > 0 else 0.0,
    )
    return [
        Workload(f"h100-{number}", tuple(_shrink(work, every, *factors) for work in of))
        for number, of in enumerate(epochs)
    ]


def _shrink(
    work: TrajectoryWork, every: int, generated: float, given: float, seconds: float
) -> TrajectoryWork:
    joined = (work.steps[at : at + every] for at in range(0, len(work.steps), every))
    steps = tuple(
        Step(
            gen_tokens=max(round(generated * sum(step.gen_tokens for step in steps)), 1),
            obs_tokens=max(round(given * sum(step.obs_tokens for step in steps)), 1),
            tool_s=seconds * sum(step.tool_s for step in steps),
        )
        for steps in joined
    )
    return replace(work, prompt_tokens=max(round(given * work.prompt_tokens), 1), steps=steps)


async def play_raw(
    engines: Sequence[RawEngine], work: Workload, rule: str, salt: str
) -> list[float]:
    """Seconds from the start to the end of each trajectory, in the workload's order. salt: of the
    random tokens. Raises ValueError for a wrong length."""
    running = [0] * len(engines)
    began_s = time.monotonic()

    async def run_one(number: int, trajectory: TrajectoryWork) -> float:
        prompt, observed = token_ids(trajectory, salt)
        context = list(prompt)
        for step, answer in zip(trajectory.steps, observed, strict=True):
            chosen = number % len(engines) if rule == PINNED else running.index(min(running))
            running[chosen] += 1
            sampled: list[int] = []
            async for chunk in engines[chosen].stream(context, step.gen_tokens):
                sampled += chunk.token_ids
            running[chosen] -= 1
            if len(sampled) != step.gen_tokens:
                raise ValueError(
                    f"a step came to {len(sampled)} tokens instead of {step.gen_tokens}"
                )
            await asyncio.sleep(step.tool_s)
            context += [*sampled, *answer]
        return time.monotonic() - began_s

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(run_one(*each)) for each in enumerate(work.trajectories)]
    return [task.result() for task in tasks]


def describe_play(ends_s: Sequence[float], work: Workload) -> dict[str, Any]:
    """Makespan, mean end, tokens a second, and the straggler tax: the share of the makespan for the
    last tenth."""
    makespan_s = max(ends_s)
    in_order = sorted(ends_s)
    before_last = in_order[math.ceil((1 - LAST_TENTH) * len(in_order)) - 1]
    return {
        "makespan_s": makespan_s,
        "mean_s": fmean(ends_s),
        "tokens_per_s": work.gen_tokens / makespan_s,
        "straggler_tax": 1 - before_last / makespan_s,
    }
