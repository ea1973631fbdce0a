"""Convert a request to the core's placement question, and its plan to a response."""

import math
from typing import Any

import numpy as np
import numpy.typing as npt
from treadle.engine.v1.engine_pb2 import DecodeCurve as CurveMessage
from treadle.placement.v1 import placement_pb2 as pb
from treadle_core.model import CostModel, DecodeCurve
from treadle_core.placing.placement import Plan
from treadle_core.placing.question import PlanEngine, slowest_curve
from treadle_runtime.errors import InvalidArgument, require
from treadle_runtime.times import duration, seconds


def model_of(request: pb.PlanPlacementRequest, default: CostModel) -> CostModel:
    """The cost model of a request. Raises InvalidArgument for one that this service does not know."""
    if request.cost_model == pb.COST_MODEL_UNSPECIFIED:
        return default
    if request.cost_model not in pb.CostModel.values():
        raise InvalidArgument("cost_model", f"is not known here: {request.cost_model}")
    return CostModel[pb.CostModel.Name(request.cost_model).removeprefix("COST_MODEL_")]


def columns_of(request: pb.PlanPlacementRequest) -> dict[str, Any]:
    """The trajectories as `placement.plan` takes them. Raises InvalidArgument for an empty id or one that comes twice,
    of an engine too, and for columns of unlike lengths."""
    trajectories = request.trajectories
    index_of = _number("engines", "engine_id", [each.engine_id for each in request.engines])
    if request.HasField("columns"):
        return _unpack(request)
    _number("trajectories", "trajectory_id", [each.trajectory_id for each in trajectories])
    return {
        "lengths": np.array([each.remaining_tokens for each in trajectories], np.float64),
        "contexts": np.array([each.context_tokens for each in trajectories], np.float64),
        "current": np.array([index_of.get(each.current_engine_id, -1) for each in trajectories], np.int64),
        "log_sigma": np.array([each.log_sigma for each in trajectories], np.float64),
        # NaN is no zero and stays; the core refuses it.
        "room_tokens": np.array([each.room_tokens or math.inf for each in trajectories], np.float64),
        "observed_tokens": np.array([each.remaining_observed_tokens for each in trajectories], np.float64),
        "tool_s": np.array([seconds(each.remaining_tool_time) for each in trajectories], np.float64),
        "started": np.array([each.started for each in trajectories], np.bool_),
        "read": np.array([each.started and not each.unread for each in trajectories], np.bool_),
        "prompts": _prompts([each.prompt_id for each in trajectories]),
    }


def engines_of(request: pb.PlanPlacementRequest, default: DecodeCurve) -> list[PlanEngine]:
    """The engines of a request.

    An engine without a curve gets `slowest_curve` of those that have one, or `default` where none has; without
    tensor_parallel it has one accelerator.
    """
    curves = [_curve_of(each) for each in request.engines]
    known = [curve for curve in curves if curve is not None]
    missing = slowest_curve(known) if known else default
    return [
        PlanEngine(
            each.engine_id, each.slot_limit, each.kv_tokens_capacity, each.tensor_parallel or 1, curve or missing
        )
        for each, curve in zip(request.engines, curves, strict=True)
    ]


def response_of(
    request: pb.PlanPlacementRequest, plan: Plan, lengths: npt.NDArray[np.float64], solve_s: float
) -> pb.PlanPlacementResponse:
    """The plan by engine, in the order of the request; in each group the longest trajectory first."""
    groups: list[list[str]] = [[] for _ in request.engines]
    packed = request.HasField("columns")
    engine_of = plan.engine_of.tolist()
    for index in () if packed else np.argsort(-lengths, kind="stable").tolist():
        groups[engine_of[index]].append(request.trajectories[index].trajectory_id)
    return pb.PlanPlacementResponse(
        groups=[
            pb.EngineGroup(engine_id=engine.engine_id, trajectory_ids=ids, predicted_time=duration(predicted_s))
            for engine, ids, predicted_s in zip(request.engines, groups, plan.finish_s.tolist(), strict=True)
        ],
        predicted_makespan=duration(plan.makespan_s),
        lower_bound=duration(plan.lower_bound_s or 0.0),
        solve_time=duration(solve_s),
        engine_int32=plan.engine_of.astype("<i4").tobytes() if packed else b"",
    )


def _unpack(request: pb.PlanPlacementRequest) -> dict[str, Any]:
    require(not request.trajectories, "trajectories", "must be empty where there are columns")
    columns = request.columns
    count = len(columns.remaining_tokens_float64) // np.dtype("<f8").itemsize

    def column(name: str, dtype: str) -> npt.NDArray[Any]:
        data, wanted = getattr(columns, name), count * np.dtype(dtype).itemsize
        require(len(data) == wanted, f"columns.{name}", f"must have {wanted} bytes, {count} numbers, has {len(data)}")
        return np.frombuffer(bytearray(data), dtype)  # kernels would be compiled again for arrays that are read-only

    room_tokens = column("room_tokens_float64", "<f8")
    started, unread = column("started_uint8", "u1") != 0, column("unread_uint8", "u1") != 0
    current = column("current_engine_int32", "<i4").astype(np.int64)
    known = np.all((current >= -1) & (current < len(request.engines)))
    require(bool(known), "columns.current_engine_int32", "must hold indexes of engines, or -1")
    return {
        "lengths": column("remaining_tokens_float64", "<f8"),
        "contexts": column("context_tokens_float64", "<f8"),
        "current": current,
        "log_sigma": column("log_sigma_float64", "<f8"),
        "room_tokens": np.where(room_tokens == 0.0, math.inf, room_tokens),
        "observed_tokens": column("remaining_observed_tokens_float64", "<f8"),
        "tool_s": column("remaining_tool_s_float64", "<f8"),
        "started": started,
        "read": started & ~unread,
        "prompts": column("prompt_int32", "<i4").astype(np.int64),
    }


def _prompts(prompt_ids: list[str]) -> npt.NDArray[np.int64]:
    """A number for each prompt; an empty id is a prompt of its own."""
    numbers: dict[str | int, int] = {}
    keys = (prompt_id or index for index, prompt_id in enumerate(prompt_ids))
    return np.array([numbers.setdefault(key, len(numbers)) for key in keys], np.int64)


def _number(list_name: str, field: str, ids: list[str]) -> dict[str, int]:
    """The index of each id."""
    index_of: dict[str, int] = {}
    for index, each in enumerate(ids):
        if not each or each in index_of:
            wrong = f"{each!r} comes twice" if each else "must not be empty"
            raise InvalidArgument(f"{list_name}[{index}].{field}", wrong)
        index_of[each] = index
    return index_of


def _curve_of(engine: pb.PlacementEngine) -> DecodeCurve | None:
    """None where the curve is unset or all zeros."""
    curve = engine.decode_curve
    if curve == CurveMessage():
        return None
    return DecodeCurve(
        *(curve.base_s, curve.per_sequence_s, curve.per_kv_token_s, curve.prefill_tokens_per_s, curve.prefill_pair_s)
    )
