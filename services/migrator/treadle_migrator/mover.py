"""Run moves (Heddle §5.3): choose which may run now, prepare, verify, switch the owner, release.

Invariants: the owner changes by the scheduler's SwitchEngine alone (a compare-and-swap), and only
after the target has confirmed that it holds as many tokens as the source; before that, any failure
ends the move with the source as owner; once SwitchEngine has been sent, the scheduler decides the
outcome, however long it takes to answer. Releasing is best effort: a sidecar drops an unused prefix
by itself.
"""

import asyncio
import contextvars
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

import grpc
import grpc.aio
import nats.errors
import structlog
from treadle.engine.v1 import engine_pb2, engine_pb2_grpc
from treadle.errors import TreadleError, error_from
from treadle.scheduler.v1 import scheduler_pb2, scheduler_pb2_grpc
from treadle_core.transfers import next_transfers
from treadle_runtime.calls import detached_context
from treadle_runtime.errors import contain

from treadle_migrator.convert import transfer_from
from treadle_migrator.migrations import Endpoint, Migration, MigrationStore, Path, Prefix, State

RETRY_S = 0.2  # a peer or NATS that restarts is back about then
RETRY_FAILED_S = 5.0  # a defect that stops one move must not fill the log
ASK_TIMEOUT_S = 5.0  # timeout of a read from the scheduler, which answers from memory
RELEASE_TIMEOUT_S = (
    2.0  # an engine that is slower gets the next move, and drops the prefix by itself later
)

INTERRUPTED = "INTERRUPTED"  # a restart of the migrator ended the move
GAVE_UP = "GAVE_UP"  # the move took longer than it saves
# Codes with which a switch is refused; after any other the switch may or may not have happened.
REFUSALS = frozenset(
    {
        grpc.StatusCode.FAILED_PRECONDITION,
        grpc.StatusCode.NOT_FOUND,
        grpc.StatusCode.INVALID_ARGUMENT,
        grpc.StatusCode.ABORTED,
        grpc.StatusCode.ALREADY_EXISTS,
        grpc.StatusCode.UNIMPLEMENTED,
    }
)

log = structlog.get_logger()


class Runner:
    """Loop that starts moves, which the transmission scheduler of the core chooses after each
    change of the store.

    Each choice reads the store alone, so a missed `wake` costs nothing once the next one comes. It
    owns a task for each move that runs, and the set of engines that take part in one. An engine is
    free again when the end of its move has been announced and the prefix released.
    """

    def __init__(self, store: MigrationStore, mover: "Mover") -> None:
        self._store = store
        self._mover = mover
        self._woken = asyncio.Event()
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._moving: set[str] = set()  # migrations whose task stops when they are cancelled
        self._engines: dict[str, frozenset[str]] = {}  # engines that take part, by migration
        # context of the call that started it, by migration
        self._asked_in: dict[str, contextvars.Context] = {}

    def wake(self) -> None:
        """Decide again which moves run; call this after each change of the store."""
        self._woken.set()

    def accept(self, migration_id: str) -> None:
        """Put a move into the trace of the present RPC, which requests it; call this once the move
        is stored."""
        if self._store.is_open(migration_id) and migration_id not in self._tasks:
            self._asked_in[migration_id] = detached_context()
        self.wake()

    async def run(self) -> None:
        """Run moves until cancelled, which leaves moves under way as they are for the next
        process."""
        async with asyncio.TaskGroup() as group:
            while True:
                self._woken.clear()
                self._start_moves(group)
                with suppress(TimeoutError):
                    async with asyncio.timeout(self._next_expiry_s()):
                        await self._woken.wait()

    async def recover(self) -> None:
        """Fail the moves that an earlier process left before their switch, whose owner is still the
        source; call this before `run`."""
        for migration in self._store.open():
            if migration.state in (State.PENDING, State.PREPARING):
                await self._store.change(
                    migration.migration_id, State.FAILED, failure_reason=INTERRUPTED
                )

    def _start_moves(self, group: asyncio.TaskGroup) -> None:
        waiting: dict[str, Migration] = {}
        for migration in self._store.open():
            migration_id = migration.migration_id
            if migration_id in self._tasks:
                if migration.state is State.CANCELLED and migration_id in self._moving:
                    self._moving.discard(migration_id)
                    self._tasks[migration_id].cancel()
            elif migration.state is State.PENDING and _left_s(migration) > 0:
                waiting[migration_id] = migration
            # The move needs no engine: it is too late, or an earlier process sent its switch, or it
            # has ended.
            else:
                self._start(group, migration)
        busy = {engine_id for engines in self._engines.values() for engine_id in engines}
        for transfer in next_transfers(map(transfer_from, waiting.values()), busy):
            self._engines[transfer.transfer_id] = frozenset((transfer.source, transfer.target))
            self._moving.add(transfer.transfer_id)
            self._start(group, waiting[transfer.transfer_id])

    def _start(self, group: asyncio.TaskGroup, migration: Migration) -> None:
        migration_id = migration.migration_id
        asked_in = self._asked_in.pop(migration_id, None)
        task = group.create_task(
            self._move(migration), name=f"migration {migration_id}", context=asked_in
        )
        self._tasks[migration_id] = task
        task.add_done_callback(lambda _: self._forget_task(migration_id))

    async def _move(self, migration: Migration) -> None:
        """Run a move to its end; one that fails unexpectedly is taken up again after a while."""
        ended = False
        with contain("a move", migration_id=migration.migration_id):
            await self._mover.move(migration)
            ended = True
        if not ended:
            await asyncio.sleep(RETRY_FAILED_S)

    def _forget_task(self, migration_id: str) -> None:
        del self._tasks[migration_id]
        self._moving.discard(migration_id)
        if not self._store.is_open(migration_id):
            self._engines.pop(migration_id, None)
        self.wake()

    def _next_expiry_s(self) -> float | None:
        """Return the seconds until the next waiting move is no longer worth it; None where none
        waits."""
        waiting = (
            m
            for m in self._store.open()
            if m.state is State.PENDING and m.migration_id not in self._tasks
        )
        return min((max(0.0, _left_s(m)) for m in waiting), default=None)


class Mover:
    """Client of the two sidecars and the scheduler that carries moves out; `announce` publishes an
    end and returns once that is safe.

    Request ids are derived from the migration's, so that a call repeated after a lost answer, or by
    the next process, is answered from the peer's record.
    """

    def __init__(
        self,
        store: MigrationStore,
        channel: Callable[[str, str], grpc.aio.Channel],
        scheduler: grpc.aio.Channel,
        announce: Callable[[Migration], Awaitable[None]],
    ) -> None:
        self._store = store
        self._channel = channel
        self._scheduler = scheduler_pb2_grpc.SchedulerServiceStub(scheduler)
        self._announce = announce

    async def move(self, migration: Migration) -> None:
        """Take a migration from its present state to its end, and announce that."""
        if migration.state is State.SWITCHING:  # an earlier process may have sent the switch
            await self._settle(migration, INTERRUPTED)
        elif not migration.ended:
            await self._run(migration)
        await self._conclude(migration)

    async def _run(self, migration: Migration) -> None:
        ready, reason = False, ""
        try:
            if (left_s := _left_s(migration)) <= 0:
                raise MoveFailedError(GAVE_UP)
            async with asyncio.timeout(left_s):
                ready = await self._make_ready(migration)
        except nats.errors.Error as error:  # before TimeoutError, as its timeout is one too
            log.warning("state not stored", migration_id=migration.migration_id, error=repr(error))
            reason = "STATE_NOT_STORED"
        except TimeoutError:
            reason = GAVE_UP
        except MoveFailedError as failure:
            reason = failure.reason
        if ready:
            await self._switch(migration)
        elif reason:
            await self._end(migration, State.FAILED, reason)

    async def _settle(self, migration: Migration, reason: str) -> None:
        """End a migration whose switch may have happened by the state that the scheduler returns;
        wait for its answer.

        reason: why the move failed, where the owner has not changed.
        """
        move = migration.move
        request = scheduler_pb2.GetTrajectoryRequest(trajectory_id=move.trajectory_id)
        while True:
            try:
                trajectory = (
                    await self._scheduler.GetTrajectory(request, timeout=ASK_TIMEOUT_S)
                ).trajectory
            except grpc.aio.AioRpcError as error:
                if error.code() is grpc.StatusCode.NOT_FOUND:
                    await self._end(
                        migration, State.FAILED, error_from(error).reason or "TRAJECTORY_NOT_FOUND"
                    )
                    return
                log.warning(
                    "scheduler does not answer",
                    migration_id=migration.migration_id,
                    code=error.code().name,
                )
                await asyncio.sleep(RETRY_S)
                continue
            moved = (
                trajectory.engine_id == move.target.engine_id
                and trajectory.revision > move.expected_revision
            )
            await self._end(
                migration, State.DONE if moved else State.FAILED, "" if moved else reason
            )
            return

    async def _conclude(self, migration: Migration) -> None:
        """Publish the fact of an end, then have the engine that is not the owner release the
        prefix."""
        ended = self._store.get(migration.migration_id)
        if not ended.ended or ended.announced:
            return
        await self._store_surely(lambda: self._announce(ended))
        endpoint = ended.move.source if ended.state is State.DONE else ended.move.target
        # After a lost compare-and-swap the trajectory may be anywhere, at the target too.
        if ended.started_at_s is not None and ended.failure_reason != "REVISION_MISMATCH":
            request = engine_pb2.ReleasePrefixRequest(
                request_id=f"{ended.migration_id}.release", trajectory_id=ended.move.trajectory_id
            )
            try:
                await self._engine(endpoint).ReleasePrefix(request, timeout=RELEASE_TIMEOUT_S)
            except grpc.aio.AioRpcError as error:
                log.warning(
                    "prefix not released",
                    migration_id=ended.migration_id,
                    engine_id=endpoint.engine_id,
                    code=error.code().name,
                )
        await self._store_surely(lambda: self._store.mark_announced(migration.migration_id))

    async def _make_ready(self, migration: Migration) -> bool:
        """Prepare the move and return True where the switch may be sent now; False where the move
        was cancelled. Raises MoveFailedError."""
        migration_id = migration.migration_id
        if await self._store.change(migration_id, State.PREPARING) is None:
            return False
        prefix = await self._prepare(migration)
        return await self._store.change(migration_id, State.SWITCHING, prefix=prefix) is not None

    async def _prepare(self, migration: Migration) -> Prefix:
        """Prefetch from storage, else by prefill where that is allowed; then compare what both
        sides hold now."""
        try:
            prefix = await self._prefetch(migration, storage_only=True)
        except MoveFailedError as failure:
            if failure.reason != "PREFIX_NOT_STORED" or not migration.move.allow_prefill:
                raise
            prefix = await self._prefetch(migration, storage_only=False)
        for endpoint, peer in (
            (migration.move.source, "SOURCE"),
            (migration.move.target, "TARGET"),
        ):
            # The tokens themselves never pass through here (docs/adr/0007).
            request = engine_pb2.ExportPrefixRequest(
                trajectory_id=migration.move.trajectory_id, counts_only=True
            )
            try:
                held = await self._engine(endpoint).ExportPrefix(
                    request, timeout=_left_s(migration)
                )
            except grpc.aio.AioRpcError as error:
                raise MoveFailedError(_reason_of(error_from(error), peer)) from error
            if held.cache_salt != migration.move.cache_salt:
                raise MoveFailedError("WEIGHT_VERSION_MISMATCH")
            if prefix.tokens != held.prefix_tokens or prefix.tokens == 0:
                raise MoveFailedError("PREFIX_MISMATCH")
        return prefix

    async def _prefetch(self, migration: Migration, *, storage_only: bool) -> Prefix:
        """Have the target bring the source's prefix to its engine."""
        move = migration.move
        request = engine_pb2.PrefetchPrefixRequest(
            request_id=f"{migration.migration_id}.{'fetch' if storage_only else 'prefill'}",
            trajectory_id=move.trajectory_id,
            cache_salt=move.cache_salt,
            storage_only=storage_only,
        )
        prefix_ref = getattr(request, "from")  # a keyword in Python
        prefix_ref.engine_address = move.source.address
        prefix_ref.trajectory_id = move.trajectory_id
        try:
            found = await self._engine(move.target).PrefetchPrefix(
                request, timeout=_left_s(migration)
            )
        except grpc.aio.AioRpcError as error:
            raise MoveFailedError(_reason_of(error_from(error), "TARGET")) from error
        # An engine computes the end of a stored prefix too: the last page at least, and all from a
        # damaged page on.
        computed = found.tokens_prefilled > found.tokens_from_cache + found.tokens_from_storage
        path = Path.PREFILL if computed else Path.STORAGE
        return Prefix(path, found.prefix_tokens, found.tokens_from_storage, found.tokens_prefilled)

    async def _switch(self, migration: Migration) -> None:
        """Send the compare-and-swap until it is answered; without an answer in time, read its
        outcome from the scheduler."""
        request = scheduler_pb2.SwitchEngineRequest(
            request_id=f"{migration.migration_id}.switch",
            trajectory_id=migration.move.trajectory_id,
            expected_revision=migration.move.expected_revision,
            target_engine_id=migration.move.target.engine_id,
        )
        while (left_s := _left_s(migration)) > 0:
            try:
                await self._scheduler.SwitchEngine(request, timeout=left_s)
            except grpc.aio.AioRpcError as error:
                if error.code() in REFUSALS:
                    await self._end(
                        migration, State.FAILED, _reason_of(error_from(error), "SCHEDULER")
                    )
                    return
                log.warning(
                    "switch not answered",
                    migration_id=migration.migration_id,
                    code=error.code().name,
                )
                await asyncio.sleep(min(RETRY_S, max(0.0, _left_s(migration))))
            else:
                await self._end(migration, State.DONE, "")
                return
        await self._settle(migration, GAVE_UP)

    async def _end(self, migration: Migration, state: State, reason: str) -> None:
        await self._store_surely(
            lambda: self._store.change(migration.migration_id, state, failure_reason=reason)
        )

    def _engine(self, endpoint: Endpoint) -> "engine_pb2_grpc.EngineServiceAsyncStub":
        return engine_pb2_grpc.EngineServiceStub(self._channel(endpoint.address, "sidecar"))

    async def _store_surely(self, write: Callable[[], Awaitable[Any]]) -> None:
        """Try to write until it is stored: an end must be, however long NATS does not answer."""
        while True:
            try:
                await write()
            except nats.errors.Error as error:
                log.warning("state not stored, trying again", error=repr(error))
                await asyncio.sleep(RETRY_S)
            else:
                return


class MoveFailedError(Exception):
    """The move ends before its switch; `reason` is UPPER_SNAKE."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


def _left_s(migration: Migration) -> float:
    return migration.give_up_at_s - time.time()


def _reason_of(error: TreadleError, peer: str) -> str:
    """Return the peer's own reason where it gave one; a deadline that passes is ours: the move gave
    up."""
    if error.code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return GAVE_UP
    if error.lost_connection:  # the target reports this about the source too
        return error.reason if error.reason == "SOURCE_UNAVAILABLE" else f"{peer}_UNAVAILABLE"
    return error.reason or f"{peer}_{error.code.name}"
