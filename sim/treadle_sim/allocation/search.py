"""Compiled search for the exact resource plan: which engines to run on a budget of GPUs, and which
trajectories each runs; and a lower bound on the makespan of every plan, to measure one by.

Over all multisets of engine kinds whose GPUs add up to at most the budget, and all partitions of
the trajectories, longest first, into one contiguous group an engine (fastest kind first), it finds
the least makespan: Heddle §6.1, its two subproblems solved as one. `plan.allocate` calls it.

Why a probe is exact. For a limit T let far(k, r) be the furthest end that an engine of kind k
reaches from rank r with a cost <= T, and reach(k, g) the furthest rank covered by engines of the
kinds 0..k on at most g GPUs. Then
    reach(k, g) = max(reach(k - 1, g), far(k, reach(k, g - gpus_k))),
because far never falls as r grows: a group that loses its longest never costs more
(`costs.group_cost`), so an engine that runs from r < r' to some end can also run from r' to it. So
of all ways to spend g GPUs on the first kinds only the one that reaches furthest matters. The
budget is enough within T exactly if reach(last kind, budget) covers all ranks. A probe takes kinds
* budget extensions of O(log n).

Why the bisection ends on the optimum itself: a probe that succeeds proves the largest cost of its
groups. One that fails proves that no limit below the least cost of an extended group can succeed,
since up to there every far, and so every reach, is the same. Both are costs of real groups, and the
interval between them becomes empty.

Beyond the bottleneck: many multisets have the least makespan, mostly where one long trajectory sets
it. The bottleneck's group and engine are fixed, and the ranks before it (on kinds as fast or
faster) and after it (as fast or slower) are solved again together on the GPUs that are left: the
least second-largest cost given the first, and so on until nothing is left or REFINE_EXTENSIONS is
spent. The first round's optimum is exact; later ones refine it.

The bound holds for any engines and any assignment to them: `lower_bound` <= the makespan, under the
cost model, of every multiset of the given kinds within the budget with every assignment, contiguous
or not, to rounding. It is the larger of two:
- the costliest trajectory alone on the kind that is best for it (the core's `costliest_alone`);
- GROUP_SIZE: the optimum itself. Sort the groups of any plan by their longest; give the same sizes
  in that order to contiguous groups, and no group's longest grows, since what the later groups held
  was no longer than their longest. So only contiguous groups matter, the kinds in any order, and
  with the order free the furthest rank covered on g GPUs is one number: reach(g) = max over kinds
  of far(kind, reach(g - gpus)) (exact as above).
- LINEAR_INTEGRAL: GPUs for the work. Take a group on a kind (a, b, k, r; slots c, KV C) that is
  done by T. Write w for a member's b L + k Q + r P and v for its u L / c + (1 - u) Q / C. For every
  0 <= u, x <= 1 the members' w + (1 - x) a v add up to at most T - x a L_max, so each takes at
  least its part of that of the engine. x may be chosen by L_max: 1 from p2 T / a on, 1/2 from p1 T
  / a to there, else 0. A member does not know its group's longest, only that it is no shorter than
  itself: its share is the least over the cases that this leaves. Where each trajectory's share of
  its best kind, times that kind's GPUs, adds up to more than the budget, T is refuted, whatever p1
  <= p2 and u are for each kind. They are chosen on a sample of the trajectories; T is refuted with
  all of them.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from treadle_core.compiled import Floats, Indexes, compiled
from treadle_core.model import CostModel
from treadle_core.placing.placement import costliest_alone
from treadle_core.placing.solver import Table, group_cost
from treadle_core.placing.workload import SUM_KV, SUM_PREFILL

# Extensions of groups after which balancing ends and the rest stays as the last bisection left it:
# some 50 ms of compiled code, reached only with hundreds of engines. The first round, which is the
# optimum, always completes.
REFINE_EXTENSIONS = 100_000


class Task(NamedTuple):
    """Input and results of a probe: the table and the GPUs of each kind; reach by GPUs; took[kind,
    g], whether reach(kind, g) ends in an engine of that kind; engines as (kind, first rank, end
    rank)."""

    table: Table
    gpus: Indexes
    reach: Indexes
    took: npt.NDArray[np.bool_]
    engines: Indexes


@compiled
def far(table: Table, kind: int, at: int, end: int, hint: int, limit_s: float) -> int:
    """Return the largest rank up to which an engine of this kind runs [at, rank) within the limit;
    `at` where nothing fits.

    Searches from `at + hint` outwards: gallop, then bisect.
    """
    low = at
    high = end + 1  # `low` fits, `high` does not
    tried = min(at + max(hint, 1), end)
    step = 1
    while high - low > 1:
        if group_cost(table, kind, at, tried) <= limit_s:
            low = tried
            tried += step
        else:
            high = tried
            tried -= step
        step *= 2
        if not low < tried < high:
            tried = (low + high) // 2
    return low


@compiled
def cover(task: Task, segment: Indexes, budget: int, limit_s: float) -> tuple[int, int, float, int]:
    """Return the least GPUs on which the segment is covered within the limit; budget + 1 where that
    many are not enough.

    `segment` is (first rank, end rank, first kind, last kind). Returns with the GPUs the kind that
    completed the cover, the least cost above the limit that one more rank would have given a group,
    and the extensions tried.
    """
    table, gpus, reach, took, _ = task
    first, end = segment[0], segment[1]
    least = budget + 1
    completed = segment[2]
    extension = np.inf
    tried = 0
    reach[: budget + 1] = first
    for kind in range(segment[2], segment[3] + 1):
        width = gpus[kind]
        took[kind, : min(width, least)] = False
        start = -1
        to = first
        for used in range(width, least):  # more GPUs than already suffice are of no use
            took[kind, used] = False
            at = reach[used - width]
            if at != start:
                to = far(table, kind, at, end, to - start, limit_s)  # about as many as the last one
                start = at
                tried += 1
                if to < end:
                    extension = min(extension, group_cost(table, kind, at, to + 1))
            if to > reach[used]:
                reach[used] = to
                took[kind, used] = True
                if to == end:
                    least = used
                    completed = kind
                    break
    return least, completed, extension, tried


@compiled
def place_engines(
    task: Task, segment: Indexes, least: int, completed: int, limit_s: float, count: int
) -> tuple[int, float]:
    """Append the engines of a cover to the first `count`; return their number and the largest
    cost."""
    table, gpus, _, took, engines = task
    begin = count
    kind = completed
    used = least
    while used > 0 and kind >= segment[2]:
        if took[kind, used]:
            engines[count, 0] = kind
            count += 1
            used -= gpus[kind]
        else:
            kind -= 1
    engines[begin:count, 0] = engines[begin:count, 0][::-1].copy()
    largest = 0.0
    at = segment[0]
    for engine in range(begin, count):
        kind = engines[engine, 0]
        engines[engine, 1] = at
        at = far(table, kind, at, segment[1], 1, limit_s)
        engines[engine, 2] = at
        largest = max(largest, group_cost(table, kind, engines[engine, 1], at))
    return count, largest


@compiled
def probe(
    task: Task, segments: Indexes, budget: int, limit_s: float
) -> tuple[bool, float, float, int, int]:
    """Cover every segment within the limit, each on as few GPUs as it can.

    Returns whether the budget was enough, the largest cost, the least cost at which anything
    changes, the number of engines laid out, and the extensions tried.
    """
    largest = 0.0
    extension = np.inf
    count = 0
    tried = 0
    for segment in segments:
        least, completed, more, steps = cover(task, segment, budget, limit_s)
        extension = min(extension, more)
        tried += steps
        if least > budget:
            return False, np.inf, extension, 0, tried
        count, cost = place_engines(task, segment, least, completed, limit_s, count)
        largest = max(largest, cost)
        budget -= least
    return True, largest, extension, count, tried


@compiled
def bisect(task: Task, segments: Indexes, budget: int, known_s: float) -> tuple[float, int, int]:
    """Find the least largest cost of the segments on the budget, where `known_s` is enough, and lay
    the engines out.

    Returns the cost, the number of engines and the extensions tried.
    """
    low = 0.0  # each segment's longest runs somewhere
    for first, _, fastest, slowest in segments:
        alone = np.inf
        for kind in range(fastest, slowest + 1):
            alone = min(alone, group_cost(task.table, kind, first, first + 1))
        low = max(low, alone)
    high = known_s
    tried = 0
    while low < high:
        # Far apart, halve the ratio; near, halve the distance.
        limit = np.sqrt(low) * np.sqrt(high) if 0.0 < 4.0 * low < high else low + 0.5 * (high - low)
        if limit >= high:  # low and high are neighbours and the middle was rounded up
            limit = low
        met, largest, extension, _, steps = probe(task, segments, budget, limit)
        tried += steps
        if met:
            high = largest
        else:
            low = extension
    _, _, _, count, steps = probe(task, segments, budget, high)
    return high, count, tried + steps


@compiled
def search(table: Table, gpus: Indexes, budget: int, counts: Indexes) -> tuple[float, int]:
    """Write how many engines of each kind to run into `counts`; return the makespan and the number
    of their GPUs.

    `table.engines` has one row a kind, `gpus` its GPUs; each kind fits the budget. At least one
    trajectory.
    """
    n = len(table.lengths)
    kinds = len(gpus)
    engines = np.zeros((budget + 1, 3), np.int64)
    task = Task(
        table,
        gpus,
        np.zeros(budget + 1, np.int64),
        np.zeros((kinds, budget + 1), np.bool_),
        engines,
    )
    segments = np.zeros((budget + 2, 4), np.int64)
    segments[0] = np.array([0, n, 0, kinds - 1])
    pending = 1
    counts[:] = 0
    left = budget
    known = np.inf  # the best kind's engine alone can take all
    for kind in range(kinds):
        known = min(known, group_cost(table, kind, 0, n))
    makespan = -1.0
    tried = 0
    while pending > 0:
        known, count, steps = bisect(task, segments[:pending], left, known)
        tried += steps
        if makespan < 0.0:
            makespan = known
        if tried > REFINE_EXTENSIONS:
            for engine in range(count):
                counts[engines[engine, 0]] += 1
                left -= gpus[engines[engine, 0]]
            break
        tight = 0
        while tight < count - 1 and (
            group_cost(table, engines[tight, 0], engines[tight, 1], engines[tight, 2]) < known
        ):
            tight += 1
        kind, first, end = engines[tight]
        counts[kind] += 1
        left -= gpus[kind]
        at = 0
        while not (segments[at, 0] <= first and end <= segments[at, 1]):
            at += 1
        begin, last, fastest, slowest = segments[at]
        pending -= 1
        segments[at:pending] = segments[at + 1 : pending + 1].copy()
        if begin < first:
            segments[pending] = np.array([begin, first, fastest, kind])
            pending += 1
        if end < last:
            segments[pending] = np.array([end, last, kind, slowest])
            pending += 1
    return makespan, budget - left


# The bisection on the work bound ends when it is this part from what it cannot refute.
PRECISION = 1e-4
# Sums of shares and costs are rounded: that must not lift a bound over the makespan.
SLACK = 1e-9
# Trajectories on which p1, p2 and u are chosen; enough for about a hundredth of a per cent of the
# bound.
SAMPLE = 256
# Tried for each kind: at first pairs of p1 = p2 and u (they must move together), then steps of each
# from the best.
PARTS = np.linspace(0.0, 0.8, 9)
SLOT_WEIGHTS = np.linspace(0.0, 1.0, 5)
GRID_ROUNDS = 1
STEPS = np.array([-0.1, -0.05, -0.02, -0.01, 0.01, 0.02, 0.05, 0.1])
STEP_ROUNDS = 3
# They are chosen for a time this near the known makespan: where the bound is likely to end.
NEAR = 0.98
# Columns of what is chosen for each kind.
FIRST_PART, LAST_PART, SLOT_WEIGHT = range(3)


def lower_bound(table: Table, gpus: Indexes, budget: int, known_s: float) -> float:
    """Return the lower bound in seconds. `table.engines` has one row a kind, `gpus` its GPUs.
    `known_s` is the makespan of some plan."""
    bound_s = min(costliest_alone(table), known_s)
    if not 0.0 < bound_s < known_s:
        return bound_s
    if table.model == CostModel.GROUP_SIZE:
        return max(bound_s, float(free_order(table, gpus, budget, bound_s, known_s)))
    differences = np.diff(table.ranks[:, [SUM_KV, SUM_PREFILL]], axis=0)
    # as `sample`: one compiled version
    work = np.ascontiguousarray(np.column_stack((table.lengths, differences)))
    step = -(-len(work) // SAMPLE)
    sample = np.ascontiguousarray(work[step // 2 :: step])
    base_s, sequence_s, kv_s, slots, capacity, _ = table.engines.T
    context = work[:, 1].sum() / max(work[:, 0].sum(), 1.0)  # of a token, on average
    chosen = np.empty((len(gpus), 3))
    # At first p1 = p2 where the shares of x = 0 and 1 meet for a mean trajectory, and u by what
    # limits it: slots or KV.
    chosen[:, FIRST_PART] = chosen[:, LAST_PART] = base_s / (
        base_s + slots * (sequence_s + kv_s * context)
    )
    chosen[:, SLOT_WEIGHT] = slots * context <= capacity
    for steps in (False,) * GRID_ROUNDS + (True,) * STEP_ROUNDS:
        climb(table.engines, gpus, sample, NEAR * known_s, chosen, steps)
    of_sample = budget * len(sample) / len(work)
    guess_s = refute(
        table.engines, gpus, sample, of_sample, chosen, bound_s, known_s, NEAR * known_s
    )
    return float(
        refute(table.engines, gpus, work, budget * (1.0 + SLACK), chosen, bound_s, known_s, guess_s)
    )


@compiled
def free_order(table: Table, gpus: Indexes, budget: int, low: float, high: float) -> float:
    """Return the seconds below which no contiguous groups finish with the kinds in any order, to
    SLACK.

    Within `high` some do, below `low` none.
    """
    n = len(table.lengths)
    reach = np.zeros(budget + 1, np.int64)
    # mostly the sorted order is as good as any: then one probe is enough
    limit = high * (1.0 - 0.5 * SLACK)
    while high > low * (1.0 + SLACK):
        extension = np.inf
        covered = False
        for used in range(1, budget + 1):
            reach[used] = reach[used - 1]
            for kind in range(len(gpus)):
                if gpus[kind] <= used:
                    at = reach[used - gpus[kind]]
                    to = far(table, kind, at, n, 1, limit)
                    reach[used] = max(reach[used], to)
                    if to < n:
                        extension = min(extension, group_cost(table, kind, at, to + 1))
            if reach[used] == n:
                covered = True
                break
        if covered:
            high = limit
        else:
            low = extension
        limit = low + 0.5 * (high - low)
    return low


@compiled
def share(
    kind: Floats, choice: Floats, length: float, kv_work: float, prefill: float, limit_s: float
) -> float:
    """Return the least part of an engine of this kind that a trajectory takes if its group is done
    by the limit, > 0; inf where no engine can. `choice` is (p1, p2, u)."""
    base_s, slots, capacity = kind[0], kind[3], kind[4]
    own_s = kind[1] * length + kind[2] * kv_work + kind[5] * prefill
    longest_s = base_s * length  # of the group, at least
    first_s = choice[FIRST_PART] * limit_s
    last_s = choice[LAST_PART] * limit_s
    least = np.inf
    most_s = limit_s - max(longest_s, last_s)
    if 0.0 < most_s >= own_s:
        least = own_s / most_s
    if longest_s < last_s:
        weight = choice[SLOT_WEIGHT]
        steps_s = base_s * (weight * length / slots + (1.0 - weight) * kv_work / capacity)
        least = min(least, (own_s + 0.5 * steps_s) / (limit_s - 0.5 * max(longest_s, first_s)))
        if longest_s < first_s:
            least = min(least, (own_s + steps_s) / limit_s)
    return float(least)


@compiled
def needs_more(
    kinds: Floats, gpus: Indexes, work: Floats, limit_s: float, chosen: Floats, budget: float
) -> bool:
    """Return whether the trajectories' shares, each of the kind that is best for it, take more GPUs
    than the budget.

    `work` has a row (length, KV work, prefill) a trajectory, `chosen` a row (p1, p2, u) a kind.
    """
    total = 0.0
    for at in range(len(work)):
        least = np.inf
        for kind in range(len(gpus)):
            taken = share(kinds[kind], chosen[kind], work[at, 0], work[at, 1], work[at, 2], limit_s)
            least = min(least, gpus[kind] * taken)
        total += least
        if total > budget:
            return True
    return False


@compiled
def needed(
    kind: Floats, gpus: int, choice: Floats, others: Floats, work: Floats, limit_s: float
) -> float:
    """Return the GPUs that the trajectories take where the best of the other kinds takes others[i]
    GPUs for trajectory i."""
    total = 0.0
    for at in range(len(work)):
        total += min(
            others[at], gpus * share(kind, choice, work[at, 0], work[at, 1], work[at, 2], limit_s)
        )
    return total


@compiled
def climb(
    kinds: Floats, gpus: Indexes, sample: Floats, limit_s: float, chosen: Floats, steps: bool
) -> None:
    """Set p1, p2 and u of each kind in turn to those with which the sample needs the most GPUs.

    By small steps of each from where it is, or over the grid of u and p1 = p2.
    """
    others = np.empty(len(sample))
    for kind in range(len(gpus)):
        for at in range(len(sample)):
            others[at] = np.inf
            for other in range(len(gpus)):
                if other != kind:
                    taken = share(
                        kinds[other],
                        chosen[other],
                        sample[at, 0],
                        sample[at, 1],
                        sample[at, 2],
                        limit_s,
                    )
                    others[at] = min(others[at], gpus[other] * taken)
        row, width = kinds[kind], gpus[kind]
        best = chosen[kind]
        trial = best.copy()
        most = needed(row, width, best, others, sample, limit_s)
        if steps:
            for column in range(3):
                low = best[FIRST_PART] if column == LAST_PART else 0.0
                high = best[LAST_PART] if column == FIRST_PART else 1.0
                for value in best[column] + STEPS:
                    trial[column] = min(max(value, low), high)
                    found = needed(row, width, trial, others, sample, limit_s)
                    if found > most:
                        most = found
                        best[column] = trial[column]
                trial[column] = best[column]
        else:
            for part in PARTS:
                for weight in SLOT_WEIGHTS:
                    trial[FIRST_PART] = trial[LAST_PART] = part
                    trial[SLOT_WEIGHT] = weight
                    found = needed(row, width, trial, others, sample, limit_s)
                    if found > most:
                        most = found
                        best[:] = trial


@compiled
def refute(
    kinds: Floats,
    gpus: Indexes,
    work: Floats,
    budget: float,
    chosen: Floats,
    low: float,
    high: float,
    guess: float,
) -> float:
    """Return the largest time found, from `low` up, within which the trajectories need more GPUs
    than the budget.

    Searches from `guess` outwards: gallop, then bisect.
    """
    limit = guess
    width = PRECISION
    while high > low * (1.0 + PRECISION):
        if not low < limit < high:
            limit = low + 0.5 * (high - low)
        if needs_more(kinds, gpus, work, limit, chosen, budget):
            low = limit
            limit = low * (1.0 + width)
        else:
            high = limit
            limit = high * (1.0 - width)
        width *= 4.0
    return low
