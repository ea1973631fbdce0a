"""Snapshot of engines and open trajectories at one moment: a plan is asked for from one, and judged by another.

A plan is followed only where it beats the present placement by a margin, by the mean makespan over samples of the
predicted lengths (`placing.scenarios`) under the core's own cost model; moves of KV also pass the cost gate
(`steps.transfers`). Solving again for the work that is left was 15-20% better than scaling ranks.

A plan sorts by predicted length, which it must for the long trajectories: these run with few beside them. For the
others it is one optimum of many, since the time of a group is made of sums, and a fragile one: a trajectory that is
predicted short waits with hundreds of its like on one engine, and if it is long after all it starts late and ends last.
So the engines whose longest trajectory could be some times as long without being the last form a pool, and trajectories
that have not started are dealt over the pool, longest first, each to the engine that would finish first. The sums stay
nearly as planned, and as many trajectories as possible start at once.

An engine's index is its place among the usable engines by id; -1 for one that is not usable.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from treadle_core.compiled import Flags, Floats, Indexes, compiled
from treadle_core.model import EngineSpec
from treadle_core.placing import balance, scenarios
from treadle_core.placing.balance import EngineRows
from treadle_core.placing.question import PlanEngine
from treadle_core.placing.workload import rank
from treadle_core.tables.columns import Columns, LiveColumns
from treadle_core.tables.engines import EngineTable
from treadle_core.tuning import Tuning


@dataclass(frozen=True)
class Roster:
    """The usable engines by id, and what the numbers in the live columns mean for them.

    index_of_number: engine number -> index; here: engine number -> whether it holds a lease; carried: number of a set
    of tags -> whether every engine carries all of them.
    """

    specs: tuple[EngineSpec, ...]
    plan_engines: tuple[PlanEngine, ...]
    rows: EngineRows
    index_of: dict[str, int]
    index_of_number: Indexes
    here: Flags
    carried: Flags


@dataclass(frozen=True)
class Snapshot:
    """Open trajectories as columns, and the engines."""

    live: Columns
    roster: Roster

    @cached_property
    def placement(self) -> Indexes:
        """Index of each trajectory's engine."""
        return self.roster.index_of_number[self.live.engine_number]

    @cached_property
    def work(self) -> Floats:
        """What is left of each trajectory, as the kernels of `balance` read it."""
        return balance.work_rows(self.lengths, self.live.context_tokens, self.live.tool_s)

    @cached_property
    def lengths(self) -> Floats:
        """What is left of each in tokens, tool calls as the tokens that an engine samples meanwhile: a trajectory in a
        tool call takes no engine's time but ends as late."""
        base_s = float(self.roster.rows.rows[:, balance.BASE_S].mean()) if len(self.roster.specs) else 0.0
        return self.live.tokens + self.live.tool_s / base_s if base_s > 0.0 else self.live.tokens

    @cached_property
    def room_tokens(self) -> Floats:
        """What each cap leaves, counted as `lengths` is."""
        return self.live.room_tokens + (self.lengths - self.live.tokens)

    @cached_property
    def samples(self) -> scenarios.Samples:
        """Samples of the predicted lengths, tool calls apart."""
        live = self.live
        return scenarios.draw_samples(
            live.rows, live.tokens, live.context_tokens, live.tool_s, live.log_sigma, live.room_tokens
        )

    def movable(self, rule: float) -> Flags:
        """Trajectories that a re-planning rule may place elsewhere: all engines may run them, and they have one."""
        live, roster = self.live, self.roster
        movable: Flags = (live.rule == rule) & roster.here[live.engine_number] & roster.carried[live.tags_number]
        return movable


class Snapshots:
    """Takes snapshots; keeps the roster until the engines change."""

    def __init__(self, engines: EngineTable, columns: LiveColumns) -> None:
        self._engines = engines
        self._columns = columns
        self._roster: Roster | None = None
        self._made_for = (-1, -1, -1)

    def take(self) -> Snapshot:
        live = self._columns.read()
        made_for = (self._engines.membership, len(self._columns.engines), len(self._columns.tags))
        if self._roster is None or made_for != self._made_for:
            self._roster, self._made_for = self._make_roster(), made_for
        return Snapshot(live, self._roster)

    def _make_roster(self) -> Roster:
        all_tags = [set(engine.spec.hardware_tags) for engine in self._engines]
        everywhere = set.intersection(*all_tags) if all_tags else set()
        specs = tuple(engine.spec for engine in self._engines if engine.usable)
        index_of = {spec.engine_id: index for index, spec in enumerate(specs)}
        return Roster(
            specs=specs,
            plan_engines=tuple(
                PlanEngine(
                    spec.engine_id, spec.slot_limit, spec.kv_tokens_capacity, spec.tensor_parallel, spec.decode_curve
                )
                for spec in specs
            ),
            rows=balance.engine_rows(specs),
            index_of=index_of,
            index_of_number=np.array([index_of.get(name, -1) for name in self._columns.engines], np.int64),
            here=np.array([name in self._engines for name in self._columns.engines], np.bool_),
            carried=np.array([everywhere.issuperset(each) for each in self._columns.tags], np.bool_),
        )


@compiled
def find_pool(engines: Floats, work: Floats, placement: Indexes, makespan_s: float, slack: float) -> Flags:
    """The engines whose longest trajectory, were it `slack` times as long, would still end within the makespan."""
    longest_s = np.zeros(len(engines))
    for index in range(len(work)):
        at = placement[index]
        if at >= 0:
            longest_s[at] = max(longest_s[at], work[index, 0] * engines[at, 0] + work[index, 2])
    return longest_s * slack <= makespan_s


@compiled
def deal(engines: Floats, work: Floats, placement: Indexes, free: Flags, order: Indexes, pooled: Flags) -> Indexes:
    """The placement with the free trajectories of the pool's engines dealt again; `order`: the free ones, longest
    first."""
    pool = np.flatnonzero(pooled)
    result = placement.copy()
    if len(pool) < 2:
        return result
    at_of = np.full(len(engines), -1)
    at_of[pool] = np.arange(len(pool))
    rows = engines[pool]
    # Seconds of steps for a token where slots are the bound, and for a KV token where KV is; for either on top.
    by_slots, by_kv = rows[:, 0] / rows[:, 3], rows[:, 0] / rows[:, 4]
    per_token, per_kv = rows[:, 1].copy(), rows[:, 2].copy()
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
        for each in range(len(pool)):  # a loop for the sums alone, so that the compiler takes several at once
            own_tokens, own_kv = tokens[each] + work[index, 0], kv[each] + work[index, 1]
            slots_s, kv_s = by_slots[each] * own_tokens, by_kv[each] * own_kv
            steps_s = slots_s if slots_s > kv_s else kv_s
            load_s[each] = steps_s + per_token[each] * own_tokens + per_kv[each] * own_kv
        best = 0
        for other in range(1, len(pool)):
            if load_s[other] < load_s[best]:
                best = other
        result[index] = pool[best]
        tokens[best] += work[index, 0]
        kv[best] += work[index, 1]
    return result


def warm_up() -> None:
    """Compile all kernels of re-planning, or load them: the first plan must not wait for a compiler."""
    LiveColumns().read()
    engines = balance.engine_rows([EngineSpec("a", ""), EngineSpec("b", "")])
    ones, every, placement = np.ones(2), np.ones(2, np.bool_), np.zeros(2, np.int64)
    work = balance.work_rows(ones, ones, ones)
    scenarios.judge(engines.rows, scenarios.draw_samples(placement, ones, ones, ones, ones, ones), placement)
    balance.relabel(placement, placement, ones, every, engines.kinds)
    balance.savings_s(engines.rows, work, placement, placement[:1], placement[:1] + 1)
    makespan_s = float(balance.finish_times(engines.rows, work, placement).max())
    pooled = find_pool(engines.rows, work, placement, makespan_s, 1.0)
    deal(engines.rows, work, balance.rebalance(engines.rows, work, placement, 0.0, every), every, np.arange(2), pooled)


def choose_placement(snapshot: Snapshot, planned: Indexes, movable: Flags, tuning: Tuning) -> tuple[Indexes, float]:
    """The placement with the least mean makespan over samples, and the seconds that each of its moves saves.

    Tried are: the present one; the present one with trajectories that have not started where the plan wants them, as
    they have no KV to move; the plan, its groups renamed so that most stay, or, where no plan came, a plain rebalance.
    Each is tried also with the trajectories that have not started dealt over the pool. What moves KV must beat what
    does not by `tuning.plan_margin`. Trajectories on an engine that is not usable are left out. Where no placement can
    end earlier all stay.
    """
    engines, work, staying = snapshot.roster.rows.rows, snapshot.work, snapshot.placement
    movable = movable & (staying >= 0)
    free = movable & ~snapshot.live.started
    choice = Choice(snapshot, tuning, free)
    if choice.fate.least:
        return staying, 0.0
    present = np.where(free & (planned >= 0), planned, staying)
    planned = np.where(movable & (planned >= 0), planned, present)
    if np.array_equal(planned, staying):  # no plan came
        other = balance.rebalance(engines, work, staying, tuning.rebalance_margin, movable)
    else:
        context_tokens, kinds = snapshot.live.context_tokens, snapshot.roster.rows.kinds
        other = balance.relabel(planned, present, context_tokens, movable, kinds)
    choice.consider(present, 0.0)
    choice.consider(other, tuning.plan_margin)
    moves = int(np.count_nonzero((choice.best != staying) & ~free))
    return choice.best, max(0.0, choice.before_s - choice.fate.mean_makespan_s) / moves if moves else 0.0


class Choice:
    """The best placement so far. Where a placement cannot be better (`scenarios.Fate`) it is not judged, and nothing is
    dealt: most plans change nothing on the engine that is last."""

    def __init__(self, snapshot: Snapshot, tuning: Tuning, free: Flags) -> None:
        self._samples = snapshot.samples
        self._tuning = tuning
        self._free = free
        self._waiting = np.flatnonzero(free)
        self._engines, self._work = snapshot.roster.rows.rows, snapshot.work
        self.best = snapshot.placement
        self.fate = scenarios.judge(self._engines, self._samples, self.best)
        self.before_s = self.fate.mean_makespan_s

    @cached_property
    def _order(self) -> Indexes:
        """Trajectories that have not started, longest first."""
        waiting = self._waiting
        work = self._work[waiting]
        return waiting[rank(work[:, balance.TOKENS], work[:, balance.KV], self._free[waiting])[0]]

    def consider(self, placement: Indexes, margin: float) -> None:
        """Take a placement, as it is or with the pool dealt, where it is better by the margin."""
        fate = self._try(placement, margin)
        if not len(self._waiting):
            return
        makespan_s = float(balance.finish_times(self._engines, self._work, placement).max())
        pooled = find_pool(self._engines, self._work, placement, makespan_s, self._tuning.pool_slack)
        if (pooled & fate.critical)[placement[self._waiting]].any():
            self._try(deal(self._engines, self._work, placement, self._free, self._order, pooled), margin)

    def _try(self, placement: Indexes, margin: float) -> scenarios.Fate:
        """Judge a placement and keep it if it is better; where it cannot be, returns the fate of the best one."""
        if not self.fate.critical[self.best[placement != self.best]].any():
            return self.fate
        fate = scenarios.judge(self._engines, self._samples, placement)
        if fate.mean_makespan_s < self.fate.mean_makespan_s * (1.0 - margin):
            self.best, self.fate = placement, fate
        return fate
