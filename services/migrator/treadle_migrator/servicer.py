"""Serve MigratorService: check the request, convert it, call the store, convert the answer. Moves
run in mover.py."""

from collections.abc import AsyncIterator

import grpc.aio
from treadle.migrator.v1 import migrator_pb2 as pb
from treadle.migrator.v1 import migrator_pb2_grpc
from treadle_runtime.fields import identifier, optional_identifier, page_of
from treadle_runtime.idempotency import RequestRecords, answered_once

from treadle_migrator.convert import migration_id_of, migration_to, move_from
from treadle_migrator.migrations import Migration, MigrationStore, State
from treadle_migrator.mover import Runner

Context = grpc.aio.ServicerContext[object, object]


class MigratorServicer(migrator_pb2_grpc.MigratorServiceServicer):
    """Servicer of MigratorService, without state: migrations are in `store`."""

    def __init__(
        self, store: MigrationStore, runner: Runner, records: RequestRecords, *, give_up_s: float
    ) -> None:
        self._store = store
        self._runner = runner
        self.records = records
        self._give_up_s = give_up_s

    @answered_once
    async def StartMigration(
        self, request: pb.StartMigrationRequest, context: Context
    ) -> pb.StartMigrationResponse:
        """Store a move, then answer; it runs as soon as its engines are free."""
        move = move_from(request, self._give_up_s)
        migration = await self._store.create(migration_id_of(request.request_id), move)
        self._runner.accept(migration.migration_id)
        return pb.StartMigrationResponse(migration=migration_to(migration))

    async def GetMigration(
        self, request: pb.GetMigrationRequest, context: Context
    ) -> pb.GetMigrationResponse:
        return pb.GetMigrationResponse(migration=migration_to(self._find(request.migration_id)))

    async def WatchMigration(
        self, request: pb.WatchMigrationRequest, context: Context
    ) -> AsyncIterator[pb.WatchMigrationResponse]:
        """Send the present state, then each change; a reader that is slower than the move misses
        states between."""
        async for migration in self._changes(self._find(request.migration_id)):
            yield pb.WatchMigrationResponse(migration=migration_to(migration))

    @answered_once
    async def CancelMigration(
        self, request: pb.CancelMigrationRequest, context: Context
    ) -> pb.CancelMigrationResponse:
        """Cancel a move that has not begun to switch; wait for a switch under way, and answer with
        its outcome."""
        migration_id = self._find(request.migration_id).migration_id
        await self._store.change(migration_id, State.CANCELLED)
        self._runner.wake()
        async for migration in self._changes(self._find(migration_id)):
            ended = migration
        return pb.CancelMigrationResponse(migration=migration_to(ended))

    async def ListMigrations(
        self, request: pb.ListMigrationsRequest, context: Context
    ) -> pb.ListMigrationsResponse:
        trajectory_id = optional_identifier("trajectory_id", request.trajectory_id)
        wanted = (m for m in self._store if trajectory_id in ("", m.move.trajectory_id))
        page, token = page_of(
            wanted,
            lambda m: (m.created_at_s, m.migration_id),
            request.page_size,
            request.page_token,
        )
        return pb.ListMigrationsResponse(migrations=map(migration_to, page), next_page_token=token)

    def _find(self, migration_id: str) -> Migration:
        return self._store.get(identifier("migration_id", migration_id))

    async def _changes(self, migration: Migration) -> AsyncIterator[Migration]:
        """Yield the migration, then each later state until it has ended."""
        yield migration
        while not migration.ended:
            changed = self._store.watch(migration.migration_id)
            following = self._store.get(migration.migration_id)
            if following.revision != migration.revision:
                migration = following
                yield migration
            else:
                await changed.wait()
