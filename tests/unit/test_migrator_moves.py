"""Moves between fake sidecars over a real nats-server: the path, the failures, the order."""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration
from support.conditions import until
from support.facts import hear
from support.fake_migration_peers import CALL_S, SALT, Mesh, MigratorCalls, fake_mesh, migrator
from support.fake_servicer import Refusal
from treadle.migrator.v1 import migrator_pb2 as pb
from treadle_runtime.bus import Bus


@pytest.fixture
async def mesh() -> AsyncIterator[Mesh]:
    async with fake_mesh() as mesh:
        yield mesh


@pytest.fixture
async def calls(nats_url: str, mesh: Mesh) -> AsyncIterator[MigratorCalls]:
    async with migrator(nats_url, mesh) as calls:
        yield calls


async def test_a_move_goes_through_its_states_and_the_target_is_the_owner(
    mesh: Mesh, calls: MigratorCalls, bus: Bus
) -> None:
    """Prefetch from storage, verify, switch, release: states pending to done, revision by revision;
    a fact says so."""
    ends = await hear(bus, "migration_ended")
    mesh.place("t", "e0", tokens=100)
    mesh.sidecars["e1"].gate.close()
    started = await calls.start(mesh.request("t", "e0", "e1"))
    async with asyncio.TaskGroup() as group:
        watching = group.create_task(calls.states(started.migration_id))
        await until(lambda: mesh.sidecars["e1"].gate.waiting)
        mesh.sidecars["e1"].gate.open()
    states = watching.result()
    await until(lambda: ends)
    await until(lambda: not mesh.sidecars["e0"].prefixes)
    assert started.state == pb.MIGRATION_STATE_PENDING and started.revision == 1
    assert [state.revision for state in states] == sorted({state.revision for state in states})
    done = states[-1]
    assert (done.state, done.revision) == (pb.MIGRATION_STATE_DONE, 4)
    assert (done.path, done.prefix_tokens, done.tokens_from_storage) == (
        pb.MIGRATION_PATH_STORAGE,
        100,
        100,
    )
    assert mesh.scheduler.owners["t"] == ("e1", 2)
    assert mesh.sidecars["e1"].prefixes == {"t": 100}
    request = mesh.sidecars["e1"].requests("PrefetchPrefix")[0]
    # the first is the target's
    assert all(r.counts_only for r in mesh.sidecars["e0"].requests("ExportPrefix")[1:])
    assert request.storage_only and request.cache_salt == SALT
    assert getattr(request, "from").engine_address == mesh.sidecars["e0"].address
    (ended,) = ends
    assert (ended.moved, ended.migration_id, ended.prefix_tokens) == (True, done.migration_id, 100)
    assert ended.started_at == done.started_at


async def test_what_is_not_stored_is_prefilled_on_the_target(
    mesh: Mesh, calls: MigratorCalls
) -> None:
    mesh.place("t", "e0")
    mesh.sidecars["e1"].stored = False
    done = await calls.moved(mesh.request("t", "e0", "e1"))
    assert (done.state, done.path) == (pb.MIGRATION_STATE_DONE, pb.MIGRATION_PATH_PREFILL)
    assert done.tokens_prefilled == 100
    assert [request.storage_only for request in mesh.sidecars["e1"].requests("PrefetchPrefix")] == [
        True,
        False,
    ]


UNAVAILABLE = Refusal(grpc.StatusCode.UNAVAILABLE, "ENGINE_LOST")
IN_A_STEP = Refusal(grpc.StatusCode.FAILED_PRECONDITION, "STEP_IN_FLIGHT")
AT_ONCE, SOON = Duration(nanos=200_000_000), Duration(nanos=500_000_000)


@pytest.mark.parametrize(
    ("trouble", "fields", "reason"),
    [
        (
            lambda mesh: setattr(mesh.sidecars["e1"], "stored", False),
            {"allow_prefill": False},
            "PREFIX_NOT_STORED",
        ),
        (lambda mesh: setattr(mesh.sidecars["e1"], "tokens_short", 1), {}, "PREFIX_MISMATCH"),
        (
            lambda mesh: setattr(mesh.sidecars["e0"], "cache_salt", "w6"),
            {},
            "WEIGHT_VERSION_MISMATCH",
        ),
        (
            lambda mesh: mesh.sidecars["e1"].refuse_next("PrefetchPrefix", UNAVAILABLE),
            {},
            "TARGET_UNAVAILABLE",
        ),
        (lambda mesh: mesh.scheduler.owners.update(t=("e0", 5)), {}, "REVISION_MISMATCH"),
        (lambda mesh: mesh.scheduler.refuse_next("SwitchEngine", IN_A_STEP), {}, "STEP_IN_FLIGHT"),
        (lambda mesh: mesh.sidecars["e1"].gate.close(), {"give_up_after": AT_ONCE}, "GAVE_UP"),
        (lambda mesh: mesh.scheduler.gate.close(), {"give_up_after": SOON}, "GAVE_UP"),
    ],
)
async def test_whatever_fails_leaves_the_source_the_owner(
    mesh: Mesh,
    calls: MigratorCalls,
    bus: Bus,
    trouble: Callable[[Mesh], object],
    fields: dict[str, Any],
    reason: str,
) -> None:
    """One thing goes wrong. Result: failed, its reason in resource and fact, source owner and
    prefix as before."""
    ends = await hear(bus, "migration_ended")
    mesh.place("t", "e0")
    trouble(mesh)
    failed = await calls.moved(mesh.request("t", "e0", "e1", **fields))
    await until(lambda: ends)
    assert (failed.state, failed.failure_reason) == (pb.MIGRATION_STATE_FAILED, reason)
    assert mesh.scheduler.owners["t"][0] == "e0"
    assert mesh.sidecars["e0"].prefixes == {"t": 100}
    assert [(end.moved, end.failure_reason) for end in ends] == [(False, reason)]


async def test_a_failed_move_makes_the_target_forget_the_prefix(
    mesh: Mesh, calls: MigratorCalls
) -> None:
    mesh.place("t", "e0")
    mesh.scheduler.refuse_next("SwitchEngine", IN_A_STEP)
    failed = await calls.moved(mesh.request("t", "e0", "e1"))
    await until(lambda: not mesh.sidecars["e1"].prefixes)
    assert failed.prefix_tokens == 100


async def test_a_source_that_does_not_release_changes_nothing_about_the_move(
    mesh: Mesh, calls: MigratorCalls
) -> None:
    mesh.place("t", "e0")
    mesh.sidecars["e0"].refuse_next("ReleasePrefix", UNAVAILABLE)
    done = await calls.moved(mesh.request("t", "e0", "e1"))
    await until(lambda: mesh.sidecars["e0"].requests("ReleasePrefix"))
    assert done.state == pb.MIGRATION_STATE_DONE


@pytest.mark.parametrize("code", [grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.INTERNAL])
async def test_a_switch_whose_answer_is_lost_is_sent_again_and_counts_once(
    mesh: Mesh, calls: MigratorCalls, code: grpc.StatusCode
) -> None:
    mesh.place("t", "e0")
    mesh.scheduler.refuse_next("SwitchEngine", Refusal(code, "", after=True))
    done = await calls.moved(mesh.request("t", "e0", "e1"))
    assert done.state == pb.MIGRATION_STATE_DONE
    assert mesh.scheduler.owners["t"] == ("e1", 2)
    assert len(mesh.scheduler.requests("SwitchEngine")) == 2


async def test_a_switch_that_is_not_answered_in_time_ends_as_the_scheduler_says(
    mesh: Mesh, calls: MigratorCalls
) -> None:
    """The switch happened, its answer never comes, the move's time passes; the first question finds
    nobody.

    Result: done, because the scheduler says that the target owns the trajectory.
    """
    mesh.place("t", "e0")
    mesh.scheduler.gate_after.close()
    mesh.scheduler.refuse_next("GetTrajectory", Refusal(grpc.StatusCode.UNAVAILABLE, ""))
    done = await calls.moved(mesh.request("t", "e0", "e1", give_up_after=Duration(seconds=4)))
    mesh.scheduler.gate_after.open()
    assert done.state == pb.MIGRATION_STATE_DONE


async def test_moves_run_in_parallel_only_between_different_engines_and_the_longest_goes_first(
    nats_url: str,
) -> None:
    """e0→e1 is under way. A short and a long move want e1 too; one between e2 and e3 wants neither.

    Result: e2→e3 runs at once; of the two that wait the long one is next.
    """
    async with fake_mesh(4) as mesh, migrator(nats_url, mesh) as calls:
        for name, engine in (("first", "e0"), ("short", "e0"), ("long", "e0"), ("apart", "e2")):
            mesh.place(name, engine)
        target = mesh.sidecars["e1"]
        target.gate.close()
        first = await calls.start(mesh.request("first", "e0", "e1"))
        await until(lambda: target.gate.waiting)
        waiting = [
            await calls.start(mesh.request("short", "e0", "e1", remaining_tokens=10.0)),
            await calls.start(mesh.request("long", "e0", "e1", remaining_tokens=900.0)),
        ]
        assert (
            await calls.moved(mesh.request("apart", "e2", "e3"))
        ).state == pb.MIGRATION_STATE_DONE
        assert [(await calls.get(m.migration_id)).state for m in waiting] == [
            pb.MIGRATION_STATE_PENDING
        ] * 2
        target.gate.open()
        for migration in (first, *waiting):
            assert (await calls.ended(migration.migration_id)).state == pb.MIGRATION_STATE_DONE
    assert [r.trajectory_id for r in target.requests("PrefetchPrefix")] == [
        "first",
        "long",
        "short",
    ]


async def test_a_move_that_waits_for_its_engines_too_long_gives_up(
    mesh: Mesh, calls: MigratorCalls
) -> None:
    mesh.place("first", "e0")
    mesh.place("second", "e0")
    mesh.sidecars["e1"].gate.close()
    await calls.start(mesh.request("first", "e0", "e1"))
    failed = await calls.moved(mesh.request("second", "e0", "e1", give_up_after=AT_ONCE))
    mesh.sidecars["e1"].gate.open()
    assert (failed.state, failed.failure_reason) == (pb.MIGRATION_STATE_FAILED, "GAVE_UP")
    assert not failed.HasField("started_at")


async def test_a_cancelled_move_stops_and_frees_its_engines(
    mesh: Mesh, calls: MigratorCalls
) -> None:
    """One move is cancelled while it prepares, one while it waits; a third goes on with their
    engines."""
    for name in ("first", "second", "third"):
        mesh.place(name, "e0")
    target = mesh.sidecars["e1"]
    target.gate.close()
    first = await calls.start(mesh.request("first", "e0", "e1"))
    await until(lambda: target.gate.waiting)
    second = await calls.start(mesh.request("second", "e0", "e1"))
    for index, migration in enumerate((first, second)):
        cancelled = await calls.cancel(migration.migration_id, f"cancel-{index}")
        assert cancelled.state == pb.MIGRATION_STATE_CANCELLED
    target.gate.open()
    assert (await calls.moved(mesh.request("third", "e0", "e1"))).state == pb.MIGRATION_STATE_DONE
    assert mesh.scheduler.owners["first"] == mesh.scheduler.owners["second"] == ("e0", 1)


async def test_cancelling_during_the_switch_answers_how_it_ended(
    mesh: Mesh, calls: MigratorCalls
) -> None:
    mesh.place("t", "e0")
    mesh.scheduler.gate.close()
    started = await calls.start(mesh.request("t", "e0", "e1"))
    await until(lambda: mesh.scheduler.gate.waiting)
    async with asyncio.TaskGroup() as group:
        cancelling = group.create_task(calls.cancel(started.migration_id))
        await asyncio.sleep(0)
        mesh.scheduler.gate.open()
    again = await calls.cancel(started.migration_id, "another")
    assert cancelling.result().state == again.state == pb.MIGRATION_STATE_DONE


async def test_migrations_are_listed_page_by_page_and_by_trajectory(
    mesh: Mesh, calls: MigratorCalls
) -> None:
    started = []
    for index in range(5):
        mesh.place(f"t{index}", "e0")
        started.append((await calls.moved(mesh.request(f"t{index}", "e0", "e1"))).migration_id)
    listed, token, pages = [], "", 0
    while pages == 0 or token:
        request = pb.ListMigrationsRequest(page_size=2, page_token=token)
        page = await calls.stub.ListMigrations(request, timeout=CALL_S)
        listed += [migration.migration_id for migration in page.migrations]
        token, pages = page.next_page_token, pages + 1
    one = await calls.stub.ListMigrations(
        pb.ListMigrationsRequest(trajectory_id="t3"), timeout=CALL_S
    )
    assert listed == started and pages == 3
    assert [migration.migration_id for migration in one.migrations] == [started[3]]
