"""Find the exact partition of a sorted workload into one contiguous group for each engine (Heddle
eq. 3).

The largest cost of a group is the least possible; groups may be empty. It is found by bisecting on
the makespan with a greedy fill. The fill is exact: an engine that is given as much as it can finish
by T reaches at least as far as in any other partition that meets T, because costs never fall as a
group grows at its end and never grow as it loses its head (`group_cost`). The search ends on
the optimum itself: a fill that meets T proves the largest cost it has, and one that fails proves
that nothing below the cheapest extension of its groups can succeed; both are costs of real groups.
`bounds` holds a whole partition at all times; only a better one is copied over it.

Then the partition is balanced, so that no engine is idle needlessly: with one very long trajectory
every fill of the rest is optimal, and a greedy one leaves engines empty. The bottleneck's group is
fixed, as small as it can be, and the engines before and after it are solved for what is left to
them, and so on: the least largest cost, then the least second largest. Where work has a long tail
most engines are bottlenecks one after the other, each by one trajectory that it runs alone;
`count_alone` finds how many in one search, where solving after each would take engines squared.

Engines and trajectories become arrays, sorted and summed once (`tabulate`), so that the cost of any
contiguous group of the sorted order is O(1) (`group_cost`). The solver is exact because, for one
engine, the cost of the group [first, end) of the descending order never falls when `end` grows and
never grows when `first` grows. That holds in floating point too, as the sums are prefix sums of
what is not negative.

Cost models, in seconds; an engine decodes a step of a batch in a + b * batch + k * KV tokens
(`model.DecodeCurve`):
- GROUP_SIZE, Heddle eq. 2: F(size) * L_max * T. F * T is the step time at `size` sequences of the
  workload's mean context; beyond the slot limit the group queues, and F grows in proportion to
  size / slots.
- LINEAR_INTEGRAL, DARTS eq. 4 with a linear engine:
  a * max(L_max, sum L / slots, sum Q / kv_capacity) + b * sum L + k * sum Q + sum P / prefill_rate.
  Q = L * (context + L / 2): KV tokens read over the life of a trajectory, whose context grows by
  one a step. sum Q / kv_capacity is the bound that KV sets: capacity over the token-weighted mean
  context sequences run at once (weighted so, because with a mean over trajectories a short one
  would make its group cheaper). P: context that must be prefilled, 0 where the trajectory has an
  engine (a move there brings its KV along while a tool runs).
An engine whose KV holds less than the context of one of a group cannot run the group: its cost is
infinite.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from treadle_core.compiled import Flags, Floats, Indexes, compiled, inlined, lean
from treadle_core.model import CostModel
from treadle_core.placing.question import PlanEngine, check_engines, check_fit, check_workload
from treadle_core.placing.workload import LENGTH, SUM_KV, SUM_LENGTHS, SUM_PREFILL, Workspace, rank


class Table(NamedTuple):
    """Input of the kernels: a workload, longest first, and the engines in the order in which they
    take it.

    `engines` has a row for each engine: base_s, per_sequence_s, per_kv_token_s, slots, KV tokens
    (inf where unknown), seconds a prefilled token. `ranks` is what `workload.rank` makes, n + 1
    rows; `lengths` is a view of n of its entries. reach[reach_of[e], r] is the first rank from r on
    whose context engine e cannot hold, n + 1 where there is none; `reach` has no rows where
    everything fits everywhere.
    """

    model: int
    engines: Floats
    lengths: Floats
    ranks: Floats
    reach: Indexes
    reach_of: Indexes


@dataclass(frozen=True)
class Costs:
    """A table with the caller's indexes: `order[r]` is the index of rank r, `engine_order[e]` that
    of engine e."""

    table: Table
    order: Indexes
    engine_order: Indexes


@inlined
def group_cost(table: Table, engine: int, first: int, end: int) -> float:
    """Return the seconds for `engine` to finish ranks [first, end); 0 for an empty group."""
    if end <= first:
        return 0.0
    if table.reach.shape[0] > 0 and end > table.reach[table.reach_of[engine], first]:
        return np.inf
    slots = table.engines[engine, 3]
    longest = table.ranks[first, LENGTH]
    if table.model == 1:  # CostModel.GROUP_SIZE; kernels read plain numbers
        size = float(end - first)
        if size <= slots:
            return float((table.engines[engine, 0] + table.engines[engine, 1] * size) * longest)
        return float(
            (table.engines[engine, 0] + table.engines[engine, 1] * slots) * (size / slots) * longest
        )
    kv_work = table.ranks[end, SUM_KV] - table.ranks[first, SUM_KV]
    prefill = table.ranks[end, SUM_PREFILL] - table.ranks[first, SUM_PREFILL]
    work = table.ranks[end, SUM_LENGTHS] - table.ranks[first, SUM_LENGTHS]
    steps = max(longest, work / slots, kv_work / table.engines[engine, 4])
    decode_s = table.engines[engine, 0] * steps + table.engines[engine, 1] * work
    return float(decode_s + table.engines[engine, 2] * kv_work + table.engines[engine, 5] * prefill)


def tabulate(
    model: CostModel,
    lengths: Floats,
    contexts: Floats,
    placed: Flags,
    engines: Sequence[PlanEngine],
    workspace: Workspace | None = None,
) -> Costs:
    """Sort and sum a workload: lengths and contexts in tokens, `placed` where some engine has a
    trajectory's KV.

    Trajectories of equal length keep the caller's order. Engines come fastest first (seconds a
    token alone), then by parallelism, then fewest slots: the head of the order are few and long.
    With a `workspace` the result holds until its next use. Raises InvalidTrajectoryError,
    NothingFitsError, InvalidEngineError, NoEnginesError.
    """
    lengths = np.ascontiguousarray(lengths, np.float64)
    contexts = np.ascontiguousarray(contexts, np.float64)
    check_workload(lengths, contexts)
    workspace = workspace or Workspace()
    rows = (
        workspace.derive_once(engines, check_engines)
        if isinstance(engines, tuple)
        else check_engines(engines)
    )
    check_fit(contexts, rows[:, 4])
    order, ranks = rank(lengths, contexts, placed, workspace)
    total = float(ranks[-1, SUM_LENGTHS])
    mean_context = float(ranks[-1, SUM_KV]) / total if total > 0.0 else 0.0
    alone_s = rows[:, 0] + rows[:, 1] + rows[:, 2] * mean_context
    if (
        model is CostModel.GROUP_SIZE
    ):  # F sees the group's size alone: the mean context stands in for each one's
        rows[:, 1] += rows[:, 2] * mean_context
    engine_order = np.lexsort((rows[:, 4], rows[:, 3], -rows[:, 6], alone_s))
    reach, reach_of = find_reach(contexts, order, rows[engine_order, 4])
    table = Table(
        model=int(model),
        engines=np.ascontiguousarray(rows[engine_order, :6]),
        lengths=ranks[:-1, LENGTH],
        ranks=ranks,
        reach=reach,
        reach_of=reach_of,
    )
    return Costs(table, order, engine_order)


def find_reach(contexts: Floats, order: Indexes, capacities: Floats) -> tuple[Indexes, Indexes]:
    """Return `Table.reach` and `reach_of` for engines with these KV capacities; no rows where all
    contexts fit all."""
    n = len(contexts)
    if n == 0 or contexts.max() <= capacities.min():
        return np.zeros((0, n + 1), np.int64), np.zeros(len(capacities), np.int64)
    kinds, reach_of = np.unique(capacities, return_inverse=True)
    reach = np.full((len(kinds), n + 1), n + 1, np.int64)
    for row, capacity in zip(reach, kinds, strict=True):
        unfit = np.flatnonzero(contexts[order] > capacity)
        row[unfit] = unfit
        row[:] = np.minimum.accumulate(row[::-1])[::-1]
    return reach, reach_of.astype(np.int64)


# A better limit is tried this part below the known one, then eight times as far below, until one is
# not met.
FIRST_DROP = 1.0 / 4096.0
DROP_GROWTH = 8.0


@lean
def furthest(
    table: Table, engine: int, at: int, end: int, hint: int, limit_s: float
) -> tuple[int, float, float]:
    """Return the largest rank up to which an engine runs [at, rank) within the limit, searched from
    `hint` outwards.

    Returns with it the cost of that group and the cost with one rank more, infinite where there is
    none. at < end.
    """
    low, low_s = at, 0.0
    high, high_s = end + 1, np.inf  # `low` fits, `high` does not
    probe = min(max(hint, at + 1), end)
    step = 1
    while high - low > 1:
        cost = group_cost(table, engine, at, probe)
        if cost <= limit_s:
            low, low_s = probe, cost
        else:
            high, high_s = probe, cost
        if high > end:
            probe = min(low + step, end)
            step *= 2
        elif low == at:
            probe = max(high - step, at + 1)
            step *= 2
        else:
            probe = (low + high) // 2
    return low, low_s, high_s


@lean
def fill(
    table: Table,
    bounds: Indexes,
    first_engine: int,
    end_engine: int,
    first: int,
    end: int,
    limit_s: float,
) -> tuple[bool, float, float]:
    """Give each engine in turn all that it finishes within `limit_s`, and write the end of its
    group to bounds[engine + 1].

    The search starts at the former `bounds`. Returns whether [first, end) was placed, the largest
    cost of a group, and the least cost above the limit that a group would have with one more.
    O(engines * log n).
    """
    largest = 0.0
    extension = np.inf
    at = first
    before = bounds[first_engine]
    size = 0
    bounds[first_engine] = first
    for engine in range(first_engine, end_engine):
        size = max(bounds[engine + 1] - before, 0) or size
        before = bounds[engine + 1]
        if at < end:
            at, cost, more = furthest(table, engine, at, end, at + size, limit_s)
            largest = max(largest, cost)
            extension = min(extension, more)
        bounds[engine + 1] = at
    return at == end, largest, extension


@lean
def keep(scratch: Indexes, bounds: Indexes, first_engine: int, end_engine: int) -> None:
    for at in range(first_engine + 1, end_engine):  # the ends of the range stay
        bounds[at] = scratch[at]


@lean
def narrow(
    table: Table,
    bounds: Indexes,
    scratch: Indexes,
    first_engine: int,
    end_engine: int,
    low: float,
    high: float,
    low_first: bool,
) -> tuple[float, int]:
    """Return the least largest cost of the engines' ranks, between `low` and `high`, the largest
    cost in `bounds`.

    Leaves the greedy fill that has it in `bounds`. Returns the cost and the number of fills it
    took. `low_first`: try `low` first, as it is likely to be the cost.
    """
    first, end = bounds[first_engine], bounds[end_engine]
    fills = 0
    drop = high * FIRST_DROP
    while low < high:
        if low_first and fills == 0:
            limit = low
        elif drop > 0.0:
            limit = max(high - drop, low)
        else:  # far apart, halve the ratio; near, halve the distance
            limit = (
                np.sqrt(low) * np.sqrt(high) if 0.0 < 4.0 * low < high else low + 0.5 * (high - low)
            )
        if limit >= high:  # low and high are neighbours and the middle was rounded up
            limit = low
        met, largest, extension = fill(table, scratch, first_engine, end_engine, first, end, limit)
        fills += 1
        if met:
            keep(scratch, bounds, first_engine, end_engine)
            high = largest
            drop *= DROP_GROWTH
        else:
            low = extension
            if not (low_first and fills == 1):
                drop = 0.0
    return high, fills


@lean
def cheapest_alone(table: Table, first_engine: int, end_engine: int, rank: int) -> float:
    least = np.inf
    for engine in range(first_engine, end_engine):
        least = min(least, group_cost(table, engine, rank, rank + 1))
    return least


@lean
def largest_cost(table: Table, bounds: Indexes, first_engine: int, end_engine: int) -> float:
    largest = 0.0
    for engine in range(first_engine, end_engine):
        largest = max(largest, group_cost(table, engine, bounds[engine], bounds[engine + 1]))
    return largest


@lean
def tighten(
    table: Table,
    bounds: Indexes,
    scratch: Indexes,
    tight: int,
    end_engine: int,
    end: int,
    limit_s: float,
) -> int:
    """Make the bottleneck's group the least with which the engines behind it still meet the limit;
    return the number of fills.

    Only where cost does not grow with the group (a flat decode curve) is it less than the group of
    the greedy fill.
    """
    first = bounds[tight]
    high = bounds[tight + 1]
    low = min(first + 1, high)
    while low < high:  # the least group that costs as much
        middle = (low + high) // 2
        if group_cost(table, tight, first, middle) >= limit_s:
            high = middle
        else:
            low = middle + 1
    high = bounds[tight + 1]
    fills = 0
    while low < high:
        middle = (low + high) // 2
        met, _, _ = fill(table, scratch, tight + 1, end_engine, middle, end, limit_s)
        fills += 1
        if met:
            high = middle
            keep(scratch, bounds, tight + 1, end_engine)
            bounds[tight + 1] = high
        else:
            low = middle + 1
    return fills


@lean
def same_kind(table: Table, one: int, other: int) -> bool:
    """Return whether two engines need the same time for every group."""
    for column in range(table.engines.shape[1]):
        if table.engines[one, column] != table.engines[other, column]:
            return False
    return table.reach.shape[0] == 0 or bool(table.reach_of[one] == table.reach_of[other])


@lean
def count_alone(
    table: Table, bounds: Indexes, scratch: Indexes, first_engine: int, end_engine: int
) -> tuple[int, int]:
    """Return how many engines from `first_engine` on take one rank each, and the number of fills.
    Such an engine takes the first rank that is left because that rank alone is the least largest
    cost of the rest. Writes their groups and a fill of the rest that meets it.

    Among engines of one kind, whose ranks cost no more one after the other, it holds for all up to
    the last for which it holds: a fill that meets the cost of a later rank, with one rank and one
    engine more, meets that of an earlier one. So the last is searched by doubling and halving. No
    engine of another kind may be cheaper for it.
    """
    first, end = bounds[first_engine], bounds[end_engine]
    most = 0  # as far as the engines are alike and the costs fall
    before = group_cost(table, first_engine, first, first + 1)
    while first_engine + most + 1 < end_engine and first + most + 1 < end:
        engine, rank = first_engine + most + 1, first + most + 1
        cost = group_cost(table, engine, rank, rank + 1)
        if cost > before or not same_kind(table, first_engine, engine):
            break
        before = cost
        most += 1
    low, high = 0, most + 1  # `low` holds, `high` does not
    probe = 1
    fills = 0
    while high - low > 1:
        engine, rank = first_engine + probe, first + probe
        limit_s = group_cost(table, engine, rank, rank + 1)
        met = cheapest_alone(table, engine, end_engine, rank) >= limit_s
        if met:
            met, _, _ = fill(table, scratch, engine, end_engine, rank, end, limit_s)
            fills += 1
        if met:
            low = probe
            for at in range(first_engine + 1, engine + 1):
                bounds[at] = first + at - first_engine
            keep(scratch, bounds, engine, end_engine)
        else:
            high = probe
        probe = min(2 * low, most) if high > most else (low + high) // 2
    return low, fills


@compiled
def balance(
    table: Table, bounds: Indexes, scratch: Indexes, makespan_s: float, fill_budget: int
) -> None:
    """Fix the bottleneck's group and solve again for the engines before and behind it, until all
    are fixed."""
    m = len(table.engines)
    # Ranges of engines whose ranks are fixed and whose least largest cost is known.
    ranges = np.zeros((2 * m + 2, 2), np.int64)
    limits = np.zeros(2 * m + 2)
    ranges[0, 1] = m
    limits[0] = makespan_s
    depth = 1
    used = 0
    while depth > 0 and used < fill_budget:
        depth -= 1
        first_engine, end_engine = ranges[depth]
        limit = limits[depth]
        begin, end = bounds[first_engine], bounds[end_engine]
        if end_engine - first_engine < 2 or begin == end:
            continue
        if (
            begin < bounds[first_engine + 1]
            and group_cost(table, first_engine, begin, begin + 1) >= limit
        ):
            alone, fills = count_alone(table, bounds, scratch, first_engine, end_engine)
            used += fills * (end_engine - first_engine)
            if alone > 0:
                first_engine += alone
                begin += alone
                limit = group_cost(table, first_engine, begin, begin + 1)
        tight = first_engine
        while (
            tight < end_engine - 1
            and group_cost(table, tight, bounds[tight], bounds[tight + 1]) < limit
        ):
            tight += 1
        if tight + 1 < end_engine:
            used += tighten(table, bounds, scratch, tight, end_engine, end, limit) * (
                end_engine - tight
            )
        for side in range(2):
            one, other = (tight + 1, end_engine) if side == 0 else (first_engine, tight)
            if one < other and bounds[one] < bounds[other]:
                low = cheapest_alone(table, one, other, bounds[one])
                high = largest_cost(table, bounds, one, other)
                # Behind engines that are bound by their longest there are often more of these.
                rest, fills = narrow(
                    table, bounds, scratch, one, other, low, high, tight == first_engine
                )
                used += fills * (other - one)
                ranges[depth, 0], ranges[depth, 1], limits[depth] = one, other, rest
                depth += 1


# Most groups filled for the sake of balance, about 0.1 s of compiled code; the rest stays as the
# last bisection put it.
BALANCE_FILLS = 4_000_000
# The first probe is this part above what the engines could do if work were a fluid, the next twice
# as far above.
GUESS_SLACK = 1.0 / 128.0


@lean
def bottleneck(table: Table, bounds: Indexes, scratch: Indexes) -> float:
    """Return the seconds of the least largest cost of all ranks over all engines; `bounds` comes
    with a partition of any cost."""
    n = len(table.lengths)
    m = len(table.engines)
    fluid = 0.0  # the engines' summed speed, by what each takes for all
    for engine in range(m):
        fluid += 1.0 / max(group_cost(table, engine, 0, n), 1e-300)
    low = cheapest_alone(table, 0, m, 0)  # the longest runs somewhere
    high = largest_cost(table, bounds, 0, m)
    slack = GUESS_SLACK
    limit = max(low, 1.0 / fluid)
    while low < high:
        limit *= 1.0 + slack
        if limit >= high:
            break
        met, largest, extension = fill(table, scratch, 0, m, 0, n, limit)
        if met:
            keep(scratch, bounds, 0, m)
            high = largest
            break
        low = extension
        limit = max(limit, low)
        slack *= 2.0
    makespan, _ = narrow(table, bounds, scratch, 0, m, low, high, False)
    return makespan


@compiled
def solve(table: Table, fill_budget: int, bounds: Indexes) -> float:
    """Write the ends of the groups into bounds[1:], m + 1 entries, and return the makespan in
    seconds."""
    n = len(table.lengths)
    m = len(table.engines)
    if (
        n == 0 or table.lengths[0] <= 0.0
    ):  # nothing is left of any: no cost to balance by, so balance by number
        for engine in range(m + 1):
            bounds[engine] = n * engine // m
        if largest_cost(table, bounds, 0, m) <= 0.0:
            return 0.0
    best = 0  # the best engine alone can take all
    for engine in range(1, m):
        if group_cost(table, engine, 0, n) < group_cost(table, best, 0, n):
            best = engine
    for engine in range(m + 1):
        bounds[engine] = n if engine > best else 0
    scratch = bounds.copy()
    makespan = bottleneck(table, bounds, scratch)
    balance(table, bounds, scratch, makespan, fill_budget)
    return makespan


@lean
def group_costs(table: Table, bounds: Indexes, costs_s: Floats) -> None:
    """Write the cost of each engine of the table for its group."""
    for engine in range(len(costs_s)):
        costs_s[engine] = group_cost(table, engine, bounds[engine], bounds[engine + 1])


def partition(costs: Costs, fill_budget: int = BALANCE_FILLS) -> tuple[Indexes, float]:
    """Return the bounds of the groups and the makespan: engine e of the table runs ranks
    [bounds[e], bounds[e + 1])."""
    bounds = np.zeros(len(costs.table.engines) + 1, np.int64)
    makespan_s = solve(costs.table, fill_budget, bounds)
    return bounds, float(makespan_s)
