"""Plans: when to request one from the placement service, and where each trajectory should be by the
plan in force."""

from collections.abc import Iterable

import numpy as np

from treadle_core.actions import AskPlan
from treadle_core.compiled import Flags, Indexes
from treadle_core.events import PlanArrived
from treadle_core.model import CostModel, TrajectoryRecord
from treadle_core.placing import paths
from treadle_core.placing.question import PlanWork
from treadle_core.planning.snapshot import Snapshot, Snapshots, choose_placement
from treadle_core.tables.engines import EngineTable
from treadle_core.tables.trajectories import TrajectoryTable
from treadle_core.tuning import Tuning

# A plan is due at once when this share of the open trajectories is new or first predicted since the
# last one.
NEW_SHARE = 0.5


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
        self._snapshots = Snapshots(engines, table.columns)
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
        engine_of = np.full(len(question.work), -1)
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
