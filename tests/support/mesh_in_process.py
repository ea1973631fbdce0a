"""A mesh of fakes behind real grpc.aio servers on free ports: what the client's tests run against.

The fakes obey the contract and keep their state over a restart of their server, as the real
services do (JetStream).
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import treadle
from support.fake_engine import FakeEngine, engine_port
from support.fake_rollout import FakeRollout, FakeTools
from support.fake_scheduler import FakeScheduler
from support.fake_servicer import Port
from treadle.rollout.v1.rollout_pb2_grpc import add_RolloutServiceServicer_to_server
from treadle.scheduler.v1.scheduler_pb2_grpc import add_SchedulerServiceServicer_to_server
from treadle.tools.v1.tools_pb2_grpc import add_ToolsServiceServicer_to_server

WAIT_S = 60.0  # for what a busy machine may be slow to do
QUICK = treadle.RetryPolicy(first_delay_s=0.01, max_delay_s=0.2)


class FakeMesh:
    """One scheduler, tools, rollout, and some engines; `async with
    treadle.Client(mesh.address)`."""

    def __init__(self, engine_ids: Sequence[str]) -> None:
        # RPCs that the client never calls are not there: they answer UNIMPLEMENTED.
        self.scheduler, self.tools, self.rollout = FakeScheduler(), FakeTools(), FakeRollout()  # type: ignore[abstract]
        self.engines = {name: FakeEngine(name, self.scheduler.finished) for name in engine_ids}  # type: ignore[abstract]
        self.scheduler_port = Port(add_SchedulerServiceServicer_to_server, self.scheduler)
        self._tools_port = Port(add_ToolsServiceServicer_to_server, self.tools)
        self._rollout_port = Port(add_RolloutServiceServicer_to_server, self.rollout)
        self.engine_ports = {name: engine_port(engine) for name, engine in self.engines.items()}
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

    async def lose_tools(self) -> None:
        """The process of the tools service dies."""
        await self._tools_port.stop()

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
        return [
            self.scheduler_port,
            self._tools_port,
            self._rollout_port,
            *self.engine_ports.values(),
        ]


@asynccontextmanager
async def fake_mesh(*engine_ids: str) -> AsyncIterator[FakeMesh]:
    """A running mesh; without names, engines e0 and e1."""
    mesh = FakeMesh(engine_ids or ("e0", "e1"))
    try:
        await mesh.start()
        yield mesh
    finally:
        await mesh.stop()


@asynccontextmanager
async def one_trajectory(
    *engine_ids: str, prompt: Sequence[int], max_total_tokens: int = 0, **options: object
) -> AsyncIterator[tuple[FakeMesh, treadle.Trajectory]]:
    """A running mesh and an open trajectory of a client with these options."""
    async with fake_mesh(*engine_ids) as mesh, mesh.client(**options) as client:
        yield (
            mesh,
            await client.open(
                prompt_id="p0", sample=0, prompt=prompt, max_total_tokens=max_total_tokens
            ),
        )


async def generate(t: treadle.Trajectory, count: int, **sampling: Any) -> list[int]:
    """The tokens of the next turn."""
    stream = t.generate(treadle.Sampling(max_new_tokens=count, **sampling))
    return [token async for chunk in stream for token in chunk.token_ids]
