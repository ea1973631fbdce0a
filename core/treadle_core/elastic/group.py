"""Candidates that share a key resource: how many start, with how many units (Algorithm 1 from line 5, Algorithm 2).

The objective is the sum of seconds until done, from now, over the candidates and all that wait behind them for the
same. Beyond the paper, where actions run that could have had more or fewer units:

- As many of their like are expected to come while one runs as run now (Little's law), so that a unit held for a second
  longer costs each of those its part of all the units. Without it whoever comes to an empty queue takes all it can use,
  and those that come next start with what little is left and keep it until they end.
- Where they free enough soon the first that can be scaled waits for it. None of its like passes it, and those that run
  end, so it does not starve; those that cannot be scaled start meanwhile, as their units come back soon.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from treadle_core.elastic.completions import objective
from treadle_core.elastic.curves import Arrangement, Curves, Floats, Indexes
from treadle_core.elastic.eviction import MOST_TRIED, best_prefix
from treadle_core.elastic.pools import Share
from treadle_core.elastic.search import Queue, best_near


@dataclass(frozen=True)
class Group:
    """One lane of the key dimension. curves: of all its actions in their order; candidates: int64[c], which of them
    could start now, ascending; the others wait. ends_s, units: what runs, in any order; running_alike: how many of it
    could have had more or fewer units. share: what the candidates have."""

    curves: Curves
    candidates: Indexes
    ends_s: Floats
    units: Indexes
    share: Share
    depth: int
    running_alike: int = 0

    def objective(self, chosen: Indexes, limit_s: float = np.inf) -> float:
        """GETAPPROXIMATEDOBJECTIVE where the first len(chosen) candidates start with these choices, and what those that
        are expected wait for them.

        Infinite where it is not below the limit, or where what runs never frees enough for all that wait.
        """
        expected_s = 0.0
        if self._coming:
            starting = self.candidates[: len(chosen)]
            held = self.curves.units[starting, chosen] * self.curves.seconds[starting, chosen]
            expected_s = self._coming * float(held.sum())
        return expected_s + objective(
            *self.curves,
            self.candidates,
            chosen,
            self.ends_s,
            self.units,
            self.share.free,
            self.depth,
            limit_s - expected_s,
        )

    def started(self) -> Indexes | None:
        """int64[s]: the choice of units of each of the first s candidates, those that start. None: of those that can be
        scaled none starts, as the first of them waits for more.

        Where no candidate can be scaled all start with their least, and nothing is estimated. Of few candidates the
        best prefix and those beside it are arranged again with units at a price, as DPArrange does not see those that
        wait for them; where few wait, better ones are searched for around all of these.
        """
        count = len(self.candidates)
        mine = self.curves.of(self.candidates)
        if (mine.counts == 1).all():
            return np.zeros(count, np.int64)
        arrangement = self.share.arrange(mine.priced(self._coming) if self._coming else mine)
        # A unit that is held for a second longer has each of the queue wait for its part of all the units.
        thrifty = self.share.arrange(mine.priced(self._price)) if count <= MOST_TRIED else arrangement
        if len(self.curves.counts) <= MOST_TRIED:
            prefixes = range(count, 0, -1)  # of equals the first: as many as can start do
            starts = [each.chosen(prefix) for each in (arrangement, thrifty) for prefix in prefixes]
            best, least_s = best_near(self._queue, starts)
        else:
            best, least_s = self._best_prefix(arrangement, thrifty)
        if self.running_alike and self._later(mine, least_s) < least_s:
            return None
        return best

    def _best_prefix(self, arrangement: Arrangement, thrifty: Arrangement) -> tuple[Indexes, float]:
        """Of an arrangement, and beside it of the other."""
        count = len(self.candidates)
        prefix, least_s = best_prefix(lambda at, limit: self.objective(arrangement.chosen(at), limit), count)
        best = arrangement.chosen(prefix)
        if thrifty is not arrangement:
            for near in range(max(prefix - 1, 1), min(prefix + 1, count) + 1):
                chosen = thrifty.chosen(near)
                found_s = self.objective(chosen, least_s)
                if found_s < least_s:
                    best, least_s = chosen, found_s
        return best, least_s

    @property
    def _queue(self) -> Queue:
        return Queue(
            *self.curves,
            self.candidates,
            self.ends_s,
            self.units,
            self.share.free,
            self.depth,
            self.share.chunks,
            self._coming,
        )

    @property
    def _price(self) -> float:
        """Of a unit for a second: what those that are expected and those that wait would do with it."""
        return self._coming + len(self.curves.counts) / self._all_units

    @property
    def _all_units(self) -> int:
        return self.share.free + int(self.units.sum())

    @cached_property
    def _coming(self) -> float:
        """How many are expected to come while one runs, for each unit."""
        return self.running_alike / self._all_units if self.running_alike else 0.0

    def _later(self, mine: Curves, limit_s: float) -> float:
        """The objective where none starts that can be scaled, and the first of those waits for the units that suit it:
        those at which its seconds cost least, each dearer by what others wait for its units."""
        fixed = self.candidates[mine.counts == 1]
        head = int(self.candidates[np.argmax(mine.counts > 1)])
        count = int(self.curves.counts[head])
        units, seconds = self.curves.units[head, :count], self.curves.seconds[head, :count]
        suits = int(np.argmin(seconds * (1.0 + self._price * units)))
        units_then, seconds_then = self.curves.units[:, :1].copy(), self.curves.seconds[:, :1].copy()
        units_then[head] = units[suits]
        seconds_then[head] = seconds[suits] * (1.0 + self._coming * units[suits])
        chosen, one = np.zeros(len(fixed), np.int64), np.ones_like(self.curves.counts)
        found_s: float = objective(
            units_then, seconds_then, one, fixed, chosen, self.ends_s, self.units, self.share.free, 1, limit_s
        )
        return found_s
