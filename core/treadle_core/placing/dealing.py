"""Deal trajectories to engines one unit after the other, each to the engine that then ends first.

Work is at its medians. Engines with equal figures form a class. In a class only two kinds of engine
can end a unit first: one that has the unit's prompt already, and the one that has the least work.
So the engines of each class stand in a heap, and a unit looks at the head of each class and at the
holder of its prompt that has least to do: n log m, where looking at each engine would take n m.
"""

from typing import NamedTuple

import numpy as np

from treadle_core.compiled import Flags, Floats, Indexes, compiled, inlined, lean
from treadle_core.placing.paths import (
    BASE_S,
    KV,
    KV_TOKENS,
    PAIRS,
    TOKENS,
    TOOL_S,
    Work,
    path_s,
    prompt_s,
    work_s,
    worked_s,
)

# Columns of what an engine has to do: sums of tokens and of KV, and seconds of work.
SUM_TOKENS, SUM_KV, WORK_S = range(3)


class Heaps(NamedTuple):
    """The engines that may be dealt to, by class: class c has engines[first[c] : first[c + 1]], a
    heap with the least loads_s at its head. place: of each engine among `engines`, -1 for none."""

    first: Indexes
    engines: Indexes
    place: Indexes
    loads_s: Floats


class Holders(NamedTuple):
    """The engines that have a prompt: engine[first[prompt] : end[prompt]]."""

    first: Indexes
    end: Indexes
    engine: Indexes


@compiled
def make_holders(prompts: Indexes) -> Holders:
    """Return holders of no prompt yet, with room for an engine for each of these trajectories."""
    first = np.zeros(prompts.max() + 2, np.int64)
    for prompt in prompts:
        first[prompt + 1] += 1
    first = np.cumsum(first)
    return Holders(first, first[:-1].copy(), np.empty(len(prompts), np.int64))


@lean
def holds(holders: Holders, prompt: int, engine: int) -> bool:
    """Return whether the engine has the prompt."""
    for entry in range(holders.first[prompt], holders.end[prompt]):
        if holders.engine[entry] == engine:
            return True
    return False


@lean
def give(holders: Holders, prompt: int, engine: int) -> None:
    """Note that the engine has the prompt from now on."""
    holders.engine[holders.end[prompt]] = engine
    holders.end[prompt] += 1


@lean
def sink(heaps: Heaps, kind: int, at: int) -> None:
    """Restore the heap of a class, after the engine at place `at` of it was given more work."""
    first, count = heaps.first[kind], heaps.first[kind + 1] - heaps.first[kind]
    engine = heaps.engines[first + at]
    load_s = heaps.loads_s[engine]
    while True:
        child = 2 * at + 1
        if child >= count:
            break
        least = heaps.engines[first + child]
        if child + 1 < count:
            other = heaps.engines[first + child + 1]
            if heaps.loads_s[other] < heaps.loads_s[least]:
                child, least = child + 1, other
        if heaps.loads_s[least] >= load_s:
            break
        heaps.engines[first + at] = least
        heaps.place[least] = at
        at = child
    heaps.engines[first + at] = engine
    heaps.place[engine] = at


class Engines(NamedTuple):
    """Engines that are dealt to: their figures, their classes, whether they may get anything, and
    their loads."""

    rows: Floats
    kinds: Indexes
    allowed: Flags
    loads: Floats
    heaps: Heaps


class Units(NamedTuple):
    """Units to deal. order: trajectories as they are dealt. By trajectory: its unit. By unit: its
    engine (-1 for none yet), the sums of amounts, and the longest context."""

    order: Indexes
    unit_of: Indexes
    engine_of: Indexes
    sums: Floats
    contexts: Floats


@compiled
def build_heaps(kinds: Indexes, allowed: Flags, loads_s: Floats) -> Heaps:
    """Return the heaps of the allowed engines, whose classes are numbers from 0."""
    first = np.zeros(kinds.max() + 2, np.int64)
    for engine in range(len(kinds)):
        if allowed[engine]:
            first[kinds[engine] + 1] += 1
    first = np.cumsum(first)
    filled, engines = first.copy(), np.empty(first[-1], np.int64)
    place = np.full(len(kinds), -1, np.int64)
    for engine in np.argsort(loads_s, kind="mergesort"):  # a sorted list is a heap
        if allowed[engine]:
            kind = kinds[engine]
            place[engine] = filled[kind] - first[kind]
            engines[filled[kind]] = engine
            filled[kind] += 1
    return Heaps(first, engines, place, loads_s)


@inlined
def load_s(engine: Floats, loads: Floats) -> float:
    """Return the seconds until an engine has done what it has to do."""
    return worked_s(engine, loads[SUM_TOKENS], loads[SUM_KV], loads[WORK_S])


@inlined
def ends_s(
    engine: Floats, loads: Floats, unit: Floats, longest: Floats, own_prompt_s: float
) -> float:
    """Return when an engine ends its loads and a unit: by all its work, and by the path of the
    unit's longest. unit: sums of amounts; longest: amounts."""
    all_work_s = loads[WORK_S] + work_s(engine, unit) + own_prompt_s
    work_done_s = worked_s(
        engine, loads[SUM_TOKENS] + unit[TOKENS], loads[SUM_KV] + unit[KV], all_work_s
    )
    own_s = work_s(engine, longest)
    alone_s = engine[BASE_S] * longest[TOKENS] + own_s
    return float(max(work_done_s, path_s(alone_s, longest[TOOL_S], all_work_s - own_s)))


@compiled
def deal(
    engines: Floats,
    kinds: Indexes,
    work: Work,
    placement: Indexes,
    order: Indexes,
    unit_of: Indexes,
    allowed: Flags,
) -> Indexes:
    """Give the trajectories of `order` to the allowed engine that then ends first, one unit after
    the other.

    kinds: a number from 0 that engines with equal figures share. unit_of: trajectories with the
    same number stay together; the first of a unit in `order` should be its longest. A trajectory
    whose context fits no allowed engine stays where it is. Work at its medians: one sample.
    """
    n, m = len(placement), len(engines)
    result = placement.copy()
    if len(order) == 0:
        return result
    amounts, prompts = work.amounts[0], work.prompts
    dealt = np.zeros(n, np.bool_)
    units = 0
    for index in order:
        dealt[index] = True
        units = max(units, unit_of[index] + 1)
    holders = make_holders(prompts)
    loads = np.zeros((m, WORK_S + 1))
    sums, contexts = np.zeros((units, PAIRS + 1)), np.zeros(units)
    add_up(engines, work, placement, dealt, holders, loads)
    for index in order:
        unit = unit_of[index]
        for column in range(PAIRS + 1):
            sums[unit, column] += amounts[index, column]
        contexts[unit] = max(contexts[unit], work.contexts[index])
    loads_s = np.zeros(m)
    for at in range(m):
        loads_s[at] = load_s(engines[at], loads[at])
    heaps = build_heaps(kinds, allowed, loads_s)
    engine_of, seen_by = np.full(units, -1), np.full(m, -1)
    nearest = np.full(len(heaps.first) - 1, -1)
    deal_units(
        Engines(engines, kinds, allowed, loads, heaps),
        Units(order, unit_of, engine_of, sums, contexts),
        work,
        holders,
        seen_by,
        nearest,
    )
    for index in order:
        if engine_of[unit_of[index]] >= 0:
            result[index] = engine_of[unit_of[index]]
    return result


@lean
def add_up(
    engines: Floats, work: Work, placement: Indexes, dealt: Flags, holders: Holders, loads: Floats
) -> None:
    """Write the loads of what is not dealt, and who has which prompt."""
    amounts, prompts = work.amounts[0], work.prompts
    for number in range(2 * len(placement)):  # all that are read, then all
        index = number % len(placement)
        at, first = placement[index], number < len(placement)
        if at < 0 or dealt[index] or (first and not work.read[index]):
            continue
        if not holds(holders, prompts[index], at):
            give(holders, prompts[index], at)
            if not first:
                loads[at, WORK_S] += prompt_s(engines[at], work.contexts[index])
        if not first:
            loads[at, SUM_TOKENS] += amounts[index, TOKENS]
            loads[at, SUM_KV] += amounts[index, KV]
            loads[at, WORK_S] += work_s(engines[at], amounts[index])


@lean
def deal_units(
    of: Engines, units: Units, work: Work, holders: Holders, seen_by: Indexes, nearest: Indexes
) -> None:
    """Choose the engine of each unit. seen_by: for each engine, the last trajectory whose prompt it
    was found to have; nearest: scratch, a number for each class."""
    engines, kinds, allowed, loads, heaps = of
    order, unit_of, engine_of, sums, contexts = units
    amounts, prompts, loads_s = work.amounts[0], work.prompts, heaps.loads_s
    for index in order:
        unit = unit_of[index]
        if engine_of[unit] < 0:
            best, least_s, prompt = -1, np.inf, prompts[index]
            nearest[:] = -1
            for entry in range(holders.first[prompt], holders.end[prompt]):
                at = holders.engine[entry]
                seen_by[at] = index
                kind = kinds[at]
                if allowed[at] and (nearest[kind] < 0 or loads_s[at] < loads_s[nearest[kind]]):
                    nearest[kind] = at
            for kind in range(len(nearest)):
                if heaps.first[kind] == heaps.first[kind + 1]:
                    continue
                head = heaps.engines[heaps.first[kind]]
                if contexts[unit] > engines[head, KV_TOKENS]:
                    continue
                for at in (head, nearest[kind]):
                    # one with more to do than that cannot end first
                    if at < 0 or loads_s[at] >= least_s or at == best:
                        continue
                    own_prompt_s = 0.0
                    if seen_by[at] != index:
                        own_prompt_s = prompt_s(engines[at], work.contexts[index])
                    end_s = ends_s(engines[at], loads[at], sums[unit], amounts[index], own_prompt_s)
                    if end_s < least_s:
                        best, least_s = at, end_s
            if best < 0:
                continue
            engine_of[unit] = best
            loads[best, SUM_TOKENS] += sums[unit, TOKENS]
            loads[best, SUM_KV] += sums[unit, KV]
            loads[best, WORK_S] += work_s(engines[best], sums[unit])
            if seen_by[best] != index:
                loads[best, WORK_S] += prompt_s(engines[best], work.contexts[index])
                give(holders, prompt, best)
            loads_s[best] = load_s(engines[best], loads[best])
            sink(heaps, kinds[best], heaps.place[best])
