"""Samples of one prompt on their way to training, and what is known of each without its tokens."""

from collections import Counter
from dataclasses import dataclass, field
from enum import Enum
from math import inf

from treadle_core.rollouts.selection import Candidate, Rule

NO_VERSION = inf  # ranks groups without a weight version behind those that can grow stale


class DropReason(Enum):
    """Reason for which a trajectory is not trained on. The values are stored: do not rename
    them."""

    GROUP_SETTLED = "group_settled"
    STALE = "stale"
    FAILED = "failed"
    CANCELLED = "cancelled"
    NOT_CHOSEN = "not_chosen"  # by the rule of its group
    WITHDRAWN = "withdrawn"  # its group was not needed
    CUT = "cut"  # by a length cap that leaves such samples out


@dataclass(frozen=True, slots=True)
class Sample:
    """A trajectory that was submitted, without its tokens."""

    trajectory_id: str
    prompt_id: str
    sample: int  # 0..its group's `started` - 1
    failed: bool = False
    oldest_version: int | None = (
        None  # weight version of its oldest sampled token; None where no bound needs it
    )
    payload_bytes: int = 0
    length_tokens: int = 0  # sampled
    reward: float | None = None  # before a length cap shapes it
    truncated: bool = False
    left_out: bool = False  # cut by the length cap, and not to be trained for that
    # sampled tokens by weight version, where a bound needs them
    version_tokens: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class Verdict:
    """Verdict on a sample when it was submitted. `drop_reason` is None where it was kept."""

    drop_reason: DropReason | None
    group_settled: bool  # then its running siblings are no longer wanted

    @property
    def kept(self) -> bool:
        """Return whether the sample waits for training."""
        return self.drop_reason is None


def is_stale(oldest_version: int | None, newest_version: int | None, bound: int | None) -> bool:
    """Return whether the oldest sampled token is over `bound` versions behind the newest (RollArt's
    asynchronous bound)."""
    if oldest_version is None or newest_version is None or bound is None:
        return False
    return newest_version - oldest_version > bound


@dataclass
class Group:
    """The samples of one prompt."""

    prompt_id: str
    started: int  # samples that it may have
    rule: Rule
    # that wait to be taken, or were, in order of arrival
    kept: list[Sample] = field(default_factory=list)
    verdicts: dict[str, Verdict] = field(default_factory=dict)  # by trajectory
    owners: dict[int, str] = field(default_factory=dict)  # the trajectory of each sample index
    # tokens of samples that were ended early, by trajectory
    aborted: dict[str, int] = field(default_factory=dict)
    taken_version: int | None = None  # of the trainer's weights when it was taken
    settled_order: int | None = None  # its place among the settled groups
    taken: bool = False
    revision: int = 0  # of the buffer when it last changed

    @property
    def received(self) -> int:
        """Return the number of samples submitted."""
        return len(self.verdicts)

    @property
    def settled(self) -> bool:
        return self.settled_order is not None

    @property
    def ready(self) -> bool:
        return self.settled and not self.taken and bool(self.kept)

    @property
    def gone(self) -> bool:
        """Return whether no sample of the group will be taken any more."""
        return self.taken or (self.settled and not self.kept)

    @property
    def payload_bytes(self) -> int:
        return sum(sample.payload_bytes for sample in self.kept)

    @property
    def age(self) -> tuple[float, int]:
        """Return the key by which groups leave, the least first: the version of the oldest token,
        then the order of settling."""
        versions = (s.oldest_version for s in self.kept if s.oldest_version is not None)
        return min(versions, default=NO_VERSION), self.settled_order or 0

    @property
    def aborted_tokens(self) -> list[int]:
        """Return the tokens of each sample that was ended early, if it decoded any."""
        return [
            tokens for name, tokens in self.aborted.items() if tokens and name not in self.verdicts
        ]

    def stale_tokens(self) -> dict[int, int]:
        """Return kept tokens by how many versions they were behind when the group was taken; none
        where that is unknown."""
        behind: Counter[int] = Counter()
        if self.taken_version is not None:
            for version, tokens in (pair for sample in self.kept for pair in sample.version_tokens):
                behind[self.taken_version - version] += tokens
        return dict(behind)

    def candidates(self, sample: Sample, reason: DropReason | None) -> list[Candidate]:
        """Return the candidates for the group's rule once the sample has come; dropped samples are
        among them as failed."""
        kept = {each.trajectory_id: each for each in self.kept}
        came = [
            _candidate(kept[name]) if name in kept else Candidate(name, 0, failed=True)
            for name in self.verdicts
        ]
        last = (
            Candidate(sample.trajectory_id, 0, failed=True)
            if reason is not None
            else _candidate(sample)
        )
        return [*came, last]


def _candidate(sample: Sample) -> Candidate:
    return Candidate(sample.trajectory_id, sample.length_tokens, sample.reward, sample.truncated)
