"""Table of trajectories, with sums for each engine that placement and admission read, and columns
that plans read.

It owns every TrajectoryRecord, the sums (`Tally`) and the live columns, which equal what a walk
over the open records would give: only `put` and `forget` write. It collects the ids of watched
trajectories whose record has changed.
"""

import struct
import zlib
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np

from treadle_core.compiled import Floats, Names
from treadle_core.model import EngineSpec, PlacementRule, Prediction, TicketStatus, TrajectoryRecord
from treadle_core.ranking.priorities import (
    log_sigma,
    remaining_observed_tokens,
    remaining_tokens,
    remaining_tool_s,
    room_tokens,
)
from treadle_core.refusals import TrajectoryNotFound
from treadle_core.tuning import Tuning

FIRST_ROWS = 64

# Columns: tokens left to sample, tokens of context now, seconds of tool calls left, number of the
# engine, whether a plan may move it (PLANNED or NOT_PLANNED), number of its set of hardware tags, 1
# where it has started, standard deviation of ln(tokens left), tokens that the cap leaves (inf
# without one), tokens of tools' answers left, number of the prompt (two prompts share one once in
# billions, which costs a plan a little accuracy), 1 where its engine has prefilled its context.
TOKENS, CONTEXT, TOOL_S, ENGINE, MOVABLE, TAGS, STARTED, LOG_SIGMA, ROOM, OBSERVED, PROMPT, READ = (
    range(12)
)
ROW = struct.Struct("12d")

PLANNED, NOT_PLANNED = 1.0, 0.0
CLOSED = -1.0  # in MOVABLE

Row = tuple[float, ...]  # a number for each column


@dataclass(slots=True)
class Tally:
    """Sums over the open trajectories of one engine: their number, how many have started, the KV
    tokens reserved for those, predicted tokens left. live: priorities of the live tickets, rising.
    prompts: those in the reserved tokens, each once for all of its samples, with its tokens and how
    many samples there are. jobs: `trajectories`, `live` and what is reserved of each job by its
    name; empty where only one has had trajectories since the table was empty."""

    trajectories: int = 0
    started: int = 0
    kv_reserve_tokens: int = 0
    tokens: float = 0.0
    live: list[float] = field(default_factory=list)
    prompts: dict[str, tuple[int, int]] = field(default_factory=dict)
    jobs: dict[str, "Tally"] = field(default_factory=dict)

    @property
    def live_tickets(self) -> int:
        return len(self.live)

    @property
    def uses_engine(self) -> bool:
        """Return whether a ticket is live or KV is reserved."""
        return bool(self.live or self.kv_reserve_tokens)

    def change_live(self, old: float | None, new: float | None) -> None:
        """Note the priority of a live ticket, instead of the old one; None for no live ticket."""
        if old != new:
            if old is not None:
                del self.live[bisect_left(self.live, old)]
            if new is not None:
                insort(self.live, new)

    def has_room(self, record: TrajectoryRecord, kv_tokens: int, spec: EngineSpec) -> bool:
        """Return whether the engine can reserve `kv_tokens` for a trajectory that is elsewhere or
        has not started; it always can for its first one."""
        capacity = spec.kv_room_tokens
        if record.prompt_id in self.prompts:
            kv_tokens -= record.prompt_tokens
        return not capacity or not self.started or self.kv_reserve_tokens + kv_tokens <= capacity

    def add(self, counted: "_Counted") -> None:
        """Count a trajectory, its live ticket and what is reserved for it."""
        self.trajectories += 1
        self.change_live(None, counted.live)
        self.reserve(*counted.prompt, counted.reserve)

    def remove(self, counted: "_Counted") -> None:
        """Undo `add`."""
        self.trajectories -= 1
        self.change_live(counted.live, None)
        self.release(*counted.prompt, counted.reserve)

    def reserve(self, prompt_id: str, prompt_tokens: int, kv_tokens: int) -> None:
        """Reserve KV tokens, the prompt's included, for one more trajectory; 0 for none."""
        if kv_tokens:
            shared, samples = self.prompts.get(prompt_id, (prompt_tokens, 0))
            self.prompts[prompt_id] = (shared, samples + 1)
            self.kv_reserve_tokens += kv_tokens - prompt_tokens + (0 if samples else shared)

    def release(self, prompt_id: str, prompt_tokens: int, kv_tokens: int) -> None:
        """Undo `reserve` with the same figures."""
        if kv_tokens:
            shared, samples = self.prompts.pop(prompt_id)
            if samples > 1:
                self.prompts[prompt_id] = (shared, samples - 1)
            self.kv_reserve_tokens -= kv_tokens - prompt_tokens + (0 if samples > 1 else shared)


NOTHING = Tally()  # of an engine without trajectories; never written


class LiveColumns:
    """Open trajectories as columns of numbers, so that a plan for thousands of them starts from
    arrays.

    `TrajectoryTable` alone writes them, one row for each open trajectory; the rows are in the order
    of opening. The row of a closed trajectory is never used again and keeps its
    id: when room runs out, the live rows get new numbers all at once in a new array of ids. So a
    holder of `ids` and some rows knows their trajectories.
    """

    def __init__(self) -> None:
        # numbers of engine ids: 0, 1, ... as they were first seen
        self.engines: dict[str, int] = {}
        self.tags: dict[tuple[str, ...], int] = {}  # numbers of sets of hardware tags
        self.ids: Names = np.empty(FIRST_ROWS, np.object_)
        self.used = 0  # rows, those of closed trajectories included
        self._cells = np.zeros((FIRST_ROWS, ROW.size // 8))
        self._buffer = self._cells.data
        self._rows: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def cells(self) -> Floats:
        """Return all used rows, to be read only."""
        return self._cells[: self.used]

    def put(self, trajectory_id: str, cells: Row) -> None:
        """Write the row of an open trajectory."""
        row = self._rows.get(trajectory_id)
        if row is None:
            if self.used == len(self._cells):
                self._renumber()
            row = self._rows[trajectory_id] = self.used
            self.ids[row] = trajectory_id
            self.used += 1
        ROW.pack_into(self._buffer, row * ROW.size, *cells)

    def drop(self, trajectory_id: str) -> None:
        """Remove a trajectory, if it is here."""
        row = self._rows.pop(trajectory_id, None)
        if row is not None:
            self._cells[row, MOVABLE] = CLOSED

    def row(self, trajectory_id: str) -> int:
        """Return the row of an open trajectory; -1 for any other."""
        return self._rows.get(trajectory_id, -1)

    def _renumber(self) -> None:
        """Make room: drop the rows of closed trajectories; where that frees less than half, double
        the rows."""
        rows = np.array(list(self._rows.values()), np.int64)
        size = len(self._cells) * (2 if 2 * len(rows) > len(self._cells) else 1)
        cells, ids = np.zeros((size, ROW.size // 8)), np.empty(size, np.object_)
        cells[: len(rows)], ids[: len(rows)] = self._cells[rows], self.ids[rows]
        self._cells, self._buffer, self.ids, self.used = cells, cells.data, ids, len(rows)
        self._rows = {trajectory_id: row for row, trajectory_id in enumerate(self._rows)}


@dataclass(slots=True)
class _Counted:
    """Contribution of one open trajectory to the tally of its engine. live: as in `change_live`.
    log_sigma: of its prediction, kept since most changes of a record leave the prediction as it was
    and two logarithms at each are expensive."""

    engine_id: str
    tally: Tally
    job: str
    of_job: Tally | None  # of the tally's `jobs`, where these are kept
    tokens: float
    live: float | None
    started: bool
    reserve: int
    prompt: tuple[str, int]  # its id and tokens
    prediction: Prediction | None = None
    log_sigma: float = 0.0


class TrajectoryTable:
    """Trajectories by id, in the order of opening. open_of_job: how many are open, by the name of
    the job; to be read only."""

    def __init__(self, tuning: Tuning) -> None:
        self._columns = LiveColumns()
        # open trajectories whose row is older than their record, in the order of their changes
        self._changed_rows: dict[str, None] = {}
        self.open_of_job: Counter[str] = Counter()
        self._of_jobs = False  # whether `Tally.jobs` are kept
        self._tuning = tuning
        self._records: dict[str, TrajectoryRecord] = {}
        self._counted: dict[str, _Counted] = {}  # of each open trajectory, in the order of opening
        self._on: dict[str, dict[str, None]] = {}
        self._tallies: dict[str, Tally] = {}
        self._moving: dict[str, None] = {}
        self._watched: set[str] = set()
        self._changed: set[str] = set()

    def __len__(self) -> int:
        return len(self._records)

    def __iter__(self) -> Iterator[TrajectoryRecord]:
        return iter(list(self._records.values()))

    def get(self, trajectory_id: str) -> TrajectoryRecord | None:
        return self._records.get(trajectory_id)

    def require(self, trajectory_id: str) -> TrajectoryRecord:
        """Return the trajectory. Raises TrajectoryNotFound."""
        record = self._records.get(trajectory_id)
        if record is None:
            raise TrajectoryNotFound(
                f"no trajectory {trajectory_id}: never opened here, or closed long ago",
                trajectory_id=trajectory_id,
            )
        return record

    def open_records(self) -> list[TrajectoryRecord]:
        """Return the open trajectories, in the order of opening."""
        return [self._records[trajectory_id] for trajectory_id in self._counted]

    def on(self, engine_id: str) -> list[TrajectoryRecord]:
        """Return the open trajectories of an engine."""
        return [self._records[trajectory_id] for trajectory_id in self._on.get(engine_id, ())]

    def moving(self) -> list[TrajectoryRecord]:
        """Return the trajectories with a move in progress."""
        return [self._records[trajectory_id] for trajectory_id in self._moving]

    def open_count(self) -> int:
        return len(self._counted)

    def tally(self, engine_id: str) -> Tally:
        """Return the sums of an engine, to be read only."""
        return self._tallies.get(engine_id, NOTHING)

    def tallies_of_jobs(self, engine_id: str) -> Mapping[str, Tally]:
        """Return the sums of an engine by the name of the job, without `started` and `tokens`; to
        be read only."""
        tally = self.tally(engine_id)
        return tally.jobs if self._of_jobs else dict.fromkeys(self.open_of_job, tally)

    def watch(self, trajectory_id: str) -> None:
        """Let `take_changed` name the trajectory from now on when its record has changed."""
        self._watched.add(trajectory_id)

    def unwatch(self, trajectory_id: str) -> None:
        self._watched.discard(trajectory_id)
        self._changed.discard(trajectory_id)

    def take_changed(self) -> set[str]:
        """Return the watched trajectories whose record was replaced or removed since the last
        call."""
        changed, self._changed = self._changed, set()
        return changed

    def put(self, record: TrajectoryRecord) -> None:
        """Store the record of a trajectory."""
        trajectory_id = record.trajectory_id
        self._records[trajectory_id] = record
        if trajectory_id in self._watched:
            self._changed.add(trajectory_id)
        if record.move is not None:
            self._moving[trajectory_id] = None
        elif trajectory_id in self._moving:
            del self._moving[trajectory_id]
        if record.is_open:
            self._count(record)
        else:
            self._discount(trajectory_id)

    def forget(self, trajectory_id: str) -> None:
        """Remove a trajectory."""
        if self._records.pop(trajectory_id, None) is not None:
            if trajectory_id in self._watched:
                self._changed.add(trajectory_id)
            self._moving.pop(trajectory_id, None)
            self._discount(trajectory_id)

    def _count(self, record: TrajectoryRecord) -> None:
        trajectory_id, engine_id = record.trajectory_id, record.engine_id
        tokens = remaining_tokens(record, self._tuning)
        ticket = record.ticket
        started = ticket is not None
        live = (
            record.priority if ticket is not None and ticket.status is TicketStatus.LIVE else None
        )
        reserve = ticket.kv_reserve_tokens if ticket is not None else 0
        counted = self._counted.get(trajectory_id)
        if counted is not None and counted.engine_id == engine_id:
            tally = counted.tally
            tally.tokens += tokens - counted.tokens
            tally.started += started - counted.started
            if live != counted.live or reserve != counted.reserve:
                for each in (tally, counted.of_job) if counted.of_job is not None else (tally,):
                    each.change_live(counted.live, live)
                    if reserve != counted.reserve:
                        each.release(*counted.prompt, counted.reserve)
                        each.reserve(*counted.prompt, reserve)
            counted.tokens, counted.live, counted.started, counted.reserve = (
                tokens,
                live,
                started,
                reserve,
            )
        else:
            if counted is not None:
                self._leave(trajectory_id, counted)
            else:
                self.open_of_job[record.job] += 1
            tally = self._tallies.get(engine_id) or self._tallies.setdefault(engine_id, Tally())
            tally.tokens += tokens
            tally.started += started
            prompt = (record.prompt_id, record.prompt_tokens)
            counted = _Counted(
                engine_id, tally, record.job, None, tokens, live, started, reserve, prompt
            )
            tally.add(counted)
            if self._of_jobs:
                self._add_to_job(counted)
            self._counted[trajectory_id] = counted
            if len(self.open_of_job) > 1 and not self._of_jobs:
                self._of_jobs = True
                for other in self._counted.values():
                    self._add_to_job(other)
            self._on.setdefault(engine_id, {})[trajectory_id] = None
        self._changed_rows[trajectory_id] = None

    @property
    def columns(self) -> LiveColumns:
        """Return the open trajectories as columns, to be read only. Rows are written here, since
        there are many changes between two plans."""
        columns = self._columns
        for trajectory_id in self._changed_rows:
            columns.put(trajectory_id, self._make_row(trajectory_id))
        self._changed_rows.clear()
        return columns

    def _make_row(self, trajectory_id: str) -> Row:
        record, counted = self._records[trajectory_id], self._counted[trajectory_id]
        if counted.prediction is not record.prediction:
            counted.prediction, counted.log_sigma = record.prediction, log_sigma(record)
        columns = self._columns
        return (
            counted.tokens,
            record.context_tokens or record.prompt_tokens,
            remaining_tool_s(record),
            columns.engines.setdefault(record.engine_id, len(columns.engines)),
            _planned_number(record),
            columns.tags.setdefault(record.hardware_tags, len(columns.tags)),
            float(counted.started),
            counted.log_sigma,
            room_tokens(record),
            remaining_observed_tokens(record),
            float(zlib.crc32(record.prompt_id.encode("utf-8", "surrogatepass"))),
            float(counted.started and record.finished_step_s is not None),
        )

    def _discount(self, trajectory_id: str) -> None:
        counted = self._counted.pop(trajectory_id, None)
        if counted is not None:
            self._leave(trajectory_id, counted)
            self._columns.drop(trajectory_id)
            self._changed_rows.pop(trajectory_id, None)
            self.open_of_job[counted.job] -= 1
            if not self.open_of_job[counted.job]:
                del self.open_of_job[counted.job]
                self._of_jobs = self._of_jobs and bool(self.open_of_job)

    def _add_to_job(self, counted: _Counted) -> None:
        jobs = counted.tally.jobs
        counted.of_job = jobs.get(counted.job) or jobs.setdefault(counted.job, Tally())
        counted.of_job.add(counted)

    def _leave(self, trajectory_id: str, counted: _Counted) -> None:
        tally = counted.tally
        del self._on[counted.engine_id][trajectory_id]
        tally.tokens -= counted.tokens
        tally.started -= counted.started
        tally.remove(counted)
        if counted.of_job is not None:
            counted.of_job.remove(counted)
            if counted.of_job.trajectories == 0:
                del tally.jobs[counted.job]
        if tally.trajectories == 0:
            del self._tallies[counted.engine_id]  # and with it the rounding of its sums
            del self._on[counted.engine_id]


def _planned_number(record: TrajectoryRecord) -> float:
    """Return the number for whether a plan may move a trajectory: PLANNED or NOT_PLANNED."""
    policy = record.policy
    if policy.placement is not PlacementRule.PLANNED or record.pinned_engine_id:
        return NOT_PLANNED
    if not policy.migrate and record.ticket is not None:
        return NOT_PLANNED
    return PLANNED
