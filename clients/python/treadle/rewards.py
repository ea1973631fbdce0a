"""Request rewards that the mesh computes, and wait for them while other trajectories run.

A request returns as soon as the tools service has accepted it; the service scores each accepted
request, also after a restart, and waiting continues through one.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import grpc

from treadle.connection import Mesh, TrajectoryTrace, request_id
from treadle.errors import TreadleError, error_from, refused
from treadle.tools.v1 import rewards_pb2
from treadle.types import seconds

_STATES: dict[int, Literal["done", "failed", "cancelled"]] = {
    rewards_pb2.REWARD_STATE_DONE: "done",
    rewards_pb2.REWARD_STATE_FAILED: "failed",
    rewards_pb2.REWARD_STATE_CANCELLED: "cancelled",
}


@dataclass(frozen=True)
class RewardResult:
    """Result of a reward that has ended. score: None unless `state` is "done". output: what the
    function printed or the judge wrote.

    data: machine-readable result, None where there is none. queue_s: from acceptance to its last
    try; overhead_s and execution_s: of that try.
    """

    reward_id: str
    state: Literal["done", "failed", "cancelled"]
    score: float | None
    output: str
    data: Any
    error: str
    queue_s: float
    overhead_s: float
    execution_s: float


class PendingReward:
    """A reward that was accepted. An agent of Client.rollout may return it in place of a number:
    the trajectory is closed at once, and submitted when the score is there."""

    def __init__(self, mesh: Mesh, reward_id: str) -> None:
        self.reward_id = reward_id
        self._mesh = mesh

    async def result(self, timeout_s: float | None = None) -> RewardResult:
        """Wait for the result and return it. Raises TreadleError NOT_FOUND REWARD_NOT_FOUND long
        afterwards, DEADLINE_EXCEEDED.

        timeout_s: default timeouts.reward_s.
        """
        stub = await self._mesh.rewards()
        request = rewards_pb2.WatchRewardsRequest(reward_ids=[self.reward_id])
        backoff = self._mesh.backoff(timeout_s or self._mesh.timeouts.reward_s)
        while True:
            try:
                async for answer in stub.WatchRewards(
                    request, timeout=max(backoff.remaining_s, 0.001)
                ):
                    backoff.restart()
                    if answer.reward.state in _STATES:
                        return _result_of(answer.reward)
                error = TreadleError(
                    grpc.StatusCode.UNAVAILABLE, "the watch ended before the reward did"
                )
            except grpc.aio.AioRpcError as failure:
                error = error_from(failure)
            if not error.retryable:
                raise error
            await backoff.wait(error, error.retry_after_s)

    async def cancel(self) -> None:
        """Cancel the reward. A reward that has ended stays as it is."""
        stub = await self._mesh.rewards()
        request = rewards_pb2.CancelRewardRequest(request_id=request_id(), reward_id=self.reward_id)
        await self._mesh.call(stub.CancelReward, request, self._mesh.timeouts.control_s)


async def request_reward(
    mesh: Mesh,
    trajectory_id: str,
    reward: str,
    arguments: Mapping[str, Any],
    job: str,
    trace: TrajectoryTrace | None = None,
) -> PendingReward:
    """Request a reward; see Client.score. Raises TypeError for arguments that are not JSON."""
    request = rewards_pb2.ScoreTrajectoryRequest(
        request_id=request_id(),
        trajectory_id=trajectory_id,
        job=job,
        reward=reward,
        arguments_json=json.dumps(dict(arguments)),
    )
    stub = await mesh.rewards()
    accepted = await mesh.call(stub.ScoreTrajectory, request, mesh.timeouts.control_s, trace)
    return PendingReward(mesh, accepted.reward.reward_id)


async def require_serverless(mesh: Mesh, reward: str) -> None:
    """Raise TreadleError where the mesh has no such reward, or computes it in sandboxes of the
    tools service."""
    stub = await mesh.rewards()
    listed = await mesh.call(
        stub.ListRewards, rewards_pb2.ListRewardsRequest(), mesh.timeouts.control_s
    )
    by_name = {each.name: each for each in listed.rewards}
    if reward not in by_name:
        message = (
            f"{reward} is no reward of this mesh; it has {', '.join(sorted(by_name)) or 'none'}"
        )
        raise TreadleError(
            grpc.StatusCode.NOT_FOUND, message, "REWARD_FUNCTION_NOT_FOUND", "client.treadle"
        )
    if not by_name[reward].serverless:
        why = (
            "runs in sandboxes of the tools service: declare it in FUNCTIONS, or without "
            "serverless=True"
        )
        raise refused("REWARD_NOT_SERVERLESS", f"{reward} {why}")


def _result_of(message: rewards_pb2.Reward) -> RewardResult:
    return RewardResult(
        reward_id=message.reward_id,
        state=_STATES[message.state],
        score=message.score if message.HasField("score") else None,
        output=message.output,
        data=json.loads(message.data_json) if message.data_json else None,
        error=message.error,
        queue_s=seconds(message.timing.queue),
        overhead_s=seconds(message.timing.overhead),
        execution_s=seconds(message.timing.execution),
    )
