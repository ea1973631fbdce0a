"""Who has not begun goes where that does the least harm if its length was guessed wrong.

A plan sorts by predicted length, which it must for the long ones: they run with few beside them. For the others it is
one optimum of many, as a group's time is made of sums, and a brittle one: a trajectory that is guessed short is put
in line with hundreds of its like on one engine, and if it is long after all it begins late and ends last. So the
engines whose longest trajectory could be some times as long without being the last are one pool, and those that have
not begun are dealt over it, longest first, each to the engine that would be done first. Sums stay as they were
planned, nearly, and as many as possible begin at once.
"""

import numpy as np

from treadle_core.compiled import compiled, inlined
from treadle_core.worksheet import Flags, Floats, Indexes


@compiled
def pool(engines: Floats, work: Floats, placement: Indexes, makespan_s: float, slack: float) -> Flags:
    """The engines whose longest trajectory, were it `slack` times as long, would still end within the makespan."""
    longest_s = np.zeros(len(engines))
    for index in range(len(work)):
        at = placement[index]
        if at >= 0:
            longest_s[at] = max(longest_s[at], work[index, 0] * engines[at, 0] + work[index, 2])
    return longest_s * slack <= makespan_s


@compiled
def dealt(engines: Floats, work: Floats, placement: Indexes, free: Flags, order: Indexes, pooled: Flags) -> Indexes:
    """The placement with the free trajectories of the pool's engines dealt out again; `order`: the free ones, longest
    first."""
    pool = np.flatnonzero(pooled)
    result = placement.copy()
    if len(pool) < 2:
        return result
    at_of = np.full(len(engines), -1)
    at_of[pool] = np.arange(len(pool))
    speeds = speeds_of(engines[pool])
    tokens, kv = np.zeros(len(pool)), np.zeros(len(pool))
    for index in range(len(work)):
        at = placement[index]
        if at >= 0 and at_of[at] >= 0 and not free[index]:
            tokens[at_of[at]] += work[index, 0]
            kv[at_of[at]] += work[index, 1]
    load_s = np.empty(len(pool))
    for index in order:
        at = placement[index]
        if at < 0 or at_of[at] < 0:
            continue
        loads(speeds, tokens, kv, work[index, 0], work[index, 1], load_s)
        best = 0
        for other in range(1, len(pool)):
            if load_s[other] < load_s[best]:
                best = other
        result[index] = pool[best]
        tokens[best] += work[index, 0]
        kv[best] += work[index, 1]
    return result


@compiled
def speeds_of(engines: Floats) -> Floats:
    """What `loads` reads, a column an engine, so that all are tried at once: seconds of steps a token where slots bind
    and a KV token where KV binds, then seconds a token and a KV token on top."""
    speeds = np.empty((4, len(engines)))
    speeds[0] = engines[:, 0] / engines[:, 3]
    speeds[1] = engines[:, 0] / engines[:, 4]
    speeds[2] = engines[:, 1]
    speeds[3] = engines[:, 2]
    return speeds


@inlined
def loads(speeds: Floats, tokens: Floats, kv: Floats, more_tokens: float, more_kv: float, load_s: Floats) -> None:
    """Writes the seconds of work of each engine with so much more, whatever its longest takes."""
    for at in range(len(load_s)):
        own_tokens, own_kv = tokens[at] + more_tokens, kv[at] + more_kv
        by_slots, by_kv = speeds[0, at] * own_tokens, speeds[1, at] * own_kv
        steps_s = by_slots if by_slots > by_kv else by_kv
        load_s[at] = steps_s + speeds[2, at] * own_tokens + speeds[3, at] * own_kv


def warm_up() -> None:
    """Compiles the kernels, or loads them."""
    engines, work, free = np.ones((2, 6)), np.ones((2, 3)), np.ones(2, np.bool_)
    placement = np.zeros(2, np.int64)
    dealt(engines, work, placement, free, np.arange(2), pool(engines, work, placement, 9.0, 1.0))
