"""The decode curve that a renewal brings is the one that plans are made with, also after a
restart."""

from __future__ import annotations

from support.conditions import until
from support.fake_servicer import FakeServicer, Port, answer
from support.scheduler import SchedulerClient, scheduler
from treadle.engine.v1.engine_pb2 import DecodeCurve
from treadle.placement.v1 import placement_pb2, placement_pb2_grpc
from treadle.scheduler.v1 import scheduler_pb2 as pb

REGISTERED = DecodeCurve(base_s=0.02, per_sequence_s=0.001, prefill_tokens_per_s=900.0)
MEASURED = DecodeCurve(
    base_s=0.3,
    per_sequence_s=0.02,
    per_kv_token_s=1e-6,
    prefill_tokens_per_s=80.0,
    prefill_pair_s=1e-7,
)


class FakePlacement(FakeServicer, placement_pb2_grpc.PlacementServiceServicer):
    """Fake, as only the question matters: it has no plan."""

    @answer
    def PlanPlacement(
        self, request: placement_pb2.PlanPlacementRequest
    ) -> placement_pb2.PlanPlacementResponse:
        return placement_pb2.PlanPlacementResponse()


async def curves_of(client: SchedulerClient) -> dict[str, DecodeCurve]:
    listed = await client.call("ListEngines", pb.ListEnginesRequest())
    return {engine.info.engine_id: engine.info.decode_curve for engine in listed.engines}


async def test_plans_are_made_with_the_curve_of_the_last_renewal(nats_url: str) -> None:
    placement = FakePlacement()
    async with (
        Port(placement_pb2_grpc.add_PlacementServiceServicer_to_server, placement) as address,
        scheduler(nats_url, placement=address) as client,
    ):
        leases = {
            name: await client.register(name, decode_curve=REGISTERED) for name in ("e0", "e1")
        }
        for number in range(4):
            await client.open(f"t{number}")
        await until(lambda: placement.requests("PlanPlacement"))
        renewal = pb.RenewEngineLeaseRequest(
            lease_id=leases["e1"].lease_id, engine_id="e1", decode_curve=MEASURED
        )
        await client.call("RenewEngineLease", renewal)
        assert await curves_of(client) == {"e0": REGISTERED, "e1": MEASURED}

        def planned_with_it() -> bool:
            asked = placement.requests("PlanPlacement")[-1]
            return {engine.engine_id: engine.decode_curve for engine in asked.engines} == {
                "e0": REGISTERED,
                "e1": MEASURED,
            }

        await until(planned_with_it)
        await client.call(
            "RenewEngineLease",
            pb.RenewEngineLeaseRequest(lease_id=renewal.lease_id, engine_id="e1"),
        )
    async with scheduler(nats_url) as client:
        assert await curves_of(client) == {"e0": REGISTERED, "e1": MEASURED}
