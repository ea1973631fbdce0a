"""Plan which engines to run on a budget of GPUs: Heddle's resource manager (§6), solved exactly.

`allocate` finds the least makespan under a cost model, over every multiset of engine kinds within
the budget and every contiguous partition of the trajectories, longest first, over them (`search`:
exact, not annealed). `homogeneous` finds the best single degree, the strongest baseline without a
resource plan. `annealing.anneal` is Heddle's own search, for comparison. `choose_degrees` tries
engines where tools take time, for which none of these has a cost.

A plan depends on its arguments alone. Engines come in the order in which they take the
trajectories, fastest kind first. The makespan is that of the core's `partition` on these engines,
as the placement service gives it once they run.

Ties: many multisets have the least makespan. Of these the plan has the least second-largest cost of
a group, and so on (within an amount of work, `search.REFINE_EXTENSIONS`). GPUs that are left even
then become further engines, fastest kind first: one more engine makes no plan worse, and the
predictions are uncertain.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from treadle_core.compiled import Indexes
from treadle_core.model import CostModel, DecodeCurve
from treadle_core.placing import paths
from treadle_core.placing.candidates import best_placement
from treadle_core.placing.question import PlanEngine, check_workload
from treadle_core.placing.solver import Costs, group_cost, partition, tabulate
from treadle_core.refusals import CoreError

from treadle_sim.allocation.search import lower_bound, search

# those that `lower_bound` covers
PLANNED_MODELS = (CostModel.GROUP_SIZE, CostModel.LINEAR_INTEGRAL)


# Of a single engine, and of a mixture of degrees: in simulation of public traces one that was
# chosen for less of a difference ended later as often as sooner.
HANDICAP, MIXED_HANDICAP = 0.03, 0.05


class InvalidBudgetError(CoreError):
    """No engines of the kinds that fit add up to the number of GPUs."""


class NoKindFitsError(CoreError):
    """No kind of engine both fits the budget and holds its weights and the longest trajectory's
    KV."""


@dataclass(frozen=True, slots=True)
class EngineKind:
    """Kind of engine that could be started: the model on `gpus` GPUs, a degree that occurs once
    among the kinds.

    slot_limit: sequences that decode at once. kv_tokens_capacity: KV tokens that fit beside the
    weights; None: unknown, taken as enough; 0: the weights do not fit.
    """

    gpus: int
    slot_limit: int
    kv_tokens_capacity: int | None
    decode_curve: DecodeCurve

    def holds(self, kv_tokens: float) -> bool:
        """Return whether the weights fit and, beside them, that much KV."""
        return self.kv_tokens_capacity is None or 0 < self.kv_tokens_capacity >= kv_tokens


@dataclass(frozen=True, slots=True)
class PlannedEngine:
    """One engine of a plan: its GPUs, how many trajectories it runs, and the seconds that it
    needs."""

    gpus: int
    trajectories: int
    predicted_s: float


@dataclass(frozen=True, slots=True)
class Allocation:
    """Engines to run, fastest first. `optimal`: proven to have the least makespan of its cost
    (`allocate`).

    lower_bound_s: no engines within the budget and no assignment take less under the cost model.
    left_out: degrees at which the weights and the longest trajectory do not fit, or that exceed the
    budget. GPUs are left idle only where that is no worse and the degrees do not add up.
    """

    engines: tuple[PlannedEngine, ...]
    makespan_s: float
    lower_bound_s: float
    optimal: bool
    left_out: tuple[int, ...]

    @property
    def gap(self) -> float:
        """Return the share by which the makespan exceeds the lower bound; 0 where both are 0."""
        return self.makespan_s / self.lower_bound_s - 1.0 if self.lower_bound_s > 0.0 else 0.0

    @property
    def degrees(self) -> tuple[int, ...]:
        """Return the GPUs of each engine, in the order of the engines."""
        return tuple(engine.gpus for engine in self.engines)


@dataclass(frozen=True)
class Problem:
    """Workload and the kinds that can run it: `costs` has one row a kind, `gpus` its GPUs by
    row."""

    costs: Costs
    gpus: Indexes
    budget: int
    left_out: tuple[int, ...]

    def engines(self, counts: Indexes) -> Costs:
        """Return the same workload on counts[row] engines of each kind; engine_order gives each
        engine's row."""
        row_of_engine = np.repeat(np.arange(len(self.gpus)), counts)
        table = self.costs.table
        rows = np.ascontiguousarray(table.engines[row_of_engine])
        table = table._replace(engines=rows, reach_of=table.reach_of[row_of_engine])
        return Costs(table, self.costs.order, row_of_engine)

    def makespan_s(self, counts: Indexes) -> float:
        """Return the seconds of the best contiguous partition over counts[row] engines of each
        kind, fastest first (sorted)."""
        return partition(self.engines(counts), fill_budget=0)[1]


def allocate(
    lengths: npt.ArrayLike,
    contexts: npt.ArrayLike,
    gpus: int,
    kinds: Sequence[EngineKind],
    model: CostModel = CostModel.LINEAR_INTEGRAL,
) -> Allocation:
    """Return the exact plan for a budget of `gpus`.

    lengths and contexts: predicted remaining and present tokens of each trajectory, at least one;
    contexts are prefilled, since the engines are new. model: one of PLANNED_MODELS. Raises
    InvalidTrajectoryError, InvalidEngineError, InvalidBudgetError and NoKindFitsError.
    """
    problem = prepare(lengths, contexts, gpus, kinds, model)
    counts = np.zeros(len(problem.gpus), np.int64)
    _, used = search(problem.costs.table, problem.gpus, problem.budget, counts)
    spend_rest(problem, counts, problem.budget - int(used))
    return lay_out(problem, counts, optimal=True)


def choose_degrees(
    work: paths.Work, medians: paths.Work, gpus: int, kinds: Sequence[EngineKind]
) -> tuple[int, ...]:
    """Return the GPUs of each engine, fastest first: of one degree, or of two that share the budget
    by quarters, whichever the core places `work` on with the least mean makespan; of equal ones the
    first in the order of `kinds`. A single engine, which no later plan can relieve, must be
    HANDICAP better, a mixture MIXED_HANDICAP.

    work: samples of trajectories that have not started, medians: the same at its medians. Where
    tools take time no search is exact (`placing.paths`), and simulated mixtures were never far
    better than the best single degree. Raises InvalidBudgetError and NoKindFitsError.
    """
    amounts = medians.amounts[0]
    grown = amounts[:, paths.TOKENS] + amounts[:, paths.OBSERVED]
    fitting, _ = _fit_kinds(float((medians.contexts + grown).max()), gpus, kinds)
    current = np.full(len(medians.contexts), -1)
    found: dict[tuple[int, ...], float] = {}
    for counts in _mixtures(np.array([kind.gpus for kind in fitting]), gpus):
        engines = [
            _engine_of(kind)
            for kind, count in zip(fitting, counts, strict=True)
            for _ in range(count)
        ]
        rows = paths.engine_rows(engines)
        placement = best_placement(rows, paths.kinds_of(engines), work, medians, current)
        degrees = tuple(sorted((engine.tensor_parallel for engine in engines), reverse=True))
        mean_s = float(paths.makespans_s(rows, work, placement).mean())
        handicap = (
            MIXED_HANDICAP if len(set(degrees)) > 1 else HANDICAP if len(engines) == 1 else 0.0
        )
        found.setdefault(degrees, (1.0 + handicap) * mean_s)
    return min(found, key=lambda degrees: found[degrees])


def homogeneous(
    lengths: npt.ArrayLike,
    contexts: npt.ArrayLike,
    gpus: int,
    kinds: Sequence[EngineKind],
    model: CostModel = CostModel.LINEAR_INTEGRAL,
) -> Allocation:
    """Return the best plan with engines of one degree, as many as the budget pays: the lower degree
    where two are equal.

    `optimal` is False: only one degree was tried at a time. Raises what `allocate` does.
    """
    problem = prepare(lengths, contexts, gpus, kinds, model)
    of_one_degree = np.diag(problem.budget // problem.gpus)[np.argsort(problem.gpus)]
    return lay_out(problem, min(of_one_degree, key=problem.makespan_s), optimal=False)


def prepare(
    lengths: npt.ArrayLike,
    contexts: npt.ArrayLike,
    gpus: int,
    kinds: Sequence[EngineKind],
    model: CostModel,
) -> Problem:
    """Tabulate the kinds that fit. Raises what `allocate` does."""
    remaining, present = np.asarray(lengths, np.float64), np.asarray(contexts, np.float64)
    check_workload(remaining, present)
    fitting, left_out = _fit_kinds(float((remaining + present).max()), gpus, kinds)
    engines = [_engine_of(kind) for kind in fitting]
    costs = tabulate(model, remaining, present, np.zeros(len(remaining), np.bool_), engines)
    widths = np.array([kind.gpus for kind in fitting], np.int64)[costs.engine_order]
    return Problem(costs, widths, gpus, left_out)


def compile_kernels() -> None:
    """Run small plans under each cost model, so that numba compiles and caches the kernels.

    A plan of one trajectory has arrays of other types: numpy counts any column of one row as
    contiguous.
    """
    kinds = [
        EngineKind(gpus, 8, 100_000, DecodeCurve(0.01 / gpus, 1e-4, 1e-8, 1e4))
        for gpus in (1, 2, 4)
    ]
    for model, n in itertools.product(PLANNED_MODELS, (1, 40)):
        allocate(np.linspace(100.0, 9_000.0, n), np.ones(n), 16, kinds, model)


def _fit_kinds(
    needed: float, gpus: int, kinds: Sequence[EngineKind]
) -> tuple[list[EngineKind], tuple[int, ...]]:
    """Return the kinds that hold a context of `needed` tokens within the budget, and the degrees of
    the others."""
    fitting = [kind for kind in kinds if kind.gpus <= gpus and kind.holds(needed)]
    left_out = tuple(sorted(kind.gpus for kind in kinds if kind not in fitting))
    if not fitting:
        raise NoKindFitsError(
            "kinds",
            f"none runs on at most {gpus} GPUs and holds {needed:g} KV tokens beside the weights",
        )
    reachable = reachable_sums([kind.gpus for kind in fitting], gpus)
    if not reachable[gpus]:
        most = int(np.flatnonzero(reachable)[-1])
        degrees = ", ".join(str(kind.gpus) for kind in sorted(fitting, key=lambda kind: kind.gpus))
        raise InvalidBudgetError(
            "gpus", f"no engines of {degrees} GPUs add up to {gpus}; {most} is the next below"
        )
    return fitting, left_out


def _engine_of(kind: EngineKind) -> PlanEngine:
    """Return the engine as the cost models see it, to which a capacity of 0 is unknown."""
    return PlanEngine(
        f"x{kind.gpus}", kind.slot_limit, kind.kv_tokens_capacity or 0, kind.gpus, kind.decode_curve
    )


def reachable_sums(degrees: Sequence[int], gpus: int) -> npt.NDArray[np.bool_]:
    """Return by number of GPUs, 0 to `gpus`, whether engines of these degrees add up to it."""
    reachable = np.zeros(gpus + 1, np.bool_)
    reachable[0] = True
    for degree in degrees:
        for start in range(min(degree, gpus + 1)):
            reachable[start::degree] = np.logical_or.accumulate(reachable[start::degree])
    return reachable


def lay_out(problem: Problem, counts: Indexes, *, optimal: bool) -> Allocation:
    """Return the plan with counts[row] engines of each kind: the exact and balanced partition over
    them."""
    costs = problem.engines(counts)
    bounds, makespan_s = partition(costs)
    groups = enumerate(itertools.pairwise(bounds.tolist()))
    engines = tuple(
        PlannedEngine(
            int(problem.gpus[row]), end - first, float(group_cost(costs.table, engine, first, end))
        )
        for row, (engine, (first, end)) in zip(costs.engine_order, groups, strict=True)
    )
    bound_s = lower_bound(problem.costs.table, problem.gpus, problem.budget, makespan_s)
    return Allocation(engines, makespan_s, min(bound_s, makespan_s), optimal, problem.left_out)


def spend_rest(problem: Problem, counts: Indexes, left: int) -> None:
    """Add engines for GPUs that the plan does not need, fastest kind first, all of them where the
    degrees add up."""
    reachable = reachable_sums(problem.gpus.tolist(), left)
    while affordable := [row for row, width in enumerate(problem.gpus) if width <= left]:
        row = next(
            (row for row in affordable if reachable[left - problem.gpus[row]]), affordable[0]
        )
        counts[row] += 1
        left -= int(problem.gpus[row])


def _mixtures(degrees: Indexes, gpus: int) -> list[Indexes]:
    """Return the counts of engines for one degree, and for two that share the budget by quarters;
    only those that use all of it."""
    found = []
    rows = range(len(degrees))
    for first, second, quarters in itertools.product(rows, rows, (4, 3, 2, 1)):
        counts = np.zeros(len(degrees), np.int64)
        counts[first] = gpus * quarters // 4 // degrees[first]
        left = gpus - int(counts @ degrees)
        counts[second] += left // degrees[second]
        if counts[first] > 0 and int(counts @ degrees) == gpus:
            found.append(counts)
    return found
