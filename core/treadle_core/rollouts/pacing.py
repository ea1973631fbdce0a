"""Pace an asynchronous rollout: when a group begins, when a batch is given, and which samples end
too late to be trained.

The rollout never stops. A trainer takes a batch of complete groups, trains it while the rollout
goes on, and publishes new weights: each batch makes one version. A group can be trained while the
weights are at most `bound` versions newer than those that sampled its first token (RollArt §5.3).
After the last batch that it may be in, its work is lost. Three rules lose less work:

- Begin. Only so many groups are open as the next batches can still take. A group begins now if its
  work is as likely to be trained as the work of a group that begins with the next weights. The
  idle time until those weights counts against the second one.
- Wait. Some groups still run and can be in no later batch than the next one. If they have much of
  the work and are likely to end soon, the batch is given a little later, though it is complete.
  Slots that are idle meanwhile count against the wait. Once a second batch is complete, the trainer
  is the slower part, and nothing waits for groups.
- Late: a sample is given up as soon as its rest, as predicted and shortened by `late_z` standard
  deviations, misses the last batch that its group's version allows. Another sample of the prompt
  takes its place where a typical one still ends in time. Else the group is dropped whole, so that
  its slots serve a group that can be trained, if a typical one can. A group that is dropped with
  seven of eight samples complete wastes all eight, so replacing one wastes less, and starves long
  samples less.

The first two rules need no predictions. They measure the interval of batches (each new one counts
for half), the time of the last training, and how long groups take. Groups that were dropped before
they ended count too (the estimator of Kaplan and Meier). Times come with each call, in seconds of
one clock.
"""

import math
from bisect import bisect_left, bisect_right, insort
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from treadle_core.rollouts.buffer import (
    Admitted,
    Advanced,
    Arrived,
    Batch,
    Event,
    GroupDropped,
    SampleBuffer,
)
from treadle_core.rollouts.group import DropReason, Group

NEWER = 0.5  # weight of the newest measurement
TYPICAL = 0.6  # quantile of the seconds of samples that a typical one takes
SAMPLES_KEPT, GROUPS_KEPT = 512, 128  # whose seconds are remembered
LEAST_GROUPS = 8  # so many must have ended before their seconds are used
# An idle slot loses this share of its work, because the others decode faster meanwhile. On one
# simulated workload, 0.3 to 1 changed what the first rule trains by at most 5%.
IDLE = 0.5
# A batch waits for groups only if they have more than this share of the work, theirs and the
# batch's. Else the trainer's time is worth more.
STAKE = 0.2
MOST_BATCHES = 2  # that are complete before the trainer is what the rollout waits for
HORIZONS = (0.03, 0.06, 0.12, 0.25, 0.5)  # of a wait, in intervals of batches
LOOK_AGAIN = 0.02  # intervals until a batch that waits is looked at again


class Durations:
    """Distribution of the seconds that groups take. It knows the last groups that have ended, and
    those that were dropped before they ended."""

    def __init__(self) -> None:
        self._known: deque[tuple[float, bool]] = deque(maxlen=GROUPS_KEPT)
        self._ended = 0
        # Seconds after which known groups ended, ascending; None until they are computed again. By
        # how many of these have passed: the share of groups that have ended, and their work.
        self._at_s: list[float] | None = None
        self._shares, self._work_s = [0.0], [0.0]

    @property
    def is_known(self) -> bool:
        return self._ended >= LEAST_GROUPS

    def note(self, took_s: float, *, ended: bool) -> None:
        """Note a group that ran for so long, and then ended or was dropped."""
        self._known.append((took_s, ended))
        self._ended += ended
        self._at_s = None

    def lasting(self, after_s: float) -> float:
        """Return the share of groups that take longer."""
        ended = self._count(after_s)
        return 1.0 - self._shares[ended]

    def work_s(self, within_s: float) -> float:
        """Return the mean seconds of a group, where one that takes longer counts as 0."""
        ended = self._count(within_s)
        return self._work_s[ended]

    def _count(self, within_s: float) -> int:
        """Return how many of the known groups ended so soon; compute the distribution where it is
        not up to date."""
        if self._at_s is None:
            self._at_s, self._shares, self._work_s = [], [0.0], [0.0]
            left = len(self._known)
            # of equal ones those that ended come first
            for took_s, ended in sorted(self._known, key=lambda each: (each[0], not each[1])):
                if ended:
                    share = (1.0 - self._shares[-1]) / left
                    self._at_s.append(took_s)
                    self._shares.append(self._shares[-1] + share)
                    self._work_s.append(self._work_s[-1] + share * took_s)
                left -= 1
        return bisect_right(self._at_s, within_s)


class Pace:
    """Pace of one rollout: what has been taken and published, and how fast.

    version: of the newest published weights; while the trainer trains, the next one is being made.
    late_z: standard deviations by which a predicted rest is shortened before its sample counts as
    late; infinite for never.
    """

    def __init__(self, bound: int, batch_groups: int, late_z: float = math.inf) -> None:
        self._late_z = late_z
        self.version = 0
        self.is_training = False
        self._bound = bound
        self._batch_groups = batch_groups
        self._groups_taken = 0  # of the batch that is being taken
        self._took_s: float | None = None  # when the last batch was taken
        self._interval_s: float | None = None  # from one batch to the next
        self._train_s = 0.0  # from the last batch to its weights
        self._groups = Durations()
        self._samples_s: deque[float] = deque()  # of ended samples, oldest first
        self._sorted_s: list[float] = []

    def note_taken(self, groups: int, now: float) -> None:
        """Note that the trainer has taken groups. It trains once it has a batch, which it may take
        in parts."""
        self._groups_taken += groups
        if self.is_training or self._groups_taken < self._batch_groups:
            return
        self.is_training = True
        if self._took_s is not None:
            passed_s, before_s = now - self._took_s, self._interval_s
            self._interval_s = (
                passed_s if before_s is None else before_s + NEWER * (passed_s - before_s)
            )
        self._took_s = now

    def note_published(self, version: int, now: float) -> None:
        """Note that engines serve newer weights, which the last batch has made."""
        if self.is_training and self._took_s is not None:
            self._train_s = now - self._took_s
        self.is_training = False
        self._groups_taken = 0
        self.version = version

    def note_sample(self, took_s: float) -> None:
        """Note how long a sample took from its begin to its end."""
        if len(self._samples_s) == SAMPLES_KEPT:
            oldest_s = self._samples_s.popleft()
            del self._sorted_s[bisect_left(self._sorted_s, oldest_s)]
        self._samples_s.append(took_s)
        insort(self._sorted_s, took_s)

    def note_group(self, took_s: float, *, ended: bool) -> None:
        """Note how long a group ran from its first token until all of it ended, or until it was
        dropped."""
        self._groups.note(took_s, ended=ended)

    def may_begin(self, open_groups: int, now: float) -> bool:
        """Return whether another group may begin; `open_groups` have begun, are neither taken nor
        dropped, and are not lost."""
        if not self.is_training and open_groups < self._batch_groups:
            return True  # whatever comes of it, the trainer needs a batch
        if open_groups >= (self._bound + 1 - self.is_training) * self._batch_groups:
            return False
        if self._took_s is None or self._interval_s is None or not self._groups.is_known:
            return True
        interval_s = max(self._interval_s, now - self._took_s)
        publish_s = self._took_s + self._train_s + (0.0 if self.is_training else interval_s)
        idle_s = max(0.0, publish_s - now)
        left_s = self.last_take_s(self.version, now) - now
        return self._worth(left_s) >= self._worth(left_s + interval_s - idle_s, idle_s)

    def is_last_batch(self, version: int) -> bool:
        """Return whether groups of this version can be in no later batch than the next one."""
        return version + self._bound <= self.version + self.is_training

    def is_lost(self, version: float) -> bool:
        """Return whether groups of this version can be in no batch any more."""
        return version + self._bound < self.version + self.is_training

    def wait_s(
        self, began_s: Sequence[float], complete_groups: int, idle_groups: float, now: float
    ) -> float:
        """Return 0 where a complete batch should be given now, else the seconds after which to ask
        again.

        began_s: when each running group began that can be in no later batch. complete_groups:
        how many could be taken. idle_groups: how many more groups the idle slots could run."""
        if (
            self._interval_s is None
            or not self._groups.is_known
            or not self._batch_groups <= complete_groups < MOST_BATCHES * self._batch_groups
        ):
            return 0.0
        at_stake_s = sum(now - each for each in began_s)
        batch_s = self._groups.work_s(math.inf) * self._batch_groups
        if at_stake_s <= STAKE * (at_stake_s + batch_s):
            return 0.0
        for share in HORIZONS:
            wait_s = share * self._interval_s
            gain_s = sum(self._gain_s(now - each, wait_s) for each in began_s)
            if gain_s > IDLE * idle_groups * wait_s:
                return LOOK_AGAIN * self._interval_s
        return 0.0

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
        if math.isinf(self._late_z):
            return False
        return now + rest_s * math.exp(-self._late_z * log_sigma) > self.last_take_s(version, now)

    def can_replace(self, version: int, now: float) -> bool:
        """Return whether a typical sample that begins now ends before the last batch of a group of
        this version is taken; False before any sample has ended."""
        if not self._sorted_s:
            return False
        typical_s = self._sorted_s[int(TYPICAL * (len(self._sorted_s) - 1))]
        return now + typical_s <= self.last_take_s(version, now)

    def _worth(self, left_s: float, idle_s: float = 0.0) -> float:
        """Return the share of a group's work that is trained, where the group is given up after
        `left_s` and its slots were idle before."""
        useful_s = self._groups.work_s(left_s)
        lost_s = max(left_s, 0.0) * self._groups.lasting(left_s) + IDLE * idle_s
        return useful_s / (useful_s + lost_s) if useful_s else 0.0

    def _gain_s(self, ran_s: float, wait_s: float) -> float:
        """Return the work that a wait saves of a group that ran for so long, over all outcomes."""
        lasting = self._groups.lasting(ran_s)
        if lasting <= 0.0:
            return 0.0
        return ran_s * (lasting - self._groups.lasting(ran_s + wait_s)) / lasting


@dataclass(frozen=True, slots=True)
class _Begun:
    at_s: float
    version: int


class Admission:
    """Admission of the groups of one rollout whose spec has `batch_groups`. It decides how many
    groups may have begun, which are dropped, and how long a complete batch waits.

    `note` follows the events of the buffer with their times, so a stored list of events rebuilds
    this too. `decide_*` changes nothing and returns the event that should be next, as the buffer's
    do. A group runs from its admission until it settles, and counts as begun with the newest
    weights of its admission. (If its samples wait for a slot, its first token has newer ones.) If
    samples of a group grew too old, so that too few are left, the whole group is dropped: its other
    samples are about as old. With `replace_stale` the group stays, and the sample is run again.
    """

    def __init__(self, buffer: SampleBuffer, late_z: float = math.inf) -> None:
        spec = buffer.spec
        if spec.batch_groups is None or spec.max_staleness is None:
            raise ValueError("a rollout keeps a pace by batch_groups and max_staleness")
        self.pace = Pace(spec.max_staleness, spec.batch_groups, late_z)
        self._buffer, self._spec = buffer, spec
        self._groups = list(buffer.groups.values())
        self._knows_version = False
        self._admitted = 0
        self._open: dict[str, Group] = {}  # admitted, and not gone when last looked at
        self._running: dict[str, _Begun] = {}
        self._aged: set[str] = set()  # prompts of which a sample grew too old

    def note(self, event: Event, at_s: float) -> None:
        """Take over an event that the buffer has applied at `at_s`."""
        match event:
            case Admitted():
                for group in self._groups[self._admitted : event.groups]:
                    self._open[group.prompt_id] = group
                    if not group.settled:
                        self._running[group.prompt_id] = _Begun(at_s, self.pace.version)
                self._admitted = max(self._admitted, event.groups)
            case Advanced():
                self._note_version(event, at_s)
            case Batch():
                self.pace.note_taken(len(event.groups), at_s)
            case Arrived():
                if event.verdict.drop_reason is DropReason.STALE:
                    self._aged.add(event.sample.prompt_id)
                self._note_settled(event.sample.prompt_id, at_s, ended=True)
            case GroupDropped():
                self._note_settled(event.prompt_id, at_s, ended=False)

    def decide_drop(self) -> GroupDropped | None:
        """Return a group that has too few samples left because some grew too old."""
        if self._spec.replace_stale:
            return None
        for prompt_id in self._aged & self._open.keys():
            group = self._buffer.groups[prompt_id]
            left = 0 if group.settled else group.started - group.received
            if len(group.kept) + left < self._spec.keep_per_prompt:
                dropped = self._buffer.decide_drop(prompt_id, DropReason.STALE)
                if dropped is not None:
                    return dropped
        return None

    def decide_admission(self, now: float, *, trainer_waits: bool = False) -> Admitted | None:
        """Return how many groups may have begun, where it is more than before. trainer_waits: for
        a batch, though it may still train one, or name no newer weights after it."""
        if self._buffer.over:
            return None
        self._open = {name: group for name, group in self._open.items() if not group.gone}
        spec, admitted, batch_groups = self._spec, self._admitted, self._spec.batch_groups or 0
        of_use = sum(not self._is_lost(group) for group in self._open.values())
        open_groups, running = len(self._open), self._running_samples()
        while admitted < len(self._groups):
            samples = spec.samples_of(admitted)
            full = spec.samples_in_flight and running + samples > spec.samples_in_flight
            if (running and full) or open_groups == spec.max_open_groups:
                break
            needed = trainer_waits and open_groups < batch_groups
            if not needed and not self.pace.may_begin(of_use, now):
                break
            admitted, running = admitted + 1, running + samples
            open_groups, of_use = open_groups + 1, of_use + 1
        return Admitted(admitted) if admitted > self._admitted else None

    def wait_s(self, now: float) -> float:
        """Return 0 where a complete batch should be given now, else the seconds after which to ask
        again."""
        last_s = [
            begun.at_s
            for begun in self._running.values()
            if self.pace.is_last_batch(begun.version) and not self.pace.is_lost(begun.version)
        ]
        complete = sum(group.ready for group in self._open.values())
        idle = max(0, (self._spec.samples_in_flight or 0) - self._running_samples())
        return self.pace.wait_s(last_s, complete, idle / self._spec.samples_per_prompt, now)

    def _note_version(self, event: Advanced, at_s: float) -> None:
        if not self._knows_version:  # groups before it began with these weights, as far as known
            self._knows_version = True
            self._running = {
                name: _Begun(begun.at_s, event.version) for name, begun in self._running.items()
            }
        self.pace.note_published(event.version, at_s)
        for trajectory_id in event.stale:
            group = self._buffer.groups[self._buffer.samples[trajectory_id].prompt_id]
            self._aged.add(group.prompt_id)
            if not group.settled and group.prompt_id not in self._running:  # it has opened again
                self._running[group.prompt_id] = _Begun(at_s, event.version)

    def _note_settled(self, prompt_id: str, at_s: float, *, ended: bool) -> None:
        if self._buffer.groups[prompt_id].settled and prompt_id in self._running:
            self.pace.note_group(at_s - self._running.pop(prompt_id).at_s, ended=ended)

    def _is_lost(self, group: Group) -> bool:
        begun = self._running.get(group.prompt_id)
        version = group.age[0] if begun is None else begun.version
        return self.pace.is_lost(version)

    def _running_samples(self) -> int:
        groups = (self._buffer.groups[name] for name in self._running)
        return sum(group.started - group.received for group in groups)
