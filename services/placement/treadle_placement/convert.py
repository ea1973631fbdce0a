"""Convert a request to the core's placement question, and its plan to a response."""

import math
from collections.abc import Sequence

from treadle.engine.v1.engine_pb2 import DecodeCurve as CurveMessage
from treadle.placement.v1 import placement_pb2 as pb
from treadle_core.model import CostModel, DecodeCurve
from treadle_core.placing.placement import Plan
from treadle_core.placing.question import PlanEngine, PlanTrajectory
from treadle_runtime.errors import InvalidArgument
from treadle_runtime.times import duration


def model_of(request: pb.PlanPlacementRequest, default: CostModel) -> CostModel:
    """The cost model of a request. Raises InvalidArgument for one that this service does not know."""
    if request.cost_model == pb.COST_MODEL_UNSPECIFIED:
        return default
    if request.cost_model not in pb.CostModel.values():
        raise InvalidArgument("cost_model", f"is not known here: {request.cost_model}")
    return CostModel[pb.CostModel.Name(request.cost_model).removeprefix("COST_MODEL_")]


def trajectories_of(request: pb.PlanPlacementRequest) -> list[PlanTrajectory]:
    return [
        PlanTrajectory(
            each.trajectory_id,
            each.remaining_tokens,
            each.context_tokens,
            each.current_engine_id,
            each.log_sigma,
            each.room_tokens if each.room_tokens else math.inf,  # NaN stays; the core refuses it
        )
        for each in request.trajectories
    ]


def engines_of(request: pb.PlanPlacementRequest, default: DecodeCurve) -> list[PlanEngine]:
    """The engines of a request.

    An engine without a curve gets the worst of each figure of those that have one (never better than what was
    measured), or `default` where none has; without tensor_parallel it has one accelerator.
    """
    curves = [_curve_of(each) for each in request.engines]
    known = [curve for curve in curves if curve is not None]
    missing = _slowest(known) if known else default
    return [
        PlanEngine(
            each.engine_id, each.slot_limit, each.kv_tokens_capacity, each.tensor_parallel or 1, curve or missing
        )
        for each, curve in zip(request.engines, curves, strict=True)
    ]


def response_of(plan: Plan, solve_s: float) -> pb.PlanPlacementResponse:
    return pb.PlanPlacementResponse(
        groups=[
            pb.EngineGroup(
                engine_id=group.engine_id,
                trajectory_ids=group.trajectory_ids,
                predicted_time=duration(group.predicted_s),
            )
            for group in plan.groups
        ],
        predicted_makespan=duration(plan.makespan_s),
        lower_bound=duration(plan.lower_bound_s),
        solve_time=duration(solve_s),
    )


def _curve_of(engine: pb.PlacementEngine) -> DecodeCurve | None:
    """None where the curve is unset or all zeros."""
    curve = engine.decode_curve
    if curve == CurveMessage():
        return None
    return DecodeCurve(curve.base_s, curve.per_sequence_s, curve.per_kv_token_s, curve.prefill_tokens_per_s)


def _slowest(curves: Sequence[DecodeCurve]) -> DecodeCurve:
    rates = [curve.prefill_tokens_per_s for curve in curves if curve.prefill_tokens_per_s]  # 0: unknown
    return DecodeCurve(
        max(curve.base_s for curve in curves),
        max(curve.per_sequence_s for curve in curves),
        max(curve.per_kv_token_s for curve in curves),
        min(rates, default=0.0),
    )
