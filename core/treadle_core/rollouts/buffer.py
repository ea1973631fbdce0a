"""The sample buffer of one rollout: groups on their way from submission to training (RollArt's SampleBuffer).

Decide and apply are apart: `decide_*` is policy, changes nothing and returns what would happen; `apply` folds what
did happen, so that a stored list of events rebuilds the buffer even after the policy has changed. Invariants: each
kept trajectory leaves exactly once, taken or dropped; a group leaves whole; a batch id names one batch for ever;
`revision` is the number of events applied. Owner: one caller at a time.
"""

from collections import Counter
from dataclasses import dataclass, replace
from enum import Enum

from treadle_core.rollouts.groups import DropReason, Group, RolloutSpec, Sample, Verdict, is_stale

NO_VERSION = float("inf")  # ranks groups without a weight version behind those that can grow stale


class RolloutState(Enum):
    """Where a rollout stands; the last two are final."""

    RUNNING = "running"
    FINISHED = "finished"
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True)
class Arrived:
    """A sample came in and got its verdict."""

    sample: Sample
    verdict: Verdict


@dataclass(frozen=True, slots=True)
class Advanced:
    """The trainer reached a newer weight version; some kept trajectories are too old for it."""

    version: int
    stale: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Batch:
    """Whole groups that went out under one id: (prompt, trajectories in order of arrival)."""

    batch_id: str
    groups: tuple[tuple[str, tuple[str, ...]], ...]
    exhausted: bool  # the rollout is over and nothing is left behind this batch


@dataclass(frozen=True, slots=True)
class Cancelled:
    """The rollout was cancelled; trajectories kept in groups that had not settled are dropped."""

    dropped: tuple[str, ...]


Event = Arrived | Advanced | Batch | Cancelled


class GroupTooLargeError(Exception):
    """A group does not fit into one batch."""

    def __init__(self, prompt_id: str, group_bytes: int, limit_bytes: int) -> None:
        super().__init__(f"the group of prompt {prompt_id} has {group_bytes} bytes, a batch may have {limit_bytes}")
        self.prompt_id = prompt_id
        self.group_bytes = group_bytes
        self.limit_bytes = limit_bytes


class SampleBuffer:
    """State of one rollout. Read its attributes freely; only `apply` changes them."""

    def __init__(self, spec: RolloutSpec) -> None:
        self.spec = spec
        self.groups = {prompt_id: Group(prompt_id) for prompt_id in spec.prompt_ids}
        self.samples: dict[str, Sample] = {}  # every sample that came in, by trajectory
        self.batches: dict[str, Batch] = {}
        self.drops: Counter[DropReason] = Counter()
        self.newest_version: int | None = None
        self.cancelled = False
        self.revision = 0
        self.taken_total = 0
        self.settled_total = 0
        self._buffered = 0

    @property
    def state(self) -> RolloutState:
        """Running until every group has settled or somebody cancelled."""
        if self.cancelled:
            return RolloutState.CANCELLED
        return RolloutState.FINISHED if self.settled_total == len(self.groups) else RolloutState.RUNNING

    @property
    def over(self) -> bool:
        """Whether no further sample will be kept."""
        return self.state is not RolloutState.RUNNING

    @property
    def buffered(self) -> int:
        """Trajectories kept and not yet taken."""
        return self._buffered

    @property
    def kept_fraction(self) -> float:
        """Trajectories taken or still waiting, of all that came in.

        1.0 before the first. A standing metric of wasted work.
        """
        return (self.taken_total + self._buffered) / len(self.samples) if self.samples else 1.0

    def decide_arrival(self, sample: Sample) -> Arrived:
        """Verdict for a sample (a known trajectory gets its first one again).

        Raises KeyError for a foreign prompt, SampleTakenError.
        """
        group = self.groups[sample.prompt_id]
        return Arrived(sample, group.judge(sample, self.spec, self.newest_version, self.cancelled))

    def decide_version(self, version: int) -> Advanced | None:
        """What a trainer at `version` makes stale (in groups not yet taken); None where that is no news."""
        if self.newest_version is not None and version <= self.newest_version:
            return None
        bound = self.spec.max_staleness
        stale = [
            sample.trajectory_id
            for group in self.groups.values()
            if not group.taken
            for sample in group.kept
            if is_stale(sample.oldest_version, version, bound)
        ]
        return Advanced(version, tuple(stale))

    def decide_batch(self, batch_id: str, max_groups: int, wait: bool, max_bytes: int) -> Batch | None:
        """Whole groups for training, those with the oldest tokens first, equal ones as they settled.

        None where the caller should wait: fewer than `max_groups` are ready, `wait` is set and more can come. A batch
        is also full at `max_bytes`. Raises GroupTooLargeError where the oldest group alone is larger. A known id
        gives its batch again.
        """
        first = self.batches.get(batch_id)
        if first is not None:
            return first
        ready = sorted((group for group in self.groups.values() if group.ready), key=_oldest_first)
        chosen: list[Group] = []
        room = max_bytes
        for group in ready[:max_groups]:
            if group.payload_bytes > room:
                break
            room -= group.payload_bytes
            chosen.append(group)
        if ready and not chosen:
            raise GroupTooLargeError(ready[0].prompt_id, ready[0].payload_bytes, max_bytes)
        full = len(chosen) == max_groups or len(chosen) < len(ready)
        if wait and not full and not self.over:
            return None
        groups = tuple((g.prompt_id, tuple(s.trajectory_id for s in g.kept)) for g in chosen)
        return Batch(batch_id, groups, exhausted=self.over and len(chosen) == len(ready))

    def decide_cancel(self) -> Cancelled | None:
        """Cancelling drops what had not settled and leaves settled groups to be taken.

        None where the rollout is over already.
        """
        if self.over:
            return None
        dropped = (s.trajectory_id for group in self.groups.values() if not group.settled for s in group.kept)
        return Cancelled(tuple(dropped))

    def apply(self, event: Event) -> None:
        """Fold one event.

        Events come in the order in which they were decided, each decided on the state it is applied to.
        """
        match event:
            case Arrived():
                self._apply_arrival(event)
            case Advanced():
                self.newest_version = event.version
                self._drop(event.stale, DropReason.STALE)
            case Batch():
                self._apply_batch(event)
            case Cancelled():
                self.cancelled = True
                self._drop(event.dropped, DropReason.CANCELLED)
        self.revision += 1

    def _apply_arrival(self, event: Arrived) -> None:
        sample, verdict = event.sample, event.verdict
        before = self.groups[sample.prompt_id]
        after = before.with_sample(sample, verdict, settled_order=self.settled_total)
        self.groups[sample.prompt_id] = after
        self.samples[sample.trajectory_id] = sample
        self.settled_total += after.settled and not before.settled
        if verdict.drop_reason is None:
            self._buffered += 1
        else:
            self.drops[verdict.drop_reason] += 1

    def _apply_batch(self, batch: Batch) -> None:
        self.batches[batch.batch_id] = batch
        for prompt_id, trajectory_ids in batch.groups:
            self.groups[prompt_id] = replace(self.groups[prompt_id], taken=True)
            self.taken_total += len(trajectory_ids)
            self._buffered -= len(trajectory_ids)

    def _drop(self, trajectory_ids: tuple[str, ...], reason: DropReason) -> None:
        if not trajectory_ids:
            return
        gone = frozenset(trajectory_ids)
        for prompt_id in {self.samples[trajectory_id].prompt_id for trajectory_id in trajectory_ids}:
            self.groups[prompt_id] = self.groups[prompt_id].without(gone)
        self.drops[reason] += len(gone)
        self._buffered -= len(gone)


def _oldest_first(group: Group) -> tuple[float, int]:
    version = group.oldest_version
    order = group.settled_order
    return (NO_VERSION if version is None else float(version), order if order is not None else 0)
