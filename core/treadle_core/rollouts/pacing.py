"""Pace an asynchronous rollout: how many groups run at once, and which of them end too late to be
trained.

The rollout never stops. A trainer takes a batch of complete groups, trains it while the rollout
goes on, and publishes new weights. A group is of use while the weights are at most `bound` versions
newer than those that its first token was sampled with (RollArt §5.3). Two rules:

- The gate: a taken group keeps its place until the weights that it made are published. So at most
  `gate` batches of groups run, wait or are trained. Without it, groups that begin while a batch is
  trained are a version older than those that begin behind it, and more of them are dropped.
- Late samples: a sample is given up as soon as its rest, as predicted and shortened by `late_z`
  standard deviations, misses the last batch that its group's version allows. Another sample of the
  prompt takes its place where a typical one still ends in time. Else the group is dropped whole, so
  that its slots serve a group that can be trained, if a typical one can. A group that is dropped
  with seven of eight samples complete wastes all eight, so replacing one wastes less, and starves
  long samples less.

Times come with each call, in seconds of one clock. Measured: the interval of batches, of which the
newer half counts for half, and how long the last samples took.
"""

import math
from bisect import bisect_left, insort
from collections import deque
from dataclasses import dataclass

NEWER = 0.5  # weight of the newest measurement
TYPICAL = 0.6  # quantile of the seconds of samples that a typical one takes
SAMPLES_KEPT = 512  # whose seconds are remembered


@dataclass(frozen=True, slots=True)
class PaceRules:
    """Rules of an asynchronous rollout. gate: batches of groups that may be open or in training,
    None for no gate. late_z: standard deviations by which a predicted rest is shortened before its
    sample counts as late, infinite for never."""

    gate: float | None = None
    late_z: float = math.inf


class Pace:
    """Pace of one rollout: what has been taken and published, and how fast.

    version: of the newest published weights, from 0; batches taken so far are `version`, or one
    more while the trainer trains.
    """

    def __init__(self, rules: PaceRules, bound: int, batch_groups: int) -> None:
        self.rules = rules
        self.version = 0
        self.is_training = False
        self._bound = bound
        self._batch_groups = batch_groups
        self._took_s: float | None = None  # when the last batch was taken
        self._interval_s: float | None = None  # from one batch to the next
        self._samples_s: deque[float] = deque()  # of ended samples, oldest first
        self._sorted_s: list[float] = []

    def note_taken(self, now: float) -> None:
        """Note that the trainer has taken a batch."""
        self.is_training = True
        if self._took_s is not None:
            passed_s, before_s = now - self._took_s, self._interval_s
            self._interval_s = (
                passed_s if before_s is None else before_s + NEWER * (passed_s - before_s)
            )
        self._took_s = now

    def note_published(self) -> None:
        """Note that engines serve the weights that the last batch made."""
        self.is_training = False
        self.version += 1

    def note_sample(self, took_s: float) -> None:
        """Note how long a sample took from its begin to its end."""
        if len(self._samples_s) == SAMPLES_KEPT:
            oldest_s = self._samples_s.popleft()
            del self._sorted_s[bisect_left(self._sorted_s, oldest_s)]
        self._samples_s.append(took_s)
        insort(self._sorted_s, took_s)

    def room(self, open_groups: int) -> int:
        """Return how many more groups may begin; `open_groups` have begun, are not dropped and not
        taken. A large number without a gate."""
        if self.rules.gate is None:
            return 1 << 30
        held = open_groups + (self._batch_groups if self.is_training else 0)
        return max(0, round(self.rules.gate * self._batch_groups) - held)

    def last_take_s(self, version: int, now: float) -> float:
        """Return when the last batch is taken that a group of this version may be in; infinite
        while nothing is measured, -infinite where it was taken already."""
        taken = self.version + self.is_training
        left = version + self._bound - taken  # batches behind the next one
        if left < 0:
            return -math.inf
        if self._interval_s is None or self._took_s is None:
            return math.inf
        # A trainer that has waited for longer than that is slower than it was. Without this, groups
        # that a fast start makes look late were dropped for ever.
        interval_s = max(self._interval_s, now - self._took_s)
        return self._took_s + (left + 1) * interval_s

    def is_late(self, version: int, rest_s: float, log_sigma: float, now: float) -> bool:
        """Return whether a sample misses the last batch of its group, which began with `version`.

        rest_s: median of the predicted seconds that it still takes; log_sigma: standard deviation
        of its logarithm."""
        if math.isinf(self.rules.late_z):
            return False
        return now + rest_s * math.exp(-self.rules.late_z * log_sigma) > self.last_take_s(
            version, now
        )

    def can_replace(self, version: int, now: float) -> bool:
        """Return whether a typical sample that begins now ends before the last batch of a group of
        this version is taken; False before any sample has ended."""
        if not self._sorted_s:
            return False
        typical_s = self._sorted_s[int(TYPICAL * (len(self._sorted_s) - 1))]
        return now + typical_s <= self.last_take_s(version, now)
