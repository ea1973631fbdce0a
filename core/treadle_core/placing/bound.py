"""A lower bound of the makespan, against which plans are measured, and Heddle's dynamic program, the solver's oracle.

`lower_bound` is at most the makespan of every assignment of the trajectories to the engines, contiguous or not, to
rounding. It is the largest of:
- the costliest trajectory alone on the engine that is best for it;
- GROUP_SIZE, engines that are alike: the optimum itself, since some optimum is contiguous (Heddle's Lemma 5.1);
- GROUP_SIZE, others: of the q longest, the engines must hold q; in time T they hold as many as their sizes allow at
  length L_q;
- the integrals: all work over the engines' summed speed, once with slots as the limit of what runs at once and once
  with KV; with a curve that bends, at the batch of the least seconds a token.

The dynamic program (eq. 3, O(n² m)) serves tests and benchmarks. It shares only the cost of a group with the solver,
and allows empty groups as the solver does. Heddle §5.2 makes it faster by aggregation: short trajectories are taken in
bundles, so that a group may end only at some ranks. The solver needs none: it takes less time than sorting.
"""

from __future__ import annotations

import numpy as np

from treadle_core.compiled import Floats, Indexes, compiled
from treadle_core.model import CostModel
from treadle_core.placing.costs import FROM_SEQUENCE, SEQUENCE_S, Costs, Table, group_cost
from treadle_core.placing.solver import partition

# The q longest are tried for these many q, evenly in log q: each gives a valid bound, and neighbours nearly the same
# one.
PIGEONHOLES = 64
# Rounding must not lift a bound over a makespan.
ROUNDING = 1e-12


def lower_bound(costs: Costs) -> float:
    """Seconds; 0 where there is nothing to run."""
    table = costs.table
    n = len(table.lengths)
    if n == 0:
        return 0.0
    alone_s = costliest_alone(table)
    if table.model == CostModel.GROUP_SIZE:
        if (table.engines == table.engines[0]).all():
            return partition(costs, 0)[1] * (1.0 - ROUNDING)
        counts = np.unique(np.geomspace(1, n, PIGEONHOLES).round().astype(np.int64))
        return max(alone_s, float(pigeonhole(table.engines, table.lengths, counts)))
    return max(alone_s, shared_work(table))


def costliest_alone(table: Table) -> float:
    """Every trajectory runs somewhere, at the soonest alone on the engine that is best for it."""
    lengths = table.lengths
    alone_s = table.engines[:, 0] + table.engines[:, 1]
    if table.model == CostModel.GROUP_SIZE:
        return float(lengths[0] * alone_s.min())
    if table.model == CostModel.PIECEWISE_INTEGRAL:
        alone_s = table.pieces[:, 0, SEQUENCE_S]
    kinds = np.unique(np.column_stack([table.engines, alone_s]), axis=0)
    kv_work = np.diff(table.sum_kv)
    prefill = np.diff(table.sum_prefill)
    best = np.full(len(lengths), np.inf)
    for base_s, _, kv_s, _, capacity, prefill_s, step_s in kinds:
        waits = np.maximum(0.0, kv_work / capacity - lengths)
        np.minimum(best, step_s * lengths + base_s * waits + kv_s * kv_work + prefill_s * prefill, out=best)
    return float(best.max())


@compiled
def pigeonhole(engines: Floats, lengths: Floats, counts: Indexes) -> float:
    """Largest over q in `counts` of the least T at which the engines' sizes for length L_q add up to q."""
    bound = 0.0
    for q in counts:
        # Seconds a token within which the engines hold q together: bisect to a relative 1e-12, from below.
        low = 0.0
        high = np.inf
        for row in engines:
            high = min(high, (row[0] + row[1] * min(float(q), row[3])) * max(1.0, q / row[3]))
        while high - low > 1e-12 * high:
            step = 0.5 * (low + high)
            held = 0.0
            for row in engines:
                full_s = row[0] + row[1] * row[3]
                if step >= full_s:
                    held += np.floor(row[3] * step / full_s * (1.0 + 1e-12))
                elif step >= row[0] + row[1]:
                    held += np.floor((step - row[0]) / row[1] * (1.0 + 1e-12)) if row[1] > 0.0 else row[3]
            if held >= q:
                high = step
            else:
                low = step
        bound = max(bound, low * lengths[q - 1])
    return bound


def shared_work(table: Table) -> float:
    """All work over the engines' summed speed; the yardstick is the engine that gives the largest bound.

    An engine's time is at least sum L * (a / slots + b) + sum Q * k + sum P / rate, and at least the same with a taken
    from KV (sum Q * (a / capacity + k) + sum L * b); for a curve that bends a / slots + b is the least PTL(batch) /
    batch up to the slots, and b the least (PTL(batch) - a) / batch. With r_e the least ratio of an engine's three
    weights to the yardstick's, its time is at least r_e times the work by the yardstick, and the works add up.
    """
    amounts = np.array([table.sum_lengths[-1], table.sum_kv[-1], table.sum_prefill[-1]])
    base_s, _, kv_s, _, capacity, prefill_s = table.engines.T
    by_slots, by_kv = token_s(table)
    bound = 0.0
    for weights in (
        np.stack([by_slots, kv_s, prefill_s], axis=1),
        np.stack([by_kv, base_s / capacity + kv_s, prefill_s], axis=1),
    ):
        for yardstick in np.unique(weights, axis=0):
            used = (yardstick > 0.0) & (amounts > 0.0)
            if not used.any():
                continue
            ratios = (weights[:, used] / yardstick[used]).min(axis=1)
            if (ratios > 0.0).all():
                work_s = float((yardstick[used] * amounts[used]).sum())
                bound = max(bound, work_s / float((1.0 / ratios).sum()))
    return bound * (1.0 - ROUNDING)


def token_s(table: Table) -> tuple[Floats, Floats]:
    """Least seconds that a token takes of each engine, with and without the step at no sequence (a)."""
    base_s, sequence_s, _, slots, _, _ = table.engines.T
    if table.model != CostModel.PIECEWISE_INTEGRAL:
        return base_s / slots + sequence_s, sequence_s
    pieces = table.pieces
    step_s = pieces[:, 0, SEQUENCE_S].copy()  # at the batch that the pieces before have reached
    batch = np.ones(len(pieces))
    with_base, without = step_s.copy(), step_s - base_s
    for piece in range(1, pieces.shape[1]):  # the least is at a knot or at the slots
        last = pieces[:, piece + 1, FROM_SEQUENCE] if piece + 1 < pieces.shape[1] else np.full(len(pieces), np.inf)
        end = np.maximum(np.minimum(last, slots), batch)
        step_s += pieces[:, piece, SEQUENCE_S] * (end - batch)
        batch = end
        np.minimum(with_base, step_s / batch, out=with_base)
        np.minimum(without, (step_s - base_s) / batch, out=without)
    return with_base, without


def least_makespan(costs: Costs, cuts: Indexes | None = None) -> float:
    """Seconds of the best contiguous partition of the descending order, engines in the table's order.

    `cuts`: ranks at which a group may end, rising, with 0 and n; all where None.
    """
    if cuts is None:
        cuts = np.arange(len(costs.table.lengths) + 1)
    return float(dynamic_program(costs.table, cuts))


@compiled
def dynamic_program(table: Table, cuts: Indexes) -> float:
    best = np.full(len(cuts), np.inf)
    best[0] = 0.0
    for engine in range(len(table.engines)):
        after = np.full(len(cuts), np.inf)
        for end in range(len(cuts)):
            least = np.inf
            for first in range(end + 1):
                least = min(least, max(best[first], group_cost(table, engine, cuts[first], cuts[end])))
            after[end] = least
        best = after
    return float(best[-1])


def aggregate(costs: Costs, threshold_tokens: float, bundle: int) -> Indexes:
    """Cuts that take the trajectories below the threshold `bundle` at a time; no group's cost is estimated.

    A plan so restricted is worse by at most what its costliest bundle adds to a group.
    """
    n = len(costs.table.lengths)
    long = int(np.count_nonzero(costs.table.lengths >= threshold_tokens))
    return np.unique(np.concatenate([np.arange(long + 1), np.arange(long, n, max(bundle, 1)), [n]]))
