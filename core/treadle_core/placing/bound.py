"""Lower bound of the makespan, against which plans are measured.

`lower_bound` is at most the makespan of every assignment of the trajectories to the engines,
contiguous or not, to rounding. It is the largest of:

- the costliest trajectory alone on the engine that is best for it;
- GROUP_SIZE, engines that are alike: the optimum itself, since some optimum is contiguous (Heddle's
  Lemma 5.1);
- GROUP_SIZE, others: of the q longest, the engines must hold q; in time T they hold as many as
  their sizes allow at length L_q;
- LINEAR_INTEGRAL: all work over the engines' summed speed, once with slots as the limit of what
  runs at once and once with KV.
"""

import numpy as np

from treadle_core.compiled import Floats, Indexes, compiled
from treadle_core.model import CostModel
from treadle_core.placing.costs import Costs, Table
from treadle_core.placing.solver import partition
from treadle_core.placing.workload import SUM_KV, SUM_LENGTHS, SUM_PREFILL

# The q longest are tried for these many q, evenly in log q: each gives a valid bound, and
# neighbours nearly the same one.
PIGEONHOLES = 64
# Rounding must not lift a bound over a makespan.
ROUNDING = 1e-12


def lower_bound(costs: Costs) -> float:
    """Return the lower bound in seconds; 0 where there is nothing to run."""
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
    """Return the seconds of the costliest trajectory, at the soonest alone on the engine that is
    best for it."""
    lengths = table.lengths
    alone_s = table.engines[:, 0] + table.engines[:, 1]
    if table.model == CostModel.GROUP_SIZE:
        return float(lengths[0] * alone_s.min())
    kinds = np.unique(np.column_stack([table.engines, alone_s]), axis=0)
    kv_work, prefill = np.diff(table.ranks[:, SUM_KV]), np.diff(table.ranks[:, SUM_PREFILL])
    best = np.full(len(lengths), np.inf)
    for base_s, _, kv_s, _, capacity, prefill_s, step_s in kinds:
        waits = np.maximum(0.0, kv_work / capacity - lengths)
        np.minimum(
            best, step_s * lengths + base_s * waits + kv_s * kv_work + prefill_s * prefill, out=best
        )
    return float(best.max())


@compiled
def pigeonhole(engines: Floats, lengths: Floats, counts: Indexes) -> float:
    """Return the largest over q in `counts` of the least T at which the engines' sizes for length
    L_q add up to q."""
    bound = 0.0
    for q in counts:
        # Seconds a token within which the engines hold q together: bisect to a relative 1e-12, from
        # below.
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
                    held += (
                        np.floor((step - row[0]) / row[1] * (1.0 + 1e-12))
                        if row[1] > 0.0
                        else row[3]
                    )
            if held >= q:
                high = step
            else:
                low = step
        bound = max(bound, low * lengths[q - 1])
    return bound


def shared_work(table: Table) -> float:
    """Return all work over the engines' summed speed; the yardstick is the engine that gives the
    largest bound.

    An engine's time is at least sum L * (a / slots + b) + sum Q * k + sum P / rate, and at least
    the same with a taken from KV (sum Q * (a / capacity + k) + sum L * b). With r_e the least ratio
    of an engine's three weights to the yardstick's, its time is at least r_e times the work by the
    yardstick, and the works add up.
    """
    amounts = table.ranks[-1, [SUM_LENGTHS, SUM_KV, SUM_PREFILL]]
    base_s, sequence_s, kv_s, slots, capacity, prefill_s = table.engines.T
    bound = 0.0
    for weights in (
        np.stack([base_s / slots + sequence_s, kv_s, prefill_s], axis=1),
        np.stack([sequence_s, base_s / capacity + kv_s, prefill_s], axis=1),
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
