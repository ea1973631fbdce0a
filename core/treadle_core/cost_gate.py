"""Is a move worth it? Nothing waits on a migration for longer than the migration saves (Heddle 5.3).

A prefix moves while the trajectory's tool runs; what the tool does not hide is exposed and delays the next step. Where
KV has no shared storage the target computes it again, which takes the target's time from others even when it is hidden.
"""

from dataclasses import dataclass

from treadle_core.model import DEFAULT_PREFILL_TOKENS_PER_S, EngineSpec, KvTransfer
from treadle_core.tuning import Tuning


@dataclass(frozen=True, slots=True)
class Verdict:
    """`give_up_after_s`: the longest that the move may take before it costs more than it saves."""

    passes: bool
    reason: str
    cost_s: float
    exposed_s: float
    give_up_after_s: float


def move_cost_s(context_tokens: int, source: EngineSpec, target: EngineSpec, tuning: Tuning) -> float:
    """Seconds from asking for a move to the switch, in tokens of prefix over the rate of the way it takes."""
    if moves_by_storage(source, target):
        return tuning.move_fixed_s + context_tokens * source.kv_bytes_per_token / tuning.storage_bytes_per_s
    rate = target.decode_curve.prefill_tokens_per_s or DEFAULT_PREFILL_TOKENS_PER_S
    return tuning.move_fixed_s + context_tokens / rate


def moves_by_storage(source: EngineSpec, target: EngineSpec) -> bool:
    """Whether both ends read the same store of KV."""
    return source.kv_transfer is KvTransfer.STORAGE and target.kv_transfer is KvTransfer.STORAGE


def judge(
    *, context_tokens: int, tool_left_s: float, saving_s: float, source: EngineSpec, target: EngineSpec, tuning: Tuning
) -> Verdict:
    """Weighs a move of `context_tokens` during a tool call that is expected to last `tool_left_s` more seconds."""
    cost_s = move_cost_s(context_tokens, source, target, tuning)
    exposed_s = max(0.0, cost_s - tool_left_s)
    # Hidden transfers cost nobody; a hidden prefill costs the target's other trajectories.
    price_s = exposed_s if moves_by_storage(source, target) else cost_s
    price_s = max(price_s, tuning.move_fixed_s)
    if saving_s < tuning.move_gain_factor * price_s:
        return Verdict(False, "saves too little", cost_s, exposed_s, 0.0)
    return Verdict(True, "worth it", cost_s, exposed_s, tool_left_s + saving_s)
