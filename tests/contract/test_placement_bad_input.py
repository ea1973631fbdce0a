"""PlacementService as its callers meet it: bad input names the field, good input is answered from the request alone."""

import asyncio
import math
from collections.abc import AsyncIterator
from typing import TypeAlias

import grpc
import grpc.aio
import numpy as np
import pytest
import pytest_asyncio
from support.rpc import refusal_of
from treadle.placement.v1 import placement_pb2, placement_pb2_grpc
from treadle_placement.config import PlacementSettings
from treadle_placement.wire import wire
from treadle_runtime.server import serving

Stub: TypeAlias = "placement_pb2_grpc.PlacementServiceAsyncStub"
CALL_S = 30.0
CURVE = {"base_s": 0.01, "per_sequence_s": 0.001, "per_kv_token_s": 1e-8, "prefill_tokens_per_s": 1e4}


pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stub(shared_nats_url: str) -> AsyncIterator[Stub]:
    settings = PlacementSettings(listen="127.0.0.1:0", nats_url=shared_nats_url, default_base_s=0.5)
    async with serving(settings, wire) as served, grpc.aio.insecure_channel(served.address) as channel:
        yield placement_pb2_grpc.PlacementServiceStub(channel)


def trajectory(number: int, **changed: object) -> placement_pb2.PlacedTrajectory:
    given: dict[str, object] = {"trajectory_id": f"t{number}", "remaining_tokens": 100.0 * number, **changed}
    return placement_pb2.PlacedTrajectory(**given)  # type: ignore[arg-type]


def engine(number: int, **changed: object) -> placement_pb2.PlacementEngine:
    given: dict[str, object] = {"engine_id": f"e{number}", "slot_limit": 8, "decode_curve": CURVE, **changed}
    return placement_pb2.PlacementEngine(**given)  # type: ignore[arg-type]


async def test_plan_placement_names_the_bad_field(stub: Stub) -> None:
    bad: list[tuple[dict[str, object], dict[str, object], str]] = [
        ({"remaining_tokens": math.nan}, {}, "trajectories[1].remaining_tokens"),
        ({"remaining_tokens": math.inf}, {}, "trajectories[1].remaining_tokens"),
        ({"remaining_tokens": -0.5}, {}, "trajectories[1].remaining_tokens"),
        ({"log_sigma": math.nan}, {}, "trajectories[1].log_sigma"),
        ({"log_sigma": -0.1}, {}, "trajectories[1].log_sigma"),
        ({"log_sigma": 11.0}, {}, "trajectories[1].log_sigma"),
        ({"room_tokens": math.nan}, {}, "trajectories[1].room_tokens"),
        ({"room_tokens": -1.0}, {}, "trajectories[1].room_tokens"),
        ({"context_tokens": -1}, {}, "trajectories[1].context_tokens"),
        ({"trajectory_id": "t0"}, {}, "trajectories[1].trajectory_id"),
        ({"trajectory_id": ""}, {}, "trajectories[1].trajectory_id"),
        ({}, {"slot_limit": 0}, "engines[1].slot_limit"),
        ({}, {"kv_tokens_capacity": -1}, "engines[1].kv_tokens_capacity"),
        ({}, {"tensor_parallel": -1}, "engines[1].tensor_parallel"),
        ({}, {"engine_id": "e0"}, "engines[1].engine_id"),
        ({}, {"decode_curve": {"base_s": math.nan}}, "engines[1].decode_curve.base_s"),
        ({}, {"decode_curve": {**CURVE, "per_sequence_s": -1.0}}, "engines[1].decode_curve.per_sequence_s"),
        ({}, {"decode_curve": {"prefill_tokens_per_s": 5.0}}, "engines[1].decode_curve"),
    ]
    for of_trajectory, of_engine, field in bad:
        request = placement_pb2.PlanPlacementRequest(
            trajectories=[trajectory(0), trajectory(1, **of_trajectory)], engines=[engine(0), engine(1, **of_engine)]
        )
        error = await refusal_of(stub.PlanPlacement(request, timeout=CALL_S))
        assert (error.code, error.fields) == (grpc.StatusCode.INVALID_ARGUMENT, (field,))
    for request, field in (
        (placement_pb2.PlanPlacementRequest(trajectories=[trajectory(0)]), "engines"),
        (placement_pb2.PlanPlacementRequest(engines=[engine(0)], cost_model=99), "cost_model"),  # type: ignore[arg-type]
    ):
        assert (await refusal_of(stub.PlanPlacement(request, timeout=CALL_S))).fields == (field,)


async def test_a_plan_has_one_group_for_each_engine_in_the_order_of_the_request(stub: Stub) -> None:
    slow = {"base_s": 0.02, "per_sequence_s": 0.002}
    request = placement_pb2.PlanPlacementRequest(
        trajectories=[trajectory(number) for number in range(20)],
        engines=[engine(0, decode_curve=slow), engine(1), engine(2, decode_curve=slow)],
    )
    for cost_model in placement_pb2.CostModel.values():
        request.cost_model = cost_model
        plan = await stub.PlanPlacement(request, timeout=CALL_S)
        again = await stub.PlanPlacement(request, timeout=CALL_S)
        assert [group.engine_id for group in plan.groups] == ["e0", "e1", "e2"]
        placed = [each for group in plan.groups for each in group.trajectory_ids]
        assert sorted(placed) == sorted(f"t{number}" for number in range(20))
        assert plan.groups[1].trajectory_ids[0] == "t19"  # the longest, on the fastest
        for group in plan.groups:
            assert list(group.trajectory_ids) == sorted(group.trajectory_ids, key=lambda each: -int(each[1:]))
        makespan = plan.predicted_makespan
        assert makespan.ToNanoseconds() >= plan.lower_bound.ToNanoseconds() > 0
        assert makespan.ToNanoseconds() == max(each.predicted_time.ToNanoseconds() for each in plan.groups)
        again.solve_time.CopyFrom(plan.solve_time)
        assert again == plan


async def test_without_a_decode_curve_an_engine_has_the_one_of_the_settings(stub: Stub) -> None:
    request = placement_pb2.PlanPlacementRequest(
        trajectories=[trajectory(1, current_engine_id="gone")],
        engines=[placement_pb2.PlacementEngine(engine_id="e0", slot_limit=4)],
        cost_model=placement_pb2.COST_MODEL_GROUP_SIZE,
    )
    plan = await stub.PlanPlacement(request, timeout=CALL_S)
    assert 50.0 <= plan.predicted_makespan.ToTimedelta().total_seconds() <= 51.0


async def test_no_trajectories_make_an_empty_plan(stub: Stub) -> None:
    plan = await stub.PlanPlacement(placement_pb2.PlanPlacementRequest(engines=[engine(0)]), timeout=CALL_S)
    assert [list(group.trajectory_ids) for group in plan.groups] == [[]]
    assert plan.predicted_makespan.ToNanoseconds() == 0


async def test_a_plan_of_the_papers_size_is_made_beside_small_ones(stub: Stub) -> None:
    large = placement_pb2.PlanPlacementRequest(
        trajectories=[trajectory(number) for number in range(6_400)], engines=[engine(number) for number in range(16)]
    )
    small = placement_pb2.PlanPlacementRequest(trajectories=[trajectory(1)], engines=[engine(0)])
    plan, *others = await asyncio.gather(
        stub.PlanPlacement(large, timeout=CALL_S), *[stub.PlanPlacement(small, timeout=CALL_S) for _ in range(10)]
    )
    assert sum(len(group.trajectory_ids) for group in plan.groups) == 6_400
    assert all(group.trajectory_ids for group in plan.groups)
    assert all(other.groups[0].trajectory_ids == ["t1"] for other in others)


def columns(trajectories: int, **changed: bytes) -> placement_pb2.PlacedColumns:
    floats = np.zeros(trajectories, "<f8").tobytes()
    given = {
        "remaining_tokens_float64": (100.0 * np.arange(trajectories)).astype("<f8").tobytes(),
        "context_tokens_float64": floats,
        "current_engine_int32": np.full(trajectories, -1, "<i4").tobytes(),
        "log_sigma_float64": floats,
        "room_tokens_float64": floats,
        "remaining_tool_s_float64": floats,
        "remaining_observed_tokens_float64": floats,
        "prompt_int32": np.arange(trajectories).astype("<i4").tobytes(),
        "started_uint8": bytes(trajectories),
        "unread_uint8": bytes(trajectories),
    }
    return placement_pb2.PlacedColumns(**{**given, **changed})


@pytest.mark.parametrize("trajectories", [20, 3_000])
async def test_columns_give_the_plan_of_the_same_trajectories(stub: Stub, trajectories: int) -> None:
    """Small ones are planned on the event loop, large ones in a thread."""
    slow = {"base_s": 0.02, "per_sequence_s": 0.002}
    engines = [engine(0, decode_curve=slow), engine(1), engine(2, decode_curve=slow)]
    named = placement_pb2.PlanPlacementRequest(
        trajectories=[trajectory(number) for number in range(trajectories)], engines=engines
    )
    packed = placement_pb2.PlanPlacementRequest(columns=columns(trajectories), engines=engines)
    plan, other = [await stub.PlanPlacement(request, timeout=CALL_S) for request in (named, packed)]
    engine_of = {name: number for number, group in enumerate(plan.groups) for name in group.trajectory_ids}
    assert np.frombuffer(other.engine_int32, "<i4").tolist() == [
        engine_of[f"t{number}"] for number in range(trajectories)
    ]
    assert [group.trajectory_ids for group in other.groups] == [[], [], []]
    assert [each.predicted_time for each in other.groups] == [each.predicted_time for each in plan.groups]


async def test_columns_that_do_not_agree_are_refused_by_name(stub: Stub) -> None:
    for request, field in (
        ({"columns": columns(2), "trajectories": [trajectory(0)]}, "trajectories"),
        ({"columns": columns(2, started_uint8=bytes(3))}, "columns.started_uint8"),
        ({"columns": columns(2, room_tokens_float64=bytes(15))}, "columns.room_tokens_float64"),
        ({"columns": columns(1, current_engine_int32=bytes([1, 0, 0, 0]))}, "columns.current_engine_int32"),
        ({"columns": columns(1, log_sigma_float64=np.array([math.nan]).tobytes())}, "trajectories[0].log_sigma"),
    ):
        asked = placement_pb2.PlanPlacementRequest(engines=[engine(0)], **request)
        assert (await refusal_of(stub.PlanPlacement(asked, timeout=CALL_S))).fields == (field,)
