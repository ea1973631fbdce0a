"""Which waiting action comes first. An ordering is a function of the queue; FCFS is the paper's (§4.2)."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from treadle_core.elastic.curves import Indexes
from treadle_core.elastic.waiting import Waiting

Ordering = Callable[[Waiting], Indexes]


def first_come(waiting: Waiting) -> Indexes:
    """By arrival: nothing starves, and all actions are on their trajectories' critical paths."""
    return np.argsort(waiting.arrival[: len(waiting)], kind="stable")


def shortest_first(waiting: Waiting) -> Indexes:
    """By duration at the least units, unknown ones last; equal ones by arrival. Long ones may starve."""
    count = len(waiting)
    return np.lexsort((waiting.arrival[:count], waiting.seconds[:count, 0]))  # NaN sorts last
