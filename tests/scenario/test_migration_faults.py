"""Whatever dies in whichever state of a move: one engine owns the trajectory, and its next step is served.

The scheduler, the migrator, NATS and the client are real; the engines are fake, so that a test can hold a move in a
state. Where no state is stuck for ever, a test waits for what must come, never for a time.
"""

from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import grpc.aio
import pytest
import treadle
from google.protobuf.duration_pb2 import Duration
from support.conditions import until
from support.fake_engine import WEIGHT_VERSION, FakeEngine, leased_engines, token_at
from support.fake_migration_peers import CALL_S, MigratorCalls
from support.fake_servicer import Gate, Port
from support.mesh_in_process import QUICK, generate
from support.nats_server import NatsServer
from support.processes import StartService
from support.scheduler import SchedulerClient, scheduler
from treadle.migrator.v1 import migrator_pb2 as pb
from treadle.scheduler.v1 import scheduler_pb2_grpc
from treadle_migrator.config import MigratorSettings
from treadle_migrator.wire import wire
from treadle_runtime.bus import open_bus
from treadle_runtime.server import serving

PROMPT = list(range(20))
NEW_TOKENS = 4


class SwitchGate(scheduler_pb2_grpc.SchedulerServiceServicer):
    """Stands before the real scheduler and holds the migrator's switches."""

    def __init__(self, scheduler: Any) -> None:
        self.gate = Gate()
        self._scheduler = scheduler

    async def SwitchEngine(self, request: Any, context: Any) -> Any:
        await self.gate.pass_through()
        return await self._forward(self._scheduler.SwitchEngine, request, context)

    async def GetTrajectory(self, request: Any, context: Any) -> Any:
        return await self._forward(self._scheduler.GetTrajectory, request, context)

    async def _forward(self, rpc: Any, request: Any, context: Any) -> Any:
        try:
            return await rpc(request, timeout=CALL_S)
        except grpc.aio.AioRpcError as error:
            await context.abort(error.code(), error.details(), tuple(error.trailing_metadata()))


@dataclass
class Moving:
    """A trajectory that has taken one step on `source`, and the parts of its mesh."""

    trajectory: treadle.Trajectory
    source: FakeEngine
    target: FakeEngine
    scheduler: SchedulerClient
    switches: SwitchGate
    proxy: str
    nats: NatsServer

    async def step(self) -> str:
        """The next step, whole; the engine that it ended on."""
        self.trajectory.observe([7])
        context = list(self.trajectory.tokens)
        tokens = await generate(self.trajectory, NEW_TOKENS)
        assert tokens == [token_at(context, index) for index in range(NEW_TOKENS)]
        return str(self.trajectory.steps[-1].engine_ids[-1])

    def request(self) -> pb.StartMigrationRequest:
        """The move from source to target."""
        return pb.StartMigrationRequest(
            request_id="move",
            trajectory_id=self.trajectory.trajectory_id,
            source=pb.Endpoint(engine_id=self.source.engine_id, address=self.source.address),
            target=pb.Endpoint(engine_id=self.target.engine_id, address=self.target.address),
            expected_revision=1,
            cache_salt=WEIGHT_VERSION,
            allow_prefill=True,
            give_up_after=Duration(seconds=60),
        )

    async def require_agreement(self, ended: pb.Migration) -> None:
        """The migrator's end is what the scheduler has done, and the trajectory goes on."""
        moved = ended.state == pb.MIGRATION_STATE_DONE
        assert moved or ended.state == pb.MIGRATION_STATE_FAILED
        assert (await self.scheduler.trajectory(self.trajectory.trajectory_id)).migrations == moved
        await self.step()


@asynccontextmanager
async def one_step_taken(nats_server: NatsServer) -> AsyncIterator[Moving]:
    async with AsyncExitStack() as stack:
        bus = await stack.enter_async_context(open_bus(nats_server.url, "test"))
        control = await stack.enter_async_context(scheduler(nats_server.url))
        switches = SwitchGate(control.stub)  # type: ignore[abstract]
        proxy = Port(scheduler_pb2_grpc.add_SchedulerServiceServicer_to_server, switches)
        await stack.enter_async_context(proxy)
        engines = await stack.enter_async_context(leased_engines(bus, control.address, ["e0", "e1"]))
        for engine in engines:
            engine.stored = True
        await control.until_registered(len(engines))
        client = await stack.enter_async_context(treadle.Client(control.address, retry=QUICK, seed=0))
        trajectory = await client.open(prompt_id="p", sample=0, prompt=PROMPT)
        await generate(trajectory, NEW_TOKENS)
        source, target = sorted(engines, key=lambda engine: engine.engine_id != trajectory.steps[0].engine_ids[-1])
        yield Moving(trajectory, source, target, control, switches, proxy.address, nats_server)


@asynccontextmanager
async def migrator(moving: Moving) -> AsyncIterator[MigratorCalls]:
    settings = MigratorSettings(
        listen="127.0.0.1:0", nats_url=moving.nats.url, drain_grace_s=1.0, scheduler=moving.proxy
    )
    async with serving(settings, wire) as served, grpc.aio.insecure_channel(served.address) as channel:
        yield MigratorCalls(channel)


async def hold(moving: Moving, calls: MigratorCalls, state: str) -> tuple[Gate, str]:
    """Start the move and hold it in a state."""
    gate = STATES[state](moving)
    gate.close()
    started = await calls.start(moving.request())
    await until(lambda: gate.waiting)
    return gate, started.migration_id


async def kill(engine: FakeEngine) -> None:
    engine.silent = True
    assert engine.port is not None
    await engine.port.stop()


# Where a move is held: the source before it exports the context, the target before it reads the pages, the source
# before it confirms, the scheduler before it swaps the owner, the source before it forgets.
STATES: dict[str, Callable[[Moving], Gate]] = {
    "prepare": lambda moving: moving.source.export_gate,
    "transfer": lambda moving: moving.target.gate,
    "verify": lambda moving: moving.source.confirm_gate,
    "switch": lambda moving: moving.switches.gate,
    "release": lambda moving: moving.source.release_gate,
}
in_each_state = pytest.mark.parametrize("state", STATES)


@in_each_state
async def test_a_source_that_dies_has_its_trajectory_served_by_the_other_engine(
    nats_server: NatsServer, state: str
) -> None:
    """The step does not wait for the end of the move, which is still held."""
    async with one_step_taken(nats_server) as moving, migrator(moving) as calls:
        gate, migration_id = await hold(moving, calls, state)
        await kill(moving.source)
        assert await moving.step() == moving.target.engine_id
        gate.open()
        ended = await calls.ended(migration_id)
        reason = {"switch": "REVISION_MISMATCH", "release": ""}.get(state, "SOURCE_UNAVAILABLE")
        assert ended.failure_reason == reason
        await moving.require_agreement(ended)


@in_each_state
async def test_a_target_that_dies_leaves_the_source_the_owner(nats_server: NatsServer, state: str) -> None:
    """After the switch the target was the owner: then the source takes the trajectory back. The step never waits."""
    async with one_step_taken(nats_server) as moving, migrator(moving) as calls:
        gate, migration_id = await hold(moving, calls, state)
        await kill(moving.target)
        assert await moving.step() == moving.source.engine_id
        gate.open()
        ended = await calls.ended(migration_id)
        if state in ("prepare", "transfer", "verify"):
            assert ended.state == pb.MIGRATION_STATE_FAILED
        await moving.require_agreement(ended)


@in_each_state
async def test_a_migrator_that_dies_leaves_the_owner_as_it_was(
    nats_server: NatsServer, start_service: StartService, state: str
) -> None:
    """SIGKILL, a step, and a new migrator. Before the switch the source owns the trajectory, afterwards the target."""
    async with one_step_taken(nats_server) as moving:
        environment = {"TREADLE_MIGRATOR_SCHEDULER": moving.proxy}
        service = await start_service("treadle_migrator", environment)
        async with grpc.aio.insecure_channel(service.address) as channel:
            gate, migration_id = await hold(moving, MigratorCalls(channel), state)
        service.kill()
        await until(lambda: not gate.waiting)
        owner = moving.target if state == "release" else moving.source
        assert await moving.step() == owner.engine_id
        gate.open()
        service = await start_service("treadle_migrator", environment)
        async with grpc.aio.insecure_channel(service.address) as channel:
            ended = await MigratorCalls(channel).ended(migration_id)
            assert ended.failure_reason == ("" if state == "release" else "INTERRUPTED")
            await moving.require_agreement(ended)


@in_each_state
@pytest.mark.usefixtures("impatient")
async def test_a_nats_that_dies_delays_the_end_of_a_move_and_changes_nothing_else(
    nats_server: NatsServer, state: str
) -> None:
    """The move goes on while nothing can be stored, and so does the step; both end once NATS is back."""
    async with one_step_taken(nats_server) as moving, migrator(moving) as calls:
        gate, migration_id = await hold(moving, calls, state)
        nats_server.kill()
        gate.open()
        nats_server.start()
        await moving.step()
        await moving.require_agreement(await calls.ended(migration_id))


@in_each_state
async def test_a_storage_that_is_lost_is_replaced_by_a_prefill_until_the_pages_are_read(
    nats_server: NatsServer, state: str
) -> None:
    async with one_step_taken(nats_server) as moving, migrator(moving) as calls:
        gate, migration_id = await hold(moving, calls, state)
        moving.target.stored = False
        gate.open()
        ended = await calls.ended(migration_id)
        assert ended.state == pb.MIGRATION_STATE_DONE
        path = pb.MIGRATION_PATH_PREFILL if state in ("prepare", "transfer") else pb.MIGRATION_PATH_STORAGE
        assert ended.path == path
        assert await moving.step() == moving.target.engine_id
        await moving.require_agreement(ended)
