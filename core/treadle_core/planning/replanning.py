"""Re-planning by solving again: the partition of REMAINING work, judged before it is followed (reference: 15-20% better
than scaling ranks).

A plan is never trusted on its own word: it is followed only where, by the core's own cost model and over samples of
what could come of the predictions (`scenarios.py`), it beats the present placement by a margin. What moves besides
passes the cost gate (`cost_gate.py`): tool time left, bytes over bandwidth, saving.

Who has not begun goes where that does the least harm if its length was guessed wrong.

A plan sorts by predicted length, which it must for the long ones: they run with few beside them. For the others it is
one optimum of many, as a group's time is made of sums, and a brittle one: a trajectory that is guessed short is put
in line with hundreds of its like on one engine, and if it is long after all it begins late and ends last. So the
engines whose longest trajectory could be some times as long without being the last are one pool, and those that have
not begun are dealt over it, longest first, each to the engine that would be done first. Sums stay as they were
planned, nearly, and as many as possible begin at once.

Re-planning as Heddle 5.3 prints it: the initial plan's group sizes, scaled to those that are still active.

The initial plan gives s_i trajectories to worker i, longest first, of n in all. Whenever a trajectory's prediction is
updated it gets a new rank among the n* that are still open, by predicted remaining tokens, longest first; worker i
takes s_i * n* / n of the ranks, in the plan's order, and where the rank's worker is not the trajectory's own, it
migrates. Nothing is weighed: no cost, no saving, no rest between moves; one move at a time is all that holds it back.
A trajectory is ranked by its last prediction, also while it samples: that is what the rule says.

Ranks are exact: one sorted list, an update is two binary searches and two moves of memory within it (3 microseconds
with 6,400 trajectories, and the memory moved would not matter below some 100,000)."""

from bisect import bisect_left, bisect_right, insort
from collections.abc import Sequence
from functools import cached_property

import numpy as np

from treadle_core.compiled import compiled, inlined
from treadle_core.placing import balance, scenarios
from treadle_core.placing.question import PlanWork
from treadle_core.placing.scenarios import Fate
from treadle_core.placing.workload import ranked
from treadle_core.placing.worksheet import Flags, Floats, Indexes
from treadle_core.planning.picture import Picture
from treadle_core.refusals import CoreError
from treadle_core.tuning import Tuning


@compiled
def pool(engines: Floats, work: Floats, placement: Indexes, makespan_s: float, slack: float) -> Flags:
    """The engines whose longest trajectory, were it `slack` times as long, would still end within the makespan."""
    longest_s = np.zeros(len(engines))
    for index in range(len(work)):
        at = placement[index]
        if at >= 0:
            longest_s[at] = max(longest_s[at], work[index, 0] * engines[at, 0] + work[index, 2])
    return longest_s * slack <= makespan_s


@compiled
def dealt(engines: Floats, work: Floats, placement: Indexes, free: Flags, order: Indexes, pooled: Flags) -> Indexes:
    """The placement with the free trajectories of the pool's engines dealt out again; `order`: the free ones, longest
    first."""
    pool = np.flatnonzero(pooled)
    result = placement.copy()
    if len(pool) < 2:
        return result
    at_of = np.full(len(engines), -1)
    at_of[pool] = np.arange(len(pool))
    speeds = speeds_of(engines[pool])
    tokens, kv = np.zeros(len(pool)), np.zeros(len(pool))
    for index in range(len(work)):
        at = placement[index]
        if at >= 0 and at_of[at] >= 0 and not free[index]:
            tokens[at_of[at]] += work[index, 0]
            kv[at_of[at]] += work[index, 1]
    load_s = np.empty(len(pool))
    for index in order:
        at = placement[index]
        if at < 0 or at_of[at] < 0:
            continue
        loads(speeds, tokens, kv, work[index, 0], work[index, 1], load_s)
        best = 0
        for other in range(1, len(pool)):
            if load_s[other] < load_s[best]:
                best = other
        result[index] = pool[best]
        tokens[best] += work[index, 0]
        kv[best] += work[index, 1]
    return result


@compiled
def speeds_of(engines: Floats) -> Floats:
    """What `loads` reads, a column an engine, so that all are tried at once: seconds of steps a token where slots bind
    and a KV token where KV binds, then seconds a token and a KV token on top."""
    speeds = np.empty((4, len(engines)))
    speeds[0] = engines[:, 0] / engines[:, 3]
    speeds[1] = engines[:, 0] / engines[:, 4]
    speeds[2] = engines[:, 1]
    speeds[3] = engines[:, 2]
    return speeds


@inlined
def loads(speeds: Floats, tokens: Floats, kv: Floats, more_tokens: float, more_kv: float, load_s: Floats) -> None:
    """Writes the seconds of work of each engine with so much more, whatever its longest takes."""
    for at in range(len(load_s)):
        own_tokens, own_kv = tokens[at] + more_tokens, kv[at] + more_kv
        by_slots, by_kv = speeds[0, at] * own_tokens, speeds[1, at] * own_kv
        steps_s = by_slots if by_slots > by_kv else by_kv
        load_s[at] = steps_s + speeds[2, at] * own_tokens + speeds[3, at] * own_kv


def warm_up() -> None:
    """Compiles the kernels, or loads them."""
    engines, work, free = np.ones((2, 6)), np.ones((2, 3)), np.ones(2, np.bool_)
    placement = np.zeros(2, np.int64)
    dealt(engines, work, placement, free, np.arange(2), pool(engines, work, placement, 9.0, 1.0))


class Judged:
    """What became of a plan: where each trajectory should be, and what each move is worth in seconds."""

    def __init__(self, placement: Indexes, share_s: float) -> None:
        self.placement = placement
        self.share_s = share_s


def judged(picture: Picture, planned: Indexes, movable: Flags, tuning: Tuning) -> Judged:
    """Where each trajectory should be: of some placements the one with the least mean makespan over samples.

    They are: where all are; the same with those that have not begun where the plan wants them, as they have no KV to
    move; and the plan itself, its groups renamed so that most stays, or, where no plan came, a plain rebalance. Where
    some have not begun, each also with those pooled (`py`). What moves KV must beat what does not by
    `tuning.plan_margin`. Trajectories whose engine is not usable stay out of it. Where nothing can be done sooner all
    stay.
    """
    engines, work, staying = picture.roster.table.rows, picture.work, picture.placement
    movable = movable & (staying >= 0)
    free = movable & ~picture.live.begun
    choice = Choice(picture, tuning, free)
    if choice.fate.least:
        return Judged(staying, 0.0)
    present = np.where(free & (planned >= 0), planned, staying)
    planned = np.where(movable & (planned >= 0), planned, present)
    if np.array_equal(planned, staying):  # no plan came
        other = balance.rebalanced(engines, work, staying, tuning.rebalance_margin, movable)
    else:
        context_tokens, kinds = picture.live.context_tokens, picture.roster.table.kinds
        other = balance.relabelled(planned, present, context_tokens, movable, kinds)
    choice.consider(present, 0.0)
    choice.consider(other, tuning.plan_margin)
    moves = int(np.count_nonzero((choice.best != staying) & ~free))
    return Judged(choice.best, max(0.0, choice.before_s - choice.fate.mean_makespan_s) / moves if moves else 0.0)


class Choice:
    """The best placement so far. A placement that cannot be better than the best is not judged (`scenarios.Fate`), and
    nobody is dealt out where that cannot help: most plans change nothing that is last."""

    def __init__(self, picture: Picture, tuning: Tuning, free: Flags) -> None:
        self._picture = picture
        self._tuning = tuning
        self._free = free
        self._waiting = np.flatnonzero(free)
        self._engines, self._work = picture.roster.table.rows, picture.work
        self.best = picture.placement
        self.fate = self._fate(self.best)
        self.before_s = self.fate.mean_makespan_s

    @cached_property
    def _order(self) -> Indexes:
        """Those that have not begun, longest first."""
        waiting = self._waiting
        work = self._work[waiting]
        return waiting[ranked(work[:, balance.TOKENS], work[:, balance.KV], self._free[waiting])[0]]

    def consider(self, placement: Indexes, margin: float) -> None:
        """Takes a placement, or the same with those pooled who have not begun, where it is better by the margin."""
        fate = self._tried(placement, margin)
        if not len(self._waiting):
            return
        makespan_s = float(balance.finish_times(self._engines, self._work, placement).max())
        pooled = pool(self._engines, self._work, placement, makespan_s, self._tuning.pool_slack)
        if (pooled & fate.critical)[placement[self._waiting]].any():
            self._tried(dealt(self._engines, self._work, placement, self._free, self._order, pooled), margin)

    def _tried(self, placement: Indexes, margin: float) -> Fate:
        """What becomes of a placement, which is the best now if it is better; that of the best where it cannot be."""
        if not self.fate.critical[self.best[placement != self.best]].any():
            return self.fate
        fate = self._fate(placement)
        if fate.mean_makespan_s < self.fate.mean_makespan_s * (1.0 - margin):
            self.best, self.fate = placement, fate
        return fate

    def _fate(self, placement: Indexes) -> Fate:
        return scenarios.fate(self._engines, self._picture.samples, placement)


class InvalidSizesError(CoreError):
    """Group sizes that cannot be scaled: a negative one, or as many as engines they are not."""


class Ranks:
    """Trajectories by length, longest first; equal ones in the order of their coming."""

    def __init__(self) -> None:
        self._keys: list[tuple[float, int]] = []
        self._key_of: dict[str, tuple[float, int]] = {}
        self._came = 0

    def __len__(self) -> int:
        return len(self._keys)

    def put(self, trajectory_id: str, length: float) -> None:
        """A trajectory has come, or has another length."""
        old = self._key_of.get(trajectory_id)
        if old is None:
            key = (-length, self._came)
            self._came += 1
        else:
            key = (-length, old[1])
            if key == old:
                return
            del self._keys[bisect_left(self._keys, old)]
        self._key_of[trajectory_id] = key
        insort(self._keys, key)

    def drop(self, trajectory_id: str) -> None:
        """A trajectory has left; unknown ones are fine."""
        key = self._key_of.pop(trajectory_id, None)
        if key is not None:
            del self._keys[bisect_left(self._keys, key)]

    def rank(self, trajectory_id: str) -> int:
        """Its place, 0 for the longest; -1 where it is not here."""
        key = self._key_of.get(trajectory_id)
        return -1 if key is None else bisect_left(self._keys, key)


class Scaled:
    """The groups of a plan in the order of ranks, to be scaled. Raises InvalidSizesError."""

    def __init__(self, engine_ids: Sequence[str], sizes: Sequence[int]) -> None:
        if len(sizes) != len(engine_ids):
            raise InvalidSizesError("sizes", f"{len(sizes)} sizes for {len(engine_ids)} engines")
        if any(size < 0 for size in sizes):
            raise InvalidSizesError("sizes", f"must be >= 0, are {list(sizes)}")
        self.engine_ids = tuple(engine_ids)
        self._ends = np.cumsum(np.array(sizes, np.int64)).tolist() if sizes else []

    def engine(self, rank: int, active: int) -> str:
        """The engine of a rank among `active`; empty where the plan had nobody. Groups end at S_i * n* / n, S_i the
        sum of the first i sizes: the first that ends behind the rank has it."""
        planned = self._ends[-1] if self._ends else 0
        if planned == 0 or not 0 <= rank < active:
            return ""
        # rank < S_i * n* / n, in whole numbers.
        return self.engine_ids[bisect_right(self._ends, rank * planned // active)]


def scaled(work: PlanWork, engine_ids: Sequence[str], engine_of: Indexes) -> Scaled:
    """The groups of a plan: `engine_of` gives each trajectory of the question its engine's index, -1 for none.

    Groups are contiguous in length, so the longest and then the shortest of each put them in order.
    """
    placed = engine_of >= 0
    lengths, at = work.remaining_tokens[placed], engine_of[placed]
    count = len(engine_ids)
    sizes = np.bincount(at, minlength=count)
    longest, shortest = np.zeros(count), np.full(count, np.inf)
    np.maximum.at(longest, at, lengths)
    np.minimum.at(shortest, at, lengths)
    order = [int(index) for index in np.lexsort((np.arange(count), -shortest, -longest)) if sizes[index]]
    return Scaled([engine_ids[index] for index in order], [int(sizes[index]) for index in order])
