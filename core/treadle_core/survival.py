"""How long trajectories of a kind last, from those that ended, those cut short and those still running.

Purpose: one curve S(t) = P(total > t) on fixed knots, learned from complete and right-censored totals and shrunk to
a base curve where there are few; and the quantiles of what remains given what is done.
Invariants: curves never rise, start at most at 1 and end above or at 0; quantiles never fall with the probability;
with many observations the curve tends to Kaplan-Meier's, with none it is the base.
Method: the Bayes estimator of a survival curve under a Dirichlet-process prior with right censoring (Susarla and Van
Ryzin, 1976): Kaplan-Meier with the base curve counting as `weight` observations. Totals are tokens or turns.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Counts = npt.NDArray[np.int64]

# Knots: 48 an octave are 1.5% apart, finer than anything predicted here; 2^24 tokens are beyond any context.
TOKEN_KNOTS: Floats = np.concatenate([[0.0], np.geomspace(1.0, 2.0**24, 24 * 48 + 1)])
# Whole turns up to 64, then as with tokens.
TURN_KNOTS: Floats = np.concatenate([np.arange(64.0), np.geomspace(64.0, 2.0**14, 8 * 48 + 1)])

QUANTILES = (0.1, 0.5, 0.9)
LEAST_AT_RISK = 1e-300  # observations; keeps a division from zero


def lognormal(knots: Floats, median: float, sigma: float) -> Floats:
    """The curve of a log-normal total: `median` in the knots' unit, `sigma` of the natural log, both > 0."""
    scale = sigma * math.sqrt(2.0)
    return np.array([0.5 * math.erfc(math.log(t / median) / scale) if t > 0.0 else 1.0 for t in knots.tolist()])


@dataclass(frozen=True)
class Observed:
    """Totals seen: `values` ascending and distinct; of each, how many came to their own end there (`ended`), and how
    many were cut there or have come so far and still run (`censored`: their total is larger)."""

    values: Floats
    ended: Counts
    censored: Counts


def observed(ended: Sequence[float], censored: Sequence[float]) -> Observed:
    """Exact totals in any order."""
    values, index = np.unique(np.array([*ended, *censored], np.float64), return_inverse=True)
    counts = np.zeros((2, len(values)), np.int64)
    np.add.at(counts, (np.repeat([0, 1], [len(ended), len(censored)]), index), 1)
    return Observed(values, counts[0], counts[1])


class Tally:
    """Totals counted on knots, for crowds: adding and taking away cost O(log knots), and the order does not matter."""

    def __init__(self, knots: Floats) -> None:
        self._knots = knots.tolist()
        self.observed = Observed(knots, np.zeros(len(knots), np.int64), np.zeros(len(knots), np.int64))

    def add(self, total: float, *, own_end: bool, times: int = 1) -> None:
        """Counts a total at the knot at or below it; `times` -1 takes it away again."""
        at = max(0, bisect.bisect_right(self._knots, total) - 1)
        (self.observed.ended if own_end else self.observed.censored)[at] += times


def posterior(knots: Floats, base: Floats, weight: float, seen: Observed) -> Floats:
    """The curve after observing totals; `weight` > 0 is how many observations the base counts as."""
    counts = seen.ended + seen.censored
    count = int(counts.sum())
    if count == 0:
        return base
    longer = count - np.cumsum(counts)  # observations beyond each value
    # Where nothing, not even the base, goes beyond a cut, the curve is 0 there anyway.
    at_risk = np.maximum(weight * np.interp(seen.values, knots, base) + longer, LEAST_AT_RISK)
    lifts = np.cumsum(np.log1p(seen.censored / at_risk))
    passed = np.searchsorted(seen.values, knots, side="right")
    beyond = np.concatenate([[count], longer])[passed]
    lift = np.concatenate([[0.0], lifts])[passed]
    curve = (weight * base + beyond) / (weight + count) * np.exp(lift)
    return np.minimum.accumulate(np.clip(curve, 0.0, 1.0))


def remaining(knots: Floats, curve: Floats, done: float) -> tuple[float, float, float]:
    """p10, p50 and p90 of total - done, given total > done; 0 beyond the last knot."""
    if done >= knots[-1]:
        return (0.0, 0.0, 0.0)
    alive = float(np.interp(done, knots, curve))
    found = []
    for quantile in QUANTILES:
        level = alive * (1.0 - quantile)
        at = int(np.searchsorted(-curve, -level, side="left"))
        if at >= len(knots):
            total = float(knots[-1])
        elif at == 0 or curve[at - 1] <= curve[at]:
            total = float(knots[at])
        else:
            share = (curve[at - 1] - level) / (curve[at - 1] - curve[at])
            total = float(knots[at - 1] + share * (knots[at] - knots[at - 1]))
        found.append(max(0.0, total - done))
    return (found[0], found[1], found[2])
