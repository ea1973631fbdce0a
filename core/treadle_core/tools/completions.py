"""The completion heap: when those that must wait will be done, if each gets its least (ARL-Tangram appendix A).

The paper's heap has one time for each action that runs, and whoever waits starts when one is popped, whatever the two
use. Here an entry knows its units: an action starts once as many are free as it takes, and what a wide action frees
starts several narrow ones. Without it giving one action many units would seem to take the places of as many others for
ever. Units that are free now serve only from the first end on: whoever is evicted does not start now, so that no
decision that leaves units idle looks as good as one that uses them.

What runs: units that come back, and when. Seconds from now, as numbers; nothing here has a clock."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from treadle_core.compiled import compiled, lean
from treadle_core.refusals import CoreError
from treadle_core.tools.arrangement import Floats, Indexes


@lean
def sink(ends: Floats, units: Indexes, size: int, at: int) -> None:
    """Restores the heap, the earliest end first, below an entry that got later."""
    end, held = ends[at], units[at]
    while True:
        child = 2 * at + 1
        if child >= size:
            break
        if child + 1 < size and ends[child + 1] < ends[child]:
            child += 1
        if ends[child] >= end:
            break
        ends[at], units[at] = ends[child], units[child]
        at = child
    ends[at], units[at] = end, held


@lean
def rise(ends: Floats, units: Indexes, at: int) -> None:
    """Restores the heap above an entry that was put at the end."""
    end, held = ends[at], units[at]
    while at > 0 and ends[(at - 1) // 2] > end:
        above = (at - 1) // 2
        ends[at], units[at] = ends[above], units[above]
        at = above
    ends[at], units[at] = end, held


@lean
def inserted(
    ends: Floats, units: Indexes, size: int, free: int, waiting_units: Indexes, waiting_s: Floats, limit_s: float
) -> float:
    """Seconds until done, summed over those that wait, in their order; a heap of `size` entries in arrays with room for
    them all. Infinite once it is above the limit, or where the heap runs out before enough is free."""
    total = 0.0
    now_s = ends[0] if size > 0 else np.inf
    for i in range(len(waiting_units)):
        needed, took_s = waiting_units[i], waiting_s[i]
        if free == 0 and size > 0 and units[0] == needed:  # one place for another: the common case, in one pass
            now_s = ends[0]
            ends[0] = now_s + took_s
            sink(ends, units, size, 0)
        else:
            while free < needed:
                if size == 0:
                    return np.inf
                now_s = ends[0]
                free += units[0]
                size -= 1
                ends[0], units[0] = ends[size], units[size]
                sink(ends, units, size, 0)
            free -= needed
            ends[size], units[size] = now_s + took_s, needed
            size += 1
            rise(ends, units, size - 1)
        total += now_s + took_s
        if total >= limit_s:
            return np.inf
    return total


@compiled
def objective(
    units: Indexes,
    seconds: Floats,
    counts: Indexes,
    candidates: Indexes,
    chosen: Indexes,
    ends_s: Floats,
    held: Indexes,
    free: int,
    depth: int,
    limit_s: float,
) -> float:
    """GETAPPROXIMATEDOBJECTIVE of Algorithm 2: seconds until done, summed over all of a group's actions.

    units, seconds, counts: their `Curves`. The first len(chosen) of `candidates` start now with those choices of the
    `free` units; all others wait in order with their least, but for the first of them, which tries its first `depth`
    choices. ends_s, held: of what runs, in any order. Infinite where it is not below the limit, or where what runs
    never frees enough.
    """
    running, starting, count = len(ends_s), len(chosen), len(counts)
    room = running + count + 1
    heap_ends, heap_units = np.empty(room), np.empty(room, np.int64)
    heap_ends[:running], heap_units[:running] = ends_s, held
    waits = np.ones(count, np.bool_)
    exact_s = 0.0
    for at in range(starting):
        i = candidates[at]
        waits[i] = False
        heap_ends[running + at], heap_units[running + at] = seconds[i, chosen[at]], units[i, chosen[at]]
        exact_s += seconds[i, chosen[at]]
        free -= units[i, chosen[at]]
    behind = np.flatnonzero(waits)
    if len(behind) == 0:
        return exact_s if exact_s < limit_s else np.inf
    size = running + starting
    for at in range(size // 2 - 1, -1, -1):
        sink(heap_ends, heap_units, size, at)
    waiting_units, waiting_s = np.empty(len(behind), np.int64), np.empty(len(behind))
    for at in range(len(behind)):
        waiting_units[at], waiting_s[at] = units[behind[at], 0], seconds[behind[at], 0]
    ends_of_try, units_of_try = np.empty(room), np.empty(room, np.int64)
    most_s = least_s = limit_s - exact_s
    for choice in range(min(depth, counts[behind[0]])):
        ends_of_try[:size], units_of_try[:size] = heap_ends[:size], heap_units[:size]
        waiting_units[0], waiting_s[0] = units[behind[0], choice], seconds[behind[0], choice]
        least_s = min(least_s, inserted(ends_of_try, units_of_try, size, free, waiting_units, waiting_s, least_s))
    return exact_s + least_s if least_s < most_s else np.inf


class InvalidExecutingError(CoreError):
    """An executing action with an end that is no number, units below 0, or on a node or dimension that is not there."""


class Executing(NamedTuple):
    """Units of a dimension that come back in `ends_in_s` seconds, below 0 where the action is overdue.

    node_id: of a dimension that is managed by node. An action that holds several dimensions is several of these.
    scalable: it could have had more or fewer of them, so those that come while it runs are likely to be its like.
    """

    dimension: str
    units: int
    ends_in_s: float
    node_id: str | None = None
    scalable: bool = False


Lane = tuple[str, str | None]  # dimension, node


def by_lane(executing: Sequence[Executing], lanes: Sequence[Lane]) -> Mapping[Lane, tuple[Floats, Indexes, int]]:
    """ends_s and units of what runs on each lane, and how many of it are scalable. An overdue action is expected to end
    now."""
    found: dict[Lane, tuple[list[float], list[int], list[bool]]] = {lane: ([], [], []) for lane in lanes}
    for index, (dimension, units, ends_in_s, node_id, scalable) in enumerate(executing):
        lane = found.get((dimension, node_id))
        if lane is None:
            raise InvalidExecutingError(
                f"executing[{index}].dimension", f"no pool has {dimension!r} on node {node_id!r}"
            )
        if not math.isfinite(ends_in_s):
            raise InvalidExecutingError(f"executing[{index}].ends_in_s", f"must be a number, is {ends_in_s}")
        if not units >= 0:
            raise InvalidExecutingError(f"executing[{index}].units", f"must be at least 0, are {units}")
        lane[0].append(max(ends_in_s, 0.0))
        lane[1].append(units)
        lane[2].append(scalable)
    return {
        lane: (np.array(ends), np.array(units, np.int64), sum(alike)) for lane, (ends, units, alike) in found.items()
    }
