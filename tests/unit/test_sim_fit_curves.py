"""Fits of curves find what is behind exact data, and stay curves on any data."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from treadle_core.engine_queue.pace import non_negative_least_squares
from treadle_sim.engine_model import StepCurve
from treadle_sim.fitting import DecodePoint, PrefillPoint, fit_decode, fit_prefill

BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
CONTEXTS = (1024, 4096, 16384)


def points_of(step_s: dict[int, float], kv_token_s: float) -> list[DecodePoint]:
    return [
        DecodePoint(batch, batch * context, step + kv_token_s * batch * context)
        for batch, step in step_s.items()
        for context in CONTEXTS
    ]


@given(rows=st.integers(2, 6), columns=st.integers(1, 4), seed=st.integers(0, 2**32 - 1))
@settings(max_examples=150)
def test_no_other_non_negative_solution_is_nearer(rows: int, columns: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    matrix, target = rng.normal(size=(rows, columns)), rng.normal(size=rows)
    found = non_negative_least_squares(matrix, target)
    best = float(np.linalg.norm(target))
    for size in range(1, columns + 1):
        for chosen in itertools.combinations(range(columns), size):
            part = np.linalg.lstsq(matrix[:, chosen], target, rcond=None)[0]
            if (part >= 0).all():
                best = min(best, float(np.linalg.norm(matrix[:, chosen] @ part - target)))
    assert (found >= 0).all()
    with pytest.raises(ValueError, match="not finite"):
        non_negative_least_squares(matrix * np.nan, target)
    assert np.linalg.norm(matrix @ found - target) == pytest.approx(best, abs=1e-9)


@given(seed=st.integers(0, 2**32 - 1))
@settings(max_examples=150)
def test_a_column_that_is_not_needed_counts_for_nothing_and_of_parallel_ones_the_first_is_taken(
    seed: int,
) -> None:
    rng = np.random.default_rng(seed)
    matrix = rng.uniform(0.1, 1.0, size=(5, 3))
    needed = non_negative_least_squares(matrix, matrix[:, 0] + matrix[:, 1])
    assert needed[:2] == pytest.approx([1.0, 1.0])
    assert needed[2] == 0.0
    column = rng.uniform(0.1, 1.0, size=6)
    found = non_negative_least_squares(np.outer(column, rng.uniform(0.01, 100.0, size=3)), column)
    assert found[0] > 0.0
    assert list(found[1:]) == [0.0, 0.0]


@given(step_s=st.floats(1e-4, 10.0), slots=st.integers(2, 512))
def test_a_flat_curve_is_flat_for_planners_too(step_s: float, slots: int) -> None:
    curve = StepCurve((1.0, 4.0), (step_s, step_s), 0.0, 0.0, 0.0, 0.0)
    assert curve.linear(slots).per_sequence_s == 0.0


def test_a_curve_with_a_knee_is_found_with_its_knee_and_without_idle_knots() -> None:
    truth = {batch: 0.008 + 1e-6 * batch + 5e-5 * max(batch - 64, 0) for batch in BATCHES}
    fit = fit_decode(points_of(truth, 3e-8))
    assert 64.0 in fit.batch_sizes
    assert len(fit.batch_sizes) <= 4
    assert fit.per_kv_token_s == pytest.approx(3e-8, rel=1e-6)
    for batch, step in truth.items():
        assert float(fit.predict(np.array([batch]), np.array([0.0]))[0]) == pytest.approx(
            step, rel=1e-6
        )
    assert fit.error.held_out_p90 < 1e-6


@given(noise=st.lists(st.floats(-0.5, 0.5), min_size=27, max_size=27))
@settings(max_examples=25)
def test_a_fitted_step_never_falls_as_the_batch_grows(noise: list[float]) -> None:
    exact = points_of({batch: 0.008 + 1e-5 * batch for batch in BATCHES}, 3e-8)
    fit = fit_decode(
        [
            DecodePoint(p.batch, p.kv_tokens, p.step_s * (1 + e))
            for p, e in zip(exact, noise, strict=True)
        ]
    )
    assert fit.per_kv_token_s >= 0
    assert all(low <= high for low, high in itertools.pairwise(fit.step_s))


def test_repeats_of_one_step_are_held_out_together() -> None:
    """An outlier repeated five times fits itself well in sample; unseen, its error shows.

    Result: the held-out error is that of the neighbours' line.
    """
    points = [DecodePoint(batch, 0, 0.01) for batch in (1, 2, 4, 16)] + [
        DecodePoint(8, 0, 0.02)
    ] * 5
    error = fit_decode(points).error
    assert error.held_out_p90 >= 0.4


def test_one_step_alone_gives_a_constant_and_none_gives_an_error() -> None:
    fit = fit_decode([DecodePoint(4, 0, 0.02)])
    assert (fit.batch_sizes, fit.step_s) == ((4.0,), (0.02,))
    for bad in ([], [DecodePoint(1, 0, 0.0)], [DecodePoint(0, 0, 1.0)]):
        with pytest.raises(ValueError, match="decode curve"):
            fit_decode(bad)


@given(
    fixed=st.floats(0.0, 0.05),
    token=st.floats(1e-6, 1e-3),
    pair=st.sampled_from([0.0, 1e-10, 1e-8]),
    square=st.sampled_from([0.0, 1e-9]),
)
@settings(max_examples=50)
def test_the_terms_of_exact_prefills_are_found(
    fixed: float, token: float, pair: float, square: float
) -> None:
    points = [
        PrefillPoint(
            new,
            cached,
            fixed + token * new + pair * new * (cached + new / 2) + square * (cached + new) ** 2,
        )
        for new in (64, 256, 1024, 8192)
        for cached in (0, 4096, 30_000)
    ]
    fit = fit_prefill(points)
    for point in points:
        predicted = fit.fixed_s + fit.token_s * point.new_tokens
        predicted += fit.pair_s * point.new_tokens * (point.cached_tokens + point.new_tokens / 2)
        predicted += fit.square_s * (point.cached_tokens + point.new_tokens) ** 2
        assert predicted == pytest.approx(point.seconds, rel=1e-6)
    assert fit.error.held_out_p90 < 1e-5


def test_without_a_cached_token_the_pairs_are_those_of_new_tokens() -> None:
    fit = fit_prefill(
        [PrefillPoint(new, 0, 0.01 + 1e-8 * new * new) for new in (64, 256, 1024, 8192)]
    )
    assert fit.pair_s == pytest.approx(2e-8, rel=1e-6)
    assert fit.square_s == 0.0
