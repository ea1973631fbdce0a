"""Plan where each trajectory should run: when to request a plan from the placement service, from
what it is made, and whether it is better than the plan in force.

A `Snapshot` has the engines and open trajectories of one moment; a plan is requested from one and
later judged by another. An engine's index is its place among the usable engines by id; -1 for one
that is not usable. A plan is followed only where it beats the present placement by a margin, by the
mean makespan over samples of what is left (`placing.paths`); moves of KV also pass the cost gate
(`transfers`). Solving again for the work that is left was 15-20% better than scaling ranks.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from treadle_core.actions import AskPlan
from treadle_core.compiled import Flags, Floats, Indexes, compiled
from treadle_core.events import PlanArrived
from treadle_core.model import CostModel, DecodeCurve, TrajectoryRecord
from treadle_core.placing import paths
from treadle_core.placing.candidates import best_placement, judge
from treadle_core.placing.question import PlanEngine, PlanWork, slowest_curve
from treadle_core.tables import trajectories as of
from treadle_core.tables.engines import EngineTable
from treadle_core.tables.trajectories import LiveColumns, TrajectoryTable
from treadle_core.tuning import Tuning

# A plan is due at once when this share of the open trajectories is new or first predicted since the
# last one.
NEW_SHARE = 0.5


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

    def __init__(self, engines: EngineTable, table: TrajectoryTable) -> None:
        self._engines = engines
        self._table = table
        self._roster: Roster | None = None
        self._made_for = (-1, -1, -1)

    def take(self) -> Snapshot:
        columns = self._table.columns
        live = read_columns(columns)
        made_for = (self._engines.membership, len(columns.engines), len(columns.tags))
        if self._roster is None or made_for != self._made_for:
            self._roster, self._made_for = self._make_roster(columns), made_for
        return Snapshot(live, self._roster)

    def _make_roster(self, columns: LiveColumns) -> Roster:
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
                [index_of.get(name, -1) for name in columns.engines], np.int64
            ),
            here=np.array([name in self._engines for name in columns.engines], np.bool_),
            carried=np.array([everywhere.issuperset(each) for each in columns.tags], np.bool_),
        )


def warm_up() -> None:
    """Compile all kernels of re-planning, or load them: the first plan must not wait for a
    compiler."""
    read_columns(LiveColumns())
    engines = paths.engine_rows([PlanEngine(name, 1, 0, 1, DecodeCurve()) for name in "ab"])
    ones, placement = np.ones(2), np.zeros(2, np.int64)
    started = np.array([True, False])
    factors = paths.sample_factors(placement, ones, ones, ones)
    work = paths.work_of(ones, ones, ones, ones, started, started, placement, factors)
    best_placement(engines, placement, work, work, placement)
    paths.makespans_s(engines, work, placement)
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
    reading = paths.reading_order(engines, snapshot.samples)
    best, best_s = staying, judge(engines, snapshot.samples, staying, reading)
    for candidate, margin in (
        (np.where(free, planned, staying), 0.0),
        (planned, tuning.plan_margin),
    ):
        candidate_s = judge(engines, snapshot.samples, candidate, reading)
        if paths.is_better(candidate_s, best_s, margin):
            best, best_s = candidate, candidate_s
    moves = int(np.count_nonzero((best != staying) & ~free))
    if not moves:
        return best, 0.0
    before_s, after_s = (
        paths.makespans_s(engines, snapshot.samples, each) for each in (staying, best)
    )
    return best, float((before_s - after_s).mean()) / moves


class PlanTiming:
    """Timing of requests for a plan, by counts since the last request.

    Finished steps and closed trajectories (work) make a plan due every so many events, at most
    every `plan_interval_s`. New trajectories and first predictions (news) change the population
    that the last plan was made for: from NEW_SHARE of the open trajectories on a plan is due at
    once, with fewer at the next tick.
    """

    def __init__(self, tuning: Tuning) -> None:
        self._tuning = tuning
        self.work = 0
        self.news = 0
        self._asked_s: float | None = None
        self._last_asked_s = float("-inf")

    def note_work(self) -> None:
        self.work += 1

    def note_news(self, count: int = 1) -> None:
        self.news += count

    def note_question(self, now: float) -> None:
        self.reset()
        self._asked_s = self._last_asked_s = now

    def note_answer(self) -> None:
        self._asked_s = None

    def reset(self) -> None:
        self.work = self.news = 0

    def is_renewed(self, open_count: int) -> bool:
        """Return whether the last plan was made for another population."""
        return self.news >= max(1.0, NEW_SHARE * open_count)

    def awaits_answer(self, now: float) -> bool:
        """Return whether a request is out whose answer may still come."""
        return self._asked_s is not None and now - self._asked_s < self._tuning.plan_timeout_s

    def is_due(self, now: float, open_count: int, ticked: bool) -> bool:
        """Return whether to request a plan now, with `open_count` open trajectories. ticked: at a
        tick."""
        tuning = self._tuning
        renewed = self.is_renewed(open_count)
        if self.awaits_answer(now):
            return ticked and renewed
        if renewed:
            return True
        if ticked and self.news:
            return True
        # With few trajectories each event changes much, and at the tail engines fall idle; with
        # many it changes little.
        few, many = (
            min(tuning.plan_every_events, open_count // 2),
            open_count // tuning.plan_trajectories_per_event,
        )
        return (
            self.work + self.news >= max(few, many, 1)
            and now - self._last_asked_s >= tuning.plan_interval_s
        )


class Planner:
    """Planner that requests plans, judges the answers, and knows where each trajectory should be.

    Questions, answers and their judgement work on the live columns, so each takes about as long as
    sorting the trajectories.
    """

    cost_model = CostModel.CRITICAL_PATH
    must_gain = True
    """Whether a move must save more than it costs, and its trajectory rests between moves."""

    def __init__(self, engines: EngineTable, table: TrajectoryTable, tuning: Tuning) -> None:
        self._engines = engines
        self._table = table
        self._tuning = tuning
        self._snapshots = Snapshots(engines, table)
        self._plan_id = 0
        self._timing = PlanTiming(tuning)
        self._question: AskPlan | None = None  # that is out
        # engines that trajectories should go to, by the plan in force
        self._targets: dict[str, str] = {}
        self._savings_s: dict[str, float] = {}  # what a move of KV saves

    def note_opening(self, record: TrajectoryRecord) -> None:
        self._timing.note_news()

    def note_step(self) -> None:
        self._timing.note_work()

    def note_first_prediction(self) -> None:
        self._timing.note_news()

    def follow_prediction(self, record: TrajectoryRecord) -> None:
        """Decide where a trajectory should be when its prediction has changed. This planner waits
        for the next plan."""

    def note_closing(self, record: TrajectoryRecord) -> None:
        self.drop_target(record)
        self._timing.note_work()

    def drop_target(self, record: TrajectoryRecord) -> None:
        """Let the trajectory stay where it is until the next plan, as it has moved or could not."""
        self._targets.pop(record.trajectory_id, None)

    def restore(self, records: Iterable[TrajectoryRecord]) -> None:
        """Take over the open trajectories of an earlier run."""
        for record in records:
            self.note_opening(record)

    def note_engines(self) -> None:
        """Drop the plan in force, as the engines have changed; a new one is due."""
        self._targets.clear()
        self._timing.note_news(max(self._tuning.plan_every_events, self._table.open_count()))

    def target(self, record: TrajectoryRecord) -> str:
        """Return the id of the engine where the plan in force wants a trajectory; empty for
        none."""
        return self._targets.get(record.trajectory_id, "")

    def targeted(self) -> Iterable[str]:
        """Return the ids of the trajectories for which `target` names an engine."""
        return self._targets

    def ask(self, now: float, *, ticked: bool = False) -> AskPlan | None:
        """Return the request for a plan, if one is due and there is a choice to make."""
        timing = self._timing
        if not (timing.work or timing.news):
            return None
        if not timing.is_due(now, self._table.open_count(), ticked):
            return None
        question = self._make_question()
        if question is None:
            timing.reset()
            return None
        timing.note_question(now)
        self._question = question
        return question

    def take_plan(self, event: PlanArrived) -> list[str]:
        """Judge a plan and follow it; returns the ids of the trajectories whose KV should move.

        Only the answer to the last question counts: the engines of an older one may be gone.
        """
        question = self._question
        if question is None or question.plan_id != event.plan_id:
            return []
        self._question = None
        self._timing.note_answer()
        snapshot = self._snapshots.take()
        engine_of = np.full(len(question.work.rows), -1)
        if event.engine_of is not None and len(event.engine_of) == len(
            engine_of
        ):  # else of a run before a restart
            engine_of = np.where(event.engine_of < len(question.engines), event.engine_of, -1)
        return self._follow(snapshot, question, engine_of)

    def saving_s(self, record: TrajectoryRecord) -> float:
        """Return the seconds that the move to `target` saved when the plan was made: its share of
        what the plan saves, or what it saves its two engines alone, whichever is more."""
        return self._savings_s.get(record.trajectory_id, 0.0)

    def _make_question(self) -> AskPlan | None:
        snapshot = self._snapshots.take()
        if len(snapshot.roster.plan_engines) < 2:
            return None
        chosen = np.flatnonzero(snapshot.movable())
        if not len(chosen):
            return None
        live, columns = snapshot.live, self._table.columns
        which = slice(None) if len(chosen) == len(live) else chosen
        work = PlanWork(
            names=columns.ids,
            rows=live.rows[which],
            remaining_tokens=live.tokens[which],
            context_tokens=live.context_tokens[which],
            current=snapshot.placement[which],
            log_sigma=live.log_sigma[which],
            room_tokens=live.room_tokens[which],
            observed_tokens=live.observed_tokens[which],
            tool_s=live.tool_s[which],
            started=live.started[which],
            read=live.read[which],
            prompts=snapshot.prompts[which],
        )
        self._plan_id += 1
        return AskPlan(self._plan_id, work, snapshot.roster.plan_engines, self.cost_model)

    def _follow(self, snapshot: Snapshot, question: AskPlan, engine_of: Indexes) -> list[str]:
        """Follow an answer that is better than the present placement. engine_of: index of each
        trajectory's engine, -1 for none."""
        movable = snapshot.movable()
        if (engine_of >= 0).any():
            planned = self._place_answer(snapshot, question, engine_of, movable)
        else:  # no placement service answers
            planned = snapshot.plan()
        placement, share_s = choose_placement(snapshot, planned, movable, self._tuning)
        moved = np.flatnonzero((placement != snapshot.placement) & (placement >= 0))
        savings_s = np.maximum(
            share_s,
            paths.savings_s(
                snapshot.roster.rows, snapshot.medians, snapshot.placement, moved, placement[moved]
            ),
        )
        started = snapshot.live.started[moved]
        # Any other would not pass the cost gate.
        worth = savings_s >= self._tuning.move_gain_factor * self._tuning.move_fixed_s
        self._set_targets(snapshot, placement, moved[~started | worth])
        names: list[str] = self._table.columns.ids[
            snapshot.live.rows[moved[started & worth]]
        ].tolist()
        self._savings_s = dict(zip(names, savings_s[started & worth].tolist(), strict=True))
        return names

    def _set_targets(self, snapshot: Snapshot, placement: Indexes, moved: Indexes) -> list[str]:
        """Store where the plan wants these trajectories; returns their ids."""
        engines = snapshot.roster.plan_engines
        names: list[str] = self._table.columns.ids[snapshot.live.rows[moved]].tolist()
        engine_ids = [engines[index].engine_id for index in placement[moved].tolist()]
        self._targets = dict(zip(names, engine_ids, strict=True))
        return names

    def _place_answer(
        self, snapshot: Snapshot, question: AskPlan, engine_of: Indexes, movable: Flags
    ) -> Indexes:
        """Return the answer as a placement of the present trajectories on the present engines."""
        columns, roster = self._table.columns, snapshot.roster
        rows = question.work.rows
        if columns.ids is not question.work.names:  # the rows have new numbers
            rows = np.array([columns.row(name) for name in question.work.trajectory_ids], np.int64)
        here = np.array(
            [roster.index_of.get(engine.engine_id, -1) for engine in question.engines], np.int64
        )
        wanted = np.full(columns.used, -1, np.int64)
        known = (rows >= 0) & (engine_of >= 0)
        wanted[rows[known]] = here[engine_of[known]]
        wanted = wanted[snapshot.live.rows]
        return np.where(movable & (wanted >= 0), wanted, snapshot.placement)
