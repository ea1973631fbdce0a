"""Redundancy: the cost of a rollout against a walk over its tokens, the budget's optimum, and the
allocation against every other one."""

import itertools
import json
from collections.abc import Sequence
from dataclasses import asdict

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from treadle_core.rollouts.redundancy import (
    BudgetPolicy,
    LatencyCurve,
    LengthStatistics,
    Moments,
    allocate,
    find_budget,
    fit_latency,
    rollout_cost_s,
    sample_cost_s,
)

CURVE = LatencyCurve((1.0, 4.0, 10.0, 20.0), (0.010, 0.011, 0.020, 0.050))


def test_the_curve_goes_on_with_its_last_slope() -> None:
    assert CURVE.latency_s(np.array([0.0, 1.0, 7.0, 40.0])) == pytest.approx(
        [0.0, 0.010, 0.0155, 0.110]
    )
    for points in (
        ((), ()),
        ((1.0, 1.0), (0.1, 0.2)),
        ((1.0, 2.0), (0.2, 0.1)),
        ((0.5,), (0.1,)),
        ((1.0,), (0.0,)),
    ):
        with pytest.raises(ValueError, match=r"batch_sizes|step_s"):
            LatencyCurve(*points)


def test_a_fit_finds_the_bends_of_what_was_measured() -> None:
    sizes = [1, 2, 4, 6, 8, 10, 14, 20, 4, 10]
    fitted = fit_latency(sizes, CURVE.latency_s(np.array(sizes, float)).tolist())
    assert fitted.batch_sizes == CURVE.batch_sizes
    assert fitted.step_s == pytest.approx(CURVE.step_s)
    assert fit_latency([8.0, 8.0], [0.1, 0.1]).step_s == pytest.approx((0.1,))
    falling = fit_latency([1, 2, 4, 8], [0.03, 0.02, 0.01, 0.005])
    assert falling.step_s == pytest.approx([falling.step_s[0]] * 4), (
        "a larger batch is never faster"
    )
    with pytest.raises(ValueError, match="each measured step"):
        fit_latency([1.0, 2.0], [0.1, 0.0])


@given(st.lists(st.lists(st.integers(0, 30), max_size=24), max_size=3))
def test_a_rollout_costs_what_a_walk_over_its_tokens_costs(engines: list[list[int]]) -> None:
    def walk_s(lengths: Sequence[int]) -> float:
        alive = [sum(length > at for length in lengths) for at in range(30)]
        return sum(float(CURVE.latency_s(np.array([float(n)]))[0]) for n in alive)

    assert rollout_cost_s(CURVE, engines) == pytest.approx(max(map(walk_s, engines), default=0.0))


def test_the_cost_of_a_sample_is_the_slope_between_once_and_twice_the_samples() -> None:
    once, twice = [[3, 9, 20]], [[3, 9, 20, 3, 9, 20]]
    slope = (rollout_cost_s(CURVE, twice) - rollout_cost_s(CURVE, once)) / 3
    assert sample_cost_s(CURVE, once) == pytest.approx(slope)
    assert slope > 0.0
    with pytest.raises(ValueError, match="lengths of one"):
        sample_cost_s(CURVE, [[]])


@given(st.floats(0.1, 3.0), st.floats(1e-4, 0.1), st.floats(0.01, 10.0))
def test_no_other_budget_within_the_clamps_is_worth_more(
    variation: float, cost_s: float, trade_off: float
) -> None:
    def utility(budget: int) -> float:
        return variation * float(np.log(budget)) - trade_off * cost_s * budget

    found = find_budget(BudgetPolicy(trade_off), variation, cost_s, 64)
    assert 64 <= found <= 128
    best = max(range(64, 129), key=utility)
    assert abs(found - best) <= 1, "the optimum of whole numbers is at most one off"


def test_the_budget_grows_with_the_spread_of_lengths_and_falls_with_their_cost() -> None:
    policy = BudgetPolicy(trade_off_per_s=1.0, least=1.0, most=4.0)
    assert find_budget(policy, 0.8, 0.004, 100) == 200
    assert find_budget(policy, 1.2, 0.004, 100) == 300
    assert find_budget(policy, 0.8, 0.1, 100) == 100
    assert find_budget(policy, 0.8, 0.0, 100) == 400, "samples that cost nothing"
    with pytest.raises(ValueError, match="least and most"):
        BudgetPolicy(1.0, least=3.0, most=2.0)
    with pytest.raises(ValueError, match="trade_off_per_s"):
        BudgetPolicy(0.0)


def distances(variances: Sequence[float], counts: Sequence[int]) -> float:
    of = np.array(variances)
    spread = of.max() - of.min()
    weights = (of - of.min()) / spread if spread > 0.0 else np.ones(of.size)
    return float((weights / np.array(counts)).sum())


@given(
    st.lists(st.floats(0.0, 100.0), min_size=1, max_size=4),
    st.integers(1, 3),
    st.integers(0, 3),
    st.integers(0, 10),
)
def test_no_other_allocation_comes_nearer(
    variances: list[float], least: int, room: int, extra: int
) -> None:
    n, most = len(variances), least + room
    budget = least * n + extra
    counts = allocate(variances, budget, least, most)
    assert counts.sum() <= budget
    assert (counts >= least).all() and (counts <= most).all()
    every = itertools.product(range(least, most + 1), repeat=n)
    best = min(distances(variances, each) for each in every if sum(each) <= budget)
    assert distances(variances, counts.tolist()) == pytest.approx(best, abs=1e-12)


def test_samples_go_to_the_prompts_that_vary_most() -> None:
    assert allocate([0.0, 1.0, 9.0], 15, 4, 8).tolist() == [4, 4, 7]
    assert allocate([5.0, 5.0, 5.0], 14, 4, 8).tolist() == [5, 5, 4], (
        "all alike: evenly, the earlier ones first"
    )
    assert allocate([0.0, 9.0], 16, 4, 8).tolist() == [4, 8], (
        "a sample that gains nothing is not started"
    )
    assert allocate([], 0, 4, 8).tolist() == []
    assert allocate([0.0, 4.0, 10.0], 5, 1, 4).tolist() == [1, 2, 2], "the second sample helps most"
    alike = allocate([2.0] * 100, 450, 4, 8)
    assert alike.tolist() == [5] * 50 + [4] * 50
    large = allocate(np.arange(4_096.0), 4_096 * 12, 8, 16)
    assert large.sum() == 4_096 * 12
    assert (np.diff(large) >= 0).all()


@pytest.mark.parametrize(
    ("variances", "budget", "least", "most", "field"),
    [
        ([1.0], 4, 0, 8, "least and most"),
        ([1.0], 4, 8, 4, "least and most"),
        ([1.0, 2.0], 7, 4, 8, "budget"),
        ([-1.0], 8, 4, 8, "variances"),
        ([float("nan")], 8, 4, 8, "variances"),
    ],
)
def test_an_allocation_that_cannot_be_names_the_field(
    variances: list[float], budget: int, least: int, most: int, field: str
) -> None:
    with pytest.raises(ValueError, match=field):
        allocate(variances, budget, least, most)


def test_statistics_follow_each_prompt_and_survive_storage() -> None:
    seen = LengthStatistics()
    assert seen.variation == 0.0
    seen.observe("a", [100, 300])
    seen.observe("b", [200, 200])
    seen.observe("a", [])
    assert seen.variance("a") == pytest.approx(10_000.0)
    assert seen.variance("b") == 0.0
    assert seen.variance("never seen") == pytest.approx(5_000.0), "as the mean group"
    assert seen.variation == pytest.approx(np.std([100, 300, 200, 200]) / 200.0)
    for _ in range(20):
        seen.observe("a", [100, 100])
    assert seen.variance("a") < 100.0, "what it does now counts most"
    stored = json.loads(json.dumps(asdict(seen)))
    stored["all"] = Moments(**stored["all"])
    stored["prompts"] = {name: Moments(**each) for name, each in stored["prompts"].items()}
    assert LengthStatistics(**stored) == seen
    with pytest.raises(ValueError, match="'a'"):
        seen.observe("a", [-1])
