"""Steps run whatever the clocks of machines say: a scheduler and sidecars as processes, two fakes of
SGLang."""

import asyncio
import time
from typing import Any

import grpc.aio
import treadle
from support.conditions import until_said
from support.fake_sglang import expected
from support.mesh_in_process import QUICK
from support.mesh_of_processes import PROMPT, fleet
from support.processes import StartService

HOUR_S = 3600.0
TRAJECTORIES = 8


async def test_steps_run_beside_sidecars_and_after_schedulers_whose_clocks_are_wrong(
    start_service: StartService,
) -> None:
    """One sidecar's clock is an hour ahead, the other one's an hour behind. Then the scheduler is
    killed in the middle of trajectories, and the next ones start with their clock an hour behind,
    and ahead. Result: every trajectory is whole, and the scheduler knows how far the clocks are
    apart."""
    async with fleet(start_service, sidecars=0) as f:
        await f.start_sidecar(0, clock_ahead_s=HOUR_S)
        await f.start_sidecar(1, clock_ahead_s=-HOUR_S)
        await f.control.until_registered(2)
        await asyncio.gather(*(f.run(f"first-{index}") for index in range(TRAJECTORIES)))

        async def ahead_s() -> dict[str, float]:
            engines = await f.control.registered()
            return {
                each.info.engine_id: round(each.load.clock_ahead_s / HOUR_S) for each in engines
            }

        await until_said(ahead_s, lambda found: found == {"e0": 1, "e1": -1})
        assert "clock is not the scheduler's" in f.sidecars[0].stderr_text()
        for clock_ahead_s in (-HOUR_S, HOUR_S):
            f.sampling.clear()
            running = [
                asyncio.create_task(f.run(f"{clock_ahead_s}-{index}", 200))
                for index in range(TRAJECTORIES)
            ]
            await until_said(_soon(f), lambda count: count >= TRAJECTORIES // 2)
            await f.restart_scheduler(clock_ahead_s=clock_ahead_s)
            running += [
                asyncio.create_task(f.run(f"{clock_ahead_s}-new-{index}"))
                for index in range(TRAJECTORIES)
            ]
            await asyncio.gather(*running)


def _soon(f: Any) -> Any:
    async def sampling() -> int:
        return len(f.sampling)

    return sampling


class StandsStill(grpc.aio.UnaryStreamClientInterceptor):
    """Stops the whole process for a while, before it uses its first tickets."""

    def __init__(self, times: int, seconds: float) -> None:
        self.times, self._seconds = times, seconds

    async def intercept_unary_stream(self, continuation: Any, details: Any, request: Any) -> Any:
        if self.times:
            self.times -= 1
            time.sleep(self._seconds)  # noqa: ASYNC251 - nothing of this process goes on
        return await continuation(details, request)


async def test_a_client_that_stood_still_for_longer_than_its_tickets_live_gets_new_ones(
    start_service: StartService,
) -> None:
    async with fleet(start_service, scheduler_settings={"TICKET_TTL_S": "0.5"}) as f:
        still = StandsStill(3, 1.0)
        async with treadle.Client(f.scheduler.address, retry=QUICK, interceptors=[still]) as client:

            async def run(index: int) -> list[int]:
                trajectory = await client.open(prompt_id=f"p{index}", sample=0, prompt=PROMPT)
                sampling = treadle.Sampling(max_new_tokens=20, temperature=0.0)
                async for _ in trajectory.generate(sampling):
                    pass
                return trajectory.steps[0].token_ids

            found = await asyncio.gather(*(run(index) for index in range(TRAJECTORIES)))
        assert found == [expected(PROMPT, 20)] * TRAJECTORIES
        assert not still.times
