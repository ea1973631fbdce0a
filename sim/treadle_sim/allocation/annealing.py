"""Heddle's Algorithm 2 as printed (§6.2): sort-initialised simulated annealing over the degrees of the engines.

Purpose: the search that the paper ships, to compare `allocation.allocate` with; the product does not use it. Its inner
"presorted DP" is here the exact fast partition, which gives the same makespan, so that the comparison is of the
searches alone.
Where the paper leaves the algorithm open, this is how it is read:
- the first allocation: degrees drawn evenly from those that fit what is left of the budget (and with which the rest can
  still be dealt out), until it is spent; the number of workers is what comes of it, and split and merge change it;
- redistribution keeps the number of workers: one steps down to the next lower degree, and the GPUs it frees lift
  others a degree, drawn evenly, until none is over (else nothing changes);
- split: an engine becomes two whose degrees add up to its own; merge: two become one of their summed degree; each is
  drawn evenly from the choices there are; where there is none nothing changes;
- the cooling rate and the threshold are not given: COOLING and EPSILON_S make some 125 iterations of a rollout of
  minutes, which at the paper's 42 ms a DP are the 5 s that it reports (Table 2).
Invariant: the generator passed in is the only source of chance.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from treadle_core.placing.costs import CostModel, Indexes
from treadle_core.placing.solver import partition
from treadle_core.refusals import CoreError

from treadle_sim.allocation.plan import Allocation, EngineKind, Problem, dealable, lay_out, prepare

COOLING = 0.95  # of the temperature, an iteration
EPSILON_S = 0.5  # seconds, as the temperature


class InvalidCoolingError(CoreError):
    """A cooling rate or threshold with which the temperature would never fall below it."""


@dataclass(frozen=True, slots=True)
class Annealed:
    """The best allocation met, and how many were tried after the first."""

    allocation: Allocation
    iterations: int


def anneal(
    lengths: npt.ArrayLike,
    contexts: npt.ArrayLike,
    gpus: int,
    kinds: Sequence[EngineKind],
    rng: np.random.Generator,
    model: CostModel = CostModel.GROUP_SIZE,
    cooling: float = COOLING,
    epsilon_s: float = EPSILON_S,
) -> Annealed:
    """Heddle's plan for a budget; arguments and errors as `allocation.allocate`, and InvalidCoolingError.

    Its `optimal` is False: annealing proves nothing; `gap` is against the same bound.
    """
    if not 0.0 < cooling < 1.0:
        raise InvalidCoolingError("cooling", f"must be between 0 and 1, is {cooling}")
    if not 0.0 < epsilon_s < math.inf:
        raise InvalidCoolingError("epsilon_s", f"must be > 0 seconds, is {epsilon_s}")
    problem = prepare(lengths, contexts, gpus, kinds, model)
    counts = first_allocation(problem, rng)
    cost_s = makespan(problem, counts)
    temperature = cost_s
    best, best_s = counts, cost_s
    iterations = 0
    while temperature > epsilon_s:
        proposed = perturb(problem, counts, rng)
        proposed_s = makespan(problem, proposed)
        change_s = proposed_s - cost_s
        if change_s < 0.0 or rng.random() < math.exp(-change_s / temperature):
            counts, cost_s = proposed, proposed_s
            if cost_s < best_s:
                best, best_s = counts, cost_s
        temperature *= cooling
        iterations += 1
    return Annealed(lay_out(problem, best, optimal=False), iterations)


def makespan(problem: Problem, counts: Indexes) -> float:
    """Seconds of the best contiguous partition over counts[row] engines of each kind, fastest first (sorted)."""
    return partition(problem.engines(counts), fill_budget=0)[1]


def first_allocation(problem: Problem, rng: np.random.Generator) -> Indexes:
    """Engines of each kind, drawn until the budget is spent."""
    reachable = dealable(problem.gpus.tolist(), problem.budget)
    counts = np.zeros(len(problem.gpus), np.int64)
    left = problem.budget
    while left > 0:
        rows = [row for row, width in enumerate(problem.gpus) if width <= left and reachable[left - width]]
        row = int(rng.choice(rows))
        counts[row] += 1
        left -= int(problem.gpus[row])
    return counts


def perturb(problem: Problem, counts: Indexes, rng: np.random.Generator) -> Indexes:
    """One of the three transitions, drawn evenly; the same allocation where it is not possible."""
    transition = (redistribute, split, merge)[int(rng.integers(3))]
    return transition(problem.gpus, counts.copy(), rng)


def redistribute(gpus: Indexes, counts: Indexes, rng: np.random.Generator) -> Indexes:
    """GPUs go from one engine to others, as many engines as before."""
    before = counts.copy()
    ascending = np.argsort(gpus)  # rows by degree
    place = np.argsort(ascending)  # of a row in it
    donors = np.repeat(ascending[1:], counts[ascending[1:]])
    if not len(donors):
        return before
    row = int(rng.choice(donors))
    lower = int(ascending[place[row] - 1])
    counts[row] -= 1
    freed = int(gpus[row] - gpus[lower])
    while freed > 0:
        liftable = [
            int(at) for at, above in itertools.pairwise(ascending) if counts[at] > 0 and gpus[above] - gpus[at] <= freed
        ]
        if not liftable:
            return before
        weights = counts[liftable] / counts[liftable].sum()
        lifted = int(rng.choice(liftable, p=weights))
        above = int(ascending[place[lifted] + 1])
        counts[lifted] -= 1
        counts[above] += 1
        freed -= int(gpus[above] - gpus[lifted])
    counts[lower] += 1
    return counts


def split(gpus: Indexes, counts: Indexes, rng: np.random.Generator) -> Indexes:
    """An engine becomes two."""
    choices = [pair for pair in sums(gpus) if counts[pair[2]] > 0]
    if choices:
        one, other, whole = choices[int(rng.integers(len(choices)))]
        counts[whole] -= 1
        counts[one] += 1
        counts[other] += 1
    return counts


def merge(gpus: Indexes, counts: Indexes, rng: np.random.Generator) -> Indexes:
    """Two engines become one."""
    choices = [
        (one, other, whole)
        for one, other, whole in sums(gpus)
        if counts[one] > (1 if one == other else 0) and counts[other] > 0
    ]
    if choices:
        one, other, whole = choices[int(rng.integers(len(choices)))]
        counts[one] -= 1
        counts[other] -= 1
        counts[whole] += 1
    return counts


def sums(gpus: Indexes) -> list[tuple[int, int, int]]:
    """Rows (one, other, whole) with the degrees of the first two adding up to the third's."""
    row_of = {int(width): row for row, width in enumerate(gpus)}
    return [
        (one, other, row_of[int(gpus[one] + gpus[other])])
        for one in range(len(gpus))
        for other in range(one, len(gpus))
        if int(gpus[one] + gpus[other]) in row_of
    ]
