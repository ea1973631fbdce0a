"""The weights of a fleet: a scheduler and two sidecars as processes, which are killed, and two fakes of SGLang."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator

import pytest
import treadle
from support.conditions import until, until_said
from support.fake_sglang import FakeSglang
from support.mesh_of_processes import Fleet
from support.mesh_of_processes import fleet as start_fleet
from support.nats_server import NatsServer
from support.processes import StartService
from treadle.scheduler.v1 import scheduler_pb2 as pb

CURRENT, BEHIND, FAILED = pb.WEIGHTS_STATE_CURRENT, pb.WEIGHTS_STATE_BEHIND, pb.WEIGHTS_STATE_FAILED


@pytest.fixture
async def fleet(start_service: StartService) -> AsyncIterator[Fleet]:
    async with start_fleet(start_service) as made:
        yield made


async def set_weights(fleet: Fleet, version: str) -> None:
    request = pb.SetWeightsRequest(request_id=uuid.uuid4().hex, weight_version=version, model_path=f"/m/{version}")
    assert (await fleet.control.call("SetWeights", request)).weights.weight_version == version


async def until_states(fleet: Fleet, *states: pb.WeightsState.ValueType) -> None:
    """Of e0 and e1."""

    async def states_now() -> list[pb.WeightsState.ValueType]:
        answer = await fleet.control.call("GetWeights", pb.GetWeightsRequest())
        return [engine.state for engine in answer.weights.engines]

    await until_said(states_now, lambda now: now == list(states))


def salts(engine: FakeSglang, since: int) -> set[str]:
    """Under which an engine has stored KV of steps."""
    return {asked["cache_salt"] for asked in engine.requests[since:] if asked.get("stream")}


async def test_steps_go_on_under_the_new_version_on_every_engine(fleet: Fleet) -> None:
    """Six trajectories run when new weights are set. Result: each of them ends under the new version, no token is lost,
    and what begins later is sampled by the new version alone."""
    running = [asyncio.create_task(fleet.run(f"before-{index}", 400)) for index in range(6)]
    await until(lambda: len(fleet.sampling) == len(running))
    assert await fleet.client.update_weights("/m/v2", "v2") == {}
    await until_states(fleet, CURRENT, CURRENT)
    for trajectory in await asyncio.gather(*running):
        assert [span.weight_version for span in trajectory.version_spans] == ["default", "v2"]
    later = await asyncio.gather(*(fleet.run(f"after-{index}") for index in range(4)))
    assert {span.weight_version for trajectory in later for span in trajectory.version_spans} == {"v2"}


async def test_an_engine_that_restarts_with_its_launch_weights_serves_nothing_before_it_has_loaded(
    fleet: Fleet,
) -> None:
    """An engine dies after an update, and comes back with the weights that it was launched with; it loads for a second.
    Result: trajectories run meanwhile, and no step ever runs there under the old weights."""
    await set_weights(fleet, "v2")
    await until_states(fleet, CURRENT, CURRENT)
    engine = fleet.engines[0]
    await engine.stop()
    await fleet.control.until_registered(1)
    engine.load_s, asked = 1.0, len(engine.requests)
    await engine.start()
    await fleet.control.until_registered(2)
    await asyncio.gather(*(fleet.run(f"meanwhile-{index}") for index in range(6)))
    await until_states(fleet, CURRENT, CURRENT)
    await asyncio.gather(*(fleet.run(f"after-{index}") for index in range(6)))
    assert salts(engine, asked) <= {"v2"}


@pytest.mark.parametrize("victim", ["scheduler", "sidecar", "nats"])
async def test_an_update_that_a_kill_interrupts_is_finished(fleet: Fleet, nats_server: NatsServer, victim: str) -> None:
    """The scheduler, the sidecar of one engine, or NATS is killed by SIGKILL while the engines load, and started again,
    NATS once they have loaded. Result: all engines serve the new weights, and no step runs under a wrong name."""
    for engine in fleet.engines:
        engine.load_s = 2.0
    await set_weights(fleet, "v2")
    await until(lambda: all(engine.loading for engine in fleet.engines))
    asked = [len(engine.requests) for engine in fleet.engines]
    if victim == "scheduler":
        await fleet.restart_scheduler()
    elif victim == "nats":
        nats_server.kill()
        await until_states(fleet, CURRENT, CURRENT)
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
    fleet.engines[1].load_s = 1.0
    with pytest.raises(treadle.TreadleError, match=r"do not serve v3 yet: .*e1"):
        await fleet.client.update_weights("/m/v3", "v3", timeout_s=0.01)
    assert "no such file" in (await fleet.client.update_weights("/m/v4", "v4"))["e0"]
    await until_states(fleet, FAILED, CURRENT)
    ran = await asyncio.gather(*(fleet.run(f"t{index}") for index in range(4)))
    assert {engine_id for trajectory in ran for engine_id in trajectory.steps[0].engine_ids} == {"e1"}
