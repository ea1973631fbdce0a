"""How much is left of a trajectory: tokens and time, from its last prediction and what happened since.

Invariant: never negative, never more than the trajectory's cap leaves (one over-predicted trajectory would otherwise
set every bound).
"""

from treadle_core.model import DEFAULT_BASE_S, EngineSpec, TrajectoryRecord
from treadle_core.tuning import Tuning


def remaining_tokens(record: TrajectoryRecord, tuning: Tuning) -> float:
    """Tokens left to sample: the median prediction less what was sampled since, within the cap."""
    if record.prediction is None:
        left = tuning.default_remaining_tokens
    else:
        sampled_since = max(0, record.gen_tokens - record.prediction.gen_tokens)
        left = max(record.prediction.remaining_tokens.p50 - sampled_since, tuning.least_remaining_tokens)
    if record.max_total_tokens:
        left = min(left, float(max(0, record.max_total_tokens - record.gen_tokens)))
    return left


def remaining_s(record: TrajectoryRecord, token_s: float, tuning: Tuning) -> float:
    """Seconds left if it never waited: `token_s` for each token, and the tool calls of the turns that are predicted."""
    return remaining_tokens(record, tuning) * token_s + remaining_tool_s(record)


def token_s(spec: EngineSpec | None) -> float:
    """Seconds an engine takes for a token of one sequence while all its slots decode."""
    if spec is None:
        return DEFAULT_BASE_S
    return spec.decode_curve.base_s + spec.decode_curve.per_sequence_s * spec.slot_limit


def remaining_tool_s(record: TrajectoryRecord) -> float:
    """Seconds of tool calls left; 0 while no call was seen or nobody predicts turns."""
    if record.prediction is None or record.prediction.remaining_turns is None:
        return 0.0
    return record.prediction.remaining_turns.p50 * record.tool_s
