"""A circuit breaker: after failures a provider is left alone, then tried with one request, then trusted again.

Closed: all may go. Open: none may, for a cool-down. Half-open: one may, the probe; its end closes the breaker or opens
it for twice as long. What was under way when it opened says nothing any more.
"""

from __future__ import annotations

import enum
from collections import deque
from dataclasses import dataclass

from treadle_core.elastic.pools import InvalidPoolError
from treadle_core.managers.grants import End
from treadle_core.managers.protocol import NEVER_S

GROWTH = 2.0  # of the cool-down from one failed probe to the next


class State(enum.Enum):
    """What a breaker lets through."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


@dataclass(frozen=True, slots=True)
class BreakerRule:
    """Opens after `failures` in a row, or when `share` of the last `recent` ended requests failed."""

    failures: int = 5
    share: float = 0.5
    recent: int = 20
    cooldown_s: float = 1.0
    longest_cooldown_s: float = 60.0

    def check(self, field: str) -> None:
        """Raises InvalidPoolError with the path of the bad figure."""
        if self.failures < 1:
            raise InvalidPoolError(f"{field}.failures", f"must be at least 1, is {self.failures}")
        if not 0.0 < self.share <= 1.0:
            raise InvalidPoolError(f"{field}.share", f"must be above 0 and at most 1, is {self.share}")
        if self.recent < 1:
            raise InvalidPoolError(f"{field}.recent", f"must be at least 1, is {self.recent}")
        if not 0.0 < self.cooldown_s <= self.longest_cooldown_s < NEVER_S:
            raise InvalidPoolError(
                f"{field}.cooldown_s", f"must be above 0 and at most longest_cooldown_s, is {self.cooldown_s}"
            )


class Breaker:
    """See the module."""

    def __init__(self, rule: BreakerRule) -> None:
        self._rule = rule
        self._recent: deque[bool] = deque(maxlen=rule.recent)  # whether each failed
        self._in_a_row = 0
        self._opened = 0  # how often; a request remembers it, and so whether it is of before
        self._open_until_s = -NEVER_S
        self._closed = True
        self._cooldown_s = rule.cooldown_s
        self._probe: str | None = None
        self._began: dict[str, int] = {}

    def state(self, now_s: float) -> State:
        """As of now."""
        if self._closed:
            return State.CLOSED
        return State.OPEN if now_s < self._open_until_s else State.HALF_OPEN

    def admits(self, now_s: float) -> int | None:
        """How many requests may begin now; None: any number."""
        match self.state(now_s):
            case State.CLOSED:
                return None
            case State.OPEN:
                return 0
            case State.HALF_OPEN:
                return 0 if self._probe is not None else 1

    def begin(self, request_id: str, now_s: float) -> None:
        """A request that it admits goes."""
        if self.state(now_s) is State.HALF_OPEN:
            self._probe = request_id
        self._began[request_id] = self._opened

    def end(self, request_id: str, end: End, now_s: float) -> None:
        """It has ended. A provider that refuses is alive."""
        late = self._began.pop(request_id) != self._opened
        if late:
            return
        if request_id == self._probe:
            self._probe = None
            if end is End.FAILED:
                self._cooldown_s = min(self._cooldown_s * GROWTH, self._rule.longest_cooldown_s)
                self._open(now_s)
            elif end is not End.ABANDONED:
                self._close()
        elif end in (End.SERVED, End.FAILED):
            self._count(end is End.FAILED, now_s)

    def next_change_s(self, now_s: float) -> float:
        """When it lets the probe through; NEVER_S: it waits for none."""
        return self._open_until_s if self.state(now_s) is State.OPEN else NEVER_S

    def _count(self, failed: bool, now_s: float) -> None:
        self._recent.append(failed)
        self._in_a_row = self._in_a_row + 1 if failed else 0
        full = len(self._recent) == self._rule.recent
        if failed and (
            self._in_a_row >= self._rule.failures
            or (full and sum(self._recent) >= self._rule.share * self._rule.recent)
        ):
            self._open(now_s)

    def _open(self, now_s: float) -> None:
        self._closed = False
        self._opened += 1
        self._open_until_s = now_s + self._cooldown_s

    def _close(self) -> None:
        self._closed = True
        self._cooldown_s = self._rule.cooldown_s
        self._recent.clear()
        self._in_a_row = 0
