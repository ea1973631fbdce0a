"""Choose how many of a group's candidates start now, and with how many units (Algorithm 1 from line
5, Algorithm 2).

A group is the actions that share one key dimension of one partition. The objective is the sum of
seconds until done, from now, over the candidates and the actions that wait behind them. Beyond the
paper, where scalable actions run:

- As many more are expected to arrive while one runs as run now (Little's law), so a unit that is
  held for a second longer costs each of them its part of all the units. Without it an action that
  arrives at an empty queue takes all that it can use, and those that arrive next start with what
  little is left and keep it until they end.
- Where running actions free enough units soon, the first scalable candidate waits for them. No
  scalable action passes it, and running actions end, so it does not starve; others start meanwhile,
  as their units come back soon.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from treadle_core.compiled import Floats, Indexes, compiled, lean
from treadle_core.tools.arrangement import Curves
from treadle_core.tools.pools import Share

# How many choices of units the objective tries for the first waiting action; the paper finds 2 or 3
# enough.
DEPTH = 2
# Of so many candidates every prefix is tried; a search by doubling would try two thirds of them.
MOST_TRIED = 12
# Of more candidates, so many doublings in a row that do not help end the search.
PATIENCE = 3
# Of more candidates, the best prefix is found to within this part of them: one in a hundred changes
# the sum by less.
GRAIN = 100


@dataclass(frozen=True)
class Group:
    """Actions that share one key dimension of one partition. curves: of all actions in their order;
    candidates: int64[c], which of them could start now, ascending. ends_s, units: what runs, in any
    order; running_scalable: how many of it could have had more or fewer units."""

    curves: Curves
    candidates: Indexes
    ends_s: Floats
    units: Indexes
    share: Share
    running_scalable: int = 0

    def choose_starts(self) -> Indexes | None:
        """Return int64[s], the choice of units of each of the first s candidates, which start.
        None: no scalable candidate starts, as the first of them waits for more units.

        Where no candidate is scalable all start with their least, and nothing is estimated.
        DPArrange does not see the actions that wait for the units which it hands out, so for few
        candidates the best prefix and those beside it are arranged a second time with a price on
        units.
        """
        count = len(self.candidates)
        mine = self.curves.of(self.candidates)
        if (mine.counts == 1).all():
            return np.zeros(count, np.int64)
        arrangement = self.share.arrange(mine.priced(self._expected) if self._expected else mine)
        prefix, least_s = best_prefix(
            lambda at, limit: self.objective(arrangement(at), limit), count
        )
        best = arrangement(prefix)
        if count <= MOST_TRIED:
            priced = self.share.arrange(mine.priced(self._price))
            for near in range(max(prefix - 1, 1), min(prefix + 1, count) + 1):
                chosen = priced(near)
                found_s = self.objective(chosen, least_s)
                if found_s < least_s:
                    best, least_s = chosen, found_s
        if self.running_scalable and self._objective_when_waiting(mine, least_s) < least_s:
            return None
        return best

    def objective(self, chosen: Indexes, limit_s: float = np.inf) -> float:
        """Return GETAPPROXIMATEDOBJECTIVE where the first len(chosen) candidates start with these
        choices, plus the waiting time of expected actions.

        Infinite where it is not below the limit, or where running actions never free enough for all
        that wait.
        """
        expected_s = 0.0
        if self._expected:
            starting = self.candidates[: len(chosen)]
            held = self.curves.units[starting, chosen] * self.curves.seconds[starting, chosen]
            expected_s = self._expected * float(held.sum())
        return expected_s + sum_until_done(
            *self.curves,
            self.candidates,
            chosen,
            self.ends_s,
            self.units,
            self.share.free,
            DEPTH,
            limit_s - expected_s,
        )

    @cached_property
    def _expected(self) -> float:
        """Return how many actions are expected to arrive while one runs, for each unit."""
        return self.running_scalable / self._all_units if self.running_scalable else 0.0

    @property
    def _price(self) -> float:
        """Return the price of a unit for a second: what expected and waiting actions would do with
        it."""
        return self._expected + len(self.curves.counts) / self._all_units

    @property
    def _all_units(self) -> int:
        return self.share.free + int(self.units.sum())

    def _objective_when_waiting(self, mine: Curves, limit_s: float) -> float:
        """Return the objective where no scalable candidate starts, and the first of them waits for
        the units at which its seconds cost least, each at a higher cost for the actions that wait
        for its units."""
        fixed = self.candidates[mine.counts == 1]
        head = int(self.candidates[np.argmax(mine.counts > 1)])
        count = int(self.curves.counts[head])
        units, seconds = self.curves.units[head, :count], self.curves.seconds[head, :count]
        suits = int(np.argmin(seconds * (1.0 + self._price * units)))
        units_then, seconds_then = (
            self.curves.units[:, :1].copy(),
            self.curves.seconds[:, :1].copy(),
        )
        units_then[head] = units[suits]
        seconds_then[head] = seconds[suits] * (1.0 + self._expected * units[suits])
        chosen, one = np.zeros(len(fixed), np.int64), np.ones_like(self.curves.counts)
        found_s: float = sum_until_done(
            units_then,
            seconds_then,
            one,
            fixed,
            chosen,
            self.ends_s,
            self.units,
            self.share.free,
            1,
            limit_s,
        )
        return found_s


def best_prefix(objective: Callable[[int, float], float], candidates: int) -> tuple[int, float]:
    """Return the prefix, 1 to `candidates`, with the least objective, and that objective; all
    candidates where none is better.

    objective(prefix, limit): its value, or anything at or above the limit where it is not below it.
    The paper evicts the last candidate as long as that helps, and so stops at the first bump. Here
    of few candidates every prefix is tried; of many the evictions 1, 2, 4, ... and then those
    between the neighbours of the best. The first candidate is never evicted, so that no action
    starves.
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
        # The wider side is halved; the best stays inside.
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


@lean
def sift_down_end(ends: Floats, units: Indexes, size: int, at: int) -> None:
    """Restore the heap, earliest end first, below an entry that got later."""
    end, held = ends[at], units[at]
    while True:
        child = 2 * at + 1
        if child >= size:
            break
        if child + 1 < size and ends[child + 1] < ends[child]:
            child += 1
        if ends[child] >= end:
            break
        ends[at], units[at] = ends[child], units[child]
        at = child
    ends[at], units[at] = end, held


@lean
def sift_up_end(ends: Floats, units: Indexes, at: int) -> None:
    """Restore the heap above an entry that was appended."""
    end, held = ends[at], units[at]
    while at > 0 and ends[(at - 1) // 2] > end:
        above = (at - 1) // 2
        ends[at], units[at] = ends[above], units[above]
        at = above
    ends[at], units[at] = end, held


@lean
def sum_behind(
    ends: Floats,
    units: Indexes,
    size: int,
    free: int,
    waiting_units: Indexes,
    waiting_s: Floats,
    limit_s: float,
) -> float:
    """Return ESTIMATE of Algorithm 2: seconds until done, summed over waiting actions in their
    order (appendix A).

    ends, units: the completion heap, `size` entries in arrays with room for the waiting actions
    too. The paper's heap has one time for each running action, and a waiting action starts when one
    is popped, whatever the two use. Here an entry knows its units: an action starts once as many
    are free as it takes, and what a wide action frees starts several narrow ones. Units that are
    free now serve only from the first end on, so that no decision that leaves units idle looks as
    good as one that uses them. Infinite once above the limit, or where the heap runs out first.
    """
    total = 0.0
    now_s = ends[0] if size > 0 else np.inf
    for i in range(len(waiting_units)):
        needed, took_s = waiting_units[i], waiting_s[i]
        if (
            free == 0 and size > 0 and units[0] == needed
        ):  # one place for another: the common case, in one pass
            now_s = ends[0]
            ends[0] = now_s + took_s
            sift_down_end(ends, units, size, 0)
        else:
            while free < needed:
                if size == 0:
                    return np.inf
                now_s = ends[0]
                free += units[0]
                size -= 1
                ends[0], units[0] = ends[size], units[size]
                sift_down_end(ends, units, size, 0)
            free -= needed
            ends[size], units[size] = now_s + took_s, needed
            size += 1
            sift_up_end(ends, units, size - 1)
        total += now_s + took_s
        if total >= limit_s:
            return np.inf
    return total


@compiled
def sum_until_done(
    units: Indexes,
    seconds: Floats,
    counts: Indexes,
    candidates: Indexes,
    chosen: Indexes,
    ends_s: Floats,
    held: Indexes,
    free: int,
    depth: int,
    limit_s: float,
) -> float:
    """Return GETAPPROXIMATEDOBJECTIVE of Algorithm 2: seconds until done, summed over all of a
    group's actions.

    units, seconds, counts: their `Curves`. The first len(chosen) of `candidates` start now with
    those choices of the `free` units; all others wait in order with their least, but for the first
    of them, which tries its first `depth` choices. ends_s, held: of what runs, in any order.
    Infinite where it is not below the limit, or where running actions never free enough.
    """
    running, starting, count = len(ends_s), len(chosen), len(counts)
    room = running + count + 1
    heap_ends, heap_units = np.empty(room), np.empty(room, np.int64)
    heap_ends[:running], heap_units[:running] = ends_s, held
    waits = np.ones(count, np.bool_)
    exact_s = 0.0
    for at in range(starting):
        i = candidates[at]
        waits[i] = False
        heap_ends[running + at], heap_units[running + at] = (
            seconds[i, chosen[at]],
            units[i, chosen[at]],
        )
        exact_s += seconds[i, chosen[at]]
        free -= units[i, chosen[at]]
    behind = np.flatnonzero(waits)
    if len(behind) == 0:
        return exact_s if exact_s < limit_s else np.inf
    size = running + starting
    for at in range(size // 2 - 1, -1, -1):
        sift_down_end(heap_ends, heap_units, size, at)
    waiting_units, waiting_s = np.empty(len(behind), np.int64), np.empty(len(behind))
    for at in range(len(behind)):
        waiting_units[at], waiting_s[at] = units[behind[at], 0], seconds[behind[at], 0]
    ends_of_try, units_of_try = np.empty(room), np.empty(room, np.int64)
    most_s = least_s = limit_s - exact_s
    for choice in range(min(depth, counts[behind[0]])):
        ends_of_try[:size], units_of_try[:size] = heap_ends[:size], heap_units[:size]
        waiting_units[0], waiting_s[0] = units[behind[0], choice], seconds[behind[0], choice]
        least_s = min(
            least_s,
            sum_behind(ends_of_try, units_of_try, size, free, waiting_units, waiting_s, least_s),
        )
    return exact_s + least_s if least_s < most_s else np.inf
