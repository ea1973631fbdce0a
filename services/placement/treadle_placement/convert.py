"""Convert a request to the input of the core's planner, and its plan to a response."""

import math
from typing import Any

import numpy as np
import numpy.typing as npt
from treadle.engine.v1.engine_pb2 import DecodeCurve as CurveMessage
from treadle.placement.v1 import placement_pb2 as pb
from treadle_core.model import CostModel, DecodeCurve
from treadle_core.placing.placement import Plan
from treadle_core.placing.question import PlanEngine, slowest_curve
from treadle_runtime.fields import duration, require, value_of


def model_of(request: pb.PlanPlacementRequest, default: CostModel) -> CostModel:
    """Return the cost model of a request. Raises InvalidArgument for one that this service does not
    know."""
    if request.cost_model == pb.COST_MODEL_UNSPECIFIED:
        return default
    return value_of(CostModel, "cost_model", pb.CostModel, request.cost_model)


def columns_of(request: pb.PlanPlacementRequest) -> dict[str, Any]:
    """Return the trajectories as `placement.plan` takes them.

    Raises InvalidArgument for an engine's id that is empty or comes twice, for columns of unlike
    lengths, and for trajectories that are messages.
    """
    _require_unique([each.engine_id for each in request.engines])
    require(not request.trajectories, "trajectories", "must be empty: send `columns`")
    columns = request.columns
    count = len(columns.remaining_tokens_float64) // np.dtype("<f8").itemsize

    def column(name: str, dtype: str) -> npt.NDArray[Any]:
        data = getattr(columns, name)
        wanted = count * np.dtype(dtype).itemsize
        why = f"must have {wanted} bytes, {count} numbers, has {len(data)}"
        require(len(data) == wanted, f"columns.{name}", why)
        # Kernels would be compiled again for arrays that are read-only.
        return np.frombuffer(bytearray(data), dtype)

    room_tokens = column("room_tokens_float64", "<f8")
    started = column("started_uint8", "u1") != 0
    unread = column("unread_uint8", "u1") != 0
    current = column("current_engine_int32", "<i4").astype(np.int64)
    known = np.all((current >= -1) & (current < len(request.engines)))
    require(bool(known), "columns.current_engine_int32", "must hold indexes of engines, or -1")
    return {
        "lengths": column("remaining_tokens_float64", "<f8"),
        "contexts": column("context_tokens_float64", "<f8"),
        "current": current,
        "log_sigma": column("log_sigma_float64", "<f8"),
        # NaN is no zero and stays; the core refuses it.
        "room_tokens": np.where(room_tokens == 0.0, math.inf, room_tokens),
        "observed_tokens": column("remaining_observed_tokens_float64", "<f8"),
        "tool_s": column("remaining_tool_s_float64", "<f8"),
        "started": started,
        "read": started & ~unread,
        "prompts": column("prompt_int32", "<i4").astype(np.int64),
    }


def engines_of(request: pb.PlanPlacementRequest, default: DecodeCurve) -> list[PlanEngine]:
    """Return the engines of a request.

    An engine without a curve gets `slowest_curve` of those that have one, or `default` where none
    has; without tensor_parallel it has one accelerator.
    """
    curves = [_curve_of(each) for each in request.engines]
    known = [curve for curve in curves if curve is not None]
    missing = slowest_curve(known) if known else default
    return [
        PlanEngine(
            each.engine_id,
            each.slot_limit,
            each.kv_tokens_capacity,
            each.tensor_parallel or 1,
            curve or missing,
        )
        for each, curve in zip(request.engines, curves, strict=True)
    ]


def response_of(
    request: pb.PlanPlacementRequest, plan: Plan, solve_s: float
) -> pb.PlanPlacementResponse:
    """Return the plan: the engine of each trajectory, and the load of each engine, in their
    order."""
    return pb.PlanPlacementResponse(
        groups=[
            pb.EngineGroup(engine_id=engine.engine_id, predicted_time=duration(predicted_s))
            for engine, predicted_s in zip(request.engines, plan.finish_s.tolist(), strict=True)
        ],
        predicted_makespan=duration(plan.makespan_s),
        lower_bound=duration(plan.lower_bound_s or 0.0),
        solve_time=duration(solve_s),
        engine_int32=plan.engine_of.astype("<i4").tobytes(),
    )


def _require_unique(engine_ids: list[str]) -> None:
    for index, each in enumerate(engine_ids):
        field = f"engines[{index}].engine_id"
        require(bool(each), field, "must not be empty")
        require(each not in engine_ids[:index], field, f"{each!r} comes twice")


def _curve_of(engine: pb.PlacementEngine) -> DecodeCurve | None:
    """Return an engine's decode curve; None where it is unset or all zeros."""
    curve = engine.decode_curve
    if curve == CurveMessage():
        return None
    return DecodeCurve(
        *(
            curve.base_s,
            curve.per_sequence_s,
            curve.per_kv_token_s,
            curve.prefill_tokens_per_s,
            curve.prefill_pair_s,
        )
    )
