"""Who has not begun goes where that does the least harm if its length was guessed wrong.

A plan sorts by predicted length, which it must for the long ones: they run with few beside them. For the others it is
one optimum of many, as a group's time is made of sums, and a brittle one: a trajectory that is guessed short is put
in line with hundreds of its like on one engine, and if it is long after all it begins late and ends last. So the
engines whose longest trajectory could be some times as long without being the last are one pool, and those that have
not begun are dealt over it, longest first, each to the engine that would be done first. Sums stay as they were
planned, nearly, and as many as possible begin at once.
"""

import numpy as np

from treadle_core.compiled import compiled
from treadle_core.worksheet import Flags, Floats, Indexes


@compiled
def load_s(engine: Floats, tokens: float, kv_tokens: float) -> float:
    """Seconds of work, whatever the longest takes."""
    return float(
        engine[0] * max(tokens / engine[3], kv_tokens / engine[4]) + engine[1] * tokens + engine[2] * kv_tokens
    )


@compiled
def dealt(
    engines: Floats, work: Floats, placement: Indexes, free: Flags, order: Indexes, makespan_s: float, slack: float
) -> Indexes:
    """The placement with the free trajectories of the pool's engines dealt out again; `order`: all, longest first.

    An engine is in the pool where its longest trajectory, were it `slack` times as long, would still end within the
    makespan.
    """
    m = len(engines)
    longest_s = np.zeros(m)
    for index in range(len(work)):
        at = placement[index]
        if at >= 0:
            longest_s[at] = max(longest_s[at], work[index, 0] * engines[at, 0] + work[index, 2])
    pool = np.flatnonzero(longest_s * slack <= makespan_s)
    result = placement.copy()
    if len(pool) < 2:
        return result
    in_pool = np.zeros(m, np.bool_)
    in_pool[pool] = True
    tokens, kv = np.zeros(m), np.zeros(m)
    for index in range(len(work)):
        at = placement[index]
        if at >= 0 and in_pool[at] and not free[index]:
            tokens[at] += work[index, 0]
            kv[at] += work[index, 1]
    for index in order:
        at = placement[index]
        if at < 0 or not in_pool[at] or not free[index]:
            continue
        best, best_s = at, np.inf
        for other in pool:
            done_s = load_s(engines[other], tokens[other] + work[index, 0], kv[other] + work[index, 1])
            if done_s < best_s:
                best, best_s = other, done_s
        result[index] = best
        tokens[best] += work[index, 0]
        kv[best] += work[index, 1]
    return result
