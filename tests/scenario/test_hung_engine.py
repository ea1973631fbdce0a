"""Trajectories leave an engine or a sidecar that hangs: a scheduler and sidecars as processes, two
fakes of SGLang."""

import asyncio

import pytest
import treadle
from support.conditions import until
from support.fake_sglang import Failure
from support.mesh_of_processes import fleet, load_of
from support.processes import StartService
from support.rpc import answer_of

TOKENS = 200


async def test_trajectories_leave_an_engine_that_hangs_and_new_ones_go_elsewhere_until_it_goes_on(
    start_service: StartService,
) -> None:
    """Six trajectories run on two engines, one of which then hangs but answers all polls. Result:
    its trajectories go on where the other's are, without a lost token; six new ones go there too;
    once it goes on, it is used again."""
    async with fleet(start_service, ENGINE_STALL_S="2") as f:
        hangs, works = f.engines
        first = [asyncio.create_task(f.run(f"first-{index}", TOKENS)) for index in range(6)]
        await until(lambda: hangs.running and works.running)
        hangs.hang()
        moved = [trajectory.steps[0].engine_ids for trajectory in await asyncio.gather(*first)]
        assert ("e0", "e1") in moved
        assert {engine_ids[-1] for engine_ids in moved} == {"e1"}

        assert [info.engine_id for info in await f.control.engines()] == ["e1"]
        new = await asyncio.gather(*(f.run(f"new-{index}", TOKENS) for index in range(6)))
        assert {trajectory.steps[0].engine_ids for trajectory in new} == {("e1",)}

        hangs.go_on()
        await f.control.until_registered(2)
        await works.stop()
        assert (await f.run("last", TOKENS)).steps[0].engine_ids[-1] == "e0"


@pytest.mark.timeout(180)
@pytest.mark.parametrize("how", ["killed", "hangs"])
async def test_a_preempted_step_goes_on_at_another_engine_when_its_sidecar_dies(
    start_service: StartService, how: str
) -> None:
    """A long trajectory has taken the only slot of a short one when the sidecar dies. Result: both
    are whole, and the short one goes on after the tokens that it has."""
    async with fleet(start_service, sidecars=1, token_s=0.2, SLOTS="1") as f:
        # so that the other is predicted longer
        short = asyncio.create_task(f.run("short", 60, max_total_tokens=60))
        await until(lambda: f.sampling)
        long = asyncio.create_task(f.run("long", 1000))
        await until(lambda: len(f.sampling) == 2)
        f.engines[1].token_s = 0.002
        await f.start_sidecar(1)
        await f.control.until_registered(2)
        load = await load_of(f.sidecars[0])
        assert (load.running_steps, load.waiting_steps) == (1, 1)
        (f.sidecars[0].kill if how == "killed" else f.sidecars[0].hang)()
        steps = [trajectory.steps[0] for trajectory in await asyncio.gather(short, long)]
        assert [step.engine_ids for step in steps] == [("e0", "e1"), ("e0", "e1")]
        assert steps[0].preemptions >= 1


async def test_trajectories_go_on_when_the_scheduler_restarts_and_forgets_which_engine_is_suspected(
    start_service: StartService,
) -> None:
    """A sidecar is killed, clients lose their streams from it, and then the scheduler is killed,
    while the lease has long to run. Result: new trajectories are whole, though some are sent to the
    dead engine first."""
    async with fleet(start_service, lease_ttl_s=120.0) as f:
        first = [asyncio.create_task(f.run(f"first-{index}", 200)) for index in range(6)]
        await until(lambda: all(engine.running for engine in f.engines))
        f.sidecars[0].kill()
        assert ("e0", "e1") in [
            trajectory.steps[0].engine_ids for trajectory in await asyncio.gather(*first)
        ]
        await f.restart_scheduler()
        assert [info.engine_id for info in await answer_of(f.control.engines)] == ["e0", "e1"]
        new = await asyncio.gather(*(f.run(f"new-{index}") for index in range(6)))
        went = [trajectory.steps[0].engine_ids for trajectory in new]
        assert {engine_ids[-1] for engine_ids in went} == {"e1"}
        assert ("e0", "e1") in went


WAYS = [
    pytest.param(Failure("http", 500)),
    pytest.param(Failure("http", 503), marks=pytest.mark.full),
    pytest.param(Failure("event", 500), marks=pytest.mark.full),
    pytest.param(Failure("abort", 503), marks=pytest.mark.full),
]


@pytest.mark.parametrize("failure", WAYS, ids=lambda way: f"{way.how}-{way.status}")
async def test_an_engine_that_fails_at_once_fails_no_trajectory_and_comes_back(
    start_service: StartService, failure: Failure
) -> None:
    """One of two engines fails at each request, so that it always has the fewest steps. Result: all
    trajectories are whole, those that run there and new ones; once it works, it is used again."""
    async with fleet(start_service) as f:
        fails, works = f.engines
        first = [asyncio.create_task(f.run(f"first-{index}", 100)) for index in range(8)]
        await until(lambda: fails.running and works.running)
        fails.failure = failure
        later = [asyncio.create_task(f.run(f"later-{index}")) for index in range(16)]
        await asyncio.gather(*first, *later)
        await f.control.until_registered(1)
        new = await asyncio.gather(*(f.run(f"new-{index}") for index in range(8)))
        assert {trajectory.steps[0].engine_ids for trajectory in new} == {("e1",)}

        fails.failure = None
        await f.control.until_registered(2)
        await works.stop()
        assert (await f.run("last", 40)).steps[0].engine_ids[-1] == "e0"


async def test_a_prompt_at_which_every_engine_fails_fails_alone(
    start_service: StartService,
) -> None:
    """Both engines fail at one prompt. Result: its step is tried a few times and then fails with an
    error of its own; trajectories beside it are whole, and both engines stay."""
    async with fleet(start_service) as f:
        for engine in f.engines:
            engine.failure, engine.fails = (
                Failure("http", 500),
                lambda body: 666 in body["input_ids"],
            )
        others = [asyncio.create_task(f.run(f"other-{index}", 150)) for index in range(6)]
        await until(lambda: all(engine.running for engine in f.engines))
        poison = await f.client.open(prompt_id="poison", sample=0, prompt=[5, 666])
        with pytest.raises(treadle.TreadleError, match="the engine fails") as lost:
            async for _ in poison.generate(treadle.Sampling(max_new_tokens=5)):
                pass
        assert (lost.value.reason, lost.value.retryable) == ("ENGINES_LOST", False)
        await asyncio.gather(*others)
        assert len(await f.control.engines()) == 2
        assert max(engine.steps for engine in f.engines) < 20


async def test_an_engine_whose_streams_bring_nothing_is_left_until_they_do(
    start_service: StartService,
) -> None:
    """It answers polls, and requests that are no streams. Result: its trajectories go on elsewhere,
    new ones lose no time there, and it is used again once its streams bring tokens."""
    async with fleet(start_service, ENGINE_STALL_S="2") as f:
        mute, works = f.engines
        first = [asyncio.create_task(f.run(f"first-{index}", TOKENS)) for index in range(6)]
        await until(lambda: mute.running and works.running)
        mute.is_mute = True
        await asyncio.gather(*first)
        probes = mute.probes
        await until(lambda: mute.probes > probes)
        assert [info.engine_id for info in await f.control.engines()] == ["e1"]
        new = await asyncio.gather(*(f.run(f"new-{index}") for index in range(6)))
        assert {trajectory.steps[0].engine_ids for trajectory in new} == {("e1",)}
        mute.is_mute = False
        await f.control.until_registered(2)
