"""A provider's quota: so many requests in a period, counted in windows (ARL-Tangram §5.1).

A window of a fixed quota begins each period at a multiple of it; a sliding quota holds in every stretch of that length.
Whoever calls knows when a request leaves, the provider counts when it comes: `slack_s` is how much later that may be. A
request counts for every moment in which it may have come, so the provider counts no more than the quota either.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

from treadle_core.elastic.pools import InvalidPoolError
from treadle_core.managers.protocol import NEVER_S


@dataclass(frozen=True, slots=True)
class Quota:
    """At most `count` in `period_s` seconds."""

    count: int
    period_s: float
    sliding: bool = True
    slack_s: float = 0.0

    def check(self, field: str) -> None:
        """Raises InvalidPoolError with the path of the bad figure."""
        if self.count < 1:
            raise InvalidPoolError(f"{field}.count", f"must be at least 1, is {self.count}")
        if not 0.0 < self.period_s < NEVER_S:
            raise InvalidPoolError(f"{field}.period_s", f"must be a number above 0, is {self.period_s}")
        if not 0.0 <= self.slack_s < self.period_s:
            raise InvalidPoolError(f"{field}.slack_s", f"must be at least 0 and below the period, is {self.slack_s}")


class Window:
    """What of a quota is used. Times never fall from call to call."""

    def __init__(self, quota: Quota) -> None:
        self._quota = quota
        self._taken: deque[tuple[float, int]] = deque()  # when it counts no more; units
        self._used = 0

    def free(self, now_s: float) -> int:
        """Units that may be taken now."""
        self._expire(now_s)
        return self._quota.count - self._used

    def take(self, units: int, now_s: float) -> None:
        """So many were taken now: at most those free."""
        self._expire(now_s)
        self._taken.append((self._ends_s(now_s), units))
        self._used += units

    def next_change_s(self, now_s: float) -> float:
        """When more is free; NEVER_S: nothing is used."""
        self._expire(now_s)
        return self._taken[0][0] if self._taken else NEVER_S

    def _ends_s(self, now_s: float) -> float:
        quota = self._quota
        comes_s = now_s + quota.slack_s
        if quota.sliding:
            return comes_s + quota.period_s
        end_s = (math.floor(comes_s / quota.period_s) + 1) * quota.period_s
        return end_s if end_s > comes_s else end_s + quota.period_s  # a floor that rounding made too low

    def _expire(self, now_s: float) -> None:
        while self._taken and self._taken[0][0] <= now_s:
            self._used -= self._taken.popleft()[1]
