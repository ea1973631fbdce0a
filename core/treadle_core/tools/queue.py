"""The queue of waiting actions as columns of numbers, so that a decision over thousands touches no object of theirs.

Invariant: row r of every column is of `actions[r]`; rows are in no order (a removal moves the last row into the gap).
An action is checked and its durations are computed once, as it comes.

Which waiting action comes first. An ordering is a function of the queue; FCFS is the paper's (§4.2).

Which waiting actions could start at their least, lane by lane, first come first served (Algorithm 1, line 2)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from treadle_core.compiled import compiled
from treadle_core.tools.action import (
    Action,
    InvalidActionError,
    Knowledge,
    check_action,
    check_fits,
    key_units,
    seconds_at,
)
from treadle_core.tools.arrangement import Curves, Floats, Indexes

FIRST_ROWS = 64
FIRST_CHOICES = 8


class Waiting:
    """Columns by row: least[r, d] units of dimension d at least; -1 where it asks for none. key[r]: the dimension that
    it is grouped by. arrival[r]. units[r, c] and seconds[r, c]: its c-th choice, counts[r] of them; seconds are NaN
    where unknown."""

    def __init__(self, capacities: Mapping[str, int]) -> None:
        """capacities: by dimension, the most that one action can get of it (`pools.capacities`)."""
        self.dimensions = tuple(capacities)
        self._capacities = dict(capacities)
        self.actions: list[Action] = []
        self._rows: dict[str, int] = {}
        self.least: Indexes = np.empty((FIRST_ROWS, len(self.dimensions)), np.int64)
        self.key: Indexes = np.empty(FIRST_ROWS, np.int64)
        self.arrival: Indexes = np.empty(FIRST_ROWS, np.int64)
        self.counts: Indexes = np.empty(FIRST_ROWS, np.int64)
        self.units: Indexes = np.zeros((FIRST_ROWS, FIRST_CHOICES), np.int64)
        self.seconds: Floats = np.zeros((FIRST_ROWS, FIRST_CHOICES))

    def __len__(self) -> int:
        return len(self.actions)

    def __contains__(self, action_id: str) -> bool:
        return action_id in self._rows

    def add(self, action: Action) -> None:
        """Raises InvalidActionError for an id twice, and what `check_action` and `check_fits` raise."""
        check_action(action, self.dimensions)
        check_fits(action, self._capacities)
        if action.action_id in self._rows:
            raise InvalidActionError("action_id", f"{action.action_id!r} waits already; use an id once")
        # Without a key it is grouped by the first dimension it names, where it counts with its least.
        key = action.key or next(iter(action.cost))
        choices, seconds = _useful(
            action, key_units(action.cost[key]) if action.scalable else (action.cost[key].least,)
        )
        row = len(self.actions)
        self._grow(row + 1, len(choices))
        self.least[row] = [
            action.cost[dimension].least if dimension in action.cost else -1 for dimension in self.dimensions
        ]
        self.key[row] = self.dimensions.index(key)
        self.arrival[row] = action.arrival
        self.counts[row] = len(choices)
        self.units[row, : len(choices)] = choices
        self.seconds[row, : len(choices)] = seconds
        self.actions.append(action)
        self._rows[action.action_id] = row

    def remove(self, action_id: str) -> Action:
        """Takes an action out: it starts, or nobody wants it any more. Raises KeyError for one that does not wait."""
        row, last = self._rows.pop(action_id), len(self.actions) - 1
        action, moved = self.actions[row], self.actions.pop()
        if row != last:
            for column in (self.least, self.key, self.arrival, self.counts, self.units, self.seconds):
                column[row] = column[last]
            self.actions[row] = moved
            self._rows[moved.action_id] = row
        return action

    def curves(self, rows: Indexes, typical_s: float) -> Curves:
        """The choices of these rows; an unknown duration is taken to be `typical_s`."""
        widest = int(self.counts[rows].max(initial=1))
        seconds = self.seconds[rows, :widest]
        return Curves(self.units[rows, :widest], np.where(np.isnan(seconds), typical_s, seconds), self.counts[rows])

    def _grow(self, rows: int, choices: int) -> None:
        have_rows, have_choices = self.units.shape
        if rows > have_rows:
            more = (0, have_rows)
            self.least = np.pad(self.least, (more, (0, 0)))
            self.key, self.arrival, self.counts = (np.pad(c, more) for c in (self.key, self.arrival, self.counts))
            self.units, self.seconds = np.pad(self.units, (more, (0, 0))), np.pad(self.seconds, (more, (0, 0)))
        if choices > have_choices:
            wider = ((0, 0), (0, choices - have_choices))
            self.units, self.seconds = np.pad(self.units, wider), np.pad(self.seconds, wider)


def _useful(action: Action, choices: Sequence[int]) -> tuple[list[int], list[float]]:
    """The choices that are faster than all with fewer units, and their seconds: the others only cost."""
    if action.duration.knowledge is Knowledge.UNKNOWN:
        return [choices[0]], [np.nan]
    units, seconds = [choices[0]], [seconds_at(action, choices[0])]
    for choice in choices[1:]:
        took_s = seconds_at(action, choice)
        if took_s < seconds[-1]:
            units.append(choice)
            seconds.append(took_s)
    return units, seconds


Ordering = Callable[[Waiting], Indexes]


def first_come(waiting: Waiting) -> Indexes:
    """By arrival: nothing starves, and all actions are on their trajectories' critical paths."""
    return np.argsort(waiting.arrival[: len(waiting)], kind="stable")


def shortest_first(waiting: Waiting) -> Indexes:
    """By duration at the least units, unknown ones last; equal ones by arrival. Long ones may starve."""
    count = len(waiting)
    return np.lexsort((waiting.arrival[:count], waiting.seconds[:count, 0]))  # NaN sorts last


@compiled
def seated(needs: Indexes, homes: Indexes, free: Indexes, capacity: Indexes) -> Indexes:
    """int64[n]: the lane of each action, -1: it waits. needs: int64[n, d], units at least; homes: int64[n], -1: any
    lane; free, capacity: int64[lanes, d]. Dimension 0 comes back with each action, the others may be kept for longer.

    An action that is free to go anywhere goes where the largest share of the last dimension is free (§5.2: balance of
    memory). One that waits keeps its lane for itself. One that waits for any lane keeps all others like it waiting, and
    those lanes where it lacks only dimension 0: elsewhere it waits until trajectories end, which they cannot do unless
    their actions pass it.
    """
    lanes, dimensions = free.shape
    left = free.copy()
    closed = np.zeros(lanes, np.bool_)
    all_closed = False
    seats = np.full(len(needs), -1, np.int64)
    last = dimensions - 1
    for i in range(len(needs)):
        home = homes[i]
        best, best_share = -1, -1.0
        for lane in range(lanes):
            if closed[lane] or (home >= 0 and lane != home) or (home < 0 and all_closed):
                continue
            fits = True
            for d in range(dimensions):
                fits = fits and needs[i, d] <= left[lane, d]
            share = left[lane, last] / max(capacity[lane, last], 1)
            if fits and share > best_share:
                best, best_share = lane, share
        seats[i] = best
        if best >= 0:
            for d in range(dimensions):
                left[best, d] -= needs[i, d]
        elif home >= 0:
            closed[home] = True
        elif not all_closed:
            all_closed = True
            for lane in range(lanes):
                others_fit = True
                for d in range(1, dimensions):
                    others_fit = others_fit and needs[i, d] <= left[lane, d]
                closed[lane] = closed[lane] or others_fit
    return seats
