"""A trajectory on one of two engines, and a move of it that a test holds in a state.

Gates stand before the source's sidecar and before the scheduler, and the migrator calls both
through them. The engines behind them may be fake or real.
"""

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import grpc.aio
import treadle
from google.protobuf.duration_pb2 import Duration
from support.conditions import until, until_said
from support.fake_migration_peers import CALL_S, MigratorCalls
from support.fake_servicer import Gate, Port
from support.mesh_in_process import QUICK, generate
from support.scheduler import SchedulerClient
from treadle.engine.v1 import engine_pb2, engine_pb2_grpc
from treadle.migrator.v1 import migrator_pb2 as pb
from treadle.scheduler.v1 import scheduler_pb2_grpc
from treadle.scheduler.v1.scheduler_pb2 import TRAJECTORY_STATE_IDLE
from treadle_migrator.config import MigratorSettings
from treadle_migrator.wire import wire
from treadle_runtime.calls import Channels
from treadle_runtime.server import serving

NEW_TOKENS = 6  # a step
GIVE_UP_S = 600  # longer than a test holds a move
MAX_BYTES = 2**20
# Before the source exports the context, before the target reads the pages, before the source
# confirms what it holds, before the scheduler changes the owner, before the source forgets.
STATES = ("prepare", "transfer", "verify", "switch", "release")
Gates = dict[str, Gate]  # by state


class SourceGates(engine_pb2_grpc.EngineServiceServicer):
    """Stands before the source's sidecar."""

    def __init__(self, sidecar: Any, gates: Gates) -> None:
        self._sidecar, self._gates = sidecar, gates

    async def ExportPrefix(self, request: engine_pb2.ExportPrefixRequest, context: Any) -> Any:
        await self._gates["verify" if request.counts_only else "prepare"].pass_through()
        answer = await _forward(self._sidecar.ExportPrefix, request, context)
        if not request.counts_only:
            await self._gates["transfer"].pass_through()
        return answer

    async def ReleasePrefix(self, request: Any, context: Any) -> Any:
        await self._gates["release"].pass_through()
        return await _forward(self._sidecar.ReleasePrefix, request, context)


class SwitchGate(scheduler_pb2_grpc.SchedulerServiceServicer):
    """Stands before the scheduler."""

    def __init__(self, scheduler: Any, gates: Gates) -> None:
        self._scheduler, self._gates = scheduler, gates

    async def SwitchEngine(self, request: Any, context: Any) -> Any:
        await self._gates["switch"].pass_through()
        return await _forward(self._scheduler.SwitchEngine, request, context)

    async def GetTrajectory(self, request: Any, context: Any) -> Any:
        return await _forward(self._scheduler.GetTrajectory, request, context)


async def _forward(rpc: Any, request: Any, context: Any) -> Any:
    try:
        return await rpc(request, timeout=CALL_S)
    except grpc.aio.AioRpcError as error:
        await context.abort(error.code(), error.details(), tuple(error.trailing_metadata()))


class Engine(Protocol):
    """address: of its sidecar."""

    @property
    def engine_id(self) -> str: ...

    @property
    def address(self) -> str: ...


E = TypeVar("E", bound=Engine)


@dataclass
class Moving(Generic[E]):
    """A trajectory that has taken one step, on `source`. undisturbed: the tokens that follow a
    context where nothing dies."""

    trajectory: treadle.Trajectory
    source: E
    target: E
    scheduler: SchedulerClient
    undisturbed: Callable[[Sequence[int]], Awaitable[list[int]]]
    gates: Gates
    to_source: str  # addresses before which the gates stand
    to_scheduler: str
    calls: MigratorCalls | None = None  # of the migrator that was asked last
    migration_id: str = ""

    async def step(self) -> str:
        """Take the next step, whole and with the tokens of an undisturbed run; the engine that it
        ended on."""
        self.trajectory.observe([7])
        context = list(self.trajectory.tokens)
        tokens = await generate(self.trajectory, NEW_TOKENS, temperature=0.0, ignore_eos=True)
        assert tokens == await self.undisturbed(context)
        return str(self.trajectory.steps[-1].engine_ids[-1])

    async def hold(self, calls: MigratorCalls, state: str) -> Gate:
        """Start the move and hold it in a state; the gate that does."""
        gate = self.gates[state]
        gate.close()
        info = (await self.scheduler.engines())[0]
        idle = await until_said(  # the scheduler has heard that the step is over
            lambda: self.scheduler.trajectory(self.trajectory.trajectory_id),
            lambda said: said.state == TRAJECTORY_STATE_IDLE,
        )
        request = pb.StartMigrationRequest(
            request_id=f"move-{self.trajectory.trajectory_id}",
            trajectory_id=self.trajectory.trajectory_id,
            source=pb.Endpoint(engine_id=self.source.engine_id, address=self.to_source),
            target=pb.Endpoint(engine_id=self.target.engine_id, address=self.target.address),
            expected_revision=idle.revision,
            cache_salt=info.weight_version,
            allow_prefill=True,
            give_up_after=Duration(seconds=GIVE_UP_S),
        )
        self.calls, self.migration_id = calls, (await calls.start(request)).migration_id
        await until(lambda: gate.waiting)
        return gate

    async def end(self) -> pb.Migration:
        """Let the move go on. At its end the scheduler has done what the migrator says, and one
        engine owns the trajectory and serves its next step."""
        for gate in self.gates.values():
            gate.open()
        assert self.calls is not None
        ended = await self.calls.ended(self.migration_id)
        moved = ended.state == pb.MIGRATION_STATE_DONE
        assert moved or ended.state == pb.MIGRATION_STATE_FAILED
        assert (await self.scheduler.trajectory(self.trajectory.trajectory_id)).migrations == moved
        engine_id = await self.step()
        assert (
            await self.scheduler.trajectory(self.trajectory.trajectory_id)
        ).engine_id == engine_id
        return ended


@asynccontextmanager
async def one_step_taken(
    scheduler: SchedulerClient,
    engines: Sequence[E],
    prompt: Sequence[int],
    undisturbed: Callable[[Sequence[int]], Awaitable[list[int]]],
) -> AsyncIterator[Moving[E]]:
    """A trajectory of a client, between two registered engines."""
    async with AsyncExitStack() as stack:
        await scheduler.until_registered(len(engines))
        client = await stack.enter_async_context(
            treadle.Client(scheduler.address, retry=QUICK, seed=0)
        )
        trajectory = await client.open(prompt_id="p", sample=0, prompt=prompt)
        await generate(trajectory, NEW_TOKENS, temperature=0.0, ignore_eos=True)
        owner = trajectory.steps[0].engine_ids[-1]
        source, target = sorted(engines, key=lambda engine: engine.engine_id != owner)
        # which notice a process that is stopped, as those of a sidecar do
        channels = Channels(MAX_BYTES)
        stack.push_async_callback(channels.close)
        gates = {state: Gate() for state in STATES}
        at_source = SourceGates(
            engine_pb2_grpc.EngineServiceStub(channels.get(source.address, "sidecar")), gates
        )  # type: ignore[abstract]
        at_scheduler = SwitchGate(scheduler.stub, gates)  # type: ignore[abstract]
        to_source = Port(engine_pb2_grpc.add_EngineServiceServicer_to_server, at_source)
        to_scheduler = Port(scheduler_pb2_grpc.add_SchedulerServiceServicer_to_server, at_scheduler)
        yield Moving(
            trajectory,
            source,
            target,
            scheduler,
            undisturbed,
            gates,
            await stack.enter_async_context(to_source),
            await stack.enter_async_context(to_scheduler),
        )


@asynccontextmanager
async def held(moving: Moving[E], nats_url: str, state: str) -> AsyncIterator[Moving[E]]:
    """The same, with a migrator in this process that has begun to move the trajectory and is held
    in a state."""
    settings = MigratorSettings(
        listen="127.0.0.1:0", nats_url=nats_url, drain_grace_s=1.0, scheduler=moving.to_scheduler
    )
    async with (
        serving(settings, wire) as served,
        grpc.aio.insecure_channel(served.address) as channel,
    ):
        await moving.hold(MigratorCalls(channel), state)
        yield moving
