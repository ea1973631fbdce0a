"""DPArrange with the basic operator, for every prefix of the candidates at once (ARL-Tangram appendix B, Algorithm 3).

Row i of the table is of the first i candidates; entry e is their least sum of seconds when e units beyond all their
minimums are to be had. Rows are as wide as they can need: what the minimums of the prefix leave, or what the prefix can
use. So a queue that only just fits has a narrow table.
Where the paper has a prefix use all units exactly (ISVALID: r = 0), here it uses at most as many: a set such as {1, 4}
need not add up to what is free.
"""

from __future__ import annotations

import numpy as np

from treadle_core.compiled import compiled
from treadle_core.elastic.curves import Curves, Floats, Indexes


class FlatTable:
    """Units of a flat pool, or cores of one CPU node. Expects that all candidates fit at their minimums."""

    def __init__(self, curves: Curves, free: int) -> None:
        """free: units that the candidates share."""
        self._curves = curves
        least = curves.units[:, 0]
        most = curves.units[np.arange(len(curves.counts)), curves.counts - 1]
        left = np.concatenate(([free], free - np.cumsum(least)))
        usable = np.concatenate(([0], np.cumsum(most - least)))
        self._widths = np.minimum(left, usable)
        self._starts = np.concatenate(([0], np.cumsum(self._widths + 1)))
        self._table = np.empty(int(self._starts[-1]))
        fill(*curves, self._widths, self._starts, self._table)

    def seconds(self, prefix: int) -> float:
        """The least sum of seconds of the first `prefix` candidates."""
        return float(self._table[self._starts[prefix + 1] - 1])

    def chosen(self, prefix: int) -> Indexes:
        return trace(*self._curves, self._widths, self._starts, self._table, prefix)


@compiled
def fill(units: Indexes, seconds: Floats, counts: Indexes, widths: Indexes, starts: Indexes, table: Floats) -> None:
    """Writes all rows. One pass a choice, over entries side by side: a loop that runs several at once."""
    table[0] = 0.0
    for i in range(len(counts)):
        before = table[starts[i] : starts[i] + widths[i] + 1]
        row = table[starts[i + 1] : starts[i + 1] + widths[i + 1] + 1]
        row[:] = np.inf
        for choice in range(counts[i]):
            extra = units[i, choice] - units[i, 0]
            took = seconds[i, choice]
            if extra >= len(row):
                break
            shifted = row[extra:]
            shared = min(len(shifted), len(before))
            for e in range(shared):
                shifted[e] = min(shifted[e], before[e] + took)
            for e in range(shared, len(shifted)):  # more than those before it can use
                shifted[e] = min(shifted[e], before[shared - 1] + took)


@compiled
def trace(
    units: Indexes, seconds: Floats, counts: Indexes, widths: Indexes, starts: Indexes, table: Floats, prefix: int
) -> Indexes:
    """The choices behind the last entry of a row. They are found again by the same sums, so that `fill` keeps none.

    Of equal ones the fewest units: what is not needed stays free.
    """
    chosen = np.zeros(prefix, np.int64)
    e = widths[prefix]
    for i in range(prefix - 1, -1, -1):
        best = table[starts[i + 1] + e]
        for choice in range(counts[i]):
            left = e - (units[i, choice] - units[i, 0])
            if left >= 0 and table[starts[i] + min(left, widths[i])] + seconds[i, choice] == best:
                chosen[i] = choice
                e = min(left, widths[i])
                break
    return chosen
