"""References for the elastic scheduler: slow, plain, and written from the paper rather than from
the code."""

import heapq
import itertools
import math
from collections.abc import Iterator, Sequence

import numpy as np
from treadle_core.tools.action import Action, Amdahl, Measured, Range, UnitSet
from treadle_core.tools.arrangement import Curves

Choices = Sequence[tuple[int, float]]  # (units, seconds) of one candidate


def curves(candidates: Sequence[Choices]) -> Curves:
    widest = max((len(choices) for choices in candidates), default=1)
    units, seconds = (
        np.zeros((len(candidates), widest), np.int64),
        np.zeros((len(candidates), widest)),
    )
    for i, choices in enumerate(candidates):
        for c, (unit, second) in enumerate(choices):
            units[i, c], seconds[i, c] = unit, second
    return Curves(units, seconds, np.array([len(choices) for choices in candidates], np.int64))


def elastic(
    index: int,
    demand: Range | UnitSet,
    single_unit_s: float,
    elasticity: Amdahl | Measured,
    key: str = "cpu_cores",
) -> Action:
    """A scalable action that arrives as the index-th."""
    return Action(f"a{index}", f"t{index}", index, {key: demand}, single_unit_s, key, elasticity)


def total_s(candidates: Sequence[Choices], picks: Sequence[int]) -> float:
    return math.fsum(choices[pick][1] for choices, pick in zip(candidates, picks, strict=True))


def every_pick(candidates: Sequence[Choices]) -> Iterator[tuple[int, ...]]:
    return itertools.product(*(range(len(choices)) for choices in candidates))


def least_flat_s(candidates: Sequence[Choices], free: int) -> float:
    """By trying every allocation of a flat pool's units."""
    return min(
        total_s(candidates, picks)
        for picks in every_pick(candidates)
        if sum(choices[pick][0] for choices, pick in zip(candidates, picks, strict=True)) <= free
    )


def arrange_as_listed(candidates: Sequence[Choices], free: int) -> float:
    """Algorithm 3 with the basic operator, line by line, but for `at most` in place of `exactly`
    all units."""
    before = [0.0] * (free + 1)
    for choices in candidates:
        row = [math.inf] * (free + 1)
        for j in range(free + 1):
            for units, seconds in choices:
                if j - units >= 0 and before[j - units] + seconds < row[j]:
                    row[j] = before[j - units] + seconds
        before = row
    return before[free]


def chunks_exist(asked: Sequence[int], nodes: Sequence[frozenset[int]]) -> bool:
    """Whether actions with so many GPUs each find aligned runs of a power of two, by trying every
    place for each."""
    if not asked:
        return True
    size = next(size for size in (1, 2, 4, 8) if size >= asked[0])
    for at, node in enumerate(nodes):
        for first in range(0, 8, size):
            run = frozenset(range(first, first + size))
            if run <= node and chunks_exist(asked[1:], [*nodes[:at], node - run, *nodes[at + 1 :]]):
                return True
    return False


def least_chunked_s(candidates: Sequence[Choices], nodes: Sequence[frozenset[int]]) -> float:
    """By trying every allocation of GPUs and every place; infinite where nothing fits."""
    return min(
        (
            total_s(candidates, picks)
            for picks in every_pick(candidates)
            if chunks_exist(
                [choices[pick][0] for choices, pick in zip(candidates, picks, strict=True)], nodes
            )
        ),
        default=math.inf,
    )


def objective_s(
    queue: Sequence[Choices],
    picks: Sequence[int],
    running: Sequence[tuple[float, int]],
    free: int,
    depth: int,
) -> float:
    """Seconds until done, summed over a queue whose first len(picks) start now: Algorithm 2 with
    units."""
    starting = [choices[pick] for choices, pick in zip(queue, picks, strict=False)]
    exact_s = sum(seconds for _, seconds in starting)
    behind = queue[len(picks) :]
    if not behind:
        return exact_s
    least = math.inf
    for first in behind[0][:depth]:
        heap = [*running, *((seconds, units) for units, seconds in starting)]
        heapq.heapify(heap)
        left, now, total = (
            free - sum(units for units, _ in starting),
            heap[0][0] if heap else math.inf,
            0.0,
        )
        for units, seconds in [first, *(choices[0] for choices in behind[1:])]:
            while left < units and heap:
                now, freed = heapq.heappop(heap)
                left += freed
            if left < units:
                total = math.inf
                break
            left -= units
            heapq.heappush(heap, (now + seconds, units))
            total += now + seconds
        least = min(least, total)
    return exact_s + least


def estimate_as_listed(ends_s: Sequence[float], behind_s: Sequence[float]) -> float:
    """ESTIMATE of Algorithm 2 at depth 1, line by line: one that ends makes room for one that
    waits."""
    heap, total = list(ends_s), 0.0
    heapq.heapify(heap)
    for took_s in behind_s:
        now = heapq.heappop(heap)
        total += now + took_s
        heapq.heappush(heap, now + took_s)
    return total
