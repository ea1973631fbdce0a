"""What the service asks of a sandbox and of a backend that makes sandboxes; and the sandboxes that wait for a call.

Backends: the client of the sandbox daemon for bubblewrap (`daemon/client.py`), the fleet of containers
(`containers/fleet.py`). Neither is known here.
"""

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from treadle_tools.limits import Limits
from treadle_tools.tool import Tool

CHECK_INTERVAL_S = 1.0  # between two looks whether the tool's worker has failed meanwhile


class SandboxLost(Exception):  # noqa: N818 - an answer to the caller, not a fault
    """The sandbox died, broke the protocol or did not answer. out_of_memory, timed_out: why, where known."""

    def __init__(self, message: str, *, out_of_memory: bool = False, timed_out: bool = False) -> None:
        super().__init__(message)
        self.out_of_memory = out_of_memory
        self.timed_out = timed_out

    @classmethod
    def after_wall_clock(cls, limits: Limits) -> "SandboxLost":
        """No answer came in time."""
        return cls(f"stopped after {limits.wall_s:g} s", timed_out=True)

    @classmethod
    def above_memory(cls, limits: Limits) -> "SandboxLost":
        """The action needed more memory than it may use."""
        return cls(f"stopped above {limits.memory_bytes} bytes of memory", out_of_memory=True)


class WorkerFailed(Exception):  # noqa: N818 - named for what happened
    """A tool's worker did not start or could not make a sandbox; the message says why."""


class Sandbox(Protocol):
    """An isolated process tree in which one action or one session runs. name: unique among all that are remembered."""

    name: str

    @property
    def reusable(self) -> bool:
        """Whether it can take another call after one that was asked with `again`."""

    @property
    def alive(self) -> bool:
        """Whether it can take a request."""

    async def ask(
        self,
        op: str,
        arguments: Any,
        limits: Limits,
        processes: int,
        *,
        request_id: str = "",
        file: int | None = None,
        again: bool = False,
    ) -> dict[str, Any]:
        """Send one request and return the answer of its supervisor (`inside/supervisor.py`).

        op: `call`, `open`, `step`; `recall` (the last answer again; {"id": ""} where there was none); `snapshot` (write
        the environment to `file`) or `restore` (open it from there). again: another call will follow, so what this one
        leaves is to be removed; an answer that is `soiled` says that this failed for the last call, and that this call
        has not run. A step keeps the memory limit of the session's opening; its own, lower limit holds for each process
        that the step starts. Granted cores (`Granted.cores`, numbers of this machine) are released with the answer.
        Raises SandboxLost; then the caller closes the sandbox.
        """

    def close(self) -> None:
        """Have everything in it killed, without waiting. Safe to call again."""


@dataclass(frozen=True)
class FoundSession:
    """A session of an earlier run of the service. record: as last stored. sandbox: None where it has ended."""

    record: Mapping[str, Any]
    sandbox: Sandbox | None


class Backend(Protocol):
    """Makes sandboxes, and stores sessions for the service's next run. While `run` runs it keeps sandboxes warm.

    found: the sessions that outlived the service's last run. closed: sessions closed in it, session id -> the request
    that closed it.
    """

    found: list[FoundSession]
    closed: dict[str, str]

    async def take(self, tool: str) -> Sandbox:
        """A fresh sandbox. Raises WorkerFailed where the tool's worker does not start."""

    def bind(self, record: Mapping[str, Any], sandbox: Sandbox) -> None:
        """Store a session and the sandbox that it lives in. record: JSON, with its session_id and tool."""

    def note(self, session_id: str, facts: Mapping[str, Any]) -> None:
        """Change fields of its record."""

    def forget(self, session_id: str, closed_by: str = "") -> None:
        """Remove a closed session. closed_by: the request that closed it, which may be repeated to the next run."""

    async def flush(self) -> None:
        """Return once all of that is stored even if this process is killed."""

    async def run(self) -> None:
        """Keep sandboxes warm until cancelled."""

    async def close(self) -> None:
        """End the sandboxes, or leave them to the service's next run."""


S = TypeVar("S", bound=Sandbox)


class WarmSandboxes(Generic[S]):
    """Sandboxes of one tool that have been started and wait for their first call.

    count: how many. request: orders that many from the backend, which passes them to `add`. lazy: none is ordered
    before the first `take`, so that a tool that no job uses costs nothing. Invariant: a sandbox is handed out once, and
    another is ordered in its place.
    """

    def __init__(self, count: int, request: Callable[[int], None], *, lazy: bool = False) -> None:
        self._count = count
        self._request = request
        self._ready: asyncio.Queue[S] = asyncio.Queue()
        self._failure = ""
        self._lazy = lazy

    async def take(self) -> S:
        """A sandbox that nothing has run in. Raises WorkerFailed where the tool's worker does not start."""
        if self._lazy:
            self._lazy = False
            self.fill()
        while True:
            if self._failure and self._ready.empty():
                raise WorkerFailed(self._failure)
            try:
                async with asyncio.timeout(CHECK_INTERVAL_S):
                    sandbox = await self._ready.get()
            except TimeoutError:
                continue
            self._request(1)
            if sandbox.alive:
                return sandbox
            sandbox.close()

    def fill(self) -> None:
        """Order all: the backend has just started."""
        if not self._lazy:
            self._request(self._count)

    def add(self, sandbox: S) -> None:
        """Take in one that was ordered."""
        self._failure = ""
        self._ready.put_nowait(sandbox)

    def fail(self, why: str) -> None:
        """Refuse callers while the worker does not start."""
        self._failure = why

    def drop(self) -> None:
        """Close all: their backend has failed."""
        while not self._ready.empty():
            self._ready.get_nowait().close()


class ReusedSandboxes:
    """Sandboxes that a trajectory's call has left clean, for its next call of the same tool.

    A fresh sandbox costs more CPU than most calls: forks, namespaces, mounts, and their end. most: how many wait; 0:
    every call gets a fresh one. kept_s: how long one waits. Invariants: a sandbox serves one trajectory in all its
    life; one call has it alone.
    """

    def __init__(self, *, most: int, kept_s: float) -> None:
        self._most = most
        self._kept_s = kept_s
        self._waiting: dict[tuple[str, str], tuple[Sandbox, float]] = {}  # (trajectory, tool) -> since; oldest first

    def wants(self, sandbox: Sandbox, trajectory_id: str) -> bool:
        """Whether to ask `sandbox` to clean itself after a call of that trajectory ("": of none)."""
        return bool(self._most and trajectory_id and sandbox.reusable)

    def take(self, trajectory_id: str, tool: Tool) -> Sandbox | None:
        """The sandbox that the trajectory's last call of `tool` has left, if it is alive."""
        sandbox, _ = self._waiting.pop((trajectory_id, tool.name), (None, 0.0))
        if sandbox is None or sandbox.alive:
            return sandbox
        sandbox.close()
        return None

    def add(self, trajectory_id: str, tool: Tool, sandbox: Sandbox) -> None:
        """Keep it for the trajectory's next call. Of two calls at once, the sandbox of the later one is kept."""
        key = trajectory_id, tool.name
        self._drop(key)
        self._waiting[key] = sandbox, time.monotonic()
        if len(self._waiting) > self._most:
            self._drop(next(iter(self._waiting)))

    async def expire(self) -> None:
        """Close those that have waited too long, until cancelled."""
        while True:
            oldest = time.monotonic() - self._kept_s
            for key in [key for key, (_, since) in self._waiting.items() if since <= oldest]:
                self._drop(key)
            await asyncio.sleep(self._kept_s / 4)

    def _drop(self, key: tuple[str, str]) -> None:
        sandbox, _ = self._waiting.pop(key, (None, 0.0))
        if sandbox is not None:
            sandbox.close()
