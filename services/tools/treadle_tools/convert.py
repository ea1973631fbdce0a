"""Convert between the messages of the contract and the service's values.

Only this module knows both.
"""

import json
import math
from collections.abc import Mapping
from typing import Any

from treadle.telemetry.v1 import facts_pb2
from treadle.tools.v1 import rewards_pb2
from treadle.tools.v1 import tools_pb2 as pb
from treadle_core.tools.dispatcher import Dispatcher
from treadle_core.tools.providers import BasicManager
from treadle_runtime.bus import Bus
from treadle_runtime.facts import make_fact
from treadle_runtime.fields import duration, number_of, require, seconds, timestamp

from treadle_tools.rewards.reward import Reward
from treadle_tools.sessions import Session
from treadle_tools.tool import Kind, Limits, Result, Tool


def limits_of(message: pb.Limits, most: Limits) -> Limits:
    """Return the limits that a caller requests, where 0 means the tool's own.

    Raises InvalidArgument for a negative or too large one.
    """
    return Limits(
        cpu_cores=int(_limit("cpu_cores", message.cpu_cores, most.cpu_cores)),
        memory_bytes=int(_limit("memory_bytes", message.memory_bytes, most.memory_bytes)),
        wall_s=_limit("wall_time", seconds(message.wall_time), most.wall_s),
        output_bytes=int(_limit("output_bytes", message.output_bytes, most.output_bytes)),
    )


def _limit(name: str, asked: float, most: float) -> float:
    require(
        0 <= asked <= most,
        f"limits.{name}",
        f"must be from 0 (the tool's own) to {most:g}, is {asked:g}",
    )
    return asked or most


def limits_message(limits: Limits) -> pb.Limits:
    return pb.Limits(
        cpu_cores=limits.cpu_cores,
        memory_bytes=limits.memory_bytes,
        wall_time=duration(limits.wall_s),
        output_bytes=limits.output_bytes,
    )


def tool_message(tool: Tool) -> pb.Tool:
    environment = tool.kind is Kind.ENVIRONMENT
    return pb.Tool(
        name=tool.name,
        kind=number_of(tool.kind, pb.ToolKind),
        description=tool.description,
        arguments_schema_json=json.dumps(tool.arguments_schema),
        limits=limits_message(tool.limits),
        open_arguments_schema_json=json.dumps(tool.open_schema) if environment else "",
    )


def session_message(session: Session) -> pb.Session:
    return pb.Session(
        session_id=session.session_id,
        tool=session.tool.name,
        trajectory_id=session.trajectory_id,
        steps=session.steps,
        done=bool(session.ended),
        opened_at=timestamp(session.opened_at),
        last_used_at=timestamp(session.last_used_at),
    )


def resources_message(
    dispatcher: Dispatcher, providers: Mapping[str, BasicManager], now_s: float
) -> pb.GetResourcesResponse:
    waiting = dispatcher.waiting_for()
    return pb.GetResourcesResponse(
        resources=[
            pb.Resource(
                dimension=each.dimension,
                capacity=each.capacity,
                held=each.held,
                free=each.free,
                waiting=waiting[each.dimension],
            )
            for each in dispatcher.resources.usage(now_s)
        ],
        providers=[
            pb.Provider(
                name=name,
                breaker=number_of(each.state(now_s), pb.BreakerState),
                rests=duration(each.rests_s(now_s)),
            )
            for name, each in providers.items()
        ],
        actions_waiting=len(dispatcher),
        actions_running=dispatcher.running,
    )


def result_message(result: Result) -> pb.ToolResult:
    message = pb.ToolResult(
        status=number_of(result.status, pb.ResultStatus),
        output=text(result.output),
        output_truncated=result.truncated,
        error=text(" ".join(result.error.split())),
        done=result.done,
        data_json=text(result.data_json),
        timing=timing_message(result),
    )
    if result.reward is not None:
        message.reward = result.reward if math.isfinite(result.reward) else 0.0
    return message


def timing_message(times: Result | Reward) -> pb.ActionTiming:
    return pb.ActionTiming(
        queue=duration(times.queue_s),
        overhead=duration(times.overhead_s),
        execution=duration(times.execution_s),
    )


def text(foreign: str) -> str:
    """Return a string that protobuf takes, since a tool's output may hold lone surrogates."""
    return foreign.encode("utf-8", "backslashreplace").decode("utf-8")


def function_message(tool: Tool) -> rewards_pb2.RewardFunction:
    return rewards_pb2.RewardFunction(
        name=tool.name,
        description=tool.description,
        arguments_schema_json=json.dumps(tool.arguments_schema),
        limits=limits_message(tool.limits),
        serverless=tool.remote is not None,
    )


def _facts_of(reward: Reward) -> dict[str, Any]:
    """Return the fields that a Reward and a RewardEnded share."""
    return {
        **{name: getattr(reward, name) for name in ("reward_id", "trajectory_id", "job", "score")},
        "reward": reward.name,
        "state": number_of(reward.state, rewards_pb2.RewardState),
        "timing": timing_message(reward),
    }


def reward_message(reward: Reward) -> rewards_pb2.Reward:
    return rewards_pb2.Reward(
        **_facts_of(reward),
        output=text(reward.output),
        data_json=text(reward.data_json),
        error=text(" ".join(reward.error.split())),
        tries=reward.tries,
        accepted_at=timestamp(reward.accepted_at),
        ended_at=timestamp(reward.ended_at) if reward.ended else None,
        revision=reward.revision,
    )


class FactPublisher:
    """Publishes facts of actions and rewards. source: service and instance."""

    def __init__(self, bus: Bus, source: str) -> None:
        self._bus = bus
        self._source = source

    async def started(self, trajectory_id: str, tool: str, expected_s: float) -> None:
        """Publish tool_started."""
        started = facts_pb2.ToolStarted(
            trajectory_id=trajectory_id, tool=tool, expected_time=duration(expected_s)
        )
        await self._bus.publish(make_fact(self._source, tool_started=started))

    async def finished(self, trajectory_id: str, tool: str, result: Result) -> None:
        """Publish tool_finished."""
        finished = facts_pb2.ToolFinished(
            trajectory_id=trajectory_id,
            tool=tool,
            status=number_of(result.status, pb.ResultStatus),
            timing=timing_message(result),
        )
        await self._bus.publish(make_fact(self._source, tool_finished=finished))

    async def reward_ended(self, reward: Reward) -> None:
        """Publish reward_ended, under the same id each time."""
        fact = make_fact(self._source, reward_ended=facts_pb2.RewardEnded(**_facts_of(reward)))
        fact.fact_id = f"reward-ended-{reward.reward_id}"
        await self._bus.publish(fact)
