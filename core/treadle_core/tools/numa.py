"""Cores of a machine by NUMA node, and which of them an action gets: those next to each other (ARL-Tangram §5.2)."""

from __future__ import annotations

from collections.abc import Sequence

Cores = tuple[frozenset[int], ...]  # by NUMA node


def pick(free: Sequence[frozenset[int]], count: int) -> Cores:
    """`count` of the free cores, by NUMA node; `free` holds as many at least.

    All of one NUMA node where one has enough, the fullest that does, so that emptier ones stay for larger actions;
    else of as few as there can be: the emptiest first, and the last of them again the fullest that does.
    """
    left = [set(cores) for cores in free]
    picked: list[frozenset[int]] = [frozenset()] * len(free)
    while count > 0:
        enough = [(len(cores), at) for at, cores in enumerate(left) if len(cores) >= count]
        at = min(enough)[1] if enough else max(range(len(left)), key=lambda index: (len(left[index]), -index))
        picked[at] = frozenset(sorted(left[at])[:count])
        count -= len(picked[at])
        left[at].clear()
    return tuple(picked)


def plus(some: Cores, more: Cores) -> Cores:
    """Both."""
    return tuple(here | there for here, there in zip(some, more, strict=True))


def minus(some: Cores, fewer: Cores) -> Cores:
    """The first without the second."""
    return tuple(here - there for here, there in zip(some, fewer, strict=True))


def count_of(cores: Cores) -> int:
    """How many."""
    return sum(map(len, cores))


def ascending(cores: Cores) -> tuple[int, ...]:
    """All of them."""
    return tuple(sorted(core for part in cores for core in part))
