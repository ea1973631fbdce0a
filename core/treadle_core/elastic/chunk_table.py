"""DPArrange with the GPU-chunk operator, for every prefix of the candidates at once (ARL-Tangram appendix B).

Entry [i, state] of the table is the least sum of seconds of the first i candidates on the chunks that are free in a
state; prefix i of all candidates is entry [i, full].
"""

from __future__ import annotations

import numpy as np

from treadle_core.compiled import compiled
from treadle_core.elastic.chunks import full_state, level_of, residuals
from treadle_core.elastic.curves import Curves, Floats, Indexes


class ChunkTable:
    """GPUs in buddy chunks. Expects that all candidates fit at their minimums."""

    def __init__(self, curves: Curves, free_chunks: Indexes) -> None:
        """free_chunks: int64[LEVELS], chunks of 1, 2, 4, 8 GPUs that the candidates share."""
        self._curves = curves
        self._residuals = residuals(free_chunks)
        self._full = full_state(free_chunks)
        self._table = fill(*curves, self._residuals)

    def seconds(self, prefix: int) -> float:
        """The least sum of seconds of the first `prefix` candidates."""
        return float(self._table[prefix, self._full])

    def chosen(self, prefix: int) -> Indexes:
        return trace(*self._curves, self._residuals, self._table, prefix, self._full)


@compiled
def fill(units: Indexes, seconds: Floats, counts: Indexes, residual: Indexes) -> Floats:
    """float64[candidates + 1, states]; infinite where they do not fit."""
    table = np.full((len(counts) + 1, len(residual)), np.inf)
    table[0] = 0.0
    for i in range(len(counts)):
        for choice in range(counts[i]):
            level = level_of(units[i, choice])
            if level >= residual.shape[1]:
                continue
            for state in range(len(residual)):
                left = residual[state, level]
                if left >= 0:
                    table[i + 1, state] = min(table[i + 1, state], table[i, left] + seconds[i, choice])
    return table


@compiled
def trace(
    units: Indexes, seconds: Floats, counts: Indexes, residual: Indexes, table: Floats, prefix: int, full: int
) -> Indexes:
    """The choices behind an entry, found again by the same sums; of equal ones the fewest units."""
    chosen = np.zeros(prefix, np.int64)
    state = full
    for i in range(prefix - 1, -1, -1):
        for choice in range(counts[i]):
            level = level_of(units[i, choice])
            if level >= residual.shape[1]:
                continue
            left = residual[state, level]
            if left >= 0 and table[i, left] + seconds[i, choice] == table[i + 1, state]:
                chosen[i] = choice
                state = left
                break
    return chosen
