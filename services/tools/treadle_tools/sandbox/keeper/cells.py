"""Every cell that the keeper holds, by name (no two keepers use the same), and the pools that make them.

Owns: the pools and their tasks. Invariant: a cell belongs to the pool that made it, also after that pool's tool was
changed or removed; then all of them end together.
"""

import asyncio
import itertools
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import structlog

from treadle_tools.sandbox.bubblewrap import memory
from treadle_tools.sandbox.bubblewrap.cell import WorkerFailed
from treadle_tools.sandbox.bubblewrap.cgroups import Cgroups
from treadle_tools.sandbox.bubblewrap.held import HeldCell
from treadle_tools.sandbox.bubblewrap.pool import Pool
from treadle_tools.sandbox.keeper.recipe import Recipe

log = structlog.get_logger()


@dataclass(frozen=True)
class Entry:
    """A cell and where it comes from."""

    name: str
    tool: str
    cell: HeldCell


class Cells:
    """See the module. made, failed: told of each cell that was wanted, of each tool that does not start."""

    def __init__(
        self, group: asyncio.TaskGroup, made: Callable[[Entry], None], failed: Callable[[str, str], None]
    ) -> None:
        self._group = group
        self._made = made
        self._failed = failed
        self._numbers = itertools.count(1)
        self._entries: dict[str, tuple[Entry, Pool]] = {}
        self._watches: list[asyncio.Task[None]] = []
        self._pools: dict[str, tuple[Pool, asyncio.Task[None]]] = {}

    async def set_tools(self, recipes: Mapping[str, Recipe], cgroups: Cgroups | None, spares: int) -> None:
        """Have a pool for each tool. A tool that is not as it was, or not there any more, loses its cells."""
        for tool, (pool, task) in list(self._pools.items()):
            if recipes.get(tool) != pool.recipe:
                log.info("a tool was changed or removed", tool=tool)
                del self._pools[tool]
                await self._end(pool, task)
        for tool in recipes.keys() - self._pools.keys():
            pool = Pool(
                recipes[tool],
                cgroups,
                spares,
                made=partial(self._enter, tool),
                failed=partial(self._tell, tool),
            )
            self._pools[tool] = (pool, self._group.create_task(pool.keep()))

    def want(self, tool: str, count: int) -> None:
        """Make cells."""
        if tool in self._pools:
            self._pools[tool][0].want(count)

    def get(self, name: str) -> Entry | None:
        """The cell, if it lives."""
        entry, _ = self._entries.get(name, (None, None))
        return entry if entry is not None and entry.cell.alive else None

    def put_away(self, name: str) -> None:
        """Kill a cell. One that is gone already is no matter."""
        entry, pool = self._entries.pop(name, (None, None))
        if entry is not None and pool is not None:
            self._group.create_task(self._kill(entry, pool))

    def keep_only(self, kept: set[str]) -> None:
        """Whoever wanted cells has gone: kill what is no session's, make no more, and watch the memory of the rest
        where no control group does.
        """
        for pool, _ in self._pools.values():
            pool.want_none()
        for name in self._entries.keys() - kept:
            self.put_away(name)
        for entry, pool in self._entries.values():
            if entry.cell.slot is None:
                self._watches.append(self._group.create_task(self._watch(entry, pool.recipe.memory_bytes)))

    def stop_watching(self) -> None:
        """Somebody has come who does."""
        watches, self._watches = self._watches, []
        for watch in watches:
            watch.cancel()

    async def end(self) -> None:
        """Kill everything."""
        self.stop_watching()
        pools, self._pools = list(self._pools.values()), {}
        for _, task in pools:
            task.cancel()
        for pool, task in pools:
            await self._end(pool, task)

    async def _watch(self, entry: Entry, memory_bytes: int) -> None:
        await memory.outgrows(entry.cell.pid, memory_bytes)
        log.warning("a cell outgrew its memory", tool=entry.tool)
        self.put_away(entry.name)

    async def _kill(self, entry: Entry, pool: Pool) -> None:
        try:
            await pool.put_away(entry.cell)
        except TimeoutError:  # its door is not used again
            log.error("a killed cell does not end", tool=entry.tool, pid=entry.cell.pid)

    async def _end(self, pool: Pool, task: asyncio.Task[None]) -> None:
        task.cancel()
        await asyncio.wait((task,))
        self._entries = {name: (entry, its) for name, (entry, its) in self._entries.items() if its is not pool}

    def _enter(self, tool: str, cell: HeldCell) -> None:
        entry = Entry(f"{os.getpid()}-{next(self._numbers)}", tool, cell)
        self._entries[entry.name] = (entry, self._pools[tool][0])
        self._made(entry)

    def _tell(self, tool: str, failure: WorkerFailed) -> None:
        self._failed(tool, str(failure))
