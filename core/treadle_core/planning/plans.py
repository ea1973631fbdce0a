"""Plans: when to ask for one, and where each trajectory should be according to the one in force.

Owns the plan in force of each replanning rule. A trajectory is replanned by the rule of the policy it was opened under
(`model.Replanning`): `resolving.py` or `rank_scaling.py`. Everything that speaks of all trajectories works on the
columns of the worksheet: a question, its answer and the judgement of it take about as long as sorting the trajectories
does.

When a plan is asked for: enough has changed, none is under way, and not too often.

Owns the counts since the last question. Two kinds of change: what was known has moved on (a step done, a trajectory
closed), which is asked about every so many events and no more often than `plan_interval_s`; and something new is known
(a trajectory opened, its first prediction came), which makes the last plan one for another population. As soon as half
of what is known is new, a plan is due at once; less than that is due at the next tick."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np

from treadle_core.actions import AskPlan
from treadle_core.events import PlanArrived
from treadle_core.model import PlacementRule, Replanning, TrajectoryRecord
from treadle_core.placing import balance
from treadle_core.placing.costs import CostModel
from treadle_core.placing.question import PlanWork
from treadle_core.placing.worksheet import Flags, Indexes
from treadle_core.planning import replanning
from treadle_core.planning import replanning as rank_scaling
from treadle_core.planning.picture import Picture, Pictures
from treadle_core.planning.replanning import Ranks, Scaled
from treadle_core.planning.siting import carries_tags
from treadle_core.ranking.remaining import remaining_tokens
from treadle_core.tables.engines import EngineRegistry
from treadle_core.tables.trajectories import RULE_NUMBERS, TrajectoryTable
from treadle_core.tuning import Tuning

# A plan made before this share of the present trajectories was known is a plan for others.
NEW_SHARE = 0.5


class PlanTiming:
    """Counts for one replanning rule. `follows_work`: whether work done makes a new plan due, or news alone."""

    def __init__(self, tuning: Tuning, follows_work: bool) -> None:
        self._tuning = tuning
        self._follows_work = follows_work
        self.noted = False  # whether anything was noted since the last question
        self._done = 0
        self._news = 0
        self._asked_s: float | None = None
        self._last_asked_s = float("-inf")

    def note_work(self) -> None:
        """Remaining work became less."""
        if self._follows_work:
            self._done += 1
            self.noted = True

    def note_news(self, count: int = 1) -> None:
        """Something is known that was not."""
        self._news += count
        self.noted = True

    def asked(self, now: float) -> None:
        """The question is out."""
        self.nothing_to_ask()
        self._asked_s = self._last_asked_s = now

    def answered(self) -> None:
        """And its answer is here."""
        self._asked_s = None

    def nothing_to_ask(self) -> None:
        """It was due, but there is nothing to choose."""
        self._done = self._news = 0
        self.noted = False

    def due(self, now: float, open_count: int, ticked: bool) -> bool:
        """Whether to ask now, with so many open trajectories; `ticked`: at a tick."""
        if not self.noted:
            return False
        tuning = self._tuning
        renewed = self._news >= max(1.0, NEW_SHARE * open_count)
        if self._asked_s is not None and now - self._asked_s < tuning.plan_timeout_s:
            return ticked and renewed
        if renewed:
            return True
        if not self._follows_work:
            return False
        if ticked and self._news:
            return True
        # Of few trajectories each event changes much, and at the tail engines fall idle; of many it changes little.
        few, many = min(tuning.plan_every_events, open_count // 2), open_count // tuning.plan_trajectories_per_event
        return self._done + self._news >= max(few, many, 1) and now - self._last_asked_s >= tuning.plan_interval_s


# The cost model that each rule's plans are made by, unless the tuning names one.
COST_MODELS = {Replanning.RESOLVE: CostModel.LINEAR_INTEGRAL, Replanning.RANK_SCALING: CostModel.GROUP_SIZE}


@dataclass(frozen=True)
class Question:
    """A plan that was asked for, its rows numbered in this layout of the worksheet."""

    ask: AskPlan
    layout: int


@dataclass
class Course:
    """One rule's plan: the question that is out, the engines that trajectories should go to, and for those whose KV
    moves with them the seconds that it saves."""

    rule: Replanning
    timing: PlanTiming
    question: Question | None = None
    targets: dict[str, str] = field(default_factory=dict)
    savings_s: dict[str, float] = field(default_factory=dict)


class Planner:
    """Asks for plans, judges them, and knows where each trajectory should be."""

    def __init__(self, engines: EngineRegistry, table: TrajectoryTable, tuning: Tuning) -> None:
        self._engines = engines
        self._table = table
        self._tuning = tuning
        self._pictures = Pictures(engines, table.worksheet)
        self._plan_id = 0
        self._resolved = Course(Replanning.RESOLVE, PlanTiming(tuning, follows_work=True))
        self._scaled = Course(Replanning.RANK_SCALING, PlanTiming(tuning, follows_work=False))
        self._ranks = Ranks()
        self._groups = Scaled((), ())

    # What happens to trajectories and engines.

    def opened(self, record: TrajectoryRecord) -> None:
        """A trajectory has come."""
        self._course(record).timing.note_news()
        if _ranked(record):
            self._ranks.put(record.trajectory_id, remaining_tokens(record, self._tuning))

    def stepped(self, record: TrajectoryRecord) -> None:
        """A step of it is done."""
        self._course(record).timing.note_work()

    def predicted(self, record: TrajectoryRecord, first: bool) -> None:
        """Its prediction is updated; `first`: it had none."""
        course = self._course(record)
        if first:
            course.timing.note_news()
        if not _ranked(record):
            return
        self._ranks.put(record.trajectory_id, remaining_tokens(record, self._tuning))
        rank = self._ranks.rank(record.trajectory_id)
        target = self._engines.get(self._groups.engine(rank, len(self._ranks)))
        if target is None or target.spec.engine_id == record.engine_id or not carries_tags(target, record):
            course.targets.pop(record.trajectory_id, None)
        else:
            course.targets[record.trajectory_id] = target.spec.engine_id

    def closed(self, record: TrajectoryRecord) -> None:
        """It has left."""
        self.settle(record)
        self._ranks.drop(record.trajectory_id)
        self._course(record).timing.note_work()

    def settle(self, record: TrajectoryRecord) -> None:
        """It has moved, or failed to: the plan has no wish for it any more."""
        self._course(record).targets.pop(record.trajectory_id, None)

    def restore(self, records: Iterable[TrajectoryRecord]) -> None:
        """These are open, from an earlier run."""
        for record in records:
            self.opened(record)

    def note_engines(self) -> None:
        """The engines have changed: the plans in force are void and new ones due."""
        self._groups = Scaled((), ())
        for course in (self._resolved, self._scaled):
            course.targets.clear()
            course.timing.note_news(max(self._tuning.plan_every_events, self._table.open_count()))

    # Plans.

    def target(self, record: TrajectoryRecord) -> str:
        """Where the plan in force wants a trajectory; empty where it says nothing."""
        return self._course(record).targets.get(record.trajectory_id, "")

    def wishes(self) -> Iterator[str]:
        """Those for which `target` names an engine."""
        yield from self._resolved.targets
        yield from self._scaled.targets

    def ask(self, now: float, *, ticked: bool = False) -> AskPlan | None:
        """The question, where one is due and there is a choice to make."""
        for course in (self._resolved, self._scaled):
            if course.timing.noted and course.timing.due(now, self._table.open_count(), ticked):
                question = self._question(course.rule)
                if question is None:
                    course.timing.nothing_to_ask()
                else:
                    course.timing.asked(now)
                    course.question = question
                    return question.ask
        return None

    def arrived(self, event: PlanArrived) -> list[str]:
        """Takes a plan over, as far as its rule does; names the trajectories that should move.

        A plan that is not the last one asked for is ignored: its engines or lengths may be gone.
        """
        for course in (self._resolved, self._scaled):
            question = course.question
            if question is not None and question.ask.plan_id == event.plan_id:
                course.question = None
                course.timing.answered()
                return self._follow(course, question, event)
        return []

    def saving_s(self, record: TrajectoryRecord) -> float:
        """Seconds that the move which the plan wants is worth: its share of what the plan saves, or what it saves the
        two engines by itself, when the plan was made."""
        return self._course(record).savings_s.get(record.trajectory_id, 0.0)

    def _course(self, record: TrajectoryRecord) -> Course:
        return self._resolved if record.policy.replanning is Replanning.RESOLVE else self._scaled

    def _question(self, replanning: Replanning) -> Question | None:
        picture = self._pictures.now()
        if len(picture.roster.specs) < 2:
            return None
        chosen = np.flatnonzero(picture.movable(RULE_NUMBERS[replanning]))
        if not len(chosen):
            return None
        live, worksheet = picture.live, self._table.worksheet
        which = slice(None) if len(chosen) == len(live) else chosen
        work = PlanWork(
            names=worksheet.names,
            rows=live.rows[which],
            remaining_tokens=picture.lengths[which],
            context_tokens=live.context_tokens[which],
            current=picture.placement[which],
            log_sigma=live.log_sigma[which],
            room_tokens=picture.room_tokens[which],
        )
        self._plan_id += 1
        cost_model = self._tuning.plan_cost_model or COST_MODELS[replanning]
        ask = AskPlan(self._plan_id, work, picture.roster.plan_engines, cost_model)
        return Question(ask, worksheet.layout)

    def _follow(self, course: Course, question: Question, event: PlanArrived) -> list[str]:
        picture = self._pictures.now()
        movable = picture.movable(RULE_NUMBERS[course.rule])
        engine_of = self._engine_of(question, event)
        planned = self._planned(picture, question, engine_of, movable)
        if course.rule is Replanning.RANK_SCALING:
            engine_ids = [engine.engine_id for engine in question.ask.engines]
            self._groups = rank_scaling.scaled(question.ask.work, engine_ids, engine_of)
            return self._wished(course, picture, planned, np.flatnonzero(planned != picture.placement))
        verdict = replanning.judged(picture, planned, movable, self._tuning)
        moved = np.flatnonzero((verdict.placement != picture.placement) & (verdict.placement >= 0))
        savings_s = np.maximum(
            verdict.share_s,
            balance.savings_s(
                picture.roster.table.rows, picture.work, picture.placement, moved, verdict.placement[moved]
            ),
        )
        begun = picture.live.begun[moved]
        worth = savings_s >= self._tuning.move_gain_factor * self._tuning.move_fixed_s  # or the gate would refuse it
        self._wished(course, picture, verdict.placement, moved[~begun | worth])
        names: list[str] = self._table.worksheet.names[picture.live.rows[moved[begun & worth]]].tolist()
        course.savings_s = dict(zip(names, savings_s[begun & worth].tolist(), strict=True))
        return names

    def _wished(self, course: Course, picture: Picture, placement: Indexes, moved: Indexes) -> list[str]:
        """Notes where the plan wants these, and names them."""
        specs = picture.roster.specs
        names: list[str] = self._table.worksheet.names[picture.live.rows[moved]].tolist()
        engine_ids = [specs[index].engine_id for index in placement[moved].tolist()]
        course.targets = dict(zip(names, engine_ids, strict=True))
        return names

    def _engine_of(self, question: Question, event: PlanArrived) -> Indexes:
        """For each trajectory of the question the index of its engine there; -1 where the answer says nothing of it."""
        ask = question.ask
        engine_of = np.full(len(ask.work), -1, np.int64)
        if event.engine_of is not None:
            if len(event.engine_of) == len(ask.work):
                engine_of[:] = event.engine_of.indexes
                engine_of[engine_of >= len(ask.engines)] = -1
        elif event.groups:
            place = {trajectory_id: at for at, trajectory_id in enumerate(ask.work.trajectory_ids)}
            index_of = {engine.engine_id: index for index, engine in enumerate(ask.engines)}
            for engine_id, trajectory_ids in event.groups:
                at = [place[trajectory_id] for trajectory_id in trajectory_ids if trajectory_id in place]
                engine_of[np.array(at, np.int64)] = index_of.get(engine_id, -1)
        return engine_of

    def _planned(self, picture: Picture, question: Question, engine_of: Indexes, movable: Flags) -> Indexes:
        """The plan as a placement of the trajectories and engines that are here now."""
        worksheet, roster = self._table.worksheet, picture.roster
        rows = question.ask.work.rows
        if worksheet.layout != question.layout:
            rows = np.array([worksheet.row(name) for name in question.ask.work.trajectory_ids], np.int64)
        here = np.array([roster.index_of.get(engine.engine_id, -1) for engine in question.ask.engines], np.int64)
        wanted = np.full(worksheet.used, -1, np.int64)
        known = (rows >= 0) & (engine_of >= 0)
        wanted[rows[known]] = here[engine_of[known]]
        wanted = wanted[picture.live.rows]
        return np.where(movable & (wanted >= 0), wanted, picture.placement)


def gated(record: TrajectoryRecord) -> bool:
    """Whether a move of the trajectory must be worth its cost, and it rests between moves."""
    return record.policy.replanning is not Replanning.RANK_SCALING


def _ranked(record: TrajectoryRecord) -> bool:
    policy = record.policy
    return (
        policy.replanning is Replanning.RANK_SCALING
        and policy.placement is PlacementRule.PLANNED
        and not record.pinned_engine_id
    )
