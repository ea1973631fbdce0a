"""Where each trajectory runs: Heddle's presorted placement (§5.2, §6.2 for unequal engines), solved exactly.

From predicted remaining work and the present engines to one group of trajectories for each engine. Every trajectory is
in exactly one group; groups come in the caller's order of engines, longest trajectory first. The makespan is the least
of any contiguous partition of the descending order under the cost model; no partition at all is below the lower bound.
Lengths with a standard deviation are planned for by `rank_scenarios`: the plan is then the best of a few exact ones by
its mean makespan over samples, and its own makespan, of the medians, may be more than the least. Re-planning is calling
`plan` again with the remaining work.

Between engines with equal figures the plan is free which takes which group, so a group goes where most of its context
is, which saves moves at no cost: greedy, most context first, at least half of the best possible.

`plan_arrays` is for callers that plan often: arrays in, arrays out, no object for a trajectory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from treadle_core.compiled import Floats, Indexes, compiled, lean
from treadle_core.model import CostModel
from treadle_core.placing.bound import lower_bound
from treadle_core.placing.costs import BatchCurve, Costs, tabulate
from treadle_core.placing.question import (
    InvalidEngineError,
    InvalidTrajectoryError,
    PlanEngine,
    PlanTrajectory,
    check_current,
    check_uncertainty,
)
from treadle_core.placing.rank_scenarios import RankSamples, best_partition, draw_rank_samples, is_hedgeable
from treadle_core.placing.solver import group_costs, partition
from treadle_core.placing.workload import Workspace


def deal(costs: Costs, group_of: Indexes, current: Indexes, contexts: Floats) -> Indexes:
    """engine_of_group[m], indexes of the caller's engines.

    By the caller's trajectory: `group_of`, the table's engine it was cut to; `current`, the caller's engine that holds
    it or -1; `contexts`, tokens.
    """
    rows = costs.table.engines
    m = len(rows)
    if m == 1 or not len(current) or current.max() < 0:
        return costs.engine_order
    figures = np.hstack([rows, costs.table.pieces.reshape(m, -1)]) if costs.table.pieces.size else rows
    numbers: dict[bytes, int] = {}
    alike = np.array([numbers.setdefault(row.tobytes(), len(numbers)) for row in figures])
    at_of_engine = np.empty(m, np.int64)
    at_of_engine[costs.engine_order] = np.arange(m)
    dealt = np.empty(m, np.int64)
    most_kept(group_of, current, contexts, at_of_engine, alike, dealt)
    return costs.engine_order[dealt]


@compiled
def most_kept(
    group_of: Indexes, current: Indexes, contexts: Floats, at_of_engine: Indexes, alike: Indexes, dealt: Indexes
) -> None:
    """Write which of the table's engines takes each group. O(n + m^2) where few groups want the same engine."""
    m = len(dealt)
    kept = np.zeros((m, m))
    for index in range(len(group_of)):
        if current[index] >= 0:  # one token more, so that a trajectory without context counts too
            kept[group_of[index], at_of_engine[current[index]]] += contexts[index] + 1.0
    taken = np.zeros(m, np.bool_)
    wish = np.full(m, -1)  # the free engine that holds most of a group, and how much
    wish_kept = np.zeros(m)
    dealt[:] = -1
    for group in range(m):
        for engine in range(m):
            if alike[engine] == alike[group] and kept[group, engine] > wish_kept[group]:
                wish[group], wish_kept[group] = engine, kept[group, engine]
    while True:
        group = int(np.argmax(wish_kept))
        if wish_kept[group] <= 0.0:
            break
        engine = wish[group]
        if not taken[engine]:
            dealt[group] = engine
            taken[engine] = True
            wish_kept[group] = 0.0
            continue
        wish_kept[group] = 0.0
        for other in range(m):
            if alike[other] == alike[group] and not taken[other] and kept[group, other] > wish_kept[group]:
                wish[group], wish_kept[group] = other, kept[group, other]
    for group in range(m):  # groups that no engine holds take the engines of their kind that are left
        if dealt[group] < 0:
            for engine in range(m):
                if alike[engine] == alike[group] and not taken[engine]:
                    dealt[group] = engine
                    taken[engine] = True
                    break


@lean
def spread(order: Indexes, bounds: Indexes, group_of: Indexes) -> None:
    """Write each trajectory's group."""
    for group in range(len(bounds) - 1):
        for rank in range(bounds[group], bounds[group + 1]):
            group_of[order[rank]] = group


@dataclass(frozen=True, slots=True)
class Group:
    """What one engine runs, longest first, and the seconds it needs by the cost model."""

    engine_id: str
    trajectory_ids: tuple[str, ...]
    predicted_s: float


@dataclass(frozen=True, slots=True)
class Plan:
    """One group an engine, in the order of the request. `lower_bound_s` <= `makespan_s`."""

    groups: tuple[Group, ...]
    makespan_s: float
    lower_bound_s: float


@dataclass(frozen=True, slots=True)
class ArrayPlan:
    """engine_of[i] is the engine's index for trajectory i; finish_s[e] what engine e needs by the cost model."""

    engine_of: Indexes
    finish_s: Floats
    makespan_s: float
    lower_bound_s: float | None


def plan_arrays(
    lengths: Floats,
    contexts: Floats,
    current: Indexes,
    engines: Sequence[PlanEngine],
    model: CostModel = CostModel.LINEAR_INTEGRAL,
    *,
    curves: Sequence[BatchCurve | None] | None = None,
    bound: bool = False,
    workspace: Workspace | None = None,
    log_sigma: Floats | None = None,
    room_tokens: Floats | None = None,
) -> ArrayPlan:
    """The plan of least makespan, balanced beyond the bottleneck.

    For n trajectories: `lengths` is remaining tokens, `contexts` tokens in KV now, `current` the index of the engine
    that holds that KV or -1, `log_sigma` the standard deviation of ln(length), `room_tokens` what the cap leaves (inf
    without one); without `log_sigma` the lengths are certain. `curves` (one for each engine, None for its own linear
    one) are read under PIECEWISE_INTEGRAL. `bound` asks for the lower bound too. `workspace` saves a caller who plans
    again and again the cost of fresh memory; the plan does not refer to it. Raises NoEnginesError, InvalidEngineError,
    InvalidCurveError, InvalidTrajectoryError (of which NothingFitsError: a context that no engine's KV holds), naming
    the field as `plan` does.
    """
    lengths = np.ascontiguousarray(lengths, np.float64)
    contexts = np.ascontiguousarray(contexts, np.float64)
    current = np.ascontiguousarray(current, np.int64)
    check_current(current, len(lengths), len(engines))
    costs = tabulate(model, lengths, contexts, current >= 0, engines, curves=curves, workspace=workspace)
    samples = sample_lengths(costs, contexts, log_sigma, room_tokens, workspace)
    found, _, _ = cut(costs, current, contexts, bound, samples)
    return found


def plan(
    trajectories: Sequence[PlanTrajectory],
    engines: Sequence[PlanEngine],
    model: CostModel = CostModel.LINEAR_INTEGRAL,
    *,
    curves: Sequence[BatchCurve | None] | None = None,
) -> Plan:
    """The plan of least makespan; balanced beyond the bottleneck, so that no engine stands empty for nothing.

    More engines than trajectories leave some groups empty; no trajectories leave all empty. Trajectories of equal
    length keep the caller's order. Raises what `plan_arrays` raises.
    """
    check_ids(trajectories, engines)
    n = len(trajectories)
    lengths = np.fromiter((trajectory.remaining_tokens for trajectory in trajectories), np.float64, n)
    contexts = np.fromiter((trajectory.context_tokens for trajectory in trajectories), np.float64, n)
    index_of = {engine.engine_id: index for index, engine in enumerate(engines)}
    current = np.fromiter((index_of.get(trajectory.current_engine_id, -1) for trajectory in trajectories), np.int64, n)
    costs = tabulate(model, lengths, contexts, current >= 0, engines, curves=curves)
    log_sigma = np.fromiter((trajectory.log_sigma for trajectory in trajectories), np.float64, n)
    room_tokens = np.fromiter((trajectory.room_tokens for trajectory in trajectories), np.float64, n)
    samples = sample_lengths(costs, contexts, log_sigma, room_tokens)
    found, bounds, engine_of_group = cut(costs, current, contexts, True, samples)
    groups: list[Group | None] = [None] * len(engines)
    order, ends = costs.order.tolist(), bounds.tolist()
    for at, engine in enumerate(engine_of_group.tolist()):
        ids = tuple(trajectories[index].trajectory_id for index in order[ends[at] : ends[at + 1]])
        groups[engine] = Group(engines[engine].engine_id, ids, float(found.finish_s[engine]))
    return Plan(tuple(group for group in groups if group is not None), found.makespan_s, found.lower_bound_s or 0.0)


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
    check_uncertainty(log_sigma, room_tokens, len(contexts))
    return draw_rank_samples(costs, contexts, log_sigma, room_tokens, workspace) if log_sigma.any() else None


def cut(
    costs: Costs, current: Indexes, contexts: Floats, bound: bool, samples: RankSamples | None
) -> tuple[ArrayPlan, Indexes, Indexes]:
    """The plan of a table, with the bounds of its groups and the engine (the caller's index) of each."""
    if samples is not None and is_hedgeable(costs):
        bounds, _ = best_partition(costs, samples)
    else:
        bounds, _ = partition(costs)
    group_of = np.empty(len(costs.order), np.int64)
    spread(costs.order, bounds, group_of)
    engine_of_group = deal(costs, group_of, current, contexts)
    cost_s = np.zeros(len(engine_of_group))
    group_costs(costs.table, bounds, cost_s)
    finish_s = np.empty(len(cost_s))
    finish_s[engine_of_group] = cost_s
    translate(group_of, engine_of_group)
    makespan_s = float(cost_s.max())
    lower_bound_s = min(lower_bound(costs), makespan_s) if bound else None
    return ArrayPlan(group_of, finish_s, makespan_s, lower_bound_s), bounds, engine_of_group


@lean
def translate(values: Indexes, by: Indexes) -> None:
    """Replace each value by by[value], in place."""
    for index in range(len(values)):
        values[index] = by[values[index]]


def check_ids(trajectories: Sequence[PlanTrajectory], engines: Sequence[PlanEngine]) -> None:
    """Raises InvalidEngineError or InvalidTrajectoryError for an empty id or one that comes twice."""
    ids: set[str] = set()
    for index, engine in enumerate(engines):
        if not engine.engine_id or engine.engine_id in ids:
            raise InvalidEngineError(f"engines[{index}].engine_id", describe_wrong_id(engine.engine_id))
        ids.add(engine.engine_id)
    ids = set()
    for index, trajectory in enumerate(trajectories):
        if not trajectory.trajectory_id or trajectory.trajectory_id in ids:
            raise InvalidTrajectoryError(
                f"trajectories[{index}].trajectory_id", describe_wrong_id(trajectory.trajectory_id)
            )
        ids.add(trajectory.trajectory_id)


def describe_wrong_id(given: str) -> str:
    return f"{given!r} comes twice" if given else "must not be empty"
