"""Killing the migrator in the middle of a move: the next process ends it as the scheduler says."""

from collections.abc import Awaitable, Callable

import grpc.aio
import pytest
from support.conditions import until
from support.facts import hear
from support.fake_migration_peers import Mesh, MigratorCalls, fake_mesh
from support.fake_servicer import Gate, Port
from support.processes import ServiceProcess, StartService
from treadle.migrator.v1 import migrator_pb2 as pb
from treadle.scheduler.v1 import scheduler_pb2_grpc
from treadle_runtime.bus import Bus

Kill = Callable[[Mesh, MigratorCalls, ServiceProcess], Awaitable[str]]


async def while_waiting(mesh: Mesh, calls: MigratorCalls, service: ServiceProcess) -> str:
    """Another move holds the engines."""
    mesh.place("other", "e0")
    mesh.sidecars["e1"].gate.close()
    await calls.start(mesh.request("other", "e0", "e1"))
    await until(lambda: mesh.sidecars["e1"].gate.waiting)
    started = await calls.start(mesh.request("t", "e0", "e1"))
    service.kill()
    mesh.sidecars["e1"].gate.open()
    return started.migration_id


async def kill_at(gate: Gate, mesh: Mesh, calls: MigratorCalls, service: ServiceProcess) -> str:
    """While a call of the move is held at the gate; the call ends with its caller."""
    gate.close()
    started = await calls.start(mesh.request("t", "e0", "e1"))
    await until(lambda: gate.waiting)
    service.kill()
    await until(lambda: not gate.waiting)
    gate.open()
    return started.migration_id


async def while_preparing(mesh: Mesh, calls: MigratorCalls, service: ServiceProcess) -> str:
    """The target is fetching."""
    return await kill_at(mesh.sidecars["e1"].gate, mesh, calls, service)


async def before_the_swap(mesh: Mesh, calls: MigratorCalls, service: ServiceProcess) -> str:
    """The switch is on its way."""
    return await kill_at(mesh.scheduler.gate, mesh, calls, service)


async def after_the_swap(mesh: Mesh, calls: MigratorCalls, service: ServiceProcess) -> str:
    """The owner has changed; nobody heard the answer."""
    return await kill_at(mesh.scheduler.gate_after, mesh, calls, service)


@pytest.mark.parametrize(
    ("kill", "state", "reason", "owner"),
    [
        (while_waiting, pb.MIGRATION_STATE_FAILED, "INTERRUPTED", ("e0", 1)),
        (while_preparing, pb.MIGRATION_STATE_FAILED, "INTERRUPTED", ("e0", 1)),
        (before_the_swap, pb.MIGRATION_STATE_FAILED, "INTERRUPTED", ("e0", 1)),
        (after_the_swap, pb.MIGRATION_STATE_DONE, "", ("e1", 2)),
    ],
)
async def test_a_move_that_was_cut_off_is_ended_by_the_next_process(
    start_service: StartService,
    bus: Bus,
    kill: Kill,
    state: "pb.MigrationState.ValueType",
    reason: str,
    owner: tuple[str, int],
) -> None:
    """SIGKILL at one point of a move, then a new process over the same NATS.

    Result: the migration ends, a fact says so once, the resource agrees with the scheduler, and the
    trajectory can move again.
    """
    async with fake_mesh() as mesh:
        ends = await hear(bus, "migration_ended")

        def of_it() -> list[bool]:
            return [end.moved for end in ends if end.trajectory_id == "t"]

        mesh.place("t", "e0")
        environment = {"TREADLE_MIGRATOR_SCHEDULER": mesh.scheduler.address}
        service = await start_service("treadle_migrator", environment)
        async with grpc.aio.insecure_channel(service.address) as channel:
            migration_id = await kill(mesh, MigratorCalls(channel), service)
        service = await start_service("treadle_migrator", environment)
        async with grpc.aio.insecure_channel(service.address) as channel:
            calls = MigratorCalls(channel)
            ended = await calls.ended(migration_id)
            await until(of_it)
            assert (ended.state, ended.failure_reason) == (state, reason)
            assert mesh.scheduler.owners["t"] == owner
            back = mesh.request(
                "t",
                *sorted(mesh.sidecars, key=lambda engine: engine != owner[0]),
                request_id="back",
            )
            back.expected_revision = owner[1]
            mesh.sidecars[owner[0]].prefixes["t"] = 100
            assert (await calls.moved(back)).state == pb.MIGRATION_STATE_DONE
            await until(lambda: len(of_it()) == 2)
    assert of_it() == [state == pb.MIGRATION_STATE_DONE, True]


async def test_a_switch_stays_undecided_until_the_scheduler_answers(
    start_service: StartService,
) -> None:
    """SIGKILL after the swap, and the scheduler is away when the next process starts.

    Result: the migration is SWITCHING until the scheduler is back, then done.
    """
    async with fake_mesh() as mesh:
        mesh.place("t", "e0")
        service = await start_service(
            "treadle_migrator", {"TREADLE_MIGRATOR_SCHEDULER": mesh.scheduler.address}
        )
        async with grpc.aio.insecure_channel(service.address) as channel:
            migration_id = await after_the_swap(mesh, MigratorCalls(channel), service)
        port = Port(scheduler_pb2_grpc.add_SchedulerServiceServicer_to_server, mesh.scheduler)
        service = await start_service(
            "treadle_migrator", {"TREADLE_MIGRATOR_SCHEDULER": port.address}
        )
        async with grpc.aio.insecure_channel(service.address) as channel:
            calls = MigratorCalls(channel)
            await until(lambda: "scheduler does not answer" in service.stderr_text())
            assert (await calls.get(migration_id)).state == pb.MIGRATION_STATE_SWITCHING
            async with port:
                assert (await calls.ended(migration_id)).state == pb.MIGRATION_STATE_DONE
