"""The sidecar and its lease: registered, renewed with its load, taken back when the engine is lost,
given back at drain."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

import grpc
from support.conditions import until, until_said
from support.engine_steps import run_step, step_request, ticket
from support.fake_scheduler import FakeScheduler
from support.fake_servicer import Port
from support.fake_sglang import FakeSglang, fake_sglang
from support.processes import StartService
from support.rpc import refused
from support.sidecar_in_process import sidecar
from treadle.common.v1.tokens_pb2 import SamplingParams
from treadle.engine.v1.engine_pb2 import Load
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


def is_behind(seconds: float, load: Load) -> bool:
    """Whether this machine's clock is so far behind the scheduler's, to a minute."""
    return abs(load.clock_ahead_s + seconds) < 60.0


async def test_tickets_expire_by_the_clock_of_the_scheduler_whatever_the_machines_says(
    nats_url: str,
) -> None:
    """The scheduler's clock is an hour behind this machine's, and later an hour ahead of it.
    Result: a ticket of the scheduler's time is good, one that has expired there is refused, and
    the load says how far the clocks are apart."""
    async with (
        scheduler_and_engine() as (scheduler, engine),
        sidecar(nats_url, engine.url, scheduler=scheduler.address) as side,
    ):
        for ahead_s in (-3600.0, 3600.0):
            scheduler.clock_ahead_s = ahead_s
            await until_said(side.load, partial(is_behind, ahead_s))
            good, late = ticket("e0"), ticket("e0")
            good.expires_at.FromNanoseconds(round((time.time() + ahead_s + 60.0) * 1e9))
            late.expires_at.FromNanoseconds(round((time.time() + ahead_s - 60.0) * 1e9))
            sampling = SamplingParams(max_new_tokens=3, temperature=0.0)
            step = await run_step(side.stub, step_request(good, [5, 6], sampling))
            accepted_s = step.require_whole().timing.accepted_at.ToNanoseconds() / 1e9
            assert abs(accepted_s - time.time() - ahead_s) < 60.0
            with refused("TICKET_EXPIRED", grpc.StatusCode.PERMISSION_DENIED):
                await run_step(side.stub, step_request(late, [5, 6], sampling))


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
