"""How long to wait for a function's first byte: long where it may have been scaled to zero, else as long as it was seen
to take.

Pure: time is given. Warm and cold waits are learned as TCP learns its retransmission timeout (Jacobson 1988; RFC 6298):
mean plus four mean deviations. A function that did not answer in time is taken to be cold, so the next wait is long.
"""

from dataclasses import dataclass

MEAN_SHARE = 1 / 8  # of the newest wait in the mean, RFC 6298
DEVIATION_SHARE = 1 / 4
DEVIATIONS = 4
SHORTEST_WARM_S = 5.0  # a pause of a garbage collector or a busy node is no death
SHORTEST_COLD_S = 20.0  # an image may have to be pulled this time


@dataclass
class _Learned:
    mean_s: float = 0.0
    deviation_s: float = 0.0
    count: int = 0

    def add(self, waited_s: float) -> None:
        if self.count == 0:
            self.mean_s, self.deviation_s = waited_s, waited_s / 2
        else:
            self.deviation_s += DEVIATION_SHARE * (abs(waited_s - self.mean_s) - self.deviation_s)
            self.mean_s += MEAN_SHARE * (waited_s - self.mean_s)
        self.count += 1

    @property
    def longest_s(self) -> float:
        return self.mean_s + DEVIATIONS * self.deviation_s


class Patience:
    """See the module. cold_s: the longest wait at all. idle_s: without an answer for so long it may be cold."""

    def __init__(self, cold_s: float, idle_s: float) -> None:
        self._cold_s = cold_s
        self._idle_s = idle_s
        self._warm = _Learned()
        self._cold = _Learned()
        self._answered_at_s: float | None = None  # None: it never did, or failed since

    def is_cold(self, now_s: float) -> bool:
        """Whether it may have to start."""
        return self._answered_at_s is None or now_s - self._answered_at_s > self._idle_s

    def longest_s(self, now_s: float) -> float:
        """How long a call that begins now waits for its first byte."""
        if self.is_cold(now_s):
            learned_s = max(self._cold.longest_s, SHORTEST_COLD_S) if self._cold.count else self._cold_s
        elif self._warm.count:
            learned_s = max(self._warm.longest_s, SHORTEST_WARM_S)
        else:
            learned_s = self._cold_s  # one cold answer says nothing of warm ones
        return min(learned_s, self._cold_s)

    def answered(self, began_s: float, now_s: float) -> None:
        """A call that began then has its first byte now."""
        (self._cold if self.is_cold(began_s) else self._warm).add(now_s - began_s)
        self._answered_at_s = now_s

    def failed(self) -> None:
        """A call got no byte in time, or no connection: the next one waits as for a cold one, its whole time."""
        self._answered_at_s = None
        self._cold = _Learned()
