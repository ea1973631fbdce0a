"""Whose turn it is: actions wait for cores, memory and providers, and start when the dispatcher says so.

What comes and what ends in one turn of the event loop is decided on together; an action without a choice that nobody
waits before starts at once. Owns: the dispatcher and the future of each action that waits. Invariant: what an action
holds is given back once, whether it ends, fails, or nobody wants it any more.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from treadle_core.tools.action import Action
from treadle_core.tools.dispatcher import Dispatcher, Started
from treadle_core.tools.grants import NEVER_S, SERVED, End, Ended
from treadle_runtime.errors import ResourceExhausted

LONG_DECISION_S = 0.5e-3  # from here on decisions take half of the loop's time at most
RETRY_S = 1.0  # a full queue moves within a few actions, which take parts of a second


@dataclass
class Turn:
    """An action that runs. ended: how it ended; whoever runs it says so before it lets go."""

    started: Started
    ended: Ended = SERVED


class Turns:
    """See the module. max_waiting: actions that may wait. decided: told of each decision's seconds. clock: the
    dispatcher's."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        max_waiting: int,
        decided: Callable[[float], None] = lambda _: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.dispatcher = dispatcher
        self._max_waiting = max_waiting
        self._decided = decided
        self._clock = clock
        self._futures: dict[str, asyncio.Future[Turn]] = {}
        self._changed = asyncio.Event()

    @asynccontextmanager
    async def hold(self, action: Action, within_s: float | None = None) -> AsyncIterator[Turn]:
        """Hold what the action is granted, for the block.

        Raises ResourceExhausted when too many wait, TimeoutError where its turn does not come `within_s`.
        """
        turn = await self._turn_of(action, within_s)
        try:
            yield turn
        except BaseException:
            turn.ended = Ended(End.ABANDONED)
            raise
        finally:
            self._end(action, turn.ended)

    def forget(self, holder: str) -> None:
        """What is held beyond actions for `holder` is free."""
        self.dispatcher.forget(holder)
        self._wake()

    async def _turn_of(self, action: Action, within_s: float | None) -> Turn:
        self.dispatcher.check(action)
        started = self.dispatcher.start_at_once(action, self._clock())
        if started is not None:
            return Turn(started)
        waiting = len(self.dispatcher)
        if waiting >= self._max_waiting and (waiting or not action.scalable):
            raise ResourceExhausted(
                "ACTIONS_WAITING", f"{self._max_waiting} actions wait for their turn already", retry_after_s=RETRY_S
            )
        self.dispatcher.submit(action)
        future: asyncio.Future[Turn] = asyncio.get_running_loop().create_future()
        self._futures[action.action_id] = future
        self._wake()
        try:
            async with asyncio.timeout(within_s):
                return await future
        except (asyncio.CancelledError, TimeoutError):
            if self._futures.pop(action.action_id, None) is None:
                self._end(action, Ended(End.ABANDONED))  # it has started in the same moment
            else:
                self.dispatcher.withdraw(action.action_id)
                self._wake()
            raise

    def _end(self, action: Action, ended: Ended) -> None:
        self.dispatcher.end(action.action_id, self._clock(), ended)
        self._wake()

    async def run(self) -> None:
        """Decide whenever something has changed, for ever: once for all that happened in a turn of the loop."""
        next_s = NEVER_S
        while True:
            wait_s = None if next_s == NEVER_S else max(next_s - self._clock(), 0.0)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await self._changed.wait()
            self._changed.clear()
            began_s = self._clock()
            self._decide(began_s)
            # As of the decision: what has changed by the clock since then is to be decided on, however late this is.
            next_s = self.dispatcher.next_change_s(began_s)
            took_s = self._clock() - began_s
            self._decided(took_s)
            if took_s > LONG_DECISION_S:
                await asyncio.sleep(took_s)  # the loop has other work, and what comes meanwhile is decided on together

    def _wake(self) -> None:
        if len(self.dispatcher):
            self._changed.set()

    def _decide(self, now_s: float) -> None:
        for started in self.dispatcher.decide(now_s):
            future = self._futures.pop(started.action.action_id)
            if not future.done():  # else it is cancelled, and whoever waited for it lets go next
                future.set_result(Turn(started))
