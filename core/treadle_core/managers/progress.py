"""How far an action has come whose units change while it runs."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable


class Progress:
    """An action's work from its start on. Times are of one clock that never falls; units are of its key dimension.

    seconds: that all its work takes, by units. joining_s: how long a unit that it has not had before is busy with
    itself before it helps, as a worker that starts is. Units that are taken away and come back help at once.
    """

    def __init__(self, seconds: Callable[[int], float], units: int, joining_s: float, starts_s: float) -> None:
        self.units = units
        self.joining_s = joining_s
        self._seconds = seconds
        self._joined = units
        self._joining: deque[tuple[float, int]] = deque()  # when so many will have joined
        self._left = 1.0
        self._since_s = starts_s

    @property
    def had(self) -> int:
        """The most units that it has had: no more of it has to join."""
        return self._joining[-1][1] if self._joining else self._joined

    @property
    def effective(self) -> int:
        """Units that help."""
        return min(self.units, self._joined)

    def left(self, now_s: float) -> float:
        """The share of its work that is left, from 1 to 0."""
        self._advance(now_s)
        return self._left

    def move(self, units: int, now_s: float) -> None:
        """From now on it has so many."""
        self._advance(now_s)
        if units > self.had:
            self._joining.append((max(now_s, self._since_s) + self.joining_s, units))
            self._advance(now_s)
        self.units = units

    def ends_at_s(self) -> float:
        """When its work is done if nothing changes."""
        left, since_s, joined = self._left, self._since_s, self._joined
        for at_s, units in self._joining:
            done = (at_s - since_s) / self._seconds(min(self.units, joined))
            if done >= left:
                break
            left, since_s, joined = left - done, at_s, units
        return since_s + left * self._seconds(min(self.units, joined))

    def _advance(self, now_s: float) -> None:
        while self._joining and self._joining[0][0] <= now_s:
            at_s, units = self._joining.popleft()
            self._work(at_s)
            self._joined = units
        self._work(now_s)

    def _work(self, until_s: float) -> None:
        if until_s > self._since_s:
            seconds = self._seconds(self.effective)
            done = (until_s - self._since_s) / seconds if seconds > 0.0 else 1.0
            self._left, self._since_s = max(0.0, self._left - done), until_s
