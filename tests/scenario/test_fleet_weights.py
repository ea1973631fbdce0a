"""The weights of a fleet: a scheduler and two sidecars as processes, which are killed, and two fakes of SGLang."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest
import treadle
from support.conditions import until, until_said
from support.fake_sglang import FakeSglang, expected, fake_sglang
from support.mesh_in_process import QUICK
from support.processes import ServiceProcess, StartService, free_port
from support.scheduler import SchedulerClient, scheduler_client
from treadle.scheduler.v1 import scheduler_pb2 as pb

PROMPT = list(range(10, 40))
TOKENS = 40
CURRENT, BEHIND, FAILED = pb.WEIGHTS_STATE_CURRENT, pb.WEIGHTS_STATE_BEHIND, pb.WEIGHTS_STATE_FAILED


@dataclass
class Fleet:
    """A mesh of two engines, e0 and e1. start: starts services as processes. settings: of the scheduler. sampling: the
    trajectories that have tokens."""

    start: StartService
    settings: dict[str, str]
    scheduler: ServiceProcess
    engines: list[FakeSglang]
    sidecars: list[ServiceProcess]
    control: SchedulerClient
    client: treadle.Client
    sampling: set[str] = field(default_factory=set)

    async def set_weights(self, version: str) -> None:
        request = pb.SetWeightsRequest(request_id=uuid.uuid4().hex, weight_version=version, model_path=f"/m/{version}")
        assert (await self.control.call("SetWeights", request)).weights.weight_version == version

    async def until_states(self, *states: pb.WeightsState.ValueType) -> None:
        """Of e0 and e1."""

        async def states_now() -> list[pb.WeightsState.ValueType]:
            answer = await self.control.call("GetWeights", pb.GetWeightsRequest())
            return [engine.state for engine in answer.weights.engines]

        await until_said(states_now, lambda now: now == list(states))

    async def run(self, name: str, tokens: int = TOKENS) -> treadle.Trajectory:
        trajectory = await self.client.open(prompt_id=name, sample=0, prompt=PROMPT)
        async for _ in trajectory.generate(treadle.Sampling(max_new_tokens=tokens, temperature=0.0)):
            self.sampling.add(name)
        assert trajectory.steps[-1].token_ids == expected(PROMPT, tokens)
        return trajectory

    def salts(self, engine: int, since: int = 0) -> set[str]:
        """Under which an engine has stored KV of steps."""
        return {asked["cache_salt"] for asked in self.engines[engine].requests[since:] if asked.get("stream")}

    async def start_sidecar(self, number: int) -> None:
        own = {"ENGINE_ID": f"e{number}", "ENGINE_URL": self.engines[number].url, "SCHEDULER": self.scheduler.address}
        own |= {"DECODE_BASE_S": "0.01", "PREFILL_TOKENS_PER_S": "10000"}
        variables = {f"TREADLE_SIDECAR_{name}": value for name, value in own.items()}
        self.sidecars[number:] = [await self.start("treadle_sidecar", variables), *self.sidecars[number + 1 :]]


@pytest.fixture
async def fleet(start_service: StartService) -> AsyncIterator[Fleet]:
    async with make_fleet(start_service) as made:
        yield made


@asynccontextmanager
async def make_fleet(start: StartService) -> AsyncIterator[Fleet]:
    settings = {"TREADLE_SCHEDULER_LISTEN": f"127.0.0.1:{free_port()}", "TREADLE_SCHEDULER_LEASE_TTL_S": "3"}
    scheduler = await start("treadle_scheduler", settings)
    async with (
        fake_sglang(token_s=0.01) as first,
        fake_sglang(token_s=0.01) as second,
        scheduler_client(scheduler.address) as control,
        treadle.Client(scheduler.address, retry=QUICK) as client,
    ):
        made = Fleet(start, settings, scheduler, [first, second], [], control, client)
        for number in range(2):
            await made.start_sidecar(number)
        await control.until_registered(2)
        yield made


async def test_steps_go_on_under_the_new_version_on_every_engine(fleet: Fleet) -> None:
    """Six trajectories run when new weights are set. Result: each of them ends under the new version, no token is lost,
    and what begins later is sampled by the new version alone."""
    running = [asyncio.create_task(fleet.run(f"before-{index}", 400)) for index in range(6)]
    await until(lambda: len(fleet.sampling) == len(running))
    assert await fleet.client.update_weights("/m/v2", "v2") == {}
    await fleet.until_states(CURRENT, CURRENT)
    for trajectory in await asyncio.gather(*running):
        assert [span.weight_version for span in trajectory.version_spans] == ["default", "v2"]
    later = await asyncio.gather(*(fleet.run(f"after-{index}") for index in range(4)))
    assert {span.weight_version for trajectory in later for span in trajectory.version_spans} == {"v2"}


async def test_an_engine_that_restarts_with_its_launch_weights_serves_nothing_before_it_has_loaded(
    fleet: Fleet,
) -> None:
    """An engine dies after an update, and comes back with the weights that it was launched with; it loads for a second.
    Result: trajectories run meanwhile, and no step ever runs there under the old weights."""
    await fleet.set_weights("v2")
    await fleet.until_states(CURRENT, CURRENT)
    engine = fleet.engines[0]
    await engine.stop()
    await fleet.control.until_registered(1)
    engine.load_s, asked = 1.0, len(engine.requests)
    await engine.start()
    await fleet.control.until_registered(2)
    await asyncio.gather(*(fleet.run(f"meanwhile-{index}") for index in range(6)))
    await fleet.until_states(CURRENT, CURRENT)
    await asyncio.gather(*(fleet.run(f"after-{index}") for index in range(6)))
    assert fleet.salts(0, asked) <= {"v2"}


@pytest.mark.parametrize("victim", ["scheduler", "sidecar"])
async def test_an_update_that_a_kill_interrupts_is_finished(fleet: Fleet, victim: str) -> None:
    """The scheduler, or the sidecar of one engine, is killed by SIGKILL while the engines load, and started again.
    Result: all engines serve the new weights, and no step runs under a wrong name."""
    for engine in fleet.engines:
        engine.load_s = 2.0
    await fleet.set_weights("v2")
    await until(lambda: all(engine.loading for engine in fleet.engines))
    asked = [len(engine.requests) for engine in fleet.engines]
    if victim == "scheduler":
        fleet.scheduler.kill()
        await fleet.start("treadle_scheduler", fleet.settings)
    else:
        fleet.sidecars[0].kill()
        await fleet.start_sidecar(0)
    await asyncio.gather(*(fleet.run(f"t{index}") for index in range(6)))
    await fleet.until_states(CURRENT, CURRENT)
    await asyncio.gather(*(fleet.run(f"after-{index}") for index in range(6)))
    for number in range(2):
        assert fleet.salts(number, asked[number]) <= {"v2"}


async def test_an_engine_that_cannot_load_is_left_out_and_the_fleet_goes_on(fleet: Fleet) -> None:
    fleet.engines[0].refuse_weights = True
    fleet.engines[1].load_s = 1.0
    with pytest.raises(treadle.TreadleError, match=r"do not serve v3 yet: .*e1"):
        await fleet.client.update_weights("/m/v3", "v3", timeout_s=0.01)
    assert "no such file" in (await fleet.client.update_weights("/m/v4", "v4"))["e0"]
    await fleet.until_states(FAILED, CURRENT)
    ran = await asyncio.gather(*(fleet.run(f"t{index}") for index in range(4)))
    assert {engine_id for trajectory in ran for engine_id in trajectory.steps[0].engine_ids} == {"e1"}
