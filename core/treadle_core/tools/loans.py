"""Idle units are lent to running actions that can spread over them, and come back the moment they are needed.

Decisions know nothing of it: what is lent counts as free, and an action keeps what it was granted to its end. So nobody
waits longer, and an action whose units were few because others were expected is not held to it when they do not come.
Not in ARL-Tangram, where an action's units stay what they were when it started (§4.2). Which action borrows: the one
that is shortened most by a unit; durations are convex in most curves, so taking the best again and again is best.

Which cores are lent to which action: `Loans` by number, here by name.

Owns: the lent cores of each action. Invariants: a lent core is of one action and of nobody's grant; as many are lent to
an action as `Loans` says.

How far an action has come whose units change while it runs."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

from treadle_core.tools.action import Action, key_units, seconds_at
from treadle_core.tools.numa import Cores, count_of, minus, pick, plus


class Progress:
    """An action's work from its start on. Times are of one clock that never falls; units are of its key dimension.

    seconds: that all its work takes, by units. joining_s: how long a unit that it has not had before is busy with
    itself before it helps, as a worker that starts is. Units that are taken away and come back help at once.
    """

    def __init__(self, seconds: Callable[[int], float], units: int, joining_s: float, starts_s: float) -> None:
        self.units = units
        self.joining_s = joining_s
        self._seconds = seconds
        self._joined = units
        self._joining: deque[tuple[float, int]] = deque()  # when so many will have joined
        self._left = 1.0
        self._since_s = starts_s

    @property
    def had(self) -> int:
        """The most units that it has had: no more of it has to join."""
        return self._joining[-1][1] if self._joining else self._joined

    @property
    def effective(self) -> int:
        """Units that help."""
        return min(self.units, self._joined)

    def left(self, now_s: float) -> float:
        """The share of its work that is left, from 1 to 0."""
        self._advance(now_s)
        return self._left

    def move(self, units: int, now_s: float) -> None:
        """From now on it has so many."""
        self._advance(now_s)
        if units > self.had:
            self._joining.append((max(now_s, self._since_s) + self.joining_s, units))
            self._advance(now_s)
        self.units = units

    def ends_at_s(self) -> float:
        """When its work is done if nothing changes."""
        left, since_s, joined = self._left, self._since_s, self._joined
        for at_s, units in self._joining:
            done = (at_s - since_s) / self._seconds(min(self.units, joined))
            if done >= left:
                break
            left, since_s, joined = left - done, at_s, units
        return since_s + left * self._seconds(min(self.units, joined))

    def _advance(self, now_s: float) -> None:
        while self._joining and self._joining[0][0] <= now_s:
            at_s, units = self._joining.popleft()
            self._work(at_s)
            self._joined = units
        self._work(now_s)

    def _work(self, until_s: float) -> None:
        if until_s > self._since_s:
            seconds = self._seconds(self.effective)
            done = (until_s - self._since_s) / seconds if seconds > 0.0 else 1.0
            self._left, self._since_s = max(0.0, self._left - done), until_s


LEAST_GAIN_S = 0.01  # of a unit; below it a core is moved twice for next to nothing
# From a change until whoever drives this lends: tools of others come and go in tenths of a second.
LENDING_PAUSE_S = 0.2
OVERDUE_LEFT = 0.05  # what is taken to be left at least of an action that should have ended


@dataclass
class _Borrower:
    action: Action
    node: str
    granted: int
    choices: tuple[int, ...]
    progress: Progress

    @property
    def lent(self) -> int:
        return self.progress.units - self.granted

    def next(self) -> int | None:
        """The least number of units above those that it has."""
        return next((units for units in self.choices if units > self.progress.units), None)

    def gain_s(self, units: int, now_s: float) -> float:
        """By how much each unit more would shorten it, up to so many."""
        here_s, there_s = (seconds_at(self.action, each) for each in (self.progress.units, units))
        left = max(self.progress.left(now_s), OVERDUE_LEFT)
        if units > self.progress.had:
            left = max(0.0, left - self.progress.joining_s / here_s)
        return left * (here_s - there_s) / (units - self.progress.units)


class Loans:
    """See the module. By node; actions are those that follow (`Action.follows`), from their start to their end."""

    def __init__(self) -> None:
        self._borrowers: dict[str, _Borrower] = {}

    def __contains__(self, action_id: str) -> bool:
        return action_id in self._borrowers

    def __len__(self) -> int:
        return len(self._borrowers)

    def begin(self, action: Action, node: str, units: int, now_s: float) -> None:
        """An action starts with so many units of its key dimension."""
        assert action.key is not None and action.scalable
        joining_s = serial_s(action)
        progress = Progress(partial(seconds_at, action), units, joining_s, now_s)
        self._borrowers[action.action_id] = _Borrower(action, node, units, key_units(action.cost[action.key]), progress)

    def end(self, action_id: str) -> None:
        """It has ended; what was lent to it is idle. One that borrows nothing is no error."""
        self._borrowers.pop(action_id, None)

    def lent(self, action_id: str) -> int:
        """Units that it has beyond its own."""
        return self._borrowers[action_id].lent

    def lent_on(self, node: str) -> int:
        """Units of a node that are lent."""
        return sum(borrower.lent for borrower in self._on(node))

    def ends_at_s(self, action_id: str) -> float:
        """When it should end if nothing changes."""
        return self._borrowers[action_id].progress.ends_at_s()

    def lend(self, node: str, idle: int, now_s: float) -> list[str]:
        """Hands out units of a node that neither a grant nor a loan has; the actions that got some."""
        best: list[tuple[float, str, int]] = []
        for borrower in self._on(node):
            self._offer(best, borrower, now_s)
        got: dict[str, None] = {}
        while idle > 0 and best:
            _, action_id, units = heapq.heappop(best)
            borrower = self._borrowers[action_id]
            more = units - borrower.progress.units
            if more <= idle:
                idle -= more
                borrower.progress.move(units, now_s)
                got[action_id] = None
                self._offer(best, borrower, now_s)
        return list(got)

    def recall(self, node: str, units: int, now_s: float) -> list[str]:
        """Takes so many lent units of a node back, from the largest loans first; the actions that lost some."""
        lost: dict[str, None] = {}
        largest = [(-borrower.lent, borrower.action.action_id) for borrower in self._on(node) if borrower.lent]
        heapq.heapify(largest)
        while units > 0 and largest:
            lent, action_id = heapq.heappop(largest)
            progress = self._borrowers[action_id].progress
            progress.move(progress.units - 1, now_s)
            units -= 1
            lost[action_id] = None
            if lent < -1:
                heapq.heappush(largest, (lent + 1, action_id))
        return list(lost)

    def _on(self, node: str) -> Iterable[_Borrower]:
        return (borrower for borrower in self._borrowers.values() if borrower.node == node)

    @staticmethod
    def _offer(best: list[tuple[float, str, int]], borrower: _Borrower, now_s: float) -> None:
        units = borrower.next()
        if units is None:
            return
        gain_s = borrower.gain_s(units, now_s)
        if gain_s >= LEAST_GAIN_S:
            heapq.heappush(best, (-gain_s, borrower.action.action_id, units))


def serial_s(action: Action) -> float:
    """Seconds of an action that no number of units shortens: Karp and Flatt's serial fraction at the most that it may
    have, of its time on one unit. What a worker that joins late does first is taken to be that, such as collecting."""
    assert action.key is not None
    most = key_units(action.cost[action.key])[-1]
    if most == 1:
        return 0.0
    alone_s = action.duration.single_unit_s
    share = (seconds_at(action, most) / alone_s - 1.0 / most) / (1.0 - 1.0 / most) if alone_s > 0.0 else 0.0
    return max(0.0, share) * alone_s


class LentCores:
    """See the module. Nodes are called by their names; cores come and go by NUMA node."""

    def __init__(self) -> None:
        self._loans = Loans()
        self._of: dict[str, Cores] = {}
        self._nodes: dict[str, str] = {}
        self._moved: dict[str, None] = {}

    def __len__(self) -> int:
        """How many run that cores can be lent to."""
        return len(self._of)

    def __contains__(self, action_id: str) -> bool:
        return action_id in self._of

    def begin(self, action: Action, node: str, granted: Cores, now_s: float) -> None:
        """An action that follows has started."""
        self._loans.begin(action, node, count_of(granted), now_s)
        self._of[action.action_id] = tuple(frozenset[int]() for _ in granted)
        self._nodes[action.action_id] = node

    def end(self, action_id: str) -> None:
        """It has ended. One that cores are not lent to is no error."""
        self._loans.end(action_id)
        self._moved.pop(action_id, None)
        if self._of.pop(action_id, None) is not None:
            del self._nodes[action_id]

    def lent_to(self, action_id: str) -> Cores:
        """By NUMA node."""
        return self._of[action_id]

    def ends_at_s(self, action_id: str) -> float:
        """When it should end if nothing changes."""
        return self._loans.ends_at_s(action_id)

    def moved(self) -> list[str]:
        """Actions whose lent cores have changed since this was last asked, those that lost some first."""
        found = list(self._moved)
        self._moved.clear()
        return found

    def count(self) -> int:
        """Cores that are lent."""
        return sum(map(count_of, self._of.values()))

    def make_room(self, node: str, free: Cores, count: int, now_s: float) -> Cores:
        """`count` of the cores that no grant has, after which nobody borrows them."""
        unlent = self._unlent(node, free)
        short = count - count_of(unlent)
        if short > 0:
            wanted = [at for at, cores in enumerate(pick(free, count)) if cores]
            for action_id in self._loans.recall(node, short, now_s):
                self._shrink(action_id, wanted)
            unlent = self._unlent(node, free)
        return pick(unlent, count)

    def lend(self, node: str, free: Cores, now_s: float) -> None:
        """Lends what is idle of the cores that no grant has."""
        unlent = self._unlent(node, free)
        for action_id in self._loans.lend(node, count_of(unlent), now_s):
            more = pick(unlent, self._loans.lent(action_id) - count_of(self._of[action_id]))
            unlent = minus(unlent, more)
            self._of[action_id] = plus(self._of[action_id], more)
            self._moved.setdefault(action_id)

    def _unlent(self, node: str, free: Cores) -> Cores:
        for action_id, lent in self._of.items():
            if self._nodes[action_id] == node:
                free = minus(free, lent)
        return free

    def _shrink(self, action_id: str, wanted: Sequence[int]) -> None:
        """Down to what `Loans` says, first of the NUMA nodes that are wanted."""
        lent = [set(cores) for cores in self._of[action_id]]
        left = count_of(self._of[action_id]) - self._loans.lent(action_id)
        for at in (*wanted, *range(len(lent))):
            gone = sorted(lent[at])[:left]
            lent[at] -= set(gone)
            left -= len(gone)
        self._of[action_id] = tuple(map(frozenset, lent))
        self._moved = {action_id: None, **self._moved}
