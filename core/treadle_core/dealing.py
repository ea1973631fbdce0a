"""Who gets which group: among engines that are alike, the one that holds most of it already.

Purpose: a plan says how the ranks are cut; between engines with equal figures it is free which takes which piece, so
the pieces go where most of their context is. That costs the plan nothing and saves moves.
Invariant: an engine is dealt a group only from engines with the same row of the cost table. Greedy, most kept context
first, the earlier pair among equals; at least half of the best possible.
"""

from __future__ import annotations

import numpy as np

from treadle_core.compiled import compiled, lean
from treadle_core.costs import Costs, Floats, Indexes


def deal(costs: Costs, group_of: Indexes, current: Indexes, contexts: Floats) -> Indexes:
    """engine_of_group[m], indexes of the caller's engines.

    By the caller's trajectory: `group_of`, the table's engine it was cut to; `current`, the caller's engine that holds
    it or -1; `contexts`, tokens.
    """
    rows = costs.table.engines
    m = len(rows)
    if m == 1 or not len(current) or current.max() < 0:
        return costs.engine_order
    figures = np.hstack([rows, costs.table.pieces.reshape(m, -1)]) if costs.table.pieces.size else rows
    numbers: dict[bytes, int] = {}
    alike = np.array([numbers.setdefault(row.tobytes(), len(numbers)) for row in figures])
    at_of_engine = np.empty(m, np.int64)
    at_of_engine[costs.engine_order] = np.arange(m)
    dealt = np.empty(m, np.int64)
    most_kept(group_of, current, contexts, at_of_engine, alike, dealt)
    return costs.engine_order[dealt]


@compiled
def most_kept(
    group_of: Indexes, current: Indexes, contexts: Floats, at_of_engine: Indexes, alike: Indexes, dealt: Indexes
) -> None:
    """Writes which of the table's engines takes each group. O(n + m^2) where few groups want the same engine."""
    m = len(dealt)
    kept = np.zeros((m, m))
    for index in range(len(group_of)):
        if current[index] >= 0:  # one token more, so that a trajectory without context counts too
            kept[group_of[index], at_of_engine[current[index]]] += contexts[index] + 1.0
    taken = np.zeros(m, np.bool_)
    wish = np.full(m, -1)  # the engine left that holds most of a group, and how much
    wish_kept = np.zeros(m)
    dealt[:] = -1
    for group in range(m):
        for engine in range(m):
            if alike[engine] == alike[group] and kept[group, engine] > wish_kept[group]:
                wish[group], wish_kept[group] = engine, kept[group, engine]
    while True:
        group = int(np.argmax(wish_kept))
        if wish_kept[group] <= 0.0:
            break
        engine = wish[group]
        if not taken[engine]:
            dealt[group] = engine
            taken[engine] = True
            wish_kept[group] = 0.0
            continue
        wish_kept[group] = 0.0
        for other in range(m):
            if alike[other] == alike[group] and not taken[other] and kept[group, other] > wish_kept[group]:
                wish[group], wish_kept[group] = other, kept[group, other]
    for group in range(m):  # what nobody holds takes what is left of its kind
        if dealt[group] < 0:
            for engine in range(m):
                if alike[engine] == alike[group] and not taken[engine]:
                    dealt[group] = engine
                    taken[engine] = True
                    break


@lean
def spread(order: Indexes, bounds: Indexes, group_of: Indexes) -> None:
    """Writes each trajectory's group."""
    for group in range(len(bounds) - 1):
        for rank in range(bounds[group], bounds[group + 1]):
            group_of[order[rank]] = group
