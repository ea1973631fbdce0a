"""What arranging reads of candidates, and what comes of it: choices of units with their durations, side by side.

An arrangement is made once for all candidates in their order and then answers for every prefix of them, so that all the
evictions of Algorithm 1 come out of one table (the paper runs DPArrange again for each).
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Indexes = npt.NDArray[np.int64]


class Curves(NamedTuple):
    """units[i, c], ascending in c, and seconds[i, c]: what candidate i may get, and how long it then takes.

    counts[i]: how many choices are real; those beyond are not read.
    """

    units: Indexes
    seconds: Floats
    counts: Indexes

    def of(self, candidates: Indexes) -> Curves:
        """Those of some of them, in this order."""
        return Curves(self.units[candidates], self.seconds[candidates], self.counts[candidates])

    def priced(self, price: float) -> Curves:
        """With each second dearer by the price of the units it holds: arranged so, fewer units are held."""
        return Curves(self.units, self.seconds * (1.0 + price * self.units), self.counts)


class Arrangement(Protocol):
    """The least sum of durations of candidates that share units (DPArrange, appendix B)."""

    def chosen(self, prefix: int) -> Indexes:
        """int64[prefix]: the choice of each of the first `prefix` candidates when the others get nothing."""
        ...
