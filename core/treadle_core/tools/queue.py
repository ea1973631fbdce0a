"""Queue of waiting actions as columns of numbers, so that a decision over thousands of them touches
no object.

Invariant: row r of every column belongs to `actions[r]`. Rows are in no order: a removal moves the
last row into the gap.
"""

from collections.abc import Iterable

import numpy as np

from treadle_core.compiled import Floats, Indexes
from treadle_core.tools.action import Action, key_units, seconds_at
from treadle_core.tools.arrangement import Curves

FIRST_ROWS = 64
FIRST_CHOICES = 8


class ActionQueue:
    """Waiting actions as columns by row r: least[r, d], the least units of dimension d, -1 where
    the action does not require it. key[r]: the dimension that decides its group. arrival[r].
    units[r, c] and seconds[r, c]: its c-th choice, of counts[r]; seconds are NaN where unknown. A
    duration is computed once, when the action is added."""

    def __init__(self, dimensions: Iterable[str]) -> None:
        self.dimensions = tuple(dimensions)
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
        """Append an action that `check_action` accepts and whose id does not wait."""
        # Without a key the group is that of the first dimension, of which the action gets the
        # least.
        key = action.sized_dimension
        choices: list[int] = []  # those that are faster than every choice with fewer units
        seconds: list[float] = []
        for units in key_units(action.cost[key]) if action.scalable else (action.cost[key].least,):
            took_s = seconds_at(action, units)
            if took_s is None or not seconds or took_s < seconds[-1]:
                choices.append(units)
                seconds.append(np.nan if took_s is None else took_s)
        row = len(self.actions)
        self._grow(row + 1, len(choices))
        self.least[row] = [
            action.cost[dimension].least if dimension in action.cost else -1
            for dimension in self.dimensions
        ]
        self.key[row] = self.dimensions.index(key)
        self.arrival[row] = action.arrival
        self.counts[row] = len(choices)
        self.units[row, : len(choices)] = choices
        self.seconds[row, : len(choices)] = seconds
        self.actions.append(action)
        self._rows[action.action_id] = row

    def remove(self, action_id: str) -> Action:
        """Remove and return an action. Raises KeyError for one that does not wait."""
        row, last = self._rows.pop(action_id), len(self.actions) - 1
        action, moved = self.actions[row], self.actions.pop()
        if row != last:
            for column in (
                self.least,
                self.key,
                self.arrival,
                self.counts,
                self.units,
                self.seconds,
            ):
                column[row] = column[last]
            self.actions[row] = moved
            self._rows[moved.action_id] = row
        return action

    def rows_by_arrival(self) -> Indexes:
        """Return int64[n], the rows first come, first served (§4.2). No action starves, and all are
        on their trajectories' critical paths."""
        return np.argsort(self.arrival[: len(self)], kind="stable")

    def curves(self, rows: Indexes, typical_s: float) -> Curves:
        """Return the choices of these rows; an unknown duration is taken to be `typical_s`."""
        widest = int(self.counts[rows].max(initial=1))
        seconds = self.seconds[rows, :widest]
        return Curves(
            self.units[rows, :widest],
            np.where(np.isnan(seconds), typical_s, seconds),
            self.counts[rows],
        )

    def _grow(self, rows: int, choices: int) -> None:
        have_rows, have_choices = self.units.shape
        if rows > have_rows:
            more = (0, have_rows)
            self.least = np.pad(self.least, (more, (0, 0)))
            self.key, self.arrival, self.counts = (
                np.pad(c, more) for c in (self.key, self.arrival, self.counts)
            )
            self.units, self.seconds = (
                np.pad(self.units, (more, (0, 0))),
                np.pad(self.seconds, (more, (0, 0))),
            )
        if choices > have_choices:
            wider = ((0, 0), (0, choices - have_choices))
            self.units, self.seconds = np.pad(self.units, wider), np.pad(self.seconds, wider)
