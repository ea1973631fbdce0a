"""The sidecar and its lease: registered, renewed with its load, taken back when the engine is lost, given back at
drain.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio
from support.conditions import until
from support.fake_sglang import fake_sglang
from support.processes import StartService
from support.sidecar_in_process import sidecar
from treadle.scheduler.v1 import scheduler_pb2, scheduler_pb2_grpc

TTL_S = 0.6


class FakeLeases(scheduler_pb2_grpc.SchedulerServiceServicer):
    """The scheduler's three lease RPCs; `forget` makes it answer as one that lost its state."""

    def __init__(self) -> None:
        self.registered: list[scheduler_pb2.RegisterEngineRequest] = []
        self.renewed: list[scheduler_pb2.RenewEngineLeaseRequest] = []
        self.deregistered: list[scheduler_pb2.DeregisterEngineRequest] = []
        self.known: set[str] = set()
        self.address = ""

    def forget(self) -> None:
        """No lease is known any more."""
        self.known.clear()

    async def RegisterEngine(
        self, request: scheduler_pb2.RegisterEngineRequest, context: Any
    ) -> scheduler_pb2.RegisterEngineResponse:
        self.registered.append(request)
        lease_id = f"lease-{len(self.registered)}"
        self.known.add(lease_id)
        response = scheduler_pb2.RegisterEngineResponse(lease_id=lease_id)
        response.lease_ttl.FromMilliseconds(round(TTL_S * 1000))
        return response

    async def RenewEngineLease(
        self, request: scheduler_pb2.RenewEngineLeaseRequest, context: Any
    ) -> scheduler_pb2.RenewEngineLeaseResponse:
        if request.lease_id not in self.known:
            await context.abort(grpc.StatusCode.NOT_FOUND, "no such lease")
        self.renewed.append(request)
        return scheduler_pb2.RenewEngineLeaseResponse()

    async def DeregisterEngine(
        self, request: scheduler_pb2.DeregisterEngineRequest, context: Any
    ) -> scheduler_pb2.DeregisterEngineResponse:
        self.known.discard(request.lease_id)
        self.deregistered.append(request)
        return scheduler_pb2.DeregisterEngineResponse()


@asynccontextmanager
async def leases() -> AsyncIterator[FakeLeases]:
    server = grpc.aio.server()
    fake = FakeLeases()  # type: ignore[abstract]  # the lease RPCs are all that a sidecar calls
    scheduler_pb2_grpc.add_SchedulerServiceServicer_to_server(fake, server)
    fake.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    try:
        yield fake
    finally:
        await server.stop(None)


async def test_the_engine_is_registered_as_it_is_and_renewed_with_its_load(nats_url: str) -> None:
    async with leases() as scheduler, fake_sglang() as engine:
        async with sidecar(
            nats_url, engine.url, scheduler=scheduler.address, slots=3, hardware_tags=("h200",), decode_base_s=0.05
        ) as side:
            await until(lambda: len(scheduler.renewed) >= 2)
            info = scheduler.registered[0].info
            assert (info.engine_id, info.address, info.slot_limit) == ("e0", side.address, 3)
            assert (info.model, info.weight_version) == ("fake/model", "default")
            assert (list(info.hardware_tags), info.decode_curve.base_s) == (["h200"], 0.05)
            assert info.kv_tokens_capacity == 50_000
            renewal = scheduler.renewed[-1]
            assert (renewal.lease_id, renewal.engine_id) == ("lease-1", "e0")
            assert renewal.load.engine_healthy
            assert renewal.load.weight_version == "default"
        assert [request.lease_id for request in scheduler.deregistered] == ["lease-1"]


async def test_a_lease_that_the_scheduler_does_not_know_is_taken_anew(nats_url: str) -> None:
    async with (
        leases() as scheduler,
        fake_sglang() as engine,
        sidecar(nats_url, engine.url, scheduler=scheduler.address),
    ):
        await until(lambda: scheduler.renewed)
        scheduler.forget()
        await until(lambda: len(scheduler.registered) == 2)
        await until(lambda: scheduler.renewed[-1].lease_id == "lease-2")
        assert scheduler.registered[0].request_id != scheduler.registered[1].request_id


async def test_a_lost_engine_is_given_back_and_registered_again_when_it_is_there(nats_url: str) -> None:
    async with (
        leases() as scheduler,
        fake_sglang() as engine,
        sidecar(nats_url, engine.url, scheduler=scheduler.address) as side,
    ):
        await until(lambda: scheduler.renewed)
        await engine.stop()
        await side.until_engine_is(False)
        await until(lambda: scheduler.deregistered)
        assert not scheduler.known
        await engine.start()
        await until(lambda: len(scheduler.registered) == 2)


async def test_a_terminated_sidecar_gives_its_lease_back(start_service: StartService) -> None:
    """A real process. Result: SIGTERM, exit code 0, the scheduler knows at once."""
    async with leases() as scheduler, fake_sglang() as engine:
        process = await start_service(
            "treadle_sidecar",
            {
                "TREADLE_SIDECAR_ENGINE_ID": "e7",
                "TREADLE_SIDECAR_ENGINE_URL": engine.url,
                "TREADLE_SIDECAR_SCHEDULER": scheduler.address,
            },
        )
        await until(lambda: scheduler.renewed)
        assert scheduler.registered[0].info.address == process.address
        process.terminate()
        assert await process.wait() == 0
        assert [request.engine_id for request in scheduler.deregistered] == ["e7"]
