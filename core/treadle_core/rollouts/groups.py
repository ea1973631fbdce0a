"""Groups of samples of one prompt: which of them are kept, and when a group has enough.

A prompt is sampled `samples_per_prompt` times and settles once `keep_per_prompt` of them are in (first-K: RollArt's
redundant environment rollouts, DARTS' proactive early stopping), or once every sample is in, however many of those
failed. Invariants: a settled group never becomes unsettled; a trajectory has one verdict for ever; a sample that
would be dropped now would be dropped at any later time, so a caller may act on an early look at the verdict. Values
only: nothing here is changed in place.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum


class DropReason(Enum):
    """Why a trajectory is not for training. The values are stored: do not rename them."""

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
    """A trajectory that came in, without its tokens."""

    trajectory_id: str
    prompt_id: str
    sample: int  # 0..samples_per_prompt - 1
    failed: bool = False
    oldest_version: int | None = None  # weight version of its oldest sampled token; None where no bound asks for it
    payload_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Verdict:
    """What became of a sample when it came in. `drop_reason` is None exactly where it was kept."""

    drop_reason: DropReason | None
    group_settled: bool  # after it: its siblings still running are no longer wanted

    @property
    def kept(self) -> bool:
        """Whether the sample waits for training."""
        return self.drop_reason is None


class SampleTakenError(Exception):
    """The sample of this prompt was handed in before, by another trajectory."""

    def __init__(self, prompt_id: str, sample: int, trajectory_id: str) -> None:
        super().__init__(f"sample {sample} of prompt {prompt_id} was handed in by trajectory {trajectory_id}")
        self.prompt_id = prompt_id
        self.sample = sample
        self.trajectory_id = trajectory_id


def is_stale(oldest_version: int | None, newest_version: int | None, bound: int | None) -> bool:
    """RollArt's asynchronous bound, per trajectory.

    The oldest sampled token may lag at most `bound` versions behind the newest.
    """
    if oldest_version is None or newest_version is None or bound is None:
        return False
    return newest_version - oldest_version > bound


@dataclass(frozen=True)
class Group:
    """The samples of one prompt.

    `kept` are in order of arrival and wait to be taken; `settled_order` ranks settled groups.
    """

    prompt_id: str
    kept: tuple[Sample, ...] = ()
    verdicts: Mapping[str, Verdict] = field(default_factory=dict)  # by trajectory
    owners: Mapping[int, str] = field(default_factory=dict)  # sample index -> trajectory
    settled_order: int | None = None
    taken: bool = False

    @property
    def received(self) -> int:
        """Samples handed in, whatever became of them."""
        return len(self.verdicts)

    @property
    def settled(self) -> bool:
        """Whether it wants no more samples."""
        return self.settled_order is not None

    @property
    def ready(self) -> bool:
        """Whether it can be taken for training."""
        return self.settled and not self.taken and bool(self.kept)

    @property
    def oldest_version(self) -> int | None:
        """Of all kept samples; None where none of them carries one."""
        return min((s.oldest_version for s in self.kept if s.oldest_version is not None), default=None)

    @property
    def payload_bytes(self) -> int:
        """Of all kept samples together."""
        return sum(sample.payload_bytes for sample in self.kept)

    def judge(self, sample: Sample, spec: RolloutSpec, newest_version: int | None, cancelled: bool) -> Verdict:
        """First-K verdict for a sample. The same trajectory gets its first verdict again; raises SampleTakenError."""
        first = self.verdicts.get(sample.trajectory_id)
        if first is not None:
            return first
        owner = self.owners.get(sample.sample)
        if owner is not None:
            raise SampleTakenError(self.prompt_id, sample.sample, owner)
        reason = self._drop_reason(sample, spec, newest_version, cancelled)
        enough = reason is None and len(self.kept) + 1 >= spec.keep_per_prompt
        everything_in = self.received + 1 >= spec.samples_per_prompt
        return Verdict(reason, group_settled=self.settled or cancelled or enough or everything_in)

    def _drop_reason(
        self, sample: Sample, spec: RolloutSpec, newest_version: int | None, cancelled: bool
    ) -> DropReason | None:
        if cancelled:
            return DropReason.CANCELLED
        if sample.failed:
            return DropReason.FAILED
        if self.settled:
            return DropReason.GROUP_SETTLED
        if is_stale(sample.oldest_version, newest_version, spec.max_staleness):
            return DropReason.STALE
        return None

    def with_sample(self, sample: Sample, verdict: Verdict, settled_order: int) -> "Group":
        """The group after a verdict; `settled_order` is its rank should this sample settle it."""
        settles = verdict.group_settled and not self.settled
        return replace(
            self,
            kept=(*self.kept, sample) if verdict.kept else self.kept,
            verdicts={**self.verdicts, sample.trajectory_id: verdict},
            owners={**self.owners, sample.sample: sample.trajectory_id},
            settled_order=settled_order if settles else self.settled_order,
        )

    def without(self, trajectory_ids: Collection[str]) -> "Group":
        """The group after some of its kept samples were dropped.

        It stays settled if it was, and takes others if it was not.
        """
        return replace(self, kept=tuple(s for s in self.kept if s.trajectory_id not in trajectory_ids))
