"""Of few that wait: a search around what DPArrange found, for a smaller objective.

DPArrange gives the least sum for those that start, and does not see those behind them, who wait for the units that it
hands out. So each prefix's arrangement is a start only: one choice is changed, one action more starts or one less, or
two of these at once, as long as the objective of all gets smaller. Of many that wait one action's choice is a small
part, and the search would take longer than it saves.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from treadle_core.compiled import compiled
from treadle_core.tools.arrangement import Floats, Indexes
from treadle_core.tools.chunks import level_of, take
from treadle_core.tools.completions import objective

# Objectives that are tried at most; a queue of up to six takes 54 on average, and this many once in a hundred times.
MOST_TRIES = 300


class Queue(NamedTuple):
    """What the objective reads (see `completions.objective`), and: chunks: int64[LEVELS], the free ones where units are
    GPUs, else int64[0]; coming: how many of their like are expected while one runs, for each unit that it holds."""

    units: Indexes
    seconds: Floats
    counts: Indexes
    candidates: Indexes
    ends_s: Floats
    held: Indexes
    free: int
    depth: int
    chunks: Indexes
    coming: float


class Found(NamedTuple):
    """The best so far. least_s: float64[1], its objective. chosen: int64[candidates], of which the first size[0] are
    its choices. left: int64[1], how many tries there are still."""

    least_s: Floats
    chosen: Indexes
    size: Indexes
    left: Indexes


def best_near(queue: Queue, starts: Sequence[Indexes]) -> tuple[Indexes, float]:
    """The best choices that were found, and their objective. starts: at least one; choices of the first so many."""
    most = len(queue.candidates)
    table, sizes = np.zeros((len(starts), most), np.int64), np.array([len(start) for start in starts])
    for row, start in zip(table, starts, strict=True):
        row[: len(start)] = start
    found = Found(np.array([np.inf]), np.zeros(most, np.int64), np.ones(1, np.int64), np.array([MOST_TRIES]))
    search(queue, table, sizes, found)
    return found.chosen[: found.size[0]], float(found.least_s[0])


@compiled
def search(queue: Queue, starts: Indexes, sizes: Indexes, found: Found) -> None:
    """From the best start by all moves, from each other by single ones, and from the best of these by all again."""
    values = np.empty(len(starts))
    for row in range(len(starts)):
        values[row] = value(queue, starts[row, : sizes[row]], np.inf)
    order = np.argsort(values, kind="mergesort")  # of equals the first comes first
    for place in range(len(order)):
        row = order[place]
        repeated = False
        for before in order[:place]:
            repeated = repeated or (sizes[before] == sizes[row] and (starts[before] == starts[row]).all())
        if not repeated:
            climb(queue, starts[row], sizes[row], values[row], place == 0, found)
    climb(queue, found.chosen.copy(), found.size[0], found.least_s[0], True, found)


@compiled
def climb(queue: Queue, start: Indexes, size: int, start_s: float, by_two: bool, found: Found) -> None:
    """Takes the best move again and again, until none helps. by_two: also moves of two changes at once."""
    here = Found(np.array([start_s]), start.copy(), np.array([size]), found.left)
    while True:
        before_s = here.least_s[0]
        at = here.chosen.copy()
        singles(queue, at, here.size[0], here)
        if by_two and here.least_s[0] == before_s:
            doubles(queue, at, here.size[0], here)
        if here.least_s[0] == before_s:
            break
    if here.least_s[0] < found.least_s[0]:
        found.least_s[0], found.size[0] = here.least_s[0], here.size[0]
        found.chosen[:] = here.chosen


@compiled
def singles(queue: Queue, at: Indexes, size: int, here: Found) -> None:
    """One choice a step up or down, or at its least; one action more, or one less."""
    if size > 1:
        attempt(queue, at, size - 1, here)
    if size < len(queue.candidates):
        for choice in range(min(2, queue.counts[queue.candidates[size]])):
            at[size] = choice
            attempt(queue, at, size + 1, here)
    for i in range(size):
        choice = at[i]
        for other in (choice - 1, choice + 1, 0):
            if 0 <= other < queue.counts[queue.candidates[i]] and other != choice:
                at[i] = other
                attempt(queue, at, size, here)
        at[i] = choice


@compiled
def doubles(queue: Queue, at: Indexes, size: int, here: Found) -> None:
    """Units of one to another: of one that starts, of the last, which starts no more, or for one more that starts."""
    for i in range(size):
        if at[i] + 1 < queue.counts[queue.candidates[i]]:
            at[i] += 1
            if i < size - 1:
                attempt(queue, at, size - 1, here)
            for j in range(size):
                if j != i and at[j] > 0:
                    at[j] -= 1
                    attempt(queue, at, size, here)
                    at[j] += 1
            at[i] -= 1
        if at[i] > 0 and size < len(queue.candidates):
            at[i] -= 1
            for choice in range(min(2, queue.counts[queue.candidates[size]])):
                at[size] = choice
                attempt(queue, at, size + 1, here)
            at[i] += 1


@compiled
def attempt(queue: Queue, at: Indexes, size: int, here: Found) -> None:
    """Remember these choices where they fit and are better."""
    if here.left[0] == 0 or not fits(queue, at, size):
        return
    here.left[0] -= 1
    found_s = value(queue, at[:size], here.least_s[0])
    if found_s < here.least_s[0]:
        here.least_s[0], here.size[0] = found_s, size
        here.chosen[:] = at


@compiled
def fits(queue: Queue, at: Indexes, size: int) -> bool:
    """Whether there are units for all of them, chunks where they are GPUs."""
    left, chunks = queue.free, queue.chunks.copy()
    for i in range(size):
        units = queue.units[queue.candidates[i], at[i]]
        left -= units
        if left < 0 or (len(chunks) > 0 and not take(chunks, level_of(units))):
            return False
    return True


@compiled
def value(queue: Queue, chosen: Indexes, limit_s: float) -> float:
    """See `Group.objective`."""
    expected_s = 0.0
    for i in range(len(chosen)):
        row, choice = queue.candidates[i], chosen[i]
        expected_s += queue.coming * queue.units[row, choice] * queue.seconds[row, choice]
    return expected_s + objective(
        queue.units,
        queue.seconds,
        queue.counts,
        queue.candidates,
        chosen,
        queue.ends_s,
        queue.held,
        queue.free,
        queue.depth,
        limit_s - expected_s,
    )
