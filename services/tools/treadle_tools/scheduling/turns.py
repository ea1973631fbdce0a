"""Whose turn it is: actions wait for cores, memory and providers, and start when the dispatcher says so.

What comes and what ends in one turn of the event loop is decided on together; an action without a choice that nobody
waits before starts at once. Cores that stay idle are lent to those that run, a little later. Owns: the dispatcher, the
future of each action that waits and the turn of each that runs. Invariants: what an action holds is given back once,
whether it ends, fails, or nobody wants it any more; a core is taken from its borrower before another is told of it.

The cores of an action that runs, as they change: who runs it says where changes are to be carried out."""

import asyncio
import contextlib
import itertools
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from treadle_core.tools.action import Action
from treadle_core.tools.dispatcher import Dispatcher, Started
from treadle_core.tools.grants import NEVER_S, SERVED, End, Ended
from treadle_core.tools.loans import LENDING_PAUSE_S
from treadle_runtime.errors import ResourceExhausted

Cores = tuple[int, ...]


class Moves:
    """See the module. Invariant: whoever listens has been told of the newest cores, and of nothing once it has left."""

    def __init__(self) -> None:
        self._cores: Cores | None = None
        self._listener: Callable[[Cores], None] | None = None
        self._counts: list[tuple[float, int]] = []  # how many from when on

    def listen(self, listener: Callable[[Cores], None]) -> None:
        """Tell of other cores from now on. Those of the grant are known; what has changed since is told at once."""
        self._listener = listener
        if self._cores is not None:
            listener(self._cores)

    def leave(self) -> None:
        """Tell no more."""
        self._listener = None

    def to(self, cores: Cores) -> None:
        """All cores that it has now, ascending."""
        self._cores = cores
        self._counts.append((time.monotonic(), len(cores)))
        if self._listener is not None:
            self._listener(cores)

    def lent(self, granted: int, began: float, ended: float) -> Mapping[int, float]:
        """Seconds between two moments by how many cores it had beyond those granted."""
        found: dict[int, float] = defaultdict(float)
        counts = [(began, granted), *self._counts, (ended, granted)]
        for (since, cores), (until, _) in itertools.pairwise(counts):
            found[cores - granted] += max(0.0, min(until, ended) - max(since, began))
        return found


LONG_DECISION_S = 0.5e-3  # from here on decisions take half of the loop's time at most
RETRY_S = 1.0  # a full queue moves within a few actions, which take parts of a second


@dataclass
class Turn:
    """An action that runs. ended: how it ended; whoever runs it says so before it lets go. moves: of its cores."""

    started: Started
    ended: Ended = SERVED
    moves: Moves = field(default_factory=Moves)


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
        self._running: dict[str, Turn] = {}
        self._lending: asyncio.TimerHandle | None = None
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
        started = self.dispatcher.submit_alone(action, self._clock())
        if started is not None:
            self._move()
            return self._start(started)
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

    def _start(self, started: Started) -> Turn:
        turn = self._running[started.action.action_id] = Turn(started)
        return turn

    def _end(self, action: Action, ended: Ended) -> None:
        del self._running[action.action_id]
        self.dispatcher.end(action.action_id, self._clock(), ended)
        self._wake()
        self._lend_soon()

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
            turn = self._start(started)
            if not future.done():  # else it is cancelled, and whoever waited for it lets go next
                future.set_result(turn)
        self._move()
        self._lend_soon()

    def _lend_soon(self) -> None:
        if self._lending is None and self.dispatcher.resources.borrowers:
            self._lending = asyncio.get_running_loop().call_later(LENDING_PAUSE_S, self._lend)

    def _lend(self) -> None:
        self._lending = None
        self.dispatcher.resources.lend(self._clock())
        self._move()

    def _move(self) -> None:
        for action_id, cores in self.dispatcher.resources.moved().items():
            self._running[action_id].moves.to(cores)
