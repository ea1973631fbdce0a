"""Reward models and what serving a trajectory on one takes: seconds by degree, bytes, and the time
to bring it back.

Seconds are those of the project's fitted engine profiles. A request reads a whole trajectory once:
for the log-probabilities of a teacher (MOPD's rewards), or as a judge with a verdict of a few
tokens. Computing bounds that: requests served one after the other take as long as a batch of them,
so one at a time is no handicap to who could batch.

Trajectories that models score: teachers of several domains and a judge, at once (MOPD and search,
ARL-Tangram §6.1).

A trajectory lives through its generation and its own tools, which are elsewhere, and then asks one
model for a reward. Lengths are those of the project's parametric agents; a third of the teachers
have each kind. Domains have equal shares of a batch, which suits groups of equal size best. How
fast trajectories come to their end the paper says twice, and not alike: hence two paces.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from treadle_core.tools.action import GPUS, Measured, UnitSet
from treadle_core.tools.grants import Service
from treadle_sim.engine_model import engine_model
from treadle_sim.workloads.parametric import WORKLOADS, draw
from treadle_sim.workloads.workload import TrajectoryWork

from treadle_bench.tools.trace import Call, Trace, generation_s

# teachers as large as the policy; "high-end GPUs" (ARL-Tangram §6.1)
LLM, ACCELERATOR = ("Qwen3-32B", "H200")
DEGREES = (1, 2, 4, 8)  # §5.3
WEIGHT_BYTES = 65_500_000_000  # 32.8 billion parameters of two bytes
ROOM_BYTES = 6_000_000_000  # KV and activations of one trajectory; a choice
GPU_BYTES = 141_000_000_000
HOST_BYTES_PER_S = 50e9  # to each GPU: what PCIe 5 x16 reaches
RESTORE_FIXED_S = 0.1  # mapping memory, waking workers; a choice


@dataclass(frozen=True, slots=True)
class Restoring:
    """How a service comes into the memory of its GPUs: bytes_per_s to each of them, after
    fixed_s."""

    bytes_per_s: float = HOST_BYTES_PER_S
    fixed_s: float = RESTORE_FIXED_S

    def seconds(self, degree: int) -> float:
        return self.fixed_s + WEIGHT_BYTES / degree / self.bytes_per_s


def services(names: list[str]) -> list[Service]:
    """Each model in each degree: another degree is another service (§5.3)."""
    return [
        Service(name, degree, (WEIGHT_BYTES + ROOM_BYTES) // degree)
        for name in names
        for degree in DEGREES
    ]


def reading(service: str, tokens: int, verdict_tokens: int = 0) -> Call:
    """A reward that reads a trajectory of so many tokens and answers with so many."""
    took_s = {}
    for degree in DEGREES:
        curve = engine_model(LLM, ACCELERATOR, degree).curve
        one_s = curve.decode_s(1) + curve.per_kv_token_s * tokens
        took_s[degree] = curve.prefill_s(tokens, 0) + verdict_tokens * one_s
    points = tuple(
        (degree, min(1.0, took_s[1] / (degree * seconds))) for degree, seconds in took_s.items()
    )
    return Call(
        0.0,
        {GPUS: UnitSet(DEGREES)},
        took_s[1],
        reward=True,
        key=GPUS,
        elasticity=Measured(points),
        profiled_s=took_s[1],
        service=service,
    )


TEACHERS = 9  # §6.1
JUDGE = "judge"
VERDICT_TOKENS = 16  # a choice
KINDS = ("math", "coding", "search")
# times the tokens of the project's agents: executions on 40 GPUs then take the 0.62 s of Table 1
LONGER = 3.0
DENSE = 1.0  # 2,048 trajectories on 40 GPUs then queue and restore for as long as in Table 1
# lives are so many times longer: 1,024 keep groups of their own busy for 3% of the time, as in
# Figure 3b
SPARSE = 4.0
TOOL_LLM = "qwen3-32b"
MOST_TOKENS, MOST_CONTEXT = 40_000, 65_536


def teachers(count: int = TEACHERS) -> list[str]:
    return [f"teacher-{at}" for at in range(count)]


def scored_batch(
    trajectories: int, seed: int, services: Sequence[str], *, pace: float = DENSE, skew: float = 0.0
) -> tuple[Trace, ...]:
    """A burst over all services. pace: of lives, DENSE or SPARSE. skew: shares fall as 1 /
    rank^skew.

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
        traces += [
            _trace(f"{service}-{index}", service, work, pace) for index, work in enumerate(works)
        ]
    return tuple(traces)


def _trace(trajectory_id: str, service: str, work: TrajectoryWork, pace: float) -> Trace:
    tokens = work.final_context_tokens - work.steps[-1].obs_tokens
    reward = reading(service, tokens, VERDICT_TOKENS if service == JUDGE else 0)
    return Trace(trajectory_id, service, (replace(reward, generation_s=pace * lived_s(work)),))


def lived_s(work: TrajectoryWork) -> float:
    """Until the reward: generating, and the tools."""
    return work.tool_s + sum(generation_s(work))
