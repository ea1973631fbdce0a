"""Whatever dies in whichever state of a move: one engine owns the trajectory, and its next step is
served.

The scheduler, the migrator, NATS and the client are real; the engines are fake
(tests/engine/test_migration_faults.py has real ones), and so are their sidecars where none hangs.
Where no state is stuck for ever, a test waits for what must come, never for a time.
"""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

import grpc.aio
import pytest
from support.conditions import until
from support.fake_engine import FakeEngine, leased_engines, token_at
from support.fake_migration_peers import MigratorCalls
from support.fake_sglang import FakeSglang, expected
from support.held_moves import NEW_TOKENS, STATES, Moving, held, one_step_taken
from support.mesh_of_processes import fleet
from support.nats_server import NatsServer
from support.processes import ServiceProcess, StartService
from support.scheduler import scheduler
from treadle.migrator.v1 import migrator_pb2 as pb
from treadle_runtime.bus import open_bus

PROMPT = list(range(20))
in_each_state = pytest.mark.parametrize("state", STATES)


async def undisturbed(context: Sequence[int]) -> list[int]:
    """The tokens that follow a context on any fake engine."""
    return [token_at(context, index) for index in range(NEW_TOKENS)]


@asynccontextmanager
async def ready_to_move(nats_url: str) -> AsyncIterator[Moving[FakeEngine]]:
    """One step taken between two fake engines that share storage."""
    async with (
        open_bus(nats_url, "test") as bus,
        scheduler(nats_url) as control,
        leased_engines(bus, control.address, ["e0", "e1"]) as engines,
    ):
        for engine in engines:
            engine.stored = True
        async with one_step_taken(control, engines, PROMPT, undisturbed) as moving:
            yield moving


@asynccontextmanager
async def held_move(nats_url: str, state: str) -> AsyncIterator[Moving[FakeEngine]]:
    async with ready_to_move(nats_url) as moving, held(moving, nats_url, state):
        yield moving


async def kill(engine: FakeEngine) -> None:
    engine.silent = True
    assert engine.port is not None
    await engine.port.stop()


@in_each_state
async def test_a_source_that_dies_has_its_trajectory_served_by_the_other_engine(
    nats_url: str, state: str
) -> None:
    """The step does not wait for the end of the move, which is still held."""
    async with held_move(nats_url, state) as moving:
        await kill(moving.source)
        assert await moving.step() == moving.target.engine_id
        reason = {"switch": "REVISION_MISMATCH", "release": ""}.get(state, "SOURCE_UNAVAILABLE")
        assert (await moving.end()).failure_reason == reason


@in_each_state
async def test_a_target_that_dies_leaves_the_source_the_owner(nats_url: str, state: str) -> None:
    """After the switch the target was the owner: then the source takes the trajectory back. The
    step never waits."""
    async with held_move(nats_url, state) as moving:
        await kill(moving.target)
        assert await moving.step() == moving.source.engine_id
        ended = await moving.end()
        if state in ("prepare", "transfer", "verify"):
            assert ended.state == pb.MIGRATION_STATE_FAILED


@dataclass(frozen=True)
class SidecarOf:
    """engine: of a fake SGLang. process: of its sidecar."""

    engine_id: str
    engine: FakeSglang
    process: ServiceProcess

    @property
    def address(self) -> str:
        return self.process.address


async def undisturbed_by_sglang(context: Sequence[int]) -> list[int]:
    return expected(context, NEW_TOKENS)


@pytest.mark.parametrize("what", ["engine", "sidecar"])
@pytest.mark.parametrize("victim", ["source", "target"])
async def test_an_engine_that_hangs_in_a_move_leaves_its_trajectory_to_the_other(
    nats_url: str, start_service: StartService, victim: str, what: str
) -> None:
    """The engine makes no progress, or its sidecar is stopped, before the target reads the pages.
    The move fails."""
    async with fleet(start_service, ENGINE_STALL_S="2") as f:
        sidecars = [
            SidecarOf(f"e{number}", f.engines[number], f.sidecars[number]) for number in range(2)
        ]
        async with (
            one_step_taken(f.control, sidecars, PROMPT, undisturbed_by_sglang) as moving,
            held(moving, nats_url, "transfer"),
        ):
            hung, other = moving.source, moving.target
            if victim == "target":
                hung, other = other, hung
            (hung.engine if what == "engine" else hung.process).hang()
            assert await moving.step() == other.engine_id
            assert (await moving.end()).state == pb.MIGRATION_STATE_FAILED


@in_each_state
async def test_a_migrator_that_dies_leaves_the_owner_as_it_was(
    nats_url: str, start_service: StartService, state: str
) -> None:
    """SIGKILL, a step, and a new migrator. Before the switch the source owns the trajectory,
    afterwards the target."""
    async with ready_to_move(nats_url) as moving:
        environment = {"TREADLE_MIGRATOR_SCHEDULER": moving.to_scheduler}
        service = await start_service("treadle_migrator", environment)
        async with grpc.aio.insecure_channel(service.address) as channel:
            gate = await moving.hold(MigratorCalls(channel), state)
        service.kill()
        await until(lambda: not gate.waiting)
        owner = moving.target if state == "release" else moving.source
        assert await moving.step() == owner.engine_id
        gate.open()
        service = await start_service("treadle_migrator", environment)
        async with grpc.aio.insecure_channel(service.address) as channel:
            moving.calls = MigratorCalls(channel)
            assert (await moving.end()).failure_reason == (
                "" if state == "release" else "INTERRUPTED"
            )


@in_each_state
@pytest.mark.usefixtures("impatient")
async def test_a_nats_that_dies_delays_the_end_of_a_move_and_changes_nothing_else(
    nats_server: NatsServer, state: str
) -> None:
    """The move goes on while nothing can be stored, and so does the step; both end once NATS is
    back."""
    async with held_move(nats_server.url, state) as moving:
        nats_server.kill()
        moving.gates[state].open()
        nats_server.start()
        await moving.step()
        await moving.end()


@in_each_state
async def test_a_storage_that_is_lost_is_replaced_by_a_prefill_until_the_pages_are_read(
    nats_url: str, state: str
) -> None:
    async with held_move(nats_url, state) as moving:
        moving.target.stored = False
        ended = await moving.end()
        assert ended.state == pb.MIGRATION_STATE_DONE
        path = (
            pb.MIGRATION_PATH_PREFILL
            if state in ("prepare", "transfer")
            else pb.MIGRATION_PATH_STORAGE
        )
        assert ended.path == path
        assert await moving.step() == moving.target.engine_id
