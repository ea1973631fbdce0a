"""The placement as a process of its own: it plans, and ends on SIGTERM."""

import grpc.aio
from support.processes import StartService
from treadle.placement.v1 import placement_pb2, placement_pb2_grpc

CALL_S = 30.0


async def test_it_plans_with_its_default_curve_and_ends_on_sigterm(start_service: StartService) -> None:
    service = await start_service("treadle_placement", {"TREADLE_PLACEMENT_DEFAULT_BASE_S": "0.5"})
    async with grpc.aio.insecure_channel(service.address) as channel:
        plan = await placement_pb2_grpc.PlacementServiceStub(channel).PlanPlacement(
            placement_pb2.PlanPlacementRequest(
                trajectories=[placement_pb2.PlacedTrajectory(trajectory_id="t", remaining_tokens=100)],
                engines=[placement_pb2.PlacementEngine(engine_id="e", slot_limit=4)],
                cost_model=placement_pb2.COST_MODEL_GROUP_SIZE,
            ),
            timeout=CALL_S,
        )
    assert 50.0 <= plan.predicted_makespan.ToTimedelta().total_seconds() <= 51.0
    service.terminate()
    assert await service.wait() == 0
