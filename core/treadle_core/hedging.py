"""A plan for lengths that are not known: of several exact plans the one with the least mean makespan over samples of
what could come (`scenarios`). Beyond the papers.

The plans differ in how much of the longest trajectory every group is taken to hide, `least_longest` of the cost table.
At 0 it is Heddle's plan, which takes each median for the truth and gives a group of short ones all the work that its
longest leaves time for. At 1 every group may turn out to have the longest of all, so that only work is balanced: the
plan of someone who knows nothing. Between them those that are surely long get engines to themselves and the others are
balanced. Each is the exact optimum of its own cost and takes no second sort, so that trying several costs little.
"""

from __future__ import annotations

from dataclasses import replace

from treadle_core.costs import CostModel, Costs, Indexes
from treadle_core.placement_solver import partition
from treadle_core.rank_scenarios import RankSamples, judged

# Of the longest, what every group is taken to hide.
SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)


def hedgeable(costs: Costs) -> bool:
    """Whether there is a choice, where lengths are uncertain: more than one engine, and a cost with a longest in it."""
    return len(costs.table.engines) > 1 and costs.table.model == CostModel.LINEAR_INTEGRAL


def hedged(costs: Costs, share: float) -> Costs:
    """The same workload and engines, every group hiding `share` of the longest."""
    table = costs.table
    longest = float(table.lengths[0]) if len(table.lengths) else 0.0
    return replace(costs, table=table._replace(least_longest=share * longest))


def best_partition(costs: Costs, samples: RankSamples) -> tuple[Indexes, float]:
    """Bounds of the groups of the best plan, and its mean makespan over the samples, which come in the order of ranks.

    Every other share is tried, and then those beside the best; the less hedged one of equals. Where the plan of the
    medians cannot be beaten in any sample, it is the plan.
    """
    found: dict[int, tuple[float, Indexes]] = {}

    def try_share(at: int) -> bool:
        bounds, _ = partition(hedged(costs, SHARES[at]))
        mean_s, least = judged(costs, samples, bounds)
        found[at] = (mean_s, bounds)
        return least

    if not try_share(0):
        for at in range(2, len(SHARES), 2):
            try_share(at)
        best = min(found, key=lambda at: (found[at][0], at))
        for at in {max(best - 1, 0), min(best + 1, len(SHARES) - 1)} - set(found):
            try_share(at)
    best = min(found, key=lambda at: (found[at][0], at))
    return found[best][1], found[best][0]
