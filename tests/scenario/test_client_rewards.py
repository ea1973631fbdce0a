"""The client's rewards against real services: a rollout whose scores come after its trajectories
have ended."""

import asyncio

import treadle
from support.fake_servicer import Port
from support.mesh_in_process import WAIT_S, fake_mesh, generate
from support.processes import StartService
from treadle.tools.v1 import rewards_pb2, rewards_pb2_grpc

SAMPLING = treadle.Sampling(max_new_tokens=4)
RIGHT = {"answer": "4", "expected": "4"}


async def start_rewards(start_service: StartService) -> str:
    settings = {"TREADLE_TOOLS_BUILTIN": "", "TREADLE_TOOLS_REWARDS": "exact_match,python_tests"}
    return (await start_service("treadle_tools", settings)).address


async def test_a_rollout_hands_in_what_the_service_scored(start_service: StartService) -> None:
    """WHEN    agents return pending rewards, one of them of a function that refuses its arguments
    Result: each trajectory has its score, also where the trainer takes it; the refused one has
    failed and said why"""
    tools = await start_rewards(start_service)

    async def agent(
        trajectory: treadle.Trajectory, prompt: treadle.Prompt
    ) -> treadle.PendingReward:
        await generate(trajectory, 4)
        if prompt.id == "p1" and trajectory.sample == 1:
            return await trajectory.score(
                "python_tests", {"files": {"/etc/it.py": ""}, "tests": {"test_it.py": ""}}
            )
        return await trajectory.score(
            "exact_match", {"answer": str(trajectory.sample), "expected": "1"}
        )

    async with fake_mesh() as mesh:
        mesh.scheduler.directory.tools_address = tools
        async with mesh.client(job="training-run") as client:
            prompts = [treadle.Prompt(f"p{n}", [n, n + 1]) for n in range(2)]
            result = await client.rollout(prompts, agent, samples_per_prompt=2)
        assert [(t.reward, t.outcome) for t in result.trajectories] == [
            (0.0, "finished"),
            (1.0, "finished"),
            (0.0, "finished"),
            (None, "failed"),
        ]
        assert "NO_SCORE" in result.trajectories[3].error
        assert not mesh.scheduler.open_trajectories
        handed_in = {
            r.trajectory.trajectory_id: r.trajectory
            for r in mesh.rollout.requests("SubmitTrajectory")
        }
        for t in result.trajectories[:3]:
            assert handed_in[t.trajectory_id].reward == t.reward
        assert handed_in[result.trajectories[3].trajectory_id].failed


async def test_a_reward_waited_for_outlives_the_service_that_took_it(
    start_service: StartService,
) -> None:
    """WHEN the service is away while its caller waits. Result: the caller gets the score from the
    next one."""
    fake = FakeRewards()  # type: ignore[abstract]
    port = Port(rewards_pb2_grpc.add_RewardsServiceServicer_to_server, fake)
    async with fake_mesh() as mesh, mesh.client() as client:
        mesh.scheduler.directory.tools_address = port.address
        await port.start()
        pending = await client.score("t-1", "exact_match", RIGHT)
        waiting = asyncio.create_task(pending.result())
        await asyncio.sleep(0.2)
        await port.stop()
        await asyncio.sleep(0.2)
        FakeRewards.state = rewards_pb2.REWARD_STATE_DONE
        await port.start()
        async with asyncio.timeout(WAIT_S):
            result = await waiting
        assert (result.state, result.score) == ("done", 0.5)
        await port.stop()


class FakeRewards(rewards_pb2_grpc.RewardsServiceServicer):
    """One reward, whose state outlives the server."""

    state = rewards_pb2.REWARD_STATE_RUNNING

    def _reward(self) -> rewards_pb2.Reward:
        score = 0.5 if self.state == rewards_pb2.REWARD_STATE_DONE else None
        return rewards_pb2.Reward(reward_id="w-1", state=self.state, score=score)

    async def ScoreTrajectory(self, request, context):  # type: ignore[no-untyped-def]
        return rewards_pb2.ScoreTrajectoryResponse(reward=self._reward())

    async def WatchRewards(self, request, context):  # type: ignore[no-untyped-def]
        yield rewards_pb2.WatchRewardsResponse(reward=self._reward())
        if self.state == rewards_pb2.REWARD_STATE_RUNNING:
            await asyncio.Event().wait()
