"""Candidates that share a key resource: how many start, with how many units (Algorithm 1 from line 5, Algorithm 2).

The objective is the sum of seconds until done, from now, over the candidates and all that wait behind them for the
same. Beyond the paper, where actions run that could have had more or fewer units:

- As many of their like are expected to come while one runs as run now (Little's law), so that a unit held for a second
  longer costs each of those its part of all the units. Without it whoever comes to an empty queue takes all it can use,
  and those that come next start with what little is left and keep it until they end.
- Where they free enough soon the first that can be scaled waits for it. None of its like passes it, and those that run
  end, so it does not starve; those that cannot be scaled start meanwhile, as their units come back soon.

How many of the candidates start now: the prefix with the least objective (ARL-Tangram Algorithm 1, lines 7 to 12).

The paper evicts the last candidate as long as that helps, and so stops at the first bump. A prefix costs one look at a
table here: of few candidates every prefix is tried, of many the evictions 1, 2, 4, ... and then those between the
neighbours of the best. The head is never evicted: whoever is first and fits starts, so that nothing starves.

The candidates: waiting actions that could all start now, each with its least (Algorithm 1, lines 1 to 4).

Where an action asks several pools and not all have room, those that have keep its place: what it asked for stays free
until it starts. The paper's prefix of the whole queue would keep those behind it waiting too, though they ask for
something else; here only those wait that want what it waits for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from treadle_core.tools.action import InvalidActionError
from treadle_core.tools.arrangement import Curves, Floats, Indexes
from treadle_core.tools.completions import objective
from treadle_core.tools.pools import Pool, Share
from treadle_core.tools.queue import Waiting

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
        wait for them.
        """
        count = len(self.candidates)
        mine = self.curves.of(self.candidates)
        if (mine.counts == 1).all():
            return np.zeros(count, np.int64)
        arrangement = self.share.arrange(mine.priced(self._coming) if self._coming else mine)
        prefix, least_s = best_prefix(lambda at, limit: self.objective(arrangement.chosen(at), limit), count)
        best = arrangement.chosen(prefix)
        if count <= MOST_TRIED:
            # A unit that is held for a second longer has each of the queue wait for its part of all the units.
            thrifty = self.share.arrange(mine.priced(self._price))
            for near in range(max(prefix - 1, 1), min(prefix + 1, count) + 1):
                chosen = thrifty.chosen(near)
                found_s = self.objective(chosen, least_s)
                if found_s < least_s:
                    best, least_s = chosen, found_s
        if self.running_alike and self._later(mine, least_s) < least_s:
            return None
        return best

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


NOT_ASKED = -2
WAITS = -1


@dataclass(frozen=True)
class Candidates:
    """rows[i]: the row of the queue that is i-th in order. seats[p, i]: its lane in pool p, or WAITS or NOT_ASKED.
    homes[p, i]: the lane that it has to go to, -1: any. admitted[i]: it has a seat wherever it asks for one."""

    rows: Indexes
    seats: Indexes
    homes: Indexes
    admitted: npt.NDArray[np.bool_]


def select(waiting: Waiting, rows: Indexes, pools: Sequence[Pool]) -> Candidates:
    """Raises InvalidActionError for an action on a node that is not there."""
    seats = np.full((len(pools), len(rows)), NOT_ASKED, np.int64)
    homes = np.full((len(pools), len(rows)), -1, np.int64)
    for at, pool in enumerate(pools):
        columns = [waiting.dimensions.index(dimension) for dimension in pool.dimensions]
        needs = waiting.least[rows][:, columns]
        asking = np.flatnonzero((needs >= 0).any(axis=1))
        if pool.nodes != (None,):
            homes[at, asking] = _homes(waiting, rows[asking], pool)
        seats[at, asking] = pool.seat(np.maximum(needs[asking], 0), homes[at, asking])
    return Candidates(rows, seats, homes, (seats != WAITS).all(axis=0))


def _homes(waiting: Waiting, rows: Indexes, pool: Pool) -> list[int]:
    lanes = {node: lane for lane, node in enumerate(pool.nodes)}
    lanes[None] = -1
    actions = waiting.actions
    try:
        return [lanes[actions[row].node_id] for row in rows.tolist()]
    except KeyError as missing:
        raise InvalidActionError("node_id", f"no node is called {missing}; place its trajectory anew") from missing
