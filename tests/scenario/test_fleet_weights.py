"""The weights of a fleet: a scheduler and two sidecars as processes, which are killed, and two
fakes of SGLang."""

from __future__ import annotations

import asyncio
import threading
import time
import uuid
from collections.abc import AsyncIterator, Iterator
from functools import partial
from typing import Any

import pytest
import treadle
import treadle.sync
from support.conditions import until, until_said
from support.fake_sglang import FakeSglang
from support.mesh_of_processes import Fleet
from support.mesh_of_processes import fleet as start_fleet
from support.nats_server import NatsServer
from support.processes import StartService
from treadle.scheduler.v1 import scheduler_pb2 as pb

SLOW_S, QUICK_S = 0.05, 0.01  # a token, until steps were interrupted, and after that
CURRENT, BEHIND, FAILED = pb.WEIGHTS_STATE_CURRENT, pb.WEIGHTS_STATE_BEHIND, pb.WEIGHTS_STATE_FAILED


@pytest.fixture
async def fleet(start_service: StartService) -> AsyncIterator[Fleet]:
    async with start_fleet(start_service) as made:
        yield made


async def set_weights(fleet: Fleet, version: str) -> None:
    request = pb.SetWeightsRequest(
        request_id=uuid.uuid4().hex, weight_version=version, model_path=f"/m/{version}"
    )
    assert (await fleet.control.call("SetWeights", request)).weights.weight_version == version


async def states_of(fleet: Fleet) -> list[pb.WeightsState.ValueType]:
    """Of e0 and e1."""
    answer = await fleet.control.call("GetWeights", pb.GetWeightsRequest())
    return [engine.state for engine in answer.weights.engines]


async def until_states(fleet: Fleet, *states: pb.WeightsState.ValueType) -> None:
    await until_said(lambda: states_of(fleet), lambda now: now == list(states))


def salts(engine: FakeSglang, since: int) -> set[str]:
    """Under which an engine has stored KV of steps."""
    return {asked["cache_salt"] for asked in engine.requests[since:] if asked.get("stream")}


async def test_steps_go_on_under_the_new_version_on_every_engine(fleet: Fleet) -> None:
    """Six trajectories run when new weights are set. Result: each of them ends under the new
    version, no token is lost, and what begins later is sampled by the new version alone."""
    fleet.pace(SLOW_S)
    running = [asyncio.create_task(fleet.run(f"before-{index}", 400)) for index in range(6)]
    await until(lambda: len(fleet.sampling) == len(running))
    assert await fleet.client.update_weights("/m/v2", "v2") == {}
    fleet.pace(QUICK_S)
    await until_states(fleet, CURRENT, CURRENT)
    for trajectory in await asyncio.gather(*running):
        assert [span.weight_version for span in trajectory.version_spans] == ["default", "v2"]
    later = await asyncio.gather(*(fleet.run(f"after-{index}") for index in range(4)))
    assert {span.weight_version for trajectory in later for span in trajectory.version_spans} == {
        "v2"
    }


async def test_an_engine_that_restarts_with_its_launch_weights_serves_nothing_before_it_has_loaded(
    fleet: Fleet,
) -> None:
    """An engine dies after an update, and comes back with the weights that it was launched with; it
    loads for a second. Result: trajectories run meanwhile, and no step ever runs there under the
    old weights."""
    await set_weights(fleet, "v2")
    await until_states(fleet, CURRENT, CURRENT)
    engine = fleet.engines[0]
    await fleet.stop_engine(0)
    engine.load_s, asked = 1.0, len(engine.requests)
    await engine.start()
    await fleet.control.until_registered(2)
    await asyncio.gather(*(fleet.run(f"meanwhile-{index}") for index in range(6)))
    await until_states(fleet, CURRENT, CURRENT)
    await asyncio.gather(*(fleet.run(f"after-{index}") for index in range(6)))
    assert salts(engine, asked) <= {"v2"}


@pytest.mark.parametrize("victim", ["scheduler", "sidecar", "nats"])
async def test_an_update_that_a_kill_interrupts_is_finished(
    fleet: Fleet, nats_server: NatsServer, victim: str
) -> None:
    """The scheduler, the sidecar of one engine, or NATS is killed by SIGKILL while the engines
    load, and started again, NATS once they have loaded. Result: all engines serve the new weights,
    and no step runs under a wrong name."""
    for engine in fleet.engines:
        engine.load_s = 2.0
    await set_weights(fleet, "v2")
    await until(lambda: all(engine.loads for engine in fleet.engines))
    asked = [len(engine.requests) for engine in fleet.engines]
    if victim == "scheduler":
        await fleet.restart_scheduler()
    elif victim == "nats":
        nats_server.kill()
        await until(lambda: not any(engine.loading for engine in fleet.engines))
        await asyncio.sleep(3.0)  # the scheduler's lead is overdue
        nats_server.start()
    else:
        fleet.sidecars[0].kill()
        await fleet.start_sidecar(0)
    await asyncio.gather(*(fleet.run(f"t{index}") for index in range(6)))
    await until_states(fleet, CURRENT, CURRENT)
    await asyncio.gather(*(fleet.run(f"after-{index}") for index in range(6)))
    for number in range(2):
        assert salts(fleet.engines[number], asked[number]) <= {"v2"}


async def test_an_engine_that_cannot_load_is_left_out_and_the_fleet_goes_on(fleet: Fleet) -> None:
    fleet.engines[0].refuse_weights = True
    fleet.engines[1].load_s = 3.0
    with pytest.raises(treadle.TreadleError, match=r"do not serve v3 yet: .*e1"):
        await fleet.client.update_weights("/m/v3", "v3", timeout_s=0.01)
    assert "no such file" in (await fleet.client.update_weights("/m/v4", "v4"))["e0"]
    await until_states(fleet, FAILED, CURRENT)
    ran = await asyncio.gather(*(fleet.run(f"t{index}") for index in range(4)))
    assert {engine_id for trajectory in ran for engine_id in trajectory.steps[0].engine_ids} == {
        "e1"
    }


def have_begun(fleet: Fleet, parts: int) -> bool:
    """Whether both engines have got to so many parts; one may be done with the last of them."""
    return all(len(engine.pushes) + engine.pushing >= parts for engine in fleet.engines)


async def parts(fleet: Fleet, ways: list[Any]) -> AsyncIterator[treadle.WeightPush]:
    """Of a trainer that broadcasts in the line after `yield`; it does not get on while an engine is
    not there."""
    before = max(len(engine.pushes) for engine in fleet.engines)
    for number, way in enumerate(ways):
        yield treadle.WeightPush(way, {"names": [f"w{number}"]})
        if way == "distributed":
            await until(partial(have_begun, fleet, before + number + 1))


async def test_pushed_weights_reach_every_engine_and_steps_go_on_under_them(fleet: Fleet) -> None:
    """Four trajectories run while a trainer joins a group with both engines and pushes three parts,
    two of them by broadcast. Result: each engine has its rank, the broadcast has begun when the
    trainer gets on to it, trajectories end under the new version, and nobody loads anything."""
    ranks: list[int] = []

    async def join(world_size: int) -> None:
        ranks.append(world_size)

    assert await fleet.client.join_weights_group("10.0.0.1:29500", join, backend="gloo") == {}
    assert ranks == [3]
    assert [engine.groups[0]["rank_offset"] for engine in fleet.engines] == [1, 2]
    fleet.pace(SLOW_S)
    running = [asyncio.create_task(fleet.run(f"before-{index}", 400)) for index in range(4)]
    await until(lambda: len(fleet.sampling) == len(running))
    for engine in fleet.engines:
        engine.push_s = 0.5
    pushes = parts(fleet, ["distributed", "tensor", "distributed"])
    assert await fleet.client.push_weights("v2", pushes) == {}
    fleet.pace(QUICK_S)
    await until_states(fleet, CURRENT, CURRENT)
    for trajectory in await asyncio.gather(*running):
        assert [span.weight_version for span in trajectory.version_spans] == ["default", "v2"]
    for engine in fleet.engines:
        assert [way for way, _ in engine.pushes] == ["distributed", "tensor", "distributed"]
        assert not engine.loads
    assert await fleet.client.leave_weights_group() == {}
    assert "e1" in await fleet.client.leave_weights_group()


async def test_a_trainer_without_asyncio_joins_and_pushes(fleet: Fleet) -> None:
    """Plain functions, which block: the trainer waits for the engines in the line after `yield`.

    Result: as with the asynchronous client; neither runs in the thread of the client's loop, which
    would stand still.
    """
    threads: set[str] = set()

    def note() -> None:
        threads.add(threading.current_thread().name)

    def join(world_size: int) -> None:
        assert world_size == 3
        note()

    def pushes() -> Iterator[treadle.WeightPush]:
        for number in range(2):
            yield treadle.WeightPush("distributed", {"names": [f"w{number}"]})
            note()
            while not have_begun(fleet, number + 1):
                time.sleep(0.01)

    def train() -> None:
        with treadle.sync.Client(fleet.scheduler.address) as client:
            assert client.join_weights_group("10.0.0.1:29500", join, backend="gloo") == {}
            assert client.push_weights("v2", pushes()) == {}
            assert client.leave_weights_group() == {}

    for engine in fleet.engines:
        engine.push_s = 0.5
    await asyncio.to_thread(train)
    assert [[way for way, _ in engine.pushes] for engine in fleet.engines] == [
        ["distributed"] * 2
    ] * 2
    assert "treadle" not in threads


async def test_an_engine_that_fails_in_a_push_runs_nothing_until_it_is_pushed_to_again(
    fleet: Fleet,
) -> None:
    """e0 refuses a part. Result: the push by tensors goes on with e1, trajectories run there, and
    the same version goes to e0 alone when it is pushed again; of a broadcast both have failed, and
    the trainer's part is cancelled."""
    first, second = fleet.engines
    first.refuse_push = True
    tensors = [treadle.WeightPush("tensor", {"names": []})] * 2
    errors = await fleet.client.push_weights("v2", tensors)
    assert list(errors) == ["e0"] and "WEIGHTS_NOT_PUSHED" in errors["e0"]
    await asyncio.gather(*(fleet.run(f"t{index}") for index in range(4)))
    first.refuse_push, asked = False, len(first.requests)
    assert await fleet.client.push_weights("v2", tensors) == {}
    assert (len(first.pushes), len(second.pushes)) == (2, 2)
    await until_states(fleet, CURRENT, CURRENT)
    assert salts(first, asked) <= {"v2"}

    first.refuse_push, second.push_s = True, 30.0
    errors = await fleet.client.push_weights("v3", parts(fleet, ["distributed"]))
    second.push_s = 0.0
    assert "engine e0 has failed" in errors["e1"]
    assert first.weight_version == "incomplete-v3"
    assert second.weight_version in ("incomplete-v3", "v2"), (
        "v2 where e0 has failed before the part came to e1"
    )


async def test_what_the_trainers_generator_raises_reaches_the_caller(fleet: Fleet) -> None:
    """Its broadcast fails, and another one has no parts. Result: the errors are the caller's, and
    the version can be pushed again at once."""

    async def failing() -> AsyncIterator[treadle.WeightPush]:
        yield treadle.WeightPush("distributed", {"names": ["w"]})
        raise ConnectionError("the broadcast has failed")

    for engine in fleet.engines:
        engine.push_s = 0.3
    with pytest.raises(ConnectionError, match="the broadcast has failed"):
        await fleet.client.push_weights("v2", failing())
    with pytest.raises(ValueError, match="at least one"):
        await fleet.client.push_weights("v2", [])
    assert await fleet.client.push_weights("v2", parts(fleet, ["distributed"])) == {}
    await until_states(fleet, CURRENT, CURRENT)


async def test_an_engine_that_the_push_has_missed_loads_the_version_from_a_path(
    fleet: Fleet,
) -> None:
    """e0 restarts after a push. Result: it gets no step and says what to do, until the version has
    a path."""
    assert (
        await fleet.client.push_weights("v2", [treadle.WeightPush("ipc", {"zmq_handles": {}})])
        == {}
    )
    engine = fleet.engines[0]
    await fleet.stop_engine(0)
    asked = len(engine.requests)
    await engine.start()
    await fleet.control.until_registered(2)
    await until_states(fleet, FAILED, CURRENT)
    await asyncio.gather(*(fleet.run(f"meanwhile-{index}") for index in range(4)))
    assert await fleet.client.update_weights("/m/v2", "v2") == {}
    await until_states(fleet, CURRENT, CURRENT)
    await asyncio.gather(*(fleet.run(f"after-{index}") for index in range(6)))
    assert salts(engine, asked) == {"v2"}


@pytest.mark.parametrize("victim", ["trainer", "scheduler", "sidecar", "engine"])
async def test_a_push_that_a_death_interrupts_leaves_no_engine_half_named(
    fleet: Fleet, victim: str
) -> None:
    """One of them dies while both engines take the second of three parts, and is started again.
    Result: no step runs on parts of the weights or under a wrong name; once the version is pushed
    again, all go on under it."""
    running = [asyncio.create_task(fleet.run(f"t{index}", 300)) for index in range(4)]
    await until(lambda: len(fleet.sampling) == len(running))

    async def dying() -> AsyncIterator[treadle.WeightPush]:
        for number in range(3):
            if number == 1:
                for engine in fleet.engines:
                    engine.push_s = 60.0  # until one has died
            yield treadle.WeightPush("tensor", {"names": [f"w{number}"]})

    pushing = asyncio.create_task(fleet.client.push_weights("v2", dying(), timeout_s=120.0))
    await until(lambda: all(engine.pushing for engine in fleet.engines))
    asked = [len(engine.requests) for engine in fleet.engines]
    for engine in fleet.engines:
        engine.push_s = 1.0  # the part ends soon, but the victim dies first
    if victim == "trainer":
        pushing.cancel()
        await asyncio.wait({pushing})
    elif victim == "scheduler":
        await fleet.restart_scheduler()
    elif victim == "sidecar":
        fleet.sidecars[0].kill()
        await fleet.start_sidecar(0)
    else:
        await fleet.engines[0].stop()
        await fleet.engines[0].start()
    if victim != "trainer":
        assert set(await pushing) == ({"e0"} if victim != "scheduler" else set())
    await fleet.control.until_registered(2)

    async def push_again() -> tuple[dict[str, str], list[pb.WeightsState.ValueType]]:
        errors = await fleet.client.push_weights(
            "v2", [treadle.WeightPush("tensor", {"names": []})]
        )
        return errors, await states_of(fleet)

    # A killed sidecar holds its lease for a while. A push in the moment between that and the new
    # one misses it.
    await until_said(push_again, lambda said: said == ({}, [CURRENT, CURRENT]))
    await asyncio.gather(*running, *(fleet.run(f"after-{index}") for index in range(6)))
    for engine, before in zip(fleet.engines, asked, strict=True):
        # One that was launched again has its old weights, and may run on them until the others have
        # the new ones.
        launched_again = victim == "engine" and engine is fleet.engines[0]
        assert salts(engine, before) <= ({"v2", "default"} if launched_again else {"v2"})


async def test_a_trainer_on_the_same_devices_takes_turns_with_the_engines(fleet: Fleet) -> None:
    """Sleep, train, wake the weights, push, wake the rest, while trajectories run; e1 has no memory
    saver at first. Result: e1 says so; then every trajectory waits and ends under the new version.
    """
    first, second = fleet.engines
    for number in (0, 1):
        await fleet.stop_engine(number)
    first.arguments["enable_memory_saver"] = True
    for engine in (first, second):
        await engine.start()
    await fleet.control.until_registered(2)
    errors = await fleet.client.sleep()
    assert list(errors) == ["e1"] and "--enable-memory-saver" in errors["e1"], errors
    assert await fleet.client.wake() == {}
    second.arguments["enable_memory_saver"] = True
    await fleet.stop_engine(1)
    await second.start()
    await fleet.control.until_registered(2)

    assert (
        await fleet.client.push_weights("v1", [treadle.WeightPush("tensor", {"names": []})]) == {}
    )
    fleet.pace(SLOW_S)
    running = [asyncio.create_task(fleet.run(f"t{index}", 300)) for index in range(4)]
    await until(lambda: len(fleet.sampling) == len(running))
    assert await fleet.client.sleep() == {}
    assert first.asleep == second.asleep == {"weights", "kv_cache", "cuda_graph"}
    assert await fleet.client.wake(["weights"]) == {}
    assert (
        await fleet.client.push_weights("v2", [treadle.WeightPush("tensor", {"names": []})]) == {}
    )
    assert not any(task.done() for task in running)
    assert await fleet.client.wake() == {}
    fleet.pace(QUICK_S)
    for trajectory in await asyncio.gather(*running):
        assert [span.weight_version for span in trajectory.version_spans] == ["v1", "v2"]
