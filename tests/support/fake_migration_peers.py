"""A migrator in this process, and the fake sidecars and scheduler around it."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc.aio
from support.fake_engine import FakeEngine, engine_port
from support.fake_scheduler import FakeScheduler
from support.fake_servicer import Port
from treadle.migrator.v1 import migrator_pb2 as pb
from treadle.migrator.v1 import migrator_pb2_grpc
from treadle.scheduler.v1 import scheduler_pb2_grpc
from treadle_migrator.config import MigratorSettings
from treadle_migrator.wire import wire
from treadle_runtime.server import serving

SALT = "w7"
CALL_S = 30.0  # deadline of a call in a test; long enough for a busy machine


@dataclass
class Mesh:
    """Sidecars by engine id, and a scheduler. Trajectories begin on an engine at revision 1."""

    sidecars: dict[str, FakeEngine] = field(default_factory=dict)
    scheduler: FakeScheduler = field(default_factory=FakeScheduler)

    def place(self, trajectory_id: str, engine_id: str, tokens: int = 100) -> None:
        """Put a trajectory on an engine."""
        self.sidecars[engine_id].prefixes[trajectory_id] = tokens
        self.scheduler.owners[trajectory_id] = (engine_id, 1)

    def request(
        self, trajectory_id: str, source: str, target: str, /, **fields: Any
    ) -> pb.StartMigrationRequest:
        """A move of a trajectory that is at revision 1."""
        values: dict[str, Any] = {
            "request_id": f"start-{trajectory_id}",
            "trajectory_id": trajectory_id,
            "source": pb.Endpoint(engine_id=source, address=self.sidecars[source].address),
            "target": pb.Endpoint(engine_id=target, address=self.sidecars[target].address),
            "expected_revision": 1,
            "remaining_tokens": 500.0,
            "cache_salt": SALT,
            "allow_prefill": True,
        }
        return pb.StartMigrationRequest(**{**values, **fields})


@asynccontextmanager
async def fake_mesh(engines: int = 2) -> AsyncIterator[Mesh]:
    """Engines e0, e1, … and a scheduler, each on a server of its own at a free port."""
    mesh = Mesh({f"e{index}": FakeEngine(f"e{index}") for index in range(engines)})  # type: ignore[abstract]
    async with AsyncExitStack() as stack:
        for engine in mesh.sidecars.values():
            engine.stored, engine.cache_salt = True, SALT
            await stack.enter_async_context(engine_port(engine))
        port = Port(scheduler_pb2_grpc.add_SchedulerServiceServicer_to_server, mesh.scheduler)
        mesh.scheduler.address = await stack.enter_async_context(port)
        yield mesh


class MigratorCalls:
    """The migrator as the scheduler and an operator see it."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.stub = migrator_pb2_grpc.MigratorServiceStub(channel)

    async def start(self, request: pb.StartMigrationRequest) -> pb.Migration:
        """Accepted."""
        return (await self.stub.StartMigration(request, timeout=CALL_S)).migration

    async def get(self, migration_id: str) -> pb.Migration:
        """As it stands."""
        return (
            await self.stub.GetMigration(
                pb.GetMigrationRequest(migration_id=migration_id), timeout=CALL_S
            )
        ).migration

    async def cancel(self, migration_id: str, request_id: str = "cancel") -> pb.Migration:
        """Cancelled, or how it ended."""
        request = pb.CancelMigrationRequest(request_id=request_id, migration_id=migration_id)
        return (await self.stub.CancelMigration(request, timeout=CALL_S)).migration

    async def states(self, migration_id: str) -> list[pb.Migration]:
        """All states from now to the end."""
        watch = self.stub.WatchMigration(
            pb.WatchMigrationRequest(migration_id=migration_id), timeout=CALL_S
        )
        return [message.migration async for message in watch]

    async def ended(self, migration_id: str) -> pb.Migration:
        """The last state."""
        return (await self.states(migration_id))[-1]

    async def moved(self, request: pb.StartMigrationRequest) -> pb.Migration:
        """Started and ended."""
        return await self.ended((await self.start(request)).migration_id)


@asynccontextmanager
async def migrator(nats_url: str, mesh: Mesh) -> AsyncIterator[MigratorCalls]:
    """The service in this process."""
    config = MigratorSettings(
        listen="127.0.0.1:0", nats_url=nats_url, drain_grace_s=1.0, scheduler=mesh.scheduler.address
    )
    async with (
        serving(config, wire) as served,
        grpc.aio.insecure_channel(served.address) as channel,
    ):
        yield MigratorCalls(channel)
