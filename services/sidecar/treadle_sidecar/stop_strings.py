"""Stop strings that a cut has split.

The engine looks for stop strings in what the present request sampled, so it cannot see one whose beginning was
sampled before an eviction (or on a lost engine) and whose end comes after. This looks at the text around each cut,
and only there. A match is seen after the chunk that completes it, so tokens that share its chunk stay, as they do
when the engine finds one itself in a multi-token step.
"""

from collections.abc import Sequence


class SplitStops:
    """`tail` is the text before the cut, of which only the end matters."""

    def __init__(self, stops: Sequence[str], tail: str = "") -> None:
        self._stops = tuple(stops)
        self._reach = max((len(stop) for stop in self._stops), default=0) - 1
        self._tail = self._end_of(tail)
        self._before = len(self._tail)  # characters of the tail that were there at the cut

    def cut(self) -> None:
        """The request was cut here; what follows is another's."""
        self._before = len(self._tail)

    def completes(self, text: str) -> bool:
        """Take new text; True where it completes a stop string that began before the cut."""
        if self._reach < 1:
            return False
        joined = self._tail + text
        found = any(0 <= joined.find(stop) < self._before for stop in self._stops) if self._before else False
        self._tail = self._end_of(joined)
        dropped = len(joined) - len(self._tail)
        self._before = max(self._before - dropped, 0)
        return found

    def _end_of(self, text: str) -> str:
        return text[-self._reach :] if self._reach > 0 else ""
