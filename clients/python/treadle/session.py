"""Call tools and stateful environments of one trajectory.

A session that was opened is closed by its user, by leaving its `async with`, or by its trajectory's close.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping
from types import TracebackType
from typing import Any, Literal, Protocol, TypeVar

from treadle.connection import Mesh, request_id
from treadle.errors import TreadleError
from treadle.tools.v1 import tools_pb2
from treadle.types import ToolResult, ToolStatus, seconds

T = TypeVar("T")


class Timed(Protocol):
    """Awaits a tool call and records where the time went."""

    def __call__(self, work: Callable[[], Awaitable[T]]) -> Awaitable[T]: ...


_STATUS: dict[int, ToolStatus] = {
    tools_pb2.RESULT_STATUS_OK: "ok",
    tools_pb2.RESULT_STATUS_TOOL_ERROR: "tool_error",
    tools_pb2.RESULT_STATUS_TIMED_OUT: "timed_out",
    tools_pb2.RESULT_STATUS_OUT_OF_MEMORY: "out_of_memory",
    tools_pb2.RESULT_STATUS_CRASHED: "crashed",
}


class Session:
    """A running environment. first: its first observation."""

    def __init__(self, mesh: Mesh, session_id: str, first: ToolResult, trajectory_id: str, timed: Timed) -> None:
        self.session_id, self.first = session_id, first
        self._mesh, self._trajectory_id, self._timed = mesh, trajectory_id, timed
        self._closed = False

    async def step(self, arguments: Mapping[str, Any]) -> ToolResult:
        """Take one action; TreadleError NOT_FOUND SESSION_NOT_FOUND once it is closed or was idle for too long."""
        call = tools_pb2.InvokeRequest(session_id=self.session_id, trajectory_id=self._trajectory_id)
        return await self._timed(lambda: invoke(self._mesh, call, arguments))

    async def close(self) -> None:
        """End the environment. Does nothing where it has ended."""
        if self._closed:
            return
        self._closed = True
        request = tools_pb2.CloseSessionRequest(request_id=request_id(), session_id=self.session_id)
        try:
            tools = await self._mesh.tools()
            await self._mesh.call(tools.CloseSession, request, self._mesh.timeouts.cleanup_s)
        except TreadleError as error:
            if error.reason != "SESSION_NOT_FOUND":
                raise

    async def __aenter__(self) -> Session:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> Literal[False]:
        await self.close()
        return False


async def open_session(
    mesh: Mesh, call: tools_pb2.OpenSessionRequest, arguments: Mapping[str, Any], timed: Timed
) -> Session:
    """Start an environment; its first observation is in `Session.first`. TypeError for arguments that are not JSON."""
    call.request_id, call.arguments_json = request_id(), json.dumps(dict(arguments))
    tools = await mesh.tools()
    opened = await timed(lambda: mesh.call(tools.OpenSession, call, mesh.timeouts.tool_s))
    return Session(mesh, opened.session.session_id, result_of(opened.first), call.trajectory_id, timed)


async def invoke(mesh: Mesh, call: tools_pb2.InvokeRequest, arguments: Mapping[str, Any]) -> ToolResult:
    """Run one action. TypeError for arguments that are not JSON."""
    call.request_id, call.arguments_json = request_id(), json.dumps(dict(arguments))
    tools = await mesh.tools()
    return result_of((await mesh.call(tools.Invoke, call, mesh.timeouts.tool_s)).result)


def result_of(message: tools_pb2.ToolResult) -> ToolResult:
    """A ToolResult message as the dataclass.

    A status newer than this client reads as "crashed", the most careful word.
    """
    return ToolResult(
        status=_STATUS.get(message.status, "crashed"),
        output=message.output,
        error=message.error,
        reward=message.reward if message.HasField("reward") else None,
        done=message.done,
        data=json.loads(message.data_json) if message.data_json else None,
        queue_s=seconds(message.timing.queue),
        overhead_s=seconds(message.timing.overhead),
        execution_s=seconds(message.timing.execution),
        output_truncated=message.output_truncated,
    )
