"""Fits of whole engines find what is behind exact data, and scale it to cards that nobody
measured."""

import itertools

import numpy as np
import pytest
from treadle_sim.fitting import DecodeFit, FitError

from treadle_bench.fit.profiles import derived_curve, serving_curve
from treadle_bench.fit.serving import ACCELERATORS, LLMS, ServingLevel, fit_serving, kv_tokens
from treadle_bench.fit.tables import ServedRow

LLM = LLMS["Qwen3-32B"]
H100, H200, H20, H800 = (ACCELERATORS[name] for name in ("H100", "H200", "H20", "H800"))
NO_ERROR = FitError(1, 0.0, 0.0, 0.0, 0.0)
LEVEL = ServingLevel(
    kernel_factor=0.9, layer_s=3e-5, sequence_s=2e-5, compute=1.6, link=1.4, pair=2.5
)
KERNELS = {
    2: DecodeFit((1.0, 256.0), (0.013, 0.016), 4e-8, NO_ERROR),
    4: DecodeFit((1.0, 256.0), (0.0074, 0.011), 2e-8, NO_ERROR),
    8: DecodeFit((1.0, 256.0), (0.005, 0.0083), 1e-8, NO_ERROR),
}


def row(gpus: int, batch: int, prompt: int, gen: int, request_s: float = 1.0) -> ServedRow:
    """A third of the request before the first token: the split between the two must not matter."""
    return ServedRow(
        "sglang",
        LLM.name,
        "H100",
        "",
        gpus,
        batch,
        prompt,
        gen,
        request_s / 3,
        request_s * 2 / 3 / (gen - 1),
    )


def exact_rows() -> list[ServedRow]:
    shapes = list(itertools.product(KERNELS, (8, 32, 128), (1024, 4096), (128, 512)))
    seconds = LEVEL.request_s(
        [row(*shape) for shape in shapes], [KERNELS[gpus] for gpus, *_ in shapes], LLM
    )
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


def test_a_card_of_little_arithmetic_follows_memory_at_small_batches_and_its_peak_at_large_ones() -> (
    None
):
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
    assert kv_tokens(LLMS["Qwen3-14B"], H100, 1) == (
        int(0.88 * 80e9 - 2 * 14.77e9) // (2 * 40 * 8 * 128 * 2)
    )
    assert kv_tokens(LLM, H100, 1) == 0  # 4.9 GB are left, 18.6K tokens
    assert kv_tokens(LLM, H200, 1) > 200_000
