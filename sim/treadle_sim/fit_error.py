"""How far a fit is from what was measured, on the points that it saw and on points that it did not."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from treadle_sim.least_squares import Array, non_negative_least_squares


@dataclass(frozen=True, slots=True)
class FitError:
    """|predicted / measured - 1|: median and 90th percentile, in sample and held out."""

    points: int
    median: float
    p90: float
    held_out_median: float
    held_out_p90: float

    @staticmethod
    def of(seen: Array, held_out: Array) -> FitError:
        """From the relative errors (signed or not) of the same points, fitted with them and without them."""
        near, far = np.abs(seen), np.abs(held_out)
        return FitError(
            points=int(near.size),
            median=float(np.median(near)),
            p90=float(np.quantile(near, 0.9)),
            held_out_median=float(np.median(far)),
            held_out_p90=float(np.quantile(far, 0.9)),
        )


Indices = npt.NDArray[np.intp]
Refit = Callable[[Indices], Callable[[Indices], Array]]


def relative_fit(matrix: Array) -> Refit:
    """Refits a linear model whose rows were divided by what was measured, so that each row's target is 1.

    Indices of the rows to fit give a function from indices of any rows to their relative errors.
    """

    def refit(seen: Indices) -> Callable[[Indices], Array]:
        terms = non_negative_least_squares(matrix[seen], np.ones(seen.size))
        return lambda rows: matrix[rows] @ terms - 1.0

    return refit


def held_out(groups: Sequence[Hashable], refit: Refit, count: int) -> Array:
    """Relative errors (count,) of points 0 to count - 1 in order, each by a fit that saw no point of its group."""
    labels = list(groups)
    errors = np.zeros(count)
    for group in dict.fromkeys(labels):
        out = np.array([label == group for label in labels])
        errors[out] = refit(np.flatnonzero(~out))(np.flatnonzero(out))
    return errors
