"""The fast partition against everything slower: Heddle's dynamic program, and the trial of every
partition."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.placements import (
    check_without_numba,
    contiguous_costs,
    group_seconds,
    least_makespan,
    makespans_of_all,
    tokens,
    workloads,
)
from treadle_core.model import CostModel, DecodeCurve
from treadle_core.placing.placement import lower_bound
from treadle_core.placing.question import PlanEngine
from treadle_core.placing.solver import Costs, group_cost, partition, tabulate

REL = 1e-9


def lanes(lengths: list[float], slots: int) -> list[float]:
    """Tokens of at most `slots` sequences that run at once, longest first: the longest alone, the
    rest evenly."""
    rest = sorted(lengths, reverse=True)
    alone: list[float] = []
    while len(rest) + len(alone) > slots and rest[0] > sum(rest) / (slots - len(alone)):
        alone.append(rest.pop(0))
    left = slots - len(alone)
    return alone + (rest if len(rest) <= left else [sum(rest) / left] * left)


@settings(max_examples=300)
@given(st.lists(tokens, min_size=1, max_size=30), st.integers(1, 40))
def test_the_linear_cost_is_equation_four_of_darts_summed_by_interval(
    lengths: list[float], slots: int
) -> None:
    spec, n = PlanEngine("e", slots, 0, 1, DecodeCurve(0.01, 0.001, 0.0, 0.0)), len(lengths)
    costs = tabulate(
        CostModel.LINEAR_INTEGRAL, np.array(lengths), np.full(n, 50.0), np.zeros(n, bool), [spec]
    )
    rising = lanes(lengths, slots)[::-1]
    steps = zip(rising, np.diff(rising, prepend=0.0), strict=True)
    by_hand = sum(
        (0.01 + 0.001 * (len(rising) - at)) * longer for at, (_, longer) in enumerate(steps)
    )
    assert group_cost(costs.table, 0, 0, n) == pytest.approx(by_hand, rel=1e-9, abs=1e-12)


@settings(max_examples=200)
@given(workloads(n=40, m=6))
def test_the_makespan_equals_the_dynamic_program_of_the_paper(costs: Costs) -> None:
    bounds, makespan_s = partition(costs)
    assert makespan_s == pytest.approx(least_makespan(costs), rel=REL, abs=1e-12)
    assert max(group_seconds(costs, bounds)) == makespan_s
    assert (bounds[0], bounds[-1]) == (0, len(costs.table.lengths)), "each rank is in one group"
    assert (np.diff(bounds) >= 0).all()
    assert sorted(costs.order.tolist()) == list(range(len(costs.table.lengths)))


@settings(max_examples=200)
@given(workloads(n=9, m=4))
def test_the_makespan_equals_the_best_of_all_contiguous_partitions(costs: Costs) -> None:
    _, makespan_s = partition(costs)
    assert makespan_s == pytest.approx(
        min(max(found) for found in contiguous_costs(costs)), rel=REL, abs=1e-12
    )


@settings(max_examples=60)
@given(workloads(n=7, m=3, alike=True, model=CostModel.GROUP_SIZE))
def test_with_group_sizes_and_like_engines_no_partition_at_all_is_better(costs: Costs) -> None:
    """Heddle's Lemma 5.1."""
    _, makespan_s = partition(costs)
    assert makespan_s == pytest.approx(min(makespans_of_all(costs)), rel=REL, abs=1e-12)
    assert lower_bound(costs) == pytest.approx(makespan_s, rel=REL, abs=1e-12)


@settings(max_examples=100)
@given(workloads(n=6, m=3))
def test_no_assignment_whatever_beats_the_lower_bound(costs: Costs) -> None:
    assert lower_bound(costs) <= min(makespans_of_all(costs)) * (1 + REL)


@settings(max_examples=100)
@given(workloads(n=30, m=5), st.data())
def test_the_cost_of_a_group_grows_at_its_end_and_falls_with_its_head(
    costs: Costs, data: st.DataObject
) -> None:
    """What the greedy fill rests on."""
    n = len(costs.table.lengths)
    engine = data.draw(st.integers(0, len(costs.table.engines) - 1))
    first = data.draw(st.integers(0, n - 1))
    end = data.draw(st.integers(first, n - 1))
    cost = group_cost(costs.table, engine, first, end)
    assert group_cost(costs.table, engine, first, end + 1) >= cost
    assert group_cost(costs.table, engine, first + 1, end) <= cost


@pytest.mark.parametrize("model", list(CostModel))
@pytest.mark.parametrize(
    "lengths",
    [[0.0] * 12, [700.0] * 12, [1e6, *[1.0] * 11], [5.0], [0.0, 0.0, 3.0]],
    ids=lambda each: str(each[:3]),
)
@pytest.mark.parametrize("m", [1, 3, 20])
def test_extremes_are_solved_like_the_rest(model: CostModel, lengths: list[float], m: int) -> None:
    n = len(lengths)
    specs = [
        PlanEngine(f"e{i}", 3, 0, 1, DecodeCurve(0.01, 0.002 * (1 + i % 2), 1e-8, 1e4))
        for i in range(m)
    ]
    costs = tabulate(model, np.array(lengths), np.full(n, 50.0), np.arange(n) % 2 == 0, specs)
    bounds, makespan_s = partition(costs)
    assert makespan_s == pytest.approx(least_makespan(costs), rel=REL, abs=1e-15)
    assert max(group_seconds(costs, bounds)) == makespan_s


@pytest.mark.parametrize("model", list(CostModel))
def test_after_the_bottleneck_the_second_largest_cost_is_least_too_and_so_on(
    model: CostModel,
) -> None:
    """Random lengths, so that no two groups cost the same: then the sorted costs are the least in
    dictionary order."""
    rng = np.random.default_rng(7)
    for _ in range(40):
        n, m = int(rng.integers(2, 10)), int(rng.integers(2, 5))
        lengths = rng.lognormal(6.0, 1.5, n)
        spec = PlanEngine("e", int(rng.integers(1, 5)), 0, 1, DecodeCurve(0.01, 0.002, 1e-7, 1e4))
        costs = tabulate(model, lengths, rng.uniform(0, 2000, n), np.zeros(n, bool), [spec] * m)
        bounds, _ = partition(costs)
        found = sorted(group_seconds(costs, bounds), reverse=True)
        best = min(sorted(each, reverse=True) for each in contiguous_costs(costs))
        assert found == pytest.approx(best, rel=REL)


def test_a_flat_engine_takes_no_more_for_free_than_the_others_need_it_to() -> None:
    """Where a step costs the same at any batch, the bottleneck's engine could take everything at no
    cost at all."""
    lengths = np.array([50_000.0, *np.linspace(900, 100, 40)])
    flat = PlanEngine("e", 64, 0, 1, DecodeCurve(0.01, 0.0))
    bounds, makespan_s = partition(
        tabulate(CostModel.LINEAR_INTEGRAL, lengths, np.zeros(41), np.zeros(41, bool), [flat] * 4)
    )
    assert makespan_s == pytest.approx(500.0)
    assert bounds[1] == 1


@given(
    st.integers(0, 1_000), st.integers(2, 12), st.integers(2, 200), st.sampled_from([0.5, 1.5, 3.0])
)
def test_those_that_run_alone_leave_the_others_as_a_plan_without_them_would(
    seed: int, m: int, n: int, sigma: float
) -> None:
    """Balance beyond the bottleneck, engine by engine: the longest alone, then the rest solved for
    what is left."""
    lengths = -np.sort(-np.random.default_rng(seed).lognormal(6.0, sigma, n))
    engines = [
        PlanEngine(f"e{at}", 100, 0, 1, DecodeCurve(0.01, 2e-4, 1e-7, 0.0)) for at in range(m)
    ]

    def bounds_of(first: int, engine: int) -> list[int]:
        rest = lengths[first:]
        costs = tabulate(
            CostModel.LINEAR_INTEGRAL,
            rest,
            np.zeros(len(rest)),
            np.ones(len(rest), np.bool_),
            engines[engine:],
        )
        return [first + int(bound) for bound in partition(costs)[0]]

    whole = bounds_of(0, 0)
    alone = 0
    while alone < min(m, n) - 1 and whole[alone + 1] == alone + 1:
        alone += 1
        assert bounds_of(alone, alone) == whole[alone:]


def test_a_plan_without_numba_is_the_same_to_the_last_bit() -> None:
    script = """
import numpy as np
from treadle_core import compiled
from treadle_core.placing.question import PlanEngine
from treadle_core.placing.solver import tabulate
from treadle_core.model import CostModel, DecodeCurve
from treadle_core.placing.placement import lower_bound, plan
from treadle_core.placing.solver import partition
rng = np.random.default_rng(3)
engines = [PlanEngine(f"e{i}", 4 + i, 50_000, 1, DecodeCurve(0.01 / (1 + i % 3), 1e-4, 1e-8, 1e4)) for i in range(6)]
for model in CostModel:
    lengths, contexts = rng.lognormal(7, 1, 300).round(1 - model), rng.uniform(0, 900, 300)
    costs = tabulate(model, lengths, contexts, np.zeros(300, bool), engines)
    bounds, makespan_s = partition(costs)
    print(bounds.tolist(), makespan_s.hex(), float(lower_bound(costs)).hex(), costs.order.tolist())
    found = plan(lengths, contexts, rng.integers(-1, 6, 300), engines, model)
    print(compiled.HAVE_KERNELS, found.engine_of.tolist(), [each.hex() for each in found.finish_s.tolist()])
"""
    check_without_numba(script, len(CostModel))
