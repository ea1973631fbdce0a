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
# Columns of the sums of what an engine has: tokens of the longest trajectory and of the next longest, seconds of those
# that take longest alone, tokens, KV tokens.
LONGEST, NEXT, ALONE_S, NEXT_ALONE_S, ALL_TOKENS, ALL_KV = range(6)


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


@inlined
def add_up(sums: Floats, length: float, kv_tokens: float, alone_s: float) -> None:
    """Add a trajectory to what an engine has."""
    sums[NEXT] = max(sums[NEXT], min(length, sums[LONGEST]))
    sums[LONGEST] = max(sums[LONGEST], length)
    sums[NEXT_ALONE_S] = max(sums[NEXT_ALONE_S], min(alone_s, sums[ALONE_S]))
    sums[ALONE_S] = max(sums[ALONE_S], alone_s)
    sums[ALL_TOKENS] += length
    sums[ALL_KV] += kv_tokens


@compiled
def sum_up(engines: Floats, work: Floats, placement: Indexes) -> Floats:
    """What each engine has under a placement."""
    sums = np.zeros((len(engines), ALL_KV + 1))
    for index in range(len(work)):
        at = placement[index]
        if at >= 0:
            alone_s = work[index, TOKENS] * engines[at, BASE_S] + work[index, TOOL_S]
            add_up(sums[at], work[index, TOKENS], work[index, KV], alone_s)
    return sums


@inlined
def done_s(engine: Floats, sums: Floats) -> float:
    return finish_s(engine, sums[LONGEST], sums[ALONE_S], sums[ALL_TOKENS], sums[ALL_KV])


@compiled
def done_times(engines: Floats, sums: Floats) -> Floats:
    """When each engine finishes what it has."""
    times = np.zeros(len(engines))
    for at in range(len(engines)):
        times[at] = done_s(engines[at], sums[at])
    return times


@compiled
def finish_times(engines: Floats, work: Floats, placement: Indexes) -> Floats:
    """When each engine finishes under a placement."""
    return done_times(engines, sum_up(engines, work, placement))


@inlined
def after_move_s(
    engines: Floats, sums: Floats, here: int, there: int, length: float, kv_tokens: float, tool_s: float
) -> float:
    """When the later of two engines finishes if a trajectory goes from one to the other."""
    bound = length >= sums[here, LONGEST]
    bound_alone = length * engines[here, BASE_S] + tool_s >= sums[here, ALONE_S]
    left_s = finish_s(
        engines[here],
        sums[here, NEXT] if bound else sums[here, LONGEST],
        sums[here, NEXT_ALONE_S] if bound_alone else sums[here, ALONE_S],
        sums[here, ALL_TOKENS] - length,
        sums[here, ALL_KV] - kv_tokens,
    )
    joined_s = finish_s(
        engines[there],
        max(sums[there, LONGEST], length),
        max(sums[there, ALONE_S], length * engines[there, BASE_S] + tool_s),
        sums[there, ALL_TOKENS] + length,
        sums[there, ALL_KV] + kv_tokens,
    )
    return max(left_s, joined_s)


@lean
def best_move(
    engines: Floats,
    work: Floats,
    sums: Floats,
    source: int,
    target: int,
    head: Indexes,
    following: Indexes,
    movable: Flags,
) -> tuple[float, int]:
    """The move after which the later of two engines finishes earliest: (seconds, trajectory); (inf, -1) for none."""
    least_s, best = np.inf, -1
    index = head[source]
    while index >= 0:
        if movable[index]:
            after_s = after_move_s(
                engines, sums, source, target, work[index, TOKENS], work[index, KV], work[index, TOOL_S]
            )
            if after_s < least_s or (after_s == least_s and index < best):
                least_s, best = after_s, index
        index = following[index]
    return least_s, best


@lean
def sum_list(sums: Floats, engine: Floats, work: Floats, head: int, following: Indexes) -> None:
    """Write what an engine has whose trajectories are a linked list."""
    sums[:] = 0.0
    index = head
    while index >= 0:
        alone_s = work[index, TOKENS] * engine[BASE_S] + work[index, TOOL_S]
        add_up(sums, work[index, TOKENS], work[index, KV], alone_s)
        index = following[index]


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
    sums = sum_up(engines, work, result)
    times = done_times(engines, sums)
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
        after_s, index = best_move(engines, work, sums, last, target, head, following, movable)
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
        for at in (last, target):
            sum_list(sums[at], engines[at], work, head[at], following)
            times[at] = done_s(engines[at], sums[at])
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
    sums = sum_up(engines, work, placement)
    times = done_times(engines, sums)
    result = np.zeros(len(moving))
    for number in range(len(moving)):
        index, there = moving[number], targets[number]
        here = placement[index]
        after_s = after_move_s(engines, sums, here, there, work[index, TOKENS], work[index, KV], work[index, TOOL_S])
        result[number] = max(times[here], times[there]) - after_s
    return result
