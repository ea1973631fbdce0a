"""Divide free units among candidates so that the sum of their durations is least (DPArrange,
ARL-Tangram appendix B).

An arrangement is computed once for all candidates in their order, and then answers for every prefix
of them: all the evictions of Algorithm 1 come out of one table, where the paper runs DPArrange
again for each. `flat_table` is the basic operator (Algorithm 3), `marginal_gains` is exact and
faster where durations are convex, `chunk_table` is the GPU-chunk operator. All of them expect that
every candidate fits with its least units.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial
from typing import NamedTuple

import numpy as np

from treadle_core.compiled import Floats, Indexes, compiled, inlined, lean

# Of a duration: a saving that grows by less is the last digit of a division and not a curve that
# bends up.
ROUNDING = 1e-12
LEVELS = 4  # chunks of 1, 2, 4, 8 GPUs
NODE_GPUS = 1 << (LEVELS - 1)


class Curves(NamedTuple):
    """Choices of candidates: units[i, c], ascending in c, which candidate i may get, and seconds[i,
    c], which it then takes.

    counts[i]: how many choices are real; those beyond are not read.
    """

    units: Indexes
    seconds: Floats
    counts: Indexes

    def of(self, candidates: Indexes) -> Curves:
        """Return the curves of some candidates, in this order."""
        return Curves(self.units[candidates], self.seconds[candidates], self.counts[candidates])

    def priced(self, price: float) -> Curves:
        """Return curves in which a second costs more by `price` for each unit, so that an
        arrangement of them holds fewer units."""
        return Curves(self.units, self.seconds * (1.0 + price * self.units), self.counts)


# Of candidates that share the free units: int64[prefix], the choice of units of each of the first
# `prefix` when the others get nothing.
Arrangement = Callable[[int], Indexes]


def flat_table(curves: Curves, free: int) -> Arrangement:
    """Arrange interchangeable units, such as those of a quota or the cores of one node, for any
    curves.

    Row i of the table is of the first i candidates; entry e is their least sum of seconds with at
    most e units beyond their minimums. The paper's rows use all units exactly (ISVALID: r = 0), but
    a set such as {1, 4} need not add up to what is free. A row is as wide as its prefix can use, so
    a queue that only just fits has a narrow table.
    """
    least = curves.units[:, 0]
    most = curves.units[np.arange(len(curves.counts)), curves.counts - 1]
    left = np.concatenate(([free], free - np.cumsum(least)))
    usable = np.concatenate(([0], np.cumsum(most - least)))
    widths = np.minimum(left, usable)
    starts = np.concatenate(([0], np.cumsum(widths + 1)))
    table = np.empty(int(starts[-1]))
    fill_rows(*curves, widths, starts, table)
    return partial(trace_rows, *curves, widths, starts, table)


@compiled
def fill_rows(
    units: Indexes,
    seconds: Floats,
    counts: Indexes,
    widths: Indexes,
    starts: Indexes,
    table: Floats,
) -> None:
    """Fill the table of `flat_table`. The loop over entries is innermost, so that it is
    vectorised."""
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
            for e in range(shared, len(shifted)):  # more than the candidates before can use
                shifted[e] = min(shifted[e], before[shared - 1] + took)


@compiled
def trace_rows(
    units: Indexes,
    seconds: Floats,
    counts: Indexes,
    widths: Indexes,
    starts: Indexes,
    table: Floats,
    prefix: int,
) -> Indexes:
    """Find the choices behind the last entry of a row again by the same sums, so that `fill_rows`
    stores none.

    Of equal choices the one with the fewest units: what is not needed stays free.
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


def marginal_gains(curves: Curves, free: int) -> Arrangement:
    """Arrange interchangeable units for curves that `is_convex` accepts. Beyond the paper.

    Each further unit goes to the candidate that it saves most. No unit of a candidate saves more
    than the one before, so these are the largest savings there are (Fox 1966). O(n + units * log n)
    a prefix, where the table takes O(n * units * choices).
    """
    return partial(deal_units, *curves, free)


@compiled
def is_convex(units: Indexes, seconds: Floats, counts: Indexes) -> bool:
    """Return whether every candidate's units come one by one and each saves no more than the one
    before it."""
    for i in range(len(counts)):
        slack = ROUNDING * seconds[i, 0]
        for choice in range(1, counts[i]):
            if units[i, choice] != units[i, choice - 1] + 1:
                return False
            if choice > 1 and (
                seconds[i, choice - 1] - seconds[i, choice]
                > seconds[i, choice - 2] - seconds[i, choice - 1] + slack
            ):
                return False
    return True


@lean
def sift_down_gain(gains: Floats, owners: Indexes, size: int, at: int) -> None:
    """Restore a heap, largest gain first, below an entry that got smaller; of equal gains the
    earlier owner is first."""
    gain, owner = gains[at], owners[at]
    while True:
        child = 2 * at + 1
        if child >= size:
            break
        other = child + 1
        if other < size and (
            gains[other] > gains[child]
            or (gains[other] == gains[child] and owners[other] < owners[child])
        ):
            child = other
        if gains[child] < gain or (gains[child] == gain and owners[child] > owner):
            break
        gains[at], owners[at] = gains[child], owners[child]
        at = child
    gains[at], owners[at] = gain, owner


@compiled
def deal_units(units: Indexes, seconds: Floats, counts: Indexes, free: int, prefix: int) -> Indexes:
    """Return the choices of the first `prefix` candidates. A unit that saves nothing stays free."""
    chosen = np.zeros(prefix, np.int64)
    gains, owners = np.empty(prefix), np.empty(prefix, np.int64)
    size = 0
    for i in range(prefix):
        free -= units[i, 0]
        if counts[i] > 1:
            gains[size], owners[size] = seconds[i, 0] - seconds[i, 1], i
            size += 1
    for at in range(size // 2 - 1, -1, -1):
        sift_down_gain(gains, owners, size, at)
    while free > 0 and size > 0 and gains[0] > 0.0:
        i = owners[0]
        chosen[i] += 1
        free -= 1
        if chosen[i] + 1 < counts[i]:
            gains[0] = seconds[i, chosen[i]] - seconds[i, chosen[i] + 1]
        else:
            size -= 1
            gains[0], owners[0] = gains[size], owners[size]
        sift_down_gain(gains, owners, size, 0)
    return chosen


class Chunk(NamedTuple):
    """GPUs `first` to `first + size - 1` of a node: an aligned run of 1, 2, 4 or 8 (§5.3)."""

    node_id: str
    first: int
    size: int


def free_chunks(node_id: str, free: Collection[int]) -> list[Chunk]:
    """Return the largest aligned chunks of a node's free GPUs, in order: two free buddies are one
    chunk."""
    found = []
    first = 0
    while first < NODE_GPUS:
        size = NODE_GPUS
        while size and (first % size or not all(gpu in free for gpu in range(first, first + size))):
            size //= 2
        if size:
            found.append(Chunk(node_id, first, size))
        first += max(size, 1)
    return found


@inlined
def level_of(units: int) -> int:
    """Return the level of the smallest chunk that holds at least `units` GPUs; LEVELS where none
    does."""
    level = 0
    while level < LEVELS and (1 << level) < units:
        level += 1
    return level


@inlined
def take_chunk(counts: Indexes, level: int) -> bool:
    """Take one chunk of a level out of `counts`, the free chunks by level. Returns False, and
    changes nothing, where there is none.

    A larger chunk is split where no chunk of the level is free, and leaves one chunk of each level
    between.
    """
    source = level
    while source < LEVELS and counts[source] == 0:
        source += 1
    if source >= LEVELS:
        return False
    counts[source] -= 1
    for between in range(level, source):
        counts[between] += 1
    return True


def chunk_table(curves: Curves, free_chunks: Indexes) -> Arrangement:
    """Arrange GPUs in buddy chunks: entry [i, state] is the least sum of seconds of the first i
    candidates on the free chunks of a state. free_chunks: int64[LEVELS], how many chunks of 1, 2,
    4, 8 GPUs are free.

    Where the paper contradicts itself, §5.3 and the text of appendix B are followed and not the
    listing of Algorithm 4, which takes k GPUs apart over several chunks and never splits one, so
    that one GPU cannot be had of a free node. Here k GPUs take one chunk of the next power of two,
    of the smallest free chunk that holds it. A level is split into only when it is empty, so there
    are never more chunks of it than max(free at first, 1): that bounds the states, which Algorithm
    4 leaves open. n fresh nodes have 8 * (n + 1) of them.
    """
    residuals = residual_states(free_chunks)
    full = 0  # the state with all of them
    for level in range(LEVELS - 1, -1, -1):
        full = full * (max(int(free_chunks[level]), 1) + 1) + int(free_chunks[level])
    return partial(trace_states, *curves, residuals, fill_states(*curves, residuals), full)


@compiled
def residual_states(counts: Indexes) -> Indexes:
    """Return the operator PREV as a table: [state, level] is the state after a chunk of a level is
    taken, -1 where none is.

    States are counts in mixed radix (ENCODE).
    """
    radix = np.maximum(counts, 1) + 1
    states = 1
    for level in range(LEVELS):
        states *= radix[level]
    table = np.full((states, LEVELS), -1, np.int64)
    decoded = np.empty(LEVELS, np.int64)
    for state in range(states):
        for level in range(LEVELS):
            rest = state
            for each in range(LEVELS):
                decoded[each] = rest % radix[each]
                rest //= radix[each]
            if take_chunk(decoded, level):
                code, bounded = 0, True
                for each in range(LEVELS - 1, -1, -1):
                    code = code * radix[each] + decoded[each]
                    bounded = bounded and decoded[each] < radix[each]
                if bounded:  # no state out of bounds is reached from `counts`
                    table[state, level] = code
    return table


@compiled
def fill_states(units: Indexes, seconds: Floats, counts: Indexes, residual: Indexes) -> Floats:
    """Return the table float64[candidates + 1, states]; infinite where the candidates do not
    fit."""
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
                    table[i + 1, state] = min(
                        table[i + 1, state], table[i, left] + seconds[i, choice]
                    )
    return table


@compiled
def trace_states(
    units: Indexes,
    seconds: Floats,
    counts: Indexes,
    residual: Indexes,
    table: Floats,
    full: int,
    prefix: int,
) -> Indexes:
    """Find the choices behind an entry again by the same sums; of equal choices the one with the
    fewest units."""
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
