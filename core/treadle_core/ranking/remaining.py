"""How much is left of a trajectory: tokens and time, from its last prediction and what happened since.

Invariant: never negative, never more than the trajectory's cap leaves (one over-predicted trajectory would otherwise
set every bound).
"""

import math

from treadle_core.model import DEFAULT_BASE_S, EngineSpec, Estimate, TrajectoryRecord
from treadle_core.placing.question import MOST_LOG_SIGMA
from treadle_core.tuning import Tuning

P90_Z = 1.2815515655446004  # standard deviations from the median to the 90th percentile of a normal distribution


def remaining_tokens(record: TrajectoryRecord, tuning: Tuning) -> float:
    """Tokens left to sample: the median prediction less what was sampled since, within the cap."""
    if record.prediction is None:
        left = tuning.default_remaining_tokens
    else:
        sampled_since = max(0, record.gen_tokens - record.prediction.gen_tokens)
        left = max(record.prediction.remaining_tokens.p50 - sampled_since, tuning.least_remaining_tokens)
    return min(left, room_tokens(record))


def room_tokens(record: TrajectoryRecord) -> float:
    """Tokens that the trajectory's cap leaves; infinite without one."""
    return float(max(0, record.max_total_tokens - record.gen_tokens)) if record.max_total_tokens else math.inf


def log_sigma(record: TrajectoryRecord) -> float:
    """Standard deviation of ln(tokens left), by the prediction's median and upper quantile; 0 where nobody predicts."""
    return log_deviation(record.prediction.remaining_tokens) if record.prediction is not None else 0.0


def log_deviation(estimate: Estimate) -> float:
    """Standard deviation of the logarithm that an estimate's median and upper quantile stand for, as far as plans take
    it: a median of next to nothing beside a long upper quantile stands for more."""
    if not estimate.p90 > estimate.p50 > 0.0:
        return 0.0
    return min((math.log(estimate.p90) - math.log(estimate.p50)) / P90_Z, MOST_LOG_SIGMA)


def reserve_tokens(record: TrajectoryRecord, mean_observed_tokens: float, tuning: Tuning) -> int:
    """KV tokens that an engine holds room for: the context that is here and a share of its growth to the end, which is
    what is left to sample and what the tools of the turns left will say, as much a turn as they said so far (before any
    did: `mean_observed_tokens`, of all)."""
    context_tokens = record.context_tokens or record.prompt_tokens
    turns = record.prediction.remaining_turns.p50 if record.prediction and record.prediction.remaining_turns else 0.0
    observed = context_tokens - record.prompt_tokens - record.gen_tokens
    a_turn = observed / record.next_turn if record.next_turn > 0 and observed > 0 else mean_observed_tokens
    growth = remaining_tokens(record, tuning) + max(0.0, turns - 1.0) * a_turn
    return context_tokens + math.ceil(tuning.reserve_share * growth)


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
