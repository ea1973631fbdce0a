"""A decode curve from measured steps: piecewise linear in the batch, plus a term for each KV token read.

Knots are taken from the measured batch sizes, one after another, as long as each lowers the held-out error: so that a
curve has no more of them than its data carry. Coefficients are not negative, so that no larger batch and no longer
context is ever predicted to be faster.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from treadle_sim.fit_error import FitError, held_out, relative_fit
from treadle_sim.least_squares import Array, non_negative_least_squares

FOLDS = 5
# A further knot has to lower the held-out mean square error by this share; less is noise of the folds.
KNOT_GAIN = 0.05
MOST_KNOTS = 6


@dataclass(frozen=True, slots=True)
class DecodePoint:
    """One measured step: sequences, KV tokens of all of them together, seconds."""

    batch: float
    kv_tokens: float
    step_s: float


@dataclass(frozen=True, slots=True)
class DecodeFit:
    """step_s at each of batch_sizes with no KV, seconds for each KV token, and how far off it is."""

    batch_sizes: tuple[float, ...]
    step_s: tuple[float, ...]
    per_kv_token_s: float
    error: FitError

    def predict(self, batch: Array, kv_tokens: Array) -> Array:
        """Seconds of steps; within the measured batch sizes."""
        return np.asarray(np.interp(batch, self.batch_sizes, self.step_s) + self.per_kv_token_s * kv_tokens)


def fit_decode(points: Sequence[DecodePoint]) -> DecodeFit:
    """The curve of least relative error. Raises ValueError for no points or a time that is not positive."""
    if not points or any(point.step_s <= 0 or point.batch < 1 for point in points):
        raise ValueError("a decode curve needs steps of at least one sequence that took time")
    ordered = sorted(points, key=lambda point: (point.batch, point.kv_tokens))
    batch = np.array([point.batch for point in ordered])
    kv_tokens = np.array([point.kv_tokens for point in ordered])
    step_s = np.array([point.step_s for point in ordered])
    knots = _choose_knots(batch, kv_tokens, step_s)
    matrix = _matrix(batch, kv_tokens, knots) / step_s[:, None]
    coefficients = non_negative_least_squares(matrix, np.ones(step_s.size))
    alone = _held_out(matrix, _cells(batch, kv_tokens))
    return DecodeFit(
        batch_sizes=knots,
        step_s=tuple(float(step) for step in np.cumsum(coefficients[:-1])),
        per_kv_token_s=float(coefficients[-1]),
        error=FitError.of(matrix @ coefficients - 1.0, alone),
    )


def _choose_knots(batch: Array, kv_tokens: Array, step_s: Array) -> tuple[float, ...]:
    sizes = [float(size) for size in np.unique(batch)]
    chosen = {sizes[0], sizes[-1]}
    folds = [cell % FOLDS for cell in _cells(batch, kv_tokens)]

    def loss(knots: set[float]) -> float:
        matrix = _matrix(batch, kv_tokens, tuple(sorted(knots))) / step_s[:, None]
        return float(np.mean(_held_out(matrix, folds) ** 2))

    best = loss(chosen)
    while len(chosen) < MOST_KNOTS:
        tried = [(loss(chosen | {size}), size) for size in sizes if size not in chosen]
        if not tried or min(tried)[0] > (1.0 - KNOT_GAIN) * best:
            break
        best, size = min(tried)
        chosen.add(size)
    return tuple(sorted(chosen))


def _cells(batch: Array, kv_tokens: Array) -> list[int]:
    """A number for each point; repeats of one measurement share it, so that they are held out together."""
    cells: dict[tuple[float, float], int] = {}
    return [cells.setdefault(shape, len(cells)) for shape in zip(batch.tolist(), kv_tokens.tolist(), strict=True)]


def _held_out(matrix: Array, groups: list[int]) -> Array:
    """Relative errors of rows that were divided by what was measured, so that 1 is the target of each."""
    if len(set(groups)) < 2:
        return np.asarray(matrix @ non_negative_least_squares(matrix, np.ones(len(matrix))) - 1.0)
    return held_out(groups, relative_fit(matrix), len(matrix))


def _matrix(batch: Array, kv_tokens: Array, knots: tuple[float, ...]) -> Array:
    """Columns: the step at the first knot, the rise from each knot to the next, KV tokens."""
    rises = [np.clip((batch - low) / (high - low), 0.0, 1.0) for low, high in pairwise(knots)]
    return np.column_stack([np.ones_like(batch), *rises, kv_tokens])
