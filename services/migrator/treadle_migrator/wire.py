"""Puts the migrator together."""

from treadle.migrator.v1 import migrator_pb2, migrator_pb2_grpc
from treadle_runtime.errors import ErrorTable, FailedPrecondition, NotFound
from treadle_runtime.server import Runtime, Wiring

from treadle_migrator.book import BUCKET, MigrationBook, MoveInProgressError, UnknownMigrationError
from treadle_migrator.config import MigratorSettings
from treadle_migrator.convert import fact_of
from treadle_migrator.migration import Migration
from treadle_migrator.mover import Mover, Peers
from treadle_migrator.runner import Runner
from treadle_migrator.servicer import MigratorServicer

SERVICE = migrator_pb2.DESCRIPTOR.services_by_name["MigratorService"].full_name

ERRORS: ErrorTable = {
    UnknownMigrationError: lambda error: NotFound(
        "MIGRATION_NOT_FOUND", f"no migration {error}; it may have been forgotten", migration_id=str(error)
    ),
    MoveInProgressError: lambda error: FailedPrecondition(
        "MIGRATION_IN_PROGRESS",
        str(error),
        trajectory_id=error.migration.move.trajectory_id,
        migration_id=error.migration.migration_id,
    ),
}


async def wire(runtime: Runtime) -> Wiring:
    """Load the book, end what an earlier process left, then serve."""
    settings = runtime.settings
    if not isinstance(settings, MigratorSettings):
        raise TypeError(f"expected MigratorSettings, got {type(settings).__name__}")
    book = MigrationBook(await runtime.bus.key_value(BUCKET, ttl_s=settings.retention_s), settings.retention_s)
    await book.load()

    async def announce(migration: Migration) -> None:
        await runtime.bus.publish(fact_of(migration))
        await runtime.bus.flush()

    runner = Runner(book, Mover(book, Peers(runtime.channel, settings.scheduler), announce))
    await runner.recover()
    servicer = MigratorServicer(book, runner, runtime.records, give_up_s=settings.give_up_s)
    return Wiring(
        services={SERVICE: lambda server: migrator_pb2_grpc.add_MigratorServiceServicer_to_server(servicer, server)},
        tasks=[runner.run],
        errors=ERRORS,
    )
