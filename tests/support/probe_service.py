"""A tiny service for the tests of the runtime: PlacementService's contract, with behaviour chosen
by the request.

The id of the first engine says what PlanPlacement does; see `Probe`. Run as a process or through
`wire`.
"""

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Annotated, Any, ClassVar, Literal

import structlog
from treadle.migrator.v1 import migrator_pb2, migrator_pb2_grpc
from treadle.placement.v1 import placement_pb2, placement_pb2_grpc
from treadle.telemetry.v1.facts_pb2 import EngineLost
from treadle_runtime import errors, server
from treadle_runtime.calls import remaining_s
from treadle_runtime.config import Json, Settings
from treadle_runtime.facts import make_fact
from treadle_runtime.idempotency import RequestRecords, answered_once
from treadle_runtime.server import Runtime, Service, Wiring, run

log = structlog.get_logger()
PROBE = "support.probe_service"  # to start it as a process


def plan(what: str) -> placement_pb2.PlanPlacementRequest:
    """A request that makes the probe do `what`."""
    return placement_pb2.PlanPlacementRequest(
        engines=[placement_pb2.PlacementEngine(engine_id=what)]
    )


class ProbeSettings(Settings):
    """The common settings, and one of each kind of its own."""

    service: ClassVar[str] = "probe"
    slow_s: float = 1.0
    upstream: str = ""
    broken: Literal["", "start", "task", "close", "loop", "task and loop"] = ""
    weights: Annotated[tuple[float, ...], Json] = ()


class CoreError(Exception):
    """Stands for a core exception."""


FAILURES = {
    "core": CoreError("the core says no"),
    "bug": ZeroDivisionError("a bug"),
    "group": ExceptionGroup(
        "tasks", [errors.FailedPrecondition("NOT_NOW", "not now", retry="never")]
    ),
    "invalid": errors.InvalidArgument(
        "engines[0].slot_limit", "must be >= 1, is 0", engine_id="e0"
    ),
    "full": errors.ResourceExhausted(
        "QUEUE_FULL", "the queue is full", retry_after_s=1.5, waiting=64
    ),
    "long": errors.NotFound("THING_NOT_FOUND", "x" * 100_000, thing="y" * 100_000),
}


class Probe(placement_pb2_grpc.PlacementServiceServicer):
    """slow: answers after slow_s. upstream:x: has another probe do x. remaining: tells its
    deadline. Of FAILURES: raises."""

    def __init__(self, settings: ProbeSettings, runtime: Runtime) -> None:
        self._settings, self._runtime = settings, runtime

    async def PlanPlacement(
        self, request: placement_pb2.PlanPlacementRequest, context: Any
    ) -> placement_pb2.PlanPlacementResponse:
        del context
        what = request.engines[0].engine_id if request.engines else ""
        response = placement_pb2.PlanPlacementResponse()
        if what == "slow":
            log.info("slow call begins")
            await asyncio.sleep(self._settings.slow_s)
            await self._runtime.bus.publish(
                make_fact("probe", engine_lost=EngineLost(engine_id="slow"))
            )
        elif what in FAILURES:
            raise FAILURES[what]
        elif what.startswith("upstream:"):
            stub = placement_pb2_grpc.PlacementServiceStub(
                self._runtime.channel(self._settings.upstream, "probe")
            )
            return await stub.PlanPlacement(plan(what.removeprefix("upstream:")))
        elif what == "remaining":
            response.solve_time.FromNanoseconds(round((remaining_s() or 0.0) * 1e9))
        return response


class ProbeStream(migrator_pb2_grpc.MigratorServiceServicer):
    """WatchMigration: endless, 3, refuse. CancelMigration: answers a repeat from the record."""

    def __init__(self, records: RequestRecords) -> None:
        self.records = records
        self.closed = 0
        self.calls = 0

    async def WatchMigration(
        self, request: migrator_pb2.WatchMigrationRequest, context: Any
    ) -> AsyncIterator[migrator_pb2.WatchMigrationResponse]:
        del context
        try:
            yield migrator_pb2.WatchMigrationResponse()
            if request.migration_id == "endless":
                await asyncio.Event().wait()
            if request.migration_id == "refuse":
                raise errors.NotFound(
                    "MIGRATION_NOT_FOUND", "no such migration", migration_id="refuse"
                )
            yield migrator_pb2.WatchMigrationResponse()
            yield migrator_pb2.WatchMigrationResponse()
        finally:
            self.closed += 1

    @answered_once
    async def CancelMigration(
        self, request: migrator_pb2.CancelMigrationRequest, context: Any
    ) -> migrator_pb2.CancelMigrationResponse:
        self.calls += 1
        return migrator_pb2.CancelMigrationResponse(
            migration=migrator_pb2.Migration(revision=self.calls)
        )


async def wire(runtime: Runtime) -> Wiring:
    """Both servicers, one core error."""
    settings = runtime.settings
    assert isinstance(settings, ProbeSettings)
    probe = Probe(settings, runtime)
    stream = ProbeStream(await runtime.open_records())  # type: ignore[abstract]

    if settings.broken == "start":
        raise errors.StartError("the loom is missing: install a loom")

    async def task() -> None:
        if settings.broken.startswith("task"):
            raise OSError("the disk is gone")
        await asyncio.Event().wait()

    async def close() -> None:
        if settings.broken == "close":
            await asyncio.Event().wait()
        if settings.broken.endswith("loop"):
            time.sleep(600.0)  # noqa: ASYNC251 - it blocks the event loop
        log.info("closed")

    return Wiring(
        services={
            "treadle.placement.v1.PlacementService": lambda server: (
                placement_pb2_grpc.add_PlacementServiceServicer_to_server(probe, server)
            ),
            "treadle.migrator.v1.MigratorService": lambda server: (
                migrator_pb2_grpc.add_MigratorServiceServicer_to_server(stream, server)
            ),
        },
        tasks=[task],
        close=close,
        errors={CoreError: lambda error: errors.FailedPrecondition("CORE_SAYS_NO", str(error))},
    )


def main() -> None:
    """Run as a process, which does not wait long for what is broken."""
    server.CLOSE_S, server.WHOLE_DRAIN_S = 0.5, 1.0
    run(Service(ProbeSettings, wire))


if __name__ == "__main__":
    main()
