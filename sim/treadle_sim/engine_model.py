"""What an engine is made of, as the simulator knows it: how long its steps take, how much KV it holds.

This is the simulated truth. The planner sees only `linear()`, the straight line that a sidecar would declare, so that a
plan is judged by something other than its own cost model.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from treadle_core.model import DecodeCurve

ROUNDING = 1e-9  # a line that rises by no more than this share of a step is flat


@dataclass(frozen=True, slots=True)
class StepCurve:
    """Seconds of one decode step of a batch, and of a prefill.

    Decode: the piecewise linear curve through (batch_sizes, step_s), which starts at batch 1 and goes on with its last
    slope, plus per_kv_token_s for each KV token read. Prefill of p new tokens behind c cached ones:
    prefill_fixed_s + prefill_token_s * p + prefill_pair_s * p * (c + p / 2) + prefill_square_s * (c + p)^2, of a batch
    the fixed part once, but never less than a decode step of the same sequences: that reads all weights and all of
    their KV too. The square is for engines whose attention computes the queries of cached tokens again.
    """

    batch_sizes: tuple[float, ...]
    step_s: tuple[float, ...]
    per_kv_token_s: float
    prefill_fixed_s: float
    prefill_token_s: float
    prefill_pair_s: float
    prefill_square_s: float = 0.0

    def decode_s(self, batch: float) -> float:
        """Seconds of a step of `batch` sequences that hold no KV."""
        sizes, times = self.batch_sizes, self.step_s
        if len(sizes) > 1 and batch > sizes[-1]:
            return times[-1] + (batch - sizes[-1]) * (times[-1] - times[-2]) / (sizes[-1] - sizes[-2])
        return float(np.interp(batch, sizes, times))

    def prefill_s(self, new_tokens: float, cached_tokens: float) -> float:
        """Seconds to prefill one sequence; 0 for nothing."""
        if new_tokens <= 0:
            return 0.0
        computed_s = self.prefill_computed_s(new_tokens, cached_tokens)
        return self.prefill_batch_s(computed_s, 1, new_tokens + cached_tokens)

    def prefill_computed_s(self, new_tokens: float, cached_tokens: float) -> float:
        """What a sequence adds to the prefill that it is in."""
        pairs, squares = new_tokens * (cached_tokens + 0.5 * new_tokens), (cached_tokens + new_tokens) ** 2
        return self.prefill_token_s * new_tokens + self.prefill_pair_s * pairs + self.prefill_square_s * squares

    def prefill_batch_s(self, computed_s: float, sequences: int, kv_tokens: float) -> float:
        """Seconds of a prefill. computed_s: the sum over its sequences; kv_tokens: the sum of their contexts."""
        decode_s = self.decode_s(sequences) + self.per_kv_token_s * kv_tokens
        return max(self.prefill_fixed_s + computed_s, decode_s)

    def linear(self, slots: int) -> DecodeCurve:
        """The straight line that planners get: least squares over the batch sizes 1 to `slots`."""
        sizes = np.arange(1.0, slots + 1.0)
        times = np.array([self.decode_s(size) for size in sizes])
        slope = float(np.polyfit(sizes, times, 1)[0]) if slots > 1 else 0.0
        slope = slope if slope * slots > ROUNDING * times.max() else 0.0
        base = max(float(times.mean() - slope * sizes.mean()), 1e-6)
        return DecodeCurve(
            base, slope, self.per_kv_token_s, 1.0 / self.prefill_token_s if self.prefill_token_s else 0.0
        )


@dataclass(frozen=True, slots=True)
class EngineModel:
    """One kind of engine: a model on `gpus` accelerators of a kind, tensor parallel.

    slots: sequences that decode at once. kv_tokens: KV that fits beside the weights; 0: it does not fit at all.
    page_tokens: what is found in the radix cache is a multiple of it.
    """

    name: str
    accelerator: str
    llm: str
    gpus: int
    slots: int
    kv_tokens: int
    kv_bytes_per_token: int
    curve: StepCurve
    hardware_tags: tuple[str, ...] = ()
    page_tokens: int = 1
