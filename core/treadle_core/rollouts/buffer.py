"""The sample buffer of one rollout: groups on their way from submission to training (RollArt's SampleBuffer).

A prompt is sampled `samples_per_prompt` times. Its group settles once `keep_per_prompt` samples are kept (first-K:
RollArt's redundant environment rollouts, DARTS' early stopping) or all samples are in, however many of them failed. A
settled group stays settled; a trajectory keeps its first verdict; a sample that would be dropped now would be dropped
at any later time, so a caller may act on an early look at the verdict.

`decide_*` changes nothing and returns what would happen; `apply` folds what did happen, so that a stored list of events
rebuilds the buffer even after the policy has changed. A kept trajectory leaves exactly once, taken or dropped; a group
leaves whole; a batch id always names the same batch; `revision` is the number of events applied.
"""

from collections import Counter
from dataclasses import dataclass, field
from enum import Enum
from math import inf

NO_VERSION = inf  # ranks groups without a weight version behind those that can grow stale


class DropReason(Enum):
    """Why a trajectory is not trained on. The values are stored: do not rename them."""

    GROUP_SETTLED = "group_settled"
    STALE = "stale"
    FAILED = "failed"
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True)
class RolloutSpec:
    """What one rollout asks for. `max_staleness` and `max_total_tokens` are None where there is no bound."""

    prompt_ids: tuple[str, ...]
    samples_per_prompt: int
    keep_per_prompt: int  # K, 1..samples_per_prompt
    max_staleness: int | None = None  # weight versions
    max_total_tokens: int | None = None  # sampled tokens of one trajectory

    def __post_init__(self) -> None:
        """Raise ValueError for a spec no group could satisfy."""
        if not self.prompt_ids or len(set(self.prompt_ids)) != len(self.prompt_ids):
            raise ValueError("prompt_ids must be at least one, and distinct")
        if not 1 <= self.keep_per_prompt <= self.samples_per_prompt:
            raise ValueError("keep_per_prompt must be 1..samples_per_prompt")
        if self.max_staleness is not None and self.max_staleness < 0:
            raise ValueError("max_staleness must be >= 0, or None for no bound")
        if self.max_total_tokens is not None and self.max_total_tokens < 1:
            raise ValueError("max_total_tokens must be >= 1, or None for no cap")


@dataclass(frozen=True, slots=True)
class Sample:
    """A trajectory that was submitted, without its tokens."""

    trajectory_id: str
    prompt_id: str
    sample: int  # 0..samples_per_prompt - 1
    failed: bool = False
    oldest_version: int | None = None  # weight version of its oldest sampled token; None where no bound asks for it
    payload_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Verdict:
    """What happened to a sample when it was submitted. `drop_reason` is None where it was kept."""

    drop_reason: DropReason | None
    group_settled: bool  # then its running siblings are no longer wanted

    @property
    def kept(self) -> bool:
        """Whether the sample waits for training."""
        return self.drop_reason is None


class SampleTakenError(Exception):
    """This sample of the prompt was submitted before, by another trajectory."""

    def __init__(self, prompt_id: str, sample: int, trajectory_id: str) -> None:
        super().__init__(f"sample {sample} of prompt {prompt_id} was handed in by trajectory {trajectory_id}")
        self.prompt_id = prompt_id
        self.trajectory_id = trajectory_id


def is_stale(oldest_version: int | None, newest_version: int | None, bound: int | None) -> bool:
    """Whether the oldest sampled token is over `bound` versions behind the newest (RollArt's asynchronous bound)."""
    if oldest_version is None or newest_version is None or bound is None:
        return False
    return newest_version - oldest_version > bound


@dataclass
class Group:
    """The samples of one prompt. `kept`: those that wait to be taken, or were, in order of arrival; `verdicts`: by
    trajectory; `owners`: the trajectory of each sample index; `settled_order`: rank among the settled groups;
    `revision`: that of the buffer when a sample last came or was dropped."""

    prompt_id: str
    kept: list[Sample] = field(default_factory=list)
    verdicts: dict[str, Verdict] = field(default_factory=dict)
    owners: dict[int, str] = field(default_factory=dict)
    settled_order: int | None = None
    taken: bool = False
    revision: int = 0

    @property
    def received(self) -> int:
        """The number of samples submitted."""
        return len(self.verdicts)

    @property
    def settled(self) -> bool:
        return self.settled_order is not None

    @property
    def ready(self) -> bool:
        return self.settled and not self.taken and bool(self.kept)

    @property
    def payload_bytes(self) -> int:
        return sum(sample.payload_bytes for sample in self.kept)

    @property
    def age(self) -> tuple[float, int]:
        """What groups leave by, the least first: the version of the oldest token, then the order of settling."""
        versions = (s.oldest_version for s in self.kept if s.oldest_version is not None)
        return min(versions, default=NO_VERSION), self.settled_order or 0


class RolloutState(Enum):
    """The last two are final."""

    RUNNING = "running"
    FINISHED = "finished"
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True)
class Arrived:
    """A sample was submitted and got its verdict."""

    sample: Sample
    verdict: Verdict


@dataclass(frozen=True, slots=True)
class Advanced:
    """The trainer reached a newer weight version; some kept trajectories are too old for it."""

    version: int
    stale: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Batch:
    """Whole groups that leave under one id: (prompt, trajectories in order of arrival)."""

    batch_id: str
    groups: tuple[tuple[str, tuple[str, ...]], ...]
    exhausted: bool  # the rollout is over and nothing is left behind this batch

    @property
    def members(self) -> list[str]:
        """Its trajectories."""
        return [trajectory_id for _, trajectory_ids in self.groups for trajectory_id in trajectory_ids]


@dataclass(frozen=True, slots=True)
class Cancelled:
    """The rollout was cancelled; trajectories kept in groups that had not settled are dropped."""

    dropped: tuple[str, ...]


Event = Arrived | Advanced | Batch | Cancelled


class GroupTooLargeError(Exception):
    """A group does not fit into a batch of limited size."""

    def __init__(self, prompt_id: str, group_bytes: int, limit_bytes: float) -> None:
        super().__init__(f"the group of prompt {prompt_id} has {group_bytes} bytes, a batch may have {limit_bytes}")
        self.prompt_id = prompt_id


class SampleBuffer:
    """State of one rollout, its groups included. Only `apply` changes it."""

    def __init__(self, spec: RolloutSpec) -> None:
        self.spec = spec
        self.groups = {prompt_id: Group(prompt_id) for prompt_id in spec.prompt_ids}
        self.samples: dict[str, Sample] = {}  # every sample submitted, by trajectory
        self.batches: dict[str, Batch] = {}
        self.drops: Counter[DropReason] = Counter()
        self.newest_version: int | None = None
        self.cancelled = False
        self.revision = 0
        self.taken_total = 0
        self.settled_total = 0

    @property
    def state(self) -> RolloutState:
        if self.cancelled:
            return RolloutState.CANCELLED
        return RolloutState.FINISHED if self.settled_total == len(self.groups) else RolloutState.RUNNING

    @property
    def over(self) -> bool:
        return self.state is not RolloutState.RUNNING

    @property
    def buffered(self) -> int:
        """The number of trajectories kept and not yet taken."""
        return sum(len(group.kept) for group in self.groups.values() if not group.taken)

    def decide_arrival(self, sample: Sample) -> Arrived:
        """The verdict for a sample; for a known trajectory its first one. Raises KeyError for an unknown prompt,
        SampleTakenError."""
        group = self.groups[sample.prompt_id]
        first = group.verdicts.get(sample.trajectory_id)
        if first is not None:
            return Arrived(sample, first)
        owner = group.owners.get(sample.sample)
        if owner is not None:
            raise SampleTakenError(sample.prompt_id, sample.sample, owner)
        reason = self._drop_reason(sample, group)
        enough = reason is None and len(group.kept) + 1 >= self.spec.keep_per_prompt
        everything_in = group.received + 1 >= self.spec.samples_per_prompt
        return Arrived(sample, Verdict(reason, group.settled or self.cancelled or enough or everything_in))

    def _drop_reason(self, sample: Sample, group: Group) -> DropReason | None:
        if self.cancelled:
            return DropReason.CANCELLED
        if sample.failed:
            return DropReason.FAILED
        if group.settled:
            return DropReason.GROUP_SETTLED
        stale = is_stale(sample.oldest_version, self.newest_version, self.spec.max_staleness)
        return DropReason.STALE if stale else None

    def decide_version(self, version: int) -> Advanced | None:
        """What a trainer at `version` makes stale in groups not yet taken; None for a version that is not newer."""
        if self.newest_version is not None and version <= self.newest_version:
            return None
        stale = (
            sample.trajectory_id
            for group in self.groups.values()
            if not group.taken
            for sample in group.kept
            if is_stale(sample.oldest_version, version, self.spec.max_staleness)
        )
        return Advanced(version, tuple(stale))

    def bytes_of(self, batch: Batch) -> int:
        """The size of a batch's trajectories."""
        return sum(self.samples[trajectory_id].payload_bytes for trajectory_id in batch.members)

    def decide_batch(self, batch_id: str, max_groups: int, wait: bool, max_bytes: float = inf) -> Batch | None:
        """Whole groups for training, oldest tokens first, then as they settled; a known id gives its batch again.

        None where the caller should wait: fewer than `max_groups` are ready, `wait` is set and more can come. A batch
        is also full at `max_bytes`. Raises GroupTooLargeError where the oldest group alone is larger.
        """
        first = self.batches.get(batch_id)
        if first is not None:
            return first
        ready = sorted((group for group in self.groups.values() if group.ready), key=lambda group: group.age)
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
        """What cancelling drops: kept samples of groups that have not settled; None where the rollout is over."""
        if self.over:
            return None
        dropped = (s.trajectory_id for group in self.groups.values() if not group.settled for s in group.kept)
        return Cancelled(tuple(dropped))

    def apply(self, event: Event) -> None:
        """Apply an event that was decided on the present state."""
        self.revision += 1
        match event:
            case Arrived():
                self._apply_arrival(event)
            case Advanced():
                self.newest_version = event.version
                self._drop(event.stale, DropReason.STALE)
            case Batch():
                self.batches[event.batch_id] = event
                for prompt_id, trajectory_ids in event.groups:
                    self.groups[prompt_id].taken = True
                    self.taken_total += len(trajectory_ids)
            case Cancelled():
                self.cancelled = True
                self._drop(event.dropped, DropReason.CANCELLED)

    def _apply_arrival(self, event: Arrived) -> None:
        sample, verdict = event.sample, event.verdict
        group = self.groups[sample.prompt_id]
        group.revision = self.revision
        self.samples[sample.trajectory_id] = sample
        group.verdicts[sample.trajectory_id] = verdict
        group.owners[sample.sample] = sample.trajectory_id
        if verdict.drop_reason is None:
            group.kept.append(sample)
        else:
            self.drops[verdict.drop_reason] += 1
        if verdict.group_settled and not group.settled:
            group.settled_order = self.settled_total
            self.settled_total += 1

    def _drop(self, trajectory_ids: tuple[str, ...], reason: DropReason) -> None:
        for trajectory_id in trajectory_ids:
            sample = self.samples[trajectory_id]
            group = self.groups[sample.prompt_id]
            group.kept.remove(sample)
            group.revision = self.revision
            self.drops[reason] += 1
