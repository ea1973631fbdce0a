"""Stateful environments: opened, stepped one action at a time, closed by the caller or when idle for too long.

Owns: the table of sessions and each session's cell. Invariants: no two steps of a session overlap; a step that began is
finished although its caller has gone; a session whose environment has ended stays to say so until it is closed or
reaped; what a caller has been told is in the keeper's memory before, so that the service's next life knows it.

Environments that are lost while they open are opened again, in a fresh cell (RollArt §8: resets fail most).

Tier one of what makes an opening fast and sure is the worker that has imported the tool before anybody asks
(`Tool.preload`). There is no other tier here: a process in a sandbox has no image to fetch."""

import asyncio
import contextlib
import time
import uuid
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any

import structlog
from treadle_runtime.errors import FailedPrecondition, NotFound, ResourceExhausted, Unavailable

from treadle_tools.limits import Granted, Limits
from treadle_tools.registry import Registry, refuse_invalid
from treadle_tools.sandbox.bubblewrap.cell import CellLost
from treadle_tools.sandbox.seam import Cell, Found
from treadle_tools.scheduling.actions import Actions, result_of
from treadle_tools.sessions.session import Memory, Opening, Session, step_key
from treadle_tools.sessions.snapshots import Snapshot, Snapshots
from treadle_tools.tool import Result, Status, Tool

log_retries = structlog.get_logger()

PAUSES_S = (0.2, 1.0)  # before each further try: a worker that died is back within a second or two


async def opened(
    opening: Opening, attempt: Callable[[], Awaitable[Result]], pauses_s: Sequence[float] = PAUSES_S
) -> Result:
    """What `attempt` gives, each in a fresh cell, until one environment stands or has said why not.

    One that died or took too long, and a worker that does not start, is tried again after each of `pauses_s`, for as
    long as the caller waits; one that refuses its arguments, raises, or needs too much memory, would do so again.
    Raises what the last attempt raises.
    """
    for pause_s in pauses_s:
        try:
            result = await attempt()
            if result.alive or result.status not in (Status.CRASHED, Status.TIMED_OUT) or _over(opening, pause_s):
                return result
            why = result.error
        except Unavailable as failure:
            if _over(opening, pause_s):
                raise
            why = failure.message
        log_retries.warning("an environment is opened again", tool=opening.tool.name, why=why, pause_s=pause_s)
        await asyncio.sleep(pause_s)
    return await attempt()


def _over(opening: Opening, pause_s: float) -> bool:
    """Whether the caller will not wait for another try."""
    return opening.ends_at is not None and time.monotonic() + pause_s >= opening.ends_at


log = structlog.get_logger()

FULL_RETRY_S = 1.0  # sessions are closed when their trajectory ends; one in many does within seconds
REAP_INTERVAL_S = 30.0  # an idle session holds memory, not cores: nothing is lost by half a minute
DONE = "done"
LOST = "its sandbox was lost while the service was down"


class Sessions:
    """See the module. take_cell: a fresh cell of a tool. most: sessions at a time. idle_s: until one is reaped. memory:
    None only where there is no sandbox, and so no session.
    """

    def __init__(
        self,
        actions: Actions,
        take_cell: Callable[[Tool], Awaitable[Cell]],
        *,
        most: int,
        idle_s: float,
        release: Callable[[Cell], None],
        memory: Memory | None,
        snapshots: Snapshots,
    ) -> None:
        self._actions = actions
        self._take_cell = take_cell
        self._most = most
        self._idle_s = idle_s
        self._release = release
        self._memory = memory
        self._snapshots = snapshots
        self._sessions: dict[str, Session] = {}
        self._opening = 0
        self._opened_before: dict[str, Session] = {}
        self._closed_before: dict[str, str] = {}

    def restore(self, found: Iterable[Found], registry: Registry, closed: Mapping[str, str]) -> None:
        """Take over from an earlier life of the service. closed: session id → the request that closed it."""
        tools = {tool.name: tool for tool in registry}
        self._closed_before = dict(closed)
        for one in found:
            tool = tools.get(str(one.record["tool"]))
            if tool is None:
                log.warning(
                    "a session of a tool that is gone", **{key: one.record[key] for key in ("session_id", "tool")}
                )
                self._remembering().forget(str(one.record["session_id"]))
                if one.cell is not None:
                    one.cell.close()
                continue
            session = Session.of(one.record, tool, one.cell)
            self._sessions[session.session_id] = session
            self._opened_before[session.opened_by] = session

    async def recall(self) -> None:
        """Hear from every cell that was taken over what it answered last; steps in flight are waited for."""
        async with asyncio.TaskGroup() as group:
            for session in list(self._sessions.values()):
                group.create_task(self._recalled(session))

    async def open(self, opening: Opening) -> tuple[Session, Result]:
        """A new session and its first observation.

        Raises ResourceExhausted when there are too many, InvalidArgument where the environment refuses an argument. An
        environment that fails to start gives a session that has ended already.
        """
        before = self._opened_before.get(opening.key)
        if before is not None:
            await self._recalled(before)
            if before.session_id in self._sessions and before.last_key == opening.key and before.last is not None:
                return before, before.last
        if len(self._sessions) + self._opening >= self._most:
            raise ResourceExhausted(
                "SESSIONS_FULL", f"{self._most} sessions are open already: close some", retry_after_s=FULL_RETRY_S
            )
        session = Session(
            f"s-{uuid.uuid4().hex}", opening.tool, opening.trajectory_id, opening.limits, opened_by=opening.key
        )
        self._opening += 1
        try:
            result = await self._opened(session, opening)
            refuse_invalid(result)
            self._note(session, opening.key, result)
        except BaseException:
            self._end(session, "failed")
            self._remembering().forget(session.session_id)
            raise
        finally:
            self._opening -= 1
        self._sessions[session.session_id] = session
        await self._remembering().told()
        return session, result

    async def _opened(self, session: Session, opening: Opening) -> Result:
        """What the environment says first."""

        async def begin(granted: Granted) -> Mapping[str, Any]:
            session.cell = await self._take_cell(opening.tool)
            self._remembering().bind(session.record(), session.cell)
            processes = opening.tool.processes
            if opening.snapshot is None:
                return await session.cell.ask("open", opening.arguments, granted, processes, request_id=opening.key)
            with self._snapshots.reading(opening.snapshot) as file:
                return await session.cell.ask(
                    "restore", opening.snapshot.said(), granted, processes, request_id=opening.key, file=file
                )

        async def attempt() -> Result:
            self._let_go(session)
            return await self._actions.run(
                opening.tool, opening.trajectory_id, opening.limits, begin, session.session_id
            )

        return await opened(opening, attempt)

    async def snapshot(self, session: Session) -> Snapshot:
        """The session's state as it stands, once no step runs. It costs the environment nothing but the time.

        Raises FailedPrecondition where the session has ended, or its environment cannot be written down;
        ResourceExhausted where too many snapshots are kept.
        """
        await self._recalled(session)
        async with session.turn:
            cell = session.standing()
            session.used()
            with self._snapshots.writing() as new:
                try:
                    reply = await cell.ask("snapshot", None, session.limits, session.tool.processes, file=new.file)
                except CellLost as lost:
                    self._lost(session, str(lost))
                    reply = {"status": Status.CRASHED, "error": str(lost), "alive": True}
                if not reply["alive"]:
                    self._lost(session, str(reply["error"]))
                if reply["status"] != Status.OK or session.last is None:
                    raise FailedPrecondition(
                        "SNAPSHOT_REFUSED",
                        f"session {session.session_id!r} cannot be written down: {reply['error']}",
                        session_id=session.session_id,
                    )
                return new.whole(session.tool, session.session_id, session.steps, session.last)

    def get(self, session_id: str) -> Session:
        """Raises NotFound."""
        session = self._sessions.get(session_id)
        if session is None:
            raise NotFound(
                "SESSION_NOT_FOUND",
                f"session_id: there is no session {session_id[:64]!r}: closed, idle for over {self._idle_s:g} s, or "
                "lost with the machine or the keeper that held it",
                session_id=session_id,
            )
        return session

    async def step(self, session: Session, arguments: Mapping[str, Any], limits: Limits, request_id: str) -> Result:
        """One action. Raises FailedPrecondition where the session has ended, InvalidArgument where the tool refuses.

        The last step may be asked for again with the same request_id: it is answered, and not taken twice.
        """
        await self._recalled(session)
        async with session.turn:
            key = step_key(request_id)
            if session.last_key == key and session.last is not None:
                return session.last
            cell = session.standing()
            session.used()

            async def step(granted: Granted) -> Mapping[str, Any]:
                return await cell.ask("step", arguments, granted, session.tool.processes, request_id=key)

            result = await self._actions.run(session.tool, session.trajectory_id, limits, step, session.session_id)
            session.used()
            refuse_invalid(result)
            session.steps += 1
            self._note(session, key, result)
            await self._remembering().told()
            return result

    async def close(self, session_id: str, request_id: str = "") -> None:
        """End a session, after the step that runs. Raises NotFound."""
        if request_id and self._closed_before.get(session_id) == request_id:
            return
        session = self.get(session_id)
        async with session.turn:
            self._sessions.pop(session_id, None)
            self._end(session, "closed")
            self._remembering().forget(session_id, request_id)
            await self._remembering().told()

    async def reap(self) -> None:
        """Close idle sessions, for ever."""
        while True:
            await asyncio.sleep(min(REAP_INTERVAL_S, self._idle_s / 2))
            self._snapshots.sweep()
            oldest = time.monotonic() - self._idle_s
            for session in list(self._sessions.values()):
                if session.idle_since < oldest and not session.turn.locked():
                    log.info("idle session closed", session_id=session.session_id, tool=session.tool.name)
                    with contextlib.suppress(NotFound):
                        await self.close(session.session_id)

    async def _recalled(self, session: Session) -> None:
        """Hear what the cell has answered to an earlier life of the service that did not live to hear it."""
        if session.heard:
            return
        async with session.turn:
            if session.heard is False:
                await self._hear(session)
                session.heard = True

    async def _hear(self, session: Session) -> None:
        if session.ended:
            self._let_go(session)
            return
        if session.cell is None:
            self._lost(session, LOST)
            return
        try:
            reply = await session.cell.ask("recall", None, session.limits, session.tool.processes)
        except CellLost as lost:
            self._lost(session, str(lost))
            return
        result = result_of(reply) if reply["id"] else None
        if not session.last_key and (result is None or result.invalid is not None):
            self._drop(session)  # it never opened, or refused to, and nobody has been told its id
        elif result is not None and result.invalid is None:
            result = result.timed(queue_s=0.0, total_s=result.execution_s)
            if reply["id"] == session.last_key:
                session.last = result
            else:
                session.steps += bool(session.last_key)  # its opening is no step
                self._note(session, str(reply["id"]), result)
                await self._actions.recalled(session.tool, session.trajectory_id, result)

    def _lost(self, session: Session, why: str) -> None:
        if not session.last_key:
            self._drop(session)
            return
        log.warning("a session was lost", session_id=session.session_id, tool=session.tool.name, why=why)
        self._end(session, why)
        self._remembering().note(session.session_id, session.facts())

    def _drop(self, session: Session) -> None:
        self._sessions.pop(session.session_id, None)
        self._end(session, "never opened")
        self._remembering().forget(session.session_id)

    def _note(self, session: Session, key: str, result: Result) -> None:
        session.last_key, session.last = key, result
        if result.done:
            session.ended = session.ended or DONE
        elif not result.alive:
            session.ended = session.ended or result.error or result.status
        self._remembering().note(session.session_id, session.facts())
        if session.ended:
            self._let_go(session)

    def _end(self, session: Session, why: str) -> None:
        session.ended = session.ended or why
        self._let_go(session)

    def _let_go(self, session: Session) -> None:
        self._actions.forget(session.session_id)
        cell, session.cell = session.cell, None
        if cell is not None:
            self._release(cell)

    def _remembering(self) -> Memory:
        assert self._memory is not None  # a session has a cell, and cells come from there
        return self._memory
