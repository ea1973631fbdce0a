"""Cells that a trajectory's call has left as it found them, for the next call of the same trajectory and tool.

An agent calls the same tool over and over, and a fresh cell costs more CPU than most of its calls: forks, namespaces,
mounts, and their end. Owns: the cells that wait. Invariants: a cell serves one trajectory in all its life; whoever
takes one has it alone; at most `most` wait, none longer than `kept_s`.
"""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass

from treadle_tools.backend import Cell
from treadle_tools.tool import Tool

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
