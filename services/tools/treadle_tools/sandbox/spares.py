"""Cells of one tool that stand ready, so that an action waits for no fork, mount or control group.

Owns: the cells that nobody has taken yet. Invariant: a cell is handed out once, and another is wanted in its place.
"""

import asyncio
from collections.abc import Callable
from typing import Generic, TypeVar

from treadle_tools.backend import Cell
from treadle_tools.sandbox.cell import WorkerFailed

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
