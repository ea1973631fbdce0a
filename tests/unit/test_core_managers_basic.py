"""Requests to providers: quotas in every window, Retry-After, and when a provider is left alone."""

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from treadle_core.tools.action import Action, Fixed, InvalidActionError, Range
from treadle_core.tools.decision import ActionQueue, Start, decide
from treadle_core.tools.grants import SERVED, End, Ended, InvalidHoldingError, units_of
from treadle_core.tools.pools import InvalidPoolError
from treadle_core.tools.providers import (
    UNLIMITED,
    BasicManager,
    Breaker,
    BreakerRule,
    Provider,
    Quota,
    State,
    Window,
    concurrency_of,
    quota_of,
)

FAILED, REFUSED, ABANDONED = Ended(End.FAILED), Ended(End.REFUSED), Ended(End.ABANDONED)
AFTER_A_MOMENT = st.floats(0.0, 3.0, allow_nan=False)


def call(manager: BasicManager, action_id: str, now_s: float, requests: int = 1) -> None:
    start = Start(Action(action_id, action_id, 0, manager.cost(requests)), 1, None, None)
    manager.take(start, units_of(start), now_s, 1.0)


def room(manager: BasicManager, now_s: float) -> int:
    """How many calls of one request a decision would start now."""
    pools = manager.pools(now_s)
    waiting = ActionQueue({pool.dimension: pool.capacity for pool in pools})
    for index in range(40):
        waiting.add(Action(f"w{index}", f"w{index}", index, manager.cost()))
    return len(decide(waiting, pools, manager.executing(now_s), 1.0))


@given(
    count=st.integers(1, 5),
    period_s=st.floats(0.05, 10.0),
    sliding=st.booleans(),
    slack=st.floats(0.0, 0.9),
    calls=st.lists(st.tuples(AFTER_A_MOMENT, st.integers(0, 5), st.floats(0.0, 1.0))),
)
def test_no_window_ever_holds_more_than_the_quota(
    count: int, period_s: float, sliding: bool, slack: float, calls: list[tuple[float, int, float]]
) -> None:
    """Whenever within the slack each request comes, the provider counts no more than the quota."""
    quota = Quota(count, period_s, sliding, slack * period_s)
    window = Window(quota)
    now_s, come = 0.0, list[float]()
    for pause_s, asked, late in calls:
        now_s += pause_s
        units = min(asked, window.free(now_s))
        if units:
            window.take(units, now_s)
        assert 0 <= window.free(now_s) <= count
        come += [now_s + late * quota.slack_s] * units
    rounding = 1e-9 * (1.0 + now_s)
    for first in come:
        if sliding:
            inside = [at for at in come if first <= at < first + period_s - rounding]
        else:
            begin_s = math.floor(first / period_s) * period_s
            inside = [at for at in come if begin_s + rounding <= at < begin_s + period_s - rounding]
        assert len(inside) <= count


@given(
    st.integers(1, 5), st.floats(0.05, 10.0), st.booleans(), st.lists(AFTER_A_MOMENT, min_size=1)
)
def test_more_is_free_when_the_window_says_so_and_not_before(
    count: int, period_s: float, sliding: bool, pauses: list[float]
) -> None:
    window = Window(Quota(count, period_s, sliding))
    now_s = 0.0
    for pause_s in pauses:
        now_s += pause_s
        if window.free(now_s):
            window.take(1, now_s)
        free = window.free(now_s)
        change_s = window.next_change_s(now_s)
        assert now_s < change_s <= now_s + period_s * (1 + 1e-9)
        assert window.free(math.nextafter(change_s, -math.inf)) == free
        now_s = change_s
        assert window.free(now_s) > free


def test_a_quota_is_shared_by_all_and_comes_back_by_the_clock() -> None:
    manager = BasicManager(
        Provider("search", concurrency=3, quotas=(Quota(4, 10.0), Quota(5, 60.0)))
    )
    assert room(manager, 0.0) == 3
    for name in ("c0", "c1", "c2"):
        call(manager, name, 0.0)
    assert room(manager, 0.0) == 0
    for name in ("c0", "c1", "c2"):
        manager.give_back(name, SERVED, 1.0)
    assert room(manager, 1.0) == 1
    call(manager, "c3", 1.0)
    assert manager.next_change_s(1.0) == 10.0
    assert room(manager, 10.0) == 1  # of the minute's quota
    assert [(each.held, each.free) for each in manager.usage(10.0)] == [(1, 2), (3, 1)]


@pytest.mark.parametrize(
    ("ended", "until_s"),
    [(Ended(End.REFUSED, 7.0), 8.0), (Ended(End.SERVED, 3.0), 4.0), (REFUSED, 3.0), (SERVED, 1.0)],
)
def test_nothing_goes_to_a_provider_before_the_time_it_asked_to_wait_for(
    ended: Ended, until_s: float
) -> None:
    """One that does not say until when is left alone for the breaker's cool-down, here 2 s."""
    manager = BasicManager(Provider("search", concurrency=2, breaker=BreakerRule(cooldown_s=2.0)))
    call(manager, "c", 0.0)
    manager.give_back("c", ended, 1.0)
    if until_s > 1.0:
        assert room(manager, math.nextafter(until_s, 0.0)) == 0
        assert manager.next_change_s(1.0) == until_s
        with pytest.raises(InvalidHoldingError):
            call(manager, "d", 1.0)
    assert room(manager, until_s) == 2


def test_an_earlier_time_to_wait_does_not_shorten_a_later_one() -> None:
    manager = BasicManager(Provider("search"))
    for name in ("a", "b"):
        call(manager, name, 0.0)
    for name, wait_s in (("a", 10.0), ("b", 1.0)):
        manager.give_back(name, Ended(End.REFUSED, wait_s), 0.0)
    assert manager.next_change_s(0.0) == 10.0


def fail(breaker: Breaker, name: str, now_s: float, end: End = End.FAILED) -> None:
    breaker.begin(name, now_s)
    breaker.end(name, end, now_s)


def test_a_breaker_opens_after_failures_in_a_row_tries_one_and_waits_twice_as_long_each_time() -> (
    None
):
    """WHEN    a provider fails, is tried after the cool-down, fails again and again, and then
    serves Result: open for 1, 2, 4, 4 s (the longest), one probe each; then closed, and the next
    cool-down is 1 s again"""
    breaker = Breaker(BreakerRule(failures=3, recent=100, cooldown_s=1.0, longest_cooldown_s=4.0))
    for end in (End.FAILED, End.FAILED, End.SERVED, End.FAILED, End.FAILED):
        fail(breaker, "a", 0.0, end)
    assert (breaker.state(0.0), breaker.admits(0.0)) == (State.CLOSED, UNLIMITED)
    fail(breaker, "c", 0.0)
    now_s = 0.0
    for cooldown_s in (1.0, 2.0, 4.0, 4.0):
        assert (breaker.state(now_s), breaker.admits(now_s)) == (State.OPEN, 0)
        assert breaker.open_until_s == now_s + cooldown_s
        now_s += cooldown_s
        assert (breaker.state(now_s), breaker.admits(now_s)) == (State.HALF_OPEN, 1)
        breaker.begin("probe", now_s)
        assert breaker.admits(now_s) == 0
        breaker.end("probe", End.FAILED, now_s)
    now_s += 4.0
    fail(breaker, "probe", now_s, End.SERVED)
    assert breaker.state(now_s) is State.CLOSED
    for name in ("a", "b", "c"):
        fail(breaker, name, now_s)
    assert breaker.open_until_s == now_s + 1.0


def test_a_breaker_opens_when_a_share_of_the_recent_requests_failed() -> None:
    breaker = Breaker(BreakerRule(failures=100, share=0.5, recent=4))
    for end in (End.SERVED, End.FAILED, End.SERVED, End.ABANDONED, End.REFUSED):
        fail(breaker, "a", 0.0, end)
    assert breaker.state(0.0) is State.CLOSED
    fail(breaker, "d", 0.0)
    assert breaker.state(0.0) is State.OPEN


def test_what_was_under_way_when_a_breaker_opened_says_nothing_about_it_any_more() -> None:
    breaker = Breaker(BreakerRule(failures=1, cooldown_s=1.0))
    for name in ("slow", "late"):
        breaker.begin(name, 0.0)
    fail(breaker, "a", 0.0)
    breaker.end("slow", End.FAILED, 0.5)
    assert breaker.state(1.0) is State.HALF_OPEN
    breaker.begin("probe", 1.0)
    breaker.end("late", End.SERVED, 1.5)
    assert breaker.admits(1.5) == 0
    breaker.end("probe", End.ABANDONED, 2.0)
    assert breaker.admits(2.0) == 1
    breaker.begin("next", 2.0)
    breaker.end("next", End.REFUSED, 2.0)
    assert breaker.state(2.0) is State.CLOSED  # who refuses is alive


def test_a_half_open_provider_gets_one_of_those_that_wait() -> None:
    manager = BasicManager(
        Provider("search", quotas=(Quota(100, 1.0),), breaker=BreakerRule(failures=1))
    )
    call(manager, "a", 0.0)
    manager.give_back("a", FAILED, 0.0)
    assert (manager.state(0.5), room(manager, 0.5)) == (State.OPEN, 0)
    assert manager.next_change_s(0.5) == 1.0
    assert room(manager, 1.0) == 1
    call(manager, "b", 1.0)
    assert room(manager, 1.0) == 0
    manager.give_back("b", SERVED, 1.1)
    assert room(manager, 1.1) == 40


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"name": ""}, "provider.name"),
        ({"concurrency": 0}, "provider.concurrency"),
        ({"quotas": (Quota(1, 1.0), Quota(0, 1.0))}, "provider.quotas[1].count"),
        ({"quotas": (Quota(1, math.nan),)}, "provider.quotas[0].period_s"),
        ({"quotas": (Quota(1, 1.0, True, 1.0),)}, "provider.quotas[0].slack_s"),
        ({"breaker": BreakerRule(failures=0)}, "provider.breaker.failures"),
        ({"breaker": BreakerRule(share=math.nan)}, "provider.breaker.share"),
        ({"breaker": BreakerRule(recent=0)}, "provider.breaker.recent"),
        ({"breaker": BreakerRule(cooldown_s=90.0)}, "provider.breaker.cooldown_s"),
    ],
)
def test_a_provider_with_a_figure_that_is_none_is_refused(
    fields: dict[str, Any], field: str
) -> None:
    with pytest.raises(InvalidPoolError) as refused:
        BasicManager(Provider(**{"name": "search", **fields}))
    assert refused.value.field == field


@pytest.mark.parametrize(
    ("cost", "field"),
    [
        ({concurrency_of("search"): Fixed(1)}, "cost"),
        (
            {concurrency_of("search"): Fixed(2), quota_of("search"): Fixed(1)},
            "cost[api_concurrency:search]",
        ),
        (
            {concurrency_of("search"): Fixed(1), quota_of("search"): Range(1, 2)},
            "cost[api_quota:search]",
        ),
    ],
)
def test_an_action_is_one_call(cost: dict[str, Any], field: str) -> None:
    manager = BasicManager(Provider("search", quotas=(Quota(5, 1.0),)))
    with pytest.raises(InvalidActionError) as refused:
        manager.check(Action("x", "t", 0, cost))
    assert refused.value.field == field
    manager.check(Action("x", "t", 0, {"cpu_cores": Fixed(1)}))
