"""The sidecar and its lease: registered, renewed with its load, taken back when the engine is lost,
given back at drain."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from support.conditions import until
from support.fake_scheduler import FakeScheduler
from support.fake_servicer import Port
from support.fake_sglang import FakeSglang, fake_sglang
from support.processes import StartService
from support.sidecar_in_process import sidecar
from treadle.scheduler.v1.scheduler_pb2_grpc import add_SchedulerServiceServicer_to_server


@asynccontextmanager
async def scheduler_and_engine() -> AsyncIterator[tuple[FakeScheduler, FakeSglang]]:
    scheduler = FakeScheduler()  # type: ignore[abstract]
    async with (
        Port(add_SchedulerServiceServicer_to_server, scheduler) as scheduler.address,
        fake_sglang() as engine,
    ):
        yield scheduler, engine


async def test_the_engine_is_registered_as_it_is_and_renewed_with_its_load(nats_url: str) -> None:
    async with scheduler_and_engine() as (scheduler, engine):
        async with sidecar(
            nats_url,
            engine.url,
            scheduler=scheduler.address,
            slots=3,
            hardware_tags=("h200",),
            decode_base_s=0.05,
        ) as side:
            await until(lambda: len(scheduler.requests("RenewEngineLease")) >= 2)
            info = scheduler.requests("RegisterEngine")[0].info
            assert (info.engine_id, info.address, info.slot_limit) == ("e0", side.address, 3)
            assert (info.model, info.weight_version) == ("fake/model", "default")
            assert (list(info.hardware_tags), info.decode_curve.base_s) == (["h200"], 0.05)
            assert info.kv_tokens_capacity == 50_000
            renewal = scheduler.requests("RenewEngineLease")[-1]
            assert (renewal.lease_id, renewal.engine_id) == ("lease-1", "e0")
            assert renewal.load.engine_healthy
            assert renewal.load.weight_version == "default"
        assert [request.lease_id for request in scheduler.requests("DeregisterEngine")] == [
            "lease-1"
        ]


async def test_a_lease_that_the_scheduler_does_not_know_is_taken_anew(nats_url: str) -> None:
    async with (
        scheduler_and_engine() as (scheduler, engine),
        sidecar(nats_url, engine.url, scheduler=scheduler.address),
    ):
        await until(lambda: scheduler.requests("RenewEngineLease"))
        scheduler.leases.clear()
        await until(lambda: len(scheduler.requests("RegisterEngine")) == 2)
        await until(lambda: scheduler.requests("RenewEngineLease")[-1].lease_id == "lease-2")
        assert (
            scheduler.requests("RegisterEngine")[0].request_id
            != scheduler.requests("RegisterEngine")[1].request_id
        )


async def test_a_lost_engine_is_given_back_and_registered_again_when_it_is_there(
    nats_url: str,
) -> None:
    async with (
        scheduler_and_engine() as (scheduler, engine),
        sidecar(nats_url, engine.url, scheduler=scheduler.address) as side,
    ):
        await until(lambda: scheduler.requests("RenewEngineLease"))
        await engine.stop()
        await side.until_engine_is(False)
        await until(lambda: scheduler.requests("DeregisterEngine"))
        assert not scheduler.leases
        await engine.start()
        await until(lambda: len(scheduler.requests("RegisterEngine")) == 2)


async def test_a_terminated_sidecar_gives_its_lease_back(start_service: StartService) -> None:
    """A real process. Result: SIGTERM, exit code 0, the scheduler knows at once."""
    async with scheduler_and_engine() as (scheduler, engine):
        process = await start_service(
            "treadle_sidecar",
            {
                "TREADLE_SIDECAR_ENGINE_ID": "e7",
                "TREADLE_SIDECAR_ENGINE_URL": engine.url,
                "TREADLE_SIDECAR_SCHEDULER": scheduler.address,
            },
        )
        await until(lambda: scheduler.requests("RenewEngineLease"))
        assert scheduler.requests("RegisterEngine")[0].info.address == process.address
        process.terminate()
        assert await process.wait() == 0
        assert [request.engine_id for request in scheduler.requests("DeregisterEngine")] == ["e7"]
