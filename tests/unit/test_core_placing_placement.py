"""Plans as a caller meets them: ids in, ids out, and a named error for what cannot be planned."""

import dataclasses
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from treadle_core.model import CostModel, DecodeCurve
from treadle_core.placing.placement import Plan, plan
from treadle_core.placing.question import (
    InvalidEngineError,
    InvalidTrajectoryError,
    NoEnginesError,
    PlanEngine,
    PlanTrajectory,
)
from treadle_core.refusals import CoreError

CURVE = DecodeCurve(base_s=0.01, per_sequence_s=0.001, per_kv_token_s=1e-8, prefill_tokens_per_s=1e4)


def engine(engine_id: str, *, slot_limit: int = 8, tensor_parallel: int = 1, speed: float = 1.0) -> PlanEngine:
    curve = dataclasses.replace(CURVE, base_s=CURVE.base_s / speed, per_sequence_s=CURVE.per_sequence_s / speed)
    return PlanEngine(engine_id, slot_limit, 0, tensor_parallel, curve)


def trajectory(trajectory_id: str, remaining: float, context: int = 100, on: str = "") -> PlanTrajectory:
    return PlanTrajectory(trajectory_id, remaining, context, on)


def placed(found: Plan) -> dict[str, str]:
    return {each: group.engine_id for group in found.groups for each in group.trajectory_ids}


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.floats(0, 1e5), max_size=40),
    st.lists(st.sampled_from([1.0, 2.0, 4.0]), min_size=1, max_size=6),
    st.sampled_from(list(CostModel)),
)
def test_every_trajectory_is_in_one_group_longest_first_and_groups_keep_the_callers_order(
    lengths: list[float], speeds: list[float], model: CostModel
) -> None:
    engines = [engine(f"e{index}", speed=speed) for index, speed in enumerate(speeds)]
    of = {f"t{index}": length for index, length in enumerate(lengths)}
    found = plan([trajectory(each, length) for each, length in of.items()], engines, model)
    assert [group.engine_id for group in found.groups] == [each.engine_id for each in engines]
    assert sorted(each for group in found.groups for each in group.trajectory_ids) == sorted(of)
    for group in found.groups:
        assert [of[each] for each in group.trajectory_ids] == sorted(
            (of[each] for each in group.trajectory_ids), reverse=True
        )
    assert found.makespan_s == max(group.predicted_s for group in found.groups)
    assert 0.0 <= found.lower_bound_s <= found.makespan_s


def test_the_longest_trajectory_goes_to_the_fastest_engine_wherever_the_caller_named_it() -> None:
    engines = [engine("slow"), engine("fast", tensor_parallel=4, speed=3.0), engine("middle", speed=2.0)]
    found = plan([trajectory(f"t{length}", length) for length in (10, 5_000, 40_000, 20)], engines)
    assert placed(found)["t40000"] == "fast"
    assert [group.engine_id for group in found.groups] == ["slow", "fast", "middle"]


def test_more_engines_than_trajectories_leave_some_groups_empty() -> None:
    found = plan([trajectory("a", 10), trajectory("b", 20)], [engine(f"e{index}") for index in range(5)])
    assert sorted(len(group.trajectory_ids) for group in found.groups) == [0, 0, 0, 1, 1]


def test_no_trajectories_make_an_empty_plan() -> None:
    found = plan([], [engine("e0"), engine("e1")])
    assert found.makespan_s == found.lower_bound_s == 0.0
    assert all(group.trajectory_ids == () for group in found.groups)


def test_trajectories_with_nothing_left_are_spread_evenly() -> None:
    found = plan([trajectory(f"t{index}", 0.0, 0) for index in range(9)], [engine("e0"), engine("e1"), engine("e2")])
    assert [len(group.trajectory_ids) for group in found.groups] == [3, 3, 3]


def test_equal_trajectories_make_equal_plans_again_and_again() -> None:
    trajectories = [trajectory(f"t{index}", 100.0) for index in range(12)]
    engines = [engine("e0"), engine("e1"), engine("e2")]
    first = plan(trajectories, engines)
    assert [len(group.trajectory_ids) for group in first.groups] == [4, 4, 4]
    assert plan(trajectories, engines) == first


def test_between_like_engines_a_group_stays_where_most_of_its_context_is() -> None:
    """The plan segregates by length; which of two like engines is 'the long one' is free, so nothing moves."""
    lengths = [4_000, 3_900, 100, 90, 80, 70]
    engines = [engine("e0", slot_limit=2), engine("e1", slot_limit=2)]
    fresh = placed(plan([trajectory(f"t{length}", length) for length in lengths], engines, CostModel.GROUP_SIZE))
    other = {"e0": "e1", "e1": "e0"}
    for mirrored in (fresh, {each: other[on] for each, on in fresh.items()}):
        again = [trajectory(f"t{length}", length, on=mirrored[f"t{length}"]) for length in lengths]
        assert placed(plan(again, engines, CostModel.GROUP_SIZE)) == mirrored


def test_context_that_is_on_an_engine_needs_no_prefill() -> None:
    alone = [engine("e0")]
    new = plan([trajectory("t", 100, 10_000)], alone).makespan_s
    there = plan([trajectory("t", 100, 10_000, on="e0")], alone).makespan_s
    gone = plan([trajectory("t", 100, 10_000, on="lost-engine")], alone).makespan_s
    assert new == gone == pytest.approx(there + 1.0)


def test_kv_capacity_limits_what_runs_at_once() -> None:
    trajectories = [trajectory(f"t{index}", 1_000, 1_000) for index in range(8)]
    roomy = plan(trajectories, [engine("e0")]).makespan_s
    short = plan(trajectories, [dataclasses.replace(engine("e0"), kv_tokens_capacity=3_000)]).makespan_s
    assert short > 2 * roomy


@pytest.mark.parametrize(
    ("bad", "error", "field"),
    [
        ({"remaining_tokens": math.nan}, InvalidTrajectoryError, "trajectories[1].remaining_tokens"),
        ({"remaining_tokens": math.inf}, InvalidTrajectoryError, "trajectories[1].remaining_tokens"),
        ({"remaining_tokens": -1.0}, InvalidTrajectoryError, "trajectories[1].remaining_tokens"),
        ({"context_tokens": -1}, InvalidTrajectoryError, "trajectories[1].context_tokens"),
        ({"trajectory_id": "t0"}, InvalidTrajectoryError, "trajectories[1].trajectory_id"),
        ({"trajectory_id": ""}, InvalidTrajectoryError, "trajectories[1].trajectory_id"),
    ],
)
def test_a_bad_trajectory_is_named(bad: dict[str, object], error: type[CoreError], field: str) -> None:
    wrong = dataclasses.replace(trajectory("t1", 10), **bad)  # type: ignore[arg-type]
    with pytest.raises(error) as caught:
        plan([trajectory("t0", 10), wrong], [engine("e0")])
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("bad", "field"),
    [
        ({"slot_limit": 0}, "engines[1].slot_limit"),
        ({"kv_tokens_capacity": -1}, "engines[1].kv_tokens_capacity"),
        ({"tensor_parallel": 0}, "engines[1].tensor_parallel"),
        ({"engine_id": "e0"}, "engines[1].engine_id"),
        ({"engine_id": ""}, "engines[1].engine_id"),
        ({"decode_curve": DecodeCurve(0.0, 0.0)}, "engines[1].decode_curve"),
        ({"decode_curve": DecodeCurve(math.nan, 0.0)}, "engines[1].decode_curve.base_s"),
        ({"decode_curve": DecodeCurve(0.1, -1.0)}, "engines[1].decode_curve.per_sequence_s"),
        ({"decode_curve": DecodeCurve(0.1, 0.1, math.inf)}, "engines[1].decode_curve.per_kv_token_s"),
        ({"decode_curve": DecodeCurve(0.1, 0.1, 0.0, -5.0)}, "engines[1].decode_curve.prefill_tokens_per_s"),
    ],
)
def test_a_bad_engine_is_named(bad: dict[str, object], field: str) -> None:
    with pytest.raises(InvalidEngineError) as caught:
        plan([trajectory("t0", 10)], [engine("e0"), dataclasses.replace(engine("e1"), **bad)])  # type: ignore[arg-type]
    assert caught.value.field == field


def test_without_engines_there_is_no_plan() -> None:
    with pytest.raises(NoEnginesError):
        plan([trajectory("t0", 10)], [])


def test_the_largest_figures_that_are_let_in_overflow_nothing() -> None:
    huge = DecodeCurve(1e12, 1e12, 1e12, 1e-6)
    engines = [PlanEngine(f"e{index}", 1, 10**15, 1, huge) for index in range(3)]
    for model in CostModel:
        found = plan([trajectory(f"t{index}", 1e15, 10**15) for index in range(10)], engines, model)
        assert math.isfinite(found.makespan_s)
