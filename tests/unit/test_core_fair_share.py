"""Start-time fair queueing: shares by weight, and equal ones of a queue, first come first served
within a job."""

import itertools
import math
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from treadle_core.fair_share import FairOrder, FairQueue, FairShare

COSTS = st.floats(0.0, 20.0, allow_nan=False)


def filled(**lines: list[float]) -> FairQueue[int]:
    """Items of so much cost, a line a job."""
    share = FairQueue[int]()
    for job, costs in lines.items():
        for index, cost in enumerate(costs):
            share.add(job, index, cost)
    return share


def take_all(share: FairQueue[int]) -> list[tuple[str, int, float]]:
    return list(iter(share.take, None))


def take_jobs(share: FairQueue[int], count: int) -> list[str]:
    """Whose items are the next ones."""
    return [taken[0] for taken in itertools.islice(iter(share.take, None), count)]


def test_a_small_job_does_not_wait_for_a_large_one_and_shares_are_of_cost_not_of_count() -> None:
    assert take_jobs(filled(large=[1.0] * 1000, small=[1.0] * 3), 6).count("small") == 3
    first = Counter(take_jobs(filled(short=[1.0] * 40, long=[4.0] * 40), 25))
    assert first["short"] == pytest.approx(4 * first["long"], abs=4)


@given(st.lists(st.tuples(st.sampled_from("abc"), COSTS), max_size=60))
def test_all_is_given_once_and_in_order_within_a_job(work: list[tuple[str, float]]) -> None:
    share = FairQueue[int]()
    for index, (job, cost) in enumerate(work):
        share.add(job, index, cost)
    assert len(share) == len(work)
    taken = take_all(share)
    assert len(share) == 0
    assert sorted(item for _, item, _ in taken) == list(range(len(work)))
    for job in "abc":
        order = [item for owner, item, _ in taken if owner == job]
        assert order == sorted(order)
        assert [cost for owner, _, cost in taken if owner == job] == [
            work[item][1] for item in order
        ]


@given(st.lists(st.lists(COSTS, min_size=1, max_size=30), min_size=2, max_size=5))
def test_jobs_that_wait_get_within_the_bound_of_each_other(costs: list[list[float]]) -> None:
    share = filled(**{str(number): line for number, line in enumerate(costs)})
    largest = max(max(line) for line in costs)
    given_to = dict.fromkeys(map(str, range(len(costs))), 0.0)
    waiting = {str(number): len(line) for number, line in enumerate(costs)}
    while all(waiting.values()):
        job, _, cost = share.take() or ("", 0, 0.0)
        waiting[job] -= 1
        given_to[job] += cost
        assert max(given_to.values()) - min(given_to.values()) <= 2 * largest + 1e-6


def test_a_job_pays_for_work_that_cost_more_than_was_said() -> None:
    share = filled(honest=[1.0] * 30, wrong=[1.0] * 30)
    assert "wrong" in take_jobs(share, 2)
    share.settle("wrong", 1.0, 11.0)
    assert take_jobs(share, 10).count("wrong") <= 1


def test_a_debt_outlives_an_empty_line_while_others_wait() -> None:
    share = filled(debtor=[1.0], other=[1.0] * 30)
    assert take_jobs(share, 1) == ["debtor"]
    share.settle("debtor", 1.0, 9.0)
    share.add("debtor", 1, 1.0)
    assert take_jobs(share, 31).index("debtor") >= 8


def test_nothing_is_saved_up_while_idle() -> None:
    share = filled(once=[1.0])
    assert share.take() == ("once", 0, 1.0)
    share.settle("once", 1.0, 0.0)
    for index in range(20):
        share.add("once", index, 5.0)
        share.add("other", index, 5.0)
    assert take_jobs(share, 10).count("other") >= 4


def test_shares_follow_the_weights_and_not_the_sizes_of_the_pieces() -> None:
    share, got = FairShare(), dict.fromkeys("ab", 0.0)
    weights, sizes = {"a": 3.0, "b": 1.0}, {"a": 1.0, "b": 7.0}
    for job in "ab":
        share.begin_waiting(job)
    for _ in range(1000):
        job = min("ab", key=share.tag)
        share.charge(job, sizes[job], weights[job])
        got[job] += sizes[job]
    assert got["a"] / got["b"] == pytest.approx(3.0, rel=0.02)


def test_a_job_that_did_not_wait_begins_beside_the_least_served_and_former_jobs_are_forgotten() -> (
    None
):
    share = FairShare()
    share.begin_waiting("a")
    share.begin_waiting("gone")
    share.charge("a", 100.0)
    share.charge("gone", 50.0)
    share.end_waiting("gone")
    share.begin_waiting("b")
    assert share.tag("b") == share.tag("a") == share.tag("gone") == 100.0
    share.charge("b", 10.0)
    share.end_waiting("b")
    share.begin_waiting("b")
    assert share.tag("b") == 110.0, "what it got above its share counts while another waits"
    for job in "ab":
        share.end_waiting(job)
    assert share.tag("a") == share.tag("b") == 0.0


@pytest.mark.parametrize("bad", [-1.0, math.nan, math.inf])
def test_a_bad_cost_is_refused(bad: float) -> None:
    with pytest.raises(ValueError, match="cost"):
        FairQueue[int]().add("job", 0, bad)


def served(order: FairOrder, asked: dict[str, list[float]]) -> list[str]:
    """Whose work one server does next, where all ask at once, and each takes as long as was
    expected."""
    waiting = [
        (order.place(job, service_s), job)
        for job, services in asked.items()
        for service_s in services
    ]
    for place, _ in sorted(waiting):
        order.begin(place)
    return [job for _, job in sorted(waiting)]


def test_places_of_a_job_that_asks_for_little_come_between_those_of_one_that_asks_for_a_lot() -> (
    None
):
    order = FairOrder()
    assert served(order, {"many": [1.0] * 100, "few": [1.0] * 3})[:6].count("few") == 3
    first = Counter(served(order, {"short": [1.0] * 40, "long": [4.0] * 40})[:25])
    assert first["short"] == pytest.approx(4 * first["long"], abs=4)


@given(st.lists(st.tuples(st.sampled_from("abc"), COSTS), max_size=60))
def test_each_place_of_a_job_is_behind_those_that_it_has(work: list[tuple[str, float]]) -> None:
    order, last = FairOrder(), dict[str, int]()
    for job, service_s in work:
        place = order.place(job, service_s)
        assert place > last.get(job, -1)
        last[job] = place


def test_a_job_that_was_idle_saves_nothing_and_what_took_longer_than_expected_counts() -> None:
    order = FairOrder()
    for _ in range(10):
        place = order.place("busy", 1.0)
        order.begin(place)
    assert order.place("idle", 1.0) == place
    order.settle("busy", 1.0, 5.0)
    assert order.place("busy", 1.0) == pytest.approx(place + 5e6, abs=10)
    order.settle("busy", 1.0, 0.0)
    assert order.place("busy", 1.0) == pytest.approx(place + 5e6, abs=10), (
        "given up, it costs nothing"
    )


def test_a_job_that_waits_for_nothing_is_forgotten() -> None:
    order = FairOrder()
    for number in range(100):
        order.begin(order.place(f"job-{number}", 1.0))
    order.begin(order.place("job-0", 1.0) + 2_000_000)
    assert len(order) == 0
