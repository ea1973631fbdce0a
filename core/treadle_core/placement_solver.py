"""The exact partition of a sorted workload: bisection on the makespan with a greedy fill, then balance.

Purpose: of all partitions of the descending order into one contiguous group an engine (groups may be empty), the one
whose largest cost is least (Heddle eq. 3), and among those one that leaves no engine idle for nothing.
Why the fill is exact: an engine given as much as it can finish by T never reaches less far than in any other partition
that meets T, because costs never fall as a group grows at its end and never grow as it loses its head
(`costs.group_cost`).
Why the bisection ends on the optimum itself and not near it: a fill that meets T proves the largest cost it has, and
one that fails proves that nothing below the cheapest extension of its groups can succeed; both are costs of real
groups.
Why balance: with one over-long trajectory every fill of the rest is "optimal", and a greedy one leaves engines
empty. So the bottleneck's group is fixed, as small as it can be, and the engines before and after it are solved for
what is left to them, and so on: the least largest cost, then the least second largest.
"""

from __future__ import annotations

import numpy as np

from treadle_core.compiled import compiled
from treadle_core.costs import Costs, Indexes, Table, group_cost

# Groups filled for the sake of balance before the rest is left as the last bisection put it: some 50 ms of compiled
# code, reached only with many hundreds of engines.
BALANCE_FILLS = 1_000_000


@compiled
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

    Returns whether [first, end) was placed, the largest cost of a group, and the least cost above the limit that a
    group would have with one more. O(engines * log n).
    """
    largest = 0.0
    extension = np.inf
    at = first
    bounds[first_engine] = first
    for engine in range(first_engine, end_engine):
        # Gallop, then bisect: `low` fits, `high` does not.
        low = at
        step = 1
        while low + step <= end and (group_cost(table, engine, at, low + step) <= limit_s):
            low += step
            step *= 2
        high = min(low + step, end + 1)
        while high - low > 1:
            middle = (low + high) // 2
            if group_cost(table, engine, at, middle) <= limit_s:
                low = middle
            else:
                high = middle
        largest = max(largest, group_cost(table, engine, at, low))
        if low < end:
            extension = min(extension, group_cost(table, engine, at, low + 1))
        at = low
        bounds[engine + 1] = at
    return at == end, largest, extension


@compiled
def bottleneck(
    table: Table,
    bounds: Indexes,
    first_engine: int,
    end_engine: int,
    first: int,
    end: int,
    known_s: float,
) -> tuple[float, int]:
    """Least largest cost of [first, end) over the engines; leaves the greedy fill that has it in `bounds`.

    `known_s` is a cost that is known to be enough. Returns the cost and the number of fills it took.
    """
    low = np.inf  # the longest runs somewhere
    for engine in range(first_engine, end_engine):
        low = min(low, group_cost(table, engine, first, first + 1))
    high = known_s
    fills = 0
    while low < high:
        # Far apart, halve the ratio; near, halve the distance.
        limit = np.sqrt(low) * np.sqrt(high) if 0.0 < 4.0 * low < high else low + 0.5 * (high - low)
        if limit >= high:  # low and high are neighbours and the middle was rounded up
            limit = low
        met, largest, extension = fill(table, bounds, first_engine, end_engine, first, end, limit)
        fills += 1
        if met:
            high = largest
        else:
            low = extension
    fill(table, bounds, first_engine, end_engine, first, end, high)
    return high, fills + 1


@compiled
def largest_cost(table: Table, bounds: Indexes, first_engine: int, end_engine: int) -> float:
    largest = 0.0
    for engine in range(first_engine, end_engine):
        largest = max(largest, group_cost(table, engine, bounds[engine], bounds[engine + 1]))
    return largest


@compiled
def tighten(
    table: Table, bounds: Indexes, scratch: Indexes, tight: int, end_engine: int, end: int, limit_s: float
) -> tuple[int, int]:
    """The least end of the bottleneck's group with which the engines behind it still meet the limit, and the fills.

    Only where cost does not grow with the group (a flat decode curve) is it less than what the greedy fill gave.
    """
    first = bounds[tight]
    high = bounds[tight + 1]
    low = min(first + 1, high)
    fills = 0
    while low < high:
        middle = (low + high) // 2
        met, _, _ = fill(table, scratch, tight + 1, end_engine, middle, end, limit_s)
        fills += 1
        if met and group_cost(table, tight, first, middle) >= limit_s:
            high = middle
        else:
            low = middle + 1
    return high, fills


@compiled
def balance(table: Table, bounds: Indexes, makespan_s: float, fill_budget: int) -> None:
    """Fixes the bottleneck's group and solves again for the engines before and behind it, until all are fixed."""
    m = len(table.engines)
    scratch = np.zeros(m + 1, np.int64)
    # Ranges of engines whose ranks are fixed and whose least largest cost is known.
    ranges = np.zeros((2 * m + 2, 2), np.int64)
    limits = np.zeros(2 * m + 2)
    ranges[0, 1] = m
    limits[0] = makespan_s
    depth = 1
    used = 0
    while depth > 0 and used < fill_budget:
        depth -= 1
        first_engine, end_engine = ranges[depth]
        limit = limits[depth]
        begin, end = bounds[first_engine], bounds[end_engine]
        if end_engine - first_engine < 2 or begin == end:
            continue
        tight = first_engine
        while tight < end_engine - 1 and group_cost(table, tight, bounds[tight], bounds[tight + 1]) < limit:
            tight += 1
        first = bounds[tight]
        if tight + 1 < end_engine:
            group_end, fills = tighten(table, bounds, scratch, tight, end_engine, end, limit)
            used += fills * (end_engine - tight)
            bounds[tight + 1] = group_end
            if group_end < end:
                rest, fills = bottleneck(table, bounds, tight + 1, end_engine, group_end, end, limit)
                used += fills * (end_engine - tight)
                ranges[depth, 0], ranges[depth, 1], limits[depth] = tight + 1, end_engine, rest
                depth += 1
        if tight > first_engine and begin < first:
            known = largest_cost(table, bounds, first_engine, tight)
            rest, fills = bottleneck(table, bounds, first_engine, tight, begin, first, known)
            used += fills * (tight - first_engine)
            ranges[depth, 0], ranges[depth, 1], limits[depth] = first_engine, tight, rest
            depth += 1


@compiled
def solve(table: Table, fill_budget: int, bounds: Indexes) -> float:
    """Writes the ends of the groups into bounds[1:], m + 1 entries, and returns the makespan in seconds."""
    n = len(table.lengths)
    m = len(table.engines)
    if n == 0 or table.lengths[0] <= 0.0:  # nothing is left of any: no cost to balance by, so balance by number
        for engine in range(m + 1):
            bounds[engine] = n * engine // m
        if largest_cost(table, bounds, 0, m) <= 0.0:
            return 0.0
    known = np.inf  # the best engine alone can take all
    for engine in range(m):
        known = min(known, group_cost(table, engine, 0, n))
    makespan, _ = bottleneck(table, bounds, 0, m, 0, n, known)
    balance(table, bounds, makespan, fill_budget)
    return makespan


def partition(costs: Costs, fill_budget: int = BALANCE_FILLS) -> tuple[Indexes, float]:
    """Bounds of the groups and the makespan: engine e of the table runs ranks [bounds[e], bounds[e + 1])."""
    bounds = np.zeros(len(costs.table.engines) + 1, np.int64)
    makespan_s = solve(costs.table, fill_budget, bounds)
    return bounds, float(makespan_s)
