"""Choose the engine of each trajectory, from what is left of each and the present engines.

Under CRITICAL_PATH the placement is the best of several that are tried (`candidates`), by its mean
makespan over samples of what is left. Under the two others it is Heddle's presorted placement
(§5.2, §6.2 for unequal engines), solved exactly: the makespan is the least of any contiguous
partition of the descending order under the cost model. Re-planning is calling `plan` again with the
remaining work.

Between engines with equal figures the plan is free which takes which group, so a group goes where
most of its context is, which saves moves at no cost (`candidates.keep_most`). Arrays in, arrays
out: there is no object for a trajectory.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from treadle_core.compiled import Flags, Floats, Indexes, lean
from treadle_core.model import CostModel
from treadle_core.placing import paths
from treadle_core.placing.bound import lower_bound
from treadle_core.placing.candidates import best_placement, keep_most
from treadle_core.placing.costs import Costs, tabulate
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
from treadle_core.placing.solver import group_costs, partition
from treadle_core.placing.workload import Workspace


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
    started), `prompts`, a number that samples of a prompt share (none: no two do). Raises
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
        return _plan_paths(
            engines, paths.work_of(*of, factors), paths.work_of(*of), current, bound=bound
        )
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
    return Plan(
        engine_of, finish_s, makespan_s, min(lower_bound(costs), makespan_s) if bound else None
    )


def _plan_paths(
    engines: Sequence[PlanEngine],
    work: paths.Work,
    medians: paths.Work,
    current: Indexes,
    *,
    bound: bool,
) -> Plan:
    rows = paths.engine_rows(engines)
    engine_of = best_placement(rows, paths.kinds_of(engines), work, medians, current)
    finish_s = paths.finish(rows, medians, engine_of)[0][:, 0]
    makespan_s = float(finish_s.max())
    bound_s = min(paths.least_s(rows, medians), makespan_s) if bound else None
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
