"""Trajectories leave an engine or a sidecar that hangs: a scheduler and sidecars as processes, two
fakes of SGLang."""

import asyncio

import pytest
from support.conditions import until
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
