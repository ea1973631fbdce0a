"""Balance beyond the bottleneck, so that no engine stands empty for nothing.

With one over-long trajectory every fill of the rest is "optimal", and a greedy one leaves engines empty. So the
bottleneck's group is fixed, as small as it can be, and the engines before and after it are solved for what is left to
them, and so on: the least largest cost, then the least second largest.

Where work has a long tail most engines are bottlenecks one after the other, each by one trajectory that it decodes
alone: `taken_alone` finds how many in one search, where solving for the rest after each would take engines squared.
"""

from __future__ import annotations

import numpy as np

from treadle_core.compiled import compiled, lean
from treadle_core.costs import Indexes, Table, group_cost
from treadle_core.placement_filling import cheapest_alone, fill, keep, largest_cost, narrow


@lean
def tighten(
    table: Table, bounds: Indexes, scratch: Indexes, tight: int, end_engine: int, end: int, limit_s: float
) -> int:
    """Makes the bottleneck's group the least with which the engines behind it still meet the limit; counts the fills.

    Only where cost does not grow with the group (a flat decode curve) is it less than what the greedy fill gave.
    """
    first = bounds[tight]
    high = bounds[tight + 1]
    low = min(first + 1, high)
    while low < high:  # the least group that costs as much
        middle = (low + high) // 2
        if group_cost(table, tight, first, middle) >= limit_s:
            high = middle
        else:
            low = middle + 1
    high = bounds[tight + 1]
    fills = 0
    while low < high:
        middle = (low + high) // 2
        met, _, _ = fill(table, scratch, tight + 1, end_engine, middle, end, limit_s)
        fills += 1
        if met:
            high = middle
            keep(scratch, bounds, tight + 1, end_engine)
            bounds[tight + 1] = high
        else:
            low = middle + 1
    return fills


@lean
def same_kind(table: Table, one: int, other: int) -> bool:
    """Whether two engines need the same time for every group."""
    for column in range(table.engines.shape[1]):
        if table.engines[one, column] != table.engines[other, column]:
            return False
    for piece in range(table.pieces.shape[1]):
        for column in range(table.pieces.shape[2]):
            if table.pieces[one, piece, column] != table.pieces[other, piece, column]:
                return False
    return table.reach.shape[0] == 0 or bool(table.reach_of[one] == table.reach_of[other])


@lean
def taken_alone(table: Table, bounds: Indexes, scratch: Indexes, first_engine: int, end_engine: int) -> tuple[int, int]:
    """How many engines from `first_engine` on take one rank each because the first of what is left, alone, is the least
    largest cost of the rest; writes their groups and a fill of the rest that meets it. Counts the fills too.

    Of engines of one kind, whose ranks cost no more one after the other, these are all up to the last for which it
    holds: a fill that meets the cost of a later rank, with one rank and one engine more, meets that of an earlier one.
    So the last is looked for by doubling and halving. No engine of another kind may be cheaper for it.
    """
    first, end = bounds[first_engine], bounds[end_engine]
    most = 0  # as far as the engines are alike and the costs fall
    before = group_cost(table, first_engine, first, first + 1)
    while first_engine + most + 1 < end_engine and first + most + 1 < end:
        engine, rank = first_engine + most + 1, first + most + 1
        cost = group_cost(table, engine, rank, rank + 1)
        if cost > before or not same_kind(table, first_engine, engine):
            break
        before = cost
        most += 1
    low, high = 0, most + 1  # `low` holds, `high` does not
    probe = 1
    fills = 0
    while high - low > 1:
        engine, rank = first_engine + probe, first + probe
        limit_s = group_cost(table, engine, rank, rank + 1)
        met = cheapest_alone(table, engine, end_engine, rank) >= limit_s
        if met:
            met, _, _ = fill(table, scratch, engine, end_engine, rank, end, limit_s)
            fills += 1
        if met:
            low = probe
            for at in range(first_engine + 1, engine + 1):
                bounds[at] = first + at - first_engine
            keep(scratch, bounds, engine, end_engine)
        else:
            high = probe
        probe = min(2 * low, most) if high > most else (low + high) // 2
    return low, fills


@compiled
def balance(table: Table, bounds: Indexes, scratch: Indexes, makespan_s: float, fill_budget: int) -> None:
    """Fixes the bottleneck's group and solves again for the engines before and behind it, until all are fixed."""
    m = len(table.engines)
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
        if begin < bounds[first_engine + 1] and group_cost(table, first_engine, begin, begin + 1) >= limit:
            alone, fills = taken_alone(table, bounds, scratch, first_engine, end_engine)
            used += fills * (end_engine - first_engine)
            if alone > 0:
                first_engine += alone
                begin += alone
                limit = group_cost(table, first_engine, begin, begin + 1)
        tight = first_engine
        while tight < end_engine - 1 and group_cost(table, tight, bounds[tight], bounds[tight + 1]) < limit:
            tight += 1
        if tight + 1 < end_engine:
            used += tighten(table, bounds, scratch, tight, end_engine, end, limit) * (end_engine - tight)
        for side in range(2):
            one, other = (tight + 1, end_engine) if side == 0 else (first_engine, tight)
            if one < other and bounds[one] < bounds[other]:
                low = cheapest_alone(table, one, other, bounds[one])
                high = largest_cost(table, bounds, one, other)
                # Behind engines that are bound by their longest there are often more of these.
                rest, fills = narrow(table, bounds, scratch, one, other, low, high, tight == first_engine)
                used += fills * (other - one)
                ranges[depth, 0], ranges[depth, 1], limits[depth] = one, other, rest
                depth += 1
