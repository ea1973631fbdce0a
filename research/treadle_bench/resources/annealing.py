"""Heddle's Algorithm 2 as printed (§6.2): sort-initialised simulated annealing over the degrees of
the engines.

It is the search of the paper, to compare `plan.allocate` with; the product does not use it. Its
inner "presorted DP" is the exact fast partition here, which gives the same makespan, so that only
the searches differ.

Where the paper leaves the algorithm open, it is read so:
- the first allocation: degrees drawn evenly from those that fit the rest of the budget (and leave a
  rest that degrees
  add up to) until it is spent; that sets the number of workers, which split and merge change;
- redistribution keeps the number of workers: one goes down to the next lower degree, and the GPUs
  it frees raise others
  by a degree, drawn evenly, until none is left (else nothing changes);
- split: an engine becomes two whose degrees add up to its own; merge: two become one of their
  summed degree; each is
  drawn evenly from the possible ones; without any nothing changes;
- the cooling rate and the threshold are not given: COOLING and EPSILON_S make some 125 iterations
  of a rollout of
  minutes, which at the paper's 42 ms a DP are the 5 s that it reports (Table 2).
The generator passed in is the only source of randomness.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from treadle_core.compiled import Indexes
from treadle_core.model import CostModel
from treadle_sim.allocation.plan import (
    Allocation,
    EngineKind,
    Problem,
    lay_out,
    prepare,
    reachable_sums,
)

COOLING = 0.95  # of the temperature, an iteration
EPSILON_S = 0.5  # seconds, as the temperature; below it the search ends


@dataclass(frozen=True, slots=True)
class Annealed:
    """The best allocation found, and how many were tried after the first."""

    allocation: Allocation
    iterations: int


def anneal(
    lengths: npt.ArrayLike,
    contexts: npt.ArrayLike,
    gpus: int,
    kinds: Sequence[EngineKind],
    rng: np.random.Generator,
    model: CostModel = CostModel.GROUP_SIZE,
) -> Annealed:
    """Heddle's plan for a budget; arguments and errors as `plan.allocate` has them.

    Its `optimal` is False: annealing proves nothing; `gap` is against the same bound.
    """
    problem = prepare(lengths, contexts, gpus, kinds, model)
    counts = draw_first_allocation(problem, rng)
    cost_s = problem.makespan_s(counts)
    temperature = cost_s
    best, best_s = counts, cost_s
    iterations = 0
    while temperature > EPSILON_S:
        proposed = perturb(problem, counts, rng)
        proposed_s = problem.makespan_s(proposed)
        change_s = proposed_s - cost_s
        if change_s < 0.0 or rng.random() < math.exp(-change_s / temperature):
            counts, cost_s = proposed, proposed_s
            if cost_s < best_s:
                best, best_s = counts, cost_s
        temperature *= COOLING
        iterations += 1
    return Annealed(lay_out(problem, best, optimal=False), iterations)


def draw_first_allocation(problem: Problem, rng: np.random.Generator) -> Indexes:
    """Engines of each kind, drawn until the budget is spent."""
    reachable = reachable_sums(problem.gpus.tolist(), problem.budget)
    counts = np.zeros(len(problem.gpus), np.int64)
    left = problem.budget
    while left > 0:
        rows = [
            row
            for row, width in enumerate(problem.gpus)
            if width <= left and reachable[left - width]
        ]
        row = int(rng.choice(rows))
        counts[row] += 1
        left -= int(problem.gpus[row])
    return counts


def perturb(problem: Problem, counts: Indexes, rng: np.random.Generator) -> Indexes:
    """Apply one of the three transitions, drawn evenly; nothing changes if it is not possible."""
    transition = (redistribute, split, merge)[int(rng.integers(3))]
    return transition(problem.gpus, counts.copy(), rng)


def redistribute(gpus: Indexes, counts: Indexes, rng: np.random.Generator) -> Indexes:
    """Move GPUs from one engine to others; the number of engines stays."""
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
            int(at)
            for at, above in itertools.pairwise(ascending)
            if counts[at] > 0 and gpus[above] - gpus[at] <= freed
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
    """Turn one engine into two."""
    return _exchange(counts, [rows for rows in _summing_rows(gpus) if counts[rows[2]] > 0], 1, rng)


def merge(gpus: Indexes, counts: Indexes, rng: np.random.Generator) -> Indexes:
    """Turn two engines into one."""
    choices = [
        (one, other, whole)
        for one, other, whole in _summing_rows(gpus)
        if counts[one] > (1 if one == other else 0) and counts[other] > 0
    ]
    return _exchange(counts, choices, -1, rng)


def _exchange(
    counts: Indexes, choices: list[tuple[int, int, int]], more: int, rng: np.random.Generator
) -> Indexes:
    """For (one, other, whole) of the choices: `more` engines of the first two, as many less of the
    third."""
    if choices:
        one, other, whole = choices[int(rng.integers(len(choices)))]
        counts[one] += more
        counts[other] += more
        counts[whole] -= more
    return counts


def _summing_rows(gpus: Indexes) -> list[tuple[int, int, int]]:
    """Rows (one, other, whole) with the degrees of the first two adding up to the third's."""
    row_of = {int(width): row for row, width in enumerate(gpus)}
    return [
        (one, other, row_of[int(gpus[one] + gpus[other])])
        for one in range(len(gpus))
        for other in range(one, len(gpus))
        if int(gpus[one] + gpus[other]) in row_of
    ]
