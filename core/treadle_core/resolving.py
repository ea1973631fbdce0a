"""Re-planning by solving again: the partition of REMAINING work, judged before it is followed (reference: 15-20% better
than scaling ranks).

A plan is never trusted on its own word: it is followed only where the core's own cost model says that it beats both the
present placement and a plain rebalance of it by a margin. With few engines and few slots that is seldom so, and then
nothing moves. What moves besides passes the cost gate (`cost_gate.py`): tool time left, bytes over bandwidth, saving.
"""

import numpy as np

from treadle_core import balance, pooling
from treadle_core.picture import Picture
from treadle_core.tuning import Tuning
from treadle_core.worksheet import Flags, Indexes


class Judged:
    """What became of a plan: where each trajectory should be, and what each move is worth in seconds."""

    def __init__(self, placement: Indexes, share_s: float) -> None:
        self.placement = placement
        self.share_s = share_s


def judged(picture: Picture, planned: Indexes, movable: Flags, tuning: Tuning) -> Judged:
    """Where each trajectory should be.

    Those that have not begun follow the plan, pooled (`pooling.py`): they have no KV to move. For the others it is the
    best of where they are, a rebalance of that, and the plan, by `balance`; what beats must beat by
    `tuning.plan_margin`. Trajectories whose engine is not usable stay out of it.
    """
    engines, work = picture.roster.table.rows, picture.work
    movable = movable & (picture.placement >= 0)
    free = movable & ~picture.live.begun
    present = np.where(free & (planned >= 0), planned, picture.placement)
    planned = np.where(movable & (planned >= 0), planned, present)
    before = balance.finish_times(engines, work, present)
    best, times = present, before
    for candidate in (balance.rebalanced(engines, work, present, tuning.plan_margin, movable), planned):
        candidate_times = balance.finish_times(engines, work, candidate)
        if balance.better(candidate_times, times, tuning.plan_margin):
            best, times = candidate, candidate_times
    if best is planned:
        kinds = picture.roster.table.kinds
        same = balance.relabelled(planned, present, picture.live.context_tokens, movable, kinds)
        same_times = balance.finish_times(engines, work, same)
        if not balance.better(times, same_times, 0.0):
            best, times = same, same_times  # as good, and less to move
    moves = int(np.count_nonzero((best != present) & ~free))
    saved_s = float(before.max() - times.max()) if len(before) else 0.0
    if free.any():
        order = np.argsort(-work[:, balance.TOKENS], kind="stable")
        best = pooling.dealt(engines, work, best, free, order, float(times.max()), tuning.pool_slack)
        staying = balance.finish_times(engines, work, picture.placement)
        if balance.better(staying, balance.finish_times(engines, work, best), 0.0):
            return Judged(picture.placement, 0.0)
    return Judged(best, max(0.0, saved_s) / moves if moves else 0.0)
