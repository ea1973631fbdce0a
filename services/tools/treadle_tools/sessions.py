"""Open, step, restore and close sessions of environments.

This module owns the table of sessions and each session's sandbox. Invariants: no two steps of a
session overlap; a step that has started is finished although its caller has gone; a session whose
environment has ended refuses steps with the reason until it is closed; an answer is stored before
its caller gets it, so that the service's next run knows it.

An opening is fast and reliable because the worker imports the tool before the first caller needs it
(`Tool.preload`).
"""

import asyncio
import contextlib
import time
import uuid
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

import structlog
from pydantic import TypeAdapter
from tenacity import (
    AsyncRetrying,
    RetryCallState,
    retry_if_exception_type,
    retry_if_result,
    wait_chain,
    wait_fixed,
)
from treadle_runtime.errors import (
    FailedPrecondition,
    NotFound,
    ResourceExhausted,
    Unavailable,
    contain,
)
from treadle_runtime.fields import like

from treadle_tools.actions import Actions, Work
from treadle_tools.backends import Backends
from treadle_tools.registry import Registry, refuse_invalid
from treadle_tools.replies import result_of
from treadle_tools.sandbox.sandboxes import Backend, Sandbox, SandboxLost
from treadle_tools.tool import Granted, Limits, Result, Status, Tool

RESULT = TypeAdapter(Result)
# Fields that are stored as they are
FIXED = ("session_id", "trajectory_id", "job", "opened_by", "opened_at")
CHANGING = ("steps", "ended", "last_key", "last_used_at")


@dataclass(frozen=True)
class Opening:
    """Request to open a session. ends_at: by time.monotonic."""

    tool: Tool
    arguments: Mapping[str, Any]
    limits: Limits
    trajectory_id: str
    request_id: str
    job: str
    ends_at: float | None = None

    @property
    def key(self) -> str:
        """Return a name of this request within its session, where a step may have the same request
        id."""
        return f"open:{self.request_id}"


@dataclass
class Session:
    """An environment, its sandbox, its last answer, and its record for the service's next run.

    opened_at, last_used_at: seconds since the epoch.

    ended: why it takes no more steps; empty: it does.

    last_key, last: the newest request that the environment has answered, and its answer, where
    known. recalled: False until the sandbox of a session of an earlier run has returned its last
    answer, which that run may have missed.
    """

    session_id: str
    tool: Tool
    backend: Backend
    trajectory_id: str
    limits: Limits
    opened_by: str
    job: str
    sandbox: Sandbox | None = None
    steps: int = 0
    ended: str = ""
    last_key: str = ""
    last: Result | None = None
    recalled: bool = True
    opened_at: float = field(default_factory=time.time)
    last_used_at: float = field(default_factory=time.time)
    idle_since: float = field(default_factory=time.monotonic)
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)  # of the present step

    def require(self) -> Sandbox:
        """Return the sandbox. Raises FailedPrecondition where the session has ended."""
        if self.ended or self.sandbox is None:
            why = f"session {self.session_id!r} takes no more steps: {self.ended or 'closed'}"
            raise FailedPrecondition("SESSION_ENDED", why, session_id=self.session_id)
        return self.sandbox

    def touch(self) -> None:
        """Restart the time that the session may be idle."""
        self.last_used_at = time.time()
        self.idle_since = time.monotonic()

    def record(self) -> dict[str, Any]:
        """Return everything that the next run needs, as JSON."""
        fixed = {name: getattr(self, name) for name in FIXED}
        return {**fixed, "tool": self.tool.name, "limits": asdict(self.limits), **self.facts()}

    def facts(self) -> dict[str, Any]:
        """Return the fields of the record that change.

        The last answer is among them only where no sandbox has it any more.
        """
        last = asdict(self.last) if self.ended and self.last is not None else None
        return {**{name: getattr(self, name) for name in CHANGING}, "last": last}

    @classmethod
    def restore(
        cls, record: Mapping[str, Any], tool: Tool, backend: Backend, sandbox: Sandbox | None
    ) -> "Session":
        """Return a session of an earlier run, from its record."""
        used_s = max(0.0, time.time() - record["last_used_at"])
        last = None if record["last"] is None else RESULT.validate_python(record["last"])
        stored = {**record, "tool": tool, "limits": Limits(**record["limits"]), "last": last}
        return cls(
            **stored,
            backend=backend,
            sandbox=sandbox,
            recalled=False,
            idle_since=time.monotonic() - used_s,
        )


log = structlog.get_logger()

# Before each further try: a worker that died is back within a second or two
OPEN_PAUSES_S = (0.2, 1.0)
# Sessions are closed when their trajectory ends; one in many does within seconds
FULL_RETRY_S = 1.0
# An idle session holds memory, not cores: half a minute more costs nothing
EXPIRE_INTERVAL_S = 30.0
# A job may have so many sessions for each one that is free (dynamic thresholds, Choudhury and
# Hahne, 1998): one job alone has seven of eight, and leaves the next job as many of the rest.
MOST_TO_FREE = 7
WORTH_RETRYING = (Status.CRASHED, Status.TIMED_OUT)
DONE = "done"
LOST = "its sandbox was lost while the service was down"


async def open_with_retries(
    opening: Opening,
    attempt: Callable[[], Awaitable[Result]],
    pauses_s: Sequence[float] = OPEN_PAUSES_S,
) -> Result:
    """Open the environment by `attempt`, and again after each of `pauses_s` as long as the caller
    waits.

    Each attempt uses a fresh sandbox (RollArt §8: resets fail most).

    An environment that died or took too long is tried again, and a worker that does not start; not
    one that refuses its arguments, raises, or needs too much memory, because it would do so again.
    Raises what the last attempt raises.
    """

    def is_worth_retrying(result: Result) -> bool:
        return not result.alive and result.status in WORTH_RETRYING

    def is_over(state: RetryCallState) -> bool:
        is_too_late = (
            opening.ends_at is not None
            and time.monotonic() + state.upcoming_sleep >= opening.ends_at
        )
        return is_too_late or state.attempt_number > len(pauses_s)

    def report(state: RetryCallState) -> None:
        assert state.outcome is not None  # an attempt has ended
        error = state.outcome.exception()
        why = state.outcome.result().error if error is None else str(error)
        tool, pause_s = opening.tool.name, state.upcoming_sleep
        log.warning("an environment is opened again", tool=tool, why=why, pause_s=pause_s)

    def give_last(state: RetryCallState) -> Result:
        assert state.outcome is not None
        last: Result = state.outcome.result()
        return last

    retrying = AsyncRetrying(
        retry=retry_if_exception_type(Unavailable) | retry_if_result(is_worth_retrying),
        wait=wait_chain(*map(wait_fixed, pauses_s)),
        stop=is_over,
        before_sleep=report,
        retry_error_callback=give_last,
    )
    return await retrying(attempt)


class Sessions:
    """Opens, steps, restores and closes all sessions.

    most: sessions at a time. idle_s: seconds after which an idle session is closed.
    """

    def __init__(self, actions: Actions, backends: Backends, *, most: int, idle_s: float) -> None:
        self._actions = actions
        self._backends = backends
        self._most = most
        self._idle_s = idle_s
        self._sessions: dict[str, Session] = {}
        self._opening = Counter[str]()
        self._opened_before: dict[str, Session] = {}
        self._closed_before: dict[str, str] = {}

    def restore(self, registry: Registry) -> None:
        """Take over the sessions of an earlier run."""
        tools = {tool.name: tool for tool in registry}
        for backend in self._backends:
            self._closed_before |= backend.records.closed
            for found in backend.found:
                session_id, name = str(found.record["session_id"]), str(found.record["tool"])
                if name in tools:
                    session = Session.restore(found.record, tools[name], backend, found.sandbox)
                    self._sessions[session_id] = session
                    self._opened_before[session.opened_by] = session
                    continue
                log.warning("a session of a tool that is gone", session_id=session_id, tool=name)
                backend.records.forget(session_id)
                if found.sandbox is not None:
                    found.sandbox.close()

    async def recall(self) -> None:
        """Get the last answer from every sandbox that was taken over; this waits for steps under
        way."""
        async with asyncio.TaskGroup() as group:
            for session in list(self._sessions.values()):
                group.create_task(self._recall_alone(session))

    async def open(self, opening: Opening) -> tuple[Session, Result]:
        """Open a session; return it and its first observation.

        Raises ResourceExhausted when there are too many, InvalidArgument where the environment
        refuses an argument. An environment that fails to start gives a session that has ended
        already.
        """
        if (before := self._opened_before.get(opening.key)) is not None:
            await self._recall(before)
            if (
                before.session_id in self._sessions
                and before.last_key == opening.key
                and before.last is not None
            ):
                return before, before.last
        mine = (
            sum(session.job == opening.job for session in self._sessions.values())
            + self._opening[opening.job]
        )
        free = self._most - len(self._sessions) - self._opening.total()
        if mine >= MOST_TO_FREE * free:
            why = (
                f"job {opening.job!r} has {mine} sessions open, and {free} of {self._most} are "
                "free: close some"
            )
            raise ResourceExhausted("SESSIONS_FULL", why, retry_after_s=FULL_RETRY_S)
        tool, session_id = opening.tool, like(opening.request_id, f"s-{uuid.uuid4().hex}")
        backend = self._backends.require(tool)
        session = Session(
            session_id,
            tool,
            backend,
            opening.trajectory_id,
            opening.limits,
            opening.key,
            opening.job,
        )
        self._opening[opening.job] += 1
        try:
            result = await open_with_retries(opening, partial(self._attempt, session, opening))
            refuse_invalid(result)
            self._note(session, opening.key, result)
        except BaseException:
            self._drop(session, "failed")
            raise
        finally:
            self._opening[opening.job] -= 1
        self._sessions[session.session_id] = session
        await session.backend.flush()
        return session, result

    async def _run(self, session: Session, limits: Limits, work: Work) -> Result:
        return await self._actions.run(
            session.tool,
            session.trajectory_id,
            limits,
            work,
            job=session.job,
            holder=session.session_id,
        )

    async def _attempt(self, session: Session, opening: Opening) -> Result:
        """Start the environment in a fresh sandbox; return its first answer."""

        async def start(granted: Granted) -> Mapping[str, Any]:
            session.sandbox = sandbox = await session.backend.take(opening.tool.name)
            session.backend.records.bind(session.record(), sandbox.name)
            processes, key = opening.tool.processes, opening.key
            return await sandbox.ask("open", opening.arguments, granted, processes, request_id=key)

        self._release(session)
        return await self._run(session, opening.limits, start)

    def get(self, session_id: str) -> Session:
        """Find a session. Raises NotFound."""
        if (session := self._sessions.get(session_id)) is None:
            raise NotFound(
                "SESSION_NOT_FOUND",
                f"session_id: there is no session {session_id[:64]!r}: closed, idle for over "
                f"{self._idle_s:g} s, or lost with the machine or the sandbox daemon that held it",
                session_id=session_id,
            )
        return session

    async def step(
        self, session: Session, arguments: Mapping[str, Any], limits: Limits, request_id: str
    ) -> Result:
        """Take one step.

        Raises FailedPrecondition where the session has ended, InvalidArgument where the tool
        refuses.

        A repeat of the last step, by its request_id, gets the same answer without another step.
        """
        await self._recall(session)
        async with session.lock:
            key = f"step:{request_id}"
            if session.last_key == key and session.last is not None:
                return session.last
            sandbox = session.require()
            session.touch()

            async def step(granted: Granted) -> Mapping[str, Any]:
                return await sandbox.ask(
                    "step", arguments, granted, session.tool.processes, request_id=key
                )

            result = _done_if_ended(await self._run(session, limits, step))
            session.touch()
            refuse_invalid(result)
            session.steps += 1
            self._note(session, key, result)
            await session.backend.flush()
            return result

    async def close(self, session_id: str, request_id: str = "") -> None:
        """Close a session, after the step that runs. Raises NotFound."""
        if request_id and self._closed_before.get(session_id) == request_id:
            return
        session = self.get(session_id)
        async with session.lock:
            self._drop(session, "closed", request_id)
            await session.backend.flush()

    async def end(self, trajectory_id: str) -> None:
        """Close the sessions of a trajectory that has ended; kill a running step, as nobody waits
        for it."""
        for session in [
            each for each in self._sessions.values() if each.trajectory_id == trajectory_id
        ]:
            if session.sandbox is not None:
                session.sandbox.close()
            with contextlib.suppress(NotFound):  # its caller has closed it meanwhile
                await self.close(session.session_id)

    async def expire(self) -> None:
        """Close idle sessions, until cancelled."""
        while True:
            await asyncio.sleep(min(EXPIRE_INTERVAL_S, self._idle_s / 2))
            oldest = time.monotonic() - self._idle_s
            for session in list(self._sessions.values()):
                if session.idle_since < oldest and not session.lock.locked():
                    log.info(
                        "idle session closed", session_id=session.session_id, tool=session.tool.name
                    )
                    with contain("an idle session"), contextlib.suppress(NotFound):
                        await self.close(session.session_id)

    async def _recall_alone(self, session: Session) -> None:
        with contain("a session that was taken over", session_id=session.session_id):
            await self._recall(session)

    async def _recall(self, session: Session) -> None:
        """Take in, once, an answer of the sandbox that an earlier run may not have returned."""
        if session.recalled:
            return
        async with session.lock:
            if not session.recalled:
                await self._recall_locked(session)
                session.recalled = True

    async def _recall_locked(self, session: Session) -> None:
        if session.ended:
            self._release(session)
            return
        if session.sandbox is None:
            self._lose(session, LOST)
            return
        try:
            reply = await session.sandbox.ask(
                "recall", None, session.limits, session.tool.processes
            )
        except SandboxLost as lost:
            self._lose(session, str(lost))
            return
        result = (
            _done_if_ended(result_of(reply, session.tool, session.limits.output_bytes))
            if reply["id"]
            else None
        )
        if not session.last_key and (result is None or result.invalid is not None):
            self._drop(session, "never opened")  # or refused to open; no caller knows its id
        elif result is not None and result.invalid is None:
            result = result.timed(queue_s=0.0, total_s=result.execution_s)
            if reply["id"] == session.last_key:
                session.last = result
            else:
                session.steps += bool(session.last_key)  # its opening is no step
                self._note(session, str(reply["id"]), result)
                await self._actions.facts.finished(session.trajectory_id, session.tool.name, result)

    def _lose(self, session: Session, why: str) -> None:
        """End a session whose sandbox has ended.

        The session stays, and refuses steps, unless no caller knows its id.
        """
        if not session.last_key:
            self._drop(session, "never opened")
            return
        log.warning(
            "a session was lost", session_id=session.session_id, tool=session.tool.name, why=why
        )
        session.ended = session.ended or why
        self._release(session)
        session.backend.records.note(session.session_id, session.facts())

    def _drop(self, session: Session, why: str, closed_by: str = "") -> None:
        self._sessions.pop(session.session_id, None)
        session.ended = session.ended or why
        self._release(session)
        session.backend.records.forget(session.session_id, closed_by)

    def _note(self, session: Session, key: str, result: Result) -> None:
        session.last_key, session.last = key, result
        if not result.alive:
            session.ended = session.ended or result.error or result.status
        elif result.done:
            session.ended = session.ended or DONE
        session.backend.records.note(session.session_id, session.facts())
        if session.ended:
            self._release(session)

    def _release(self, session: Session) -> None:
        self._actions.scheduler.forget(session.session_id)
        sandbox, session.sandbox = session.sandbox, None
        if sandbox is not None:
            sandbox.close()


def _done_if_ended(result: Result) -> Result:
    """Return the result of a step; done where the agent's code may have ended the environment: an
    episode that its own code cuts short is over, and worth what it was until then."""
    return result if result.alive or result.lost else replace(result, done=True)
