"""A prefill's seconds from measured prefills: fixed, by new token, by pair of a new token and one before it, and by
pair of any two tokens, for an attention that computes the queries of cached tokens too."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from treadle_sim.fit_error import FitError, held_out, relative_fit
from treadle_sim.least_squares import non_negative_least_squares


@dataclass(frozen=True, slots=True)
class PrefillPoint:
    """One measured prefill: tokens computed, tokens before them that were in the cache, seconds."""

    new_tokens: float
    cached_tokens: float
    seconds: float


@dataclass(frozen=True, slots=True)
class PrefillFit:
    """fixed_s + token_s * p + pair_s * p * (c + p / 2) + square_s * (c + p)^2 for p new tokens behind c cached ones."""

    fixed_s: float
    token_s: float
    pair_s: float
    square_s: float
    error: FitError


def fit_prefill(points: Sequence[PrefillPoint]) -> PrefillFit:
    """The terms of least relative error. Raises ValueError for no points, or one without tokens or time."""
    if not points or any(point.seconds <= 0 or point.new_tokens < 1 for point in points):
        raise ValueError("a prefill's cost needs prefills of at least one token that took time")
    new = np.array([point.new_tokens for point in points])
    cached = np.array([point.cached_tokens for point in points])
    seconds = np.array([point.seconds for point in points])
    # Without a cached token the last two cannot be told apart, and pairs of new tokens are what all attention computes.
    square = np.where((cached > 0).any(), (cached + new) ** 2, 0.0)
    matrix = np.column_stack([np.ones_like(new), new, new * (cached + 0.5 * new), square]) / seconds[:, None]

    terms = non_negative_least_squares(matrix, np.ones(seconds.size))
    errors = matrix @ terms - 1.0
    shapes = list(zip(new.tolist(), cached.tolist(), strict=True))  # repeats of a prefill are held out together
    alone = held_out(shapes, relative_fit(matrix), seconds.size) if len(set(shapes)) > 1 else errors
    fixed_s, token_s, pair_s, square_s = (float(term) for term in terms)
    return PrefillFit(fixed_s, token_s, pair_s, square_s, FitError.of(errors, alone))
