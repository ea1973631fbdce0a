"""Sort a workload longest first, with the running sums that make the cost of any group O(1): one
sort, one pass.

A plan of many trajectories spends most of its time in `rank`, so that is written for memory: two
counting passes over keys of 22 bits instead of comparisons, then the few trajectories that share a
key are put in exact order. Where many share one (most lengths below a 2^24th of the longest, or
equal to the last bits) it sorts by comparing. With or without numba the order is that of a stable
descending sort, and the sums are the plain left-to-right ones.

A `Workspace` belongs to one caller, who makes one plan at a time with it; what was ranked with it
is valid until then.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np

from treadle_core.compiled import HAVE_KERNELS, Flags, Floats, Indexes, compiled, lean

Source = TypeVar("Source", bound=tuple[Any, ...])

# Columns of `ranks`: sums over the ranks before this one of length, KV work and prefill; and the
# rank's own length.
SUM_LENGTHS, SUM_KV, SUM_PREFILL, LENGTH = range(4)
COLUMNS = 4

# A key is the top bits of a length's distance below the longest, in the order of floats: two digits
# of 11 bits, whose 2,048 counters stay in the first-level cache.
DIGIT_BITS = 11
DIGITS = 1 << DIGIT_BITS
KEY_BITS = 2 * DIGIT_BITS
# Lengths under the longest by more than 2^24 share the last key: finer keys are worth more where
# the lengths are.
KEY_OCTAVES = 24
MANTISSA_BITS = 52
MAGNITUDE = (1 << 63) - 1  # all but the sign bit: -0.0 ranks as 0.0
INDEX_BITS = 32
INDEX = (1 << INDEX_BITS) - 1
# Ranks are finished this many at a time, all but the last LAG, which the next may still displace.
BLOCK = 512
LAG = 64


class Workspace:
    """Memory that the plans of one caller share, since fresh pages can cost more time than the plan
    itself."""

    def __init__(self) -> None:
        self._memory: dict[str, Floats] = {}
        self._source: object = None
        self._derived = np.empty(0)

    def floats(self, count: int, use: str) -> Floats:
        """Return `count` floats of any value, the same memory at each call for one use."""
        memory = self._memory.get(use)
        if memory is None or len(memory) < count:
            memory = self._memory[use] = np.empty(count)
        return memory[:count]

    def derive_once(self, source: Source, derive: Callable[[Source], Floats]) -> Floats:
        """Return a copy of `derive(source)`, which is computed again only for another tuple."""
        if self._source is not source:
            self._derived, self._source = derive(source), source
        return self._derived.copy()


def rank(
    lengths: Floats, contexts: Floats, placed: Flags, workspace: Workspace | None = None
) -> tuple[Indexes, Floats]:
    """Sort longest first: order[r], the index of rank r, and ranks[n + 1, 4], the columns above;
    O(n).

    `lengths` and `contexts` in tokens, >= 0 and finite (the caller has checked); `placed` where KV
    is on an engine and needs no prefill. KV work is length * (context + length / 2): tokens of KV
    read until it is done.
    """
    n = len(lengths)
    if not HAVE_KERNELS or n == 0:
        return rank_by_numpy(lengths, contexts, placed)
    memory = (workspace or Workspace()).floats(3 * n + COLUMNS * (n + 1), "ranks")
    order = memory[:n].view(np.int64)
    payload = memory[n : 3 * n]
    ranks = memory[3 * n :].reshape(n + 1, COLUMNS)
    # One length fewer than 0 bits: the least and the largest float are those of their bits.
    top = int(np.abs(lengths.max()).view(np.int64))
    low = max(int(np.abs(lengths.min()).view(np.int64)), top - (KEY_OCTAVES << MANTISSA_BITS))
    shift = max(0, (top - low).bit_length() - KEY_BITS)
    count_and_place(lengths, top, shift, (top - low) >> shift, payload[:n].view(np.int64), order)
    fetch(lengths, contexts, placed, order, payload.reshape(n, 2), ranks)
    if not finish(order, ranks):
        return rank_by_numpy(lengths, contexts, placed)
    return order, ranks


def rank_by_numpy(lengths: Floats, contexts: Floats, placed: Flags) -> tuple[Indexes, Floats]:
    """Return the same as `rank`, equal to the last bit, in O(n log n)."""
    order = np.argsort(-lengths, kind="stable").astype(np.int64)
    ranks = np.zeros((len(lengths) + 1, COLUMNS))
    descending = lengths[order]
    ranks[:-1, LENGTH] = descending
    np.cumsum(descending, out=ranks[1:, SUM_LENGTHS])
    np.cumsum(descending * (contexts[order] + 0.5 * descending), out=ranks[1:, SUM_KV])
    np.cumsum(np.where(placed[order], 0.0, contexts[order]), out=ranks[1:, SUM_PREFILL])
    return order, ranks


@compiled
def count_and_place(
    lengths: Floats, top: int, shift: int, last: int, half: Indexes, order: Indexes
) -> None:
    """Sort (key, index) by key, indexes rising within one: least digit first. `half` is scratch of
    n."""
    n = len(lengths)
    bits = lengths.view(np.int64)
    low_digit = np.zeros(DIGITS, np.int64)
    high_digit = np.zeros(DIGITS, np.int64)
    for index in range(n):
        key = min((top - (bits[index] & MAGNITUDE)) >> shift, last)
        low_digit[key & (DIGITS - 1)] += 1
        high_digit[key >> DIGIT_BITS] += 1
    at_low = 0
    at_high = 0
    for digit in range(DIGITS):
        low_digit[digit], at_low = at_low, at_low + low_digit[digit]
        high_digit[digit], at_high = at_high, at_high + high_digit[digit]
    for index in range(n):
        key = min((top - (bits[index] & MAGNITUDE)) >> shift, last)
        digit = key & (DIGITS - 1)
        half[low_digit[digit]] = (key << INDEX_BITS) | index
        low_digit[digit] += 1
    for at in range(n):
        entry = half[at]
        digit = entry >> (INDEX_BITS + DIGIT_BITS)
        order[high_digit[digit]] = entry
        high_digit[digit] += 1


@lean
def fetch(
    lengths: Floats, contexts: Floats, placed: Flags, order: Indexes, payload: Floats, ranks: Floats
) -> None:
    """Bring each rank's length and context to its place; `payload` is scratch of [n, 2]."""
    for index in range(len(order)):  # side by side, so that a rank costs one trip to memory
        payload[index, 0] = lengths[index]
        # a negative sign: no prefill
        payload[index, 1] = -contexts[index] if placed[index] else contexts[index]
    for rank in range(
        len(order)
    ):  # nothing but trips to memory, so that many are under way at once
        index = order[rank] & INDEX
        ranks[rank, LENGTH] = payload[index, 0]
        ranks[rank, SUM_KV] = payload[index, 1]


@lean
def finish(order: Indexes, ranks: Floats) -> bool:
    """Put ranks that share a key in exact order, remove the keys, and sum.

    Returns False, with nothing of use done, where a rank is out of place by more than LAG: then too
    many ranks share a key.
    """
    n = len(order)
    sum_lengths = 0.0
    sum_kv = 0.0
    sum_prefill = 0.0
    final = 0
    for begin in range(0, n, BLOCK):
        end = min(begin + BLOCK, n)
        for rank in range(max(begin, 1), end):
            length = ranks[rank, LENGTH]
            if length > ranks[rank - 1, LENGTH]:
                context = ranks[rank, SUM_KV]
                entry = order[rank]
                at = rank
                while at > final and ranks[at - 1, LENGTH] < length:
                    ranks[at, LENGTH] = ranks[at - 1, LENGTH]
                    ranks[at, SUM_KV] = ranks[at - 1, SUM_KV]
                    order[at] = order[at - 1]
                    at -= 1
                if at == final and final > 0:
                    return False
                ranks[at, LENGTH] = length
                ranks[at, SUM_KV] = context
                order[at] = entry
        last = n if end == n else end - LAG
        for rank in range(final, last):
            length = ranks[rank, LENGTH]
            context = ranks[rank, SUM_KV]
            order[rank] &= INDEX
            ranks[rank, SUM_LENGTHS] = sum_lengths
            ranks[rank, SUM_KV] = sum_kv
            ranks[rank, SUM_PREFILL] = sum_prefill
            sum_lengths += length
            sum_kv += length * (abs(context) + 0.5 * length)
            sum_prefill += max(context, 0.0)
        final = last
    ranks[n, SUM_LENGTHS] = sum_lengths
    ranks[n, SUM_KV] = sum_kv
    ranks[n, SUM_PREFILL] = sum_prefill
    ranks[n, LENGTH] = 0.0
    return True
