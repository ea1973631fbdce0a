"""Re-planning by solving again: the partition of REMAINING work, judged before it is followed (reference: 15-20% better
than scaling ranks).

A plan is never trusted on its own word: it is followed only where, by the core's own cost model and over samples of
what could come of the predictions (`scenarios.py`), it beats the present placement by a margin. What moves besides
passes the cost gate (`cost_gate.py`): tool time left, bytes over bandwidth, saving.
"""

from functools import cached_property

import numpy as np

from treadle_core import balance, pooling, scenarios
from treadle_core.picture import Picture
from treadle_core.ranking import ranked
from treadle_core.scenarios import Fate
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
    `tuning.plan_margin`. Trajectories whose engine is not usable stay out of it. Where nothing can be done sooner all
    stay.
    """
    engines, work, staying = picture.roster.table.rows, picture.work, picture.placement
    movable = movable & (staying >= 0)
    free = movable & ~picture.live.begun
    choice = Choice(picture, tuning, free)
    if choice.fate.least:
        return Judged(staying, 0.0)
    present = np.where(free & (planned >= 0), planned, staying)
    planned = np.where(movable & (planned >= 0), planned, present)
    if np.array_equal(planned, staying):  # no plan came
        other = balance.rebalanced(engines, work, staying, tuning.rebalance_margin, movable)
    else:
        context_tokens, kinds = picture.live.context_tokens, picture.roster.table.kinds
        other = balance.relabelled(planned, present, context_tokens, movable, kinds)
    choice.consider(present, 0.0)
    choice.consider(other, tuning.plan_margin)
    moves = int(np.count_nonzero((choice.best != staying) & ~free))
    return Judged(choice.best, max(0.0, choice.before_s - choice.fate.mean_makespan_s) / moves if moves else 0.0)


class Choice:
    """The best placement so far. A placement that cannot be better than the best is not judged (`scenarios.Fate`), and
    nobody is dealt out where that cannot help: most plans change nothing that is last."""

    def __init__(self, picture: Picture, tuning: Tuning, free: Flags) -> None:
        self._picture = picture
        self._tuning = tuning
        self._free = free
        self._waiting = np.flatnonzero(free)
        self._engines, self._work = picture.roster.table.rows, picture.work
        self.best = picture.placement
        self.fate = self._fate(self.best)
        self.before_s = self.fate.mean_makespan_s

    @cached_property
    def _order(self) -> Indexes:
        """Those that have not begun, longest first."""
        waiting = self._waiting
        work = self._work[waiting]
        return waiting[ranked(work[:, balance.TOKENS], work[:, balance.KV], self._free[waiting])[0]]

    def consider(self, placement: Indexes, margin: float) -> None:
        """Takes a placement, or the same with those pooled who have not begun, where it is better by the margin."""
        fate = self._tried(placement, margin)
        if not len(self._waiting):
            return
        makespan_s = float(balance.finish_times(self._engines, self._work, placement).max())
        pool = pooling.pool(self._engines, self._work, placement, makespan_s, self._tuning.pool_slack)
        if (pool & fate.critical)[placement[self._waiting]].any():
            self._tried(pooling.dealt(self._engines, self._work, placement, self._free, self._order, pool), margin)

    def _tried(self, placement: Indexes, margin: float) -> Fate:
        """What becomes of a placement, which is the best now if it is better; that of the best where it cannot be."""
        if not self.fate.critical[self.best[placement != self.best]].any():
            return self.fate
        fate = self._fate(placement)
        if fate.mean_makespan_s < self.fate.mean_makespan_s * (1.0 - margin):
            self.best, self.fate = placement, fate
        return fate

    def _fate(self, placement: Indexes) -> Fate:
        return scenarios.fate(self._engines, self._picture.samples, placement)
