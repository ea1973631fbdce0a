"""The cores of an action that runs, as they change: who runs it says where changes are to be carried out."""

import itertools
import time
from collections import defaultdict
from collections.abc import Callable, Mapping

Cores = tuple[int, ...]


class Moves:
    """See the module. Invariant: whoever listens has been told of the newest cores, and of nothing once it has left."""

    def __init__(self) -> None:
        self._cores: Cores | None = None
        self._listener: Callable[[Cores], None] | None = None
        self._counts: list[tuple[float, int]] = []  # how many from when on

    def listen(self, listener: Callable[[Cores], None]) -> None:
        """Tell of other cores from now on. Those of the grant are known; what has changed since is told at once."""
        self._listener = listener
        if self._cores is not None:
            listener(self._cores)

    def leave(self) -> None:
        """Tell no more."""
        self._listener = None

    def to(self, cores: Cores) -> None:
        """All cores that it has now, ascending."""
        self._cores = cores
        self._counts.append((time.monotonic(), len(cores)))
        if self._listener is not None:
            self._listener(cores)

    def lent(self, granted: int, began: float, ended: float) -> Mapping[int, float]:
        """Seconds between two moments by how many cores it had beyond those granted."""
        found: dict[int, float] = defaultdict(float)
        counts = [(began, granted), *self._counts, (ended, granted)]
        for (since, cores), (until, _) in itertools.pairwise(counts):
            found[cores - granted] += max(0.0, min(until, ended) - max(since, began))
        return found
