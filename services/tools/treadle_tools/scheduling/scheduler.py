"""Start actions when the dispatcher grants them cores, memory and requests to providers.

What arrives and what ends in one iteration of the event loop is decided on together; an action without a choice of
units starts at once while none waits. Owns the dispatcher, and the future of each waiting action. Invariants: what an
action holds is given back once, whether it ends, fails or is cancelled; jobs share what actions wait for equally, and
within a job the first come is the first served.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace

from treadle_core.fair_share import FairOrder
from treadle_core.tools.action import Action
from treadle_core.tools.dispatcher import Dispatcher, Started
from treadle_core.tools.grants import NEVER_S, SERVED, End, Ended
from treadle_runtime.errors import ResourceExhausted

LONG_DECISION_S = 0.5e-3  # from here on decisions take half of the loop's time at most
RETRY_S = 1.0  # a full queue moves within a few actions, which take parts of a second


@dataclass
class RunningAction:
    """ended: how it ended; the caller of `hold` sets it inside of the block."""

    started: Started
    ended: Ended = SERVED


@dataclass(eq=False)
class ActionScheduler:
    """max_waiting: actions that may wait. decided: called with each decision's seconds. clock: the dispatcher's."""

    dispatcher: Dispatcher
    max_waiting: int
    decided: Callable[[float], None] = lambda _: None
    clock: Callable[[], float] = time.monotonic
    _futures: dict[str, asyncio.Future[RunningAction]] = field(default_factory=dict, init=False)
    _changed: asyncio.Event = field(default_factory=asyncio.Event, init=False)
    _order: FairOrder = field(default_factory=FairOrder, init=False)

    @asynccontextmanager
    async def hold(self, action: Action, job: str, within_s: float | None = None) -> AsyncIterator[RunningAction]:
        """Wait until the action is granted what it asks for, and hold that for the block. job: whose share it takes;
        the action's `arrival` is set here.

        Raises ResourceExhausted when too many actions wait, TimeoutError where it does not start `within_s`.
        """
        self.dispatcher.check(action)
        expected_s = self.dispatcher.typical_s if action.single_unit_s is None else action.single_unit_s
        action = replace(action, arrival=self._order.place(job, expected_s))
        began_s, took_s = self.clock(), 0.0
        try:
            running = await self._start(action, within_s)
            self._order.begin(action.arrival)
            began_s = self.clock()
            try:
                yield running
            except BaseException:
                running.ended = Ended(End.ABANDONED)
                raise
            finally:
                took_s = self.clock() - began_s
                self._end(action, running.ended)
        finally:
            self._order.settle(job, expected_s, took_s)

    def forget(self, holder: str) -> None:
        """Free what a session holds beyond its actions."""
        self.dispatcher.forget(holder)
        self._wake()

    async def _start(self, action: Action, within_s: float | None) -> RunningAction:
        if (started := self.dispatcher.start_at_once(action, self.clock())) is not None:
            return RunningAction(started)
        waiting = len(self.dispatcher)
        if waiting >= self.max_waiting and (waiting or not action.scalable):
            why = f"{self.max_waiting} actions wait already"
            raise ResourceExhausted("ACTIONS_WAITING", why, retry_after_s=RETRY_S)
        self.dispatcher.submit(action)
        future: asyncio.Future[RunningAction] = asyncio.get_running_loop().create_future()
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
        self.dispatcher.end(action.action_id, self.clock(), ended)
        self._wake()

    async def run(self) -> None:
        """Decide for ever, once for all that happened in an iteration of the event loop."""
        next_s = NEVER_S
        while True:
            wait_s = None if next_s == NEVER_S else max(next_s - self.clock(), 0.0)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await self._changed.wait()
            self._changed.clear()
            began_s = self.clock()
            for started in self.dispatcher.decide(began_s):
                future = self._futures.pop(started.action.action_id)
                if not future.done():  # else its caller was cancelled, and will end the action
                    future.set_result(RunningAction(started))
            # As of the decision: what the clock has changed since then has not been decided on.
            next_s = self.dispatcher.next_change_s(began_s)
            took_s = self.clock() - began_s
            self.decided(took_s)
            if took_s > LONG_DECISION_S:
                # The event loop has other work; actions that arrive meanwhile are decided on together.
                await asyncio.sleep(took_s)

    def _wake(self) -> None:
        if len(self.dispatcher):
            self._changed.set()
