"""Where each trajectory runs: Heddle's presorted placement (§5.2, §6.2 for unequal engines), solved exactly.

Purpose: from predicted remaining work and the present engines to one group of trajectories an engine.
Invariants: a plan depends on its arguments alone; every trajectory is in exactly one group; groups come in the caller's
order of engines, each longest first; the makespan is the least that any contiguous partition of the descending order
has under the cost model, and the bound is a time that no partition whatever beats under it.
Among engines that are alike the groups are dealt so that the most context stays where it is: that costs nothing and
saves moves. Re-planning is calling `plan` again with the REMAINING work.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from treadle_core.actions import PlanEngine, PlanTrajectory
from treadle_core.costs import (
    CostModel,
    Costs,
    Floats,
    Indexes,
    InvalidEngineError,
    InvalidTrajectoryError,
    group_cost,
    tabulate,
)
from treadle_core.placement_bound import lower_bound
from treadle_core.placement_solver import partition


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


def plan(
    trajectories: Sequence[PlanTrajectory],
    engines: Sequence[PlanEngine],
    model: CostModel = CostModel.LINEAR_INTEGRAL,
) -> Plan:
    """The plan of least makespan; balanced beyond the bottleneck, so that no engine stands empty for nothing.

    More engines than trajectories leave some groups empty; no trajectories leave all empty. Trajectories of equal
    length keep the caller's order. Raises NoEnginesError, InvalidEngineError, InvalidTrajectoryError naming the field.
    """
    check_ids(trajectories, engines)
    n = len(trajectories)
    lengths = np.fromiter((trajectory.remaining_tokens for trajectory in trajectories), np.float64, n)
    contexts = np.fromiter((trajectory.context_tokens for trajectory in trajectories), np.float64, n)
    index_of = {engine.engine_id: index for index, engine in enumerate(engines)}
    current = np.fromiter((index_of.get(trajectory.current_engine_id, -1) for trajectory in trajectories), np.int64, n)
    costs = tabulate(model, lengths, contexts, current >= 0, engines)
    bounds, makespan_s = partition(costs)
    engine_of_group = deal(costs, bounds, current[costs.order], contexts[costs.order])
    groups: list[Group | None] = [None] * len(engines)
    for at, engine in enumerate(engine_of_group.tolist()):
        first, end = int(bounds[at]), int(bounds[at + 1])
        ids = tuple(trajectories[index].trajectory_id for index in costs.order[first:end].tolist())
        groups[engine] = Group(engines[engine].engine_id, ids, float(group_cost(costs.table, at, first, end)))
    return Plan(tuple(group for group in groups if group is not None), makespan_s, min(lower_bound(costs), makespan_s))


def deal(costs: Costs, bounds: Indexes, current: Indexes, contexts: Floats) -> Indexes:
    """Which of the caller's engines takes each group: among engines with equal figures, the one that holds most of it.

    `current` (caller's engine index, -1 for none) and `contexts` (tokens) are by rank. Greedy, most kept context
    first; at least half of the best possible.
    """
    engine_of_group = costs.engine_order.copy()
    placed = current >= 0
    rows = costs.table.engines
    alike = np.zeros(len(rows), np.int64)
    alike[1:] = np.cumsum((rows[1:] != rows[:-1]).any(axis=1))
    if not placed.any() or alike[-1] == len(rows) - 1:
        return engine_of_group
    m = len(rows)
    at_of_engine = np.empty(m, np.int64)
    at_of_engine[costs.engine_order] = np.arange(m)
    group_of_rank = np.repeat(np.arange(m), np.diff(bounds))
    # One token more than the context, so that a trajectory that has none counts too.
    pairs = group_of_rank[placed] * m + at_of_engine[current[placed]]
    kept_pairs, inverse = np.unique(pairs, return_inverse=True)
    kept = np.bincount(inverse, weights=contexts[placed] + 1.0)
    groups, holders = kept_pairs // m, kept_pairs % m
    dealt = np.full(m, -1, np.int64)
    taken = np.zeros(m, np.bool_)
    for pair in np.lexsort((kept_pairs, -kept)).tolist():
        group, holder = int(groups[pair]), int(holders[pair])
        if alike[group] == alike[holder] and dealt[group] < 0 and not taken[holder]:
            dealt[group] = holder
            taken[holder] = True
    for kind in np.unique(alike[dealt < 0]).tolist():
        dealt[(alike == kind) & (dealt < 0)] = np.flatnonzero((alike == kind) & ~taken)
    return costs.engine_order[dealt]


def check_ids(trajectories: Sequence[PlanTrajectory], engines: Sequence[PlanEngine]) -> None:
    """Raises InvalidEngineError or InvalidTrajectoryError for an empty id or one that comes twice."""
    ids: set[str] = set()
    for index, engine in enumerate(engines):
        if not engine.engine_id or engine.engine_id in ids:
            raise InvalidEngineError(f"engines[{index}].engine_id", wrong_id(engine.engine_id))
        ids.add(engine.engine_id)
    ids = set()
    for index, trajectory in enumerate(trajectories):
        if not trajectory.trajectory_id or trajectory.trajectory_id in ids:
            raise InvalidTrajectoryError(f"trajectories[{index}].trajectory_id", wrong_id(trajectory.trajectory_id))
        ids.add(trajectory.trajectory_id)


def wrong_id(given: str) -> str:
    return f"{given!r} comes twice" if given else "must not be empty"
