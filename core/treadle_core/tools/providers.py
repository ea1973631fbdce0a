"""Requests to external providers: concurrency, quotas and a circuit breaker, shared by all jobs
(ARL-Tangram §5.1).

The paper's Basic manager, for what cannot be scaled up. A provider has two dimensions:
`api_concurrency:NAME`, requests at a time, one for each action; `api_quota:NAME`, requests in a
period, where it has quotas. Nothing is sent during the pause that the provider requested, nor while
its circuit breaker is open.
"""

import enum
import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

from treadle_core.tools.action import Action, Fixed, InvalidActionError
from treadle_core.tools.decision import Executing, Start
from treadle_core.tools.grants import NEVER_S, End, Ended, InvalidHoldingError, Manager, Usage
from treadle_core.tools.pools import FlatPool, InvalidPoolError

GROWTH = 2.0  # of the cool-down from one failed probe to the next
# concurrent requests to a provider that states no limit: more than a process can hold
UNLIMITED = 1 << 20


def require(good: bool, field: str, wish: str, value: object) -> None:
    """Raise InvalidPoolError for a figure that is not good."""
    if not good:
        raise InvalidPoolError(field, f"must be {wish}, is {value!r}")


class State(enum.Enum):
    """State of a circuit breaker: all requests may begin; none, for a cool-down; or one, the
    probe."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


@dataclass(frozen=True, slots=True)
class BreakerRule:
    """Rule by which the breaker opens: after `failures` in a row, or when `share` of the last
    `recent` ended requests failed."""

    failures: int = 5
    share: float = 0.5
    recent: int = 20
    cooldown_s: float = 1.0
    longest_cooldown_s: float = 60.0

    def check(self, field: str) -> None:
        """Raise InvalidPoolError with the path of the bad figure."""
        wish = "above 0 and at most longest_cooldown_s"
        require(self.failures >= 1, f"{field}.failures", "at least 1", self.failures)
        require(0.0 < self.share <= 1.0, f"{field}.share", "above 0 and at most 1", self.share)
        require(self.recent >= 1, f"{field}.recent", "at least 1", self.recent)
        require(
            0.0 < self.cooldown_s <= self.longest_cooldown_s < NEVER_S,
            f"{field}.cooldown_s",
            wish,
            self.cooldown_s,
        )


class Breaker:
    """Circuit breaker: after failures a provider is left alone, then tried with one request, then
    trusted again.

    The end of the probe closes the breaker, or opens it for twice as long. Requests that were under
    way when it opened do not count any more.
    """

    def __init__(self, rule: BreakerRule) -> None:
        self._rule = rule
        self._recent: deque[bool] = deque(maxlen=rule.recent)  # whether each failed
        self._in_a_row = 0
        self._opened = 0  # how often; a request that began before the last time is late
        self.open_until_s = -NEVER_S  # so: closed
        self._cooldown_s = rule.cooldown_s
        self._probe: str | None = None
        self._began: dict[str, int] = {}

    def state(self, now_s: float) -> State:
        if self.open_until_s == -NEVER_S:
            return State.CLOSED
        return State.OPEN if now_s < self.open_until_s else State.HALF_OPEN

    def admits(self, now_s: float) -> int:
        """Return how many requests may begin now."""
        state = self.state(now_s)
        return (
            UNLIMITED
            if state is State.CLOSED
            else int(state is State.HALF_OPEN and self._probe is None)
        )

    def begin(self, request_id: str, now_s: float) -> None:
        """Count a request that `admits` allows."""
        if self.state(now_s) is State.HALF_OPEN:
            self._probe = request_id
        self._began[request_id] = self._opened

    def end(self, request_id: str, end: End, now_s: float) -> None:
        """Count the end of a request. A provider that refuses is alive."""
        if self._began.pop(request_id) != self._opened:
            return
        if request_id == self._probe:
            self._probe = None
            if end is End.FAILED:
                self._cooldown_s = min(self._cooldown_s * GROWTH, self._rule.longest_cooldown_s)
                self._open(now_s)
            elif end is not End.ABANDONED:
                self.open_until_s = -NEVER_S
                self._cooldown_s = self._rule.cooldown_s
                self._recent.clear()
                self._in_a_row = 0
        elif end in (End.SERVED, End.FAILED):
            self._recent.append(end is End.FAILED)
            self._in_a_row = self._in_a_row + 1 if end is End.FAILED else 0
            full = len(self._recent) == self._rule.recent
            share_failed = full and sum(self._recent) >= self._rule.share * self._rule.recent
            if end is End.FAILED and (self._in_a_row >= self._rule.failures or share_failed):
                self._open(now_s)

    def _open(self, now_s: float) -> None:
        self._opened += 1
        self.open_until_s = now_s + self._cooldown_s


@dataclass(frozen=True, slots=True)
class Quota:
    """Limit of `count` requests in `period_s` seconds. sliding: in every stretch of that length;
    else from each multiple of it. slack_s: how much later than it leaves a request may reach the
    provider, which counts when it arrives."""

    count: int
    period_s: float
    sliding: bool = True
    slack_s: float = 0.0

    def check(self, field: str) -> None:
        """Raise InvalidPoolError with the path of the bad figure."""
        require(self.count >= 1, f"{field}.count", "at least 1", self.count)
        require(
            0.0 < self.period_s < NEVER_S, f"{field}.period_s", "a number above 0", self.period_s
        )
        require(
            0.0 <= self.slack_s < self.period_s,
            f"{field}.slack_s",
            "0 to below the period",
            self.slack_s,
        )


class Window:
    """Counter of the requests of a quota. Times never fall from call to call.

    A request counts for every moment in which it may have arrived, so the provider counts no more
    than the quota.
    """

    def __init__(self, quota: Quota) -> None:
        self._quota = quota
        self._taken: deque[tuple[float, int]] = deque()  # when they come back, and how many units
        self._used = 0

    def free(self, now_s: float) -> int:
        """Return the units that may be taken now."""
        self._expire(now_s)
        return self._quota.count - self._used

    def take(self, units: int, now_s: float) -> None:
        """Take at most the units that are free now."""
        self._expire(now_s)
        comes_s = now_s + self._quota.slack_s
        period_s = self._quota.period_s
        ends_s = comes_s + period_s
        if not self._quota.sliding:
            ends_s = (math.floor(comes_s / period_s) + 1) * period_s
            if ends_s <= comes_s:  # a floor that rounding made too low
                ends_s += period_s
        self._taken.append((ends_s, units))
        self._used += units

    def next_change_s(self, now_s: float) -> float:
        """Return when more units become free; NEVER_S: nothing is taken."""
        self._expire(now_s)
        return self._taken[0][0] if self._taken else NEVER_S

    def _expire(self, now_s: float) -> None:
        while self._taken and self._taken[0][0] <= now_s:
            self._used -= self._taken.popleft()[1]


def concurrency_of(provider: str) -> str:
    """Return the name of the dimension of a provider's concurrent requests."""
    return f"api_concurrency:{provider}"


def quota_of(provider: str) -> str:
    """Return the name of the dimension of a provider's requests in a period."""
    return f"api_quota:{provider}"


@dataclass(frozen=True, slots=True)
class Provider:
    """Limits of a provider. quotas: all of them hold, such as ten a second and a thousand a day."""

    name: str
    concurrency: int = UNLIMITED
    quotas: tuple[Quota, ...] = ()
    breaker: BreakerRule = BreakerRule()


class BasicManager(Manager):
    """Manager of one provider."""

    def __init__(self, provider: Provider) -> None:
        """Create the manager. Raises InvalidPoolError for a bad figure."""
        require(bool(provider.name), "provider.name", "a name", provider.name)
        require(
            provider.concurrency >= 1, "provider.concurrency", "at least 1", provider.concurrency
        )
        for index, quota in enumerate(provider.quotas):
            quota.check(f"provider.quotas[{index}]")
        provider.breaker.check("provider.breaker")
        self.provider = provider
        self._concurrency, self._quota = concurrency_of(provider.name), quota_of(provider.name)
        self._windows = [Window(quota) for quota in provider.quotas]
        self._quota_capacity = min((quota.count for quota in provider.quotas), default=0)
        self._breaker = Breaker(provider.breaker)
        self._waits_until_s = -NEVER_S
        self._ends_at_s: dict[str, float] = {}

    @property
    def dimensions(self) -> tuple[str, ...]:
        return (self._concurrency, self._quota) if self._windows else (self._concurrency,)

    def cost(self, requests: int = 1) -> Mapping[str, Fixed]:
        """Return the cost, at this manager, of an action that makes one call, which counts as
        `requests`."""
        cost = {self._concurrency: Fixed(1)}
        return {**cost, self._quota: Fixed(requests)} if self._windows else cost

    def state(self, now_s: float) -> State:
        """Return the state of the provider's circuit breaker."""
        return self._breaker.state(now_s)

    def rests_s(self, now_s: float) -> float:
        """Return the seconds until a request may begin, by the provider's pause or its breaker; 0:
        now."""
        return max(0.0, max(self._waits_until_s, self._breaker.open_until_s) - now_s)

    def check(self, action: Action) -> None:
        """Raise InvalidActionError for an action that is not one call."""
        mine = [dimension for dimension in self.dimensions if dimension in action.cost]
        if not mine:
            return
        if len(mine) < len(self.dimensions):
            missing = next(dimension for dimension in self.dimensions if dimension not in mine)
            raise InvalidActionError(
                "cost", f"lacks {missing}; ask for what `BasicManager.cost` says"
            )
        if action.cost[self._concurrency] != Fixed(1):
            raise InvalidActionError(
                f"cost[{self._concurrency}]", "must be Fixed(1); an action is one call"
            )
        if self._windows and not isinstance(action.cost[self._quota], Fixed):
            raise InvalidActionError(
                f"cost[{self._quota}]", "must be Fixed; requests are not elastic"
            )

    def pools(self, now_s: float) -> tuple[FlatPool, ...]:
        pools = [FlatPool(self._concurrency, self.provider.concurrency, self._free_calls(now_s))]
        if self._windows:
            pools.append(FlatPool(self._quota, self._quota_capacity, self._free_quota(now_s)))
        return tuple(pools)

    def executing(self, now_s: float) -> list[Executing]:
        """Return the concurrency of running actions only, as a quota comes back by the clock."""
        return [
            Executing(self._concurrency, 1, ends_at_s - now_s)
            for ends_at_s in self._ends_at_s.values()
        ]

    def take(self, start: Start, units: Mapping[str, int], now_s: float, expected_s: float) -> None:
        action_id = start.action.action_id
        if self._free_calls(now_s) < 1 or self._free_quota(now_s) < units.get(self._quota, 0):
            raise InvalidHoldingError("start.units", "more than is free")
        self._ends_at_s[action_id] = now_s + expected_s
        self._breaker.begin(action_id, now_s)
        for window in self._windows:
            window.take(units[self._quota], now_s)

    def give_back(self, action_id: str, ended: Ended, now_s: float) -> None:
        """Give back the units of an ended action. A provider that refuses without a time gets no
        request for the breaker's first cool-down."""
        del self._ends_at_s[action_id]
        self._breaker.end(action_id, ended.end, now_s)
        wait_s = ended.retry_after_s
        if wait_s is None and ended.end is End.REFUSED:
            wait_s = self.provider.breaker.cooldown_s
        if wait_s is not None:
            self._waits_until_s = max(self._waits_until_s, now_s + wait_s)

    def forget(self, trajectory_id: str) -> None:
        """Do nothing, as only actions make requests."""

    def next_change_s(self, now_s: float) -> float:
        windows = (window.next_change_s(now_s) for window in self._windows)
        changes = (self._waits_until_s, self._breaker.open_until_s, *windows)
        return min((at_s for at_s in changes if at_s > now_s), default=NEVER_S)

    def usage(self, now_s: float) -> tuple[Usage, ...]:
        calls = Usage(
            self._concurrency,
            self.provider.concurrency,
            len(self._ends_at_s),
            self._free_calls(now_s),
        )
        if not self._windows:
            return (calls,)
        capacity, free = self._quota_capacity, self._free_quota(now_s)
        return calls, Usage(self._quota, capacity, capacity - free, free)

    def _free_quota(self, now_s: float) -> int:
        return min((window.free(now_s) for window in self._windows), default=0)

    def _free_calls(self, now_s: float) -> int:
        if now_s < self._waits_until_s:
            return 0
        return min(self.provider.concurrency - len(self._ends_at_s), self._breaker.admits(now_s))
