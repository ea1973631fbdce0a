"""A client process is killed: what it held is freed once its lease has ended, and another client
gets tickets."""

import asyncio
import time

import pytest
import treadle
from support.client_process import Processes
from support.conditions import until_said
from support.mesh_in_process import QUICK, generate
from support.mesh_of_processes import LEASE_S, mesh
from support.processes import StartService
from support.rpc import refused
from support.tools import calls_to
from treadle.scheduler.v1 import scheduler_pb2 as pb

START_S = 90.0  # from the start of a client's process to its steps
FREED_S = 60.0  # in which a busy machine, too, has ended the lease and freed what was held
SLOTS = 2
TRAJECTORIES = 8  # of the killed client: two run, six wait


async def check_another_client_gets_tickets(address: str) -> None:
    async with asyncio.timeout(FREED_S), treadle.Client(address, retry=QUICK) as client:
        for sample in range(SLOTS):
            async with await client.open(prompt_id="other", sample=sample, prompt=[1, 2]) as t:
                assert len(await generate(t, 4)) == 4


@pytest.mark.timeout(240)
@pytest.mark.parametrize("restarted", [False, True], ids=["", "scheduler-killed-too"])
async def test_a_killed_client_is_closed_and_its_room_sessions_and_steps_are_freed(
    start_service: StartService, client_processes: Processes, restarted: bool
) -> None:
    """Result: another client gets tickets; all trajectories of the first are closed as failed;
    nothing of it runs."""
    async with (
        mesh(start_service, "treadle_tools", SLOTS, BUILTIN="frozen_lake") as m,
        calls_to(m.other) as tools,
    ):
        first = client_processes(m.scheduler.address, trajectories=TRAJECTORIES)
        await until_said(m.running_steps, lambda steps: steps == SLOTS, START_S)
        held = await until_said(m.trajectories, lambda said: len(said) == TRAJECTORIES)
        opened = await tools.open("frozen_lake", {"seed": 1}, trajectory_id=held[0].trajectory_id)
        first.kill()
        if restarted:
            m.scheduler.kill()
            await start_service("treadle_scheduler", m.settings)
        await check_another_client_gets_tickets(m.scheduler.address)
        found = await until_said(
            m.trajectories,
            lambda said: all(each.closed_at.seconds for each in said if each.prompt_id == "p"),
            FREED_S,
        )
        assert {each.state for each in found if each.prompt_id == "p"} == {
            pb.TRAJECTORY_STATE_FAILED
        }
        assert {each.trajectory_id for each in held} <= {each.trajectory_id for each in found}
        await until_said(m.running_steps, lambda steps: steps == 0, FREED_S)

        with refused("SESSION_NOT_FOUND"):
            await until_said(
                lambda: tools.session(opened.session.session_id), lambda said: False, FREED_S
            )


@pytest.mark.timeout(240)
async def test_a_client_that_lives_keeps_its_trajectories_however_long_its_steps_and_waits_are(
    start_service: StartService, client_processes: Processes
) -> None:
    """Over three leases, with two steps that run and six that wait. Result: all stay open."""
    async with mesh(start_service, "treadle_tools", SLOTS, BUILTIN="frozen_lake") as m:
        client_processes(m.scheduler.address, trajectories=TRAJECTORIES)
        await until_said(m.running_steps, lambda steps: steps == SLOTS, START_S)
        await asyncio.sleep(3 * LEASE_S)
        assert len(await m.trajectories(open_only=True)) == TRAJECTORIES


async def test_a_client_that_stood_still_for_longer_than_its_lease_opens_its_job_again(
    start_service: StartService,
) -> None:
    """Its event loop is blocked. Result: what it had open was closed, and what it opens afterwards
    stays open."""
    scheduler = await start_service("treadle_scheduler", {"TREADLE_SCHEDULER_JOB_LEASE_S": "4"})
    async with treadle.Client(scheduler.address, retry=QUICK) as client:
        lost = await client.open(prompt_id="p", sample=0, prompt=[1])
        time.sleep(7.0)  # noqa: ASYNC251 - no task of this process runs meanwhile
        t = await client.open(prompt_id="p", sample=1, prompt=[1])
        with pytest.raises(treadle.TreadleError, match="TRAJECTORY_CLOSED"):
            await lost.close()
        await asyncio.sleep(6.0)
        await t.close()
