"""Virtual clock, which makes calls in the order of their times, and calls of one time in the order
of their requests."""

import heapq
from collections.abc import Callable
from typing import Any


class Timeline:
    """Queue of calls to make at virtual times. `now` is the time of the present call; it never goes
    back."""

    def __init__(self) -> None:
        self.now = 0.0
        self._heap: list[tuple[float, int, Callable[..., object], tuple[Any, ...]]] = []
        self._count = 0

    def at(self, time_s: float, call: Callable[..., object], *arguments: object) -> None:
        """Make the call at `time_s`, or now if that has passed."""
        self._count += 1
        heapq.heappush(self._heap, (max(time_s, self.now), self._count, call, arguments))

    def after(self, delay_s: float, call: Callable[..., object], *arguments: object) -> None:
        """Make the call after `delay_s` seconds."""
        self.at(self.now + delay_s, call, *arguments)

    @property
    def idle(self) -> bool:
        """Return whether no call waits."""
        return not self._heap

    def run(self, while_true: Callable[[], bool]) -> None:
        """Make calls in order until none is left or `while_true` returns False."""
        heap = self._heap
        while heap and while_true():
            self.now, _, call, arguments = heapq.heappop(heap)
            call(*arguments)
