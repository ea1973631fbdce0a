"""Warm cells of one tool: a few stand ready, so that an action waits for no fork, mount or control group.

Owns: the tool's zygote, its doors and its spare cells. `keep` is the background task that makes them; `take` hands a
cell out, never twice; `put_away` kills it and lets its door make another.
"""

import asyncio

import structlog

from treadle_tools.sandbox.bubblewrap import Bubblewrap
from treadle_tools.sandbox.cell import Cell, CellLost
from treadle_tools.sandbox.cgroups import Cgroups
from treadle_tools.sandbox.door import Door
from treadle_tools.sandbox.zygote import WorkerFailed, Zygote
from treadle_tools.tool import Tool

log = structlog.get_logger()

RETRY_S = 1.0  # after a worker failed to start
LONGEST_RETRY_S = 30.0


class Pool:
    """See the module. spares: cells that stand ready."""

    def __init__(self, tool: Tool, sandbox: Bubblewrap, cgroups: Cgroups | None, spares: int) -> None:
        self._tool = tool
        self._sandbox = sandbox
        self._cgroups = cgroups
        self._spares: asyncio.Queue[Cell] = asyncio.Queue(spares)
        self._failure: WorkerFailed | None = None
        self._zygote: Zygote | None = None
        self._used: dict[Cell, tuple[Zygote, Door]] = {}
        self._free: list[tuple[Zygote, Door]] = []

    async def take(self) -> Cell:
        """A cell that nothing has run in. Raises WorkerFailed where the tool's worker does not start."""
        while True:
            if self._failure is not None and self._spares.empty():
                raise self._failure
            try:
                async with asyncio.timeout(RETRY_S):  # then look again whether the worker has failed
                    cell = await self._spares.get()
            except TimeoutError:
                continue
            if cell.alive:
                return cell
            await self.put_away(cell)

    async def put_away(self, cell: Cell) -> None:
        """Kill a cell; its door makes another when one is needed."""
        await cell.kill()
        if cell not in self._used:
            return
        zygote, door = self._used.pop(cell)
        if zygote.single_use:
            await door.close()
            await zygote.close()
        elif zygote is self._zygote and door.alive and len(self._free) <= self._spares.maxsize:
            self._free.append((zygote, door))
        else:
            await door.close()

    async def keep(self) -> None:
        """Keep spares ready, for ever; ends the worker and its cells when cancelled."""
        pause_s = RETRY_S
        try:
            while True:
                try:
                    cell = await self._make()
                except WorkerFailed as failure:
                    if self._failure is None:
                        log.error("a tool's worker failed", tool=self._tool.name, error=str(failure))
                    self._failure = failure
                    await self._end_zygote()
                    await asyncio.sleep(pause_s)
                    pause_s = min(2 * pause_s, LONGEST_RETRY_S)
                    continue
                self._failure, pause_s = None, RETRY_S
                await self._spares.put(cell)
        finally:
            for cell in list(self._used):
                await self.put_away(cell)
            await self._end_zygote()

    async def _make(self) -> Cell:
        """A cell through a door that is free, or a new one. Raises WorkerFailed."""
        while self._free:
            zygote, door = self._free.pop()
            try:
                return self._remember(await door.cell(), zygote, door)
            except (OSError, CellLost) as error:
                log.warning("a door is stuck", tool=self._tool.name, error=str(error))
                await door.close()
        if self._zygote is None:
            self._zygote = await Zygote.start(self._sandbox, self._tool)
        zygote = self._zygote
        door = await zygote.door(self._cgroups)
        try:
            cell = await door.cell()
        except (OSError, CellLost) as error:
            await door.close()
            raise WorkerFailed(f"tool {self._tool.name!r} has no cell: {error}") from error
        if zygote.single_use:
            self._zygote = None  # it ends with its cell
        return self._remember(cell, zygote, door)

    def _remember(self, cell: Cell, zygote: Zygote, door: Door) -> Cell:
        self._used[cell] = (zygote, door)
        return cell

    async def _end_zygote(self) -> None:
        free, self._free = self._free, []
        for _, door in free:
            await door.close()
        zygote, self._zygote = self._zygote, None
        if zygote is not None:
            await zygote.close()
