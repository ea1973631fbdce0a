"""Plans as a caller meets them: arrays in, arrays out, and a named error for what cannot be
planned."""

import dataclasses
import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.placements import engines, tokens
from treadle_core.model import CostModel, DecodeCurve
from treadle_core.placing.placement import Plan, plan
from treadle_core.placing.question import (
    InvalidEngineError,
    InvalidTrajectoryError,
    NoEnginesError,
    NothingFitsError,
    PlanEngine,
)
from treadle_core.placing.workload import Workspace

CURVE = DecodeCurve(
    base_s=0.01, per_sequence_s=0.001, per_kv_token_s=1e-8, prefill_tokens_per_s=1e4
)


def engine(
    *, slots: int = 8, kv_tokens: int = 0, tensor_parallel: int = 1, speed: float = 1.0
) -> PlanEngine:
    curve = dataclasses.replace(
        CURVE, base_s=CURVE.base_s / speed, per_sequence_s=CURVE.per_sequence_s / speed
    )
    return PlanEngine("e", slots, kv_tokens, tensor_parallel, curve)


def plan_for(
    specs: list[PlanEngine],
    *trajectories: tuple[float, float, int],
    model: CostModel = CostModel.LINEAR_INTEGRAL,
    workspace: Workspace | None = None,
) -> Plan:
    """The plan of (tokens left, tokens of context, index of the engine or -1) each."""
    lengths, contexts, current = np.array(trajectories, float).reshape(-1, 3).T
    return plan(
        lengths, contexts, current.astype(int), specs, model, bound=True, workspace=workspace
    )


@settings(max_examples=100)
@given(
    st.lists(st.tuples(tokens, st.integers(0, 90), st.integers(-1, 2)), max_size=40),
    st.lists(engines, min_size=3, max_size=6),
    st.sampled_from([CostModel.GROUP_SIZE, CostModel.LINEAR_INTEGRAL]),
)
def test_no_group_overlaps_another_in_length_and_memory_that_is_used_again_changes_nothing(
    given: list[tuple[float, int, int]], specs: list[PlanEngine], model: CostModel
) -> None:
    found = plan_for(specs, *given, model=model)
    lengths = np.array([each[0] for each in given])
    groups = [lengths[found.engine_of == at] for at in range(len(specs))]
    held = sorted((group.min(), group.max()) for group in groups if len(group))
    assert sum(map(len, groups)) == len(given)
    assert all(shorter[1] <= longer[0] for shorter, longer in itertools.pairwise(held))
    assert found.makespan_s == max(found.finish_s)
    assert found.lower_bound_s is not None
    assert 0.0 <= found.lower_bound_s <= found.makespan_s
    workspace = Workspace()
    for _ in range(2):
        again = plan_for(specs, *given, model=model, workspace=workspace)
        assert again.engine_of.tolist() == found.engine_of.tolist()
        assert again.finish_s.tolist() == found.finish_s.tolist()


def test_the_longest_trajectory_goes_to_the_fastest_engine_wherever_the_caller_named_it() -> None:
    specs = [engine(), engine(tensor_parallel=4, speed=3.0), engine(speed=2.0)]
    assert (
        plan_for(specs, *((length, 100, -1) for length in (10, 5_000, 40_000, 20))).engine_of[2]
        == 1
    )
    assert plan_for(specs, (10, 0, -1), (20, 0, -1)).engine_of.tolist() == [2, 1], (
        "the slowest stays empty"
    )


@pytest.mark.parametrize(("length", "context"), [(0.0, 0.0), (100.0, 100.0)])
def test_trajectories_of_equal_length_are_spread_evenly(length: float, context: float) -> None:
    found = plan_for([engine()] * 3, *[(length, context, -1)] * 12)
    assert np.bincount(found.engine_of).tolist() == [4, 4, 4]


@pytest.mark.parametrize("model", list(CostModel))
def test_between_like_engines_nothing_moves_that_need_not(model: CostModel) -> None:
    """Three sorts of like engines, interleaved; each trajectory is where the plan would have put
    it, but mirrored."""
    specs = [engine(speed=1.0 + index % 3) for index in range(9)]
    rng = np.random.default_rng(2)
    lengths, contexts = rng.lognormal(7, 1, 400), rng.uniform(100, 900, 400)
    first = plan(lengths, contexts, np.zeros(400, int), specs, model).engine_of
    mirrored = (first + 3) % 9
    assert plan(lengths, contexts, mirrored, specs, model).engine_of.tolist() == mirrored.tolist()


def test_context_that_is_on_an_engine_needs_no_prefill_and_kv_capacity_limits_what_runs_at_once() -> (
    None
):
    new, there = (plan_for([engine()], (100, 10_000, on)).makespan_s for on in (-1, 0))
    assert new == pytest.approx(there + 1.0)
    roomy, short = (
        plan_for([engine(kv_tokens=held)], *[(1_000, 1_000, -1)] * 8).makespan_s
        for held in (0, 3_000)
    )
    assert short > 2 * roomy


def test_a_context_runs_only_where_it_fits() -> None:
    """The long one is for the fast engine, whose KV is too small for it."""
    specs = [engine(kv_tokens=1_000, speed=8.0), engine(kv_tokens=50_000)]
    found = plan_for(specs, (9_000, 20_000, -1), (100, 50, -1), (90, 50, -1))
    assert found.engine_of[0] == 1
    assert np.isfinite(found.makespan_s)
    assert plan_for(specs, (9_000, 900, -1), (100, 50, -1), (90, 50, -1)).engine_of[0] == 0


def test_a_context_that_fits_nowhere_is_named() -> None:
    with pytest.raises(NothingFitsError) as caught:
        plan_for([engine(kv_tokens=1_000), engine(kv_tokens=2_000)], (1, 10, -1), (5, 2_001, -1))
    assert caught.value.field == "trajectories[1].context_tokens"
    assert (
        plan_for([engine(kv_tokens=1_000), engine()], (1, 10, -1), (5, 2_001, -1)).engine_of[1] == 1
    )


@pytest.mark.parametrize(
    ("wrong", "field"),
    [
        *(((length, 0.0, -1), "remaining_tokens") for length in (math.nan, -1.0, math.inf, 1e16)),
        *(((1.0, context, -1), "context_tokens") for context in (math.nan, -2.0)),
        *(((1.0, 0.0, current), "current_engine_id") for current in (2, -2)),
    ],
)
def test_a_bad_trajectory_is_named(wrong: tuple[float, float, int], field: str) -> None:
    with pytest.raises(InvalidTrajectoryError) as caught:
        plan_for([engine(), engine()], (5.0, 1.0, 0), wrong, (5.0, 1.0, 0))
    assert caught.value.field == f"trajectories[1].{field}"


@pytest.mark.parametrize(
    ("bad", "field"),
    [
        ({"slot_limit": 0}, "slot_limit"),
        ({"kv_tokens_capacity": -1}, "kv_tokens_capacity"),
        ({"tensor_parallel": 0}, "tensor_parallel"),
        ({"decode_curve": DecodeCurve(0.0, 0.0)}, "decode_curve"),
        ({"decode_curve": DecodeCurve(math.nan, 0.0)}, "decode_curve.base_s"),
        ({"decode_curve": DecodeCurve(0.1, -1.0)}, "decode_curve.per_sequence_s"),
        ({"decode_curve": DecodeCurve(0.1, 0.1, math.inf)}, "decode_curve.per_kv_token_s"),
        ({"decode_curve": DecodeCurve(0.1, 0.1, 0.0, -5.0)}, "decode_curve.prefill_tokens_per_s"),
    ],
)
def test_a_bad_engine_is_named(bad: dict[str, object], field: str) -> None:
    with pytest.raises(InvalidEngineError) as caught:
        plan_for([engine(), dataclasses.replace(engine(), **bad)], (10, 0, -1))  # type: ignore[arg-type]
    assert caught.value.field == f"engines[1].{field}"


def test_arrays_of_different_lengths_are_refused() -> None:
    for contexts, current in ((3, 2), (2, 3), (4, 3)):
        with pytest.raises(InvalidTrajectoryError) as caught:
            plan(np.ones(3), np.ones(contexts), np.zeros(current, int), [engine()])
        assert caught.value.field == "trajectories"


def test_without_engines_there_is_no_plan_and_without_trajectories_an_empty_one() -> None:
    with pytest.raises(NoEnginesError):
        plan_for([], (1, 1, -1))
    found = plan_for([engine(), engine()])
    assert (found.engine_of.tolist(), found.finish_s.tolist()) == ([], [0.0, 0.0])
    assert found.makespan_s == found.lower_bound_s == 0.0


@pytest.mark.parametrize("model", list(CostModel))
def test_the_largest_figures_that_are_let_in_overflow_nothing(model: CostModel) -> None:
    huge = PlanEngine("e", 1, 10**15, 1, DecodeCurve(1e12, 1e12, 1e12, 1e-6))
    assert math.isfinite(plan_for([huge] * 3, *[(1e15, 1e15, -1)] * 10, model=model).makespan_s)


@pytest.mark.parametrize("n", [1, 12])
@pytest.mark.parametrize("first", ["prefill", "decode"])
def test_work_goes_to_the_engine_that_is_measured_faster_for_it_without_any_tag(
    first: str, n: int
) -> None:
    """One engine prefills four times as fast as the other, which decodes twice as fast (RollArt's
    affinity)."""
    curves = {
        "prefill": DecodeCurve(0.02, 4e-4, 0.0, 2e4),
        "decode": DecodeCurve(0.01, 2e-4, 0.0, 5e3),
    }
    names = sorted(curves, key=lambda name: name != first)
    specs = [PlanEngine(name, 8, 0, 1, curves[name]) for name in names]
    tokens_left, observed = np.tile([100.0, 2_000.0], n), np.tile([60_000.0, 100.0], n)
    nowhere, contexts = np.full(2 * n, -1), np.full(2 * n, 300.0)
    found = plan(
        tokens_left, contexts, nowhere, specs, observed_tokens=observed, prompts=np.arange(2 * n)
    )
    assert [names[index] for index in found.engine_of] == ["prefill", "decode"] * n
