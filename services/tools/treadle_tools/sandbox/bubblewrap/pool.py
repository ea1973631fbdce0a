"""Cells of one tool, made as they are wanted: the keeper's side.

Owns: the tool's zygote and its doors. `keep` is the background task that makes a cell for each `want`; `put_away` kills
a cell and lets its door make another.

Cells of one tool that stand ready, so that an action waits for no fork, mount or control group.

Owns: the cells that nobody has taken yet. Invariant: a cell is handed out once, and another is wanted in its place."""

import asyncio
from collections.abc import Callable
from typing import Generic, TypeVar

import structlog

from treadle_tools.sandbox.bubblewrap.cell import CellLost, WorkerFailed
from treadle_tools.sandbox.bubblewrap.cgroups import Cgroups
from treadle_tools.sandbox.bubblewrap.door import Door
from treadle_tools.sandbox.bubblewrap.held import HeldCell
from treadle_tools.sandbox.bubblewrap.zygote import Zygote
from treadle_tools.sandbox.keeper.recipe import Recipe
from treadle_tools.sandbox.seam import Cell

log = structlog.get_logger()

RETRY_S = 1.0  # after a worker failed to start
LONGEST_RETRY_S = 30.0


class Pool:
    """See the module. spares: doors that are kept open without a cell. made, failed: where the news goes."""

    def __init__(
        self,
        recipe: Recipe,
        cgroups: Cgroups | None,
        spares: int,
        *,
        made: Callable[[HeldCell], None],
        failed: Callable[[WorkerFailed], None],
    ) -> None:
        self.recipe = recipe
        self._cgroups = cgroups
        self._spares = spares
        self._made = made
        self._failed = failed
        self._wanted = 0
        self._wants = asyncio.Event()
        self._zygote: Zygote | None = None
        self._used: dict[HeldCell, tuple[Zygote, Door]] = {}
        self._free: list[tuple[Zygote, Door]] = []

    def want(self, count: int) -> None:
        """Make that many cells more."""
        self._wanted += count
        self._wants.set()

    def want_none(self) -> None:
        """Whoever wanted cells has gone."""
        self._wanted = 0

    async def put_away(self, cell: HeldCell) -> None:
        """Kill a cell; its door makes another when one is needed."""
        await cell.kill()
        if cell not in self._used:
            return
        zygote, door = self._used.pop(cell)
        if zygote.single_use:
            await door.close()
            await zygote.close()
        elif zygote is self._zygote and door.alive and len(self._free) <= self._spares:
            self._free.append((zygote, door))
        else:
            await door.close()

    async def keep(self) -> None:
        """Make what is wanted, for ever; ends the worker and its cells when cancelled."""
        pause_s = RETRY_S
        try:
            while True:
                if self._wanted == 0:
                    self._wants.clear()
                    await self._wants.wait()
                    continue
                try:
                    cell = await self._make()
                except WorkerFailed as failure:
                    log.error("a tool's worker failed", tool=self.recipe.tool, error=str(failure))
                    self._failed(failure)
                    await self._end_zygote()
                    await asyncio.sleep(pause_s)
                    pause_s = min(2 * pause_s, LONGEST_RETRY_S)
                    continue
                pause_s = RETRY_S
                if self._wanted > 0:
                    self._wanted -= 1
                    self._made(cell)
                else:
                    await self.put_away(cell)
        finally:
            for cell in list(self._used):
                await self.put_away(cell)
            await self._end_zygote()

    async def _make(self) -> HeldCell:
        """A cell through a door that is free, or a new one. Raises WorkerFailed."""
        while self._free:
            zygote, door = self._free.pop()
            try:
                return self._remember(await door.cell(), zygote, door)
            except (OSError, CellLost) as error:
                log.warning("a door is stuck", tool=self.recipe.tool, error=str(error))
                await door.close()
        if self._zygote is None:
            self._zygote = await Zygote.start(self.recipe)
        zygote = self._zygote
        door = await zygote.door(self._cgroups)
        try:
            cell = await door.cell()
        except (OSError, CellLost) as error:
            await door.close()
            raise WorkerFailed(f"tool {self.recipe.tool!r} has no cell: {error}") from error
        if zygote.single_use:
            self._zygote = None  # it ends with its cell
        return self._remember(cell, zygote, door)

    def _remember(self, cell: HeldCell, zygote: Zygote, door: Door) -> HeldCell:
        self._used[cell] = (zygote, door)
        return cell

    async def _end_zygote(self) -> None:
        free, self._free = self._free, []
        for _, door in free:
            await door.close()
        zygote, self._zygote = self._zygote, None
        if zygote is not None:
            await zygote.close()


C = TypeVar("C", bound=Cell)

LOOK_AGAIN_S = 1.0  # whether the tool's worker has failed meanwhile


class Spares(Generic[C]):
    """See the module. want: asks for that many cells, which come in through `add`. lazy: none is made before the first
    is to be taken, so that a tool that no job uses costs nothing.
    """

    def __init__(self, count: int, want: Callable[[int], None], *, lazy: bool = False) -> None:
        self._count = count
        self._want = want
        self._ready: asyncio.Queue[C] = asyncio.Queue()
        self._failure = ""
        self._asleep = lazy

    async def take(self) -> C:
        """A cell that nothing has run in. Raises WorkerFailed where the tool's worker does not start."""
        if self._asleep:
            self._asleep = False
            self.fill()
        while True:
            if self._failure and self._ready.empty():
                raise WorkerFailed(self._failure)
            try:
                async with asyncio.timeout(LOOK_AGAIN_S):
                    cell = await self._ready.get()
            except TimeoutError:
                continue
            self._want(1)
            if cell.alive:
                return cell
            cell.close()

    def fill(self) -> None:
        """Whoever makes the cells is there, and has been asked for none yet."""
        if not self._asleep:
            self._want(self._count)

    def add(self, cell: C) -> None:
        """One that was wanted."""
        self._failure = ""
        self._ready.put_nowait(cell)

    def fail(self, why: str) -> None:
        """The worker does not start; it is tried again until it does."""
        self._failure = why

    def lose(self) -> None:
        """Whoever made the cells is gone, and they with it."""
        while not self._ready.empty():
            self._ready.get_nowait().close()
