"""How fast the engine decodes: tokens a second over the last seconds. The time is passed in."""

from collections import deque

WINDOW_S = 5.0  # long enough for a few decode steps of a slow engine, short enough to follow a batch that shrinks
BIN_S = 0.25


class LoadMeter:
    """Counts tokens in bins; at most WINDOW_S / BIN_S + 1 of them are kept."""

    def __init__(self) -> None:
        self._bins: deque[tuple[float, int]] = deque()  # start, tokens

    def sampled(self, tokens: int, now: float) -> None:
        """`tokens` came at `now`."""
        if self._bins and now - self._bins[-1][0] < BIN_S:
            start, count = self._bins[-1]
            self._bins[-1] = (start, count + tokens)
        else:
            self._bins.append((now, tokens))
        self._forget(now)

    def tokens_per_s(self, now: float) -> float:
        """Over the window; 0 where nothing was sampled in it."""
        self._forget(now)
        return sum(count for _, count in self._bins) / WINDOW_S

    def _forget(self, now: float) -> None:
        while self._bins and self._bins[0][0] < now - WINDOW_S:
            self._bins.popleft()
