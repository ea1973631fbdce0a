"""Idle units are lent to running actions that can spread over them, and come back the moment they are needed.

Decisions know nothing of it: what is lent counts as free, and an action keeps what it was granted to its end. So nobody
waits longer, and an action whose units were few because others were expected is not held to it when they do not come.
Not in ARL-Tangram, where an action's units stay what they were when it started (§4.2). Which action borrows: the one
that is shortened most by a unit; durations are convex in most curves, so taking the best again and again is best.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial

from treadle_core.elastic.action import Action, key_units, seconds_at
from treadle_core.managers.progress import Progress

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
