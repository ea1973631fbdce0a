"""Heddle's dynamic program (eq. 3), O(n² m): what the fast solver is held against; and its remedy for that cost.

Purpose: tests and benchmarks only. It shares nothing with the solver but the cost of a group, and allows empty groups
as the solver does.
Aggregation (Heddle §5.2): trajectories below a threshold are taken in bundles, so that a group may end only at some
ranks. With the solver's O(m log n) a probe it is never needed: at 1,000,000 trajectories sorting takes longer than
solving. It is for who must run the dynamic program itself beyond some thousands.
"""

from __future__ import annotations

import numpy as np

from treadle_core.compiled import compiled
from treadle_core.costs import Costs, Indexes, Table, group_cost


def least_makespan(costs: Costs, cuts: Indexes | None = None) -> float:
    """Seconds of the best contiguous partition of the descending order, engines in the table's order.

    `cuts`: ranks at which a group may end, rising, with 0 and n; all where None.
    """
    if cuts is None:
        cuts = np.arange(len(costs.table.lengths) + 1)
    return float(dynamic_program(costs.table, cuts))


@compiled
def dynamic_program(table: Table, cuts: Indexes) -> float:
    best = np.full(len(cuts), np.inf)
    best[0] = 0.0
    for engine in range(len(table.engines)):
        after = np.full(len(cuts), np.inf)
        for end in range(len(cuts)):
            least = np.inf
            for first in range(end + 1):
                least = min(least, max(best[first], group_cost(table, engine, cuts[first], cuts[end])))
            after[end] = least
        best = after
    return float(best[-1])


def aggregated(costs: Costs, threshold_tokens: float, bundle: int) -> Indexes:
    """Cuts that take the trajectories below the threshold `bundle` at a time; no group's cost is estimated.

    A plan so restricted is worse by at most what its costliest bundle adds to a group.
    """
    n = len(costs.table.lengths)
    long = int(np.count_nonzero(costs.table.lengths >= threshold_tokens))
    return np.unique(np.concatenate([np.arange(long + 1), np.arange(long, n, max(bundle, 1)), [n]]))
