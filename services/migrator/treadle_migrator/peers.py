"""The calls that a move makes: to the two sidecars and to the scheduler.

Request ids are derived from the migration, so that a call repeated after a lost answer, or by the process that comes
after this one, is answered from the peer's record. Every method raises grpc.aio.AioRpcError.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import grpc.aio
from treadle.engine.v1 import engine_pb2, engine_pb2_grpc
from treadle.scheduler.v1 import scheduler_pb2, scheduler_pb2_grpc

from treadle_migrator.migration import Endpoint, Migration, Path, Prefix

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
