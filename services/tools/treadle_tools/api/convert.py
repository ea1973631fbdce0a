"""Between the contract's messages and the service's nouns. Only this module knows both."""

import json
import math

from google.protobuf.duration_pb2 import Duration
from google.protobuf.timestamp_pb2 import Timestamp
from treadle.telemetry.v1 import facts_pb2
from treadle.tools.v1 import tools_pb2 as pb
from treadle_core.tools.providers import State
from treadle_runtime.bus import Bus
from treadle_runtime.errors import require
from treadle_runtime.facts import make_fact

from treadle_tools.scheduling.standing import Standing
from treadle_tools.sessions.session import Session
from treadle_tools.sessions.snapshots import Snapshot
from treadle_tools.tool import Kind, Limits, Result, Status, Tool

KINDS = {Kind.STATELESS: pb.TOOL_KIND_STATELESS, Kind.ENVIRONMENT: pb.TOOL_KIND_ENVIRONMENT}
STATUSES = {
    Status.OK: pb.RESULT_STATUS_OK,
    Status.TOOL_ERROR: pb.RESULT_STATUS_TOOL_ERROR,
    Status.TIMED_OUT: pb.RESULT_STATUS_TIMED_OUT,
    Status.OUT_OF_MEMORY: pb.RESULT_STATUS_OUT_OF_MEMORY,
    Status.CRASHED: pb.RESULT_STATUS_CRASHED,
}

BREAKERS = {
    State.CLOSED: pb.BREAKER_STATE_CLOSED,
    State.OPEN: pb.BREAKER_STATE_OPEN,
    State.HALF_OPEN: pb.BREAKER_STATE_HALF_OPEN,
}


def limits_of(message: pb.Limits, most: Limits) -> Limits:
    """What a caller asks for, 0 meaning the tool's own. Raises InvalidArgument for a negative or too large one."""
    wall_s = message.wall_time.seconds + message.wall_time.nanos / 1e9
    return Limits(
        cpu_cores=int(_limit("cpu_cores", message.cpu_cores, most.cpu_cores)),
        memory_bytes=int(_limit("memory_bytes", message.memory_bytes, most.memory_bytes)),
        wall_s=_limit("wall_time", wall_s, most.wall_s),
        output_bytes=int(_limit("output_bytes", message.output_bytes, most.output_bytes)),
    )


def _limit(name: str, asked: float, most: float) -> float:
    require(0 <= asked <= most, f"limits.{name}", f"must be from 0 (the tool's own) to {most:g}, is {asked:g}")
    return asked or most


def limits_message(limits: Limits) -> pb.Limits:
    """The contract's form."""
    return pb.Limits(
        cpu_cores=limits.cpu_cores,
        memory_bytes=limits.memory_bytes,
        wall_time=duration(limits.wall_s),
        output_bytes=limits.output_bytes,
    )


def tool_message(tool: Tool) -> pb.Tool:
    """The contract's form."""
    environment = tool.kind is Kind.ENVIRONMENT
    return pb.Tool(
        name=tool.name,
        kind=KINDS[tool.kind],
        description=tool.description,
        arguments_schema_json=json.dumps(tool.arguments_schema),
        limits=limits_message(tool.limits),
        open_arguments_schema_json=json.dumps(tool.open_schema) if environment else "",
    )


def session_message(session: Session) -> pb.Session:
    """The contract's form."""
    return pb.Session(
        session_id=session.session_id,
        tool=session.tool.name,
        trajectory_id=session.trajectory_id,
        steps=session.steps,
        done=bool(session.ended),
        opened_at=timestamp(session.opened_at),
        last_used_at=timestamp(session.last_used_at),
    )


def resources_message(standing: Standing) -> pb.GetResourcesResponse:
    """The contract's form."""
    resources = [
        pb.Resource(
            dimension=each.dimension,
            capacity=each.capacity,
            held=each.held,
            free=each.free,
            waiting=waiting,
        )
        for each, waiting in standing.usage()
    ]
    providers = [
        pb.Provider(name=each.name, breaker=BREAKERS[each.breaker], rests=duration(each.rests_s))
        for each in standing.providers()
    ]
    return pb.GetResourcesResponse(
        resources=resources,
        providers=providers,
        actions_waiting=standing.waiting,
        actions_running=standing.running,
    )


def snapshot_message(snapshot: Snapshot) -> pb.Snapshot:
    """The contract's form."""
    return pb.Snapshot(
        snapshot_id=snapshot.snapshot_id,
        tool=snapshot.tool.name,
        session_id=snapshot.session_id,
        steps=snapshot.steps,
        size_bytes=snapshot.size_bytes,
        taken_at=timestamp(snapshot.taken_at),
        expires_at=timestamp(snapshot.expires_at),
    )


def result_message(result: Result) -> pb.ToolResult:
    """The contract's form."""
    message = pb.ToolResult(
        status=STATUSES[result.status],
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


def timing_message(result: Result) -> pb.ActionTiming:
    """The contract's form."""
    return pb.ActionTiming(
        queue=duration(result.queue_s), overhead=duration(result.overhead_s), execution=duration(result.execution_s)
    )


def duration(seconds: float) -> Duration:
    """Seconds as a Duration."""
    message = Duration()
    message.FromNanoseconds(round(seconds * 1e9))
    return message


def timestamp(seconds: float) -> Timestamp:
    """Seconds since the epoch as a Timestamp."""
    message = Timestamp()
    message.FromNanoseconds(round(seconds * 1e9))
    return message


def text(foreign: str) -> str:
    """A string that protobuf takes: a tool's output may hold lone surrogates."""
    return foreign.encode("utf-8", "backslashreplace").decode("utf-8")


class BusFacts:
    """Tells actions on the bus. source: service and instance."""

    def __init__(self, bus: Bus, source: str) -> None:
        self._bus = bus
        self._source = source

    async def started(self, trajectory_id: str, tool: str, expected_s: float) -> None:
        """Publish tool_started."""
        started = facts_pb2.ToolStarted(trajectory_id=trajectory_id, tool=tool, expected_time=duration(expected_s))
        await self._bus.publish(make_fact(self._source, tool_started=started))

    async def finished(self, trajectory_id: str, tool: str, result: Result) -> None:
        """Publish tool_finished."""
        finished = facts_pb2.ToolFinished(
            trajectory_id=trajectory_id, tool=tool, status=STATUSES[result.status], timing=timing_message(result)
        )
        await self._bus.publish(make_fact(self._source, tool_finished=finished))
