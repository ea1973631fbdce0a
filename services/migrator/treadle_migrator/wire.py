"""Assemble the migrator."""

from functools import partial
from typing import cast

from treadle.migrator.v1 import migrator_pb2, migrator_pb2_grpc
from treadle_runtime.server import Runtime, Wiring

from treadle_migrator.config import MigratorSettings
from treadle_migrator.convert import fact_of
from treadle_migrator.migrations import BUCKET, Migration, MigrationStore
from treadle_migrator.mover import Mover, Peers, Runner
from treadle_migrator.servicer import MigratorServicer

SERVICE = migrator_pb2.DESCRIPTOR.services_by_name["MigratorService"].full_name


async def wire(runtime: Runtime) -> Wiring:
    """Load the migrations, end what an earlier process left, then serve."""
    settings = cast(MigratorSettings, runtime.settings)
    bucket = await runtime.bus.key_value(BUCKET, ttl_s=settings.retention_s)
    store = MigrationStore(bucket, settings.retention_s)
    await store.load()

    async def announce(migration: Migration) -> None:
        await runtime.bus.publish(fact_of(migration))
        await runtime.bus.flush()

    runner = Runner(store, Mover(store, Peers(runtime.channel, settings.scheduler), announce))
    await runner.recover()
    servicer = MigratorServicer(store, runner, runtime.records, give_up_s=settings.give_up_s)
    return Wiring(
        services={SERVICE: partial(migrator_pb2_grpc.add_MigratorServiceServicer_to_server, servicer)},
        tasks=[runner.run],
    )
