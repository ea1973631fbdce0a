"""Assemble the scheduler: state from the bucket, controller, driver, workers, servicer; map the
core's refusals.

A process that does not lead serves nothing and knows nothing: it reads the state once it leads.
"""

import asyncio
import secrets
from collections.abc import Callable, Coroutine
from dataclasses import fields, replace
from functools import partial
from typing import Any, cast

import structlog
from treadle.scheduler.v1.scheduler_pb2_grpc import add_SchedulerServiceServicer_to_server
from treadle_core import compiled, planning, refusals
from treadle_core.controller import Controller
from treadle_core.model import TREADLE_POLICY
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
from treadle_runtime.idempotency import RequestRecords
from treadle_runtime.identity import Sealer
from treadle_runtime.server import Runtime, Turn, Wiring

from treadle_scheduler.config import SchedulerSettings
from treadle_scheduler.convert import SUBSCRIBED_KINDS
from treadle_scheduler.driver import POLICY_KEY, Driver, MeshRecord, StepHeld, Store, steady_clock
from treadle_scheduler.lease import Lease, NotLeader
from treadle_scheduler.metrics import Metrics, Traces
from treadle_scheduler.outbound import Outbound
from treadle_scheduler.servicer import SchedulerServicer

log = structlog.get_logger()

# The name under which the bus keeps the scheduler's position: facts published during a restart
# arrive after it.
DURABLE = "scheduler"
# A sidecar registers within a second of its engine's start, and an engine takes many seconds to
# start.
RETRY_NO_ENGINE_S = 0.5
# A call that the client repeats is held again, so that the pause only spares the network.
RETRY_HELD_S = 0.01
KEY_BYTES = 32  # length of the key of tickets: as long as a seal
RETRY_NOT_LEADER_S = (
    0.1  # a channel that follows health does not come here; another process leads within seconds
)


def _as(kind: type[NotFound | AlreadyExists | FailedPrecondition]) -> Callable[[Any], TreadleError]:
    return lambda refusal: kind(refusal.reason, refusal.message, **refusal.metadata)


ERRORS: ErrorTable = {
    StepHeld: lambda held: ResourceExhausted(
        "STEP_HELD", str(held), retry_after_s=RETRY_HELD_S, trajectory_id=held.trajectory_id
    ),
    NotLeader: lambda error: Unavailable(
        "NOT_LEADER",
        f"{error}; connect to all schedulers",
        retry_after_s=RETRY_NOT_LEADER_S,
        leader=error.address,
    ),
    refusals.BadField: lambda refusal: InvalidArgument(
        refusal.field, refusal.message, refusal.reason, **refusal.metadata
    ),
    refusals.NoEngine: lambda refusal: Unavailable(
        refusal.reason, refusal.message, retry_after_s=RETRY_NO_ENGINE_S, **refusal.metadata
    ),
    refusals.NoEngineWithTags: _as(FailedPrecondition),
    refusals.TrajectoryNotFound: _as(NotFound),
    refusals.EngineNotFound: _as(NotFound),
    refusals.LeaseNotFound: _as(NotFound),
    refusals.JobNotFound: _as(NotFound),
    refusals.TrajectoryExists: _as(AlreadyExists),
    refusals.Refusal: _as(FailedPrecondition),
}


async def wire(runtime: Runtime) -> Wiring:
    settings = cast(SchedulerSettings, runtime.settings)
    lease = await Lease.open(runtime.bus, settings.leader_ttl_s)
    traces = Traces(runtime.tracing)
    servicer = SchedulerServicer(settings, lease, traces)
    turn = Turn(servicer.admit)
    runtime.metrics.gauge(
        "leads", "process", "1 in the process that leads, else 0", lambda: int(turn.serves)
    )

    async def lead() -> None:
        """Wait for the lead, then serve until another process leads or this one drains; a
        background task."""
        await lease.take(await runtime.listening, turn.decided)
        store = Store(lease)
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(lease.keep())
                driver, tasks = await restore(runtime, store, traces)
                sealer = (
                    Sealer(bytes.fromhex(driver.mesh.ticket_key)) if runtime.certificates else None
                )
                servicer.serve(
                    driver, await RequestRecords.open(runtime.bus, settings.service), sealer
                )
                for task in tasks:
                    group.create_task(task())
                while not runtime.stopping.is_set():
                    await serve_while_held(turn, driver, lease)
        finally:
            await store.hand_over()

    # Compiled ahead of time they need milliseconds, and no plan waits for them. numba compiles them
    # for a minute or loads them for a second, while requests are served.
    before = compiled.ahead is not None
    if before:
        compile_kernels()
    return Wiring(
        services={
            "treadle.scheduler.v1.SchedulerService": partial(
                add_SchedulerServiceServicer_to_server, servicer
            )
        },
        tasks=[lead] if before else [warm_up, lead],
        errors=ERRORS,
        turn=turn,
    )


async def serve_while_held(turn: Turn, driver: Driver, lease: Lease) -> None:
    """Serve until it is not known whether this process still leads. Then pause, and return when it
    is known again.

    In the pause, health sends callers to the process that leads, if there is one, and `admit`
    refuses all others.
    """
    turn.serve()
    driver.hold(True)
    await lease.until_overdue()
    log.warning("NATS does not answer: it is not known which scheduler leads")
    turn.pause()
    driver.hold(False)
    await lease.until_held()


async def restore(
    runtime: Runtime, store: Store, traces: Traces
) -> tuple[Driver, list[Callable[[], Coroutine[Any, Any, None]]]]:
    """Return the driver of the state that the store holds now, which receives facts from now on,
    and its background tasks."""
    settings = cast(SchedulerSettings, runtime.settings)
    clock = steady_clock()
    trajectories, engines, jobs, mesh = await store.load()
    if mesh is None or not mesh.ticket_key:
        mesh = mesh or MeshRecord(TREADLE_POLICY, epoch_s=clock())
        mesh = replace(mesh, ticket_key=secrets.token_hex(KEY_BYTES))
        store.put(POLICY_KEY, mesh)
        await store.settle([POLICY_KEY])
    controller = Controller(mesh.policy, tuning_of(settings), mesh.epoch_s)
    restored = controller.restore(trajectories, engines, clock(), jobs, mesh.weights, mesh.drained)
    log.info("restored", trajectories=len(trajectories), engines=len(engines), jobs=len(jobs))
    metrics = Metrics(runtime.metrics)
    outbound = Outbound(
        settings, runtime.bus, runtime.channel, store.lease.until_held, metrics, traces
    )
    driver = Driver(controller, store, mesh, clock, outbound.send, metrics.record)
    outbound.handle = driver.handle
    metrics.watch(controller, lambda: driver.held_calls)
    driver.carry_out(restored)

    async def end_waiting() -> None:
        try:
            await runtime.stopping.wait()
        finally:
            driver.hold(False)

    await runtime.bus.subscribe(SUBSCRIBED_KINDS, driver.hear, durable=DURABLE)
    return driver, [driver.tick, driver.store, store.purge_markers, end_waiting, *outbound.tasks]


async def warm_up() -> None:
    """Compile or load the kernels while the first requests are served; a background task."""
    await asyncio.to_thread(compile_kernels)


def compile_kernels() -> None:
    """Run the kernels of re-planning once."""
    planning.warm_up()


def tuning_of(settings: SchedulerSettings) -> Tuning:
    """Return the controller's thresholds: those that are settings, and the defaults of the
    others."""
    names = {field.name for field in fields(Tuning)} & set(SchedulerSettings.model_fields)
    return Tuning(**{name: getattr(settings, name) for name in names})
