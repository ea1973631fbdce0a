"""Trajectories that models score: teachers of several domains and a judge, at once (MOPD and search, ARL-Tangram §6.1).

A trajectory lives through its generation and its own tools, which are elsewhere, and then asks one model for a reward.
Lengths are those of the project's parametric agents; a third of the teachers have each kind. Domains have equal shares
of a batch, which suits groups of equal size best. How fast trajectories come to their end the paper says twice, and not
alike: hence two paces.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from treadle_sim.parametric import WORKLOADS, draw
from treadle_sim.tools.models import reading
from treadle_sim.tools.steps import generation_s
from treadle_sim.tools.trace import Call, Trace
from treadle_sim.workload import TrajectoryWork

TEACHERS = 9  # §6.1
JUDGE = "judge"
VERDICT_TOKENS = 16  # a choice
KINDS = ("math", "coding", "search")
LONGER = 3.0  # times the tokens of the project's agents: executions on 40 GPUs then take the 0.62 s of Table 1
DENSE = 1.0  # 2,048 trajectories on 40 GPUs then queue and restore for as long as in Table 1
SPARSE = 4.0  # lives are so many times longer: 1,024 keep groups of their own busy for 3% of the time, as in Figure 3b
TOOL_LLM = "qwen3-32b"
MOST_TOKENS, MOST_CONTEXT = 40_000, 65_536


def teachers(count: int = TEACHERS) -> list[str]:
    return [f"teacher-{at}" for at in range(count)]


def scored_batch(
    trajectories: int, seed: int, services: Sequence[str], *, pace: float = DENSE, skew: float = 0.0
) -> tuple[Trace, ...]:
    """A burst over all services. pace: of lives, DENSE or SPARSE. skew: shares fall as 1 / rank^skew.

    ValueError for no trajectory or no service.
    """
    if trajectories < 1 or not services:
        raise ValueError("at least one trajectory and one service are needed")
    weights = np.array([1.0 / (rank + 1) ** skew for rank in range(len(services))])
    ends = np.rint(np.cumsum(weights) / weights.sum() * trajectories).astype(np.int64)
    counts = np.diff(np.concatenate([[0], ends])).tolist()
    traces = []
    for at, (service, count) in enumerate(zip(services, counts, strict=True)):
        if not count:
            continue
        kind = "search" if service == JUDGE else KINDS[at % len(KINDS)]
        name = f"{service}-{kind}"
        agent = replace(WORKLOADS[kind], tokens_median=LONGER * WORKLOADS[kind].tokens_median)
        works = draw(name, agent, count, 1, seed, 0, TOOL_LLM, MOST_TOKENS, MOST_CONTEXT)
        traces += [_trace(f"{service}-{index}", service, work, pace) for index, work in enumerate(works)]
    return tuple(traces)


def _trace(trajectory_id: str, service: str, work: TrajectoryWork, pace: float) -> Trace:
    tokens = work.prompt_tokens + work.gen_tokens + sum(step.obs_tokens for step in work.steps[:-1])
    reward = reading(service, tokens, VERDICT_TOKENS if service == JUDGE else 0)
    call = Call(
        pace * lived_s(work),
        reward.cost,
        reward.single_unit_s,
        True,
        reward.key,
        reward.elasticity,
        reward.profiled_s,
        service,
    )
    return Trace(trajectory_id, service, (call,))


def lived_s(work: TrajectoryWork) -> float:
    """Until the reward: generating, and the tools."""
    gen, obs = [step.gen_tokens for step in work.steps], [step.obs_tokens for step in work.steps]
    return work.tool_s + sum(generation_s(work.prompt_tokens, gen, obs))
