"""Choose the engine of each trajectory, from what is left of each and the present engines; and
bound the makespan of any choice from below.

Under CRITICAL_PATH the placement is the best of several that are tried (`candidates`), by its mean
makespan over samples of what is left. Under the two others it is Heddle's presorted placement
(§5.2, §6.2 for unequal engines), solved exactly: the makespan is the least of any contiguous
partition of the descending order under the cost model. Re-planning is calling `plan` again with the
remaining work.

Between engines with equal figures the plan is free which takes which group, so a group goes where
most of its context is, which saves moves at no cost (`candidates.keep_most`). Arrays in, arrays
out: there is no object for a trajectory.

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

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from treadle_core.compiled import Flags, Floats, Indexes, compiled, lean
from treadle_core.model import CostModel
from treadle_core.placing import paths
from treadle_core.placing.candidates import GoesOn, best_placement, keep_most, reads_little
from treadle_core.placing.paths import number_kinds
from treadle_core.placing.question import (
    MOST_LOG_SIGMA,
    MOST_SECONDS,
    PlanEngine,
    check_column,
    check_engines,
    check_fit,
    check_workload,
)
from treadle_core.placing.solver import Costs, Table, group_costs, partition, tabulate
from treadle_core.placing.workload import SUM_KV, SUM_LENGTHS, SUM_PREFILL, Workspace

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


@dataclass(frozen=True, slots=True)
class Plan:
    """Result of a placement. engine_of[i]: the engine's index for trajectory i; finish_s[e]:
    seconds of engine e by the cost model.

    lower_bound_s <= makespan_s; None unless the caller requested it.
    """

    engine_of: Indexes
    finish_s: Floats
    makespan_s: float
    lower_bound_s: float | None


def plan(
    lengths: Floats,
    contexts: Floats,
    current: Indexes,
    engines: Sequence[PlanEngine],
    model: CostModel = CostModel.CRITICAL_PATH,
    *,
    bound: bool = False,
    workspace: Workspace | None = None,
    log_sigma: Floats | None = None,
    room_tokens: Floats | None = None,
    observed_tokens: Floats | None = None,
    tool_s: Floats | None = None,
    started: Flags | None = None,
    read: Flags | None = None,
    prompts: Indexes | None = None,
    goes_on: GoesOn = reads_little,
) -> Plan:
    """Return the plan of least makespan, balanced beyond the bottleneck, so that no engine is idle
    needlessly.

    For n trajectories: `lengths` is remaining tokens, `contexts` tokens in KV now, `current` the
    index of the engine that holds that KV or -1. `bound` adds the lower bound. `workspace` saves a
    caller who plans again and again the cost of fresh memory; the plan does not refer to it.
    CRITICAL_PATH alone reads the rest: `log_sigma`, the standard deviation of ln(length) (none: 0),
    `room_tokens`, what the cap leaves (inf without one), `observed_tokens` and `tool_s`, tokens and
    seconds of tools left (none: 0), `started`, whether a trajectory runs on its engine (none: those
    that have one), `read`, whether that has prefilled its context (none: of those that have
    started), `prompts`, a number that samples of a prompt share (none: no two do), `goes_on`, how
    long the search goes on. Raises
    NoEnginesError, InvalidEngineError, InvalidTrajectoryError (of which NothingFitsError: a context
    that no engine's KV holds).
    """
    lengths = np.ascontiguousarray(lengths, np.float64)
    contexts = np.ascontiguousarray(contexts, np.float64)
    current = np.ascontiguousarray(current, np.int64)
    n = len(lengths)
    check_column("current_engine_id", current, n, -1, len(engines) - 1)
    if model is CostModel.CRITICAL_PATH:
        nothing, all_room = np.zeros(n), np.full(n, np.inf)
        log_sigma = nothing if log_sigma is None else log_sigma
        room_tokens = all_room if room_tokens is None else room_tokens
        observed_tokens = nothing if observed_tokens is None else observed_tokens
        tool_s = nothing if tool_s is None else tool_s
        started = current >= 0 if started is None else started & (current >= 0)
        read = started if read is None else read & started
        prompts = np.arange(n) if prompts is None else prompts
        check_workload(lengths, contexts)
        check_column("log_sigma", log_sigma, n, most=MOST_LOG_SIGMA)
        check_column("room_tokens", room_tokens, n, most=np.inf)
        check_column("remaining_observed_tokens", observed_tokens, n)
        check_column("remaining_tool_time", tool_s, n, most=MOST_SECONDS)
        check_fit(contexts, check_engines(engines)[:, 4])
        factors = paths.sample_factors(np.arange(n), log_sigma, lengths, room_tokens)
        of = (lengths, contexts, observed_tokens, tool_s, started, read, prompts)
        samples, medians = paths.work_of(*of, factors), paths.work_of(*of)
        return _plan_paths(engines, samples, medians, current, goes_on, bound=bound)
    costs = tabulate(model, lengths, contexts, current >= 0, engines, workspace)
    bounds, _ = partition(costs)
    engine_of = np.empty(len(costs.order), np.int64)
    spread(costs.order, bounds, engine_of)
    engine_of_group = choose_engines(costs, engine_of, current, contexts)
    cost_s = np.zeros(len(engine_of_group))
    group_costs(costs.table, bounds, cost_s)
    finish_s = np.empty(len(cost_s))
    finish_s[engine_of_group] = cost_s
    translate(engine_of, engine_of_group)
    makespan_s = float(cost_s.max())
    bound_s = min(lower_bound(costs), makespan_s) if bound else None
    return Plan(engine_of, finish_s, makespan_s, bound_s)


def _plan_paths(
    engines: Sequence[PlanEngine],
    work: paths.Work,
    medians: paths.Work,
    current: Indexes,
    goes_on: GoesOn,
    *,
    bound: bool,
) -> Plan:
    rows = paths.engine_rows(engines)
    kinds = paths.kinds_of(engines)
    engine_of = best_placement(rows, kinds, work, medians, current, goes_on)
    reading = paths.reading_order(rows, medians)
    finish_s = paths.finish(rows, medians, engine_of, reading)[0][:, 0]
    makespan_s = float(finish_s.max())
    bound_s = min(paths.least_s(rows, kinds, medians), makespan_s) if bound else None
    return Plan(engine_of, finish_s, makespan_s, bound_s)


@lean
def spread(order: Indexes, bounds: Indexes, group_of: Indexes) -> None:
    """Write each trajectory's group."""
    for group in range(len(bounds) - 1):
        for rank in range(bounds[group], bounds[group + 1]):
            group_of[order[rank]] = group


def choose_engines(costs: Costs, group_of: Indexes, current: Indexes, contexts: Floats) -> Indexes:
    """Return engine_of_group[m], indexes of the caller's engines; by trajectory: `group_of`, the
    table's engine it was assigned to, `current` and `contexts`."""
    if len(costs.engine_order) == 1 or not len(current) or current.max() < 0:
        return costs.engine_order
    kinds = number_kinds(row.tobytes() for row in costs.table.engines)
    chosen = keep_most(group_of, current, np.argsort(costs.engine_order), contexts, kinds)
    engine_of_group: Indexes = costs.engine_order[chosen]
    return engine_of_group


@lean
def translate(values: Indexes, by: Indexes) -> None:
    """Replace each value by by[value], in place."""
    for index in range(len(values)):
        values[index] = by[values[index]]
