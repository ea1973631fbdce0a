"""FakeSidecar and FakeScheduler as the migrator sees them: prefixes without an engine, owners without a controller."""

import asyncio
from array import array
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
import grpc.aio
from support.fake_servicer import FakeServicer, Refusal, refuse
from treadle.engine.v1 import engine_pb2, engine_pb2_grpc
from treadle.migrator.v1 import migrator_pb2 as pb
from treadle.migrator.v1 import migrator_pb2_grpc
from treadle.scheduler.v1 import scheduler_pb2, scheduler_pb2_grpc
from treadle_migrator.config import MigratorSettings
from treadle_migrator.wire import wire
from treadle_runtime.server import Serving, serving

SALT = "w7"
CALL_S = 30.0  # deadline of a call in a test; long enough for a busy machine
ENDED = (pb.MIGRATION_STATE_DONE, pb.MIGRATION_STATE_FAILED, pb.MIGRATION_STATE_CANCELLED)


class Gate:
    """Holds a fake's calls until it is opened, and knows how many wait."""

    def __init__(self) -> None:
        self.waiting = 0
        self._open = asyncio.Event()
        self._open.set()

    def close(self) -> None:
        """Calls from now on wait."""
        self._open.clear()

    def open(self) -> None:
        """All go on."""
        self._open.set()

    async def pass_through(self) -> None:
        """Waits while the gate is closed."""
        self.waiting += 1
        try:
            await self._open.wait()
        finally:
            self.waiting -= 1


class FakeSidecar(FakeServicer, engine_pb2_grpc.EngineServiceServicer):
    """prefixes: trajectory → tokens held here. stored: whether shared storage has what the source holds."""

    def __init__(self, prefixes: dict[str, int] | None = None) -> None:
        super().__init__()
        self.address = ""
        self.prefixes = prefixes or {}
        self.stored = True
        self.cache_salt = SALT
        self.tokens_short = 0  # by so many the prefetched prefix is shorter than the source's
        self.gate = Gate()

    async def PrefetchPrefix(self, request: engine_pb2.PrefetchPrefixRequest, context: Any) -> Any:
        self.log("PrefetchPrefix", request, context)
        await self.gate.pass_through()
        if refusal := self.next_refusal("PrefetchPrefix"):
            await refuse(context, refusal)
        if request.storage_only and not self.stored:
            await refuse(context, Refusal(grpc.StatusCode.FAILED_PRECONDITION, "PREFIX_NOT_STORED"))
        reference = getattr(request, "from")
        async with grpc.aio.insecure_channel(reference.engine_address) as channel:
            source = engine_pb2_grpc.EngineServiceStub(channel)
            export = engine_pb2.ExportPrefixRequest(trajectory_id=reference.trajectory_id)
            held = len((await source.ExportPrefix(export, timeout=CALL_S)).token_ids.int32_le) // 4
        tokens = held - self.tokens_short
        self.prefixes[request.trajectory_id] = tokens
        response = engine_pb2.PrefetchPrefixResponse(prefix_tokens=tokens)
        if self.stored:
            response.tokens_from_storage = tokens
        else:
            response.tokens_prefilled = tokens
        return response

    async def ExportPrefix(self, request: engine_pb2.ExportPrefixRequest, context: Any) -> Any:
        self.log("ExportPrefix", request, context)
        if request.trajectory_id not in self.prefixes:
            await refuse(context, Refusal(grpc.StatusCode.NOT_FOUND, "PREFIX_NOT_FOUND"))
        count = self.prefixes[request.trajectory_id]
        response = engine_pb2.ExportPrefixResponse(cache_salt=self.cache_salt, prefix_tokens=count)
        if not request.counts_only:
            response.token_ids.int32_le = array("i", range(count)).tobytes()
        return response

    async def ReleasePrefix(self, request: engine_pb2.ReleasePrefixRequest, context: Any) -> Any:
        self.log("ReleasePrefix", request, context)
        if refusal := self.next_refusal("ReleasePrefix"):
            await refuse(context, refusal)
        self.prefixes.pop(request.trajectory_id, None)
        return engine_pb2.ReleasePrefixResponse()


class FakeScheduler(FakeServicer, scheduler_pb2_grpc.SchedulerServiceServicer):
    """owners: trajectory → (engine, revision), changed by compare-and-swap alone."""

    def __init__(self) -> None:
        super().__init__()
        self.address = ""
        self.owners: dict[str, tuple[str, int]] = {}
        self.gate = Gate()
        self.gate_after = Gate()  # between the switch and its answer

    async def SwitchEngine(self, request: scheduler_pb2.SwitchEngineRequest, context: Any) -> Any:
        await self.gate.pass_through()
        answer = await self.once("SwitchEngine", request, context, self._switch)
        await self.gate_after.pass_through()
        return answer

    async def GetTrajectory(self, request: scheduler_pb2.GetTrajectoryRequest, context: Any) -> Any:
        self.log("GetTrajectory", request, context)
        if refusal := self.next_refusal("GetTrajectory"):
            await refuse(context, refusal)
        if request.trajectory_id not in self.owners:
            await refuse(context, Refusal(grpc.StatusCode.NOT_FOUND, "TRAJECTORY_NOT_FOUND"))
        engine_id, revision = self.owners[request.trajectory_id]
        trajectory = scheduler_pb2.Trajectory(
            trajectory_id=request.trajectory_id, engine_id=engine_id, revision=revision
        )
        return scheduler_pb2.GetTrajectoryResponse(trajectory=trajectory)

    def _switch(self, request: scheduler_pb2.SwitchEngineRequest) -> scheduler_pb2.SwitchEngineResponse | Refusal:
        _, revision = self.owners[request.trajectory_id]
        if revision != request.expected_revision:
            return Refusal(grpc.StatusCode.FAILED_PRECONDITION, "REVISION_MISMATCH")
        self.owners[request.trajectory_id] = (request.target_engine_id, revision + 1)
        return scheduler_pb2.SwitchEngineResponse(revision=revision + 1)


@dataclass
class Mesh:
    """Sidecars by engine id, and a scheduler. Trajectories begin on an engine at revision 1."""

    sidecars: dict[str, FakeSidecar] = field(default_factory=dict)
    scheduler: FakeScheduler = field(default_factory=FakeScheduler)

    def place(self, trajectory_id: str, engine_id: str, tokens: int = 100) -> None:
        """Put a trajectory on an engine."""
        self.sidecars[engine_id].prefixes[trajectory_id] = tokens
        self.scheduler.owners[trajectory_id] = (engine_id, 1)

    def request(self, trajectory_id: str, source: str, target: str, /, **fields: Any) -> pb.StartMigrationRequest:
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
    mesh = Mesh({f"e{index}": FakeSidecar() for index in range(engines)})  # type: ignore[abstract]
    servers: list[grpc.aio.Server] = []

    async def listening(server: grpc.aio.Server) -> str:
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        servers.append(server)
        return f"127.0.0.1:{port}"

    try:
        for sidecar in mesh.sidecars.values():
            server = grpc.aio.server()
            engine_pb2_grpc.add_EngineServiceServicer_to_server(sidecar, server)
            sidecar.address = await listening(server)
        server = grpc.aio.server()
        scheduler_pb2_grpc.add_SchedulerServiceServicer_to_server(mesh.scheduler, server)
        mesh.scheduler.address = await listening(server)
        yield mesh
    finally:
        for server in servers:
            await server.stop(None)


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
            await self.stub.GetMigration(pb.GetMigrationRequest(migration_id=migration_id), timeout=CALL_S)
        ).migration

    async def cancel(self, migration_id: str, request_id: str = "cancel") -> pb.Migration:
        """Cancelled, or how it ended."""
        request = pb.CancelMigrationRequest(request_id=request_id, migration_id=migration_id)
        return (await self.stub.CancelMigration(request, timeout=CALL_S)).migration

    async def states(self, migration_id: str) -> list[pb.Migration]:
        """All states from now to the end."""
        watch = self.stub.WatchMigration(pb.WatchMigrationRequest(migration_id=migration_id), timeout=CALL_S)
        return [message.migration async for message in watch]

    async def ended(self, migration_id: str) -> pb.Migration:
        """The last state."""
        return (await self.states(migration_id))[-1]

    async def moved(self, request: pb.StartMigrationRequest) -> pb.Migration:
        """Started and ended."""
        return await self.ended((await self.start(request)).migration_id)


@asynccontextmanager
async def migrator(nats_url: str, mesh: Mesh) -> AsyncIterator[tuple[MigratorCalls, Serving]]:
    """The service in this process."""
    config = MigratorSettings(
        listen="127.0.0.1:0", nats_url=nats_url, drain_grace_s=1.0, scheduler=mesh.scheduler.address
    )
    async with serving(config, wire) as served, grpc.aio.insecure_channel(served.address) as channel:
        yield MigratorCalls(channel), served
