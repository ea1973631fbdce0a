"""Keep the states of migrations, all of them in a JetStream bucket.

A migration's states go forward only (pending → preparing → switching → done | failed | cancelled),
and `revision` moves by one at each change of state. Until a migration is done, the source is the
trajectory's owner; it stays the owner where the migration fails or is cancelled.
"""

import asyncio
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import NamedTuple

from nats.js.errors import KeyNotFoundError, KeyWrongLastSequenceError
from nats.js.kv import KeyValue
from pydantic import TypeAdapter
from treadle_runtime.buckets import entries_of
from treadle_runtime.bus import kv_key
from treadle_runtime.errors import FailedPrecondition, NotFound

BUCKET = "treadle-migrations"


class State(Enum):
    """State of a migration. The values are stored: do not rename them."""

    PENDING = "pending"
    PREPARING = "preparing"
    SWITCHING = "switching"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"


class Path(Enum):
    """Way in which the KV reached the target."""

    STORAGE = "storage"
    PREFILL = "prefill"


ENDED = frozenset({State.DONE, State.FAILED, State.CANCELLED})
FOLLOWING = {
    State.PENDING: {State.PREPARING, State.FAILED, State.CANCELLED},
    State.PREPARING: {State.SWITCHING, State.FAILED, State.CANCELLED},
    State.SWITCHING: {State.DONE, State.FAILED},
}


class Endpoint(NamedTuple):
    """Engine and the address of its sidecar (host:port). Stored as an array: do not reorder the
    fields."""

    engine_id: str
    address: str


@dataclass(frozen=True, slots=True)
class Move:
    """Parameters of StartMigration."""

    trajectory_id: str
    source: Endpoint
    target: Endpoint
    expected_revision: int  # revision of the trajectory's owner
    remaining_tokens: float
    cache_salt: str
    allow_prefill: bool
    give_up_after_s: float  # counted from the request, the wait for its engines included


class Prefix(NamedTuple):
    """Prefix that the target reported to hold. Stored as an array: do not reorder the fields."""

    path: Path
    tokens: int
    from_storage: int
    prefilled: int


@dataclass(frozen=True, slots=True)
class Migration:
    """One move and its state. Stored: names are only added, never renamed.

    Times are Unix seconds; `announced` is true once its end has been published as a fact.
    """

    migration_id: str
    move: Move
    created_at_s: float
    state: State = State.PENDING
    revision: int = 1
    prefix: Prefix | None = None
    started_at_s: float | None = None
    ended_at_s: float | None = None
    failure_reason: str = ""
    announced: bool = False

    @property
    def ended(self) -> bool:
        """Return whether nothing will change any more."""
        return self.state in ENDED

    @property
    def give_up_at_s(self) -> float:
        """Return when the move is no longer worth it, Unix seconds."""
        return self.created_at_s + self.move.give_up_after_s

    def to(
        self, state: State, now_s: float, *, failure_reason: str = "", prefix: Prefix | None = None
    ) -> "Migration | None":
        """Return the migration in its next state; None where that cannot follow the present one."""
        if state not in FOLLOWING.get(self.state, ()):
            return None
        return replace(
            self,
            state=state,
            revision=self.revision + 1,
            prefix=prefix or self.prefix,
            started_at_s=now_s if state is State.PREPARING else self.started_at_s,
            ended_at_s=now_s if state in ENDED else None,
            failure_reason=failure_reason,
        )


STORED = TypeAdapter(Migration)


@dataclass(eq=False)
class _Entry:
    """Migration in memory. stored: its revision in the bucket; 0: not stored yet, None: to be read
    again."""

    migration: Migration
    stored: int | None
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    changed: asyncio.Event = field(default_factory=asyncio.Event)  # replaced at each change


class MigrationStore:
    """Store of all migrations, in memory and in the bucket.

    Invariants: at most one migration of a trajectory has not ended; a change is stored before
    anybody sees it. A write whose outcome is unknown is followed by a read before the next write,
    so that bucket and memory agree again. One process uses the bucket at a time.
    """

    def __init__(self, bucket: KeyValue, retention_s: float) -> None:
        self._bucket = bucket
        self._retention_s = retention_s
        self._entries: dict[str, _Entry] = {}
        self._open: set[str] = set()  # migrations not ended, or ended and not announced

    def __iter__(self) -> Iterator[Migration]:
        return iter([entry.migration for entry in self._entries.values()])

    def open(self) -> list[Migration]:
        """Return migrations that have not ended, or whose end is not announced, oldest first."""
        return sorted(map(self.get, self._open), key=lambda m: (m.created_at_s, m.migration_id))

    def is_open(self, migration_id: str) -> bool:
        """Return whether the migration has not ended, or its end is not announced."""
        return migration_id in self._open

    async def load(self) -> None:
        """Read all stored migrations."""
        for entry in await entries_of(self._bucket):
            migration = STORED.validate_json(entry.value or b"")
            self._show(_Entry(migration, entry.revision), migration)

    def get(self, migration_id: str) -> Migration:
        """Return a migration by id. Raises NotFound."""
        return self._entry(migration_id).migration

    def watch(self, migration_id: str) -> asyncio.Event:
        """Return an event that is set at the next change of the migration: take it, look, then wait
        on it."""
        return self._entry(migration_id).changed

    async def create(self, migration_id: str, move: Move) -> Migration:
        """Create a pending migration, or return the one of this id that is there. Raises
        FailedPrecondition."""
        self._forget_old()
        if migration_id not in self._entries:
            for other in self.open():
                if other.move.trajectory_id == move.trajectory_id and not other.ended:
                    raise FailedPrecondition(
                        "MIGRATION_IN_PROGRESS",
                        f"trajectory {move.trajectory_id} is in migration {other.migration_id} "
                        "already",
                        trajectory_id=move.trajectory_id,
                        migration_id=other.migration_id,
                    )
            # The migration is known from here on; it is open, and so begun, once it is stored.
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
        failure_reason: str = "",
        prefix: Prefix | None = None,
    ) -> Migration | None:
        """Bring a migration into `state`; return None where that cannot follow its present one."""
        entry = self._entry(migration_id)
        async with entry.lock:
            await self._refresh(entry)
            following = entry.migration.to(
                state, time.time(), failure_reason=failure_reason, prefix=prefix
            )
            if following is not None:
                await self._store(entry, following)
            return following

    async def mark_announced(self, migration_id: str) -> None:
        """Store that the migration's end has been published; state and revision stay."""
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
        self._show(entry, STORED.validate_json(found.value or b""))

    async def _store(self, entry: _Entry, migration: Migration) -> None:
        key, value = kv_key(migration.migration_id), STORED.dump_json(migration)
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
        if migration_id not in self._entries:
            raise NotFound(
                "MIGRATION_NOT_FOUND",
                f"no migration {migration_id}; it may have been forgotten",
                migration_id=migration_id,
            )
        return self._entries[migration_id]

    def _forget_old(self) -> None:
        """Forget old migrations in memory; entries of the bucket expire by themselves."""
        oldest_s = time.time() - self._retention_s
        for migration in self:
            if migration.announced and (migration.ended_at_s or 0.0) < oldest_s:
                del self._entries[migration.migration_id]
