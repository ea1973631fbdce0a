"""What falls due when: a heap that a tick asks, so that no tick walks over everything there is.

Invariant: each id has at most one time that counts, the last one set; what it said before is passed over. A time that
turns out too early (the trajectory was touched since) is set again by the caller, so that a touch costs nothing.
"""

import heapq


class Deadlines:
    """Ids by the time when somebody should look at them."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, str]] = []
        self._due_s: dict[str, float] = {}

    def set(self, name: str, due_s: float) -> None:
        """Look at it then, and not before."""
        self._due_s[name] = due_s
        heapq.heappush(self._heap, (due_s, name))

    def due(self, now: float) -> list[str]:
        """Those whose time has come, the earliest first; they have none any more."""
        names: list[str] = []
        while self._heap and self._heap[0][0] <= now:
            due_s, name = heapq.heappop(self._heap)
            if self._due_s.get(name) == due_s:
                del self._due_s[name]
                names.append(name)
        return names
