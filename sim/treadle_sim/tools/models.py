"""Reward models and what serving a trajectory on one takes: seconds by degree, bytes, and the time to bring it back.

Seconds are those of the project's fitted engine profiles. A request reads a whole trajectory once: for the
log-probabilities of a teacher (MOPD's rewards), or as a judge with a verdict of a few tokens. Computing bounds that:
requests served one after the other take as long as a batch of them, so one at a time is no handicap to who could batch.
"""

from __future__ import annotations

from dataclasses import dataclass

from treadle_core.elastic.action import GPUS, Measured, UnitSet
from treadle_core.managers.grants import Service

from treadle_sim.profiles import engine_model
from treadle_sim.tools.trace import Call

LLM, ACCELERATOR = "Qwen3-32B", "H200"  # teachers as large as the policy; "high-end GPUs" (ARL-Tangram §6.1)
DEGREES = (1, 2, 4, 8)  # §5.3
WEIGHT_BYTES = 65_500_000_000  # 32.8 billion parameters of two bytes
ROOM_BYTES = 6_000_000_000  # KV and activations of one trajectory; a choice
GPU_BYTES = 141_000_000_000
HOST_BYTES_PER_S = 50e9  # to each GPU: what PCIe 5 x16 reaches
RESTORE_FIXED_S = 0.1  # mapping memory, waking workers; a choice


@dataclass(frozen=True, slots=True)
class Restoring:
    """How a service comes into the memory of its GPUs: bytes_per_s to each of them, after fixed_s."""

    bytes_per_s: float = HOST_BYTES_PER_S
    fixed_s: float = RESTORE_FIXED_S

    def seconds(self, degree: int) -> float:
        return self.fixed_s + WEIGHT_BYTES / degree / self.bytes_per_s


def services(names: list[str]) -> list[Service]:
    """Each model in each degree: another degree is another service (§5.3)."""
    return [Service(name, degree, (WEIGHT_BYTES + ROOM_BYTES) // degree) for name in names for degree in DEGREES]


def reading(service: str, tokens: int, verdict_tokens: int = 0) -> Call:
    """A reward that reads a trajectory of so many tokens and answers with so many."""
    took_s = {}
    for degree in DEGREES:
        curve = engine_model(LLM, ACCELERATOR, degree).curve
        one_s = curve.decode_s(1) + curve.per_kv_token_s * tokens
        took_s[degree] = curve.prefill_s(tokens, 0) + verdict_tokens * one_s
    points = tuple((degree, min(1.0, took_s[1] / (degree * seconds))) for degree, seconds in took_s.items())
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
