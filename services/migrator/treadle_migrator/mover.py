"""Performs one move (Heddle §5.3): prepare, verify, switch owner by compare-and-swap, release.

Invariants: the owner changes by the scheduler's SwitchEngine alone, and only after the target has reported as many
tokens as the source holds; before that, any failure ends the move with the source as owner; once SwitchEngine has
been sent, what the scheduler says is the outcome, however long it takes to hear it. Releasing is best effort: a
sidecar forgets by itself what is not used.

The calls that a move makes: to the two sidecars and to the scheduler.

Request ids are derived from the migration, so that a call repeated after a lost answer, or by the process that comes
after this one, is answered from the peer's record. Every method raises grpc.aio.AioRpcError."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio
import nats.errors
import structlog
from treadle.engine.v1 import engine_pb2, engine_pb2_grpc
from treadle.errors import TreadleError, error_from
from treadle.scheduler.v1 import scheduler_pb2, scheduler_pb2_grpc

from treadle_migrator.book import MigrationBook
from treadle_migrator.migration import Endpoint, Migration, Path, Prefix, State

if TYPE_CHECKING:
    from treadle.engine.v1.engine_pb2_grpc import EngineServiceAsyncStub
    from treadle.scheduler.v1.scheduler_pb2_grpc import SchedulerServiceAsyncStub


@dataclass(frozen=True, slots=True)
class Exported:
    """How much the source holds of a trajectory. The tokens themselves never come here (docs/adr/0007)."""

    tokens: int
    cache_salt: str


@dataclass(frozen=True, slots=True)
class Owner:
    """What the scheduler says: whose a trajectory is, and at which revision."""

    engine_id: str
    revision: int


class Peers:
    """Stubs over the process's channels. Timeouts are in seconds."""

    def __init__(self, channel: Callable[[str], grpc.aio.Channel], scheduler: str) -> None:
        self._channel = channel
        self._scheduler = scheduler

    async def prefetch(self, migration: Migration, *, storage_only: bool, timeout_s: float) -> Prefix:
        """The target brings the source's prefix to its engine."""
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
        response = await self._sidecar(move.target).PrefetchPrefix(request, timeout=timeout_s)
        return Prefix(
            # An engine computes a few tokens of a stored prefix too (its last page at least).
            path=Path.STORAGE if storage_only else Path.PREFILL,
            tokens=response.prefix_tokens,
            from_storage=response.tokens_from_storage,
            prefilled=response.tokens_prefilled,
        )

    async def exported(self, migration: Migration, *, timeout_s: float) -> Exported:
        """What the source holds now."""
        request = engine_pb2.ExportPrefixRequest(trajectory_id=migration.move.trajectory_id, counts_only=True)
        response = await self._sidecar(migration.move.source).ExportPrefix(request, timeout=timeout_s)
        return Exported(response.prefix_tokens, response.cache_salt)

    async def release(self, migration: Migration, endpoint: Endpoint, *, timeout_s: float) -> None:
        """An engine that is not the owner forgets the prefix."""
        request = engine_pb2.ReleasePrefixRequest(
            request_id=f"{migration.migration_id}.release", trajectory_id=migration.move.trajectory_id
        )
        await self._sidecar(endpoint).ReleasePrefix(request, timeout=timeout_s)

    async def switch(self, migration: Migration, *, timeout_s: float) -> None:
        """Compare-and-swap of the owner."""
        request = scheduler_pb2.SwitchEngineRequest(
            request_id=f"{migration.migration_id}.switch",
            trajectory_id=migration.move.trajectory_id,
            expected_revision=migration.move.expected_revision,
            target_engine_id=migration.move.target.engine_id,
        )
        await self._scheduler_stub().SwitchEngine(request, timeout=timeout_s)

    async def owner(self, trajectory_id: str, *, timeout_s: float) -> Owner:
        """Who owns a trajectory now."""
        request = scheduler_pb2.GetTrajectoryRequest(trajectory_id=trajectory_id)
        response = await self._scheduler_stub().GetTrajectory(request, timeout=timeout_s)
        return Owner(response.trajectory.engine_id, response.trajectory.revision)

    def _sidecar(self, endpoint: Endpoint) -> "EngineServiceAsyncStub":
        return engine_pb2_grpc.EngineServiceStub(self._channel(endpoint.address))

    def _scheduler_stub(self) -> "SchedulerServiceAsyncStub":
        return scheduler_pb2_grpc.SchedulerServiceStub(self._channel(self._scheduler))


RETRY_S = 0.2  # a peer or NATS that restarts is back about then
ASK_TIMEOUT_S = 5.0  # of a question to the scheduler, which answers from memory
RELEASE_TIMEOUT_S = 2.0  # an engine that is slower than this gets the next move, and forgets later by itself

GAVE_UP = "GAVE_UP"  # the move took longer than it saves
NOT_SWITCHED = frozenset({State.PENDING, State.PREPARING, State.SWITCHING})
# Codes that say that the switch was refused; after any other the switch may or may not have happened.
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


class MoveFailedError(Exception):
    """The move ends before its switch; `reason` is UPPER_SNAKE."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class Mover:
    """Works on one migration per call; `announce` publishes the end of one and returns once that is safe."""

    def __init__(self, book: MigrationBook, peers: Peers, announce: Callable[[Migration], Awaitable[None]]) -> None:
        self._book = book
        self._peers = peers
        self._announce = announce

    async def move(self, migration: Migration) -> None:
        """From pending to its end, announced."""
        ready, reason = False, ""
        try:
            if (left_s := _left_s(migration)) <= 0:
                raise MoveFailedError(GAVE_UP)
            async with asyncio.timeout(left_s):
                ready = await self._make_ready(migration)
        except nats.errors.Error as error:  # first: its timeout is a TimeoutError too
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
        await self.conclude(migration)

    async def settle(self, migration: Migration, reason: str) -> None:
        """Ends a migration whose switch may have happened as the scheduler says.

        `reason` where it did not. Waits for its answer.
        """
        move = migration.move
        while True:
            try:
                owner = await self._peers.owner(move.trajectory_id, timeout_s=ASK_TIMEOUT_S)
            except grpc.aio.AioRpcError as error:
                if error.code() is grpc.StatusCode.NOT_FOUND:
                    await self._end(migration, State.FAILED, error_from(error).reason or "TRAJECTORY_NOT_FOUND")
                    return
                log.warning("scheduler does not answer", migration_id=migration.migration_id, code=error.code().name)
                await asyncio.sleep(RETRY_S)
                continue
            moved = owner.engine_id == move.target.engine_id and owner.revision > move.expected_revision
            await self._end(migration, State.DONE if moved else State.FAILED, "" if moved else reason)
            return

    async def conclude(self, migration: Migration) -> None:
        """What follows an end: the fact, then the engine that is not the owner forgets."""
        ended = self._book.get(migration.migration_id)
        if not ended.ended or ended.announced:
            return
        await self._stored(lambda: self._announce(ended))
        endpoint = ended.move.source if ended.state is State.DONE else ended.move.target
        # After a lost compare-and-swap the trajectory may be anywhere, at the target too.
        if ended.started_at_s is not None and ended.failure_reason != "REVISION_MISMATCH":
            try:
                await self._peers.release(ended, endpoint, timeout_s=RELEASE_TIMEOUT_S)
            except grpc.aio.AioRpcError as error:
                log.warning(
                    "prefix not released",
                    migration_id=ended.migration_id,
                    engine_id=endpoint.engine_id,
                    code=error.code().name,
                )
        await self._stored(lambda: self._book.mark_announced(migration.migration_id))

    async def _make_ready(self, migration: Migration) -> bool:
        """True where the switch may be sent now; False where somebody cancelled. Raises MoveFailedError."""
        migration_id = migration.migration_id
        if await self._book.change(migration_id, State.PREPARING, out_of={State.PENDING}) is None:
            return False
        prefix = await self._prepare(migration)
        following = await self._book.change(migration_id, State.SWITCHING, out_of={State.PREPARING}, prefix=prefix)
        return following is not None

    async def _prepare(self, migration: Migration) -> Prefix:
        """Storage first, prefill where that is allowed, then the comparison with what the source holds."""
        try:
            prefix = await self._prefetch(migration, storage_only=True)
        except MoveFailedError as failure:
            if failure.reason != "PREFIX_NOT_STORED" or not migration.move.allow_prefill:
                raise
            prefix = await self._prefetch(migration, storage_only=False)
        try:
            exported = await self._peers.exported(migration, timeout_s=_left_s(migration))
        except grpc.aio.AioRpcError as error:
            raise MoveFailedError(_reason_of(error_from(error), "SOURCE")) from error
        if exported.cache_salt != migration.move.cache_salt:
            raise MoveFailedError("WEIGHT_VERSION_MISMATCH")
        if prefix.tokens != exported.tokens or prefix.tokens == 0:
            raise MoveFailedError("PREFIX_MISMATCH")
        return prefix

    async def _prefetch(self, migration: Migration, *, storage_only: bool) -> Prefix:
        try:
            return await self._peers.prefetch(migration, storage_only=storage_only, timeout_s=_left_s(migration))
        except grpc.aio.AioRpcError as error:
            raise MoveFailedError(_reason_of(error_from(error), "TARGET")) from error

    async def _switch(self, migration: Migration) -> None:
        """Sends the compare-and-swap until it is answered.

        What cannot be heard in time, the scheduler is asked for afterwards.
        """
        while (left_s := _left_s(migration)) > 0:
            try:
                await self._peers.switch(migration, timeout_s=left_s)
            except grpc.aio.AioRpcError as error:
                if error.code() in REFUSALS:
                    await self._end(migration, State.FAILED, _reason_of(error_from(error), "SCHEDULER"))
                    return
                log.warning("switch not answered", migration_id=migration.migration_id, code=error.code().name)
                await asyncio.sleep(min(RETRY_S, max(0.0, _left_s(migration))))
            else:
                await self._end(migration, State.DONE, "")
                return
        await self.settle(migration, GAVE_UP)

    async def _end(self, migration: Migration, state: State, reason: str) -> None:
        await self._stored(
            lambda: self._book.change(migration.migration_id, state, out_of=NOT_SWITCHED, failure_reason=reason)
        )

    async def _stored(self, write: Callable[[], Awaitable[Any]]) -> None:
        """An end must be stored, however long NATS is away."""
        while True:
            try:
                await write()
            except nats.errors.Error as error:
                log.warning("state not stored, trying again", error=repr(error))
                await asyncio.sleep(RETRY_S)
            else:
                return


def _left_s(migration: Migration) -> float:
    return migration.give_up_at_s - time.time()


def _reason_of(error: TreadleError, peer: str) -> str:
    """The peer's own reason where it gave one; a deadline that passes is ours: the move gave up."""
    if error.code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return GAVE_UP
    if error.code is grpc.StatusCode.UNAVAILABLE:
        return f"{peer}_UNAVAILABLE"
    return error.reason or f"{peer}_{error.code.name}"
