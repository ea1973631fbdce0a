"""What docs/operations.md tells an operator to do: restart everything one after the other, back up,
and restore."""

import asyncio
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc.aio
import pytest
import treadle
from support.fake_sglang import expected
from support.finished_trajectories import RolloutCalls, finished, members
from support.nats_server import NatsServer
from support.scheduler import scheduler
from support.secure_mesh import ENGINES, SecureMesh, secure_mesh
from treadle_rollout.config import RolloutSettings
from treadle_rollout.wire import wire as wire_rollout
from treadle_runtime.server import serving

PROMPTS, SAMPLES, TURNS, TOKENS = 6, 4, 3, 40
STATELESS_FIRST = ("placement", "predictor", "migrator", "rollout", "tools", "scheduler")


@asynccontextmanager
async def rollout_calls(nats_url: str) -> AsyncIterator[RolloutCalls]:
    settings = RolloutSettings(nats_url=nats_url, listen="127.0.0.1:0")
    async with (
        serving(settings, wire_rollout) as served,
        grpc.aio.insecure_channel(served.address) as channel,
    ):
        yield RolloutCalls(channel)


@pytest.fixture
async def mesh(tmp_path: Path) -> AsyncIterator[SecureMesh]:
    async with secure_mesh(tmp_path, token_s=0.01) as mesh:
        yield mesh


# eight processes start one after the other, with a worker of other tests beside them
@pytest.mark.timeout(400)
async def test_every_process_restarts_in_the_midst_of_a_rollout_and_nothing_is_lost(
    mesh: SecureMesh,
) -> None:
    """As an upgrade does it: SIGTERM, its drain, and the next process at the same address."""
    restarted: list[str] = []
    rolling = asyncio.Event()

    async def agent(trajectory: treadle.Trajectory, prompt: treadle.Prompt) -> float:
        context = list(prompt.tokens)
        for _ in range(TURNS):
            async for _chunk in trajectory.generate(
                treadle.Sampling(max_new_tokens=TOKENS, temperature=0.0)
            ):
                pass
            assert trajectory.steps[-1].token_ids == expected(context, TOKENS)
            rolling.set()
            result = await trajectory.tool("python", {"code": "print(6 * 7)"})
            assert result.output.strip() == "42"
            context = list(trajectory.tokens)
        return 1.0

    async def restart() -> None:
        await rolling.wait()
        for name in STATELESS_FIRST:
            await mesh.restart(name)
            restarted.append(name)
        for engine_id in ENGINES:
            await mesh.restart(engine_id)
            restarted.append(engine_id)

    async with mesh.client("trainer-acme", job="upgrade") as client, asyncio.TaskGroup() as group:
        upgrade = group.create_task(restart())
        prompts = [treadle.Prompt(f"p{number}", [10 + number, 20, 30]) for number in range(PROMPTS)]
        rounds = 0
        while not upgrade.done() or not rounds:
            result = await client.rollout(prompts, agent, samples_per_prompt=SAMPLES)
            assert {(each.outcome, each.error) for each in result.trajectories} == {
                ("finished", "")
            }
            batch = await client.get_batch(result.rollout_id, max_groups=PROMPTS, weight_version=0)
            assert sorted(len(each.trajectories) for each in batch.groups) == [SAMPLES] * PROMPTS
            rounds += 1
    assert restarted == [*STATELESS_FIRST, *ENGINES]


async def test_a_copy_of_the_store_brings_everything_back_elsewhere(tmp_path: Path) -> None:
    """The services stop, then NATS; its store is copied, and another server starts from the
    copy."""
    before = NatsServer(tmp_path / "before")
    before.start()
    try:
        async with scheduler(before.url) as control, rollout_calls(before.url) as rollouts:
            await control.register("e0")
            opened = await control.open("t")
            await control.step("t", 0)
            await rollouts.create(prompts=2, samples=2)
            for index in range(2):
                await rollouts.submit(finished(f"t{index}", "p0", index))
            kept = await rollouts.get()
    finally:
        before.kill()
    shutil.copytree(tmp_path / "before" / "store", tmp_path / "after" / "store")
    shutil.rmtree(tmp_path / "before")
    after = NatsServer(tmp_path / "after")
    after.start()
    try:
        async with scheduler(after.url) as control, rollout_calls(after.url) as rollouts:
            again = await control.trajectory("t")
            assert (again.trajectory_id, again.next_turn, again.opened_at) == (
                "t",
                0,
                opened.opened_at,
            )
            assert await rollouts.get() == kept
            assert members(await rollouts.batch("b", 1)) == [["t0", "t1"]]
    finally:
        after.kill()
