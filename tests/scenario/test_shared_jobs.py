"""Two jobs on one mesh of processes: a scheduler and two sidecars, in front of fake engines (ADR
0039)."""

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import pytest
import treadle
from support.conditions import until_said
from support.fake_sglang import fake_sglang
from support.mesh_in_process import QUICK, generate
from support.processes import StartService
from support.rpc import refused
from support.scheduler import SchedulerClient, scheduler_client
from treadle.scheduler.v1 import scheduler_pb2 as pb

SLOTS = 4
TOKEN_S = 0.02
LOADED_S = 20.0  # for which tokens are counted
FCFS = treadle.Policy(ordering="fcfs", placement="least_load", migrate=False)


@pytest.fixture
async def mesh(start_service: StartService) -> AsyncIterator[SchedulerClient]:
    """Two engines of four slots each."""
    scheduler = await start_service("treadle_scheduler", {})
    async with AsyncExitStack() as stack:
        for engine_id in ("e0", "e1"):
            engine = await stack.enter_async_context(fake_sglang(token_s=TOKEN_S))
            settings = {
                "ENGINE_ID": engine_id,
                "ENGINE_URL": engine.url,
                "SCHEDULER": scheduler.address,
            }
            settings |= {"SLOTS": str(SLOTS), "PROBE_S": "0"}
            await start_service(
                "treadle_sidecar",
                {f"TREADLE_SIDECAR_{key}": each for key, each in settings.items()},
            )
        client = await stack.enter_async_context(scheduler_client(scheduler.address))
        await client.until_registered(2)
        yield client


async def jobs(mesh: SchedulerClient) -> dict[str, pb.JobUse]:
    return {use.job: use for use in (await mesh.call("ListJobs", pb.ListJobsRequest())).jobs}


async def flood(client: treadle.Client, name: str, trajectories: int, tokens: Counter[str]) -> None:
    """Keep so many trajectories of three turns open until this is cancelled; count what is
    sampled."""

    async def go_on(sample: int) -> None:
        while True:
            async with await client.open(
                prompt_id=f"{name}{sample}", sample=sample, prompt=[5, 6, 7]
            ) as t:
                for _ in range(3):
                    async for chunk in t.generate(
                        treadle.Sampling(max_new_tokens=20, ignore_eos=True)
                    ):
                        tokens[name] += len(chunk.token_ids)

    async with asyncio.TaskGroup() as group:
        for sample in range(trajectories):
            group.create_task(go_on(sample))


@pytest.mark.timeout(240)
async def test_two_jobs_get_tokens_in_the_proportion_of_their_weights_each_under_its_own_policy(
    mesh: SchedulerClient,
) -> None:
    """Both have more open than fits. Result: three tokens of one for each of the other; then the
    other gets all."""
    tokens: Counter[str] = Counter()
    async with (
        treadle.Client(mesh.address, retry=QUICK, job="heavy", weight=3.0) as heavy,
        treadle.Client(mesh.address, retry=QUICK, job="light", policy=FCFS) as light,
    ):
        floods = {
            name: asyncio.create_task(flood(client, name, 24, tokens))
            for name, client in (("heavy", heavy), ("light", light))
        }
        await until_said(
            lambda: jobs(mesh),
            lambda said: len(said) == 2 and all(each.live_tickets > 1 for each in said.values()),
        )
        before = Counter(tokens)
        await asyncio.sleep(LOADED_S)
        got = tokens - before
        # Processes on a full machine: the simulated mesh is what holds the proportion to 10%
        # (test_sim_shared_mesh.py).
        assert got["heavy"] / got["light"] == pytest.approx(3.0, rel=0.3)
        uses = await jobs(mesh)
        assert {name: (use.weight, use.share, use.clients) for name, use in uses.items()} == {
            "heavy": (3.0, 0.75, 1),
            "light": (1.0, 0.25, 1),
        }
        assert all(use.open_trajectories > 0 and use.live_tickets > 0 for use in uses.values())
        floods["heavy"].cancel()
        await until_said(lambda: jobs(mesh), lambda said: said["light"].share == 1.0)
        before = Counter(tokens)
        await asyncio.sleep(LOADED_S / 4)
        assert (tokens - before)["light"] > 1.5 * got["light"] / 4, (
            "nothing is kept for a job that has nothing to do"
        )
        floods["light"].cancel()
        for each in floods.values():
            with contextlib.suppress(asyncio.CancelledError):
                await each


async def test_a_client_that_resumes_a_job_keeps_its_weight_and_a_weight_without_a_name_is_refused(
    mesh: SchedulerClient,
) -> None:
    async with treadle.Client(mesh.address, job="run", weight=3.0, resume=True) as first:
        await first.open(prompt_id="p", sample=0, prompt=[1])
        async with treadle.Client(mesh.address, job="run", resume=True) as second:
            async with await second.open(prompt_id="p", sample=0, prompt=[1]) as t:
                assert len(await generate(t, 4)) == 4
            assert (await jobs(mesh))["run"].weight == 3.0
    with refused("INVALID_ARGUMENT"):
        await mesh.call("OpenJob", pb.OpenJobRequest(request_id="r", weight=3.0))
    with pytest.raises(ValueError, match="weight needs job="):
        treadle.Client(mesh.address, weight=3.0)
    with pytest.raises(ValueError, match="weight must be a finite number > 0, is -1"):
        treadle.Client(mesh.address, job="run", weight=-1.0)
    with pytest.raises(
        ValueError, match=r"policy.ordering must be one of progressive, .* is 'best'"
    ):
        treadle.Client(mesh.address, policy=treadle.Policy(ordering="best"))
