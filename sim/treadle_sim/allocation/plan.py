"""How many engines of which parallelism a GPU budget is dealt out in: Heddle's resource manager (§6), solved exactly.

Purpose: from predicted work and the kinds of engine that there could be to the engines to run. `allocate` gives the
least makespan under a cost model over every multiset of kinds within the budget and every contiguous partition of the
descending order over them (`allocation_search`: exact, not annealed); `homogeneous` gives the best single degree, the
strongest baseline there is without this. `annealing.anneal` is Heddle's own search, for comparison.
Invariants: a plan depends on its arguments alone; engines come in the order in which they take the descending order,
fastest kind first; the makespan is that of `placement_solver.partition` on these engines, which is what the placement
gives once they run; the lower bound is a time that no engines within the budget and no assignment whatever beat under
the cost model.
Ties: many multisets share the least makespan. Taken is the one that gives the ranks beside the bottleneck's group the
least second-largest cost, and so on (within an amount of work, `allocation_search.REFINE_EXTENSIONS`). GPUs that even
then nobody needs become further engines, fastest kind first: an engine more makes no plan worse, and the next longest
trajectory than the predicted one may come from anywhere.

What a resource plan is asked of, checked: kinds of engine, the GPU budget, and the error that names a bad figure.

Invariant: an error's `field` is the path of the input as the caller of `allocation.allocate` wrote it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
from treadle_core.model import DecodeCurve
from treadle_core.placing.costs import CostModel, Costs, Floats, Indexes, group_cost, tabulate
from treadle_core.placing.placement import uncertain
from treadle_core.placing.question import (
    InvalidEngineError,
    InvalidTrajectoryError,
    NoEnginesError,
    PlanEngine,
    check_workload,
    engine_rows,
)
from treadle_core.placing.rank_scenarios import SHARES, RankSamples, best_partition, hedged
from treadle_core.placing.solver import partition
from treadle_core.refusals import CoreError

from treadle_sim.allocation.bound import lower_bound
from treadle_sim.allocation.search import REFINE_EXTENSIONS, search

# More GPUs than this are a mistake; the search takes memory in proportion.
MOST_GPUS = 1_000_000
PLANNED_MODELS = (CostModel.GROUP_SIZE, CostModel.LINEAR_INTEGRAL)


class InvalidBudgetError(CoreError):
    """A number of GPUs that is no number of GPUs, or that no engines of the kinds that fit add up to."""


class NoKindFitsError(CoreError):
    """No kind of engine both fits the budget and holds its weights and the longest trajectory's KV."""


class InvalidModelError(CoreError):
    """A cost model that resource plans have no lower bound for; see PLANNED_MODELS."""


@dataclass(frozen=True, slots=True)
class EngineKind:
    """An engine that could be started: the model on `gpus` GPUs, a degree that occurs once among the kinds.

    slot_limit: sequences that decode at once. kv_tokens_capacity: KV tokens that fit beside the weights; None: unknown,
    taken as enough; 0: not even the weights fit.
    """

    gpus: int
    slot_limit: int
    kv_tokens_capacity: int | None
    decode_curve: DecodeCurve


def dealable(degrees: Sequence[int], gpus: int) -> npt.NDArray[np.bool_]:
    """By number of GPUs, 0 to `gpus`: whether engines of these degrees add up to it."""
    reachable = np.zeros(gpus + 1, np.bool_)
    reachable[0] = True
    for degree in degrees:
        for start in range(min(degree, gpus + 1)):
            reachable[start::degree] = np.logical_or.accumulate(reachable[start::degree])
    return reachable


def holds(kind: EngineKind, kv_tokens: float) -> bool:
    """Whether the weights fit and, beside them, that much KV."""
    return kind.kv_tokens_capacity is None or 0 < kind.kv_tokens_capacity >= kv_tokens


def as_engine(kind: EngineKind) -> PlanEngine:
    """As the cost models read it, where a capacity of 0 means unknown."""
    return PlanEngine(
        f"x{kind.gpus}", kind.slot_limit, kind.kv_tokens_capacity or 0, max(kind.gpus, 1), kind.decode_curve
    )


def check_kinds(kinds: Sequence[EngineKind]) -> None:
    """Raises NoEnginesError, or InvalidEngineError naming the first bad figure."""
    if not kinds:
        raise NoEnginesError("kinds", "at least one kind of engine is needed")
    seen: set[int] = set()
    for index, kind in enumerate(kinds):
        if isinstance(kind.gpus, bool) or not isinstance(kind.gpus, int | np.integer) or kind.gpus < 1:
            raise InvalidEngineError(f"kinds[{index}].gpus", f"must be a whole number >= 1, is {kind.gpus!r}")
        if kind.gpus in seen:
            raise InvalidEngineError(f"kinds[{index}].gpus", f"{kind.gpus} comes twice")
        seen.add(kind.gpus)
        if kind.kv_tokens_capacity is not None and not kind.kv_tokens_capacity >= 0:  # NaN fails too
            raise InvalidEngineError(
                f"kinds[{index}].kv_tokens_capacity", f"must be >= 0 or unknown, is {kind.kv_tokens_capacity}"
            )
        if kind.kv_tokens_capacity == 0:  # never started: what else it says does not matter
            continue
        try:
            engine_rows([as_engine(kind)])
        except InvalidEngineError as error:
            raise InvalidEngineError(error.field.replace("engines[0]", f"kinds[{index}]"), error.description) from None


def tokens(name: str, values: npt.ArrayLike) -> Floats:
    """One number a trajectory. Raises InvalidTrajectoryError where it is not that."""
    try:
        found = np.asarray(values, np.float64)
    except (TypeError, ValueError):
        raise InvalidTrajectoryError(f"trajectories.{name}", "must be numbers, one a trajectory") from None
    if found.ndim != 1:
        raise InvalidTrajectoryError(f"trajectories.{name}", f"must be one number a trajectory, is {found.ndim}-d")
    return found


__all__ = [
    "PLANNED_MODELS",
    "RECOURSE",
    "Allocation",
    "EngineKind",
    "InvalidBudgetError",
    "InvalidModelError",
    "NoKindFitsError",
    "PlannedEngine",
    "Problem",
    "allocate",
    "dealable",
    "homogeneous",
    "lay_out",
    "prepare",
]

# Of the doubt there is before the first step, what an allocation still has to reckon with: predictions get better and
# trajectories move. In simulation 0.5 to 0.75 chose engines within 3% of the best of seven choices, 1 within 5%, and 0
# (the medians) within 7%.
RECOURSE = 0.75


@dataclass(frozen=True, slots=True)
class PlannedEngine:
    """One engine of a plan: its GPUs, how many trajectories of the descending order it runs, the seconds it needs."""

    gpus: int
    trajectories: int
    predicted_s: float


@dataclass(frozen=True, slots=True)
class Allocation:
    """The engines to run, fastest first. `optimal`: proven to have the least makespan of its cost (`allocate`).

    left_out: degrees at which the weights and the longest trajectory do not fit, or that exceed the budget. gpus_idle
    is more than 0 only where that is no worse and the degrees do not add up.
    """

    engines: tuple[PlannedEngine, ...]
    makespan_s: float
    lower_bound_s: float
    optimal: bool
    gpus_idle: int
    left_out: tuple[int, ...]

    @property
    def gap(self) -> float:
        """By what part the makespan exceeds a time that no plan of any shape beats; 0 where both are 0."""
        return self.makespan_s / self.lower_bound_s - 1.0 if self.lower_bound_s > 0.0 else 0.0

    @property
    def degrees(self) -> tuple[int, ...]:
        """GPUs of each engine, in the order of the engines."""
        return tuple(engine.gpus for engine in self.engines)


@dataclass(frozen=True)
class Problem:
    """A workload and the kinds that can run it: `costs` has one row a kind, `gpus` its GPUs by row."""

    costs: Costs
    gpus: Indexes
    budget: int
    left_out: tuple[int, ...]

    def engines(self, counts: Indexes) -> Costs:
        """The same workload on counts[row] engines of each kind; engine_order gives each engine's row."""
        row_of_engine = np.repeat(np.arange(len(self.gpus)), counts)
        table = self.costs.table
        rows = np.ascontiguousarray(table.engines[row_of_engine])
        table = table._replace(engines=rows, reach_of=table.reach_of[row_of_engine])
        return Costs(table, self.costs.order, row_of_engine)


def allocate(
    lengths: npt.ArrayLike,
    contexts: npt.ArrayLike,
    gpus: int,
    kinds: Sequence[EngineKind],
    model: CostModel = CostModel.LINEAR_INTEGRAL,
    refine_extensions: int = REFINE_EXTENSIONS,
    *,
    log_sigma: npt.ArrayLike | None = None,
    room_tokens: npt.ArrayLike | None = None,
) -> Allocation:
    """The exact plan for a budget of `gpus`; of lengths that are uncertain the best of several (`hedged_counts`).

    lengths and contexts: predicted remaining and present tokens of each trajectory; contexts are prefilled, since the
    engines are new. log_sigma and room_tokens: as `placement.plan_arrays` has them. Raises
    InvalidTrajectoryError (none at all too), InvalidEngineError, NoEnginesError, InvalidBudgetError, NoKindFitsError,
    InvalidModelError naming the field.
    """
    problem = prepare(lengths, contexts, gpus, kinds, model)
    if log_sigma is not None and model is CostModel.LINEAR_INTEGRAL:
        sigmas = RECOURSE * tokens("log_sigma", log_sigma)
        room = None if room_tokens is None else tokens("room_tokens", room_tokens)
        samples = uncertain(problem.costs, tokens("context_tokens", contexts), sigmas, room)
        if samples is not None:
            return lay_out(problem, hedged_counts(problem, samples, refine_extensions), optimal=False)
    return lay_out(problem, exact_counts(problem, refine_extensions), optimal=True)


def exact_counts(problem: Problem, refine_extensions: int) -> Indexes:
    """Engines of each kind in the exact plan."""
    counts = np.zeros(len(problem.gpus), np.int64)
    _, used = search(problem.costs.table, problem.gpus, problem.budget, refine_extensions, counts)
    spend_rest(problem, counts, problem.budget - int(used))
    return counts


def hedged_counts(problem: Problem, samples: RankSamples, refine_extensions: int) -> Indexes:
    """Engines of each kind in the plan of least mean makespan over the samples, of those that are exact for a share of
    the longest hidden in each group (`hedging.SHARES`), the single degrees, and mixtures of two degrees by halves and
    quarters of the budget."""
    tried = [exact_counts(replace(problem, costs=hedged(problem.costs, share)), refine_extensions) for share in SHARES]
    tried += mixtures(problem)
    seen: dict[tuple[int, ...], float] = {}
    for counts in tried:
        key = tuple(counts.tolist())
        if key not in seen:
            seen[key] = best_partition(problem.engines(counts), samples)[1]
    return np.array(min(seen, key=lambda key: (seen[key], key)), np.int64)


def mixtures(problem: Problem) -> list[Indexes]:
    """Counts for one degree, and for two that share the budget by quarters; only those that use all of it."""
    found = []
    for first, width in enumerate(problem.gpus.tolist()):
        for second, other in enumerate(problem.gpus.tolist()):
            for quarters in (1, 2, 3, 4) if first != second else (4,):
                counts = np.zeros(len(problem.gpus), np.int64)
                counts[first] = problem.budget * quarters // 4 // width
                left = problem.budget - int(counts[first]) * width
                counts[second] += left // other
                if counts[first] > 0 and int((counts * problem.gpus).sum()) == problem.budget:
                    found.append(counts)
    return found


def homogeneous(
    lengths: npt.ArrayLike,
    contexts: npt.ArrayLike,
    gpus: int,
    kinds: Sequence[EngineKind],
    model: CostModel = CostModel.LINEAR_INTEGRAL,
) -> Allocation:
    """The best plan with engines of one degree, as many as the budget pays: the lower degree where two are equal.

    `optimal` is False: only one degree was tried at a time. Raises what `allocate` does.
    """
    problem = prepare(lengths, contexts, gpus, kinds, model)
    least_s = np.inf
    best = np.zeros(len(problem.gpus), np.int64)
    for row in np.argsort(problem.gpus).tolist():
        counts = np.zeros(len(problem.gpus), np.int64)
        counts[row] = problem.budget // problem.gpus[row]
        _, makespan_s = partition(problem.engines(counts), fill_budget=0)
        if makespan_s < least_s:
            least_s, best = makespan_s, counts
    return lay_out(problem, best, optimal=False)


def prepare(
    lengths: npt.ArrayLike, contexts: npt.ArrayLike, gpus: int, kinds: Sequence[EngineKind], model: CostModel
) -> Problem:
    """Checks the input and tabulates the kinds that fit. Raises what `allocate` does."""
    if model not in PLANNED_MODELS:
        raise InvalidModelError("model", f"must be one of {', '.join(each.name for each in PLANNED_MODELS)}")
    remaining = tokens("remaining_tokens", lengths)
    present = tokens("context_tokens", contexts)
    if not len(remaining):
        raise InvalidTrajectoryError("trajectories", "at least one is needed to plan engines for")
    check_workload(remaining, present)
    if isinstance(gpus, bool) or not isinstance(gpus, int | np.integer) or not 1 <= gpus <= MOST_GPUS:
        raise InvalidBudgetError("gpus", f"must be a whole number from 1 to {MOST_GPUS}, is {gpus!r}")
    check_kinds(kinds)
    needed = float((remaining + present).max())
    fitting = [kind for kind in kinds if kind.gpus <= gpus and holds(kind, needed)]
    left_out = tuple(sorted(kind.gpus for kind in kinds if kind not in fitting))
    if not fitting:
        raise NoKindFitsError(
            "kinds", f"none runs on at most {gpus} GPUs and holds {needed:g} KV tokens beside the weights"
        )
    reachable = dealable([kind.gpus for kind in fitting], int(gpus))
    if not reachable[gpus]:
        most = int(np.flatnonzero(reachable)[-1])
        degrees = ", ".join(str(kind.gpus) for kind in sorted(fitting, key=lambda kind: kind.gpus))
        raise InvalidBudgetError("gpus", f"no engines of {degrees} GPUs add up to {gpus}; {most} is the next below")
    nobody_placed = np.zeros(len(remaining), np.bool_)
    costs = tabulate(model, remaining, present, nobody_placed, [as_engine(kind) for kind in fitting])
    widths = np.array([kind.gpus for kind in fitting], np.int64)[costs.engine_order]
    return Problem(costs, widths, int(gpus), left_out)


def lay_out(problem: Problem, counts: Indexes, *, optimal: bool) -> Allocation:
    """The plan with counts[row] engines of each kind: the exact and balanced partition over them."""
    costs = problem.engines(counts)
    bounds, makespan_s = partition(costs)
    engines = tuple(
        PlannedEngine(
            int(problem.gpus[row]), int(end - first), float(group_cost(costs.table, engine, int(first), int(end)))
        )
        for engine, (row, first, end) in enumerate(zip(costs.engine_order, bounds[:-1], bounds[1:], strict=True))
    )
    bound_s = lower_bound(problem.costs.table, problem.gpus, problem.budget, makespan_s)
    idle = problem.budget - int((counts * problem.gpus).sum())
    return Allocation(engines, makespan_s, min(bound_s, makespan_s), optimal, idle, problem.left_out)


def spend_rest(problem: Problem, counts: Indexes, left: int) -> None:
    """Adds engines for GPUs that the plan does not need, fastest kind first, all of them where the degrees add up."""
    reachable = dealable(problem.gpus.tolist(), left)
    while True:
        exact = [row for row, width in enumerate(problem.gpus) if width <= left and reachable[left - width]]
        rows = exact or [row for row, width in enumerate(problem.gpus) if width <= left]
        if not rows:
            return
        counts[rows[0]] += 1
        left -= int(problem.gpus[rows[0]])
