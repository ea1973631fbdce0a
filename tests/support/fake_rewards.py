"""A fake of the rewards of the tools service, which scores every trajectory at once."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
from support.fake_servicer import FakeServicer, Port, answer
from support.mesh_in_process import FakeMesh
from treadle.tools.v1 import rewards_pb2, rewards_pb2_grpc
from treadle.tools.v1.tools_pb2_grpc import add_ToolsServiceServicer_to_server

SCORE = 0.5


class FakeRewards(FakeServicer, rewards_pb2_grpc.RewardsServiceServicer):
    """Every reward is accepted and scored at once."""

    @answer
    def ScoreTrajectory(
        self, request: rewards_pb2.ScoreTrajectoryRequest
    ) -> rewards_pb2.ScoreTrajectoryResponse:
        accepted = rewards_pb2.Reward(
            reward_id=f"w-{request.trajectory_id}", state=rewards_pb2.REWARD_STATE_RUNNING
        )
        return rewards_pb2.ScoreTrajectoryResponse(reward=accepted)

    @answer
    def ListRewards(
        self, request: rewards_pb2.ListRewardsRequest
    ) -> rewards_pb2.ListRewardsResponse:
        rewards = [("exact_match", False), ("graded", True)]
        return rewards_pb2.ListRewardsResponse(
            rewards=[rewards_pb2.RewardFunction(name=name, serverless=far) for name, far in rewards]
        )

    async def WatchRewards(
        self, request: rewards_pb2.WatchRewardsRequest, context: Any
    ) -> AsyncIterator[rewards_pb2.WatchRewardsResponse]:
        for reward_id in request.reward_ids:
            done = rewards_pb2.Reward(
                reward_id=reward_id, state=rewards_pb2.REWARD_STATE_DONE, score=SCORE
            )
            yield rewards_pb2.WatchRewardsResponse(reward=done)


@asynccontextmanager
async def fake_rewards(mesh: FakeMesh) -> AsyncIterator[FakeRewards]:
    """The mesh's tools service, with rewards too."""

    def add(fake: Any, server: grpc.aio.Server) -> None:
        add_ToolsServiceServicer_to_server(mesh.tools, server)
        rewards_pb2_grpc.add_RewardsServiceServicer_to_server(fake, server)

    fake = FakeRewards()  # type: ignore[abstract]
    async with Port(add, fake) as address:
        mesh.scheduler.directory.tools_address = address
        yield fake
