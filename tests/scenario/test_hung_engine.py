"""An engine that hangs takes no trajectory: sidecars and a scheduler as processes, and two fakes of SGLang."""

import asyncio

import treadle
from support.conditions import until
from support.fake_sglang import FakeSglang, expected, fake_sglang
from support.mesh_in_process import QUICK, generate
from support.processes import ServiceProcess, StartService
from support.scheduler import scheduler_client

PROMPT = list(range(10, 40))
TOKENS = 200


async def start_sidecar(start: StartService, engine_id: str, engine: FakeSglang, scheduler: str) -> ServiceProcess:
    own = {"ENGINE_ID": engine_id, "ENGINE_URL": engine.url, "SCHEDULER": scheduler, "ENGINE_STALL_S": "2"}
    own |= {"DECODE_BASE_S": "0.01", "PREFILL_TOKENS_PER_S": "10000"}
    return await start("treadle_sidecar", {f"TREADLE_SIDECAR_{name}": value for name, value in own.items()})


async def test_trajectories_leave_an_engine_that_hangs_and_new_ones_go_elsewhere_until_it_goes_on(
    start_service: StartService,
) -> None:
    """Six trajectories run on two engines, one of which then hangs but answers all polls. Result: its trajectories go
    on where the other's are, without a lost token; six new ones go there too; once it goes on, it is used again."""
    scheduler = await start_service("treadle_scheduler")
    async with (
        fake_sglang(token_s=0.01) as hangs,
        fake_sglang(token_s=0.01) as works,
        scheduler_client(scheduler.address) as control,
        treadle.Client(scheduler.address, retry=QUICK) as client,
    ):
        for engine_id, engine in (("hangs", hangs), ("works", works)):
            await start_sidecar(start_service, engine_id, engine, scheduler.address)
        await control.until_registered(2)

        async def run(name: str) -> treadle.Trajectory:
            trajectory = await client.open(prompt_id=name, sample=0, prompt=PROMPT)
            assert await generate(trajectory, TOKENS, temperature=0.0) == expected(PROMPT, TOKENS)
            return trajectory

        first = [asyncio.create_task(run(f"first-{index}")) for index in range(6)]
        await until(lambda: hangs.running and works.running)
        hangs.hang()
        moved = [trajectory.steps[0].engine_ids for trajectory in await asyncio.gather(*first)]
        assert ("hangs", "works") in moved
        assert {engine_ids[-1] for engine_ids in moved} == {"works"}

        assert [info.engine_id for info in await control.engines()] == ["works"]
        new = await asyncio.gather(*(run(f"new-{index}") for index in range(6)))
        assert {trajectory.steps[0].engine_ids for trajectory in new} == {("works",)}

        hangs.go_on()
        await control.until_registered(2)
        await works.stop()
        assert (await run("last")).steps[0].engine_ids[-1] == "hangs"
