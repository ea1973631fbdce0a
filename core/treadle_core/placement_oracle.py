"""Heddle's dynamic program (eq. 3) as printed, O(n² m): what the fast solver is held against.

Purpose: tests and benchmarks only. It shares nothing with the solver but the cost of a group, and allows empty groups
as the solver does.
"""

from __future__ import annotations

import numpy as np

from treadle_core.costs import Costs, group_cost


def least_makespan(costs: Costs) -> float:
    """Seconds of the best contiguous partition of the descending order, engines in the table's order."""
    n = len(costs.table.lengths)
    best = np.full(n + 1, np.inf)
    best[0] = 0.0
    for engine in range(len(costs.table.engines)):
        after = np.full(n + 1, np.inf)
        for end in range(n + 1):
            for first in range(end + 1):
                after[end] = min(after[end], max(best[first], group_cost(costs.table, engine, first, end)))
        best = after
    return float(best[n])
