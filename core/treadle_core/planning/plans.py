"""Plans: when to ask the placement service for one, and where each trajectory should be by the plan in force."""

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, chain

import numpy as np

from treadle_core.actions import AskPlan
from treadle_core.compiled import Flags, Indexes
from treadle_core.events import PlanArrived
from treadle_core.model import CostModel, PlacementRule, Replanning, TrajectoryRecord
from treadle_core.placing import paths
from treadle_core.placing.question import PlanWork
from treadle_core.planning.snapshot import Snapshot, Snapshots, choose_placement
from treadle_core.ranking.priorities import remaining_tokens
from treadle_core.tables.engines import EngineTable, carries_tags
from treadle_core.tables.trajectories import RULE_NUMBERS, TrajectoryTable
from treadle_core.tuning import Tuning

# A plan is due at once when this share of the open trajectories is new or first predicted since the last one.
NEW_SHARE = 0.5


class PlanTiming:
    """When to ask for a plan under one re-planning rule, by counts since the last question.

    Finished steps and closed trajectories (work) make one due every so many events, at most every `plan_interval_s`,
    where the rule follows work. New trajectories and first predictions (news) make the last plan one for another
    population: from NEW_SHARE of the open trajectories on a plan is due at once, with fewer at the next tick.
    """

    def __init__(self, tuning: Tuning, follows_work: bool) -> None:
        self._tuning = tuning
        self._follows_work = follows_work
        self.work = 0
        self.news = 0
        self._asked_s: float | None = None
        self._last_asked_s = float("-inf")

    def note_work(self) -> None:
        if self._follows_work:
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

    def is_due(self, now: float, open_count: int, ticked: bool) -> bool:
        """Whether to ask now, with so many open trajectories. ticked: at a tick."""
        tuning = self._tuning
        renewed = self.news >= max(1.0, NEW_SHARE * open_count)
        if self._asked_s is not None and now - self._asked_s < tuning.plan_timeout_s:
            return ticked and renewed
        if renewed:
            return True
        if not self._follows_work:
            return False
        if ticked and self.news:
            return True
        # With few trajectories each event changes much, and at the tail engines fall idle; with many it changes little.
        few, many = min(tuning.plan_every_events, open_count // 2), open_count // tuning.plan_trajectories_per_event
        return self.work + self.news >= max(few, many, 1) and now - self._last_asked_s >= tuning.plan_interval_s


class Ranks:
    """Trajectories by length, longest first; equal ones in the order of arrival.

    One sorted list: an update is two binary searches and two moves of memory within it, 3 microseconds with 6,400
    trajectories; the moves would matter above some 100,000.
    """

    def __init__(self) -> None:
        self._keys: list[tuple[float, int]] = []
        self._key_of: dict[str, tuple[float, int]] = {}
        self._arrivals = 0

    def __len__(self) -> int:
        return len(self._keys)

    def put(self, trajectory_id: str, length: float) -> None:
        """Add a trajectory, or change its length."""
        old = self._key_of.get(trajectory_id)
        if old is None:
            self._arrivals += 1
            key = (-length, self._arrivals)
        else:
            key = (-length, old[1])
            del self._keys[bisect_left(self._keys, old)]
        self._key_of[trajectory_id] = key
        insort(self._keys, key)

    def drop(self, trajectory_id: str) -> None:
        """Remove a trajectory, if it is here."""
        key = self._key_of.pop(trajectory_id, None)
        if key is not None:
            del self._keys[bisect_left(self._keys, key)]

    def rank(self, trajectory_id: str) -> int:
        """The rank of a trajectory, 0 for the longest; -1 where it is not here."""
        key = self._key_of.get(trajectory_id)
        return -1 if key is None else bisect_left(self._keys, key)


class ScaledGroups:
    """Re-planning as Heddle 5.3 prints it: the group sizes of the first plan, scaled to the open trajectories.

    That plan gives s_i of n trajectories to engine i, longest first. Whenever a prediction changes, also while a step
    runs, the trajectory gets a new rank among the n* open ones by predicted remaining tokens; engine i takes
    s_i * n* / n of the ranks, in the plan's order, and a trajectory on another engine than that of its rank migrates.
    No cost, gain or rest between moves is weighed; a trajectory has one move at a time.
    """

    def __init__(self, engine_ids: Sequence[str], sizes: Sequence[int]) -> None:
        self.engine_ids = tuple(engine_ids)
        self._ends = list(accumulate(sizes))

    def engine(self, rank: int, active: int) -> str:
        """The engine of a rank among `active` trajectories: the first whose group ends behind it. Groups end at
        S_i * n* / n, S_i the sum of the first i sizes. Empty where the plan placed no trajectory."""
        planned = self._ends[-1] if self._ends else 0
        if planned == 0 or not 0 <= rank < active:
            return ""
        # rank < S_i * n* / n, in whole numbers.
        return self.engine_ids[bisect_right(self._ends, rank * planned // active)]


def scale_groups(work: PlanWork, engine_ids: Sequence[str], engine_of: Indexes) -> ScaledGroups:
    """The groups of a plan, in the order of ranks. engine_of: index of each trajectory's engine, -1 for none.

    Groups are contiguous in length, so the longest and then the shortest trajectory of each put them in order.
    """
    placed = engine_of >= 0
    lengths, at = work.remaining_tokens[placed], engine_of[placed]
    count = len(engine_ids)
    sizes = np.bincount(at, minlength=count)
    longest, shortest = np.zeros(count), np.full(count, np.inf)
    np.maximum.at(longest, at, lengths)
    np.minimum.at(shortest, at, lengths)
    order = [int(index) for index in np.lexsort((np.arange(count), -shortest, -longest)) if sizes[index]]
    return ScaledGroups([engine_ids[index] for index in order], [int(sizes[index]) for index in order])


# The cost model of each rule's plans.
COST_MODELS = {Replanning.RESOLVE: CostModel.CRITICAL_PATH, Replanning.RANK_SCALING: CostModel.GROUP_SIZE}


@dataclass
class Course:
    """The plan in force of one rule: the question that is out, the engines that trajectories should go to, and the
    seconds that a move of KV saves."""

    rule: Replanning
    timing: PlanTiming
    question: AskPlan | None = None
    targets: dict[str, str] = field(default_factory=dict)
    savings_s: dict[str, float] = field(default_factory=dict)


class Planner:
    """Asks for plans, judges the answers, and knows where each trajectory should be.

    A trajectory is re-planned by the rule of the policy under which it was opened. Questions, answers and their
    judgement work on the live columns, so each takes about as long as sorting the trajectories.
    """

    def __init__(self, engines: EngineTable, table: TrajectoryTable, tuning: Tuning) -> None:
        self._engines = engines
        self._table = table
        self._tuning = tuning
        self._snapshots = Snapshots(engines, table.columns)
        self._plan_id = 0
        self._resolve = Course(Replanning.RESOLVE, PlanTiming(tuning, follows_work=True))
        self._scaling = Course(Replanning.RANK_SCALING, PlanTiming(tuning, follows_work=False))
        self._ranks = Ranks()
        self._groups = ScaledGroups((), ())

    def note_opening(self, record: TrajectoryRecord) -> None:
        self._course(record).timing.note_news()
        if _ranked(record):
            self._ranks.put(record.trajectory_id, remaining_tokens(record, self._tuning))

    def note_step(self, record: TrajectoryRecord) -> None:
        self._course(record).timing.note_work()

    def note_first_prediction(self, record: TrajectoryRecord) -> None:
        self._course(record).timing.note_news()

    def rank_again(self, record: TrajectoryRecord) -> None:
        """Find the engine of a trajectory's new rank, where it moves by rank, as its prediction has changed."""
        if not _ranked(record):
            return
        course = self._course(record)
        self._ranks.put(record.trajectory_id, remaining_tokens(record, self._tuning))
        rank = self._ranks.rank(record.trajectory_id)
        target = self._engines.get(self._groups.engine(rank, len(self._ranks)))
        if target is None or target.spec.engine_id == record.engine_id or not carries_tags(target, record):
            course.targets.pop(record.trajectory_id, None)
        else:
            course.targets[record.trajectory_id] = target.spec.engine_id

    def note_closing(self, record: TrajectoryRecord) -> None:
        self.drop_target(record)
        self._ranks.drop(record.trajectory_id)
        self._course(record).timing.note_work()

    def drop_target(self, record: TrajectoryRecord) -> None:
        """Let the trajectory stay where it is until the next plan, as it has moved or could not."""
        self._course(record).targets.pop(record.trajectory_id, None)

    def restore(self, records: Iterable[TrajectoryRecord]) -> None:
        """Take over the open trajectories of an earlier run."""
        for record in records:
            self.note_opening(record)

    def note_engines(self) -> None:
        """Drop the plans in force, as the engines have changed; new ones are due."""
        self._groups = ScaledGroups((), ())
        for course in (self._resolve, self._scaling):
            course.targets.clear()
            course.timing.note_news(max(self._tuning.plan_every_events, self._table.open_count()))

    def target(self, record: TrajectoryRecord) -> str:
        """Id of the engine where the plan in force wants a trajectory; empty for none."""
        return self._course(record).targets.get(record.trajectory_id, "")

    def targeted(self) -> Iterable[str]:
        """Ids of the trajectories for which `target` names an engine."""
        return chain(self._resolve.targets, self._scaling.targets)

    def ask(self, now: float, *, ticked: bool = False) -> AskPlan | None:
        """The question for a plan, where one is due and there is a choice to make."""
        for course in (self._resolve, self._scaling):
            timing = course.timing
            if (timing.work or timing.news) and timing.is_due(now, self._table.open_count(), ticked):
                question = self._question(course.rule)
                if question is not None:
                    timing.note_question(now)
                    course.question = question
                    return question
                timing.reset()
        return None

    def take_plan(self, event: PlanArrived) -> list[str]:
        """Judge a plan and follow it; returns the ids of the trajectories whose KV should move.

        Only the answer to the last question counts: the engines of an older one may be gone.
        """
        for course in (self._resolve, self._scaling):
            question = course.question
            if question is not None and question.plan_id == event.plan_id:
                course.question = None
                course.timing.note_answer()
                return self._follow(course, question, event)
        return []

    def saving_s(self, record: TrajectoryRecord) -> float:
        """Seconds that the move to `target` saved when the plan was made: its share of what the plan saves, or what it
        saves its two engines alone, whichever is more."""
        return self._course(record).savings_s.get(record.trajectory_id, 0.0)

    def _course(self, record: TrajectoryRecord) -> Course:
        return self._resolve if record.policy.replanning is Replanning.RESOLVE else self._scaling

    def _question(self, replanning: Replanning) -> AskPlan | None:
        snapshot = self._snapshots.take()
        if len(snapshot.roster.plan_engines) < 2:
            return None
        chosen = np.flatnonzero(snapshot.movable(RULE_NUMBERS[replanning]))
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
        return AskPlan(self._plan_id, work, snapshot.roster.plan_engines, COST_MODELS[replanning])

    def _follow(self, course: Course, question: AskPlan, event: PlanArrived) -> list[str]:
        snapshot = self._snapshots.take()
        movable = snapshot.movable(RULE_NUMBERS[course.rule])
        engine_of = np.full(len(question.work), -1)
        if event.engine_of is not None and len(event.engine_of) == len(engine_of):  # else of a run before a restart
            engine_of = np.where(event.engine_of < len(question.engines), event.engine_of, -1)
        if (engine_of >= 0).any() or course.rule is Replanning.RANK_SCALING:
            planned = self._place_answer(snapshot, question, engine_of, movable)
        else:  # no placement service answers
            planned = snapshot.plan()
        if course.rule is Replanning.RANK_SCALING:
            engine_ids = [engine.engine_id for engine in question.engines]
            self._groups = scale_groups(question.work, engine_ids, engine_of)
            return self._set_targets(course, snapshot, planned, np.flatnonzero(planned != snapshot.placement))
        placement, share_s = choose_placement(snapshot, planned, movable, self._tuning)
        moved = np.flatnonzero((placement != snapshot.placement) & (placement >= 0))
        savings_s = np.maximum(
            share_s,
            paths.savings_s(snapshot.roster.rows, snapshot.medians, snapshot.placement, moved, placement[moved]),
        )
        started = snapshot.live.started[moved]
        # Any other would not pass the cost gate.
        worth = savings_s >= self._tuning.move_gain_factor * self._tuning.move_fixed_s
        self._set_targets(course, snapshot, placement, moved[~started | worth])
        names: list[str] = self._table.columns.ids[snapshot.live.rows[moved[started & worth]]].tolist()
        course.savings_s = dict(zip(names, savings_s[started & worth].tolist(), strict=True))
        return names

    def _set_targets(self, course: Course, snapshot: Snapshot, placement: Indexes, moved: Indexes) -> list[str]:
        """Store where the plan wants these trajectories; returns their ids."""
        engines = snapshot.roster.plan_engines
        names: list[str] = self._table.columns.ids[snapshot.live.rows[moved]].tolist()
        engine_ids = [engines[index].engine_id for index in placement[moved].tolist()]
        course.targets = dict(zip(names, engine_ids, strict=True))
        return names

    def _place_answer(self, snapshot: Snapshot, question: AskPlan, engine_of: Indexes, movable: Flags) -> Indexes:
        """The answer as a placement of the present trajectories on the present engines."""
        columns, roster = self._table.columns, snapshot.roster
        rows = question.work.rows
        if columns.ids is not question.work.names:  # the rows have new numbers
            rows = np.array([columns.row(name) for name in question.work.trajectory_ids], np.int64)
        here = np.array([roster.index_of.get(engine.engine_id, -1) for engine in question.engines], np.int64)
        wanted = np.full(columns.used, -1, np.int64)
        known = (rows >= 0) & (engine_of >= 0)
        wanted[rows[known]] = here[engine_of[known]]
        wanted = wanted[snapshot.live.rows]
        return np.where(movable & (wanted >= 0), wanted, snapshot.placement)


def must_gain(record: TrajectoryRecord) -> bool:
    """Whether a move of the trajectory must save more than it costs, and the trajectory rests between moves."""
    return record.policy.replanning is not Replanning.RANK_SCALING


def _ranked(record: TrajectoryRecord) -> bool:
    policy = record.policy
    return (
        policy.replanning is Replanning.RANK_SCALING
        and policy.placement is PlacementRule.PLANNED
        and not record.pinned_engine_id
    )
