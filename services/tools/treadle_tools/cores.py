"""The cores of this node, handed to actions first come, first served.

Invariant: the sum of what is held never exceeds the total; an action that wants many is not passed by later ones that
want few.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from treadle_runtime.errors import ResourceExhausted

RETRY_S = 1.0  # a full queue moves within a few actions, which take parts of a second


class Cores:
    """See the module. total: cores; max_waiting: actions that may wait."""

    def __init__(self, total: int, max_waiting: int) -> None:
        self.total = total
        self._free = total
        self._max_waiting = max_waiting
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    @asynccontextmanager
    async def hold(self, wanted: int) -> AsyncIterator[None]:
        """Hold `wanted` cores (all of them, where it is more) for the block. Raises ResourceExhausted when too many
        wait.
        """
        count = min(wanted, self.total)
        await self._take(count)
        try:
            yield
        finally:
            self._free += count
            self._wake()

    async def _take(self, count: int) -> None:
        if not self._waiting and count <= self._free:
            self._free -= count
            return
        if len(self._waiting) >= self._max_waiting:
            raise ResourceExhausted(
                "ACTIONS_WAITING", f"{self._max_waiting} actions wait for cores already", retry_after_s=RETRY_S
            )
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((count, turn))
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._free += count  # given in the same moment
            else:
                self._waiting.remove((count, turn))
            self._wake()
            raise

    def _wake(self) -> None:
        while self._waiting and self._waiting[0][0] <= self._free:
            count, turn = self._waiting.popleft()
            if not turn.done():
                self._free -= count
                turn.set_result(None)
