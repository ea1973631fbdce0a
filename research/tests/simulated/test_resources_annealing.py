"""Heddle's annealing: its transitions, its schedule, and that it never beats the exact plan."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from treadle_core.model import CostModel, DecodeCurve
from treadle_sim.allocation.plan import PLANNED_MODELS, EngineKind, allocate, prepare

from treadle_bench.resources.annealing import (
    COOLING,
    EPSILON_S,
    anneal,
    draw_first_allocation,
    merge,
    redistribute,
    split,
)

KINDS = [
    EngineKind(d, 20, 200_000 * d, DecodeCurve(0.014 / d**0.7, 5e-5, 1e-8 / d, 1e4 * d))
    for d in (1, 2, 4, 8)
]
GPUS = np.array([8, 4, 2, 1])
LENGTHS = np.random.default_rng(9).lognormal(7.0, 1.2, 300)
CONTEXTS = np.full(300, 200.0)

engine_counts = st.lists(st.integers(0, 4), min_size=4, max_size=4).map(
    lambda found: np.array(found, np.int64)
)
seeds = st.integers(0, 10_000).map(np.random.default_rng)


@given(engine_counts, seeds)
def test_each_transition_keeps_the_gpus_and_changes_the_number_of_engines_as_its_name_says(
    counts: np.ndarray, rng: np.random.Generator
) -> None:
    more = {redistribute: 0, split: int(counts[:3].any()), merge: -int((counts[1:] >= 2).any())}
    for transition, engines in more.items():
        after = transition(GPUS, counts.copy(), rng)
        assert (after >= 0).all()
        assert after @ GPUS == counts @ GPUS
        assert after.sum() == counts.sum() + engines


def test_redistribution_reaches_every_allocation_with_as_many_engines_that_a_step_can_reach() -> (
    None
):
    """8 + 1 + 1 = 4 + 4 + 2: the 8 steps down to 4, which lifts one 1 to 2 to 4 or both to 2 and
    one on to 4."""
    rng = np.random.default_rng(0)
    met = {tuple(redistribute(GPUS, np.array([1, 0, 0, 2]), rng).tolist()) for _ in range(200)}
    assert (0, 2, 1, 0) in met


@settings(max_examples=50)
@given(st.integers(1, 40), seeds)
def test_the_first_allocation_spends_the_budget(budget: int, rng: np.random.Generator) -> None:
    problem = prepare(LENGTHS, CONTEXTS, budget, KINDS, CostModel.GROUP_SIZE)
    assert draw_first_allocation(problem, rng) @ problem.gpus == budget


@pytest.mark.parametrize("model", list(PLANNED_MODELS))
def test_annealing_never_beats_the_exact_plan_and_comes_near_it(model: CostModel) -> None:
    exact = allocate(LENGTHS, CONTEXTS, 32, KINDS, model)
    for seed in range(6):
        found = anneal(LENGTHS, CONTEXTS, 32, KINDS, np.random.default_rng(seed), model).allocation
        assert exact.makespan_s * (1 - 1e-12) <= found.makespan_s <= 1.25 * exact.makespan_s
        assert sum(found.degrees) == 32
        assert not found.optimal
        assert found.lower_bound_s <= exact.makespan_s


def test_the_temperature_starts_at_the_first_makespan_and_falls_to_the_threshold() -> None:
    problem = prepare(LENGTHS, CONTEXTS, 32, KINDS, CostModel.GROUP_SIZE)
    start_s = problem.makespan_s(draw_first_allocation(problem, np.random.default_rng(3)))
    found, again = (
        anneal(LENGTHS, CONTEXTS, 32, KINDS, np.random.default_rng(3)) for _ in range(2)
    )
    assert found == again
    assert found.iterations == math.ceil(math.log(start_s / EPSILON_S) / math.log(1 / COOLING))
    first = draw_first_allocation(problem, np.random.default_rng(3))
    short = anneal(LENGTHS / 1e3, CONTEXTS, 32, KINDS, np.random.default_rng(3))
    assert short.iterations == 0, "its first makespan is below the threshold"
    assert short.allocation.degrees == tuple(np.repeat(problem.gpus, first).tolist())
