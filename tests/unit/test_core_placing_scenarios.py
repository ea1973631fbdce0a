"""Samples of what could come of the predictions, and plans that are made for all of them."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from treadle_core.compiled import Floats, Indexes
from treadle_core.model import CostModel, DecodeCurve, EngineSpec
from treadle_core.placing import balance, placement, rank_scenarios, scenarios
from treadle_core.placing.costs import tabulate
from treadle_core.placing.question import PlanEngine
from treadle_core.placing.rank_scenarios import SHARES, hedge
from treadle_core.placing.scenarios import LEAST_SAMPLES, MOST_SAMPLES, Samples
from treadle_core.placing.solver import partition

from treadle_bench.placement.measure import least_makespan

NO_CAP = 1e18


def samples_of(lengths: Floats, doubt: float, room: float = NO_CAP) -> Samples:
    n = len(lengths)
    return scenarios.draw_samples(
        np.arange(n), lengths, np.full(n, 300.0), np.zeros(n), np.full(n, doubt), np.full(n, room)
    )


def engines(count: int, slots: int = 1_000) -> list[PlanEngine]:
    return [PlanEngine(f"e{index}", slots, 0, 1, DecodeCurve(0.01, 2e-4, 1e-8, 0.0)) for index in range(count)]


def rows(count: int) -> Floats:
    return np.tile(np.array([0.01, 2e-4, 1e-8, 1_000.0, np.inf, 0.0]), (count, 1))


def makespans(engines: Floats, samples: Samples, placement: Indexes) -> Floats:
    return scenarios.finish_samples(engines, samples, placement)[0]


def test_samples_are_spread_about_the_median_as_stated() -> None:
    lengths = np.full(1_500, 1_000.0)
    drawn = np.log(samples_of(lengths, 0.5).lengths / 1_000.0)
    assert drawn.shape == (1_500, MOST_SAMPLES)
    assert drawn.mean() == pytest.approx(0.0, abs=0.01)
    assert drawn.std() == pytest.approx(0.5, rel=0.03)
    assert np.abs(drawn.mean(axis=1)).max() < 0.05  # each trajectory's own fates are spread evenly
    assert np.corrcoef(drawn[:-1, 0], drawn[1:, 0])[0, 1] == pytest.approx(0.0, abs=0.1)


def test_a_row_fares_alike_at_each_plan_within_its_cap_and_thousands_need_fewer_samples() -> None:
    first = samples_of(np.full(100, 1_000.0), 0.5).lengths
    again = scenarios.draw_samples(
        np.array([7, 3]), np.full(2, 1_000.0), np.ones(2), np.ones(2), np.full(2, 0.5), np.full(2, NO_CAP)
    ).lengths
    assert np.array_equal(again, first[[7, 3]])
    assert samples_of(np.ones(100_000), 0.5).lengths.shape == (100_000, LEAST_SAMPLES)
    capped = samples_of(np.array([900.0, 1_000.0]), 1.0, room=1_000.0).lengths
    assert capped.min() < 900.0 < capped.max() == 1_000.0


@given(
    st.lists(st.tuples(st.floats(1.0, 40_000.0), st.floats(0.0, 60.0), st.integers(-1, 2)), min_size=1, max_size=30),
    st.floats(0.0, 1.5),
)
def test_the_mean_makespan_is_that_of_the_cost_model_sample_by_sample(
    jobs: list[tuple[float, float, int]], doubt: float
) -> None:
    lengths, tool_s = np.array([job[0] for job in jobs]), np.array([job[1] for job in jobs])
    place, contexts = np.array([job[2] for job in jobs]), np.linspace(0.0, 5_000.0, len(jobs))
    specs = [EngineSpec(f"e{at}", "", slot_limit=4 * at + 1, kv_tokens_capacity=50_000) for at in range(3)]
    table = balance.engine_rows(specs).rows
    n = len(jobs)
    samples = scenarios.draw_samples(np.arange(n), lengths, contexts, tool_s, np.full(n, doubt), np.full(n, 1e6))
    expected = [
        balance.finish_times(table, balance.work_rows(samples.lengths[:, at], contexts, tool_s), place).max()
        for at in range(samples.lengths.shape[1])
    ]
    assert makespans(table, samples, place) == pytest.approx(expected, rel=1e-12)
    assert scenarios.judge(table, samples, place).mean_makespan_s == pytest.approx(np.mean(expected), rel=1e-12)


@given(
    st.lists(st.tuples(st.floats(1.0, 40_000.0), st.floats(0.0, 60.0)), min_size=1, max_size=5),
    st.sampled_from([0.3, 1.0]),
    st.integers(0, 200),
)
def test_what_is_said_of_a_placement_holds_against_every_other(
    jobs: list[tuple[float, float]], doubt: float, seed: int
) -> None:
    specs = [EngineSpec(f"e{at}", "", slot_limit=1 + at, kv_tokens_capacity=50_000) for at in (1, 0, 1)]
    table, n = balance.engine_rows(specs).rows, len(jobs)
    lengths, tool_s = np.array(jobs).T
    samples = scenarios.draw_samples(
        np.arange(n), lengths, np.full(n, 100.0), tool_s, np.full(n, doubt), np.full(n, 1e6)
    )
    place = np.random.default_rng(seed).integers(0, 3, n)
    if seed % 4 == 0:  # as spread as may be
        place = np.argsort(-lengths).argsort() % 3
    fate, times_s = scenarios.judge(table, samples, place), makespans(table, samples, place)
    for other in itertools.product(range(3), repeat=n):
        others_s = makespans(table, samples, np.array(other))
        leaves_critical = any(fate.critical[here] and there != here for here, there in zip(place, other, strict=True))
        if fate.least or not leaves_critical:
            assert (others_s >= times_s * (1 - 1e-9)).all()


def test_nothing_beats_a_placement_whose_last_ones_have_the_fastest_engines_to_themselves() -> None:
    samples = samples_of(np.array([90_000.0, 100.0, 100.0]), 0.5)
    long_alone = scenarios.judge(rows(3), samples, np.array([1, 0, 2]))
    assert long_alone.least
    assert long_alone.critical.tolist() == [False, True, False]
    slow = rows(3)
    slow[1, 0] *= 2
    assert not scenarios.judge(slow, samples, np.array([1, 0, 2])).least
    assert not scenarios.judge(rows(3), samples, np.array([1, 1, 2])).least
    nowhere = scenarios.judge(rows(0), samples, np.full(3, -1))
    assert (nowhere.mean_makespan_s, len(nowhere.critical), nowhere.least) == (0.0, 0, False)


@given(st.integers(0, 10_000), st.integers(1, 60), st.integers(1, 6), st.sampled_from([0.2, 1.0]))
def test_a_partition_is_judged_as_the_placement_that_it_is(seed: int, n: int, m: int, doubt: float) -> None:
    rng = np.random.default_rng(seed)
    lengths, contexts = rng.lognormal(7.0, 1.5, n), rng.uniform(0.0, 9_000.0, n)
    placed, room = rng.random(n) < 0.5, rng.uniform(1e3, 1e5, n)
    specs = [PlanEngine(f"e{at}", 1 + 7 * (at % 2), 60_000, 1, DecodeCurve(0.01, 2e-4, 1e-8, 5e3)) for at in range(m)]
    costs = tabulate(CostModel.LINEAR_INTEGRAL, lengths, contexts, placed, specs)
    order, doubts = costs.order, np.full(n, doubt)
    bounds = np.concatenate(([0], np.sort(rng.integers(0, n + 1, m - 1)), [n]))
    mean_s, least = rank_scenarios.judge_partition(
        costs, rank_scenarios.draw_rank_samples(costs, contexts, doubts, room), bounds
    )
    prefill = np.where(placed, 0.0, contexts)[order]
    samples = scenarios.draw_samples(order, lengths[order], contexts[order], np.zeros(n), doubts, room[order], prefill)
    fate = scenarios.judge(costs.table.engines, samples, np.repeat(np.arange(m), np.diff(bounds)))
    assert mean_s == pytest.approx(fate.mean_makespan_s, rel=1e-9)
    assert least == fate.least


def plan_of(lengths: Floats, doubt: float, count: int = 4) -> Indexes:
    n = len(lengths)
    return placement.plan(
        lengths, np.full(n, 300.0), np.full(n, -1), engines(count), log_sigma=np.full(n, doubt)
    ).engine_of


@given(st.integers(0, 10_000), st.sampled_from([0.2, 0.5, 0.9, 2.0]))
def test_a_hedged_plan_is_done_no_later_on_average_than_the_plan_of_the_medians_or_plain_balance(
    seed: int, doubt: float
) -> None:
    lengths = np.random.default_rng(seed).lognormal(7.0, 1.0, 120)
    samples = samples_of(lengths, doubt)  # a trajectory's place among the lengths is its row: those of the plan
    hedged_s = makespans(rows(4), samples, plan_of(lengths, doubt)).mean()
    costs = tabulate(CostModel.LINEAR_INTEGRAL, lengths, np.full(120, 300.0), np.zeros(120, np.bool_), engines(4))
    for share in (0.0, 0.5, 1.0):
        bounds, _ = partition(hedge(costs, share))
        engine_of = np.empty(120, np.int64)
        engine_of[costs.order] = np.repeat(np.arange(4), np.diff(bounds))
        assert hedged_s <= makespans(rows(4), samples, engine_of).mean() * (1 + 1e-9)


def test_the_less_is_known_the_evener_the_work() -> None:
    lengths = np.sort(np.random.default_rng(1).lognormal(7.0, 1.0, 400))[::-1]
    spreads = []
    for doubt in (0.0, 2.0):
        engine_of = plan_of(lengths, doubt)
        work = np.array([lengths[engine_of == at].sum() for at in range(4)])
        spreads.append(work.max() / work.min())
    assert spreads[0] > 10.0  # the longest have an engine nearly to themselves
    assert spreads[1] < 2.0


@pytest.mark.parametrize("share", SHARES)
def test_each_share_is_solved_exactly(share: float) -> None:
    lengths = np.random.default_rng(2).lognormal(7.0, 1.0, 60)
    costs = hedge(
        tabulate(CostModel.LINEAR_INTEGRAL, lengths, np.full(60, 300.0), np.zeros(60, np.bool_), engines(3)), share
    )
    assert partition(costs)[1] == pytest.approx(least_makespan(costs), rel=1e-9)


def test_a_lone_engine_and_an_empty_question_have_plans_too() -> None:
    assert plan_of(np.array([100.0, 900.0]), 0.5, count=1).tolist() == [0, 0]
    assert len(plan_of(np.zeros(0), 0.5)) == 0
