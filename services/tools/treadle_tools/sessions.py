"""Stateful environments: opened, stepped one action at a time, closed by the caller or when idle for too long.

Owns: the table of sessions and each session's cell. Invariants: no two steps of a session overlap; a step that began is
finished although its caller has gone; a session whose environment has ended stays to say so until it is closed or
reaped.
"""

import asyncio
import contextlib
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import structlog
from treadle_runtime.errors import FailedPrecondition, InvalidArgument, NotFound, ResourceExhausted

from treadle_tools.actions import Actions
from treadle_tools.arguments import FIELD
from treadle_tools.sandbox.cell import Cell
from treadle_tools.tool import Granted, Limits, Result, Tool

log = structlog.get_logger()

FULL_RETRY_S = 1.0  # sessions are closed when their trajectory ends; one in many does within seconds
REAP_INTERVAL_S = 30.0  # an idle session holds memory, not cores: nothing is lost by half a minute
DONE = "done"


@dataclass
class Session:
    """One environment. opened_at, last_used_at: seconds since the epoch. ended: why it takes no more steps, if so."""

    session_id: str
    tool: Tool
    trajectory_id: str
    limits: Limits
    cell: Cell | None = None
    steps: int = 0
    ended: str = ""
    opened_at: float = field(default_factory=time.time)
    last_used_at: float = field(default_factory=time.time)
    idle_since: float = field(default_factory=time.monotonic)
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)

    def used(self) -> None:
        """It has just been used."""
        self.last_used_at = time.time()
        self.idle_since = time.monotonic()


class Sessions:
    """See the module. take_cell: a fresh cell of a tool. most: sessions at a time. idle_s: until one is reaped."""

    def __init__(
        self,
        actions: Actions,
        take_cell: Callable[[Tool], Any],
        *,
        most: int,
        idle_s: float,
        release: Callable[[Tool, Cell], None],
    ) -> None:
        self._actions = actions
        self._take_cell = take_cell
        self._most = most
        self._idle_s = idle_s
        self._release = release
        self._sessions: dict[str, Session] = {}
        self._opening = 0

    async def open(
        self, tool: Tool, arguments: Mapping[str, Any], limits: Limits, trajectory_id: str
    ) -> tuple[Session, Result]:
        """A new session and its first observation.

        Raises ResourceExhausted when there are too many, InvalidArgument where the environment refuses an argument. An
        environment that fails to start gives a session that has ended already.
        """
        if len(self._sessions) + self._opening >= self._most:
            raise ResourceExhausted(
                "SESSIONS_FULL", f"{self._most} sessions are open already: close some", retry_after_s=FULL_RETRY_S
            )
        session = Session(f"s-{uuid.uuid4().hex}", tool, trajectory_id, limits)
        self._opening += 1
        try:

            async def begin(granted: Granted) -> Mapping[str, Any]:
                session.cell = await self._take_cell(tool)
                return await session.cell.ask("open", arguments, granted, tool.processes)

            result = await self._actions.run(tool, trajectory_id, limits, begin, session.session_id)
            self._refuse_invalid(result)
            self._note(session, result)
        except BaseException:
            self._end(session, "failed")
            raise
        finally:
            self._opening -= 1
        self._sessions[session.session_id] = session
        return session, result

    def get(self, session_id: str) -> Session:
        """Raises NotFound."""
        session = self._sessions.get(session_id)
        if session is None:
            raise NotFound(
                "SESSION_NOT_FOUND",
                f"session_id: there is no session {session_id[:64]!r}: closed, idle for over {self._idle_s:g} s, or "
                "lost with an earlier life of the service",
                session_id=session_id,
            )
        return session

    async def step(self, session: Session, arguments: Mapping[str, Any], limits: Limits) -> Result:
        """One action. Raises FailedPrecondition where the session has ended, InvalidArgument where the tool refuses."""
        async with session.turn:
            cell = session.cell
            if session.ended or cell is None:
                raise FailedPrecondition(
                    "SESSION_ENDED",
                    f"session {session.session_id!r} takes no more steps: {session.ended or 'closed'}",
                    session_id=session.session_id,
                )
            session.used()

            async def step(granted: Granted) -> Mapping[str, Any]:
                return await cell.ask("step", arguments, granted, session.tool.processes)

            result = await self._actions.run(session.tool, session.trajectory_id, limits, step, session.session_id)
            session.used()
            self._refuse_invalid(result)
            session.steps += 1
            self._note(session, result)
            return result

    async def close(self, session_id: str) -> None:
        """End a session, after the step that runs. Raises NotFound."""
        session = self.get(session_id)
        async with session.turn:
            self._sessions.pop(session_id, None)
            self._end(session, "closed")

    async def reap(self) -> None:
        """Close idle sessions, for ever."""
        while True:
            await asyncio.sleep(min(REAP_INTERVAL_S, self._idle_s / 2))
            oldest = time.monotonic() - self._idle_s
            for session in list(self._sessions.values()):
                if session.idle_since < oldest and not session.turn.locked():
                    log.info("idle session closed", session_id=session.session_id, tool=session.tool.name)
                    with contextlib.suppress(NotFound):
                        await self.close(session.session_id)

    def _note(self, session: Session, result: Result) -> None:
        if result.done:
            self._end(session, DONE)
        elif not result.alive:
            self._end(session, result.error or result.status)

    def _end(self, session: Session, why: str) -> None:
        session.ended = session.ended or why
        self._actions.forget(session.session_id)
        cell, session.cell = session.cell, None
        if cell is not None:
            self._release(session.tool, cell)

    @staticmethod
    def _refuse_invalid(result: Result) -> None:
        if result.invalid is not None:
            name, description = result.invalid
            raise InvalidArgument(f"{FIELD}.{name}", description)
