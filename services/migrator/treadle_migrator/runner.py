"""Decides which moves run now, and runs them: one epoch of the transmission scheduler after each change.

Level-triggered: an epoch looks at the book alone, so that a missed wake-up costs nothing once the next comes. Owns: a
task per move under way and the set of engines that take part in one. An engine is free again when its move's end has
been announced and released.
"""

import asyncio
import time
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any

from treadle_core.steps.transfers import next_transfers

from treadle_migrator.book import MigrationBook
from treadle_migrator.convert import transfer_from
from treadle_migrator.migration import Migration, State
from treadle_migrator.mover import Mover

INTERRUPTED = "INTERRUPTED"


class Runner:
    """See the module. `wake` after each change of the book."""

    def __init__(self, book: MigrationBook, mover: Mover) -> None:
        self._book = book
        self._mover = mover
        self._news = asyncio.Event()
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._moving: set[str] = set()  # those of the tasks that a cancelled migration stops
        self._engines: dict[str, frozenset[str]] = {}  # taken part in, by migration

    def wake(self) -> None:
        """Something changed."""
        self._news.set()

    async def run(self) -> None:
        """Run moves until cancelled.

        Moves under way are left as they are, for the process that comes after this one.
        """
        async with asyncio.TaskGroup() as group:
            while True:
                self._news.clear()
                self._epoch(group)
                with suppress(TimeoutError):
                    async with asyncio.timeout(self._next_expiry_s()):
                        await self._news.wait()

    async def recover(self) -> None:
        """Before the first epoch.

        What an earlier process left before its switch has failed; the source is still the owner.
        """
        for migration in self._book.open():
            if migration.state in (State.PENDING, State.PREPARING):
                await self._book.change(
                    migration.migration_id, State.FAILED, out_of={migration.state}, failure_reason=INTERRUPTED
                )

    def _epoch(self, group: asyncio.TaskGroup) -> None:
        waiting: dict[str, Migration] = {}
        for migration in self._book.open():
            migration_id = migration.migration_id
            if migration_id in self._tasks:
                if migration.state is State.CANCELLED and migration_id in self._moving:
                    self._moving.discard(migration_id)
                    self._tasks[migration_id].cancel()
            elif migration.ended:
                self._start(group, migration_id, self._mover.conclude(migration))
            elif migration.state is State.SWITCHING:
                self._start(group, migration_id, self._finish(migration))
            elif migration.give_up_at_s <= time.time():
                self._start(group, migration_id, self._mover.move(migration))  # which gives up at once
            else:
                waiting[migration_id] = migration
        busy = {engine_id for engines in self._engines.values() for engine_id in engines}
        for transfer in next_transfers(map(transfer_from, waiting.values()), busy):
            self._engines[transfer.transfer_id] = frozenset((transfer.source, transfer.target))
            self._moving.add(transfer.transfer_id)
            self._start(group, transfer.transfer_id, self._mover.move(waiting[transfer.transfer_id]))

    def _start(self, group: asyncio.TaskGroup, migration_id: str, work: Coroutine[Any, Any, None]) -> None:
        task = group.create_task(work, name=f"migration {migration_id}")
        self._tasks[migration_id] = task
        task.add_done_callback(lambda _: self._ended(migration_id))

    def _ended(self, migration_id: str) -> None:
        del self._tasks[migration_id]
        self._moving.discard(migration_id)
        if not self._book.is_open(migration_id):
            self._engines.pop(migration_id, None)
        self.wake()

    async def _finish(self, migration: Migration) -> None:
        """A switch that an earlier process may have sent."""
        await self._mover.settle(migration, INTERRUPTED)
        await self._mover.conclude(migration)

    def _next_expiry_s(self) -> float | None:
        """Until the next waiting move is no longer worth it; None where none waits."""
        waiting = (m for m in self._book.open() if m.state is State.PENDING and m.migration_id not in self._tasks)
        return min((max(0.0, m.give_up_at_s - time.time()) for m in waiting), default=None)
