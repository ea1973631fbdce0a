"""Deficit round robin: equal shares among jobs, first come first served within one."""

import math
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from treadle_core.tools.fair_share import FairShare

COSTS = st.floats(0.0, 20.0, allow_nan=False)


def drained(share: FairShare[int]) -> list[tuple[str, int, float]]:
    taken = []
    while (one := share.take()) is not None:
        taken.append(one)
    return taken


def test_a_small_job_does_not_wait_for_a_large_one() -> None:
    share = FairShare[int](1.0)
    for index in range(1000):
        share.add("large", index, 1.0)
    for index in range(3):
        share.add("small", index, 1.0)
    assert [job for job, _, _ in drained(share)[:6]].count("small") == 3


def test_shares_are_of_cost_not_of_count() -> None:
    share = FairShare[int](1.0)
    for index in range(40):
        share.add("short", index, 1.0)
        share.add("long", index, 4.0)
    first = Counter(job for job, _, _ in [share.take() or ("", 0, 0.0) for _ in range(25)])
    assert first["short"] == pytest.approx(4 * first["long"], abs=4)


@given(st.lists(st.tuples(st.sampled_from("abc"), COSTS), max_size=60), st.floats(0.1, 30.0))
def test_all_is_given_once_and_in_order_within_a_job(work: list[tuple[str, float]], quantum: float) -> None:
    share = FairShare[int](quantum)
    for index, (job, cost) in enumerate(work):
        share.add(job, index, cost)
    assert len(share) == len(work)
    taken = drained(share)
    assert len(share) == 0
    assert sorted(item for _, item, _ in taken) == list(range(len(work)))
    for job in "abc":
        order = [item for owner, item, _ in taken if owner == job]
        assert order == sorted(order)
        assert [cost for owner, _, cost in taken if owner == job] == [work[item][1] for item in order]


@given(st.lists(st.lists(COSTS, min_size=1, max_size=30), min_size=2, max_size=5), st.floats(0.1, 30.0))
def test_jobs_that_wait_get_within_the_bound_of_each_other(costs: list[list[float]], quantum: float) -> None:
    share = FairShare[int](quantum)
    for number, line in enumerate(costs):
        for index, cost in enumerate(line):
            share.add(str(number), index, cost)
    largest = max(max(line) for line in costs)
    given_to = dict.fromkeys(map(str, range(len(costs))), 0.0)
    waiting = {str(number): len(line) for number, line in enumerate(costs)}
    while all(waiting.values()):
        job, _, cost = share.take() or ("", 0, 0.0)
        waiting[job] -= 1
        given_to[job] += cost
        assert max(given_to.values()) - min(given_to.values()) <= quantum + 2 * largest + 1e-6


def test_a_job_pays_for_work_that_cost_more_than_was_said() -> None:
    share = FairShare[int](1.0)
    for index in range(30):
        share.add("honest", index, 1.0)
        share.add("wrong", index, 1.0)
    first = share.take()
    while first is not None and first[0] != "wrong":
        first = share.take()
    share.settle("wrong", 1.0, 11.0)
    following = [share.take() or ("", 0, 0.0) for _ in range(10)]
    assert [job for job, _, _ in following].count("wrong") <= 1


def test_a_debt_outlives_an_empty_line_while_others_wait() -> None:
    share = FairShare[int](1.0)
    share.add("debtor", 0, 1.0)
    for index in range(30):
        share.add("other", index, 1.0)
    assert (share.take() or ("",))[0] == "debtor"
    share.settle("debtor", 1.0, 9.0)
    share.add("debtor", 1, 1.0)
    order = [job for job, _, _ in drained(share)]
    assert order.index("debtor") >= 8


def test_nothing_is_saved_up_while_idle() -> None:
    share = FairShare[int](5.0)
    share.add("once", 0, 1.0)
    assert share.take() == ("once", 0, 1.0)
    share.settle("once", 1.0, 0.0)
    for index in range(20):
        share.add("once", index, 5.0)
        share.add("other", index, 5.0)
    assert Counter(job for job, _, _ in [share.take() or ("", 0, 0.0) for _ in range(10)])["other"] >= 4


@pytest.mark.parametrize("bad", [-1.0, math.nan, math.inf])
def test_a_bad_quantum_or_cost_is_refused(bad: float) -> None:
    with pytest.raises(ValueError, match="quantum"):
        FairShare[int](bad)
    with pytest.raises(ValueError, match="cost"):
        FairShare[int](1.0).add("job", 0, bad)
