"""The open trajectories as columns of numbers, kept up to date event by event, so that a plan for thousands of them
starts from arrays and no object is made for each.

Owns the cells; `trajectories.TrajectoryTable` alone writes them, one row an open trajectory. Invariants: the rows that
live are those of the open trajectories, in the order of opening; what a row says is what its record says. A row that
died is never used again and keeps its name: rows are renumbered all at once, with new names, and `layout` moves then.
So whoever holds `names` and some rows knows for good whose they are.
"""

import struct
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from treadle_core.compiled import compiled

Floats = npt.NDArray[np.float64]
Indexes = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]
Names = npt.NDArray[np.object_]

FIRST_ROWS = 64

# Columns: tokens left to sample, tokens of context now, seconds of tool calls left, number of the engine, which
# replanning rule moves it (NOT_PLANNED where none may), number of its set of hardware tags, 1 where a
# ticket was ever issued, standard deviation of ln(tokens left) as the predictor has it, tokens that the cap
# leaves (inf without one).
TOKENS, CONTEXT, TOOL_S, ENGINE, RULE, TAGS, BEGUN, LOG_SIGMA, ROOM = range(9)
ROW = struct.Struct("9d")

NOT_PLANNED = 0.0
DEAD = -1.0

Cells = tuple[float, float, float, float, float, float, float, float, float]


@dataclass(frozen=True)
class Live:
    """The rows that live at one moment, in the order of opening; arrays are copies."""

    rows: Indexes
    tokens: Floats
    context_tokens: Floats
    tool_s: Floats
    engine_number: Indexes
    rule: Floats
    tags_number: Indexes
    begun: Flags
    log_sigma: Floats
    room_tokens: Floats

    def __len__(self) -> int:
        return len(self.rows)


class Numbers:
    """Small numbers for values that come again and again, in the order of their coming."""

    def __init__(self) -> None:
        self._numbers: dict[object, int] = {}

    def __len__(self) -> int:
        return len(self._numbers)

    def of(self, value: object) -> int:
        """The number of a value, a new one where it is new."""
        number = self._numbers.get(value)
        if number is None:
            number = self._numbers[value] = len(self._numbers)
        return number

    def values(self) -> list[object]:
        """Value of number 0, 1, ..."""
        return list(self._numbers)


@compiled
def columns_of(cells: Floats, rows: Indexes) -> Floats:
    """Some rows, column by column: a third of the time that numpy takes to gather them."""
    columns = np.empty((cells.shape[1], len(rows)))
    for index in range(len(rows)):
        row = rows[index]
        for column in range(cells.shape[1]):
            columns[column, index] = cells[row, column]
    return columns


class Worksheet:
    """See the module."""

    def __init__(self) -> None:
        self.engines = Numbers()  # engine ids
        self.tags = Numbers()  # sets of hardware tags, as tuples
        self.layout = 0
        self._cells = np.zeros((FIRST_ROWS, ROW.size // 8))
        self._buffer = self._cells.data
        self.names: Names = np.empty(FIRST_ROWS, np.object_)
        self._rows: dict[str, int] = {}
        self._said: dict[str, Cells] = {}
        self._used = 0

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def used(self) -> int:
        """Rows that live or died."""
        return self._used

    @property
    def cells(self) -> Floats:
        """All rows, the dead among them, to be read only."""
        return self._cells[: self._used]

    def put(self, trajectory_id: str, cells: Cells) -> None:
        """Writes the row of an open trajectory, a new one where it has none."""
        if self._said.get(trajectory_id) == cells:
            return
        row = self._rows.get(trajectory_id)
        if row is None:
            if self._used == len(self._cells):
                self._renumber()
            row = self._rows[trajectory_id] = self._used
            self.names[row] = trajectory_id
            self._used += 1
        self._said[trajectory_id] = cells
        ROW.pack_into(self._buffer, row * ROW.size, *cells)

    def drop(self, trajectory_id: str) -> None:
        """The trajectory is not open any more."""
        row = self._rows.pop(trajectory_id, None)
        if row is not None:
            del self._said[trajectory_id]
            self._cells[row, RULE] = DEAD

    def live(self) -> Live:
        """All open trajectories."""
        cells = self._cells[: self._used]
        rows = np.flatnonzero(cells[:, RULE] != DEAD)
        columns = columns_of(cells, rows)
        return Live(
            rows=rows,
            tokens=columns[TOKENS],
            context_tokens=columns[CONTEXT],
            tool_s=columns[TOOL_S],
            engine_number=columns[ENGINE].astype(np.int64),
            rule=columns[RULE],
            tags_number=columns[TAGS].astype(np.int64),
            begun=columns[BEGUN] > 0.0,
            log_sigma=columns[LOG_SIGMA],
            room_tokens=columns[ROOM],
        )

    def row(self, trajectory_id: str) -> int:
        """The row of a trajectory; -1 where it has none."""
        return self._rows.get(trajectory_id, -1)

    def _renumber(self) -> None:
        """Room for more: the dead leave, and where few were dead there are twice as many rows."""
        rows = np.array(list(self._rows.values()), np.int64)
        size = len(self._cells) * (2 if 2 * len(rows) > len(self._cells) else 1)
        cells, names = np.zeros((size, ROW.size // 8)), np.empty(size, np.object_)
        cells[: len(rows)], names[: len(rows)] = self._cells[rows], self.names[rows]
        self._cells, self._buffer, self.names, self._used = cells, cells.data, names, len(rows)
        self._rows = {trajectory_id: row for row, trajectory_id in enumerate(self._rows)}
        self.layout += 1


def warm_up() -> None:
    """Compiles the kernel, or loads it."""
    Worksheet().live()
