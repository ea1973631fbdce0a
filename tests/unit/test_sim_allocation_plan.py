"""What a resource plan refuses, and what it does at its edges."""

import math
from typing import Any

import numpy as np
import pytest
from treadle_core.model import CostModel, DecodeCurve
from treadle_core.placing import paths
from treadle_core.placing.candidates import best_placement
from treadle_core.placing.paths import Work
from treadle_core.placing.question import InvalidEngineError, InvalidTrajectoryError, PlanEngine
from treadle_core.refusals import CoreError
from treadle_sim.allocation.plan import (
    PLANNED_MODELS,
    EngineKind,
    InvalidBudgetError,
    NoKindFitsError,
    allocate,
    choose_degrees,
    homogeneous,
    prepare,
    spend_rest,
)

LENGTHS = [4000.0, 300.0, 200.0, 100.0]
CONTEXTS = [10.0, 10.0, 10.0, 10.0]


def kind(
    gpus: int, capacity: int | None = 100_000, slots: int = 8, base_s: float = 0.01
) -> EngineKind:
    return EngineKind(gpus, slots, capacity, DecodeCurve(base_s / gpus**0.6, 1e-4, 1e-8, 1e4))


KINDS = [kind(1), kind(2), kind(4)]


@pytest.mark.parametrize("planner", [allocate, homogeneous])
@pytest.mark.parametrize(
    ("changed", "error", "field"),
    [
        (
            {"lengths": [1.0, math.nan], "contexts": [0, 0]},
            InvalidTrajectoryError,
            "trajectories[1].remaining_tokens",
        ),
        (
            {"lengths": [1.0], "contexts": [math.nan]},
            InvalidTrajectoryError,
            "trajectories[0].context_tokens",
        ),
        ({"lengths": [1.0], "contexts": [0, 0]}, InvalidTrajectoryError, "trajectories"),
        ({"gpus": 0}, NoKindFitsError, "kinds"),
        ({"kinds": [kind(1), kind(2, slots=0)]}, InvalidEngineError, "engines[1].slot_limit"),
        (
            {"kinds": [kind(1, base_s=math.nan)]},
            InvalidEngineError,
            "engines[0].decode_curve.base_s",
        ),
        ({"kinds": [kind(16)]}, NoKindFitsError, "kinds"),
        ({"kinds": [kind(1, capacity=0), kind(2, capacity=4009)]}, NoKindFitsError, "kinds"),
        ({"gpus": 7, "kinds": [kind(4), kind(2)]}, InvalidBudgetError, "gpus"),
        ({"gpus": 7, "kinds": [kind(1, capacity=0), kind(2), kind(4)]}, InvalidBudgetError, "gpus"),
    ],
)
def test_bad_input_is_refused_by_name(
    planner: Any, changed: dict[str, Any], error: type[CoreError], field: str
) -> None:
    given: dict[str, Any] = {
        "lengths": LENGTHS,
        "contexts": CONTEXTS,
        "gpus": 8,
        "kinds": KINDS,
    } | changed
    with pytest.raises(error) as refused:
        planner(given["lengths"], given["contexts"], given["gpus"], given["kinds"])
    assert refused.value.field == field
    if error is InvalidBudgetError:
        assert "no engines of 2, 4 GPUs add up to 7; 6 is the next below" in str(refused.value)


@pytest.mark.parametrize(
    ("lengths", "gpus", "kinds", "degrees", "left_out", "idle"),
    [
        # 4,000 tokens to come behind 10: 4,010 must fit.
        (LENGTHS, 8, [kind(1, capacity=0), kind(2, capacity=4010), kind(4)], {2, 4}, (1,), 0),
        (LENGTHS, 8, [kind(1, capacity=4009), kind(2, capacity=4010), kind(4)], {2, 4}, (1,), 0),
        # A capacity that nobody knows is taken as enough.
        (LENGTHS, 3, [kind(1, capacity=None)], {1}, (), 0),
        # A degree beyond the budget is left out.
        (LENGTHS, 3, KINDS, {1, 2}, (4,), 0),
        # The degrees do not add up, and the engine of 4 alone beats two of 3.
        ([1000.0], 6, [kind(3), kind(4)], {4}, (), 2),
        # More GPUs than trajectories still become engines.
        ([1000.0], 15, KINDS, {1, 2, 4}, (), 0),
    ],
)
def test_a_plan_uses_the_degrees_that_fit_and_leaves_gpus_idle_only_where_that_is_better(
    lengths: list[float],
    gpus: int,
    kinds: list[EngineKind],
    degrees: set[int],
    left_out: tuple[int, ...],
    idle: int,
) -> None:
    found = allocate(lengths, CONTEXTS[: len(lengths)], gpus, kinds)
    assert set(found.degrees) <= degrees
    assert found.left_out == left_out
    assert idle == gpus - sum(found.degrees)
    assert sum(engine.trajectories for engine in found.engines) == len(lengths)


def test_a_rest_is_dealt_out_whole_where_the_degrees_allow_it() -> None:
    """6 GPUs left, engines of 4 and 3: 4 first would strand 2."""
    problem = prepare(LENGTHS, CONTEXTS, 6, [kind(3), kind(4)], CostModel.GROUP_SIZE)
    counts = np.zeros(2, np.int64)
    spend_rest(problem, counts, 6)
    assert dict(zip(problem.gpus.tolist(), counts.tolist(), strict=True)) == {4: 0, 3: 2}


def test_work_of_no_tokens_takes_no_time_but_the_prefill_of_its_contexts() -> None:
    """One prompt of 1,000 tokens at 10,000 tokens a second; the other engines prefill the rest
    meanwhile."""
    for model in PLANNED_MODELS:
        nothing = allocate([0.0, 0.0, 0.0], [0.0, 0.0, 0.0], 8, KINDS, model)
        assert (nothing.makespan_s, nothing.lower_bound_s, nothing.gap) == (0.0, 0.0, 0.0)
        assert sum(nothing.degrees) == 8
    found = allocate([0.0, 0.0, 0.0], [1000.0, 10.0, 10.0], 8, KINDS)
    assert found.makespan_s >= found.lower_bound_s == pytest.approx(0.1)


@pytest.mark.parametrize("model", list(PLANNED_MODELS))
def test_a_plan_does_not_depend_on_the_order_in_which_kinds_or_trajectories_are_named(
    model: CostModel,
) -> None:
    rng = np.random.default_rng(4)
    lengths, contexts = rng.lognormal(6, 1, 200), np.full(200, 40.0)
    found = allocate(lengths, contexts, 16, KINDS, model)
    again = allocate(rng.permutation(lengths), contexts, 16, KINDS[::-1], model)
    assert again.degrees == found.degrees
    assert again.makespan_s == pytest.approx(found.makespan_s, rel=1e-12)


def long_tail(doubt: float, tool_s: float) -> tuple[Work, Work]:
    """200 trajectories of which the longest are uncertain: samples and medians."""
    tokens = np.random.default_rng(5).lognormal(7.5, 0.8, 200)
    nowhere = np.zeros(200, np.bool_)
    of = (
        tokens,
        np.full(200, 500.0),
        tokens / 2,
        np.full(200, tool_s),
        nowhere,
        nowhere,
        np.arange(200) // 10,
    )
    factors = paths.sample_factors(
        np.arange(200), np.full(200, doubt), tokens, np.full(200, 40_000.0)
    )
    return paths.work_of(*of, factors), paths.work_of(*of)


@pytest.mark.parametrize(("doubt", "tool_s"), [(0.0, 0.0), (0.6, 0.0), (0.6, 60.0)])
def test_engines_are_chosen_on_which_the_samples_end_no_later_than_on_engines_of_one_degree(
    doubt: float, tool_s: float
) -> None:
    work, medians = long_tail(doubt, tool_s)
    kinds = [kind(1, slots=100), kind(2, slots=200), kind(4, slots=400)]

    def mean_s(degrees: tuple[int, ...]) -> float:
        engines = [
            PlanEngine("e", 100 * each, 100_000, each, kind(each).decode_curve) for each in degrees
        ]
        rows, numbers = paths.engine_rows(engines), paths.kinds_of(engines)
        placement = best_placement(rows, numbers, work, medians, np.full(200, -1))
        return float(paths.makespans_s(rows, work, placement).mean())

    chosen = choose_degrees(work, medians, 8, kinds)
    assert sum(chosen) == 8
    assert list(chosen) == sorted(chosen, reverse=True)
    assert mean_s(chosen) <= min(mean_s((width,) * (8 // width)) for width in (1, 2, 4)) + 1e-9
    assert set(choose_degrees(work, medians, 8, [kind(1, capacity=900), *kinds[1:]])) <= {2, 4}
    with pytest.raises(NoKindFitsError):
        choose_degrees(work, medians, 8, [kind(1, capacity=900)])
