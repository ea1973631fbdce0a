"""Puts the scheduler together: state from the bucket, controller, driver, workers, servicer.

How the core's refusals look on the wire."""

import asyncio
from collections.abc import Callable
from typing import Any

import structlog
from treadle.scheduler.v1 import scheduler_pb2_grpc
from treadle_core import refusals
from treadle_core.controller import Controller
from treadle_core.model import TREADLE_POLICY
from treadle_core.placing import balance, scenarios, worksheet
from treadle_core.planning import replanning
from treadle_core.tuning import Tuning
from treadle_runtime.errors import (
    AlreadyExists,
    ErrorTable,
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    ResourceExhausted,
    TreadleError,
    Unavailable,
)
from treadle_runtime.server import Runtime, Wiring

from treadle_scheduler.config import SchedulerSettings
from treadle_scheduler.convert import StepHeld
from treadle_scheduler.convert_mesh import HEARD, event_of
from treadle_scheduler.driver import Driver, steady_clock
from treadle_scheduler.outbound import Outbound
from treadle_scheduler.servicer import SchedulerServicer
from treadle_scheduler.store import POLICY_KEY, MeshRecord, Store

# A sidecar registers within a second of its engine's start, and an engine takes many seconds to start.
RETRY_NO_ENGINE_S = 0.5
# Who asks again is held again: the pause is only the client's politeness.
RETRY_HELD_S = 0.01


def _bad_field(refusal: refusals.BadField) -> TreadleError:
    return InvalidArgument(refusal.field, refusal.message, refusal.reason, **refusal.metadata)


def _no_engine(refusal: refusals.NoEngine) -> TreadleError:
    return Unavailable(refusal.reason, refusal.message, retry_after_s=RETRY_NO_ENGINE_S, **refusal.metadata)


def _as(kind: type[NotFound] | type[AlreadyExists] | type[FailedPrecondition]) -> Callable[[Any], TreadleError]:
    return lambda refusal: kind(refusal.reason, refusal.message, **refusal.metadata)


ERRORS: ErrorTable = {
    StepHeld: lambda held: ResourceExhausted(
        "STEP_HELD", str(held), retry_after_s=RETRY_HELD_S, trajectory_id=held.trajectory_id
    ),
    refusals.BadField: _bad_field,
    refusals.NoEngine: _no_engine,
    refusals.TrajectoryNotFound: _as(NotFound),
    refusals.EngineNotFound: _as(NotFound),
    refusals.LeaseNotFound: _as(NotFound),
    refusals.TrajectoryExists: _as(AlreadyExists),
    refusals.Refusal: _as(FailedPrecondition),
}


log = structlog.get_logger()

SERVICE = "treadle.scheduler.v1.SchedulerService"
# The name under which the bus keeps the scheduler's place: facts of the time of a restart are heard after it.
DURABLE = "scheduler"


async def wire(runtime: Runtime) -> Wiring:
    """Restores what an earlier run stored, then listens. Raises CorruptRecord where the bucket holds something else."""
    settings = runtime.settings
    assert isinstance(settings, SchedulerSettings)
    clock = steady_clock()
    now = clock()
    store = await Store.open(runtime.bus)
    stored = await store.load()
    mesh = stored.mesh
    if mesh is None:
        mesh = MeshRecord(TREADLE_POLICY, epoch_s=now)
        store.put(POLICY_KEY, mesh)
        await store.settle([POLICY_KEY])
    controller = Controller(mesh.policy, tuning_of(settings), mesh.epoch_s)
    restored = controller.restore(stored.trajectories, stored.engines, now)
    log.info("restored", trajectories=len(stored.trajectories), engines=len(stored.engines))
    outbound = Outbound(settings, runtime.bus, runtime.channel)
    driver = Driver(controller, store, mesh.epoch_s, clock, outbound.send)
    outbound.answer_to(driver.tell)
    driver.start(restored)

    async def hear(fact: Any) -> None:
        event = event_of(fact)
        if event is not None:
            await driver.request(event)

    await runtime.bus.subscribe(HEARD, hear, durable=DURABLE)
    servicer = SchedulerServicer(driver, runtime.records, settings)
    return Wiring(
        services={SERVICE: lambda server: scheduler_pb2_grpc.add_SchedulerServiceServicer_to_server(servicer, server)},
        tasks=[driver.tick, driver.sweep, warm_up, *outbound.tasks],
        errors=ERRORS,
    )


async def warm_up() -> None:
    """Background task: the judge of plans is compiled, or loaded, beside the first requests, not within the first
    plan."""
    for kernels in (balance, replanning, scenarios, worksheet):
        await asyncio.to_thread(kernels.warm_up)


def tuning_of(settings: SchedulerSettings) -> Tuning:
    """The controller's thresholds, as far as they can be set."""
    return Tuning(
        ticket_ttl_s=settings.ticket_ttl_s,
        lease_ttl_s=settings.lease_ttl_s,
        keep_closed_s=settings.keep_closed_s,
        abandon_after_s=settings.abandon_after_s,
        aging_doubling_s=settings.aging_doubling_s,
        plan_every_events=settings.plan_every_events,
        plan_margin=settings.plan_margin,
    )
