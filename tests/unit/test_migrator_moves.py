"""Moves between fake sidecars over a real nats-server: the path, the failures, the order."""

import asyncio
from typing import Any

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration
from support.conditions import until
from support.fake_migration_peers import CALL_S, SALT, fake_mesh, migrator
from support.fake_servicer import Refusal
from treadle.migrator.v1 import migrator_pb2 as pb
from treadle.telemetry.v1.facts_pb2 import Fact


async def test_a_move_goes_through_its_states_and_the_target_is_the_owner(nats_url: str) -> None:
    """Prefetch from storage, verify, switch, release: states pending to done, revision by revision; a fact says so."""
    facts: list[Fact] = []

    async def hear(fact: Fact) -> None:
        facts.append(fact)

    async with fake_mesh() as mesh, migrator(nats_url, mesh) as (calls, served):
        await served.runtime.bus.subscribe(["migration_ended"], hear, replay=True)
        mesh.place("t", "e0", tokens=100)
        mesh.sidecars["e1"].gate.close()
        started = await calls.start(mesh.request("t", "e0", "e1"))
        async with asyncio.TaskGroup() as group:
            watching = group.create_task(calls.states(started.migration_id))
            await until(lambda: mesh.sidecars["e1"].gate.waiting)
            mesh.sidecars["e1"].gate.open()
        states = watching.result()
        await until(lambda: facts)
        await until(lambda: not mesh.sidecars["e0"].prefixes)
    assert started.state == pb.MIGRATION_STATE_PENDING and started.revision == 1
    assert [state.revision for state in states] == sorted({state.revision for state in states})
    done = states[-1]
    assert (done.state, done.revision) == (pb.MIGRATION_STATE_DONE, 4)
    assert (done.path, done.prefix_tokens, done.tokens_from_storage) == (pb.MIGRATION_PATH_STORAGE, 100, 100)
    assert mesh.scheduler.owners["t"] == ("e1", 2)
    assert mesh.sidecars["e1"].prefixes == {"t": 100}
    request = mesh.sidecars["e1"].requests("PrefetchPrefix")[0]
    assert all(r.counts_only for r in mesh.sidecars["e0"].requests("ExportPrefix")[1:])  # the first is the target's
    assert request.storage_only and request.cache_salt == SALT
    assert getattr(request, "from").engine_address == mesh.sidecars["e0"].address
    ended = facts[0].migration_ended
    assert (ended.moved, ended.migration_id, ended.prefix_tokens) == (True, done.migration_id, 100)
    assert ended.started_at == done.started_at


async def test_what_is_not_stored_is_prefilled_on_the_target(nats_url: str) -> None:
    async with fake_mesh() as mesh, migrator(nats_url, mesh) as (calls, _):
        mesh.place("t", "e0")
        mesh.sidecars["e1"].stored = False
        done = await calls.moved(mesh.request("t", "e0", "e1"))
    assert (done.state, done.path) == (pb.MIGRATION_STATE_DONE, pb.MIGRATION_PATH_PREFILL)
    assert done.tokens_prefilled == 100
    assert [request.storage_only for request in mesh.sidecars["e1"].requests("PrefetchPrefix")] == [True, False]


def not_stored(mesh: Any) -> dict[str, Any]:
    mesh.sidecars["e1"].stored = False
    return {"allow_prefill": False}


def too_short(mesh: Any) -> dict[str, Any]:
    mesh.sidecars["e1"].tokens_short = 1
    return {}


def other_weights(mesh: Any) -> dict[str, Any]:
    mesh.sidecars["e0"].cache_salt = "w6"
    return {}


def target_away(mesh: Any) -> dict[str, Any]:
    mesh.sidecars["e1"].refuse_next("PrefetchPrefix", Refusal(grpc.StatusCode.UNAVAILABLE, "ENGINE_LOST"))
    return {}


def moved_meanwhile(mesh: Any) -> dict[str, Any]:
    mesh.scheduler.owners["t"] = ("e0", 5)
    return {}


def in_a_step(mesh: Any) -> dict[str, Any]:
    mesh.scheduler.refuse_next("SwitchEngine", Refusal(grpc.StatusCode.FAILED_PRECONDITION, "STEP_IN_FLIGHT"))
    return {}


def too_slow(mesh: Any) -> dict[str, Any]:
    mesh.sidecars["e1"].gate.close()
    return {"give_up_after": Duration(nanos=200_000_000)}


def scheduler_too_slow(mesh: Any) -> dict[str, Any]:
    mesh.scheduler.gate.close()
    return {"give_up_after": Duration(nanos=500_000_000)}


@pytest.mark.parametrize(
    ("trouble", "reason"),
    [
        (not_stored, "PREFIX_NOT_STORED"),
        (too_short, "PREFIX_MISMATCH"),
        (other_weights, "WEIGHT_VERSION_MISMATCH"),
        (target_away, "TARGET_UNAVAILABLE"),
        (moved_meanwhile, "REVISION_MISMATCH"),
        (in_a_step, "STEP_IN_FLIGHT"),
        (too_slow, "GAVE_UP"),
        (scheduler_too_slow, "GAVE_UP"),
    ],
)
async def test_whatever_fails_leaves_the_source_the_owner(nats_url: str, trouble: Any, reason: str) -> None:
    """One thing goes wrong. Result: failed, its reason in resource and fact, source owner and prefix as before."""
    facts: list[Fact] = []

    async def hear(fact: Fact) -> None:
        facts.append(fact)

    async with fake_mesh() as mesh, migrator(nats_url, mesh) as (calls, served):
        await served.runtime.bus.subscribe(["migration_ended"], hear, replay=True)
        mesh.place("t", "e0")
        failed = await calls.moved(mesh.request("t", "e0", "e1", **trouble(mesh)))
        await until(lambda: facts)
    assert (failed.state, failed.failure_reason) == (pb.MIGRATION_STATE_FAILED, reason)
    assert mesh.scheduler.owners["t"][0] == "e0"
    assert mesh.sidecars["e0"].prefixes == {"t": 100}
    assert (facts[0].migration_ended.moved, facts[0].migration_ended.failure_reason) == (False, reason)


async def test_a_failed_move_makes_the_target_forget_the_prefix(nats_url: str) -> None:
    async with fake_mesh() as mesh, migrator(nats_url, mesh) as (calls, _):
        mesh.place("t", "e0")
        failed = await calls.moved(mesh.request("t", "e0", "e1", **in_a_step(mesh)))
        await until(lambda: not mesh.sidecars["e1"].prefixes)
    assert failed.prefix_tokens == 100


async def test_a_source_that_does_not_release_changes_nothing_about_the_move(nats_url: str) -> None:
    async with fake_mesh() as mesh, migrator(nats_url, mesh) as (calls, _):
        mesh.place("t", "e0")
        mesh.sidecars["e0"].refuse_next("ReleasePrefix", Refusal(grpc.StatusCode.UNAVAILABLE, "ENGINE_LOST"))
        done = await calls.moved(mesh.request("t", "e0", "e1"))
        await until(lambda: mesh.sidecars["e0"].requests("ReleasePrefix"))
    assert done.state == pb.MIGRATION_STATE_DONE


@pytest.mark.parametrize("code", [grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.INTERNAL])
async def test_a_switch_whose_answer_is_lost_is_sent_again_and_counts_once(
    nats_url: str, code: grpc.StatusCode
) -> None:
    async with fake_mesh() as mesh, migrator(nats_url, mesh) as (calls, _):
        mesh.place("t", "e0")
        mesh.scheduler.refuse_next("SwitchEngine", Refusal(code, "", after=True))
        done = await calls.moved(mesh.request("t", "e0", "e1"))
    assert done.state == pb.MIGRATION_STATE_DONE
    assert mesh.scheduler.owners["t"] == ("e1", 2)
    assert len(mesh.scheduler.requests("SwitchEngine")) == 2


async def test_a_switch_that_is_not_answered_in_time_ends_as_the_scheduler_says(nats_url: str) -> None:
    """The switch happened, its answer never comes, the move's time passes; the first question finds nobody.

    Result: done, because the scheduler says that the target owns the trajectory.
    """
    async with fake_mesh() as mesh, migrator(nats_url, mesh) as (calls, _):
        mesh.place("t", "e0")
        mesh.scheduler.gate_after.close()
        mesh.scheduler.refuse_next("GetTrajectory", Refusal(grpc.StatusCode.UNAVAILABLE, ""))
        done = await calls.moved(mesh.request("t", "e0", "e1", give_up_after=Duration(nanos=500_000_000)))
        mesh.scheduler.gate_after.open()
    assert done.state == pb.MIGRATION_STATE_DONE


async def test_moves_run_in_parallel_only_between_different_engines_and_the_longest_goes_first(nats_url: str) -> None:
    """e0→e1 is under way. A short and a long move want e1 too; one between e2 and e3 wants neither.

    Result: e2→e3 runs at once; of the two that wait the long one is next.
    """
    async with fake_mesh(4) as mesh, migrator(nats_url, mesh) as (calls, _):
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
        assert (await calls.moved(mesh.request("apart", "e2", "e3"))).state == pb.MIGRATION_STATE_DONE
        assert [(await calls.get(m.migration_id)).state for m in waiting] == [pb.MIGRATION_STATE_PENDING] * 2
        target.gate.open()
        for migration in (first, *waiting):
            assert (await calls.ended(migration.migration_id)).state == pb.MIGRATION_STATE_DONE
    assert [r.trajectory_id for r in target.requests("PrefetchPrefix")] == ["first", "long", "short"]


async def test_a_move_that_waits_for_its_engines_too_long_gives_up(nats_url: str) -> None:
    async with fake_mesh() as mesh, migrator(nats_url, mesh) as (calls, _):
        mesh.place("first", "e0")
        mesh.place("second", "e0")
        mesh.sidecars["e1"].gate.close()
        await calls.start(mesh.request("first", "e0", "e1"))
        failed = await calls.moved(mesh.request("second", "e0", "e1", give_up_after=Duration(nanos=200_000_000)))
        mesh.sidecars["e1"].gate.open()
    assert (failed.state, failed.failure_reason) == (pb.MIGRATION_STATE_FAILED, "GAVE_UP")
    assert not failed.HasField("started_at")


async def test_a_cancelled_move_stops_and_frees_its_engines(nats_url: str) -> None:
    """One move is cancelled while it prepares, one while it waits; a third goes on with their engines."""
    async with fake_mesh() as mesh, migrator(nats_url, mesh) as (calls, _):
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


async def test_cancelling_during_the_switch_answers_how_it_ended(nats_url: str) -> None:
    async with fake_mesh() as mesh, migrator(nats_url, mesh) as (calls, _):
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


async def test_a_repeated_start_gives_the_same_migration(nats_url: str) -> None:
    async with fake_mesh() as mesh, migrator(nats_url, mesh) as (calls, _):
        mesh.place("t", "e0")
        request = mesh.request("t", "e0", "e1")
        starts = [await calls.start(request) for _ in range(2)]
        await calls.ended(starts[0].migration_id)
    assert starts[0] == starts[1]
    assert len(mesh.scheduler.requests("SwitchEngine")) == 1


async def test_migrations_are_listed_page_by_page_and_by_trajectory(nats_url: str) -> None:
    async with fake_mesh() as mesh, migrator(nats_url, mesh) as (calls, _):
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
        one = await calls.stub.ListMigrations(pb.ListMigrationsRequest(trajectory_id="t3"), timeout=CALL_S)
    assert listed == started and pages == 3
    assert [migration.migration_id for migration in one.migrations] == [started[3]]
