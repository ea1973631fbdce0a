"""Live columns: the open trajectories as columns of numbers, so that a plan for thousands of them starts from arrays.

`TrajectoryTable` alone writes them, at each event, one row for each open trajectory; the rows are in the order of
opening. The row of a closed trajectory is never used again and keeps its id: when room runs out, the live rows get new
numbers all at once in a new array of ids. So who holds `ids` and some rows knows whose they are.
"""

import struct
from dataclasses import dataclass

import numpy as np

from treadle_core.compiled import Flags, Floats, Indexes, Names, compiled

FIRST_ROWS = 64

# Columns: tokens left to sample, tokens of context now, seconds of tool calls left, number of the engine, whether
# a plan may move it (PLANNED or NOT_PLANNED), number of its set of hardware tags, 1 where it has started,
# standard deviation of ln(tokens left), tokens that the cap leaves (inf without one), tokens of tools' answers left,
# number of the prompt, 1 where its engine has prefilled its context.
TOKENS, CONTEXT, TOOL_S, ENGINE, MOVABLE, TAGS, STARTED, LOG_SIGMA, ROOM, OBSERVED, PROMPT, READ = range(12)
ROW = struct.Struct("12d")

PLANNED, NOT_PLANNED = 1.0, 0.0
CLOSED = -1.0  # in MOVABLE

Row = tuple[float, ...]  # a number for each column


@dataclass(frozen=True)
class Columns:
    """Copies of the live columns at one moment, in the order of opening."""

    rows: Indexes
    tokens: Floats
    context_tokens: Floats
    tool_s: Floats
    engine_number: Indexes
    planned: Flags
    tags_number: Indexes
    started: Flags
    read: Flags
    log_sigma: Floats
    room_tokens: Floats
    observed_tokens: Floats
    prompt_number: Floats

    def __len__(self) -> int:
        return len(self.rows)


@compiled
def gather(cells: Floats, rows: Indexes) -> Floats:
    """Some rows, column by column, in a third of the time that numpy takes."""
    columns = np.empty((cells.shape[1], len(rows)))
    for index in range(len(rows)):
        row = rows[index]
        for column in range(cells.shape[1]):
            columns[column, index] = cells[row, column]
    return columns


class LiveColumns:
    """The rows of all open trajectories."""

    def __init__(self) -> None:
        self.engines: dict[str, int] = {}  # numbers of engine ids: 0, 1, ... as they were first seen
        self.tags: dict[tuple[str, ...], int] = {}  # numbers of sets of hardware tags
        self.ids: Names = np.empty(FIRST_ROWS, np.object_)
        self.used = 0  # rows, those of closed trajectories included
        self._cells = np.zeros((FIRST_ROWS, ROW.size // 8))
        self._buffer = self._cells.data
        self._rows: dict[str, int] = {}
        self._written: dict[str, Row] = {}

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def cells(self) -> Floats:
        """All used rows, to be read only."""
        return self._cells[: self.used]

    def put(self, trajectory_id: str, cells: Row) -> None:
        """Write the row of an open trajectory."""
        if self._written.get(trajectory_id) == cells:
            return
        row = self._rows.get(trajectory_id)
        if row is None:
            if self.used == len(self._cells):
                self._renumber()
            row = self._rows[trajectory_id] = self.used
            self.ids[row] = trajectory_id
            self.used += 1
        self._written[trajectory_id] = cells
        ROW.pack_into(self._buffer, row * ROW.size, *cells)

    def drop(self, trajectory_id: str) -> None:
        """Remove a trajectory, if it is here."""
        row = self._rows.pop(trajectory_id, None)
        if row is not None:
            del self._written[trajectory_id]
            self._cells[row, MOVABLE] = CLOSED

    def read(self) -> Columns:
        """Copy the columns."""
        cells = self.cells
        rows = np.flatnonzero(cells[:, MOVABLE] != CLOSED)
        columns = gather(cells, rows)
        return Columns(
            rows=rows,
            tokens=columns[TOKENS],
            context_tokens=columns[CONTEXT],
            tool_s=columns[TOOL_S],
            engine_number=columns[ENGINE].astype(np.int64),
            planned=columns[MOVABLE] == PLANNED,
            tags_number=columns[TAGS].astype(np.int64),
            started=columns[STARTED] > 0.0,
            read=columns[READ] > 0.0,
            log_sigma=columns[LOG_SIGMA],
            room_tokens=columns[ROOM],
            observed_tokens=columns[OBSERVED],
            prompt_number=columns[PROMPT],
        )

    def row(self, trajectory_id: str) -> int:
        """The row of an open trajectory; -1 for any other."""
        return self._rows.get(trajectory_id, -1)

    def _renumber(self) -> None:
        """Make room: drop the rows of closed trajectories; where that frees less than half, double the rows."""
        rows = np.array(list(self._rows.values()), np.int64)
        size = len(self._cells) * (2 if 2 * len(rows) > len(self._cells) else 1)
        cells, ids = np.zeros((size, ROW.size // 8)), np.empty(size, np.object_)
        cells[: len(rows)], ids[: len(rows)] = self._cells[rows], self.ids[rows]
        self._cells, self._buffer, self.ids, self.used = cells, cells.data, ids, len(rows)
        self._rows = {trajectory_id: row for row, trajectory_id in enumerate(self._rows)}
