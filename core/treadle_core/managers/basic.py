"""The Basic manager: what cannot be scaled up, such as requests to a provider, shared by all jobs (ARL-Tangram §5.1).

Two dimensions a provider: `api_concurrency:NAME`, requests at a time, one for each action; `api_quota:NAME`, requests
in a period, where it has quotas. Nothing goes to a provider before the time that it asked to wait for, nor while its
breaker is open.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from treadle_core.elastic.action import Action, Fixed
from treadle_core.elastic.action_input import InvalidActionError
from treadle_core.elastic.decision import Start
from treadle_core.elastic.executing import Executing
from treadle_core.elastic.pools import FlatPool, InvalidPoolError
from treadle_core.managers.breaker import Breaker, BreakerRule, State
from treadle_core.managers.grants import End, Ended, InvalidHoldingError, Usage
from treadle_core.managers.protocol import NEVER_S
from treadle_core.managers.quota import Quota, Window

UNLIMITED = 1 << 20  # concurrent requests to a provider that states no limit: more than a process can hold
DEFAULT_BREAKER = BreakerRule()


def concurrency_of(provider: str) -> str:
    """The dimension of its requests at a time."""
    return f"api_concurrency:{provider}"


def quota_of(provider: str) -> str:
    """The dimension of its requests in a period."""
    return f"api_quota:{provider}"


@dataclass(frozen=True, slots=True)
class Provider:
    """What it allows. quotas: all of them hold, such as ten a second and a thousand a day."""

    name: str
    concurrency: int = UNLIMITED
    quotas: tuple[Quota, ...] = ()
    breaker: BreakerRule = DEFAULT_BREAKER


class BasicManager:
    """See the module. One provider's."""

    def __init__(self, provider: Provider) -> None:
        """Raises InvalidPoolError for a figure that is none."""
        if not provider.name:
            raise InvalidPoolError("provider.name", "is empty")
        if provider.concurrency < 1:
            raise InvalidPoolError("provider.concurrency", f"must be at least 1, is {provider.concurrency}")
        for index, quota in enumerate(provider.quotas):
            quota.check(f"provider.quotas[{index}]")
        provider.breaker.check("provider.breaker")
        self.provider = provider
        self._concurrency, self._quota = concurrency_of(provider.name), quota_of(provider.name)
        self._windows = [Window(quota) for quota in provider.quotas]
        self._breaker = Breaker(provider.breaker)
        self._waits_until_s = -NEVER_S
        self._ends_at_s: dict[str, float] = {}

    @property
    def dimensions(self) -> tuple[str, ...]:
        return (self._concurrency, self._quota) if self._windows else (self._concurrency,)

    def cost(self, requests: int = 1) -> Mapping[str, Fixed]:
        """What an action that makes one call, which counts as `requests`, asks of this manager."""
        cost = {self._concurrency: Fixed(1)}
        return {**cost, self._quota: Fixed(requests)} if self._windows else cost

    def state(self, now_s: float) -> State:
        """Of its breaker."""
        return self._breaker.state(now_s)

    def rests_s(self, now_s: float) -> float:
        """For how many seconds more nothing may go, whoever ends: as the provider asked, or its breaker; 0: it may."""
        opens_s = self._breaker.next_change_s(now_s)
        until_s = max(self._waits_until_s, opens_s if opens_s < NEVER_S else now_s)
        return max(0.0, until_s - now_s)

    def check(self, action: Action) -> None:
        """Raises InvalidActionError for an action that is no single call."""
        mine = [dimension for dimension in self.dimensions if dimension in action.cost]
        if not mine:
            return
        if len(mine) < len(self.dimensions):
            missing = next(dimension for dimension in self.dimensions if dimension not in mine)
            raise InvalidActionError("cost", f"lacks {missing}; ask for what `BasicManager.cost` says")
        if action.cost[self._concurrency] != Fixed(1):
            raise InvalidActionError(f"cost[{self._concurrency}]", "must be Fixed(1); an action is one call")
        if self._windows and not isinstance(action.cost[self._quota], Fixed):
            raise InvalidActionError(f"cost[{self._quota}]", "must be Fixed; requests are not elastic")

    def pools(self, now_s: float) -> tuple[FlatPool, ...]:
        pools = [FlatPool(self._concurrency, self.provider.concurrency, self._free_calls(now_s))]
        if self._windows:
            pools.append(FlatPool(self._quota, self._quota_capacity(), self._free_quota(now_s)))
        return tuple(pools)

    def executing(self, now_s: float) -> list[Executing]:
        """Requests at a time only: a quota comes back by the clock."""
        return [Executing(self._concurrency, 1, ends_at_s - now_s) for ends_at_s in self._ends_at_s.values()]

    def take(self, start: Start, units: Mapping[str, int], now_s: float, expected_s: float) -> None:
        action_id = start.action.action_id
        if action_id in self._ends_at_s:
            raise InvalidHoldingError("start.action.action_id", f"{action_id!r} calls {self.provider.name!r} already")
        if self._free_calls(now_s) < 1 or self._free_quota(now_s) < units.get(self._quota, 0):
            raise InvalidHoldingError("start.units", "more than is free")
        self._ends_at_s[action_id] = now_s + expected_s
        self._breaker.begin(action_id, now_s)
        for window in self._windows:
            window.take(units[self._quota], now_s)

    def give_back(self, action_id: str, ended: Ended, now_s: float) -> None:
        """Who refuses without saying until when is left alone for the breaker's first cool-down."""
        if self._ends_at_s.pop(action_id, None) is None:
            raise InvalidHoldingError("action_id", f"{action_id!r} does not call {self.provider.name!r}")
        self._breaker.end(action_id, ended.end, now_s)
        wait_s = ended.retry_after_s
        if wait_s is None and ended.end is End.REFUSED:
            wait_s = self.provider.breaker.cooldown_s
        if wait_s is not None:
            self._waits_until_s = max(self._waits_until_s, now_s + wait_s)

    def forget(self, trajectory_id: str) -> None:
        """Requests are of actions alone."""

    def next_change_s(self, now_s: float) -> float:
        changes = [window.next_change_s(now_s) for window in self._windows]
        changes.append(self._breaker.next_change_s(now_s))
        if now_s < self._waits_until_s:
            changes.append(self._waits_until_s)
        return min(changes)

    def usage(self, now_s: float) -> tuple[Usage, ...]:
        calls = Usage(self._concurrency, self.provider.concurrency, len(self._ends_at_s), self._free_calls(now_s))
        if not self._windows:
            return (calls,)
        capacity, free = self._quota_capacity(), self._free_quota(now_s)
        return calls, Usage(self._quota, capacity, capacity - free, free)

    def _quota_capacity(self) -> int:
        return min(quota.count for quota in self.provider.quotas)

    def _free_quota(self, now_s: float) -> int:
        free = [window.free(now_s) for window in self._windows]
        return min([*free, self._quota_capacity()]) if free else 0

    def _free_calls(self, now_s: float) -> int:
        if now_s < self._waits_until_s:
            return 0
        free = self.provider.concurrency - len(self._ends_at_s)
        admitted = self._breaker.admits(now_s)
        return free if admitted is None else min(free, admitted)
