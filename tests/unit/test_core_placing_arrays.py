"""Plans from and to arrays: the same as with ids, and a named error for what cannot be planned."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.placements import engines, tokens
from treadle_core.model import CostModel, DecodeCurve
from treadle_core.placing.placement import plan, plan_arrays
from treadle_core.placing.question import (
    InvalidTrajectoryError,
    NoEnginesError,
    NothingFitsError,
    PlanEngine,
    PlanTrajectory,
)
from treadle_core.placing.workload import Workspace

CURVE = DecodeCurve(0.01, 0.001, 1e-8, 1e4)


def engine(kv_tokens: int = 0, speed: float = 1.0, slots: int = 8) -> PlanEngine:
    return PlanEngine("e", slots, kv_tokens, 1, DecodeCurve(0.01 / speed, 0.001 / speed, 1e-8, 1e4))


def arrays(*trajectories: tuple[float, float, int]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    lengths, contexts, current = zip(*trajectories, strict=True)
    return np.array(lengths, float), np.array(contexts, float), np.array(current)


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.tuples(tokens, st.integers(0, 90), st.integers(-1, 2)), max_size=30),
    st.lists(engines, min_size=3, max_size=5),
    st.sampled_from(list(CostModel)),
)
def test_the_plan_is_the_one_that_ids_get(
    given: list[tuple[float, int, int]], specs: list[PlanEngine], model: CostModel
) -> None:
    specs = [PlanEngine(f"e{i}", s.slot_limit, s.kv_tokens_capacity, 1, s.decode_curve) for i, s in enumerate(specs)]
    named = plan(
        [
            PlanTrajectory(str(index), length, context, specs[on].engine_id if on >= 0 else "")
            for index, (length, context, on) in enumerate(given)
        ],
        specs,
        model,
    )
    lengths, contexts, current = arrays(*given) if given else arrays((0, 0, -1))
    keep = slice(len(given))
    found = plan_arrays(lengths[keep], contexts[keep], current[keep], specs, model, bound=True, workspace=Workspace())
    placed = {each: index for index, group in enumerate(named.groups) for each in group.trajectory_ids}
    assert found.engine_of.tolist() == [placed[str(index)] for index in range(len(given))]
    assert found.finish_s.tolist() == [group.predicted_s for group in named.groups]
    assert (found.makespan_s, found.lower_bound_s) == (named.makespan_s, named.lower_bound_s)


def test_between_like_engines_nothing_moves_that_need_not() -> None:
    """Three sorts of like engines, interleaved; each trajectory is where the plan would have put it, but mirrored."""
    specs = [engine(speed=1.0 + index % 3) for index in range(9)]
    rng = np.random.default_rng(2)
    lengths, contexts = rng.lognormal(7, 1, 400), rng.uniform(100, 900, 400)
    first = plan_arrays(lengths, contexts, np.zeros(400, int), specs).engine_of
    mirrored = (first + 3) % 9
    assert plan_arrays(lengths, contexts, mirrored, specs).engine_of.tolist() == mirrored.tolist()


def test_a_context_runs_only_where_it_fits() -> None:
    """The long one is for the fast engine, whose KV is too small for it."""
    specs = [engine(kv_tokens=1_000, speed=8.0), engine(kv_tokens=50_000)]
    found = plan_arrays(*arrays((9_000, 20_000, -1), (100, 50, -1), (90, 50, -1)), specs)
    assert found.engine_of[0] == 1
    assert np.isfinite(found.makespan_s)
    roomy = plan_arrays(*arrays((9_000, 900, -1), (100, 50, -1), (90, 50, -1)), specs)
    assert roomy.engine_of[0] == 0


def test_a_context_that_fits_nowhere_is_named() -> None:
    with pytest.raises(NothingFitsError) as caught:
        plan_arrays(*arrays((1, 10, -1), (5, 2_001, -1)), [engine(1_000), engine(2_000)])
    assert caught.value.field == "trajectories[1].context_tokens"
    unknown = plan_arrays(*arrays((1, 10, -1), (5, 2_001, -1)), [engine(1_000), engine(0)])
    assert unknown.engine_of[1] == 1


@pytest.mark.parametrize(
    ("wrong", "field"),
    [
        ((np.nan, 0.0, -1), "trajectories[1].remaining_tokens"),
        ((-1.0, 0.0, -1), "trajectories[1].remaining_tokens"),
        ((np.inf, 0.0, -1), "trajectories[1].remaining_tokens"),
        ((1e16, 0.0, -1), "trajectories[1].remaining_tokens"),
        ((1.0, np.nan, -1), "trajectories[1].context_tokens"),
        ((1.0, -2.0, -1), "trajectories[1].context_tokens"),
        ((1.0, 0.0, 2), "trajectories[1].current_engine_id"),
        ((1.0, 0.0, -2), "trajectories[1].current_engine_id"),
    ],
)
def test_a_bad_figure_is_named(wrong: tuple[float, float, int], field: str) -> None:
    with pytest.raises(InvalidTrajectoryError) as caught:
        plan_arrays(*arrays((5.0, 1.0, 0), wrong, (5.0, 1.0, 0)), [engine(), engine()])
    assert caught.value.field == field


@pytest.mark.parametrize("shape", [(3, 2), (2, 3), (4, 3)])
def test_arrays_of_different_lengths_are_refused(shape: tuple[int, int]) -> None:
    contexts, current = shape
    with pytest.raises(InvalidTrajectoryError) as caught:
        plan_arrays(np.ones(3), np.ones(contexts), np.zeros(current, int), [engine()])
    assert caught.value.field == "trajectories"


def test_without_engines_there_is_no_plan_and_without_trajectories_an_empty_one() -> None:
    with pytest.raises(NoEnginesError):
        plan_arrays(np.ones(1), np.ones(1), np.array([-1]), [])
    found = plan_arrays(np.ones(0), np.ones(0), np.zeros(0, int), [engine(), engine()], bound=True)
    assert (found.engine_of.tolist(), found.finish_s.tolist()) == ([], [0.0, 0.0])
    assert found.makespan_s == found.lower_bound_s == 0.0


def test_more_engines_than_trajectories_leave_the_slowest_empty() -> None:
    found = plan_arrays(*arrays((10, 0, -1), (20, 0, -1)), [engine(), engine(speed=4.0), engine(speed=2.0)])
    assert found.engine_of.tolist() == [2, 1]
