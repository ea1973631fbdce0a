"""Deadlines: known to the servicer, passed on to the calls it makes; and streams end in their own
task."""

import asyncio
import contextvars

import grpc.aio
from support.conditions import until
from support.probe_service import ProbeSettings, ProbeStream, plan, wire
from treadle.migrator.v1 import migrator_pb2, migrator_pb2_grpc
from treadle.placement.v1 import placement_pb2_grpc
from treadle_runtime.calls import detached_context, limit_to, remaining_s
from treadle_runtime.server import Runtime, Wiring, serving

MIGRATOR = "treadle.migrator.v1.MigratorService"


async def plan_s(address: str, what: str, timeout: float) -> float:
    """solve_time of a plan, in seconds."""
    async with grpc.aio.insecure_channel(address) as channel:
        response = await placement_pb2_grpc.PlacementServiceStub(channel).PlanPlacement(
            plan(what), timeout=timeout
        )
    return response.solve_time.ToNanoseconds() / 1e9


async def test_the_deadline_of_a_call_goes_along_with_the_calls_it_makes(nats_url: str) -> None:
    """The first probe asks the second one, without a timeout of its own, how long that one has.

    Result: about as long as the client gave the first (gRPC rounds long timeouts up a little).
    """
    async with serving(ProbeSettings(nats_url=nats_url), wire) as second:
        settings = ProbeSettings(nats_url=nats_url, upstream=second.address)
        async with serving(settings, wire) as first:
            assert 0 < await plan_s(first.address, "upstream:remaining", timeout=20) < 30
            assert await plan_s(second.address, "remaining", timeout=60) > 30


async def test_a_channel_is_shared_per_address_and_gives_a_deadline_only_where_there_is_one(
    nats_url: str,
) -> None:
    async with serving(ProbeSettings(nats_url=nats_url), wire) as server:
        channel = server.runtime.channel(server.address, "probe")
        assert server.runtime.channel(server.address, "probe") is channel
        stub = placement_pb2_grpc.PlacementServiceStub(channel)
        await stub.PlanPlacement(plan(""), timeout=10)
        with limit_to(0.0):
            call = stub.PlanPlacement(plan("slow"), timeout=10)
            assert await call.code() is grpc.StatusCode.DEADLINE_EXCEEDED


async def test_a_deadline_ends_with_its_call_and_detached_work_never_sees_it() -> None:
    assert remaining_s() is None
    with limit_to(30.0):
        left = remaining_s()
        assert left is not None
        assert 0 < left <= 30
        inherited, detached = contextvars.copy_context(), detached_context()
        assert inherited.run(remaining_s) is not None
        assert detached.run(remaining_s) is None
        with limit_to(None):
            assert remaining_s() is not None
    assert remaining_s() is None
    assert inherited.run(remaining_s) is None


async def test_a_stream_that_its_client_leaves_is_closed(nats_url: str) -> None:
    streams: list[ProbeStream] = []

    async def wired(runtime: Runtime) -> Wiring:
        streams.append(ProbeStream(await runtime.open_records()))  # type: ignore[abstract]
        return Wiring(
            {
                MIGRATOR: lambda server: migrator_pb2_grpc.add_MigratorServiceServicer_to_server(
                    streams[0], server
                )
            }
        )

    async with (
        serving(ProbeSettings(nats_url=nats_url), wired) as server,
        grpc.aio.insecure_channel(server.address) as channel,
    ):
        stub = migrator_pb2_grpc.MigratorServiceStub(channel)
        left = stub.WatchMigration(migrator_pb2.WatchMigrationRequest(migration_id="endless"))
        await left.read()
        left.cancel()
        await until(lambda: streams[0].closed == 1)

        finished = [
            response async for response in stub.WatchMigration(migrator_pb2.WatchMigrationRequest())
        ]
        assert len(finished) == 3
        await until(lambda: streams[0].closed == 2)

        late = stub.WatchMigration(
            migrator_pb2.WatchMigrationRequest(migration_id="endless"), timeout=3
        )
        await late.read()
        assert await late.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        await until(lambda: streams[0].closed == 3)
        assert len(asyncio.all_tasks()) < 50
