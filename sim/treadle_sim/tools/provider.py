"""A provider of an API, as it behaves: so many requests at a time, so many in a window, and a refusal for the rest."""

from __future__ import annotations

import math
from dataclasses import dataclass

from treadle_core.managers.basic import BasicManager, Provider
from treadle_core.managers.quota import Quota


@dataclass(frozen=True, slots=True)
class Limits:
    """concurrency: requests at a time. quota in each period, counted from multiples of it. refusal_s: until a refusal
    is back."""

    concurrency: int
    quota: int
    period_s: float
    refusal_s: float = 0.1


class ProviderModel:
    """See the module. Times never fall from call to call."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.refused = 0
        self.most_at_once = 0
        self.most_in_a_window = 0
        self._at_once = 0
        self._window = -1
        self._in_window = 0

    def admit(self, now_s: float) -> bool:
        """Whether a request that comes now is served; it counts against the quota only if it is."""
        window = math.floor(now_s / self.limits.period_s)
        if window != self._window:
            self._window, self._in_window = window, 0
        if self._at_once >= self.limits.concurrency or self._in_window >= self.limits.quota:
            self.refused += 1
            return False
        self._at_once += 1
        self._in_window += 1
        self.most_at_once = max(self.most_at_once, self._at_once)
        self.most_in_a_window = max(self.most_in_a_window, self._in_window)
        return True

    def leave(self) -> None:
        """A request that was served has ended."""
        self._at_once -= 1


def manager_of(limits: Limits, name: str) -> BasicManager:
    """The Basic manager that is told the same limits."""
    return BasicManager(Provider(name, limits.concurrency, (Quota(limits.quota, limits.period_s, sliding=False),)))
