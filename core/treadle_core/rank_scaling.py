"""Re-planning as Heddle 5.3 prints it: the initial plan's group sizes, scaled to those that are still active.

The initial plan gives s_i trajectories to worker i, longest first, of n in all. Whenever a trajectory's prediction is
updated it gets a new rank among the n* that are still open, by predicted remaining tokens, longest first; worker i
takes s_i * n* / n of the ranks, in the plan's order, and where the rank's worker is not the trajectory's own, it
migrates. Nothing is weighed: no cost, no saving, no rest between moves; one move at a time is all that holds it back.
A trajectory is ranked by its last prediction, also while it samples: that is what the rule says.

Ranks are exact: one sorted list, an update is two binary searches and two moves of memory within it (3 microseconds
with 6,400 trajectories, and the memory moved would not matter below some 100,000).
"""

from bisect import bisect_left, bisect_right, insort
from collections.abc import Sequence

import numpy as np

from treadle_core.errors import CoreError
from treadle_core.plan_work import PlanWork
from treadle_core.worksheet import Indexes


class InvalidSizesError(CoreError):
    """Group sizes that cannot be scaled: a negative one, or as many as engines they are not."""


class Ranks:
    """Trajectories by length, longest first; equal ones in the order of their coming."""

    def __init__(self) -> None:
        self._keys: list[tuple[float, int]] = []
        self._key_of: dict[str, tuple[float, int]] = {}
        self._came = 0

    def __len__(self) -> int:
        return len(self._keys)

    def put(self, trajectory_id: str, length: float) -> None:
        """A trajectory has come, or has another length."""
        old = self._key_of.get(trajectory_id)
        if old is None:
            key = (-length, self._came)
            self._came += 1
        else:
            key = (-length, old[1])
            if key == old:
                return
            del self._keys[bisect_left(self._keys, old)]
        self._key_of[trajectory_id] = key
        insort(self._keys, key)

    def drop(self, trajectory_id: str) -> None:
        """A trajectory has left; unknown ones are fine."""
        key = self._key_of.pop(trajectory_id, None)
        if key is not None:
            del self._keys[bisect_left(self._keys, key)]

    def rank(self, trajectory_id: str) -> int:
        """Its place, 0 for the longest; -1 where it is not here."""
        key = self._key_of.get(trajectory_id)
        return -1 if key is None else bisect_left(self._keys, key)


class Scaled:
    """The groups of a plan in the order of ranks, to be scaled. Raises InvalidSizesError."""

    def __init__(self, engine_ids: Sequence[str], sizes: Sequence[int]) -> None:
        if len(sizes) != len(engine_ids):
            raise InvalidSizesError("sizes", f"{len(sizes)} sizes for {len(engine_ids)} engines")
        if any(size < 0 for size in sizes):
            raise InvalidSizesError("sizes", f"must be >= 0, are {list(sizes)}")
        self.engine_ids = tuple(engine_ids)
        self._ends = np.cumsum(np.array(sizes, np.int64)).tolist() if sizes else []

    def engine(self, rank: int, active: int) -> str:
        """The engine of a rank among `active`; empty where the plan had nobody. Groups end at S_i * n* / n, S_i the
        sum of the first i sizes: the first that ends behind the rank has it."""
        planned = self._ends[-1] if self._ends else 0
        if planned == 0 or not 0 <= rank < active:
            return ""
        # rank < S_i * n* / n, in whole numbers.
        return self.engine_ids[bisect_right(self._ends, rank * planned // active)]


def scaled(work: PlanWork, engine_ids: Sequence[str], engine_of: Indexes) -> Scaled:
    """The groups of a plan: `engine_of` gives each trajectory of the question its engine's index, -1 for none.

    Groups are contiguous in length, so the longest and then the shortest of each put them in order.
    """
    placed = engine_of >= 0
    lengths, at = work.remaining_tokens[placed], engine_of[placed]
    count = len(engine_ids)
    sizes = np.bincount(at, minlength=count)
    longest, shortest = np.zeros(count), np.full(count, np.inf)
    np.maximum.at(longest, at, lengths)
    np.minimum.at(shortest, at, lengths)
    order = [int(index) for index in np.lexsort((np.arange(count), -shortest, -longest)) if sizes[index]]
    return Scaled([engine_ids[index] for index in order], [int(sizes[index]) for index in order])
