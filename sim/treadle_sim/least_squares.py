"""Least squares with no negative coefficient: what keeps every fitted curve monotone and every cost a cost."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]

# Below this share of the target's norm, a gradient counts as zero, and so does what a column adds: double precision
# leaves about 1e-15 of noise a row, and another processor other noise.
SLACK = 1e-10


def non_negative_least_squares(matrix: Array, target: Array) -> Array:
    """Argmin over x >= 0 of |matrix x - target|: matrix (rows, columns), target (rows,), result (columns,).

    Lawson and Hanson's active set, on columns scaled to norm 1. Raises ValueError for shapes that do not fit, for
    values that are not finite, and for no rows.
    """
    if matrix.ndim != 2 or target.shape != (matrix.shape[0],) or not target.size:
        raise ValueError(f"shapes {matrix.shape} and {target.shape} are no least squares problem")
    if not (np.isfinite(matrix).all() and np.isfinite(target).all()):
        raise ValueError("least squares of values that are not finite")
    norms = np.linalg.norm(matrix, axis=0)
    scale = np.where(norms > 0, norms, 1.0)
    scaled = matrix / scale
    slack = SLACK * float(np.linalg.norm(target))
    solution = np.zeros(matrix.shape[1])
    free = np.zeros(matrix.shape[1], dtype=bool)
    for _ in range(3 * matrix.shape[1]):  # ends long before where columns are not nearly parallel
        gradient = np.where(free, 0.0, scaled.T @ (target - scaled @ solution))
        if not (gradient > slack).any():
            break
        # Of columns that help alike, parallel ones above all, the first: rounding must not choose.
        free[int(np.argmax(gradient >= gradient.max() - slack))] = True
        solution = _settle(scaled, target, solution, free)
    return np.asarray(np.where(solution > slack, solution, 0.0) / scale)


def _settle(matrix: Array, target: Array, solution: Array, free: npt.NDArray[np.bool_]) -> Array:
    """Moves to the least squares of the free columns; a column that would turn negative on the way is fixed at zero."""
    while True:
        aim = np.zeros_like(solution)
        aim[free] = np.linalg.lstsq(matrix[:, free], target, rcond=None)[0]
        below = free & (aim <= 0.0)
        if not below.any():
            return aim
        room = np.full_like(solution, np.inf)
        room[below] = solution[below] / (solution[below] - aim[below] + np.finfo(float).tiny)
        first = int(np.argmin(room))
        solution = solution + min(float(room[first]), 1.0) * (aim - solution)
        free[first] = False
        solution[~free] = 0.0
