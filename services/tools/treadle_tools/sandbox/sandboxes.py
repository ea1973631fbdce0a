"""Define a sandbox of any kind: how its worker starts, how the service uses it, and who makes it.

Backends make sandboxes: the client of the sandbox daemon for bubblewrap (`daemon_client.py`), the
fleet of containers (`containers/fleet.py`). This module knows neither, and imports the standard
library only.
"""

import asyncio
import json
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import MappingProxyType
from typing import Any

from treadle_tools.tool import Kind, Limits, Status, Tool

NOBODY = 65534
PACKAGE = "treadle_tools"
VARIABLES = MappingProxyType(
    {
        "HOME": "/tmp",
        "USER": "nobody",  # its user has no line in /etc/passwd
        "LANG": "C.UTF-8",
        "OPENBLAS_NUM_THREADS": "1",  # a fork server must have one thread; and one action, one core
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        "MPLBACKEND": "Agg",
        "MPLCONFIGDIR": "/tmp",
    }
)
BOOT = (
    "import os, sys, json; config = json.loads(sys.argv[1]); sys.path += config['paths']; "
    # For Python that the tool starts, which then finds the modules that the tool has
    "os.environ['PYTHONPATH'] = os.pathsep.join(config['paths']); "
    "from treadle_tools.sandbox.inside.{module} import main; main(config)"
)


def worker_arguments(tool: Tool, module: str, paths: Sequence[str], **more: Any) -> list[str]:
    """Return the arguments of a Python that runs `main` of a module of `inside/`.

    paths: folders that are added to sys.path. more: arguments of `main`.
    """
    config = {
        "paths": list(paths),
        "entry": tool.entry,
        "preload": list(tool.preload),
        "work_bytes": tool.work_bytes,
        "processes": tool.processes,
        "hidden": tool.kind is Kind.REWARD,
        **more,
    }
    return ["-c", BOOT.format(module=module), json.dumps(config)]


def find_top_level(tool: Tool, name: str) -> ModuleSpec:
    """Return the package or module at the top of a dotted name that `tool` needs.

    Raises ModuleNotFoundError without it.
    """
    top = name.partition(":")[0].partition(".")[0]
    if (spec := find_spec(top)) is None:
        raise ModuleNotFoundError(f"tool {tool.name!r}: no module named {top!r}", name=top)
    return spec


CHECK_INTERVAL_S = 1.0  # between two looks whether the tool's worker has failed meanwhile
# After each start of a worker that fails; the last one again
RETRY_PAUSES_S = (1.0, 2.0, 4.0, 8.0, 16.0, 30.0)
# Closed sessions remembered, because the service's next run may get a repeat of the closing
MOST_CLOSED = 4096


class SandboxLost(Exception):  # noqa: N818 - an answer to the caller, not a fault
    """The sandbox died, broke the protocol or did not answer.

    status: how its action ended, as far as the cause is known.
    """

    def __init__(self, message: str, status: Status = Status.CRASHED) -> None:
        super().__init__(message)
        self.status = status


class WorkerFailed(Exception):  # noqa: N818 - named for what happened
    """A tool's worker did not start or could not make a sandbox; the message gives the reason."""


class Sandbox(ABC):
    """An isolated process tree in which one action or one session runs.

    name: unique among all that are remembered.

    reusable: whether it can take another call after a call that was sent with `again`.
    """

    name: str
    reusable: bool

    @property
    @abstractmethod
    def alive(self) -> bool:
        """Return whether it can take a request."""

    async def ask(
        self,
        op: str,
        arguments: Any,
        limits: Limits,
        processes: int,
        *,
        request_id: str = "",
        again: bool = False,
    ) -> dict[str, Any]:
        """Send one request and return the answer of its supervisor (`inside/supervisor.py`).

        op: `call`, `open`, `step`; or `recall`, which returns the last answer again ({"id": ""}
        where there was none). again: another call will follow, so the supervisor removes what this
        one leaves; an answer that is `soiled` reports that this failed for the last call, and that
        this call has not run. A step keeps the memory limit of the session's opening; its own,
        lower limit holds for each process that the step starts. Granted cores (`Granted.cores`,
        numbers of this machine) are released with the answer. Raises SandboxLost; then the caller
        closes the sandbox.
        """
        # A lone surrogate stays legal on the wire
        body = json.dumps(arguments, separators=(",", ":")).encode("ascii")
        request = {
            "op": op,
            "id": request_id,
            "limits": limits.message(),
            "again": again,
            "body": len(body),
        }
        above_memory = f"stopped above {limits.memory_bytes} bytes of memory"
        try:
            reply = await self._exchange(request, body, limits, processes)
        except TimeoutError:
            raise SandboxLost(f"stopped after {limits.wall_s:g} s", Status.TIMED_OUT) from None
        except SandboxLost as lost:
            if self._was_killed_for_memory():
                raise SandboxLost(above_memory, Status.OUT_OF_MEMORY) from lost
            raise
        if reply.get("status") == Status.CRASHED and self._was_killed_for_memory():
            reply |= {"status": Status.OUT_OF_MEMORY, "error": above_memory}
        elif op == "call" and self._machine_ran_out():
            raise SandboxLost("the machine ran out of memory, and a process was killed for it")
        return reply

    @abstractmethod
    async def _exchange(
        self, header: dict[str, Any], body: bytes, limits: Limits, processes: int
    ) -> dict[str, Any]:
        """Send a request and return its answer, as `messages.read_answer` reads it.

        Raises SandboxLost, and TimeoutError where no answer comes within the limits.
        """

    @abstractmethod
    def _was_killed_for_memory(self) -> bool:
        """Return whether a process has been killed for its memory since the last request was
        sent."""

    def _machine_ran_out(self) -> bool:
        """Return whether a process has been killed since then although the sandbox was within its
        own limit; False where nobody counts."""
        return False

    @abstractmethod
    def close(self) -> None:
        """Have everything in the sandbox killed, without waiting. May be called again."""


class WarmSandboxes:
    """Sandboxes of a tool that have been started and wait for their first call.

    count: how many wait. request: orders that many from the backend, which passes them to `add`.
    lazy: none is ordered before the first `take`, so that a tool that no job uses costs nothing.
    failure: why there are none, if so. Invariant: a sandbox is handed out once, and another is
    ordered in its place.
    """

    def __init__(
        self, count: int, request: Callable[[int], None], *, lazy: bool = False, failure: str = ""
    ) -> None:
        self._count = count
        self._request = request
        self._ready: asyncio.Queue[Sandbox] = asyncio.Queue()
        self.failure = failure
        self._lazy = lazy

    async def take(self) -> Sandbox:
        """Take a sandbox in which nothing has run.

        Raises WorkerFailed where the tool's worker does not start.
        """
        if self._lazy:
            self._lazy = False
            self.fill()
        while True:
            if self.failure and self._ready.empty():
                raise WorkerFailed(self.failure)
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
        """Order all sandboxes, since the backend has just started."""
        if not self._lazy:
            self._request(self._count)

    def add(self, sandbox: Sandbox) -> None:
        """Take in a sandbox that was ordered."""
        self.failure = ""
        self._ready.put_nowait(sandbox)

    def drop(self) -> None:
        """Close all sandboxes, since their backend has failed."""
        while not self._ready.empty():
            self._ready.get_nowait().close()


class SessionRecords:
    """Sessions as the service last stored them, the sandbox in which each lives, and which request
    closed the others.

    All are kept by session id. Of a record this class reads the session_id only.
    """

    def __init__(self) -> None:
        self.records: dict[str, dict[str, Any]] = {}
        self.sandboxes: dict[str, str] = {}
        self.closed: dict[str, str] = {}

    def bind(self, record: Mapping[str, Any], sandbox: str) -> None:
        """Store a session and the name of its sandbox."""
        session_id = str(record["session_id"])
        self.records[session_id], self.sandboxes[session_id] = dict(record), sandbox

    def note(self, session_id: str, facts: Mapping[str, Any]) -> None:
        """Change fields of a session's record."""
        if session_id in self.records:
            self.records[session_id].update(facts)

    def forget(self, session_id: str, closed_by: str = "") -> None:
        """Remove a closed session.

        closed_by: the request that closed it, which a caller may repeat to the next run.
        """
        self.records.pop(session_id, None)
        self.sandboxes.pop(session_id, None)
        if closed_by:
            self.closed[session_id] = closed_by
            if len(self.closed) > MOST_CLOSED:
                del self.closed[next(iter(self.closed))]


@dataclass(frozen=True)
class FoundSession:
    """A session of an earlier run of the service.

    record: as it was last stored. sandbox: None where it has ended.
    """

    record: Mapping[str, Any]
    sandbox: Sandbox | None


class Backend(ABC):
    """Makes sandboxes, and stores sessions for the service's next run.

    While `run` runs it keeps sandboxes warm.

    records: where sessions are stored. tools: the tools that it runs. failures: why it cannot run
    its other tools. warm: how many sandboxes wait for each tool. lazy: tools whose worker starts
    with the first call. found: sessions of the service's last run.
    """

    def __init__(
        self,
        records: SessionRecords,
        tools: Iterable[str],
        failures: Mapping[str, str],
        *,
        warm: int,
        lazy: Iterable[str] = (),
    ) -> None:
        self.records = records
        self.found: list[FoundSession] = []
        self._warm = {
            tool: WarmSandboxes(warm, partial(self._request, tool), lazy=tool in lazy)
            for tool in tools
        }
        for tool, why in failures.items():
            self._warm[tool] = WarmSandboxes(0, lambda count: None, failure=why)

    async def take(self, tool: str) -> Sandbox:
        """Take a fresh sandbox. Raises WorkerFailed where the tool's worker does not start."""
        return await self._warm[tool].take()

    @abstractmethod
    def _request(self, tool: str, count: int) -> None:
        """Start making sandboxes of a tool for `_warm`."""

    async def flush(self) -> None:  # noqa: B027 - most store at once
        """Return once all changes of `records` are stored even if this process is killed."""

    @abstractmethod
    async def run(self) -> None:
        """Keep sandboxes warm until cancelled."""

    @abstractmethod
    async def close(self) -> None:
        """Release everything; `run` has ended."""


class ReusedSandboxes:
    """Sandboxes that a trajectory's call has left clean, for its next call of the same tool.

    A fresh sandbox costs more CPU than most calls: forks, namespaces, mounts, and their end. most:
    how many wait; 0: no sandbox is reused. kept_s: how long they wait. Invariant: a sandbox serves
    one trajectory, and one call at a time.
    """

    def __init__(self, *, most: int, kept_s: float) -> None:
        self._most = most
        self._kept_s = kept_s
        # (trajectory, tool) -> since; oldest first
        self._waiting: dict[tuple[str, str], tuple[Sandbox, float]] = {}

    def wants(self, sandbox: Sandbox, trajectory_id: str) -> bool:
        """Return whether `sandbox` should clean itself after a call of that trajectory ("": of
        none)."""
        return bool(self._most and trajectory_id and sandbox.reusable)

    def take(self, trajectory_id: str, tool: Tool) -> Sandbox | None:
        """Take the sandbox that the trajectory's last call of `tool` has left, if it is alive."""
        sandbox, _ = self._waiting.pop((trajectory_id, tool.name), (None, 0.0))
        if sandbox is not None and not sandbox.alive:
            sandbox.close()
            return None
        return sandbox

    def add(self, trajectory_id: str, tool: Tool, sandbox: Sandbox) -> None:
        """Keep a sandbox for the trajectory's next call.

        Of two calls at once, the sandbox of the later one is kept.
        """
        key = trajectory_id, tool.name
        self._drop(key)
        self._waiting[key] = sandbox, time.monotonic()
        if len(self._waiting) > self._most:
            self._drop(next(iter(self._waiting)))

    async def expire(self) -> None:
        """Close the sandboxes that have waited too long, until cancelled."""
        while True:
            oldest = time.monotonic() - self._kept_s
            for key in [key for key, (_, since) in self._waiting.items() if since <= oldest]:
                self._drop(key)
            await asyncio.sleep(self._kept_s / 4)

    def _drop(self, key: tuple[str, str]) -> None:
        sandbox, _ = self._waiting.pop(key, (None, 0.0))
        if sandbox is not None:
            sandbox.close()
