"""Curves of accelerators that nobody measured for us, scaled from one that was: marked `derived` wherever they show.

A step is bound by memory or by arithmetic. What reads memory (weights at small batches, KV) scales with bandwidth; what
computes (prefill, and the weights once a batch is large) scales with FLOP/s, at the share of the peak that prefill
reached on the measured card. The host's part of a step (launches, sampling, the scheduler) is the same everywhere.
"""

from __future__ import annotations

import numpy as np

from treadle_sim.decode_fit import DecodeFit
from treadle_sim.engine_model import StepCurve
from treadle_sim.hardware import Accelerator, Llm
from treadle_sim.least_squares import Array
from treadle_sim.serving_fit import ServingLevel

# A forward pass of a few tokens costs about a decode step, one of many its tokens: the larger of the two. StepCurve
# adds them instead; with half a step as the fixed part the sum is nowhere more than half a step off.
FIXED_SHARE_OF_STEP = 0.5


def serving_curve(kernels: DecodeFit, level: ServingLevel, llm: Llm, card: Accelerator, gpus: int) -> StepCurve:
    """The curve of a whole engine on the card that its kernels were measured on."""
    sizes = np.array(kernels.batch_sizes)
    steps = level.steps_s(np.array(kernels.step_s), sizes, llm)
    return _curve(sizes, steps, level.kernel_factor * kernels.per_kv_token_s, level, llm, card, gpus)


def derived_curve(
    kernels: DecodeFit, level: ServingLevel, llm: Llm, measured: Accelerator, card: Accelerator, gpus: int
) -> StepCurve:
    """The curve of a whole engine on `card`, from kernels that were measured on `measured`."""
    slower = measured.memory_bytes_per_s / card.memory_bytes_per_s
    compute_s = level.compute * llm.token_flops / (gpus * card.bf16_flops)
    link_s = level.link * llm.reduced_bytes(gpus) * (1.0 / card.link_bytes_per_s - 1.0 / measured.link_bytes_per_s)
    sizes = np.array(kernels.batch_sizes)
    memory_s = slower * level.kernel_factor * np.array(kernels.step_s)
    sizes, memory_s = _with_crossings(sizes, memory_s, compute_s)
    kernels_s = np.maximum(memory_s, compute_s * sizes) + link_s * sizes
    steps = kernels_s + level.layer_s * llm.layers + level.sequence_s * sizes
    return _curve(sizes, steps, slower * level.kernel_factor * kernels.per_kv_token_s, level, llm, card, gpus)


def _with_crossings(sizes: Array, times: Array, slope: float) -> tuple[Array, Array]:
    """A knot more wherever the curve crosses slope * size, so that the larger of the two has all its corners."""
    above = times - slope * sizes
    crossings = [
        low + (high - low) * left / (left - right)
        for low, high, left, right in zip(sizes, sizes[1:], above, above[1:], strict=False)
        if left * right < 0
    ]
    more = np.sort(np.concatenate([sizes, crossings]))
    return more, np.interp(more, sizes, times)


def _curve(
    sizes: Array, steps: Array, kv_token_s: float, level: ServingLevel, llm: Llm, card: Accelerator, gpus: int
) -> StepCurve:
    return StepCurve(
        batch_sizes=tuple(float(size) for size in sizes),
        step_s=tuple(float(step) for step in steps),
        per_kv_token_s=kv_token_s,
        prefill_fixed_s=FIXED_SHARE_OF_STEP * float(steps[0]),
        prefill_token_s=level.prefill_token_s(llm, card, gpus),
        prefill_pair_s=level.prefill_pair_s(llm, card, gpus),
    )
