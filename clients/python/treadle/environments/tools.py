"""Offer tools to a policy: Python functions of this process, tools of the mesh's sandbox, and
ToolUse, an environment whose tasks are worked on with them until a reply calls none.

The policy reads the failure of a tool as its answer, as it does for tools of the mesh. Calls of one
reply run at the same time, and their results come in the order of the calls.
"""

from __future__ import annotations

import asyncio
import inspect
import types
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import dataclass
from typing import (
    Annotated,
    Any,
    Literal,
    Protocol,
    Self,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

import grpc

from treadle.environments.episode import (
    Environment,
    Episode,
    Message,
    Reply,
    Task,
    ToolCall,
    ToolSchema,
    Turn,
    result_message,
    text_of,
)
from treadle.errors import TreadleError
from treadle.rewards import PendingReward
from treadle.trajectory import Trajectory

MOST_OUTPUT_CHARS = 16_000  # of a result: a policy reads it all, again in each later turn
_JSON_TYPES = {
    str: "string",
    int: "integer",
    float: "number",
    bool: "boolean",
    list: "array",
    dict: "object",
}

Run = Callable[[Mapping[str, Any], Trajectory], Awaitable[str]]
# a number, a PendingReward, or an awaitable of one
Score = Callable[[Sequence[Message], Task, Trajectory], Any]


@dataclass(frozen=True)
class Tool:
    """A tool as the policy sees it, and the function that runs it. parameters: JSON Schema of its
    arguments. run: returns what the policy reads; what it raises is shown to the policy, but for
    ConnectionError and TreadleError, which fail the trajectory: a server or the mesh is at fault,
    and not the call. INVALID_ARGUMENT is shown."""

    name: str
    description: str
    parameters: Mapping[str, Any]
    run: Run

    @property
    def schema(self) -> ToolSchema:
        """Return the tool in the form of OpenAI's chat, which chat templates take."""
        function = {
            "name": self.name,
            "description": self.description,
            "parameters": dict(self.parameters),
        }
        return {"type": "function", "function": function}


class ToolSource(Protocol):
    """Tools that need a connection, such as those of an MCP server."""

    per_trajectory: bool  # whether each trajectory has a connection of its own

    def connected(self) -> AbstractAsyncContextManager[Sequence[Tool]]:
        """Connect to the tools for as long as the block lasts, and yield them."""


def tool(function: Callable[..., Any]) -> Tool:
    """Make a tool from a Python function, which may be `async`. Its docstring describes it;
    annotations give the schema, where Annotated[int, "in degrees"] describes an argument. Runs in
    this process, and in a thread unless it is `async`."""
    hints = get_type_hints(function, include_extras=True)
    properties, required = {}, []
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            raise TypeError(
                f"{function.__name__}: *{name} cannot be described to a policy; name each argument"
            )
        properties[name] = _schema_of(hints.get(name, Any))
        if parameter.default is parameter.empty:
            required.append(name)

    async def run(arguments: Mapping[str, Any], trajectory: Trajectory) -> str:
        async def call() -> Any:
            # a wrong call must not look like a fault of the function
            inspect.signature(function).bind(**arguments)
            if inspect.iscoroutinefunction(function):
                return await function(**arguments)
            return await asyncio.to_thread(function, **arguments)

        try:
            return str(await trajectory.time_tool(call))
        except ConnectionError as error:  # of a server that the function calls, not of the mesh
            return f"error: {type(error).__name__}: {error}"

    parameters = {"type": "object", "properties": properties, "required": required}
    return Tool(function.__name__, inspect.getdoc(function) or "", parameters, run)


def mesh_tool(name: str, description: str, parameters: Mapping[str, Any]) -> Tool:
    """Make a tool that runs a stateless tool of the tools service, in its sandbox."""

    async def run(arguments: Mapping[str, Any], trajectory: Trajectory) -> str:
        return text_of(await trajectory.tool(name, arguments))

    return Tool(name, description, parameters, run)


class ToolUse(Environment):
    """Tasks that are worked on with tools. An episode is over with the first reply that calls none.

    given: the tasks. tools: Tool, Python functions, and sources such as McpServer. score: what an
    episode is worth, from its conversation, its task and its trajectory; a function that may be
    `async`, and may return what `trajectory.score` returned. Raises TypeError, and ValueError where
    two tools have the same name.
    """

    def __init__(
        self,
        given: Iterable[Task],
        tools: Iterable[Tool | ToolSource | Callable[..., Any]],
        *,
        score: Score,
    ) -> None:
        self._given, self._score, self._stack = list(given), score, AsyncExitStack()
        self._entering, self._users = asyncio.Lock(), 0  # rollouts that play it at this moment
        self._own: list[Tool] = []
        self._sources: list[ToolSource] = []
        for each in tools:
            if isinstance(each, Tool):
                self._own.append(each)
            elif callable(each):
                self._own.append(tool(each))
            else:
                self._sources.append(each)
        self._shared = list(self._own)
        self._show(self._own)

    def tasks(self) -> list[Task]:
        """Return the tasks that were given."""
        return self._given

    async def start(self, task: Task, trajectory: Trajectory) -> Episode:
        """Start an episode, with a connection of its own to each source that has one per
        trajectory. Raises RuntimeError unless the environment has been entered, which connects to
        the other sources."""
        if self._sources and not self._users:
            raise RuntimeError(
                "its servers are not connected: use the environment as `async with environment:`"
            )
        async with AsyncExitStack() as stack:
            tools = list(self._shared)
            for source in self._sources:
                if source.per_trajectory:
                    tools += await stack.enter_async_context(source.connected())
            connections = stack.pop_all()
        return _ToolEpisode(
            {each.name: each for each in tools}, self._score, task, trajectory, connections
        )

    async def __aenter__(self) -> Self:
        async with self._entering:
            if not self._users:
                await self._connect()
            self._users += 1
        return self

    async def __aexit__(self, *_: object) -> None:
        self._users -= 1
        if not self._users:
            await self._stack.aclose()

    async def _connect(self) -> None:
        async with AsyncExitStack() as stack:
            shown, shared = list(self._own), list(self._own)
            for source in self._sources:
                if source.per_trajectory:
                    async with source.connected() as tools:  # the prompts show their schemas
                        shown += tools
                else:
                    tools = await stack.enter_async_context(source.connected())
                    shown += tools
                    shared += tools
            self._show(shown)
            self._shared, self._stack = shared, stack.pop_all()

    def _show(self, tools: Sequence[Tool]) -> None:
        names = [each.name for each in tools]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"two tools have the same name: {', '.join(twice)}")
        self.tools = [each.schema for each in tools]


class _ToolEpisode(Episode):
    def __init__(
        self,
        tools: Mapping[str, Tool],
        score: Score,
        task: Task,
        trajectory: Trajectory,
        connections: AsyncExitStack,
    ) -> None:
        self._tools, self._score, self._task, self._trajectory = tools, score, task, trajectory
        self._connections = connections

    async def step(self, reply: Reply) -> Turn:
        if not reply.tool_calls:
            return Turn(done=True)
        try:
            async with asyncio.TaskGroup() as group:
                runs = [group.create_task(self._run(call)) for call in reply.tool_calls]
        except BaseExceptionGroup as failed:
            raise failed.exceptions[
                0
            ] from None  # a trajectory's result then names the error itself
        return Turn(
            [
                result_message(call, run.result())
                for call, run in zip(reply.tool_calls, runs, strict=True)
            ]
        )

    async def finish(self, conversation: Sequence[Message]) -> float | PendingReward:
        score = self._score(conversation, self._task, self._trajectory)
        score = await score if inspect.isawaitable(score) else score
        return score if isinstance(score, PendingReward) else float(score)

    async def close(self) -> None:
        await self._connections.aclose()

    async def _run(self, call: ToolCall) -> str:
        if call.error:
            return f"error: {call.error}"
        if call.name not in self._tools:
            return f"error: there is no tool {call.name!r}; there are {', '.join(self._tools)}"
        try:
            output = await self._tools[call.name].run(call.arguments, self._trajectory)
        except ConnectionError:
            raise
        except Exception as error:  # a tool may raise anything, and that is an answer
            if (
                isinstance(error, TreadleError)
                and error.code is not grpc.StatusCode.INVALID_ARGUMENT
            ):
                raise
            output = f"error: {type(error).__name__}: {error}"
        cut = len(output) - MOST_OUTPUT_CHARS
        return output if cut <= 0 else f"{output[:MOST_OUTPUT_CHARS]}\n[{cut} more characters]"


def _schema_of(hint: Any) -> dict[str, Any]:
    """Return the JSON Schema of an annotation; {} (anything) for one that JSON does not know."""
    origin, of = get_origin(hint) or hint, get_args(hint)
    if origin is Annotated:
        words = [each for each in of[1:] if isinstance(each, str)]
        return {**_schema_of(of[0]), **({"description": words[0]} if words else {})}
    if origin is Literal:
        return {"enum": list(of)}
    if origin in (Union, types.UnionType):
        choices = [_schema_of(each) for each in of if each is not types.NoneType]
        return choices[0] if len(choices) == 1 else {"anyOf": choices}
    if origin is list and of:
        return {"type": "array", "items": _schema_of(of[0])}
    return {"type": _JSON_TYPES[origin]} if origin in _JSON_TYPES else {}
