"""Where cells come from: for each tool the backend that runs it; and where its sessions are remembered.

Invariant: nothing runs unsandboxed. A backend that is missing is missing for its own tools alone, and says what to do.

Cells that a trajectory's call has left as it found them, for the next call of the same trajectory and tool.

An agent calls the same tool over and over, and a fresh cell costs more CPU than most of its calls: forks, namespaces,
mounts, and their end. Owns: the cells that wait. Invariants: a cell serves one trajectory in all its life; whoever
takes one has it alone; at most `most` wait, none longer than `kept_s`."""

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from treadle_runtime.errors import FailedPrecondition

from treadle_tools.sandbox.seam import Backend, Cell, Found
from treadle_tools.tool import Tool


class Pools:
    """See the module. of_tool: the name of each tool's backend. missing: why a backend is not there. versions: of the
    sandboxes that are there. folder: the service's own, for what outlives it; None where there is no backend.
    """

    def __init__(
        self,
        of_tool: Mapping[str, str],
        backends: Mapping[str, Backend],
        missing: Mapping[str, str],
        versions: Iterable[str],
        folder: Path | None,
    ) -> None:
        self._of_tool = of_tool
        self._backends = backends
        self._missing = missing
        self._by_session: dict[str, Backend] = {}
        self.version = ", ".join(versions)
        self.folder = folder
        self.found: list[Found] = []
        self.closed: dict[str, str] = {}
        for backend in backends.values():
            self.closed |= backend.closed
            for found in backend.found:
                self.found.append(found)
                self._by_session[str(found.record["session_id"])] = backend

    @property
    def backends(self) -> Iterable[Backend]:
        """Those that are there."""
        return self._backends.values()

    def require(self, tool: Tool) -> Backend:
        """Raises FailedPrecondition SANDBOX_UNAVAILABLE without a sandbox for `tool`."""
        name = self._of_tool[tool.name]
        if name not in self._backends:
            raise FailedPrecondition(
                "SANDBOX_UNAVAILABLE",
                f"tools run in a sandbox only: {self._missing[name]}; then start the service again",
            )
        return self._backends[name]

    async def take(self, tool: Tool) -> Cell:
        """A fresh cell of `tool`. Raises FailedPrecondition without a sandbox, WorkerFailed where the tool does not
        start.
        """
        return await self.require(tool).take(tool.name)

    async def put_away(self, cell: Cell) -> None:
        """Kill a cell that was taken."""
        cell.close()

    def bind(self, record: Mapping[str, Any], cell: Cell) -> None:
        """A session lives in a cell from now on."""
        backend = self._backends[self._of_tool[str(record["tool"])]]
        self._by_session[str(record["session_id"])] = backend
        backend.bind(record, cell)

    def note(self, session_id: str, facts: Mapping[str, Any]) -> None:
        """What has changed of it."""
        if session_id in self._by_session:
            self._by_session[session_id].note(session_id, facts)

    def forget(self, session_id: str, closed_by: str = "") -> None:
        """It is closed."""
        if session_id in self._by_session:
            self._by_session.pop(session_id).forget(session_id, closed_by)

    async def told(self) -> None:
        """Returns once all of that will be remembered, come what may."""
        for backend in self.backends:
            await backend.told()


Key = tuple[str, str]  # trajectory, tool


@dataclass(frozen=True)
class _Kept:
    """A cell that waits. since_s: time.monotonic()."""

    cell: Cell
    since_s: float


class KeptCells:
    """See the module. put_away: ends a cell, without waiting. most: 0 where every call is to have a fresh one."""

    def __init__(self, put_away: Callable[[Cell], None], *, most: int, kept_s: float) -> None:
        self._put_away = put_away
        self._most = most
        self._kept_s = kept_s
        self._kept: dict[Key, _Kept] = {}  # the one that has waited longest comes first

    def wanted(self, cell: Cell, trajectory_id: str) -> bool:
        """Whether `cell` is to be kept after a call of that trajectory ("": of none) if it can be."""
        return bool(self._most and trajectory_id and cell.reusable)

    def take(self, trajectory_id: str, tool: Tool) -> Cell | None:
        """The cell that the trajectory's last call of `tool` has left, if it lives."""
        kept = self._kept.pop((trajectory_id, tool.name), None)
        if kept is None:
            return None
        if kept.cell.alive:
            return kept.cell
        self._put_away(kept.cell)
        return None

    def keep(self, trajectory_id: str, tool: Tool, cell: Cell) -> None:
        """For its next call. Of two calls at once the cell of the later to end is kept."""
        key = trajectory_id, tool.name
        self._drop(key)
        self._kept[key] = _Kept(cell, time.monotonic())
        if len(self._kept) > self._most:
            self._drop(next(iter(self._kept)))

    async def reap(self) -> None:
        """End those that have waited too long, for ever."""
        while True:
            ended_s = time.monotonic() - self._kept_s
            for key in [key for key, kept in self._kept.items() if kept.since_s <= ended_s]:
                self._drop(key)
            await asyncio.sleep(self._kept_s / 4)

    def _drop(self, key: Key) -> None:
        kept = self._kept.pop(key, None)
        if kept is not None:
            self._put_away(kept.cell)
