"""Re-planning by solving again: the partition of REMAINING work, judged before it is followed (reference: 15-20% better
than scaling ranks).

A plan is never trusted on its own word: it is followed only where, by the core's own cost model and over samples of
what could come of the predictions (`scenarios.py`), it beats the present placement by a margin. What moves besides
passes the cost gate (`cost_gate.py`): tool time left, bytes over bandwidth, saving.
"""

import numpy as np

from treadle_core import balance, pooling
from treadle_core.picture import Picture
from treadle_core.ranking import ranked
from treadle_core.scenarios import mean_makespan
from treadle_core.tuning import Tuning
from treadle_core.worksheet import Flags, Indexes


class Judged:
    """What became of a plan: where each trajectory should be, and what each move is worth in seconds."""

    def __init__(self, placement: Indexes, share_s: float) -> None:
        self.placement = placement
        self.share_s = share_s


def judged(picture: Picture, planned: Indexes, movable: Flags, tuning: Tuning) -> Judged:
    """Where each trajectory should be: of some placements the one with the least mean makespan over samples.

    They are: where all are; the same with those that have not begun where the plan wants them, as they have no KV to
    move; and the plan itself, its groups renamed so that most stays, or, where no plan came, a plain rebalance. Where
    some have not begun, each also with those pooled (`pooling.py`). What moves KV must beat what does not by
    `tuning.plan_margin`. Trajectories whose engine is not usable stay out of it.
    """
    engines, work, staying = picture.roster.table.rows, picture.work, picture.placement
    movable = movable & (staying >= 0)
    free = movable & ~picture.live.begun
    present = np.where(free & (planned >= 0), planned, staying)
    planned = np.where(movable & (planned >= 0), planned, present)
    if np.array_equal(planned, staying):  # no plan came
        other = balance.rebalanced(engines, work, staying, tuning.rebalance_margin, movable)
    else:
        context_tokens, kinds = picture.live.context_tokens, picture.roster.table.kinds
        other = balance.relabelled(planned, present, context_tokens, movable, kinds)
    best, before_s = staying, mean_makespan(engines, picture.samples, staying)
    best_s = before_s
    candidates = [(other, tuning.plan_margin)]
    order = np.flatnonzero(free)
    order = order[ranked(work[order, balance.TOKENS], work[order, balance.KV], free[order])[0]]
    if len(order):  # else it is where all are
        candidates.insert(0, (present, 0.0))
    for placement, margin in candidates:
        for candidate in _with_pooled(picture, placement, free, order, tuning):
            candidate_s = mean_makespan(engines, picture.samples, candidate)
            if candidate_s < best_s * (1.0 - margin):
                best, best_s = candidate, candidate_s
    moves = int(np.count_nonzero((best != staying) & ~free))
    return Judged(best, max(0.0, before_s - best_s) / moves if moves else 0.0)


def _with_pooled(picture: Picture, placement: Indexes, free: Flags, order: Indexes, tuning: Tuning) -> list[Indexes]:
    """A placement, and where some have not begun (`order`: these, longest first) the same with those pooled."""
    if not len(order):
        return [placement]
    engines, work = picture.roster.table.rows, picture.work
    makespan_s = float(balance.finish_times(engines, work, placement).max())
    return [placement, pooling.dealt(engines, work, placement, free, order, makespan_s, tuning.pool_slack)]
