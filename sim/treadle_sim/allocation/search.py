"""Compiled search for the exact resource plan: which engines to run on a budget of GPUs, and which
trajectories each runs.

Over all multisets of engine kinds whose GPUs add up to at most the budget, and all partitions of
the trajectories, longest first, into one contiguous group an engine (fastest kind first), it finds
the least makespan: Heddle §6.1, its two subproblems solved as one. `plan.allocate` calls it.

Why a probe is exact. For a limit T let far(k, r) be the furthest end that an engine of kind k
reaches from rank r with
a cost <= T, and reach(k, g) the furthest rank covered by engines of the kinds 0..k on at most g
GPUs. Then
    reach(k, g) = max(reach(k - 1, g), far(k, reach(k, g - gpus_k))),
because far never falls as r grows: a group that loses its longest never costs more
(`costs.group_cost`), so an engine
that runs from r < r' to some end can also run from r' to it. So of all ways to spend g GPUs on the
first kinds only the
one that reaches furthest matters. The budget is enough within T exactly if reach(last kind, budget)
covers all ranks. A
probe takes kinds * budget extensions of O(log n).

Why the bisection ends on the optimum itself: a probe that succeeds proves the largest cost of its
groups. One that fails proves that no limit below the least cost of an extended group can succeed,
since up to there every far, and so every reach, is the same. Both are costs of real groups, and the
interval between them becomes empty.

Beyond the bottleneck: many multisets have the least makespan, mostly where one long trajectory sets
it. The bottleneck's group and engine are fixed, and the ranks before it (on kinds as fast or
faster) and after it (as fast or slower) are solved again together on the GPUs that are left: the
least second-largest cost given the first, and so on until nothing is left or REFINE_EXTENSIONS is
spent. The first round's optimum is exact; later ones refine it.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from treadle_core.compiled import Indexes, compiled
from treadle_core.placing.costs import Table, group_cost

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
