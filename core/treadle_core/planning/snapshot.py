"""Snapshot of engines and open trajectories at one moment, from which a plan is requested and later
judged.

A plan is followed only where it beats the present placement by a margin, by the mean makespan over
samples of what is left (`placing.paths`); moves of KV also pass the cost gate (`steps.transfers`).
Solving again for the work that is left was 15-20% better than scaling ranks.

An engine's index is its place among the usable engines by id; -1 for one that is not usable.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from treadle_core.compiled import Flags, Floats, Indexes, compiled
from treadle_core.model import DecodeCurve
from treadle_core.placing import paths
from treadle_core.placing.candidates import best_placement, judge
from treadle_core.placing.question import PlanEngine, slowest_curve
from treadle_core.tables import trajectories as of
from treadle_core.tables.engines import EngineTable
from treadle_core.tables.trajectories import LiveColumns
from treadle_core.tuning import Tuning


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
    """Return some rows, column by column, in a third of the time that numpy takes."""
    columns = np.empty((cells.shape[1], len(rows)))
    for index in range(len(rows)):
        row = rows[index]
        for column in range(cells.shape[1]):
            columns[column, index] = cells[row, column]
    return columns


def read_columns(live: LiveColumns) -> Columns:
    """Copy the live columns."""
    cells = live.cells
    rows = np.flatnonzero(cells[:, of.MOVABLE] != of.CLOSED)
    columns = gather(cells, rows)
    return Columns(
        rows=rows,
        tokens=columns[of.TOKENS],
        context_tokens=columns[of.CONTEXT],
        tool_s=columns[of.TOOL_S],
        engine_number=columns[of.ENGINE].astype(np.int64),
        planned=columns[of.MOVABLE] == of.PLANNED,
        tags_number=columns[of.TAGS].astype(np.int64),
        started=columns[of.STARTED] > 0.0,
        read=columns[of.READ] > 0.0,
        log_sigma=columns[of.LOG_SIGMA],
        room_tokens=columns[of.ROOM],
        observed_tokens=columns[of.OBSERVED],
        prompt_number=columns[of.PROMPT],
    )


@dataclass(frozen=True)
class Roster:
    """Usable engines by id, and what the numbers in the live columns mean for them.

    rows: as `paths` reads them; kinds: a number that equal engines share. index_of_number: engine
    number -> index; here: engine number -> whether it holds a lease; carried: number of a set of
    tags -> whether every engine carries all of them.
    """

    plan_engines: tuple[PlanEngine, ...]
    rows: Floats
    kinds: Indexes
    index_of: dict[str, int]
    index_of_number: Indexes
    here: Flags
    carried: Flags


@dataclass(frozen=True)
class Snapshot:
    """Snapshot of open trajectories, as columns, and of the engines at one moment."""

    live: Columns
    roster: Roster

    @cached_property
    def placement(self) -> Indexes:
        """Return the index of each trajectory's engine."""
        return self.roster.index_of_number[self.live.engine_number]

    @cached_property
    def prompts(self) -> Indexes:
        """Return a number of each trajectory's prompt, from 0."""
        return np.unique(self.live.prompt_number, return_inverse=True)[1].astype(np.int64)

    @cached_property
    def samples(self) -> paths.Work:
        """Return the samples of the work that is left."""
        live = self.live
        return self._work(
            paths.sample_factors(live.rows, live.log_sigma, live.tokens, live.room_tokens)
        )

    @cached_property
    def medians(self) -> paths.Work:
        """Return the work that is left by the medians."""
        return self._work(None)

    def plan(self) -> Indexes:
        """Return the best placement of all trajectories, as the placement service would find it."""
        roster = self.roster
        return best_placement(roster.rows, roster.kinds, self.samples, self.medians, self.placement)

    def _work(self, factors: Floats | None) -> paths.Work:
        live = self.live
        amounts = (live.tokens, live.context_tokens, live.observed_tokens, live.tool_s)
        return paths.work_of(*amounts, live.started, live.read, self.prompts, factors)

    def movable(self) -> Flags:
        """Return the trajectories that a plan may place elsewhere: all engines may run them, and
        they have one."""
        live, roster = self.live, self.roster
        movable: Flags = (
            live.planned & roster.here[live.engine_number] & roster.carried[live.tags_number]
        )
        return movable


class Snapshots:
    """Maker of snapshots, which keeps the roster until the engines change."""

    def __init__(self, engines: EngineTable, columns: LiveColumns) -> None:
        self._engines = engines
        self._columns = columns
        self._roster: Roster | None = None
        self._made_for = (-1, -1, -1)

    def take(self) -> Snapshot:
        live = read_columns(self._columns)
        made_for = (self._engines.membership, len(self._columns.engines), len(self._columns.tags))
        if self._roster is None or made_for != self._made_for:
            self._roster, self._made_for = self._make_roster(), made_for
        return Snapshot(live, self._roster)

    def _make_roster(self) -> Roster:
        all_tags = [set(engine.spec.hardware_tags) for engine in self._engines]
        everywhere = set.intersection(*all_tags) if all_tags else set()
        specs = [engine.spec for engine in self._engines if engine.usable]
        # Beside measured engines, an engine that is not measured yet must not look like a fast one.
        known = [spec.decode_curve for spec in specs if spec.decode_curve != DecodeCurve()]
        curve_of = {DecodeCurve(): slowest_curve(known)} if known else {}
        engines = tuple(
            PlanEngine(
                *(spec.engine_id, spec.slot_limit, spec.kv_tokens_capacity, spec.tensor_parallel),
                curve_of.get(spec.decode_curve, spec.decode_curve),
            )
            for spec in specs
        )
        index_of = {engine.engine_id: index for index, engine in enumerate(engines)}
        return Roster(
            plan_engines=engines,
            rows=paths.engine_rows(engines),
            kinds=paths.kinds_of(engines),
            index_of=index_of,
            index_of_number=np.array(
                [index_of.get(name, -1) for name in self._columns.engines], np.int64
            ),
            here=np.array([name in self._engines for name in self._columns.engines], np.bool_),
            carried=np.array(
                [everywhere.issuperset(each) for each in self._columns.tags], np.bool_
            ),
        )


def warm_up() -> None:
    """Compile all kernels of re-planning, or load them: the first plan must not wait for a
    compiler."""
    read_columns(LiveColumns())
    engines = paths.engine_rows([PlanEngine(name, 1, 0, 1, DecodeCurve()) for name in "ab"])
    ones, placement = np.ones(2), np.zeros(2, np.int64)
    started = np.array([True, False])
    work = paths.work_of(ones, ones, ones, ones, started, started, placement)
    best_placement(engines, placement, work, work, placement)
    paths.savings_s(engines, work, placement, placement[:1], placement[:1] + 1)


def choose_placement(
    snapshot: Snapshot, planned: Indexes, movable: Flags, tuning: Tuning
) -> tuple[Indexes, float]:
    """Return the best placement by the mean over samples, and the seconds of the makespan that each
    of its moves of KV saves.

    It tries the present placement; the present one with trajectories that have not started where
    the plan wants them, as they have no KV to move; the plan. A placement that moves KV must beat
    one that does not by `tuning.plan_margin`. Trajectories on an engine that is not usable are left
    out.
    """
    engines, staying = snapshot.roster.rows, snapshot.placement
    free = movable & (staying >= 0) & ~snapshot.live.started
    planned = np.where(movable & (staying >= 0), planned, staying)
    if not (planned != staying).any():
        return staying, 0.0
    best, best_s = staying, judge(engines, snapshot.samples, staying)
    for candidate, margin in (
        (np.where(free, planned, staying), 0.0),
        (planned, tuning.plan_margin),
    ):
        candidate_s = judge(engines, snapshot.samples, candidate)
        if paths.is_better(candidate_s, best_s, margin):
            best, best_s = candidate, candidate_s
    moves = int(np.count_nonzero((best != staying) & ~free))
    if not moves:
        return best, 0.0
    before_s, after_s = (
        paths.makespans_s(engines, snapshot.samples, each) for each in (staying, best)
    )
    return best, float((before_s - after_s).mean()) / moves
