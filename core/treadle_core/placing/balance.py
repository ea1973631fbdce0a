"""When each engine finishes under a placement, and moves that balance a placement.

One cost function judges every candidate placement: the present one, the plan of the placement service, and a rebalance
of the present one. It is the linear-integral cost (`costs`) without prefill: `a * max(L_max, sum L / slots,
sum Q / kv_capacity) + b * sum L + k * sum Q`, exact for a linear engine that is never idle, and never less than the
engine's longest trajectory takes alone, tool calls included, as tools can be the bound. Pure functions over arrays; a
placement is the index of each trajectory's engine, -1 for none.
"""

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from treadle_core.compiled import Flags, Floats, Indexes, compiled, inlined, lean
from treadle_core.model import EngineSpec

# Most moves that one rebalance tries; the next one, a few dozen events later, continues.
REBALANCE_MOVES = 32

# Columns of EngineRows.rows; the last, for `scenarios`, is 0: trajectories that are placed are prefilled.
BASE_S, PER_SEQUENCE_S, PER_KV_TOKEN_S, SLOTS, KV_TOKENS, PREFILL_S = range(6)
# Columns of work: tokens left, KV tokens read over the rest, seconds of tool calls left.
TOKENS, KV, TOOL_S = range(3)


@dataclass(frozen=True)
class EngineRows:
    """Engines as the kernels read them: a row for each, and a number that engines with equal figures share."""

    rows: Floats
    kinds: Indexes


def engine_rows(specs: Sequence[EngineSpec]) -> EngineRows:
    """The engines in the caller's order."""
    rows = np.array([_row(spec) for spec in specs]).reshape(len(specs), PREFILL_S + 1)
    return EngineRows(rows, number_kinds((*_row(spec), spec.tensor_parallel, spec.decode_curve) for spec in specs))


def number_kinds(figures: Iterable[Hashable]) -> Indexes:
    """A number for each engine, the same for engines with equal figures."""
    numbers: dict[Hashable, int] = {}
    return np.array([numbers.setdefault(each, len(numbers)) for each in figures], np.int64)


def _row(spec: EngineSpec) -> tuple[float, ...]:
    curve = spec.decode_curve
    kv_tokens = float(spec.kv_tokens_capacity) if spec.kv_tokens_capacity else np.inf
    return (curve.base_s, curve.per_sequence_s, curve.per_kv_token_s, float(max(1, spec.slot_limit)), kv_tokens, 0.0)


def work_rows(tokens: Floats, context_tokens: Floats, tool_s: Floats) -> Floats:
    """What is left of each trajectory, as the kernels read it. A context grows by one token a step."""
    return np.column_stack((tokens, tokens * (context_tokens + 0.5 * tokens), tool_s))


@inlined
def finish_s(engine: Floats, longest_tokens: float, longest_alone_s: float, tokens: float, kv_tokens: float) -> float:
    """Seconds until one engine has finished a group; 0 for none."""
    steps = max(longest_tokens, tokens / engine[3], kv_tokens / engine[4])
    return float(max(engine[0] * steps + engine[1] * tokens + engine[2] * kv_tokens, longest_alone_s))


@compiled
def finish_times(engines: Floats, work: Floats, placement: Indexes) -> Floats:
    """When each engine finishes under a placement."""
    sums = np.zeros((len(engines), 4))
    for index in range(len(work)):
        at = placement[index]
        if at >= 0:
            row = sums[at]
            row[0] = max(row[0], work[index, 0])
            row[1] = max(row[1], work[index, 0] * engines[at, 0] + work[index, 2])
            row[2] += work[index, 0]
            row[3] += work[index, 1]
    times = np.zeros(len(engines))
    for at in range(len(engines)):
        times[at] = finish_s(engines[at], sums[at, 0], sums[at, 1], sums[at, 2], sums[at, 3])
    return times


@lean
def best_move(
    engines: Floats, work: Floats, source: int, target: int, head: Indexes, following: Indexes, movable: Flags
) -> tuple[float, int]:
    """The move after which the later of two engines finishes earliest: (seconds, trajectory); (inf, -1) for none."""
    here, there = engines[source], engines[target]
    there_longest = there_alone = there_tokens = there_kv = 0.0
    index = head[target]
    while index >= 0:
        there_longest = max(there_longest, work[index, 0])
        there_alone = max(there_alone, work[index, 0] * there[0] + work[index, 2])
        there_tokens += work[index, 0]
        there_kv += work[index, 1]
        index = following[index]
    # The longest and the next: what is the longest without one of them.
    longest = second = alone = second_alone = tokens = kv = 0.0
    index = head[source]
    while index >= 0:
        length = work[index, 0]
        alone_s = length * here[0] + work[index, 2]
        second = max(second, min(length, longest))
        longest = max(longest, length)
        second_alone = max(second_alone, min(alone_s, alone))
        alone = max(alone, alone_s)
        tokens += length
        kv += work[index, 1]
        index = following[index]
    least_s, best = np.inf, -1
    index = head[source]
    while index >= 0:
        if movable[index]:
            length, kv_work = work[index, 0], work[index, 1]
            alone_s = length * here[0] + work[index, 2]
            rest_s = finish_s(
                here,
                second if length >= longest else longest,
                second_alone if alone_s >= alone else alone,
                tokens - length,
                kv - kv_work,
            )
            joined_s = finish_s(
                there,
                max(there_longest, length),
                max(there_alone, length * there[0] + work[index, 2]),
                there_tokens + length,
                there_kv + kv_work,
            )
            after_s = max(rest_s, joined_s)
            if after_s < least_s or (after_s == least_s and index < best):
                least_s, best = after_s, index
        index = following[index]
    return least_s, best


@lean
def group_finish_s(engine: Floats, work: Floats, head: int, following: Indexes) -> float:
    """When an engine finishes the trajectories of a linked list."""
    longest = alone = tokens = kv = 0.0
    index = head
    while index >= 0:
        longest = max(longest, work[index, 0])
        alone = max(alone, work[index, 0] * engine[0] + work[index, 2])
        tokens += work[index, 0]
        kv += work[index, 1]
        index = following[index]
    return finish_s(engine, longest, alone, tokens, kv)


@compiled
def rebalance(engines: Floats, work: Floats, placement: Indexes, margin: float, movable: Flags) -> Indexes:
    """Move trajectories one by one from the engine that finishes last to the one that finishes first, while that helps
    and the two differ by more than `margin`.

    An engine that no move makes faster is left as it is, and the others are balanced among themselves. Of equal moves
    the smaller index is taken.
    """
    m = len(engines)
    result = placement.copy()
    head = np.full(m, -1, np.int64)
    following = np.full(len(work), -1, np.int64)
    for index in range(len(work) - 1, -1, -1):
        at = result[index]
        if at >= 0:
            following[index] = head[at]
            head[at] = index
    times = finish_times(engines, work, result)
    active = np.ones(m, np.bool_)
    left = m
    tried = 0
    while left > 1 and tried < REBALANCE_MOVES:
        tried += 1
        last = target = -1
        for at in range(m):
            if active[at]:
                if last < 0 or times[at] >= times[last]:
                    last = at
                if target < 0 or times[at] < times[target]:
                    target = at
        if times[target] >= times[last] * (1.0 - margin):
            break
        after_s, index = best_move(engines, work, last, target, head, following, movable)
        if index < 0 or after_s >= times[last]:
            active[last] = False
            left -= 1
            continue
        if head[last] == index:
            head[last] = following[index]
        else:
            before = head[last]
            while following[before] != index:
                before = following[before]
            following[before] = following[index]
        following[index] = head[target]
        head[target] = index
        result[index] = target
        times[last] = group_finish_s(engines[last], work, head[last], following)
        times[target] = group_finish_s(engines[target], work, head[target], following)
    return result


@compiled
def keep_most(group_of: Indexes, present: Indexes, place: Indexes, context_tokens: Floats, kinds: Indexes) -> Indexes:
    """The engine that takes each group, among engines of the group's kind, so that most context stays: greedy, most
    context first, at least half of the best possible. O(n + m^2) where few groups want the same engine.

    By trajectory: group_of and present, an engine or -1. place: what each value of `present` is among the m engines.
    """
    m = len(kinds)
    kept = np.zeros((m, m))
    for index in range(len(group_of)):
        if group_of[index] >= 0 and present[index] >= 0:  # one token more: a trajectory without context counts too
            kept[group_of[index], place[present[index]]] += context_tokens[index] + 1.0
    taken = np.zeros(m, np.bool_)
    wish = np.full(m, -1)  # the free engine that holds most of a group, and how much
    wish_kept = np.zeros(m)
    engine_of = np.full(m, -1, np.int64)
    for group in range(m):
        for engine in range(m):
            if kinds[engine] == kinds[group] and kept[group, engine] > wish_kept[group]:
                wish[group], wish_kept[group] = engine, kept[group, engine]
    while True:
        group = int(np.argmax(wish_kept))
        if wish_kept[group] <= 0.0:
            break
        engine = wish[group]
        wish_kept[group] = 0.0
        if not taken[engine]:
            engine_of[group] = engine
            taken[engine] = True
            continue
        for other in range(m):
            if kinds[other] == kinds[group] and not taken[other] and kept[group, other] > wish_kept[group]:
                wish[group], wish_kept[group] = other, kept[group, other]
    for group in range(m):  # groups that no engine holds take the engines of their kind that are left
        if engine_of[group] < 0:
            for engine in range(m):
                if kinds[engine] == kinds[group] and not taken[engine]:
                    engine_of[group] = engine
                    taken[engine] = True
                    break
    return engine_of


def relabel(planned: Indexes, present: Indexes, context_tokens: Floats, movable: Flags, kinds: Indexes) -> Indexes:
    """The same partition with groups of equal engines exchanged so that most context stays where it is."""
    groups = np.where(movable, planned, -1)
    engine_of = keep_most(groups, present, np.arange(len(kinds)), context_tokens, kinds)
    return np.where(groups >= 0, engine_of[groups], planned)


@compiled
def savings_s(engines: Floats, work: Floats, placement: Indexes, moving: Indexes, targets: Indexes) -> Floats:
    """For each trajectory in `moving`, the seconds by which the later of its two engines finishes earlier if it alone
    moves. O(n + m) for all together."""
    m = len(engines)
    sums = np.zeros((m, 6))  # longest, next longest, the same in seconds alone, tokens, KV tokens
    for index in range(len(work)):
        at = placement[index]
        if at >= 0:
            row = sums[at]
            length = work[index, 0]
            alone_s = length * engines[at, 0] + work[index, 2]
            row[1] = max(row[1], min(length, row[0]))
            row[0] = max(row[0], length)
            row[3] = max(row[3], min(alone_s, row[2]))
            row[2] = max(row[2], alone_s)
            row[4] += length
            row[5] += work[index, 1]
    times = np.zeros(m)
    for at in range(m):
        times[at] = finish_s(engines[at], sums[at, 0], sums[at, 2], sums[at, 4], sums[at, 5])
    result = np.zeros(len(moving))
    for number in range(len(moving)):
        index = moving[number]
        source, target = placement[index], targets[number]
        length, kv_work = work[index, 0], work[index, 1]
        here, there = sums[source], sums[target]
        rest_s = finish_s(
            engines[source],
            here[1] if length >= here[0] else here[0],
            here[3] if length * engines[source, 0] + work[index, 2] >= here[2] else here[2],
            here[4] - length,
            here[5] - kv_work,
        )
        joined_s = finish_s(
            engines[target],
            max(there[0], length),
            max(there[2], length * engines[target, 0] + work[index, 2]),
            there[4] + length,
            there[5] + kv_work,
        )
        result[number] = max(times[source], times[target]) - max(rest_s, joined_s)
    return result


def warm_up() -> None:
    """Compile all kernels, or load them: the first plan must not wait for a compiler."""
    table = engine_rows([EngineSpec("a", ""), EngineSpec("b", "")])
    work = work_rows(np.ones(2), np.ones(2), np.zeros(2))
    placement, movable = np.zeros(2, np.int64), np.ones(2, np.bool_)
    finish_times(table.rows, work, rebalance(table.rows, work, placement, 0.0, movable))
    relabel(placement, placement, np.ones(2), movable, table.kinds)
    savings_s(table.rows, work, placement, placement[:1], placement[:1] + 1)
