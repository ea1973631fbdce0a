"""Which waiting actions could start at their least, lane by lane, first come first served (Algorithm 1, line 2)."""

from __future__ import annotations

import numpy as np

from treadle_core.compiled import compiled
from treadle_core.elastic.curves import Indexes


@compiled
def seated(needs: Indexes, homes: Indexes, free: Indexes, capacity: Indexes) -> Indexes:
    """int64[n]: the lane of each action, -1: it waits. needs: int64[n, d], units at least; homes: int64[n], -1: any
    lane; free, capacity: int64[lanes, d]. Dimension 0 comes back with each action, the others may be kept for longer.

    An action that is free to go anywhere goes where the largest share of the last dimension is free (§5.2: balance of
    memory). One that waits keeps its lane for itself. One that waits for any lane keeps all others like it waiting, and
    those lanes where it lacks only dimension 0: elsewhere it waits until trajectories end, which they cannot do unless
    their actions pass it.
    """
    lanes, dimensions = free.shape
    left = free.copy()
    closed = np.zeros(lanes, np.bool_)
    all_closed = False
    seats = np.full(len(needs), -1, np.int64)
    last = dimensions - 1
    for i in range(len(needs)):
        home = homes[i]
        best, best_share = -1, -1.0
        for lane in range(lanes):
            if closed[lane] or (home >= 0 and lane != home) or (home < 0 and all_closed):
                continue
            fits = True
            for d in range(dimensions):
                fits = fits and needs[i, d] <= left[lane, d]
            share = left[lane, last] / max(capacity[lane, last], 1)
            if fits and share > best_share:
                best, best_share = lane, share
        seats[i] = best
        if best >= 0:
            for d in range(dimensions):
                left[best, d] -= needs[i, d]
        elif home >= 0:
            closed[home] = True
        elif not all_closed:
            all_closed = True
            for lane in range(lanes):
                others_fit = True
                for d in range(1, dimensions):
                    others_fit = others_fit and needs[i, d] <= left[lane, d]
                closed[lane] = closed[lane] or others_fit
    return seats
