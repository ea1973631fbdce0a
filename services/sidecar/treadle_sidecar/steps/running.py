"""One step while it is here: its record, what others want of it, and the events on their way to the caller.

Stop strings that a cut has split.

The engine looks for stop strings in what the present request sampled, so it cannot see one whose beginning was
sampled before an eviction (or on a lost engine) and whose end comes after. This looks at the text around each cut,
and only there. A match is seen after the chunk that completes it, so tokens that share its chunk stay, as they do
when the engine finds one itself in a multi-token step."""

import asyncio
from collections.abc import AsyncIterator, Sequence

from treadle_runtime.errors import TreadleError

from treadle_sidecar.engine.client import EngineClient
from treadle_sidecar.steps.record import StepRecord
from treadle_sidecar.steps.sampling import Limits
from treadle_sidecar.steps.step import Failed, Finished, StepEvent, StepOrder, Tokens


class SplitStops:
    """`tail` is the text before the cut, of which only the end matters."""

    def __init__(self, stops: Sequence[str], tail: str = "") -> None:
        self._stops = tuple(stops)
        self._reach = max((len(stop) for stop in self._stops), default=0) - 1
        self._tail = self._end_of(tail)
        self._before = len(self._tail)  # characters of the tail that were there at the cut

    def cut(self) -> None:
        """The request was cut here; what follows is another's."""
        self._before = len(self._tail)

    def completes(self, text: str) -> bool:
        """Take new text; True where it completes a stop string that began before the cut."""
        if self._reach < 1:
            return False
        joined = self._tail + text
        found = any(0 <= joined.find(stop) < self._before for stop in self._stops) if self._before else False
        self._tail = self._end_of(joined)
        dropped = len(joined) - len(self._tail)
        self._before = max(self._before - dropped, 0)
        return found

    def _end_of(self, text: str) -> str:
        return text[-self._reach :] if self._reach > 0 else ""


TAIL_TOKENS = 64  # of an output resumed from elsewhere, enough for the text in which a stop string may have begun


class RunningStep:
    """Changed by StepRunner only. `over` is set once the step has left the queue."""

    def __init__(self, order: StepOrder, limit: Limits, now: float, wall: float) -> None:
        self.order = order
        self.limit = limit
        self.record = StepRecord(order, now, wall)
        self.stops = SplitStops(order.sampling.stop)
        self.over = asyncio.Event()
        self.rid = ""
        self.admitted = False
        self.aborting = False  # the engine is being asked to let the present attempt go
        self.evicted_by = ""
        self.stopped = False  # by the caller, a pause or an error: no further attempt
        self.stop_found = False  # a stop string across a cut: what the engine samples beyond it is dropped
        self.waiting_since = now
        self._error: TreadleError | None = None
        self._wake = asyncio.Event()
        self._attempt_ended = asyncio.Event()
        self._events: asyncio.Queue[StepEvent] = asyncio.Queue()
        self._tail_known = not (order.resumed and order.sampling.stop)

    def emit(self, event: StepEvent) -> None:
        """To the caller."""
        self._events.put_nowait(event)

    async def events(self) -> AsyncIterator[StepEvent]:
        """Until Finished or Failed. Chunks that wait for a slow caller are joined."""
        while True:
            event = await self._events.get()
            while isinstance(event, Tokens) and not self._events.empty():
                following = self._events.get_nowait()
                if isinstance(following, Tokens) and following.weight_version == event.weight_version:
                    event = Tokens(
                        event.offset,
                        event.token_ids + following.token_ids,
                        event.logprobs + following.logprobs,
                        event.weight_version,
                    )
                else:
                    yield event
                    event = following
            yield event
            if isinstance(event, Finished | Failed):
                return

    def admit(self) -> None:
        """The step has a slot."""
        self.admitted = True
        self._wake.set()

    def stop_with(self, error: TreadleError | None) -> None:
        """No further attempt: the step ends as aborted, or with `error`."""
        if not self.stopped:
            self.stopped, self._error = True, error
            self._wake.set()

    def raise_if_failed(self) -> None:
        """Raises what the step was stopped with."""
        if self._error is not None:
            raise self._error

    async def slot(self) -> bool:
        """Waits for a slot; False where the step is stopped first. Raises what it was stopped with."""
        while not self.admitted and not self.stopped:
            await self._wake.wait()
            self._wake.clear()
        self.raise_if_failed()
        self._attempt_ended.clear()
        return not self.stopped

    def attempt_over(self) -> None:
        """The engine has let the attempt go."""
        self.rid = ""
        self.admitted = False
        self.aborting = False
        self._attempt_ended.set()

    async def attempt_ends_within(self, timeout_s: float) -> None:
        """Returns at the attempt's end or after `timeout_s`."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._attempt_ended.wait()
        except TimeoutError:
            return

    async def learn_tail(self, engine: EngineClient) -> None:
        """The text at the end of an output that came from another engine. Raises EngineLost, EngineRefused."""
        if not self._tail_known:
            self._tail_known = True
            self.stops = SplitStops(self.order.sampling.stop, await engine.text_of(self.order.resumed[-TAIL_TOKENS:]))
