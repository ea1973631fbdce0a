"""Buddy chunks of GPUs: aligned runs of 1, 2, 4 or 8 on a node, as counts and as a state number (ARL-Tangram §5.3).

Where the paper contradicts itself, §5.3 and the text of appendix B are followed and not the listing of Algorithm 4. The
listing takes k GPUs apart over several chunks, which may be on several nodes, and never splits one, so that one GPU
cannot be had of a free node. Here k GPUs take one chunk of the next power of two: the smallest that is free, and what a
larger one leaves is split into one chunk of each level between. A level is split into only when it is empty, so that
there are never more chunks of it than max(free at first, 1): that bounds the states (Algorithm 4 leaves N open). A
fresh cluster of n nodes has 8 * (n + 1) of them.

DPArrange with the GPU-chunk operator, for every prefix of the candidates at once (ARL-Tangram appendix B).

Entry [i, state] of the table is the least sum of seconds of the first i candidates on the chunks that are free in a
state; prefix i of all candidates is entry [i, full]."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

import numpy as np

from treadle_core.compiled import compiled, inlined
from treadle_core.tools.arrangement import Curves, Floats, Indexes

LEVELS = 4  # chunks of 1, 2, 4, 8 GPUs
NODE_GPUS = 1 << (LEVELS - 1)


class Chunk(NamedTuple):
    """GPUs `first` to `first + size - 1` of a node."""

    node_id: str
    first: int
    size: int


def free_chunks(node_id: str, free: Collection[int]) -> list[Chunk]:
    """The largest aligned chunks that a node's free GPUs make up, in order: two free buddies are one."""
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
    """The level of the smallest chunk that holds so many GPUs, at least 1; LEVELS where none does."""
    level = 0
    while level < LEVELS and (1 << level) < units:
        level += 1
    return level


@inlined
def take(counts: Indexes, level: int) -> bool:
    """Takes one chunk of a level out of `counts`, free chunks by level; false, and nothing changed, where none is."""
    source = level
    while source < LEVELS and counts[source] == 0:
        source += 1
    if source >= LEVELS:
        return False
    counts[source] -= 1
    for between in range(level, source):
        counts[between] += 1
    return True


@compiled
def residuals(counts: Indexes) -> Indexes:
    """The operator PREV as a table: [state, level] is the state after one chunk of a level is taken, -1 where none is.

    States are counts in mixed radix (ENCODE); `counts`, those free at first, is state `full_state(counts)`.
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
            if take(decoded, level):
                code, bounded = 0, True
                for each in range(LEVELS - 1, -1, -1):
                    code = code * radix[each] + decoded[each]
                    bounded = bounded and decoded[each] < radix[each]
                if bounded:  # a state that is out of bounds is none that `counts` leads to
                    table[state, level] = code
    return table


def full_state(counts: Indexes) -> int:
    """The number of the state with these free chunks by level, where there were no more at first."""
    code = 0
    for level in range(LEVELS - 1, -1, -1):
        code = code * (max(int(counts[level]), 1) + 1) + int(counts[level])
    return code


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
