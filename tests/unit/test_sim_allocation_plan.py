"""What a resource plan refuses, and what it does at its edges."""

import math
from typing import Any

import numpy as np
import pytest
from treadle_core.model import CostModel, DecodeCurve
from treadle_core.placing.placement import sample_lengths
from treadle_core.placing.question import InvalidEngineError, InvalidTrajectoryError
from treadle_core.placing.rank_scenarios import RankSamples, best_partition
from treadle_core.refusals import CoreError
from treadle_sim.allocation.plan import (
    PLANNED_MODELS,
    RECOURSE,
    EngineKind,
    InvalidBudgetError,
    NoKindFitsError,
    Problem,
    allocate,
    homogeneous,
    prepare,
    spend_rest,
)

LENGTHS = [4000.0, 300.0, 200.0, 100.0]
CONTEXTS = [10.0, 10.0, 10.0, 10.0]


def kind(gpus: int, capacity: int | None = 100_000, slots: int = 8, base_s: float = 0.01) -> EngineKind:
    return EngineKind(gpus, slots, capacity, DecodeCurve(base_s / gpus**0.6, 1e-4, 1e-8, 1e4))


KINDS = [kind(1), kind(2), kind(4)]


@pytest.mark.parametrize("planner", [allocate, homogeneous])
@pytest.mark.parametrize(
    ("changed", "error", "field"),
    [
        ({"lengths": [1.0, math.nan], "contexts": [0, 0]}, InvalidTrajectoryError, "trajectories[1].remaining_tokens"),
        ({"lengths": [1.0], "contexts": [math.nan]}, InvalidTrajectoryError, "trajectories[0].context_tokens"),
        ({"lengths": [1.0], "contexts": [0, 0]}, InvalidTrajectoryError, "trajectories"),
        ({"gpus": 0}, NoKindFitsError, "kinds"),
        ({"kinds": [kind(1), kind(2, slots=0)]}, InvalidEngineError, "engines[1].slot_limit"),
        ({"kinds": [kind(1, base_s=math.nan)]}, InvalidEngineError, "engines[0].decode_curve.base_s"),
        ({"kinds": [kind(16)]}, NoKindFitsError, "kinds"),
        ({"kinds": [kind(1, capacity=0), kind(2, capacity=4009)]}, NoKindFitsError, "kinds"),
        ({"gpus": 7, "kinds": [kind(4), kind(2)]}, InvalidBudgetError, "gpus"),
        ({"gpus": 7, "kinds": [kind(1, capacity=0), kind(2), kind(4)]}, InvalidBudgetError, "gpus"),
    ],
)
def test_bad_input_is_refused_by_name(
    planner: Any, changed: dict[str, Any], error: type[CoreError], field: str
) -> None:
    given: dict[str, Any] = {"lengths": LENGTHS, "contexts": CONTEXTS, "gpus": 8, "kinds": KINDS} | changed
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
    lengths: list[float], gpus: int, kinds: list[EngineKind], degrees: set[int], left_out: tuple[int, ...], idle: int
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
    """One prompt of 1,000 tokens at 10,000 tokens a second; the other engines prefill the rest meanwhile."""
    for model in PLANNED_MODELS:
        nothing = allocate([0.0, 0.0, 0.0], [0.0, 0.0, 0.0], 8, KINDS, model)
        assert (nothing.makespan_s, nothing.lower_bound_s, nothing.gap) == (0.0, 0.0, 0.0)
        assert sum(nothing.degrees) == 8
    found = allocate([0.0, 0.0, 0.0], [1000.0, 10.0, 10.0], 8, KINDS)
    assert found.makespan_s >= found.lower_bound_s == pytest.approx(0.1)


@pytest.mark.parametrize("model", list(PLANNED_MODELS))
def test_a_plan_does_not_depend_on_the_order_in_which_kinds_or_trajectories_are_named(model: CostModel) -> None:
    rng = np.random.default_rng(4)
    lengths, contexts = rng.lognormal(6, 1, 200), np.full(200, 40.0)
    found = allocate(lengths, contexts, 16, KINDS, model)
    again = allocate(rng.permutation(lengths), contexts, 16, KINDS[::-1], model)
    assert again.degrees == found.degrees
    assert again.makespan_s == pytest.approx(found.makespan_s, rel=1e-12)


def guesses(doubt: float) -> dict[str, Any]:
    """A long tail of 200 medians, each uncertain."""
    lengths = np.random.default_rng(5).lognormal(7.5, 0.8, 200)
    return {
        "lengths": lengths,
        "contexts": np.full(200, 500.0),
        "gpus": 8,
        "kinds": [kind(1, slots=100), kind(2, slots=200), kind(4, slots=400)],
        "log_sigma": np.full(200, doubt),
    }


def test_uncertain_lengths_get_engines_that_are_done_sooner_on_average_than_those_of_their_medians() -> None:
    certain = guesses(0.0)
    assert allocate(**certain) == allocate(**{**certain, "log_sigma": None}), "doubt that is none changes nothing"
    for doubt in (0.3, 0.6, 1.0):
        given = guesses(doubt)
        problem = prepare(given["lengths"], given["contexts"], given["gpus"], given["kinds"], CostModel.LINEAR_INTEGRAL)
        samples = sample_lengths(problem.costs, given["contexts"], RECOURSE * given["log_sigma"], None)
        assert samples is not None

        def mean_s(degrees: tuple[int, ...], problem: Problem = problem, samples: RankSamples = samples) -> float:
            counts = np.array([degrees.count(width) for width in problem.gpus.tolist()])
            return best_partition(problem.engines(counts), samples)[1]

        hedged = allocate(**given)
        assert sum(hedged.degrees) == 8
        assert not hedged.optimal  # of the medians
        assert mean_s(hedged.degrees) <= mean_s(allocate(**{**given, "log_sigma": None}).degrees)
        for width in (1, 2, 4):
            assert mean_s(hedged.degrees) <= mean_s((width,) * (8 // width))


@pytest.mark.parametrize(
    ("log_sigma", "room_tokens", "field"),
    [
        *(([0.1, bad, 0.1, 0.1], None, "trajectories[1].log_sigma") for bad in (math.nan, -1.0)),
        ([0.1], None, "trajectories"),
        ([0.1] * 4, [1.0, 1.0, -1.0, 1.0], "trajectories[2].room_tokens"),
    ],
)
def test_doubt_that_is_no_number_is_refused(log_sigma: list[float], room_tokens: Any, field: str) -> None:
    with pytest.raises(InvalidTrajectoryError) as caught:
        allocate(LENGTHS, CONTEXTS, 4, KINDS, log_sigma=log_sigma, room_tokens=room_tokens)
    assert caught.value.field == field
