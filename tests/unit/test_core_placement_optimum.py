"""The fast partition against everything slower: Heddle's dynamic program, and the trial of every partition."""

import itertools
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from treadle_core.actions import PlanEngine
from treadle_core.costs import CostModel, Costs, group_cost, tabulate
from treadle_core.model import DecodeCurve
from treadle_core.placement_bound import lower_bound
from treadle_core.placement_oracle import least_makespan
from treadle_core.placement_solver import partition

REL = 1e-9

curves = st.builds(
    DecodeCurve,
    base_s=st.floats(1e-4, 0.1),
    per_sequence_s=st.one_of(st.just(0.0), st.floats(1e-6, 0.01)),
    per_kv_token_s=st.one_of(st.just(0.0), st.floats(1e-9, 1e-6)),
    prefill_tokens_per_s=st.one_of(st.just(0.0), st.floats(100.0, 1e5)),
)
engines = st.builds(
    PlanEngine,
    engine_id=st.just("e"),
    slot_limit=st.integers(1, 12),
    kv_tokens_capacity=st.one_of(st.just(0), st.integers(100, 100_000)),
    tensor_parallel=st.sampled_from([1, 2, 4, 8]),
    decode_curve=curves,
)
tokens = st.one_of(st.sampled_from([0.0, 1.0, 100.0]), st.floats(0.0, 40_000.0))
models = st.sampled_from(list(CostModel))


@st.composite
def workloads(draw: st.DrawFn, *, n: int, m: int, alike: bool = False) -> Costs:
    count = draw(st.integers(1, n))
    lengths = np.array(draw(st.lists(tokens, min_size=count, max_size=count)))
    contexts = np.array(draw(st.lists(tokens, min_size=count, max_size=count)))
    placed = np.array(draw(st.lists(st.booleans(), min_size=count, max_size=count)))
    number = draw(st.integers(1, m))
    those = [draw(engines)] * number if alike else draw(st.lists(engines, min_size=number, max_size=number))
    return tabulate(draw(models), lengths, contexts, placed, those)


def group_costs(costs: Costs, bounds: "np.typing.NDArray[np.int64]") -> list[float]:
    return [group_cost(costs.table, e, int(bounds[e]), int(bounds[e + 1])) for e in range(len(bounds) - 1)]


def contiguous_costs(costs: Costs) -> list[list[float]]:
    """The costs of the groups of every contiguous partition, empty groups allowed."""
    n, m = len(costs.table.lengths), len(costs.table.engines)
    return [
        [group_cost(costs.table, e, *pair) for e, pair in enumerate(itertools.pairwise((0, *cuts, n)))]
        for cuts in itertools.combinations_with_replacement(range(n + 1), m - 1)
    ]


def any_makespans(costs: Costs) -> list[float]:
    """The makespan of every assignment whatever, each group's cost computed afresh from its members."""
    table = costs.table
    kv, prefill = np.diff(table.sum_kv), np.diff(table.sum_prefill)
    spans = []
    for choice in itertools.product(range(len(table.engines)), repeat=len(table.lengths)):
        of = np.array(choice)
        worst = 0.0
        for engine, (base, sequence, per_kv, slots, capacity, prefill_s) in enumerate(table.engines):
            mine = of == engine
            if not mine.any():
                continue
            longest, work, size = table.lengths[mine].max(), table.lengths[mine].sum(), mine.sum()
            if table.model == CostModel.GROUP_SIZE:
                cost = (base + sequence * min(size, slots)) * max(1.0, size / slots) * longest
            else:
                steps = max(longest, work / slots, kv[mine].sum() / capacity)
                cost = base * steps + sequence * work + per_kv * kv[mine].sum() + prefill_s * prefill[mine].sum()
            worst = max(worst, cost)
        spans.append(float(worst))
    return spans


@settings(max_examples=150, deadline=None)
@given(workloads(n=40, m=6))
def test_the_makespan_equals_the_dynamic_program_of_the_paper(costs: Costs) -> None:
    bounds, makespan_s = partition(costs)
    assert makespan_s == pytest.approx(least_makespan(costs), rel=REL, abs=1e-12)
    assert max(group_costs(costs, bounds)) == makespan_s


@settings(max_examples=150, deadline=None)
@given(workloads(n=9, m=4))
def test_the_makespan_equals_the_best_of_all_contiguous_partitions(costs: Costs) -> None:
    _, makespan_s = partition(costs)
    assert makespan_s == pytest.approx(min(max(found) for found in contiguous_costs(costs)), rel=REL, abs=1e-12)


@settings(max_examples=60, deadline=None)
@given(workloads(n=7, m=3, alike=True))
def test_with_group_sizes_and_like_engines_no_partition_at_all_is_better(costs: Costs) -> None:
    """Heddle's Lemma 5.1."""
    costs = Costs(costs.table._replace(model=int(CostModel.GROUP_SIZE)), costs.order, costs.engine_order)
    _, makespan_s = partition(costs)
    assert makespan_s == pytest.approx(min(any_makespans(costs)), rel=REL, abs=1e-12)


@settings(max_examples=100, deadline=None)
@given(workloads(n=6, m=3))
def test_no_assignment_whatever_beats_the_lower_bound(costs: Costs) -> None:
    assert lower_bound(costs) <= min(any_makespans(costs)) * (1 + REL)


@settings(max_examples=100, deadline=None)
@given(workloads(n=60, m=8))
def test_the_groups_cover_every_rank_once_and_in_order(costs: Costs) -> None:
    bounds, _ = partition(costs)
    assert bounds[0] == 0
    assert bounds[-1] == len(costs.table.lengths)
    assert (np.diff(bounds) >= 0).all()
    assert sorted(costs.order.tolist()) == list(range(len(costs.table.lengths)))


@settings(max_examples=60, deadline=None)
@given(workloads(n=30, m=5), st.data())
def test_the_cost_of_a_group_grows_at_its_end_and_falls_with_its_head(costs: Costs, data: st.DataObject) -> None:
    n = len(costs.table.lengths)
    engine = data.draw(st.integers(0, len(costs.table.engines) - 1))
    first = data.draw(st.integers(0, n - 1))
    end = data.draw(st.integers(first, n - 1))
    cost = group_cost(costs.table, engine, first, end)
    assert group_cost(costs.table, engine, first, end + 1) >= cost
    assert group_cost(costs.table, engine, first + 1, end) <= cost


@pytest.mark.parametrize("model", list(CostModel))
def test_after_the_bottleneck_the_second_largest_cost_is_least_too_and_so_on(model: CostModel) -> None:
    """Random lengths, so that no two groups cost the same: then the sorted costs are the least in dictionary order."""
    rng = np.random.default_rng(7)
    for _ in range(40):
        n, m = int(rng.integers(2, 10)), int(rng.integers(2, 5))
        lengths = rng.lognormal(6.0, 1.5, n)
        spec = PlanEngine("e", int(rng.integers(1, 5)), 0, 1, DecodeCurve(0.01, 0.002, 1e-7, 1e4))
        costs = tabulate(model, lengths, rng.uniform(0, 2000, n), np.zeros(n, bool), [spec] * m)
        bounds, _ = partition(costs)
        found = sorted(group_costs(costs, bounds), reverse=True)
        best = min(sorted(each, reverse=True) for each in contiguous_costs(costs))
        assert found == pytest.approx(best, rel=REL)


@pytest.mark.parametrize("model", list(CostModel))
def test_one_over_long_trajectory_leaves_no_engine_empty(model: CostModel) -> None:
    lengths = np.array([1_000_000.0, *np.linspace(900, 100, 63)])
    costs = tabulate(
        model, lengths, np.zeros(64), np.zeros(64, bool), [PlanEngine("e", 8, 0, 1, DecodeCurve(0.01, 0.001))] * 8
    )
    bounds, _ = partition(costs)
    assert (np.diff(bounds) > 0).all()
    shorter = group_costs(costs, bounds)[1:]
    assert max(shorter) < 1.5 * min(shorter)


def test_a_plan_without_numba_is_the_same_to_the_last_bit() -> None:
    script = """
import sys
sys.modules["numba"] = None
import numpy as np
from treadle_core import compiled
from treadle_core.actions import PlanEngine
from treadle_core.costs import CostModel, tabulate
from treadle_core.model import DecodeCurve
from treadle_core.placement_bound import lower_bound
from treadle_core.placement_solver import partition
assert not compiled.HAVE_NUMBA
exec(sys.argv[1])
"""
    body = """
rng = np.random.default_rng(3)
for model in CostModel:
    curves = [DecodeCurve(0.01 / (1 + i % 3), 1e-4, 1e-8, 1e4) for i in range(6)]
    engines = [PlanEngine(f"e{i}", 4 + i, 50_000, 1, curve) for i, curve in enumerate(curves)]
    costs = tabulate(model, rng.lognormal(7, 1, 300), rng.uniform(0, 900, 300), np.zeros(300, bool), engines)
    bounds, makespan_s = partition(costs)
    print(bounds.tolist(), makespan_s.hex(), float(lower_bound(costs)).hex())
"""
    plain = subprocess.run([sys.executable, "-c", script, body], capture_output=True, text=True, check=True).stdout
    compiled = subprocess.run(
        [sys.executable, "-c", script.replace('sys.modules["numba"] = None', "").replace("assert not", "assert"), body],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert plain == compiled
    assert plain.count("[") == len(CostModel)
