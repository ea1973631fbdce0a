"""Offer the tools of an MCP server, over stdio or streamable HTTP, through the official `mcp`
package (2.0 or newer).

The package binds a connection to the task that opened it, and ends that task's work where the
connection breaks. So each connection lives in a task of its own. A broken connection is opened
again for the next call; the call that was running is not repeated, as its tool may have run, and
fails its trajectory.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import urlsplit

from treadle.connection import finish
from treadle.environments.tools import Tool
from treadle.trajectory import Trajectory

CALL_S = 60.0
MOST_PAGES = 1_000  # of a list of tools
OPEN_S = 120.0  # until a server answers: a command may install itself first, as `npx` does


class McpServer:
    """A server whose tools a ToolUse takes.

    server: a URL (streamable HTTP), a command with its arguments that speaks MCP on stdin and
    stdout, or whatever `mcp.Client` takes, such as mcp.StdioServerParameters with an environment,
    or a transport with credentials. per_trajectory: a connection, and of a command a process, for
    each trajectory: for servers that keep state. only: names of the tools to take; None: all.
    call_s: longest time of a call, after which the policy reads that it took too long. Raises
    ValueError.
    """

    def __init__(
        self,
        server: Any,
        *,
        per_trajectory: bool = False,
        only: Collection[str] | None = None,
        call_s: float = CALL_S,
    ) -> None:
        if isinstance(server, Sequence) and not server:
            raise ValueError(
                "server must be a URL, or a command such as ['python', 'server.py']; it is empty"
            )
        self._server, self._only, self._call_s = server, only, call_s
        self.per_trajectory = per_trajectory

    @asynccontextmanager
    async def connected(self) -> AsyncIterator[Sequence[Tool]]:
        """Connect to the server and yield its tools. Raises ConnectionError, and ValueError where
        `only` names a tool that does not exist."""
        connection = _Connection(self._target(), self._call_s)
        try:
            listed = {each.name: each for each in await self._list_tools(connection)}
            if missing := sorted(set(self._only or ()) - set(listed)):
                raise ValueError(
                    f"{connection.name} has no tool {', '.join(missing)}; it has "
                    f"{', '.join(listed)}"
                )
            chosen = [
                each for each in listed.values() if self._only is None or each.name in self._only
            ]
            yield [_tool_of(connection, each) for each in chosen]
        finally:
            await finish(connection.close())

    async def _list_tools(self, connection: _Connection) -> list[Any]:
        import mcp
        from pydantic import ValidationError

        try:
            async with asyncio.timeout(OPEN_S):
                return await connection.list_tools()
        except (TimeoutError, mcp.MCPError, ValidationError) as error:
            why = str(error) or "it does not answer"
            raise ConnectionError(f"{connection.name} does not list its tools: {why}") from error

    def _target(self) -> Any:
        if isinstance(self._server, str) or not isinstance(self._server, Sequence):
            return self._server
        import mcp

        command, *arguments = self._server
        return mcp.StdioServerParameters(command=command, args=arguments)


class _Connection:
    """At most one open connection, opened where a call needs it."""

    def __init__(self, target: Any, call_s: float) -> None:
        self.name = f"the MCP server {_name_of(target)}"
        self._target, self._call_s = target, call_s
        self._lock = asyncio.Lock()
        self._client: Any = None  # mcp.Client
        self._holder: asyncio.Task[None] | None = None

    async def list_tools(self) -> list[Any]:
        """Return all pages of the server's tools, as mcp.types.Tool. Raises ConnectionError for a
        list that has no end."""
        client, found = await self._open(), list[Any]()
        cursors: list[str | None] = [None]
        while True:
            page = await client.list_tools(cursor=cursors[-1])
            found += page.tools
            if not page.next_cursor:
                return found
            if page.next_cursor in cursors or len(cursors) == MOST_PAGES:
                raise ConnectionError(
                    f"{self.name} does not end the list of its tools: after {len(cursors)} pages "
                    f"it gives the cursor {page.next_cursor!r}"
                )
            cursors.append(page.next_cursor)

    async def call(self, tool: str, arguments: Mapping[str, Any]) -> str:
        """Call a tool and return what the policy reads. Raises ConnectionError."""
        import mcp
        from mcp_types import CONNECTION_CLOSED
        from pydantic import ValidationError

        client = await self._open()
        try:
            result = await client.call_tool(
                tool, dict(arguments), read_timeout_seconds=self._call_s
            )
        except mcp.MCPError as error:
            if error.code != CONNECTION_CLOSED:
                return f"error: {error}"
            if client is self._client:
                self._client = None
            raise ConnectionError(f"{self.name} has closed the connection during {tool}") from error
        except ValidationError as error:
            return _text_of_other(error.errors(include_url=False)[0])
        return f"error: {_text_of(result)}" if result.is_error else _text_of(result)

    async def close(self) -> None:
        """End the connection, and the process of a command."""
        async with self._lock:
            await self._end()

    async def _open(self) -> Any:
        async with self._lock:
            if self._client is None:
                await self._end()
                ready = asyncio.get_running_loop().create_future()
                self._holder = asyncio.create_task(self._hold(ready))
                await asyncio.wait(
                    {ready, self._holder}, timeout=OPEN_S, return_when=asyncio.FIRST_COMPLETED
                )
                if not ready.done():
                    raise ConnectionError(f"{self.name} cannot be reached: {await self._end()}")
                self._client = ready.result()
            return self._client

    async def _end(self) -> str:
        """End the task that holds the connection. Return why it had ended."""
        holder, self._holder, self._client = self._holder, None, None
        if holder is None:
            return ""
        why = (
            _cause_of(holder.exception())
            if holder.done() and not holder.cancelled()
            else "it does not answer"
        )
        holder.cancel()
        await asyncio.wait({holder})
        if not holder.cancelled():
            holder.exception()  # retrieved, so that asyncio does not log it: it helps nobody
        return why

    async def _hold(self, ready: asyncio.Future[Any]) -> None:
        import mcp

        async with mcp.Client(self._target) as client:
            ready.set_result(client)
            await asyncio.Event().wait()  # until `_end` cancels it


def _tool_of(connection: _Connection, listed: Any) -> Tool:
    async def run(arguments: Mapping[str, Any], trajectory: Trajectory) -> str:
        return await trajectory.time_tool(lambda: connection.call(listed.name, arguments))

    return Tool(listed.name, listed.description or listed.title or "", listed.input_schema, run)


def _text_of(result: Any) -> str:
    """Return what the policy reads of a mcp.types.CallToolResult: its texts, the addresses of what
    is linked, and the kind of what is no text. A result without text has its structured content."""
    said = "\n".join(map(_text_of_part, result.content))
    has_text = any(part.type in ("text", "resource") for part in result.content)
    if result.structured_content is None or (has_text and said):
        return said
    return "\n".join(filter(None, [said, json.dumps(result.structured_content)]))


def _text_of_other(wrong: Mapping[str, Any]) -> str:
    """Return what the policy reads of a result that is not of MCP. wrong: pydantic's first error.
    Some servers leave `content` out where they have structured content."""
    given = wrong["input"]
    if wrong["loc"] == ("content",) and isinstance(given, dict) and "structuredContent" in given:
        said = json.dumps(given["structuredContent"])
        return f"error: {said}" if given.get("isError") else said
    where = ".".join(map(str, wrong["loc"]))
    return f"error: the server's result is not of MCP: {where}: {wrong['msg']}"


def _text_of_part(part: Any) -> str:
    if part.type == "text":
        return str(part.text)
    if part.type == "resource":
        return str(getattr(part.resource, "text", f"[resource {part.resource.uri}]"))
    return f"[{part.type} {part.uri}]" if part.type == "resource_link" else f"[{part.type}]"


def _name_of(target: Any) -> str:
    """Return a URL without its user and its query, or a command without its environment: these may
    hold secrets."""
    if isinstance(target, str):
        url = urlsplit(target)
        return f"{url.scheme}://{url.netloc.rpartition('@')[2]}{url.path}"
    command = getattr(target, "command", None)
    return type(target).__name__ if command is None else " ".join([command, *target.args])


def _cause_of(error: BaseException | None) -> str:
    """Return the first error within groups of one."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return f"{type(error).__name__}: {error}"
