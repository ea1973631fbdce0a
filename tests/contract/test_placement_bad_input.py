"""PlacementService as its callers meet it: bad input names the field, good input is answered from
the request alone."""

import asyncio
import math
from collections.abc import AsyncIterator
from typing import TypeAlias

import grpc
import grpc.aio
import numpy as np
import pytest
import pytest_asyncio
from support.placements import columns
from support.rpc import refusal_of
from treadle.placement.v1 import placement_pb2, placement_pb2_grpc
from treadle_placement.config import PlacementSettings
from treadle_placement.wire import wire
from treadle_runtime.server import serving

Stub: TypeAlias = "placement_pb2_grpc.PlacementServiceAsyncStub"
CALL_S = 30.0
CURVE = {
    "base_s": 0.01,
    "per_sequence_s": 0.001,
    "per_kv_token_s": 1e-8,
    "prefill_tokens_per_s": 1e4,
}


pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stub(shared_nats_url: str) -> AsyncIterator[Stub]:
    settings = PlacementSettings(listen="127.0.0.1:0", nats_url=shared_nats_url, default_base_s=0.5)
    async with (
        serving(settings, wire) as served,
        grpc.aio.insecure_channel(served.address) as channel,
    ):
        yield placement_pb2_grpc.PlacementServiceStub(channel)


def engine(number: int, **changed: object) -> placement_pb2.PlacementEngine:
    given: dict[str, object] = {
        "engine_id": f"e{number}",
        "slot_limit": 8,
        "decode_curve": CURVE,
        **changed,
    }
    return placement_pb2.PlacementEngine(**given)  # type: ignore[arg-type]


def floats(*values: float) -> bytes:
    return np.array(values, "<f8").tobytes()


async def test_plan_placement_names_the_bad_field(stub: Stub) -> None:
    bad: list[tuple[dict[str, bytes], dict[str, object], str]] = [
        ({"remaining_tokens_float64": floats(0, math.nan)}, {}, "trajectories[1].remaining_tokens"),
        ({"remaining_tokens_float64": floats(0, math.inf)}, {}, "trajectories[1].remaining_tokens"),
        ({"remaining_tokens_float64": floats(0, -0.5)}, {}, "trajectories[1].remaining_tokens"),
        ({"log_sigma_float64": floats(0, math.nan)}, {}, "trajectories[1].log_sigma"),
        ({"log_sigma_float64": floats(0, -0.1)}, {}, "trajectories[1].log_sigma"),
        ({"log_sigma_float64": floats(0, 11)}, {}, "trajectories[1].log_sigma"),
        ({"room_tokens_float64": floats(0, math.nan)}, {}, "trajectories[1].room_tokens"),
        ({"room_tokens_float64": floats(0, -1)}, {}, "trajectories[1].room_tokens"),
        ({"context_tokens_float64": floats(0, -1)}, {}, "trajectories[1].context_tokens"),
        ({"started_uint8": bytes(3)}, {}, "columns.started_uint8"),
        ({"room_tokens_float64": bytes(15)}, {}, "columns.room_tokens_float64"),
        (
            {"current_engine_int32": bytes([0] * 4 + [2, 0, 0, 0])},
            {},
            "columns.current_engine_int32",
        ),
        ({}, {"slot_limit": 0}, "engines[1].slot_limit"),
        ({}, {"kv_tokens_capacity": -1}, "engines[1].kv_tokens_capacity"),
        ({}, {"tensor_parallel": -1}, "engines[1].tensor_parallel"),
        ({}, {"engine_id": "e0"}, "engines[1].engine_id"),
        ({}, {"engine_id": ""}, "engines[1].engine_id"),
        ({}, {"decode_curve": {"base_s": math.nan}}, "engines[1].decode_curve.base_s"),
        (
            {},
            {"decode_curve": {**CURVE, "per_sequence_s": -1.0}},
            "engines[1].decode_curve.per_sequence_s",
        ),
        ({}, {"decode_curve": {"prefill_tokens_per_s": 5.0}}, "engines[1].decode_curve"),
    ]
    for of_columns, of_engine, field in bad:
        request = placement_pb2.PlanPlacementRequest(
            columns=columns(2, **of_columns), engines=[engine(0), engine(1, **of_engine)]
        )
        error = await refusal_of(stub.PlanPlacement(request, timeout=CALL_S))
        assert (error.code, error.fields) == (grpc.StatusCode.INVALID_ARGUMENT, (field,))
    named = placement_pb2.PlacedTrajectory(trajectory_id="t", remaining_tokens=1.0)
    for request, field in (
        (placement_pb2.PlanPlacementRequest(columns=columns(1)), "engines"),
        (placement_pb2.PlanPlacementRequest(engines=[engine(0)], cost_model=99), "cost_model"),  # type: ignore[arg-type]
        (
            placement_pb2.PlanPlacementRequest(engines=[engine(0)], trajectories=[named]),
            "trajectories",
        ),
    ):
        assert (await refusal_of(stub.PlanPlacement(request, timeout=CALL_S))).fields == (field,)


def engines_of(plan: placement_pb2.PlanPlacementResponse) -> list[int]:
    numbers: list[int] = np.frombuffer(plan.engine_int32, "<i4").tolist()
    return numbers


@pytest.mark.parametrize("trajectories", [20, 3_000])
async def test_a_plan_has_one_group_for_each_engine_in_the_order_of_the_request(
    stub: Stub, trajectories: int
) -> None:
    """Few trajectories are planned on the event loop, many in a thread."""
    slow = {"base_s": 0.02, "per_sequence_s": 0.002}
    request = placement_pb2.PlanPlacementRequest(
        columns=columns(trajectories),
        engines=[engine(0, decode_curve=slow), engine(1), engine(2, decode_curve=slow)],
    )
    for cost_model in placement_pb2.CostModel.values():
        request.cost_model = cost_model
        plan = await stub.PlanPlacement(request, timeout=CALL_S)
        again = await stub.PlanPlacement(request, timeout=CALL_S)
        assert [group.engine_id for group in plan.groups] == ["e0", "e1", "e2"]
        placed = engines_of(plan)
        assert len(placed) == trajectories
        assert set(placed) == {0, 1, 2}
        assert placed[-1] == 1  # the longest, on the fastest
        makespan = plan.predicted_makespan
        assert makespan.ToNanoseconds() >= plan.lower_bound.ToNanoseconds() > 0
        assert makespan.ToNanoseconds() == max(
            each.predicted_time.ToNanoseconds() for each in plan.groups
        )
        again.solve_time.CopyFrom(plan.solve_time)
        assert again == plan


async def test_without_a_decode_curve_an_engine_has_the_one_of_the_settings(stub: Stub) -> None:
    request = placement_pb2.PlanPlacementRequest(
        columns=columns(1, remaining_tokens_float64=floats(100)),
        engines=[placement_pb2.PlacementEngine(engine_id="e0", slot_limit=4)],
        cost_model=placement_pb2.COST_MODEL_GROUP_SIZE,
    )
    plan = await stub.PlanPlacement(request, timeout=CALL_S)
    assert 50.0 <= plan.predicted_makespan.ToTimedelta().total_seconds() <= 51.0


async def test_no_trajectories_make_an_empty_plan(stub: Stub) -> None:
    plan = await stub.PlanPlacement(
        placement_pb2.PlanPlacementRequest(engines=[engine(0)]), timeout=CALL_S
    )
    assert [group.engine_id for group in plan.groups] == ["e0"]
    assert engines_of(plan) == []
    assert plan.predicted_makespan.ToNanoseconds() == 0


async def test_a_plan_of_the_papers_size_is_made_beside_small_ones(stub: Stub) -> None:
    large = placement_pb2.PlanPlacementRequest(
        columns=columns(6_400), engines=[engine(number) for number in range(16)]
    )
    small = placement_pb2.PlanPlacementRequest(columns=columns(1), engines=[engine(0)])
    plan, *others = await asyncio.gather(
        stub.PlanPlacement(large, timeout=CALL_S),
        *[stub.PlanPlacement(small, timeout=CALL_S) for _ in range(10)],
    )
    placed = engines_of(plan)
    assert len(placed) == 6_400
    assert set(placed) == set(range(16))
    assert all(engines_of(other) == [0] for other in others)
