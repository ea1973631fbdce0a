"""Where each trajectory runs: Heddle's presorted placement (§5.2, §6.2 for unequal engines), solved exactly.

From predicted remaining work and the present engines to the engine of each trajectory. The makespan is the least
of any contiguous partition of the descending order under the cost model; no partition at all is below the lower bound.
Lengths with a standard deviation are planned for by `rank_scenarios`: the plan is then the best of a few exact ones by
its mean makespan over samples, and its own makespan, of the medians, may be more than the least. Re-planning is calling
`plan` again with the remaining work.

Between engines with equal figures the plan is free which takes which group, so a group goes where most of its context
is, which saves moves at no cost (`balance.keep_most`). Arrays in, arrays out: there is no object for a trajectory.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from treadle_core.compiled import Floats, Indexes, lean
from treadle_core.model import CostModel
from treadle_core.placing.balance import keep_most, number_kinds
from treadle_core.placing.bound import lower_bound
from treadle_core.placing.costs import Costs, tabulate
from treadle_core.placing.question import MOST_LOG_SIGMA, PlanEngine, check_column
from treadle_core.placing.rank_scenarios import RankSamples, best_partition, draw_rank_samples
from treadle_core.placing.solver import group_costs, partition
from treadle_core.placing.workload import Workspace


@dataclass(frozen=True, slots=True)
class Plan:
    """engine_of[i]: the engine's index for trajectory i; finish_s[e]: what engine e needs by the cost model.

    lower_bound_s <= makespan_s; None unless it was asked for.
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
    model: CostModel = CostModel.LINEAR_INTEGRAL,
    *,
    bound: bool = False,
    workspace: Workspace | None = None,
    log_sigma: Floats | None = None,
    room_tokens: Floats | None = None,
) -> Plan:
    """The plan of least makespan, balanced beyond the bottleneck, so that no engine stands empty for nothing.

    For n trajectories: `lengths` is remaining tokens, `contexts` tokens in KV now, `current` the index of the engine
    that holds that KV or -1, `log_sigma` the standard deviation of ln(length), `room_tokens` what the cap leaves (inf
    without one); without `log_sigma` the lengths are certain. `bound` asks for the lower bound too. `workspace` saves a
    caller who plans again and again the cost of fresh memory; the plan does not refer to it. Raises NoEnginesError,
    InvalidEngineError, InvalidTrajectoryError (of which NothingFitsError: a context that no engine's KV holds).
    """
    lengths = np.ascontiguousarray(lengths, np.float64)
    contexts = np.ascontiguousarray(contexts, np.float64)
    current = np.ascontiguousarray(current, np.int64)
    check_column("current_engine_id", current, len(lengths), -1, len(engines) - 1)
    costs = tabulate(model, lengths, contexts, current >= 0, engines, workspace)
    samples = sample_lengths(costs, contexts, log_sigma, room_tokens, workspace)
    if samples is not None and len(engines) > 1 and model is CostModel.LINEAR_INTEGRAL:  # else all shares cost alike
        bounds, _ = best_partition(costs, samples)
    else:
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
    return Plan(engine_of, finish_s, makespan_s, min(lower_bound(costs), makespan_s) if bound else None)


def sample_lengths(
    costs: Costs,
    contexts: Floats,
    log_sigma: Floats | None,
    room_tokens: Floats | None,
    workspace: Workspace | None = None,
) -> RankSamples | None:
    """Samples of the lengths, rank by rank; None where they are certain. Raises InvalidTrajectoryError."""
    if log_sigma is None:
        return None
    room_tokens = np.full(len(contexts), np.inf) if room_tokens is None else room_tokens
    check_column("log_sigma", log_sigma, len(contexts), most=MOST_LOG_SIGMA)
    check_column("room_tokens", room_tokens, len(contexts), most=np.inf)
    return draw_rank_samples(costs, contexts, log_sigma, room_tokens, workspace) if log_sigma.any() else None


@lean
def spread(order: Indexes, bounds: Indexes, group_of: Indexes) -> None:
    """Write each trajectory's group."""
    for group in range(len(bounds) - 1):
        for rank in range(bounds[group], bounds[group + 1]):
            group_of[order[rank]] = group


def choose_engines(costs: Costs, group_of: Indexes, current: Indexes, contexts: Floats) -> Indexes:
    """engine_of_group[m], indexes of the caller's engines; by trajectory: `group_of`, the table's engine it was cut to,
    `current` and `contexts`."""
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
