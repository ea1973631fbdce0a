"""Between the contract's messages and the pool's nouns."""

import json

from treadle.telemetry.v1 import facts_pb2
from treadle.tools.v1 import rewards_pb2 as pb
from treadle.tools.v1 import tools_pb2
from treadle_runtime.bus import Bus
from treadle_runtime.facts import make_fact

from treadle_tools.api.convert import duration, limits_message, text, timestamp
from treadle_tools.rewards.reward import Reward, State
from treadle_tools.tool import Tool

STATES = {
    State.PENDING: pb.REWARD_STATE_PENDING,
    State.RUNNING: pb.REWARD_STATE_RUNNING,
    State.DONE: pb.REWARD_STATE_DONE,
    State.FAILED: pb.REWARD_STATE_FAILED,
    State.CANCELLED: pb.REWARD_STATE_CANCELLED,
}


def function_message(tool: Tool) -> pb.RewardFunction:
    """The contract's form."""
    return pb.RewardFunction(
        name=tool.name,
        description=tool.description,
        arguments_schema_json=json.dumps(tool.arguments_schema),
        limits=limits_message(tool.limits),
    )


def reward_message(reward: Reward) -> pb.Reward:
    """The contract's form."""
    return pb.Reward(
        reward_id=reward.reward_id,
        trajectory_id=reward.trajectory_id,
        job=reward.job,
        reward=reward.name,
        state=STATES[reward.state],
        score=reward.score,
        output=text(reward.output),
        data_json=text(reward.data_json),
        error=text(" ".join(reward.error.split())),
        tries=reward.tries,
        timing=timing_message(reward),
        accepted_at=timestamp(reward.accepted_at),
        ended_at=timestamp(reward.ended_at) if reward.ended else None,
        revision=reward.revision,
    )


def timing_message(reward: Reward) -> tools_pb2.ActionTiming:
    """The contract's form."""
    return tools_pb2.ActionTiming(
        queue=duration(reward.queue_s), overhead=duration(reward.overhead_s), execution=duration(reward.execution_s)
    )


class RewardFacts:
    """Tells rewards that have ended. source: service and instance."""

    def __init__(self, bus: Bus, source: str) -> None:
        self._bus = bus
        self._source = source

    async def ended(self, reward: Reward) -> None:
        """Publish reward_ended, under the same id each time."""
        ended = facts_pb2.RewardEnded(
            reward_id=reward.reward_id,
            trajectory_id=reward.trajectory_id,
            job=reward.job,
            reward=reward.name,
            state=STATES[reward.state],
            score=reward.score,
            timing=timing_message(reward),
        )
        fact = make_fact(self._source, reward_ended=ended)
        fact.fact_id = f"reward-ended-{reward.reward_id}"
        await self._bus.publish(fact)
