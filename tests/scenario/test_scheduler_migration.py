"""Scheduler, predictor, placement and migrator together: a trajectory moves to a new engine while
its tool runs."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

from google.protobuf.duration_pb2 import Duration
from support.conditions import until, until_said
from support.facts import hear
from support.fake_engine import FakeEngine, leased_engines
from support.processes import StartService, free_port
from support.scheduler import SchedulerClient, generate, scheduler
from treadle.scheduler.v1 import scheduler_pb2 as pb
from treadle_core.tuning import Tuning
from treadle_migrator.config import MigratorSettings
from treadle_migrator.wire import wire as migrator_wire
from treadle_placement.config import PlacementSettings
from treadle_placement.wire import wire as placement_wire
from treadle_predictor.config import PredictorSettings
from treadle_predictor.wire import wire as predictor_wire
from treadle_runtime.bus import Bus
from treadle_runtime.server import serving

NAMES = [f"t{number}" for number in range(6)]
TOKENS = 4
TOOL = Duration(seconds=1)


@asynccontextmanager
async def control_plane(
    nats_url: str, migrator_listen: str, *, own_migrator: bool = False, tokens: float = 4_000
) -> AsyncIterator[SchedulerClient]:
    """All four services, each on its own port, as settings wire them together; without the migrator
    where a test has its own. tokens: predicted of a trajectory."""
    listen = f"127.0.0.1:{free_port()}"
    async with AsyncExitStack() as stack:
        common: dict[str, Any] = {"nats_url": nats_url}
        predictor = await stack.enter_async_context(
            serving(
                PredictorSettings(**common, listen="127.0.0.1:0", prior_median_tokens=tokens),
                predictor_wire,
            )
        )
        placement = await stack.enter_async_context(
            serving(PlacementSettings(**common, listen="127.0.0.1:0"), placement_wire)
        )
        client = await stack.enter_async_context(
            scheduler(
                nats_url,
                listen=listen,
                predictor=predictor.address,
                placement=placement.address,
                migrator=migrator_listen,
                plan_every_events=2,
            )
        )
        settings = MigratorSettings(**common, listen=migrator_listen, scheduler=listen)
        if not own_migrator:
            await stack.enter_async_context(serving(settings, migrator_wire))
        yield client


async def run_step(client: SchedulerClient, name: str, turn: int) -> str:
    """One step to its end; the engine it ran on."""
    ticket = await client.step(name, turn, tool_time=TOOL if turn else None)
    await generate(ticket, TOKENS)
    return str(ticket.engine_id)


async def trajectories(client: SchedulerClient) -> dict[str, pb.Trajectory]:
    """All, by id."""
    response = await client.call("ListTrajectories", pb.ListTrajectoriesRequest())
    return {trajectory.trajectory_id: trajectory for trajectory in response.trajectories}


async def test_trajectories_move_to_a_new_engine_while_their_tools_run(
    nats_url: str, bus: Bus
) -> None:
    """Six trajectories in tool calls on the only engine; a second engine comes.

    Result: some of them move, each by one migration that the bus tells of, with their whole
    context; their next steps run at the new engine under the new revision, and the old one forgets
    them.
    """
    ended = await hear(bus, "migration_ended")
    migrator = f"127.0.0.1:{free_port()}"
    async with (
        control_plane(nats_url, migrator) as client,
        leased_engines(bus, client.address, ["e0"], slots=1) as first,
    ):
        await client.until_registered(1)
        await open_and_step(client)
        async with leased_engines(bus, client.address, ["e1"], slots=1) as second:
            await client.until_registered(2)
            await until(lambda: any(fact.moved for fact in ended), what="a trajectory moves")
            moved = [fact for fact in ended if fact.moved]
            after = await trajectories(client)
            for fact in moved:
                trajectory = after[fact.trajectory_id]
                assert (fact.source_engine_id, fact.target_engine_id) == ("e0", "e1")
                assert fact.prefix_tokens == 10 + TOKENS
                assert (trajectory.engine_id, trajectory.revision, trajectory.migrations) == (
                    "e1",
                    2,
                    1,
                )
                assert await run_step(client, fact.trajectory_id, 2) == "e1"
            await until(
                lambda: released(first[0]) >= {fact.trajectory_id for fact in moved},
                what="released",
            )
            assert len(moved) < len(NAMES), "both engines have work"
            assert second[0].ran


async def test_a_migrator_that_is_killed_holds_a_step_no_longer_than_its_move_saves(
    nats_url: str, bus: Bus, start_service: StartService
) -> None:
    """SIGKILL while the target reads the KV of a trajectory whose tool returns then.

    Result: the step runs at the source long before the two minutes after which every move is given
    up.
    """
    migrator = f"127.0.0.1:{free_port()}"
    async with (
        control_plane(nats_url, migrator, own_migrator=True, tokens=400) as client,
        leased_engines(bus, client.address, ["e0"], slots=1),
    ):
        environment = {
            "TREADLE_MIGRATOR_SCHEDULER": client.address,
            "TREADLE_MIGRATOR_LISTEN": migrator,
        }
        service = await start_service("treadle_migrator", environment)
        await client.until_registered(1)
        await open_and_step(client)
        async with leased_engines(bus, client.address, ["e1"], slots=1) as (target,):
            target.gate.close()
            await until(lambda: target.gate.waiting, what="a move")
            name = target.requests("PrefetchPrefix")[-1].trajectory_id
            service.kill()
            ticket = await client.step(
                name, 2, tool_time=TOOL, timeout_s=Tuning().move_timeout_s / 2
            )
            assert ticket.engine_id == "e0"


async def open_and_step(client: SchedulerClient) -> None:
    """Two turns of each, all accounted for and predicted."""
    for name in NAMES:
        await client.open(name)
    for turn in range(2):
        async with asyncio.TaskGroup() as group:
            for name in NAMES:
                group.create_task(run_step(client, name, turn))

    async def accounted_for() -> bool:
        return all(
            trajectory.next_turn == 2 and trajectory.HasField("predicted_remaining_tokens")
            for trajectory in (await trajectories(client)).values()
        )

    await until_said(accounted_for, bool)


def released(engine: FakeEngine) -> set[str]:
    """Trajectories that the engine was told to forget."""
    return {request.trajectory_id for request in engine.requests("ReleasePrefix")}
