"""The cost of a decode curve with bends: DARTS eq. 4, with slots, from running sums."""

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from support.placements import bent_curves, eq4_s, levelled, tokens
from treadle_core.model import CostModel, DecodeCurve
from treadle_core.placing.costs import BatchCurve, InvalidCurveError, group_cost, tabulate
from treadle_core.placing.question import PlanEngine

lists = st.lists(tokens, min_size=1, max_size=30)


def engine(slots: int, curve: DecodeCurve | None = None, kv_tokens: int = 0) -> PlanEngine:
    return PlanEngine("e", slots, kv_tokens, 1, curve or DecodeCurve(0.01, 0.001, 0.0, 0.0))


def seconds(model: CostModel, lengths: list[float], spec: PlanEngine, curve: BatchCurve | None = None) -> float:
    n = len(lengths)
    costs = tabulate(model, np.array(lengths), np.full(n, 50.0), np.zeros(n, bool), [spec], curves=[curve])
    return group_cost(costs.table, 0, 0, n)


@settings(max_examples=300, deadline=None)
@given(lists, bent_curves(), st.integers(1, 40))
def test_it_is_equation_four_summed_interval_by_interval(lengths: list[float], curve: BatchCurve, slots: int) -> None:
    found = seconds(CostModel.PIECEWISE_INTEGRAL, lengths, engine(slots), curve)
    assert found == pytest.approx(eq4_s(levelled(lengths, slots), curve.knots), rel=1e-9, abs=1e-12)


@settings(max_examples=200, deadline=None)
@given(lists, st.integers(1, 12), st.floats(0.0, 0.01), st.sampled_from([0, 60, 400, 5_000]))
def test_a_curve_without_bends_costs_what_the_linear_model_says(
    lengths: list[float], slots: int, slope_s: float, kv_tokens: int
) -> None:
    assume(slope_s == 0.0 or slope_s > 1e-9)
    spec = engine(slots, DecodeCurve(0.01, slope_s, 1e-7, 1e4), kv_tokens)
    linear = seconds(CostModel.LINEAR_INTEGRAL, lengths, spec)
    knots = tuple((batch, 0.01 + slope_s * batch) for batch in (1, 2, 5))
    assert seconds(CostModel.PIECEWISE_INTEGRAL, lengths, spec) == pytest.approx(linear, rel=1e-9)
    assert seconds(CostModel.PIECEWISE_INTEGRAL, lengths, spec, BatchCurve(knots)) == pytest.approx(linear, rel=1e-9)


def test_three_sequences_take_the_steps_of_three_then_two_then_one() -> None:
    curve = BatchCurve(((1, 1.0), (2, 4.0), (3, 5.0)))
    assert seconds(CostModel.PIECEWISE_INTEGRAL, [10.0, 7.0, 2.0], engine(8), curve) == 2 * 5.0 + 5 * 4.0 + 3 * 1.0


def test_what_is_more_than_the_slots_runs_as_slots_fall_free() -> None:
    """Two slots and 10 + 2 + 2 + 2 tokens: the longest has a lane to itself, the others share the second one."""
    curve = BatchCurve(((1, 1.0), (2, 4.0)))
    assert seconds(CostModel.PIECEWISE_INTEGRAL, [10.0, 2.0, 2.0, 2.0], engine(2), curve) == 6 * 4.0 + 4 * 1.0


def test_before_the_first_knot_and_behind_the_last_the_curve_goes_on() -> None:
    curve = BatchCurve(((4, 1.0), (6, 2.0)))
    assert seconds(CostModel.PIECEWISE_INTEGRAL, [1.0], engine(99), curve) == 1.0
    assert seconds(CostModel.PIECEWISE_INTEGRAL, [1.0] * 4, engine(99), curve) == pytest.approx(1.0)
    assert seconds(CostModel.PIECEWISE_INTEGRAL, [1.0] * 10, engine(99), curve) == pytest.approx(4.0)
    assert seconds(CostModel.PIECEWISE_INTEGRAL, [1.0] * 10, engine(99), BatchCurve(((3, 2.0),))) == pytest.approx(2.0)


@pytest.mark.parametrize(
    ("knots", "field"),
    [
        ((), "curves[1].knots"),
        (((0, 1.0),), "curves[1].knots[0]"),
        (((1, 0.0),), "curves[1].knots[0]"),
        (((1, float("nan")),), "curves[1].knots[0]"),
        (((1, float("inf")),), "curves[1].knots[0]"),
        (((1, 1.0), (1, 2.0)), "curves[1].knots[1]"),
        (((2, 1.0), (1, 2.0)), "curves[1].knots[1]"),
        (((1, 1.0), (8, 0.5)), "curves[1].knots[1]"),
    ],
)
def test_a_curve_that_falls_or_is_none_at_all_is_named(knots: tuple[tuple[int, float], ...], field: str) -> None:
    """A falling curve would make a larger group cheaper, and the greedy fill wrong."""
    with pytest.raises(InvalidCurveError) as caught:
        tabulate(
            CostModel.PIECEWISE_INTEGRAL,
            np.ones(3),
            np.ones(3),
            np.zeros(3, bool),
            [engine(2), engine(2)],
            curves=[None, BatchCurve(knots)],
        )
    assert caught.value.field == field


def test_there_must_be_as_many_curves_as_engines() -> None:
    with pytest.raises(InvalidCurveError) as caught:
        tabulate(CostModel.PIECEWISE_INTEGRAL, np.ones(1), np.ones(1), np.zeros(1, bool), [engine(2)], curves=[])
    assert caught.value.field == "curves"
