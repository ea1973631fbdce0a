"""Deficit round robin: equal shares among jobs, first come first served within one."""

import itertools
import math
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from treadle_core.tools.fair_share import FairShare

COSTS = st.floats(0.0, 20.0, allow_nan=False)


def filled(quantum: float, **lines: list[float]) -> FairShare[int]:
    """Items of so much cost, a line a job."""
    share = FairShare[int](quantum)
    for job, costs in lines.items():
        for index, cost in enumerate(costs):
            share.add(job, index, cost)
    return share


def take_all(share: FairShare[int]) -> list[tuple[str, int, float]]:
    return list(iter(share.take, None))


def take_jobs(share: FairShare[int], count: int) -> list[str]:
    """Whose items are the next ones."""
    return [taken[0] for taken in itertools.islice(iter(share.take, None), count)]


def test_a_cost_that_is_no_part_of_a_quantum_is_paid() -> None:
    assert take_jobs(filled(16.0, a=[16.0, 5e-324]), 2) == ["a", "a"]


def test_a_small_job_does_not_wait_for_a_large_one_and_shares_are_of_cost_not_of_count() -> None:
    assert take_jobs(filled(1.0, large=[1.0] * 1000, small=[1.0] * 3), 6).count("small") == 3
    first = Counter(take_jobs(filled(1.0, short=[1.0] * 40, long=[4.0] * 40), 25))
    assert first["short"] == pytest.approx(4 * first["long"], abs=4)


@given(st.lists(st.tuples(st.sampled_from("abc"), COSTS), max_size=60), st.floats(0.1, 30.0))
def test_all_is_given_once_and_in_order_within_a_job(work: list[tuple[str, float]], quantum: float) -> None:
    share = FairShare[int](quantum)
    for index, (job, cost) in enumerate(work):
        share.add(job, index, cost)
    assert len(share) == len(work)
    taken = take_all(share)
    assert len(share) == 0
    assert sorted(item for _, item, _ in taken) == list(range(len(work)))
    for job in "abc":
        order = [item for owner, item, _ in taken if owner == job]
        assert order == sorted(order)
        assert [cost for owner, _, cost in taken if owner == job] == [work[item][1] for item in order]


@given(st.lists(st.lists(COSTS, min_size=1, max_size=30), min_size=2, max_size=5), st.floats(0.1, 30.0))
def test_jobs_that_wait_get_within_the_bound_of_each_other(costs: list[list[float]], quantum: float) -> None:
    share = filled(quantum, **{str(number): line for number, line in enumerate(costs)})
    largest = max(max(line) for line in costs)
    given_to = dict.fromkeys(map(str, range(len(costs))), 0.0)
    waiting = {str(number): len(line) for number, line in enumerate(costs)}
    while all(waiting.values()):
        job, _, cost = share.take() or ("", 0, 0.0)
        waiting[job] -= 1
        given_to[job] += cost
        assert max(given_to.values()) - min(given_to.values()) <= quantum + 2 * largest + 1e-6


def test_a_job_pays_for_work_that_cost_more_than_was_said() -> None:
    share = filled(1.0, honest=[1.0] * 30, wrong=[1.0] * 30)
    assert "wrong" in take_jobs(share, 2)
    share.settle("wrong", 1.0, 11.0)
    assert take_jobs(share, 10).count("wrong") <= 1


def test_a_debt_outlives_an_empty_line_while_others_wait() -> None:
    share = filled(1.0, debtor=[1.0], other=[1.0] * 30)
    assert take_jobs(share, 1) == ["debtor"]
    share.settle("debtor", 1.0, 9.0)
    share.add("debtor", 1, 1.0)
    assert take_jobs(share, 31).index("debtor") >= 8


def test_nothing_is_saved_up_while_idle() -> None:
    share = filled(5.0, once=[1.0])
    assert share.take() == ("once", 0, 1.0)
    share.settle("once", 1.0, 0.0)
    for index in range(20):
        share.add("once", index, 5.0)
        share.add("other", index, 5.0)
    assert take_jobs(share, 10).count("other") >= 4


@pytest.mark.parametrize("bad", [-1.0, math.nan, math.inf])
def test_a_bad_quantum_or_cost_is_refused(bad: float) -> None:
    with pytest.raises(ValueError, match="quantum"):
        FairShare[int](bad + 1.0)
    with pytest.raises(ValueError, match="cost"):
        FairShare[int](1.0).add("job", 0, bad)
