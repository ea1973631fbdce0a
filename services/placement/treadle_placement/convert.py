"""Between messages and the core: what is to be placed in, the plan out."""

import math
from collections.abc import Sequence

from google.protobuf.duration_pb2 import Duration
from treadle.engine.v1.engine_pb2 import DecodeCurve as CurveMessage
from treadle.placement.v1 import placement_pb2
from treadle_core.model import DecodeCurve
from treadle_core.placing.costs import CostModel
from treadle_core.placing.placement import Plan
from treadle_core.placing.question import PlanEngine, PlanTrajectory
from treadle_runtime.errors import InvalidArgument

MODELS = {
    placement_pb2.COST_MODEL_GROUP_SIZE: CostModel.GROUP_SIZE,
    placement_pb2.COST_MODEL_LINEAR_INTEGRAL: CostModel.LINEAR_INTEGRAL,
}
LONGEST_S = 315_576_000_000.0  # google.protobuf.Duration holds 10,000 years


def model_of(request: placement_pb2.PlanPlacementRequest, default: CostModel) -> CostModel:
    """The cost model asked for. Raises InvalidArgument for one that is unknown here."""
    if request.cost_model == placement_pb2.COST_MODEL_UNSPECIFIED:
        return default
    model = MODELS.get(request.cost_model)
    if model is None:
        raise InvalidArgument("cost_model", f"is not known here: {request.cost_model}")
    return model


def trajectories_of(request: placement_pb2.PlanPlacementRequest) -> list[PlanTrajectory]:
    return [
        PlanTrajectory(
            each.trajectory_id,
            each.remaining_tokens,
            each.context_tokens,
            each.current_engine_id,
            each.log_sigma,
            each.room_tokens if each.room_tokens else math.inf,  # NaN stays, and is refused
        )
        for each in request.trajectories
    ]


def engines_of(request: placement_pb2.PlanPlacementRequest, default: DecodeCurve) -> list[PlanEngine]:
    """The engines of a request.

    One without a curve is taken for as slow as the slowest that has one (never better than what was measured), or for
    `default` where none has; without tensor_parallel it has one accelerator.
    """
    given = [curve_of(each.decode_curve) for each in request.engines if has_curve(each)]
    missing = slowest(given) if given else default
    return [
        PlanEngine(
            each.engine_id,
            each.slot_limit,
            each.kv_tokens_capacity,
            each.tensor_parallel or 1,
            curve_of(each.decode_curve) if has_curve(each) else missing,
        )
        for each in request.engines
    ]


def has_curve(engine: placement_pb2.PlacementEngine) -> bool:
    """Whether it says anything: an unset curve and one of zeros are the same."""
    return engine.HasField("decode_curve") and engine.decode_curve != CurveMessage()


def curve_of(message: CurveMessage) -> DecodeCurve:
    return DecodeCurve(message.base_s, message.per_sequence_s, message.per_kv_token_s, message.prefill_tokens_per_s)


def slowest(curves: Sequence[DecodeCurve]) -> DecodeCurve:
    """The worst of each figure; a prefill rate of 0 is unknown, not slow."""
    rates = [curve.prefill_tokens_per_s for curve in curves if curve.prefill_tokens_per_s]
    return DecodeCurve(
        max(curve.base_s for curve in curves),
        max(curve.per_sequence_s for curve in curves),
        max(curve.per_kv_token_s for curve in curves),
        min(rates, default=0.0),
    )


def response_of(plan: Plan, solve_s: float) -> placement_pb2.PlanPlacementResponse:
    return placement_pb2.PlanPlacementResponse(
        groups=[
            placement_pb2.EngineGroup(
                engine_id=group.engine_id,
                trajectory_ids=group.trajectory_ids,
                predicted_time=duration_of(group.predicted_s),
            )
            for group in plan.groups
        ],
        predicted_makespan=duration_of(plan.makespan_s),
        lower_bound=duration_of(plan.lower_bound_s),
        solve_time=duration_of(solve_s),
    )


def duration_of(seconds: float) -> Duration:
    """To the nanosecond; what is longer than a Duration can be is the longest Duration."""
    whole = int(min(seconds, LONGEST_S))
    nanos = min(round((min(seconds, LONGEST_S) - whole) * 1e9), 999_999_999)
    return Duration(seconds=whole, nanos=nanos)
