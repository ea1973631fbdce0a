"""Candidates that share a key resource: how many start, with how many units (Algorithm 1 from line 5, Algorithm 2).

The objective is the sum of seconds until done, from now, over the candidates and all that wait behind them for the
same.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from treadle_core.elastic.completions import objective
from treadle_core.elastic.curves import Curves, Floats, Indexes
from treadle_core.elastic.eviction import MOST_TRIED, best_prefix
from treadle_core.elastic.pools import Share


@dataclass(frozen=True)
class Group:
    """One lane of the key dimension. curves: of all its actions in their order; candidates: int64[c], which of them
    could start now, ascending; the others wait. ends_s, units: what runs, in any order. share: what the candidates
    have."""

    curves: Curves
    candidates: Indexes
    ends_s: Floats
    units: Indexes
    share: Share
    depth: int

    def objective(self, chosen: Indexes, limit_s: float = np.inf) -> float:
        """GETAPPROXIMATEDOBJECTIVE where the first len(chosen) candidates start with these choices.

        Infinite where it is not below the limit, or where what runs never frees enough for all that wait.
        """
        return objective(
            *self.curves, self.candidates, chosen, self.ends_s, self.units, self.share.free, self.depth, limit_s
        )

    def started(self) -> Indexes:
        """int64[s]: the choice of units of each of the first s candidates, those that start.

        Where no candidate can be scaled all start with their least, and nothing is estimated. Of few candidates the
        best prefix and those beside it are arranged again with units at a price, as DPArrange does not see those that
        wait for them.
        """
        count = len(self.candidates)
        mine = self.curves.of(self.candidates)
        if (mine.counts == 1).all():
            return np.zeros(count, np.int64)
        arrangement = self.share.arrange(mine)
        prefix, least_s = best_prefix(lambda at, limit: self.objective(arrangement.chosen(at), limit), count)
        best = arrangement.chosen(prefix)
        if count <= MOST_TRIED:
            # A unit that is held for a second longer has each of the queue wait for its part of all the units.
            price = len(self.curves.counts) / (self.share.free + int(self.units.sum()))
            thrifty = self.share.arrange(mine.priced(price))
            for near in range(max(prefix - 1, 1), min(prefix + 1, count) + 1):
                chosen = thrifty.chosen(near)
                found_s = self.objective(chosen, least_s)
                if found_s < least_s:
                    best, least_s = chosen, found_s
        return best
