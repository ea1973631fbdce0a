"""What the exact partition is made of: a greedy fill of engines within a limit, and the least limit that is met.

Why the fill is exact: an engine given as much as it can finish by T never reaches less far than in any other partition
that meets T, because costs never fall as a group grows at its end and never grow as it loses its head
(`costs.group_cost`).
Why the search ends on the optimum itself and not near it: a fill that meets T proves the largest cost it has, and one
that fails proves that nothing below the cheapest extension of its groups can succeed; both are costs of real groups.
Invariant: `bounds` holds a whole partition at all times; only a better one is copied over it.
"""

from __future__ import annotations

import numpy as np

from treadle_core.compiled import lean
from treadle_core.costs import Indexes, Table, group_cost

# A better limit is looked for this part below the one known, then eight times as far below, until one is not met.
FIRST_DROP = 1.0 / 4096.0
DROP_GROWTH = 8.0


@lean
def furthest(table: Table, engine: int, at: int, end: int, hint: int, limit_s: float) -> tuple[int, float, float]:
    """The largest rank up to which an engine runs [at, rank) within the limit, looked for from `hint` outwards.

    Returns with it the cost of that group and the cost with one rank more, infinite where there is none. at < end.
    """
    low, low_s = at, 0.0
    high, high_s = end + 1, np.inf  # `low` fits, `high` does not
    probe = min(max(hint, at + 1), end)
    step = 1
    while high - low > 1:
        cost = group_cost(table, engine, at, probe)
        if cost <= limit_s:
            low, low_s = probe, cost
        else:
            high, high_s = probe, cost
        if high > end:
            probe = min(low + step, end)
            step *= 2
        elif low == at:
            probe = max(high - step, at + 1)
            step *= 2
        else:
            probe = (low + high) // 2
    return low, low_s, high_s


@lean
def fill(
    table: Table,
    bounds: Indexes,
    first_engine: int,
    end_engine: int,
    first: int,
    end: int,
    limit_s: float,
) -> tuple[bool, float, float]:
    """Gives each engine in turn all that it finishes within `limit_s`; writes bounds[engine + 1], the end of its group.

    What `bounds` held before tells where to look. Returns whether [first, end) was placed, the largest cost of a group,
    and the least cost above the limit that a group would have with one more. O(engines * log n).
    """
    largest = 0.0
    extension = np.inf
    at = first
    before = bounds[first_engine]
    size = 0
    bounds[first_engine] = first
    for engine in range(first_engine, end_engine):
        size = max(bounds[engine + 1] - before, 0) or size
        before = bounds[engine + 1]
        if at < end:
            at, cost, more = furthest(table, engine, at, end, at + size, limit_s)
            largest = max(largest, cost)
            extension = min(extension, more)
        bounds[engine + 1] = at
    return at == end, largest, extension


@lean
def keep(scratch: Indexes, bounds: Indexes, first_engine: int, end_engine: int) -> None:
    for at in range(first_engine + 1, end_engine):  # the ends of the range stay
        bounds[at] = scratch[at]


@lean
def narrow(
    table: Table,
    bounds: Indexes,
    scratch: Indexes,
    first_engine: int,
    end_engine: int,
    low: float,
    high: float,
    low_first: bool,
) -> tuple[float, int]:
    """Least largest cost of the engines' ranks, between `low` and `high`, the largest cost in `bounds`.

    Leaves the greedy fill that has it in `bounds`. Returns the cost and the number of fills it took. `low_first`: as
    `low` itself may well be it.
    """
    first, end = bounds[first_engine], bounds[end_engine]
    fills = 0
    drop = high * FIRST_DROP
    while low < high:
        if low_first and fills == 0:
            limit = low
        elif drop > 0.0:
            limit = max(high - drop, low)
        else:  # far apart, halve the ratio; near, halve the distance
            limit = np.sqrt(low) * np.sqrt(high) if 0.0 < 4.0 * low < high else low + 0.5 * (high - low)
        if limit >= high:  # low and high are neighbours and the middle was rounded up
            limit = low
        met, largest, extension = fill(table, scratch, first_engine, end_engine, first, end, limit)
        fills += 1
        if met:
            keep(scratch, bounds, first_engine, end_engine)
            high = largest
            drop *= DROP_GROWTH
        else:
            low = extension
            if not (low_first and fills == 1):
                drop = 0.0
    return high, fills


@lean
def cheapest_alone(table: Table, first_engine: int, end_engine: int, rank: int) -> float:
    least = np.inf
    for engine in range(first_engine, end_engine):
        least = min(least, group_cost(table, engine, rank, rank + 1))
    return least


@lean
def largest_cost(table: Table, bounds: Indexes, first_engine: int, end_engine: int) -> float:
    largest = 0.0
    for engine in range(first_engine, end_engine):
        largest = max(largest, group_cost(table, engine, bounds[engine], bounds[engine + 1]))
    return largest
