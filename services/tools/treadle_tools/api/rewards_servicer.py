"""Serve RewardsService: check the request, convert it, ask the pool, convert the answer."""

import time
import uuid
from collections.abc import AsyncIterator
from typing import Any

import grpc.aio
from treadle.tools.v1 import rewards_pb2 as pb
from treadle.tools.v1 import rewards_pb2_grpc
from treadle_runtime.errors import InvalidArgument, identifier, require
from treadle_runtime.idempotency import RequestRecords, answered_once

from treadle_tools.api import convert
from treadle_tools.registry import Registry
from treadle_tools.rewards.pool import RewardPool
from treadle_tools.rewards.reward import DEFAULT_JOB, Reward

Context = grpc.aio.ServicerContext[Any, Any]

MOST_WATCHED = 4096  # ids of one watch; a batch of rollouts has hundreds


class RewardsServicer(rewards_pb2_grpc.RewardsServiceServicer):
    """The RPCs of protos/treadle/tools/v1/rewards.proto."""

    def __init__(self, registry: Registry, pool: RewardPool, records: RequestRecords) -> None:
        self._registry = registry
        self._pool = pool
        self.records = records

    async def ListRewards(self, request: pb.ListRewardsRequest, context: Context) -> pb.ListRewardsResponse:
        return pb.ListRewardsResponse(rewards=[convert.function_message(tool) for tool in self._registry.rewards])

    @answered_once
    async def ScoreTrajectory(self, request: pb.ScoreTrajectoryRequest, context: Context) -> pb.ScoreTrajectoryResponse:
        tool = self._registry.reward(request.reward)
        reward = Reward(
            # Derived, not drawn: a repeat whose first answer was not recorded must find what it made.
            reward_id=f"w-{uuid.uuid5(uuid.NAMESPACE_OID, request.request_id).hex}",
            trajectory_id=identifier("trajectory_id", request.trajectory_id),
            job=identifier("job", request.job or DEFAULT_JOB),
            name=tool.name,
            accepted_at=time.time(),
        )
        accepted = await self._pool.accept(reward, request.arguments_json)
        if (accepted.trajectory_id, accepted.job, accepted.name) != (reward.trajectory_id, reward.job, reward.name):
            raise InvalidArgument(
                "request_id", "was used with a different request; mint a new id for each logical call"
            )
        return pb.ScoreTrajectoryResponse(reward=convert.reward_message(accepted))

    async def GetReward(self, request: pb.GetRewardRequest, context: Context) -> pb.GetRewardResponse:
        reward = self._pool.get(identifier("reward_id", request.reward_id))
        return pb.GetRewardResponse(reward=convert.reward_message(reward))

    async def WatchRewards(
        self, request: pb.WatchRewardsRequest, context: Context
    ) -> AsyncIterator[pb.WatchRewardsResponse]:
        async for reward in self._watch(request):
            yield pb.WatchRewardsResponse(reward=convert.reward_message(reward))

    def _watch(self, request: pb.WatchRewardsRequest) -> AsyncIterator[Reward]:
        named = [bool(request.reward_ids), bool(request.job), bool(request.trajectory_id)]
        require(sum(named) == 1, "reward_ids", "name rewards, or a job, or a trajectory: exactly one of the three")
        require(len(request.reward_ids) <= MOST_WATCHED, "reward_ids", f"must be at most {MOST_WATCHED}")
        for reward_id in request.reward_ids:
            self._pool.get(identifier("reward_ids", reward_id))
        if request.reward_ids:
            return self._pool.table.watch_until_ended(request.reward_ids)
        if request.job:
            job = identifier("job", request.job)
            return self._pool.table.watch(lambda reward: reward.job == job)
        trajectory_id = identifier("trajectory_id", request.trajectory_id)
        return self._pool.table.watch(lambda reward: reward.trajectory_id == trajectory_id)

    @answered_once
    async def CancelReward(self, request: pb.CancelRewardRequest, context: Context) -> pb.CancelRewardResponse:
        reward = await self._pool.cancel(identifier("reward_id", request.reward_id))
        return pb.CancelRewardResponse(reward=convert.reward_message(reward))
