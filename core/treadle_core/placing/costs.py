"""Costs of a group of trajectories on an engine: the cost models that placement minimises.

Engines and trajectories become arrays, sorted and summed once (`tabulate`), so that the cost of any
contiguous group of the sorted order is O(1) (`group_cost`). The solver is exact because, for one
engine, the cost of the group [first, end) of the descending order never falls when `end` grows and
never grows when `first` grows. That holds in floating point too, as the sums are prefix sums of
what is not negative.

Cost models, in seconds; an engine decodes a step of a batch in a + b * batch + k * KV tokens
(`model.DecodeCurve`):
- GROUP_SIZE, Heddle eq. 2: F(size) * L_max * T. F * T is the step time at `size` sequences of the
  workload's mean
  context; beyond the slot limit the group queues, and F grows in proportion to size / slots.
- LINEAR_INTEGRAL, DARTS eq. 4 with a linear engine:
  a * max(L_max, sum L / slots, sum Q / kv_capacity) + b * sum L + k * sum Q + sum P / prefill_rate.
  Q = L * (context + L / 2): KV tokens read over the life of a trajectory, whose context grows by
  one a step.
  sum Q / kv_capacity is the bound that KV sets: capacity over the token-weighted mean context
  sequences run at once
  (weighted so, because with a mean over trajectories a short one would make its group cheaper). P:
  context that must be
  prefilled, 0 where the trajectory has an engine (a move there brings its KV along while a tool
  runs).
An engine whose KV holds less than the context of one of a group cannot run the group: its cost is
infinite.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from treadle_core.compiled import Flags, Floats, Indexes, inlined
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
