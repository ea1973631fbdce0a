"""Buddy chunks of GPUs: aligned runs of 1, 2, 4 or 8 on a node, as counts and as a state number (ARL-Tangram §5.3).

Where the paper contradicts itself, §5.3 and the text of appendix B are followed and not the listing of Algorithm 4. The
listing takes k GPUs apart over several chunks, which may be on several nodes, and never splits one, so that one GPU
cannot be had of a free node. Here k GPUs take one chunk of the next power of two: the smallest that is free, and what a
larger one leaves is split into one chunk of each level between. A level is split into only when it is empty, so that
there are never more chunks of it than max(free at first, 1): that bounds the states (Algorithm 4 leaves N open). A
fresh cluster of n nodes has 8 * (n + 1) of them.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

import numpy as np

from treadle_core.compiled import compiled, inlined
from treadle_core.elastic.curves import Indexes

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
