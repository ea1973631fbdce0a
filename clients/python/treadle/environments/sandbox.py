"""Play an environment of the tools service, each episode in a sandbox of its own (Sandboxed).

Use it for environments that run code, or that are not installed here: `frozen_lake` and
`reasoning_gym` come with the service, others are declared there (services/tools/README.md).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from treadle.environments.episode import (
    Environment,
    Episode,
    Message,
    Reply,
    Task,
    Turn,
    first_of,
    text_of,
    user,
)
from treadle.trajectory import Session, Trajectory
from treadle.types import Limits, ToolResult

Arguments = Mapping[str, Any]


class Sandboxed(Environment):
    """An environment of the tools service.

    tool: its name. openings: the arguments of each task's session. actions: words and the arguments
    of the step that they name, of which the first one in a reply counts; or a function from a
    reply's text, without its reasoning, to arguments, None where it names none. system: the system
    message. hint: what the policy reads where its reply named no action. limits: of the session;
    None: the tool's own.
    """

    def __init__(
        self,
        tool: str,
        openings: Iterable[Arguments],
        *,
        actions: Mapping[str, Arguments] | Callable[[str], Arguments | None],
        system: str = "",
        hint: str = "That names no action.",
        limits: Limits | None = None,
    ) -> None:
        self._tool, self._openings, self._limits = tool, [dict(each) for each in openings], limits
        self._read = actions if callable(actions) else first_of(actions)
        self._system, self._hint = system, hint

    def tasks(self) -> list[Task]:
        """Return a task for each opening, named by its arguments."""
        messages: list[Message] = (
            [{"role": "system", "content": self._system}] if self._system else []
        )
        return [
            Task("-".join([self._tool, *map(str, opening.values())]), messages, opening)
            for opening in self._openings
        ]

    async def start(self, task: Task, trajectory: Trajectory) -> Episode:
        """Open a session. Errors: see Trajectory.open_session."""
        session = await trajectory.open_session(self._tool, task.data, self._limits)
        return _Sandbox(session, self._read, self._hint)


class _Sandbox(Episode):
    """Episode in a session, which ends with its trajectory and is not used afterwards."""

    def __init__(
        self, session: Session, read: Callable[[str], Arguments | None], hint: str
    ) -> None:
        self._session, self._read, self._hint = session, read, hint

    async def begin(self) -> Turn:
        return _turn_of(self._session.first)

    async def step(self, reply: Reply) -> Turn:
        action = self._read(reply.said)
        return (
            Turn([user(self._hint)])
            if action is None
            else _turn_of(await self._session.step(action))
        )


def _turn_of(result: ToolResult) -> Turn:
    """Make a turn from a tool's result. A failed step reports why, and the episode continues unless
    it has ended the environment."""
    return Turn([user(text_of(result))], result.reward or 0.0, result.done)
