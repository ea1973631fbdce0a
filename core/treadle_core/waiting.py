"""Those that wait to begin, in a line for each engine.

Invariants: nobody stands in two lines, and each line is in order: the best ranked first, of equals whoever asked first.
A place in a line is as of when it was last given (`put`): what is predicted since changes nothing until then.
"""

from bisect import bisect_left, insort
from collections.abc import Sequence
from typing import NamedTuple


class Waiter(NamedTuple):
    """One of a line; the smallest begins first. place: how many had been held before it."""

    rank: float  # its priority, negated
    place: int
    trajectory_id: str


class Lines:
    """The lines, by engine."""

    def __init__(self) -> None:
        self._lines: dict[str, list[Waiter]] = {}
        self._stands: dict[str, tuple[str, Waiter]] = {}

    def engine_ids(self) -> list[str]:
        """Those with a line, in order."""
        return sorted(self._lines)

    def line(self, engine_id: str) -> Sequence[Waiter]:
        """The line of an engine, as it is at any time; the next to begin is first."""
        return self._lines.get(engine_id, ())

    def put(self, engine_id: str, waiter: Waiter) -> None:
        """Gives a trajectory this place, whatever it had before."""
        stands = (engine_id, waiter)
        if self._stands.get(waiter.trajectory_id) == stands:
            return
        self.drop(waiter.trajectory_id)
        self._stands[waiter.trajectory_id] = stands
        insort(self._lines.setdefault(engine_id, []), waiter)

    def drop(self, trajectory_id: str) -> None:
        """It waits no more, if it did."""
        stands = self._stands.pop(trajectory_id, None)
        if stands is not None:
            engine_id, waiter = stands
            line = self._lines[engine_id]
            del line[bisect_left(line, waiter)]
            if not line:
                del self._lines[engine_id]
