"""Assemble the migrator."""

from functools import partial
from typing import cast

from treadle.migrator.v1.migrator_pb2_grpc import add_MigratorServiceServicer_to_server
from treadle_runtime.server import Runtime, Wiring

from treadle_migrator.config import MigratorSettings
from treadle_migrator.convert import fact_of
from treadle_migrator.migrations import BUCKET, Migration, MigrationStore, State
from treadle_migrator.mover import Mover, Runner
from treadle_migrator.servicer import MigratorServicer


async def wire(runtime: Runtime) -> Wiring:
    """Load the migrations, end what an earlier process left, then serve."""
    settings = cast(MigratorSettings, runtime.settings)
    bucket = await runtime.bus.key_value(BUCKET, ttl_s=settings.retention_s)
    store = MigrationStore(bucket, settings.retention_s)
    await store.load()

    metrics = runtime.metrics
    move_s = metrics.seconds("move", "From the start of a move to its end, by how it ended")
    moves = metrics.total("moves", "move", "Moves that have ended, by how and why")
    tokens = metrics.total("tokens", "token", "Tokens of the prefixes that moved, by the way that their KV took")
    metrics.gauge("open_moves", "move", "Moves that wait or run", lambda: len(store.open()))

    async def announce(migration: Migration) -> None:
        await runtime.bus.publish(fact_of(migration))
        await runtime.bus.flush()
        ended = {"state": migration.state.name.lower()}
        moves(1, {**ended, "reason": migration.failure_reason.lower() or "none"})
        if migration.started_at_s is not None and migration.ended_at_s is not None:
            move_s(migration.ended_at_s - migration.started_at_s, ended)
        if migration.state is State.DONE and migration.prefix is not None:
            tokens(migration.prefix.tokens, {"path": migration.prefix.path.value})

    runner = Runner(store, Mover(store, runtime.channel, runtime.follow(settings.scheduler, "scheduler"), announce))
    await runner.recover()
    servicer = MigratorServicer(store, runner, runtime.records, give_up_s=settings.give_up_s)
    return Wiring(
        services={"treadle.migrator.v1.MigratorService": partial(add_MigratorServiceServicer_to_server, servicer)},
        tasks=[runner.run],
    )
