"""What arranging reads of candidates, and what comes of it: choices of units with their durations, side by side.

An arrangement is made once for all candidates in their order and then answers for every prefix of them, so that all the
evictions of Algorithm 1 come out of one table (the paper runs DPArrange again for each).

DPArrange with the basic operator, for every prefix of the candidates at once (ARL-Tangram appendix B, Algorithm 3).

Row i of the table is of the first i candidates; entry e is their least sum of seconds when e units beyond all their
minimums are to be had. Rows are as wide as they can need: what the minimums of the prefix leave, or what the prefix can
use. So a queue that only just fits has a narrow table.
Where the paper has a prefix use all units exactly (ISVALID: r = 0), here it uses at most as many: a set such as {1, 4}
need not add up to what is free.

Arrangement by marginal gain: exact where durations are convex in units and units come one by one. Beyond the paper.

Each further unit goes to whom it saves most. As no action's next unit ever saves more than its last one did, those are
the largest savings there are, and no other way to deal out as many units saves more (the classical greedy of separable
convex allocation, Fox 1966). O(n + units * log n) a prefix, where the table takes O(n * units * choices)."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from treadle_core.compiled import compiled, lean

Floats = npt.NDArray[np.float64]
Indexes = npt.NDArray[np.int64]


class Curves(NamedTuple):
    """units[i, c], ascending in c, and seconds[i, c]: what candidate i may get, and how long it then takes.

    counts[i]: how many choices are real; those beyond are not read.
    """

    units: Indexes
    seconds: Floats
    counts: Indexes

    def of(self, candidates: Indexes) -> Curves:
        """Those of some of them, in this order."""
        return Curves(self.units[candidates], self.seconds[candidates], self.counts[candidates])

    def priced(self, price: float) -> Curves:
        """With each second dearer by the price of the units it holds: arranged so, fewer units are held."""
        return Curves(self.units, self.seconds * (1.0 + price * self.units), self.counts)


class Arrangement(Protocol):
    """The least sum of durations of candidates that share units (DPArrange, appendix B)."""

    def chosen(self, prefix: int) -> Indexes:
        """int64[prefix]: the choice of each of the first `prefix` candidates when the others get nothing."""
        ...


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


# Of a duration: within it, a saving that grows is the last digit of a division and not a curve that bends up.
ROUNDING = 1e-12


def convex(curves: Curves) -> bool:
    """Whether every candidate's units come one by one and each saves no more than the one before it."""
    return bool(is_convex(*curves))


class MarginalGains:
    """Units of a flat pool for `convex` curves. Expects that all candidates fit at their minimums."""

    def __init__(self, curves: Curves, free: int) -> None:
        """free: units that the candidates share."""
        self._curves = curves
        self._free = free

    def chosen(self, prefix: int) -> Indexes:
        return deal(*self._curves, self._free, prefix)


@compiled
def is_convex(units: Indexes, seconds: Floats, counts: Indexes) -> bool:
    for i in range(len(counts)):
        slack = ROUNDING * seconds[i, 0]
        for choice in range(1, counts[i]):
            if units[i, choice] != units[i, choice - 1] + 1:
                return False
            if choice > 1 and (
                seconds[i, choice - 1] - seconds[i, choice] > seconds[i, choice - 2] - seconds[i, choice - 1] + slack
            ):
                return False
    return True


@lean
def sink(gains: Floats, owners: Indexes, size: int, at: int) -> None:
    """Restores a heap, the largest gain first, below an entry that got smaller; the earlier of equals first."""
    gain, owner = gains[at], owners[at]
    while True:
        child = 2 * at + 1
        if child >= size:
            break
        other = child + 1
        if other < size and (
            gains[other] > gains[child] or (gains[other] == gains[child] and owners[other] < owners[child])
        ):
            child = other
        if gains[child] < gain or (gains[child] == gain and owners[child] > owner):
            break
        gains[at], owners[at] = gains[child], owners[child]
        at = child
    gains[at], owners[at] = gain, owner


@compiled
def deal(units: Indexes, seconds: Floats, counts: Indexes, free: int, prefix: int) -> Indexes:
    """The choices of the first `prefix` candidates. A unit that saves nothing stays free."""
    chosen = np.zeros(prefix, np.int64)
    gains, owners = np.empty(prefix), np.empty(prefix, np.int64)
    size = 0
    for i in range(prefix):
        free -= units[i, 0]
        if counts[i] > 1:
            gains[size], owners[size] = seconds[i, 0] - seconds[i, 1], i
            size += 1
    for at in range(size // 2 - 1, -1, -1):
        sink(gains, owners, size, at)
    while free > 0 and size > 0 and gains[0] > 0.0:
        i = owners[0]
        chosen[i] += 1
        free -= 1
        if chosen[i] + 1 < counts[i]:
            gains[0] = seconds[i, chosen[i]] - seconds[i, chosen[i] + 1]
        else:
            size -= 1
            gains[0], owners[0] = gains[size], owners[size]
        sink(gains, owners, size, 0)
    return chosen
