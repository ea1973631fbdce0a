"""A stateful environment of one trajectory, and what a tool answers.

A session that was opened is closed by its user, by leaving its `async with`, or by its trajectory's close.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from treadle.connection import Mesh, request_id
from treadle.errors import TreadleError
from treadle.tools.v1 import tools_pb2
from treadle.types import ToolResult, ToolStatus, seconds, words_of

_STATUS: dict[int, ToolStatus] = words_of(tools_pb2.ResultStatus)

Invoke = Callable[[tools_pb2.InvokeRequest, Mapping[str, Any]], Awaitable[ToolResult]]


class Session:
    """A running environment. first: its first observation. invoke: the trajectory's tool call."""

    def __init__(self, mesh: Mesh, session_id: str, first: ToolResult, invoke: Invoke) -> None:
        self.session_id, self.first = session_id, first
        self._mesh, self._invoke = mesh, invoke
        self._closed = False

    async def step(self, arguments: Mapping[str, Any]) -> ToolResult:
        """Take one action; TreadleError NOT_FOUND SESSION_NOT_FOUND once it is closed or was idle for too long."""
        return await self._invoke(tools_pb2.InvokeRequest(session_id=self.session_id), arguments)

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

    async def __aexit__(self, *_: object) -> None:
        await self.close()


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
