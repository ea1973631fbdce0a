"""Assemble the migrator."""

from functools import partial
from typing import cast

from treadle.migrator.v1.migrator_pb2_grpc import add_MigratorServiceServicer_to_server
from treadle_runtime.server import Runtime, Wiring

from treadle_migrator.config import MigratorSettings
from treadle_migrator.convert import fact_of
from treadle_migrator.metrics import Meters
from treadle_migrator.migrations import BUCKET, Migration, MigrationStore
from treadle_migrator.mover import Mover, Runner
from treadle_migrator.servicer import MigratorServicer


async def wire(runtime: Runtime) -> Wiring:
    """Load the migrations, end what an earlier process left, then serve."""
    settings = cast(MigratorSettings, runtime.settings)
    bucket = await runtime.bus.key_value(BUCKET, ttl_s=settings.retention_s)
    store = MigrationStore(bucket, settings.retention_s)
    await store.load()

    meters = Meters(runtime.metrics, lambda: len(store.open()))

    async def announce(migration: Migration) -> None:
        await runtime.bus.publish(fact_of(migration))
        await runtime.bus.flush()
        meters.record_end(migration)

    runner = Runner(
        store,
        Mover(store, runtime.channel, runtime.follow(settings.scheduler, "scheduler"), announce),
    )
    await runner.recover()
    records = await runtime.open_records()
    servicer = MigratorServicer(store, runner, records, give_up_s=settings.give_up_s)
    return Wiring(
        services={
            "treadle.migrator.v1.MigratorService": partial(
                add_MigratorServiceServicer_to_server, servicer
            )
        },
        tasks=[runner.run],
    )
