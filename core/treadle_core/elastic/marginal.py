"""Arrangement by marginal gain: exact where durations are convex in units and units come one by one. Beyond the paper.

Each further unit goes to whom it saves most. As no action's next unit ever saves more than its last one did, those are
the largest savings there are, and no other way to deal out as many units saves more (the classical greedy of separable
convex allocation, Fox 1966). O(n + units * log n) a prefix, where the table takes O(n * units * choices).
"""

from __future__ import annotations

import numpy as np

from treadle_core.compiled import compiled, lean
from treadle_core.elastic.curves import Curves, Floats, Indexes

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
