"""Re-planning as Heddle 5.3 prints it, to compare Treadle with it: a planner for the controller of a simulation.

The first plan, by group sizes, is followed as it is. Whenever a prediction changes, also while a step runs, the
trajectory gets a new rank among the open ones by predicted remaining tokens. The groups of the plan are scaled to them,
and a trajectory on another engine than that of its rank migrates. The rule weighs no cost, gain or rest between moves;
a trajectory has one move at a time. All trajectories of the controller are planned in this way.
"""

from bisect import bisect_left, bisect_right, insort
from collections.abc import Sequence
from itertools import accumulate

import numpy as np
from treadle_core.actions import AskPlan
from treadle_core.compiled import Indexes
from treadle_core.model import CostModel, PlacementRule, TrajectoryRecord
from treadle_core.placing.question import PlanWork
from treadle_core.planning.plans import Planner, PlanTiming
from treadle_core.planning.snapshot import Snapshot
from treadle_core.ranking.priorities import remaining_tokens
from treadle_core.tables.engines import EngineTable, carries_tags
from treadle_core.tables.trajectories import TrajectoryTable
from treadle_core.tuning import Tuning


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
    """Group sizes of a plan, scaled to the open trajectories.

    The plan gives s_i of n trajectories to engine i, longest first. Of the ranks of n* open ones, engine i takes
    s_i * n* / n, in the plan's order.
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


class NewsTiming(PlanTiming):
    """When to ask for a plan: where many trajectories are new, and never because of finished work."""

    def note_work(self) -> None:
        """Count nothing."""

    def is_due(self, now: float, open_count: int, ticked: bool) -> bool:
        """Return whether to ask now, with so many open trajectories. ticked: at a tick."""
        return self.is_renewed(open_count) and (ticked or not self.awaits_answer(now))


class RankScaling(Planner):
    """Planner that follows Heddle's printed rule."""

    cost_model = CostModel.GROUP_SIZE
    must_gain = False

    def __init__(self, engines: EngineTable, table: TrajectoryTable, tuning: Tuning) -> None:
        super().__init__(engines, table, tuning)
        self._timing = NewsTiming(tuning)
        self._ranks = Ranks()
        self._groups = ScaledGroups((), ())

    def note_opening(self, record: TrajectoryRecord) -> None:
        super().note_opening(record)
        if _is_ranked(record):
            self._ranks.put(record.trajectory_id, remaining_tokens(record, self._tuning))

    def follow_prediction(self, record: TrajectoryRecord) -> None:
        if not _is_ranked(record):
            return
        self._ranks.put(record.trajectory_id, remaining_tokens(record, self._tuning))
        rank = self._ranks.rank(record.trajectory_id)
        target = self._engines.get(self._groups.engine(rank, len(self._ranks)))
        if target is None or target.spec.engine_id == record.engine_id or not carries_tags(target, record):
            self._targets.pop(record.trajectory_id, None)
        else:
            self._targets[record.trajectory_id] = target.spec.engine_id

    def note_closing(self, record: TrajectoryRecord) -> None:
        super().note_closing(record)
        self._ranks.drop(record.trajectory_id)

    def note_engines(self) -> None:
        super().note_engines()
        self._groups = ScaledGroups((), ())

    def _follow(self, snapshot: Snapshot, question: AskPlan, engine_of: Indexes) -> list[str]:
        planned = self._place_answer(snapshot, question, engine_of, snapshot.movable())
        engine_ids = [engine.engine_id for engine in question.engines]
        self._groups = scale_groups(question.work, engine_ids, engine_of)
        moved = np.flatnonzero(planned != snapshot.placement)
        return self._set_targets(snapshot, planned, moved)


def _is_ranked(record: TrajectoryRecord) -> bool:
    return record.policy.placement is PlacementRule.PLANNED and not record.pinned_engine_id
