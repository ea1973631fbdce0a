"""How many of the candidates start now: the prefix with the least objective (ARL-Tangram Algorithm 1, lines 7 to 12).

The paper evicts the last candidate as long as that helps, and so stops at the first bump. A prefix costs one look at a
table here: of few candidates every prefix is tried, of many the evictions 1, 2, 4, ... and then those between the
neighbours of the best. The head is never evicted: whoever is first and fits starts, so that nothing starves.
"""

from __future__ import annotations

from collections.abc import Callable

# As many prefixes are tried one by one; a search by doubling would try two thirds of them.
MOST_TRIED = 12
# Of many, so many doublings in a row that do not help end the search.
PATIENCE = 3
# Of many, the best is looked for to within this part of the candidates: one in a hundred changes the sum by less.
GRAIN = 100


def best_prefix(objective: Callable[[int, float], float], candidates: int) -> tuple[int, float]:
    """The prefix, 1 to `candidates`, and its objective; all candidates where no prefix is better.

    objective(prefix, limit): its value, or anything at or above the limit where it is not below it.
    """
    found: dict[int, float] = {}
    best, least = candidates, float("inf")

    def attempt(prefix: int) -> None:
        nonlocal best, least
        if prefix in found:
            return
        found[prefix] = objective(prefix, least)
        if found[prefix] < least:
            best, least = prefix, found[prefix]

    if candidates <= MOST_TRIED:
        for prefix in range(candidates, 0, -1):
            attempt(prefix)
        return best, least
    attempt(candidates)
    evicted, worse = 1, 0
    while evicted < candidates and worse < PATIENCE:
        attempt(candidates - evicted)
        worse = 0 if best == candidates - evicted else worse + 1
        evicted *= 2
    if worse < PATIENCE:
        attempt(1)
    below = max((prefix for prefix in found if prefix < best), default=best)
    above = min((prefix for prefix in found if prefix > best), default=best)
    near = max(candidates // GRAIN, 1)
    while best - below > near or above - best > near:
        # The wider side is halved; what is best stays inside.
        probe = (below + best) // 2 if best - below > above - best else (best + above + 1) // 2
        middle = best
        attempt(probe)
        if best == probe:
            below, above = (below, middle) if probe < middle else (middle, above)
        elif probe < middle:
            below = probe
        else:
            above = probe
    return best, least
