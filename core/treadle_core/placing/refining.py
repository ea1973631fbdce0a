"""Improve a placement step by step: the engine that ends last gives one of its prompts, or one
trajectory, to another.

Each step takes the best of such changes by the mean over the samples, until none is better or
MOST_AMOUNTS are read. Only trajectories that may go elsewhere at no cost are moved. Dealing longest
first can lose a third, and a partition into contiguous groups sees no prompts; this corrects both
where there are few trajectories or long prompts.
"""

from typing import NamedTuple

import numpy as np

from treadle_core.compiled import Flags, Floats, Indexes, compiled
from treadle_core.placing.paths import (
    Scratch,
    Work,
    end_engine,
    make_scratch,
    members_of,
    prompt_weight,
)

MOST_TARGETS = 8  # engines that a trajectory may go to in one step: those that end first
MOST_ALONE = 48  # trajectories of an engine that are tried alone, longest first
LEAST_GAIN = 1e-3  # of the makespan; a smaller one is not worth a step
# Amounts that are read at most, at 20 to 40 ns each: 10 to 15 ms. On public traces 50 times as many
# changed nothing.
MOST_AMOUNTS = 400_000


class Groups(NamedTuple):
    """A placement by engines: engine e runs members[first[e] : first[e + 1]], in the order in which
    it reads their prompts, ends at times[e, samples], and reads prompts for prompts_s[e]. rank: of
    each trajectory in that order."""

    first: Indexes
    members: Indexes
    rank: Indexes
    times: Floats
    prompts_s: Floats


class Memory(NamedTuple):
    """Memory of a search: of `end_engine`, two groups, and the times of two engines."""

    scratch: Scratch
    left: Indexes
    joined: Indexes
    source_s: Floats
    target_s: Floats


@compiled
def refine(engines: Floats, work: Work, placement: Indexes, free: Flags, order: Indexes) -> Indexes:
    """Return a placement that ends no later by the mean over samples. free: whether a trajectory
    may go to another engine; order: `reading_order`."""
    m, n, samples = len(engines), len(placement), len(work.amounts)
    result = placement.copy()
    if m < 2 or n == 0:
        return result
    prompts = work.prompts
    rank = np.empty(n, np.int64)
    rank[order] = np.arange(n)
    memory = Memory(
        make_scratch(work),
        np.empty(n, np.int64),
        np.empty(n, np.int64),
        np.zeros(samples),
        np.zeros(samples),
    )
    weight, spent = prompt_weight(engines, n), 0
    while spent < MOST_AMOUNTS:
        groups = group_by_engine(engines, work, result, order, rank, memory)
        spent += samples * n
        source, now_s = find_last(groups.times)
        group = groups.members[groups.first[source] : groups.first[source + 1]]
        least_s, target = now_s * (1.0 - LEAST_GAIN), -1
        moved, best = np.zeros(n, np.bool_), np.zeros(n, np.bool_)
        tried = np.zeros(len(memory.scratch.seen), np.bool_)
        alone = 0
        for number in range(2 * len(group)):  # each with all free samples of its prompt, and alone
            index, together = group[number // 2], number % 2 == 0
            if (
                not free[index]
                or spent >= MOST_AMOUNTS
                or (tried[prompts[index]] if together else alone >= MOST_ALONE)
            ):
                continue
            alone += not together
            tried[prompts[index]] = True
            for other in group:
                moved[other] = other == index or (
                    together and free[other] and prompts[other] == prompts[index]
                )
            mean_s, at, read = find_target(engines, work, groups, source, moved, weight, memory)
            spent += read
            if mean_s < least_s:
                least_s, target = mean_s, at
                best[:] = moved
            for other in group:
                moved[other] = False
        if target < 0:
            break
        result[best] = target
    return result


@compiled
def group_by_engine(
    engines: Floats, work: Work, placement: Indexes, order: Indexes, rank: Indexes, memory: Memory
) -> Groups:
    """Return the placement as groups by engine."""
    m = len(engines)
    first, members = members_of(placement, order, m)
    times, prompts_s = np.zeros((m, len(work.amounts))), np.zeros(m)
    for at in range(m):
        group = members[first[at] : first[at + 1]]
        prompts_s[at] = end_engine(engines[at], work, group, memory.scratch, times[at])
    return Groups(first, members, rank, times, prompts_s)


@compiled
def find_last(times: Floats) -> tuple[int, float]:
    """Return the engine that ends last in most samples, and the mean of when the last one ends."""
    counts = np.zeros(len(times), np.int64)
    last_s = 0.0
    for sample in range(times.shape[1]):
        last = int(np.argmax(times[:, sample]))
        counts[last] += 1
        last_s += times[last, sample]
    return int(np.argmax(counts)), last_s / times.shape[1]


@compiled
def find_target(
    engines: Floats,
    work: Work,
    groups: Groups,
    source: int,
    moved: Flags,
    weight: float,
    memory: Memory,
) -> tuple[float, int, int]:
    """Return where the moved trajectories of `source` should go: when the last engine then ends on
    average, with the change in prompts times `weight`; the engine; and how many amounts were
    read."""
    m, samples = groups.times.shape
    group = groups.members[groups.first[source] : groups.first[source + 1]]
    kept = 0
    for index in group:
        if not moved[index]:
            memory.left[kept] = index
            kept += 1
    left_s = end_engine(engines[source], work, memory.left[:kept], memory.scratch, memory.source_s)
    read, least_s, best, targets = samples * kept, np.inf, -1, 0
    for target in np.argsort(groups.times.sum(axis=1)):
        if target == source or targets == MOST_TARGETS:
            continue
        targets += 1
        there = groups.members[groups.first[target] : groups.first[target + 1]]
        count = merge(there, group, moved, groups.rank, memory.joined)
        joined_s = end_engine(
            engines[target], work, memory.joined[:count], memory.scratch, memory.target_s
        )
        read += samples * count
        prompts_s = (
            weight * (left_s + joined_s - groups.prompts_s[source] - groups.prompts_s[target]) / m
        )
        mean_s = prompts_s + mean_last(groups.times, source, target, memory)
        if mean_s < least_s:
            least_s, best = mean_s, int(target)
    return least_s, best, read


@compiled
def mean_last(times: Floats, source: int, target: int, memory: Memory) -> float:
    """Return the mean of when the last engine ends, with the new times of two of them."""
    total_s = 0.0
    for sample in range(times.shape[1]):
        last_s = max(memory.source_s[sample], memory.target_s[sample])
        for at in range(len(times)):
            if at not in (source, target):
                last_s = max(last_s, times[at, sample])
        total_s += last_s
    return float(total_s / times.shape[1])


@compiled
def merge(there: Indexes, group: Indexes, moved: Flags, rank: Indexes, joined: Indexes) -> int:
    """Write `there` and the moved trajectories of `group`, all in the order of `rank`, to `joined`;
    return how many."""
    count = at = 0
    for index in group:
        if not moved[index]:
            continue
        while at < len(there) and rank[there[at]] < rank[index]:
            joined[count] = there[at]
            count += 1
            at += 1
        joined[count] = index
        count += 1
    while at < len(there):
        joined[count] = there[at]
        count += 1
        at += 1
    return count
