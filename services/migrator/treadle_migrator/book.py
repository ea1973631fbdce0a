"""All migrations of this service: in memory, and in a JetStream bucket before anybody hears of a change.

Invariants: one migration that has not ended per trajectory; a change is stored, then visible. A write whose outcome
is unknown is followed by a read before the next write, so that the stored state and memory agree again. One process
serves the book at a time.
"""

import asyncio
import json
import time
from collections.abc import Collection, Iterator
from dataclasses import replace

from nats.js.errors import KeyNotFoundError, KeyWrongLastSequenceError
from nats.js.kv import KeyValue
from treadle_runtime.bus import entries_of, kv_key

from treadle_migrator.migration import Migration, Move, Prefix, State, document_of, migration_from

BUCKET = "treadle-migrations"


class UnknownMigrationError(Exception):
    """No migration has this id."""


class MoveInProgressError(Exception):
    """The trajectory takes part in a migration already."""

    def __init__(self, migration: Migration) -> None:
        super().__init__(f"trajectory {migration.move.trajectory_id} is in migration {migration.migration_id} already")
        self.migration = migration


class _Entry:
    """One migration and its revision in the bucket; 0: not stored yet, None: to be read again."""

    def __init__(self, migration: Migration, stored: int | None) -> None:
        self.migration = migration
        self.stored = stored
        self.lock = asyncio.Lock()
        self.changed = asyncio.Event()  # replaced at each change


class MigrationBook:
    """See the module. Migrations are handed out as values; `change` makes the next one."""

    def __init__(self, bucket: KeyValue, retention_s: float) -> None:
        self._bucket = bucket
        self._retention_s = retention_s
        self._entries: dict[str, _Entry] = {}
        self._open: set[str] = set()  # not ended, or ended and not announced

    def __iter__(self) -> Iterator[Migration]:
        return iter([entry.migration for entry in self._entries.values()])

    def open(self) -> list[Migration]:
        """Those that still need something done, in the order in which they were asked for."""
        return sorted(
            (self.get(migration_id) for migration_id in self._open), key=lambda m: (m.created_at_s, m.migration_id)
        )

    def is_open(self, migration_id: str) -> bool:
        """Whether something is still to be done about it."""
        return migration_id in self._open

    async def load(self) -> None:
        """Read everything stored."""
        for entry in await entries_of(self._bucket):
            migration = migration_from(json.loads(entry.value or b""))
            self._show(_Entry(migration, entry.revision), migration)

    def get(self, migration_id: str) -> Migration:
        """A migration by id. Raises UnknownMigrationError."""
        return self._entry(migration_id).migration

    def watch(self, migration_id: str) -> asyncio.Event:
        """Set at the next change of the migration: take it, look, then wait on it."""
        return self._entry(migration_id).changed

    async def create(self, migration_id: str, move: Move) -> Migration:
        """A pending migration, or the one of this id that is there. Raises MoveInProgressError."""
        self._forget_old()
        if migration_id not in self._entries:
            for other in self.open():
                if other.move.trajectory_id == move.trajectory_id and not other.ended:
                    raise MoveInProgressError(other)
            # Known from here on; open, and so begun, once it is stored.
            self._entries[migration_id] = _Entry(Migration(migration_id, move, time.time()), None)
        entry = self._entries[migration_id]
        async with entry.lock:
            try:
                await self._refresh(entry)
                if not entry.stored:
                    await self._store(entry, entry.migration)
            finally:
                if not entry.stored:
                    del self._entries[migration_id]
        return entry.migration

    async def change(
        self,
        migration_id: str,
        state: State,
        *,
        out_of: Collection[State],
        failure_reason: str = "",
        prefix: Prefix | None = None,
    ) -> Migration | None:
        """Bring a migration into `state` if it is in one of `out_of`; None where it is not."""
        entry = self._entry(migration_id)
        async with entry.lock:
            await self._refresh(entry)
            if entry.migration.state not in out_of:
                return None
            following = entry.migration.to(state, time.time(), failure_reason=failure_reason, prefix=prefix)
            await self._store(entry, following)
            return following

    async def mark_announced(self, migration_id: str) -> None:
        """Its end has been published; no change of state, no new revision."""
        entry = self._entry(migration_id)
        async with entry.lock:
            await self._refresh(entry)
            await self._store(entry, replace(entry.migration, announced=True))

    async def _refresh(self, entry: _Entry) -> None:
        if entry.stored is not None:
            return
        try:
            found = await self._bucket.get(kv_key(entry.migration.migration_id))
        except KeyNotFoundError:
            entry.stored = 0
            return
        entry.stored = found.revision
        self._show(entry, migration_from(json.loads(found.value or b"")))

    async def _store(self, entry: _Entry, migration: Migration) -> None:
        key, value = kv_key(migration.migration_id), json.dumps(document_of(migration)).encode()
        last, entry.stored = entry.stored, None
        try:
            entry.stored = await self._bucket.update(key, value, last=last)
        except KeyWrongLastSequenceError:
            # An earlier try of this very write arrived although its acknowledgement did not.
            await self._refresh(entry)
            if entry.migration != migration:
                raise
        self._show(entry, migration)

    def _show(self, entry: _Entry, migration: Migration) -> None:
        self._entries[migration.migration_id] = entry
        if migration.ended and migration.announced:
            self._open.discard(migration.migration_id)
        else:
            self._open.add(migration.migration_id)
        entry.migration = migration
        entry.changed.set()
        entry.changed = asyncio.Event()

    def _entry(self, migration_id: str) -> _Entry:
        try:
            return self._entries[migration_id]
        except KeyError:
            raise UnknownMigrationError(migration_id) from None

    def _forget_old(self) -> None:
        """Memory follows the bucket, whose entries end by themselves."""
        oldest_s = time.time() - self._retention_s
        for migration in self:
            if migration.announced and (migration.ended_at_s or 0.0) < oldest_s:
                del self._entries[migration.migration_id]
