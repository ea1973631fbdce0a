"""A mesh of fakes behind real grpc.aio servers on free ports: what the client's tests run against.

The fakes obey the contract and keep their state over a restart of their server, as the real services do (JetStream).
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

import grpc.aio
import treadle
from support.fake_engine import FakeEngine
from support.fake_rollout import FakeRollout, FakeTools
from support.fake_scheduler import FakeScheduler
from treadle.engine.v1 import engine_pb2_grpc
from treadle.rollout.v1 import rollout_pb2_grpc
from treadle.scheduler.v1 import scheduler_pb2_grpc
from treadle.tools.v1 import tools_pb2_grpc
from treadle_cli.mesh.services import free_port

WAIT_S = 20.0  # for what a busy machine may be slow to do
_SERVER_OPTIONS = (("grpc.http2.min_recv_ping_interval_without_data_ms", 5_000),)  # as Treadle's servers: clients ping
QUICK = treadle.RetryPolicy(first_delay_s=0.01, max_delay_s=0.2)


class Port:
    """One server that may go away and come back at the same address."""

    def __init__(self, add: Callable[[grpc.aio.Server], None]) -> None:
        self._add = add
        self._server: grpc.aio.Server | None = None
        self.address = f"127.0.0.1:{free_port()}"

    async def start(self) -> None:
        """Listens; the port stays the same from then on."""
        self._server = grpc.aio.server(options=_SERVER_OPTIONS)
        self._add(self._server)
        assert self._server.add_insecure_port(self.address)
        await self._server.start()

    async def stop(self) -> None:
        """Goes away at once, as a killed process does."""
        server, self._server = self._server, None
        if server is not None:
            await server.stop(0)


class FakeMesh:
    """One scheduler, tools, rollout, and some engines; `async with treadle.Client(mesh.address)`."""

    def __init__(self, engine_ids: Sequence[str]) -> None:
        # RPCs that the client never calls are not there: they answer UNIMPLEMENTED.
        self.scheduler, self.tools, self.rollout = FakeScheduler(), FakeTools(), FakeRollout()  # type: ignore[abstract]
        self.engines = {
            engine_id: FakeEngine(engine_id, self.scheduler.finished)  # type: ignore[abstract]
            for engine_id in engine_ids
        }
        self.scheduler_port = Port(
            lambda s: scheduler_pb2_grpc.add_SchedulerServiceServicer_to_server(self.scheduler, s)
        )
        self._tools_port = Port(lambda s: tools_pb2_grpc.add_ToolsServiceServicer_to_server(self.tools, s))
        self._rollout_port = Port(lambda s: rollout_pb2_grpc.add_RolloutServiceServicer_to_server(self.rollout, s))
        self.engine_ports = {engine.engine_id: engine_port(engine) for engine in self.engines.values()}
        self._dying: list[asyncio.Task[None]] = []

    @property
    def address(self) -> str:
        """Of the scheduler."""
        return self.scheduler_port.address

    def client(self, **options: object) -> treadle.Client:
        """A client of this mesh that does not wait long between attempts."""
        return treadle.Client(self.address, **{"retry": QUICK, "seed": 0, **options})  # type: ignore[arg-type]

    async def lose(self, engine_id: str) -> None:
        """The engine's process dies and its lease is over."""
        self.scheduler.engines.pop(engine_id, None)
        await self.engine_ports[engine_id].stop()

    async def start(self) -> None:
        """All servers listen."""
        for port in self._ports():
            await port.start()
        self.scheduler.directory.tools_address = self._tools_port.address
        self.scheduler.directory.rollout_address = self._rollout_port.address
        for engine_id, port in self.engine_ports.items():
            self.scheduler.engines[engine_id] = port.address
            self.engines[engine_id].die = self._killer(engine_id)

    async def stop(self) -> None:
        """Nothing listens any more."""
        await asyncio.gather(*self._dying)
        for port in self._ports():
            await port.stop()

    def _killer(self, engine_id: str) -> Callable[[], None]:
        def die() -> None:
            self._dying.append(asyncio.get_running_loop().create_task(self.lose(engine_id)))

        return die

    def _ports(self) -> list[Port]:
        return [self.scheduler_port, self._tools_port, self._rollout_port, *self.engine_ports.values()]


def engine_port(engine: FakeEngine) -> Port:
    """A server for one fake engine, not yet started."""
    return Port(lambda s: engine_pb2_grpc.add_EngineServiceServicer_to_server(engine, s))


@asynccontextmanager
async def fake_mesh(*engine_ids: str) -> AsyncIterator[FakeMesh]:
    """A running mesh; without names, engines e0 and e1."""
    mesh = FakeMesh(engine_ids or ("e0", "e1"))
    try:
        await mesh.start()
        yield mesh
    finally:
        await mesh.stop()
