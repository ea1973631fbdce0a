"""Measured times and their quantiles."""

from collections.abc import Iterable


class Samples(list[float]):
    """Seconds, in the order of measurement."""

    def __init__(self, values: Iterable[float] = ()) -> None:
        super().__init__(values)

    def quantile(self, fraction: float) -> float:
        """By linear interpolation between the sorted samples; fraction in 0..1.

        ValueError where nothing was measured.
        """
        if not self:
            raise ValueError("no samples")
        ordered = sorted(self)
        place = fraction * (len(ordered) - 1)
        below = int(place)
        above = min(below + 1, len(ordered) - 1)
        return ordered[below] + (ordered[above] - ordered[below]) * (place - below)

    @property
    def median(self) -> float:
        """The middle."""
        return self.quantile(0.5)
