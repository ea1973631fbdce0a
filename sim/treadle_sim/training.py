"""Train asynchronously on a simulated rollout: a trainer that takes batches of groups, trains them
while the rollout goes on, and publishes weights.

The buffer is the rollout service's (`treadle_core.rollouts.buffer`). Where the plan is paced, the
service's own `Admission` decides when groups begin and when a batch is given. A group begins whole.
It is dropped, running or complete, once the weights are more than `bound` versions newer than those
that its first prefill was made with, and another prompt begins in its place. Samples that would end
too late are given up before (`Pace`).
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

import numpy as np
from treadle_core.rollouts.buffer import Event, SampleBuffer
from treadle_core.rollouts.group import DropReason, Sample, is_stale
from treadle_core.rollouts.pacing import Admission, Pace
from treadle_core.rollouts.spec import RolloutSpec

from treadle_sim.outcome import Progress
from treadle_sim.workloads.workload import Workload


class Counted(Enum):
    """A new group begins while others leave it room: groups count that are not complete, or samples
    that are not."""

    GROUPS = "groups"
    SAMPLES = "samples"


@dataclass(frozen=True, slots=True)
class TrainingPlan:
    """Plan of an asynchronous training. batch_groups: of a batch. train_s: of its training.
    in_flight: samples that may run or wait at engines. bound: see above. batches: that are counted,
    after `warm_up` others. pause_s: engines stop for new weights. counted: against in_flight; in a
    paced plan always samples. late_z: see `Pace`. spares: the last samples of each prompt, which
    begin in the place of samples that are given up."""

    batch_groups: int
    train_s: float
    in_flight: int
    bound: int
    batches: int
    warm_up: int = 4
    pause_s: float = 2.0
    counted: Counted = Counted.GROUPS
    spares: int = 0
    paced: bool = False
    late_z: float = math.inf


@dataclass(frozen=True, slots=True)
class Trained:
    """Result of a training, over the counted batches. samples_h: trained samples an hour.
    neutral_h: trained tokens an hour over the workload's mean length, so that dropping long samples
    gains nothing. dropped_share: of tokens, in groups that were dropped. staleness: versions that a
    trained group was behind, on average. bias: mean length of trained samples over the workload's,
    less 1. step_s: from one batch to the next. drops: groups by reason. replaced: samples."""

    samples_h: float
    neutral_h: float
    dropped_share: float
    staleness: float
    bias: float
    step_s: float
    drops: dict[str, int]
    replaced: int


class Clients(Protocol):
    """A training calls these methods of the rollout, which stand for its clients and engines."""

    @property
    def now(self) -> float:
        """Return the time in seconds."""

    def after(self, delay_s: float, call: Callable[..., object], *arguments: object) -> None:
        """Make a call later."""

    def begin(self, progress: Progress) -> None:
        """Open a trajectory and ask for its first step."""

    def abandon(self, progress: Progress) -> None:
        """Close a trajectory that has not ended."""

    def rest(self, progress: Progress) -> tuple[float, float]:
        """Return the median seconds that a trajectory still takes, and the standard deviation of
        their logarithm."""

    def update_weights(self, pause_s: float) -> None:
        """Give all engines new weights."""


@dataclass
class _Group:
    """A group that has begun. spares: samples that have not. version: of the weights of its first
    prefill, None before it."""

    prompt_id: str
    members: list[Progress]
    spares: list[Progress]
    left: int = field(init=False)
    version: int | None = None

    def __post_init__(self) -> None:
        self.left = len(self.members)


class Training:
    """Play of a plan on a workload, whose groups begin in their order."""

    def __init__(
        self, plan: TrainingPlan, workload: Workload, every: Sequence[Progress], clients: Clients
    ) -> None:
        self._plan, self._clients = plan, clients
        members: dict[str, list[Progress]] = {}
        for progress in every:
            members.setdefault(progress.work.prompt_id, []).append(progress)
        whole = max(len(each) for each in members.values())
        self._size = whole - plan.spares
        self._groups = [
            _Group(name, each[: self._size], each[self._size :]) for name, each in members.items()
        ]
        self._begun = 0  # of them
        self._began_s: dict[str, float] = {}
        self._mean_tokens = float(np.mean([work.gen_tokens for work in workload.trajectories]))
        self._open: dict[str, _Group] = {}  # running, or complete and not taken
        if any(len(each) != whole for each in members.values()):
            raise ValueError("groups of an asynchronous training must have equally many samples")
        spec = RolloutSpec(
            tuple(members),
            self._size,
            self._size,
            max_staleness=plan.bound,
            batch_groups=plan.batch_groups if plan.paced else None,
            samples_in_flight=plan.in_flight if plan.paced else None,
        )
        self._buffer = SampleBuffer(spec)
        self._admission = Admission(self._buffer, plan.late_z) if plan.paced else None
        self._pace = (
            self._admission.pace
            if self._admission is not None
            else Pace(plan.bound, plan.batch_groups, plan.late_z)
        )
        self._taken: list[tuple[float, list[_Group]]] = []
        self._behind: list[int] = []
        # groups: when, their tokens, why; and samples that were replaced: when, their tokens
        self._dropped: list[tuple[float, int, DropReason]] = []
        self._replaced: list[tuple[float, int]] = []
        self._running = 0  # samples that have begun and not ended
        self._is_waiting = False  # for the moment to look at a complete batch again

    @property
    def over(self) -> bool:
        """Return whether all batches were taken."""
        return len(self._taken) >= self._plan.warm_up + self._plan.batches

    def begin(self) -> None:
        """Begin the first groups."""
        self._happen(self._buffer.decide_version(self._pace.version))
        self._fill()

    def note_prefill(self, progress: Progress) -> None:
        """Note that an engine reads the prompt of a trajectory."""
        group = self._open.get(progress.work.prompt_id)
        if group is not None and group.version is None:
            group.version = self._pace.version

    def note_end(self, progress: Progress) -> None:
        """Take over a trajectory that has ended."""
        group = self._open[progress.work.prompt_id]
        self._running -= 1
        group.left -= 1
        now = self._clients.now
        self._pace.note_sample(now - self._began_s.pop(progress.trajectory_id))
        sample = Sample(
            progress.trajectory_id,
            group.prompt_id,
            progress.work.sample,
            oldest_version=group.version,
            length_tokens=progress.work.gen_tokens,
        )
        self._happen(self._buffer.decide_arrival(sample))
        self._take()
        self._fill()

    def note_prediction(self, progress: Progress) -> None:
        """Replace a trajectory, or drop its group, if it ends too late by its newest prediction."""
        group = self._open.get(progress.work.prompt_id)
        if group is not None:
            self._mend(group, [progress])
            self._fill()

    def result(self) -> Trained:
        """Return the result. Raises RuntimeError where the workload had too few groups."""
        if not self.over:
            raise RuntimeError(f"only {len(self._taken)} batches came together")
        began_s, ended_s = self._taken[self._plan.warm_up - 1][0], self._taken[-1][0]
        groups = [group for _, batch in self._taken[self._plan.warm_up :] for group in batch]
        lengths = [each.work.gen_tokens for group in groups for each in group.members]
        dropped = [each[1:] for each in self._dropped if began_s < each[0] <= ended_s]
        replaced = [tokens for at_s, tokens in self._replaced if began_s < at_s <= ended_s]
        lost = sum(tokens for tokens, _ in dropped) + sum(replaced)
        hours = (ended_s - began_s) / 3600.0
        reasons = [why.value for _, why in dropped]
        return Trained(
            samples_h=len(lengths) / hours,
            neutral_h=sum(lengths) / self._mean_tokens / hours,
            dropped_share=lost / (lost + sum(lengths)),
            staleness=float(np.mean(self._behind[self._plan.warm_up * self._plan.batch_groups :])),
            bias=float(np.mean(lengths)) / self._mean_tokens - 1.0,
            step_s=(ended_s - began_s) / self._plan.batches,
            drops={reason: reasons.count(reason) for reason in sorted(set(reasons))},
            replaced=len(replaced),
        )

    def _happen(self, event: Event | None) -> None:
        """Apply an event to the buffer, if there is one, and let the admission follow."""
        if event is not None:
            self._buffer.apply(event)
            if self._admission is not None:
                self._admission.note(event, self._clients.now)

    def _fill(self) -> None:
        """Begin as many groups as may run."""
        if self.over:
            return
        if self._admission is not None:
            self._happen(self._admission.decide_admission(self._clients.now))
        while self._begun < len(self._groups) and self._has_room():
            group = self._groups[self._begun]
            self._begun += 1
            self._open[group.prompt_id] = group
            self._running += len(group.members)
            for progress in group.members:
                self._begin(progress)

    def _has_room(self) -> bool:
        """Return whether the next group may begin."""
        if self._admission is not None:
            return self._begun < self._buffer.groups_admitted
        if self._plan.counted is Counted.SAMPLES:
            return self._running + self._size <= self._plan.in_flight
        running = sum(group.left > 0 for group in self._open.values())
        return (running + 1) * self._size <= self._plan.in_flight

    def _take(self) -> None:
        """Take a batch, if the trainer is free and enough groups are complete."""
        if self._pace.is_training or self.over or self._waits():
            return
        batch = self._buffer.decide_batch(
            f"b{len(self._taken)}", self._plan.batch_groups, wait=True
        )
        if batch is None or len(batch.groups) < self._plan.batch_groups:  # no more can come
            return
        self._happen(batch)
        groups = [self._open.pop(prompt_id) for prompt_id, _ in batch.groups]
        now = self._clients.now
        self._taken.append((now, groups))
        self._behind += [self._pace.version - (group.version or 0) for group in groups]
        if self._admission is None:
            self._pace.note_taken(len(groups), now)
        self._clients.after(self._plan.train_s, self._publish)
        self._drop_late()

    def _waits(self) -> bool:
        """Return whether a complete batch waits for groups; if so, look at it again later."""
        if self._admission is None:
            return False
        wait_s = self._admission.wait_s(self._clients.now)
        if wait_s and not self._is_waiting:
            self._is_waiting = True
            self._clients.after(wait_s, self._look_again)
        return wait_s > 0.0

    def _look_again(self) -> None:
        self._is_waiting = False
        self._take()
        self._fill()

    def _publish(self) -> None:
        """Publish the weights of the last batch, and drop what is too old for them."""
        version = self._pace.version + 1
        if self._admission is None:
            self._pace.note_published(version, self._clients.now)
        self._clients.update_weights(self._plan.pause_s)
        self._happen(self._buffer.decide_version(version))
        for group in list(self._open.values()):
            if is_stale(group.version, version, self._plan.bound):
                self._drop(group, DropReason.STALE)
        self._drop_late()
        self._take()
        self._fill()

    def _mend(self, group: _Group, members: Sequence[Progress]) -> None:
        """Give up samples that end too late: replace them, or drop the group."""
        version = self._pace.version if group.version is None else group.version
        now = self._clients.now
        late = [
            each
            for each in members
            if not each.is_closed and self._pace.is_late(version, *self._clients.rest(each), now)
        ]
        if not late:
            return
        if len(late) > len(group.spares) or not self._pace.can_replace(version, now):
            # Where a new group would be late too, it is no better than this one.
            if self._pace.can_replace(self._pace.version, now):
                self._drop(group, DropReason.LATE)
            return
        for each in late:
            self._clients.abandon(each)
            self._replaced.append((now, each.times.gen_tokens))
            group.members.remove(each)
            group.members.append(group.spares.pop(0))
            self._begin(group.members[-1])

    def _begin(self, progress: Progress) -> None:
        self._began_s[progress.trajectory_id] = self._clients.now
        self._clients.begin(progress)

    def _drop_late(self) -> None:
        for group in list(self._open.values()):
            self._mend(group, list(group.members))

    def _drop(self, group: _Group, reason: DropReason) -> None:
        del self._open[group.prompt_id]
        for progress in group.members:
            if not progress.is_closed:
                self._running -= 1
                self._clients.abandon(progress)
        self._happen(self._buffer.decide_drop(group.prompt_id, reason))
        tokens = sum(progress.times.gen_tokens for progress in group.members)
        self._dropped.append((self._clients.now, tokens, reason))
