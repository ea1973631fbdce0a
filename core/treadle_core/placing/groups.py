"""Assign groups of trajectories to engines, where engines with equal figures could each take a
group."""

from collections.abc import Hashable, Iterable

import numpy as np

from treadle_core.compiled import Flags, Floats, Indexes, compiled


def number_kinds(figures: Iterable[Hashable]) -> Indexes:
    """Return a number for each engine, the same for engines with equal figures."""
    numbers: dict[Hashable, int] = {}
    return np.array([numbers.setdefault(each, len(numbers)) for each in figures], np.int64)


@compiled
def keep_most(
    group_of: Indexes, present: Indexes, place: Indexes, context_tokens: Floats, kinds: Indexes
) -> Indexes:
    """Return the engine that takes each group, among engines of the group's kind, so that most
    context stays: greedy, most context first, at least half of the best possible. O(n + m^2) where
    few groups want the same engine.

    By trajectory: group_of and present, an engine or -1. place: what each value of `present` is
    among the m engines.
    """
    m = len(kinds)
    kept = np.zeros((m, m))
    for index in range(len(group_of)):
        if (
            group_of[index] >= 0 and present[index] >= 0
        ):  # one token more: a trajectory without context counts too
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
            if (
                kinds[other] == kinds[group]
                and not taken[other]
                and kept[group, other] > wish_kept[group]
            ):
                wish[group], wish_kept[group] = other, kept[group, other]
    for group in range(
        m
    ):  # groups that no engine holds take the engines of their kind that are left
        if engine_of[group] < 0:
            for engine in range(m):
                if kinds[engine] == kinds[group] and not taken[engine]:
                    engine_of[group] = engine
                    taken[engine] = True
                    break
    return engine_of


def relabel(
    planned: Indexes, present: Indexes, context_tokens: Floats, movable: Flags, kinds: Indexes
) -> Indexes:
    """Return the same partition with groups exchanged between equal engines so that most context
    stays where it is."""
    groups = np.where(movable, planned, -1)
    engine_of = keep_most(groups, present, np.arange(len(kinds)), context_tokens, kinds)
    return np.where(groups >= 0, engine_of[groups], planned)
