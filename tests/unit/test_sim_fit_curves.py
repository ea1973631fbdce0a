"""Fits of curves and of whole engines find what is behind exact data, and stay curves on any data."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from treadle_core.engine_queue.curves import non_negative_least_squares
from treadle_sim.engine_model import StepCurve
from treadle_sim.fitting.curves import DecodeFit, DecodePoint, FitError, PrefillPoint, fit_decode, fit_prefill
from treadle_sim.fitting.fit import derived_curve, serving_curve
from treadle_sim.fitting.serving import ACCELERATORS, LLMS, ServingLevel, fit_serving, kv_tokens
from treadle_sim.fitting.tables import ServedRow

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
def test_a_column_that_is_not_needed_counts_for_nothing_and_of_parallel_ones_the_first_is_taken(seed: int) -> None:
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
        assert float(fit.predict(np.array([batch]), np.array([0.0]))[0]) == pytest.approx(step, rel=1e-6)
    assert fit.error.held_out_p90 < 1e-6


@given(noise=st.lists(st.floats(-0.5, 0.5), min_size=27, max_size=27))
@settings(max_examples=25)
def test_a_fitted_step_never_falls_as_the_batch_grows(noise: list[float]) -> None:
    exact = points_of({batch: 0.008 + 1e-5 * batch for batch in BATCHES}, 3e-8)
    fit = fit_decode([DecodePoint(p.batch, p.kv_tokens, p.step_s * (1 + e)) for p, e in zip(exact, noise, strict=True)])
    assert fit.per_kv_token_s >= 0
    assert all(low <= high for low, high in itertools.pairwise(fit.step_s))


def test_repeats_of_one_step_are_held_out_together() -> None:
    """An outlier repeated five times fits itself well in sample; unseen, its error shows.

    Result: the held-out error is that of the neighbours' line.
    """
    points = [DecodePoint(batch, 0, 0.01) for batch in (1, 2, 4, 16)] + [DecodePoint(8, 0, 0.02)] * 5
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
def test_the_terms_of_exact_prefills_are_found(fixed: float, token: float, pair: float, square: float) -> None:
    points = [
        PrefillPoint(new, cached, fixed + token * new + pair * new * (cached + new / 2) + square * (cached + new) ** 2)
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
    fit = fit_prefill([PrefillPoint(new, 0, 0.01 + 1e-8 * new * new) for new in (64, 256, 1024, 8192)])
    assert fit.pair_s == pytest.approx(2e-8, rel=1e-6)
    assert fit.square_s == 0.0


LLM = LLMS["Qwen3-32B"]
H100, H200, H20, H800 = (ACCELERATORS[name] for name in ("H100", "H200", "H20", "H800"))
NO_ERROR = FitError(1, 0.0, 0.0, 0.0, 0.0)
LEVEL = ServingLevel(kernel_factor=0.9, layer_s=3e-5, sequence_s=2e-5, compute=1.6, link=1.4, pair=2.5)
KERNELS = {
    2: DecodeFit((1.0, 256.0), (0.013, 0.016), 4e-8, NO_ERROR),
    4: DecodeFit((1.0, 256.0), (0.0074, 0.011), 2e-8, NO_ERROR),
    8: DecodeFit((1.0, 256.0), (0.005, 0.0083), 1e-8, NO_ERROR),
}


def row(gpus: int, batch: int, prompt: int, gen: int, request_s: float = 1.0) -> ServedRow:
    """A third of the request before the first token: the split between the two must not matter."""
    return ServedRow(
        "sglang", LLM.name, "H100", "", gpus, batch, prompt, gen, request_s / 3, request_s * 2 / 3 / (gen - 1)
    )


def exact_rows() -> list[ServedRow]:
    shapes = list(itertools.product(KERNELS, (8, 32, 128), (1024, 4096), (128, 512)))
    seconds = LEVEL.request_s([row(*shape) for shape in shapes], [KERNELS[gpus] for gpus, *_ in shapes], LLM)
    return [row(*shape, float(second)) for shape, second in zip(shapes, seconds, strict=True)]


def test_the_level_behind_exact_requests_is_found_also_with_a_degree_unseen() -> None:
    fit = fit_serving(exact_rows(), KERNELS)
    for name in ("kernel_factor", "layer_s", "sequence_s", "compute", "link", "pair"):
        assert getattr(fit.level, name) == pytest.approx(getattr(LEVEL, name), rel=1e-4)
    assert fit.unseen_gpus.held_out_p90 < 1e-6
    assert fit.steps.median < 1e-6


def test_a_request_costs_its_own_steps_and_one_prefill_of_each_that_is_served_with_it() -> None:
    """Sixteen requests of 1,024 + 129 tokens on two GPUs, by hand from the equation."""
    shape = row(2, 16, 1024, 129)
    held = 16 * (1024 + 64.5)
    kernels = 0.013 + (0.016 - 0.013) * 15 / 255 + 4e-8 * held
    step = 0.9 * kernels + 3e-5 * 64 + 2e-5 * 16
    token = 1.6 * 2 * 32.76e9 / (2 * 989e12) + 1.4 * (2 * 64 * 5120 * 2 * 2 * 1 / 2) / 450e9
    pair = 2.5 * 4 * 64 * 64 * 128 / (2 * 989e12)
    expected = 128 * step + 16 * (token * 1024 + pair * 1024**2 / 2)
    assert LEVEL.request_s([shape], [KERNELS[2]], LLM)[0] == pytest.approx(expected, rel=1e-9)


def test_rows_whose_requests_wait_for_room_are_left_out() -> None:
    crowded = row(2, 256, 4096, 512, 1000.0)
    assert crowded.batch * (crowded.prompt_tokens + crowded.gen_tokens) > kv_tokens(LLM, H100, 2)
    fit = fit_serving([*exact_rows(), crowded], KERNELS)
    assert crowded not in fit.rows
    assert fit.level.kernel_factor == pytest.approx(LEVEL.kernel_factor, rel=1e-4)
    with pytest.raises(ValueError, match="no measured engine"):
        fit_serving([crowded], KERNELS)


def test_a_curve_derived_for_the_card_itself_is_the_curve_where_memory_binds() -> None:
    own = serving_curve(KERNELS[8], LEVEL, LLM, H100, 8)
    derived = derived_curve(KERNELS[8], LEVEL, LLM, H100, H100, 8)
    for batch in (1, 7, 50, 100):
        assert derived.decode_s(batch) == pytest.approx(own.decode_s(batch), rel=1e-9)
    assert derived.prefill_token_s == own.prefill_token_s


def test_a_card_of_little_arithmetic_follows_memory_at_small_batches_and_its_peak_at_large_ones() -> None:
    curve = derived_curve(KERNELS[2], LEVEL, LLM, H200, H20, 2)
    host_s = LEVEL.layer_s * LLM.layers

    def arithmetic_s(batch: float) -> float:
        return LEVEL.compute * LLM.token_flops * batch / (2 * H20.bf16_flops)

    for batch in np.linspace(1, 256, 40):
        memory_s = 4.8 / 4.0 * 0.9 * float(np.interp(batch, (1, 256), (0.013, 0.016)))
        expected = max(memory_s, arithmetic_s(batch)) + host_s + LEVEL.sequence_s * batch
        assert curve.decode_s(float(batch)) == pytest.approx(expected, rel=1e-9)
    assert curve.per_kv_token_s == pytest.approx(4.8 / 4.0 * 0.9 * 4e-8)
    measured = serving_curve(KERNELS[2], LEVEL, LLM, H200, 2)
    assert curve.prefill_token_s > 5 * measured.prefill_token_s


def test_slower_links_cost_prefill_and_large_batches_but_nothing_on_one_card() -> None:
    many = [derived_curve(KERNELS[8], LEVEL, LLM, H100, card, 8) for card in (H100, H800)]
    assert many[1].prefill_token_s > many[0].prefill_token_s
    assert many[1].decode_s(100) > many[0].decode_s(100)
    assert many[1].decode_s(1) == pytest.approx(many[0].decode_s(1), rel=0.01)
    one = [derived_curve(KERNELS[8], LEVEL, LLM, H100, card, 1) for card in (H100, H800)]
    assert one[0] == one[1]


def test_capacity_is_what_weights_leave_and_nothing_where_that_is_too_little() -> None:
    assert kv_tokens(LLMS["Qwen3-14B"], H100, 1) == (int(0.88 * 80e9 - 2 * 14.77e9) // (2 * 40 * 8 * 128 * 2))
    assert kv_tokens(LLM, H100, 1) == 0  # 4.9 GB are left, 18.6K tokens
    assert kv_tokens(LLM, H200, 1) > 200_000
