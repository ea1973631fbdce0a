"""The exact resource plan against the trial of every multiset of engines, and its bound against
every assignment."""

import itertools
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.placements import check_without_numba, curves, makespans_of_all, tokens
from treadle_core.model import CostModel, DecodeCurve
from treadle_core.placing.solver import group_cost, partition
from treadle_sim.allocation.plan import (
    PLANNED_MODELS,
    Allocation,
    EngineKind,
    allocate,
    homogeneous,
    prepare,
)

REL = 1e-9
DEGREES = (1, 2, 4, 8)
MODELS = list(PLANNED_MODELS)

Case = tuple[np.ndarray, np.ndarray, int, list[EngineKind], CostModel]


@st.composite
def cases(draw: st.DrawFn, *, n: int, gpus: int, degrees: tuple[int, ...] = DEGREES) -> Case:
    count = draw(st.integers(1, n))
    lengths = np.array(draw(st.lists(tokens, min_size=count, max_size=count)))
    contexts = np.array(draw(st.lists(tokens, min_size=count, max_size=count)))
    chosen = [*draw(st.lists(st.sampled_from(degrees[1:]), unique=True)), degrees[0]]
    kinds = [
        EngineKind(
            degree,
            draw(st.integers(1, 12)),
            draw(st.sampled_from([None, 100_000, 800_000])),
            draw(curves),
        )
        for degree in chosen
    ]
    return lengths, contexts, draw(st.integers(1, gpus)), kinds, draw(st.sampled_from(MODELS))


def h200_like() -> list[EngineKind]:
    """A 14B model on one to eight large GPUs."""
    return [
        EngineKind(
            d,
            100,
            600_000 * d,
            DecodeCurve(0.014 / d**0.75, 5e-5 / d**0.75, 4e-8 / d**0.9, 2e4 * d**0.8),
        )
        for d in DEGREES
    ]


def multisets(gpus: list[int], budget: int) -> Iterator[tuple[int, ...]]:
    """Engines of each kind, in every way to spend at most the budget but not none of it."""
    for counts in itertools.product(*(range(budget // width + 1) for width in gpus)):
        if 0 < sum(count * width for count, width in zip(counts, gpus, strict=True)) <= budget:
            yield counts


@settings(max_examples=120)
@given(cases(n=25, gpus=9))
def test_the_makespan_is_the_least_of_all_multisets_of_engines(case: Case) -> None:
    lengths, contexts, gpus, kinds, model = case
    found = allocate(lengths, contexts, gpus, kinds, model)
    problem = prepare(lengths, contexts, gpus, kinds, model)
    spans = [
        partition(problem.engines(np.array(c)))[1] for c in multisets(problem.gpus.tolist(), gpus)
    ]
    assert found.optimal
    assert found.makespan_s == pytest.approx(min(spans), rel=REL)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(("n", "sigma"), [(1500, 0.6), (1500, 1.4), (300, 1.0)])
def test_on_64_gpus_all_969_multisets_are_no_better(model: CostModel, n: int, sigma: float) -> None:
    rng = np.random.default_rng(n)
    lengths = np.minimum(rng.lognormal(8.0, sigma, n), 40_000.0)
    contexts = rng.uniform(100, 900, n)
    found = allocate(lengths, contexts, 64, h200_like(), model)
    problem = prepare(lengths, contexts, 64, h200_like(), model)
    whole = [c for c in multisets(problem.gpus.tolist(), 64) if np.dot(c, problem.gpus) == 64]
    assert len(whole) == 969
    least = min(partition(problem.engines(np.array(counts)), fill_budget=0)[1] for counts in whole)
    assert found.makespan_s == pytest.approx(least, rel=REL)
    assert sum(found.degrees) == 64


@settings(max_examples=60)
@given(cases(n=4, gpus=4, degrees=(1, 2, 4)))
def test_no_engines_and_no_assignment_whatever_beat_the_bound(case: Case) -> None:
    """And with group sizes the bound is what the best of them has."""
    lengths, contexts, gpus, kinds, model = case
    found = allocate(lengths, contexts, gpus, kinds, model)
    problem = prepare(lengths, contexts, gpus, kinds, model)
    best = min(
        min(makespans_of_all(problem.engines(np.array(c))))
        for c in multisets(problem.gpus.tolist(), gpus)
    )
    assert found.lower_bound_s <= found.makespan_s
    assert found.lower_bound_s <= best * (1 + REL)
    if model is CostModel.GROUP_SIZE:
        assert found.lower_bound_s == pytest.approx(best, rel=1e-8)


@pytest.mark.parametrize("sigma", [0.5, 1.0, 1.5])
def test_on_1024_gpus_the_plan_is_within_two_per_cent_of_what_no_plan_beats(sigma: float) -> None:
    """A 14B model on large GPUs, at 100 trajectories a GPU; capped lengths."""
    curves = zip(
        (0.00866, 0.00588, 0.00436, 0.00385), (3.4e-8, 1.7e-8, 8.7e-9, 4.5e-9), strict=True
    )
    kinds = [
        EngineKind(
            d, 100, 577_000 + 757_000 * (d - 1), DecodeCurve(base_s, 2.6e-5, kv_s, 2e4 * d**0.8)
        )
        for d, (base_s, kv_s) in zip(DEGREES, curves, strict=True)
    ]
    lengths = np.minimum(np.random.default_rng(5).lognormal(8.0, sigma, 102_400), 40_000.0)
    found = allocate(lengths, np.full(102_400, 500.0), 1024, kinds)
    assert found.optimal
    assert 0.0 <= found.gap <= 0.02


@settings(max_examples=60)
@given(cases(n=20, gpus=12))
def test_the_best_homogeneous_plan_is_the_best_of_the_plans_with_one_kind(case: Case) -> None:
    lengths, contexts, gpus, kinds, model = case
    found = homogeneous(lengths, contexts, gpus, kinds, model)
    alone = [
        allocate(lengths, contexts, gpus // kind.gpus * kind.gpus, [kind], model).makespan_s
        for kind in kinds
        if kind.gpus not in found.left_out
    ]
    assert found.makespan_s == pytest.approx(min(alone), rel=REL)
    assert len(set(found.degrees)) == 1
    assert found.makespan_s >= allocate(lengths, contexts, gpus, kinds, model).makespan_s * (
        1 - REL
    )


def costs_of(found: Allocation) -> list[float]:
    return sorted((engine.predicted_s for engine in found.engines), reverse=True)


@pytest.mark.parametrize("model", MODELS)
def test_gpus_that_one_long_trajectory_cannot_use_serve_the_others_as_well_as_if_it_were_not_there(
    model: CostModel,
) -> None:
    """The long one takes the fastest kind alone; the rest must do as well as on the other 56 GPUs
    without it.

    The contexts are alike, so that the mean that group sizes are costed with is the workload's in
    both.
    """
    curves = [
        EngineKind(k.gpus, k.slot_limit, None, DecodeCurve(k.decode_curve.base_s, 5e-5))
        for k in h200_like()
    ]
    others = np.random.default_rng(2).lognormal(7.0, 1.0, 400)
    lengths = np.array([1_000_000.0, *others])
    found = allocate(lengths, np.zeros(401), 64, curves, model)
    rest = allocate(others, np.zeros(400), 56, curves, model)
    assert found.engines[0].trajectories == 1
    assert costs_of(found)[1] == pytest.approx(rest.makespan_s, rel=REL)
    assert sum(found.degrees) == 64


def test_a_plan_adds_up_and_its_costs_are_those_of_its_groups() -> None:
    lengths = np.random.default_rng(1).lognormal(7.0, 1.2, 500)
    contexts = np.full(500, 300.0)
    found = allocate(lengths, contexts, 24, h200_like())
    problem = prepare(lengths, contexts, 24, h200_like(), CostModel.LINEAR_INTEGRAL)
    assert sum(engine.trajectories for engine in found.engines) == 500
    assert sum(found.degrees) == 24
    assert list(found.degrees) == sorted(found.degrees, reverse=True)
    assert max(costs_of(found)) == found.makespan_s
    row_of = {int(gpus): row for row, gpus in enumerate(problem.gpus)}
    first = 0
    for engine in found.engines:
        end = first + engine.trajectories
        assert engine.predicted_s == pytest.approx(
            group_cost(problem.costs.table, row_of[engine.gpus], first, end)
        )
        first = end


def test_a_plan_without_numba_is_the_same_to_the_last_bit() -> None:
    script = """
import sys
import numpy as np
from treadle_core import compiled
from treadle_sim.allocation.plan import EngineKind, allocate
from treadle_core.placing.solver import CostModel
from treadle_core.model import DecodeCurve
rng = np.random.default_rng(3)
lengths, contexts = rng.lognormal(7, 1, 30), rng.uniform(0, 900, 30)
kinds = [EngineKind(d, 6, 80_000 * d, DecodeCurve(0.01 / d**0.6, 1e-4, 1e-8, 1e4)) for d in (1, 2)]
for model in (CostModel.GROUP_SIZE, CostModel.LINEAR_INTEGRAL):
    found = allocate(lengths, contexts, 10, kinds, model)
    print(compiled.HAVE_KERNELS, found.degrees, found.makespan_s.hex(), float(found.lower_bound_s).hex())
"""
    check_without_numba(script, len(MODELS))
