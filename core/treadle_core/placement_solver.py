"""The exact partition of a sorted workload: bisection on the makespan with a greedy fill, then balance.

Purpose: of all partitions of the descending order into one contiguous group an engine (groups may be empty), the one
whose largest cost is least (Heddle eq. 3), and among those one that leaves no engine idle for nothing. How it is found
and why it is exact: `placement_filling`; the balance: `placement_levelling`.
"""

from __future__ import annotations

import numpy as np

from treadle_core.compiled import compiled, lean
from treadle_core.costs import Costs, Floats, Indexes, Table, group_cost
from treadle_core.placement_filling import cheapest_alone, fill, keep, largest_cost, narrow
from treadle_core.placement_levelling import balance

# Groups filled for the sake of balance before the rest is left as the last bisection put it: about 0.1 s of compiled
# code.
BALANCE_FILLS = 4_000_000
# The first probe is this part above what the engines could do if work were a fluid, the next twice as far above, ...
GUESS_SLACK = 1.0 / 128.0


@lean
def bottleneck(table: Table, bounds: Indexes, scratch: Indexes) -> float:
    """Seconds of the least largest cost of all ranks over all engines; `bounds` comes with a partition of any cost."""
    n = len(table.lengths)
    m = len(table.engines)
    fluid = 0.0  # the engines' summed speed, by what each takes for all
    for engine in range(m):
        fluid += 1.0 / max(group_cost(table, engine, 0, n), 1e-300)
    low = cheapest_alone(table, 0, m, 0)  # the longest runs somewhere
    high = largest_cost(table, bounds, 0, m)
    slack = GUESS_SLACK
    limit = max(low, 1.0 / fluid)
    while low < high:
        limit *= 1.0 + slack
        if limit >= high:
            break
        met, largest, extension = fill(table, scratch, 0, m, 0, n, limit)
        if met:
            keep(scratch, bounds, 0, m)
            high = largest
            break
        low = extension
        limit = max(limit, low)
        slack *= 2.0
    makespan, _ = narrow(table, bounds, scratch, 0, m, low, high, False)
    return makespan


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
    best = 0  # the best engine alone can take all
    for engine in range(1, m):
        if group_cost(table, engine, 0, n) < group_cost(table, best, 0, n):
            best = engine
    for engine in range(m + 1):
        bounds[engine] = n if engine > best else 0
    scratch = bounds.copy()
    makespan = bottleneck(table, bounds, scratch)
    balance(table, bounds, scratch, makespan, fill_budget)
    return makespan


@lean
def group_costs(table: Table, bounds: Indexes, costs_s: Floats) -> None:
    """Writes what each engine of the table needs for its group."""
    for engine in range(len(costs_s)):
        costs_s[engine] = group_cost(table, engine, bounds[engine], bounds[engine + 1])


def partition(costs: Costs, fill_budget: int = BALANCE_FILLS) -> tuple[Indexes, float]:
    """Bounds of the groups and the makespan: engine e of the table runs ranks [bounds[e], bounds[e + 1])."""
    bounds = np.zeros(len(costs.table.engines) + 1, np.int64)
    makespan_s = solve(costs.table, fill_budget, bounds)
    return bounds, float(makespan_s)
