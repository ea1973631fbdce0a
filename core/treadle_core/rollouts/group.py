"""Samples of one prompt on their way to training: what is known of each without its tokens, and the
rules that choose which of them are trained.

A rule sees the samples that have come, in order of arrival, and how many were started. `settled`
returns whether the group needs no further sample: then the running ones may be aborted. `choose`
returns the keys of the samples that are trained, in order of arrival; it is called once the group
has settled.

What holds for every rule: a failed sample counts as arrived and is never trained. A group that
settles with fewer than `keep` valid samples trains all of them. Equal lengths go by arrival. A
group always settles once all that were started have come.

`FirstK` changes which samples are trained only by speed. The others change the distribution that is
trained on (`bias.py` measures by how much), so no service uses one unless a request names it.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from math import inf
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Candidate:
    """Sample that has come. reward: None where it is not known. truncated: cut by a limit of
    length. failed: not valid for training, whatever it holds."""

    key: str
    length_tokens: int
    reward: float | None = None
    truncated: bool = False
    failed: bool = False


class Rule(Protocol):
    """Rule by which samples of a group are trained."""

    @property
    def keep(self) -> int:
        """Return how many samples of a group are trained, where there are as many."""

    def settled(self, candidates: Sequence[Candidate], started: int) -> bool:
        """Return whether no further sample is needed. candidates: in order of arrival; started: how
        many samples, with the running ones."""

    def choose(self, candidates: Sequence[Candidate]) -> tuple[str, ...]:
        """Return the keys of the samples that are trained, in order of arrival."""


@dataclass(frozen=True, slots=True)
class FirstK:
    """Rule that trains the first `keep` valid samples: RollArt's redundant environment rollouts
    (§5.3)."""

    keep: int

    def __post_init__(self) -> None:
        """Raise ValueError for a count below 1."""
        _check_keep(self.keep, least=1)

    def settled(self, candidates: Sequence[Candidate], started: int) -> bool:
        """Return whether `keep` valid samples, or all, have come."""
        return len(_valid(candidates)) >= self.keep or len(candidates) >= started

    def choose(self, candidates: Sequence[Candidate]) -> tuple[str, ...]:
        """Return the keys of the first `keep` valid samples."""
        return _keys(_valid(candidates)[: self.keep])


@dataclass(frozen=True, slots=True)
class DualEnd:
    """Rule that trains the shortest `keep - longest` samples and the longest `longest` ones (DARTS
    §4.1.2, Alg. 2).

    A truncated sample is never one of the longest. Where too few are complete, further short ones
    take their places.
    """

    keep: int
    longest: int

    def __post_init__(self) -> None:
        """Raise ValueError for counts that leave no group."""
        _check_keep(self.keep, least=1)
        if not 0 <= self.longest <= self.keep:
            raise ValueError(f"longest must be 0 to keep ({self.keep}), is {self.longest}")

    def settled(self, candidates: Sequence[Candidate], started: int) -> bool:
        """Return whether all samples have come: any that still runs may be the longest."""
        return len(candidates) >= started

    def choose(self, candidates: Sequence[Candidate]) -> tuple[str, ...]:
        """Return the keys of both ends of the valid samples, by length."""
        valid = _valid(candidates)
        ascending = sorted(valid, key=lambda each: each.length_tokens)
        short, rest = ascending[: self.keep - self.longest], ascending[self.keep - self.longest :]
        complete = sorted(
            (each for each in rest if not each.truncated), key=lambda each: -each.length_tokens
        )
        chosen = {each.key for each in (*short, *complete[: self.longest])}
        chosen.update(
            each.key
            for each in [each for each in rest if each.key not in chosen][: self.keep - len(chosen)]
        )
        return _keys(each for each in valid if each.key in chosen)


@dataclass(frozen=True, slots=True)
class ShortestFirst:
    """Rule that trains the shortest `keep` samples and waits for no others: DARTS' tail pruning
    with early stopping (§4.3.1)."""

    keep: int

    def __post_init__(self) -> None:
        """Raise ValueError for a count below 1."""
        _check_keep(self.keep, least=1)

    def settled(self, candidates: Sequence[Candidate], started: int) -> bool:
        """Return whether `keep` valid samples that no limit has cut, or all samples, have come."""
        complete = sum(not each.truncated for each in _valid(candidates))
        return complete >= self.keep or len(candidates) >= started

    def choose(self, candidates: Sequence[Candidate]) -> tuple[str, ...]:
        """Return the keys of the shortest samples, truncated ones last."""
        valid = _valid(candidates)
        ascending = sorted(valid, key=lambda each: (each.truncated, each.length_tokens))
        chosen = {each.key for each in ascending[: self.keep]}
        return _keys(each for each in valid if each.key in chosen)


@dataclass(frozen=True, slots=True)
class FirstMixed:
    """Rule that trains the first `keep` samples among which one succeeded and one did not: dynamic
    K (DAPO's dynamic sampling, with the rest of the group aborted).

    A sample succeeds with a reward of `success_at` or more; one of unknown reward neither succeeds
    nor fails. A group in which only one outcome ever comes has no advantage for GRPO:
    `drop_uniform` trains nothing of it, else the first `keep` are trained.
    """

    keep: int
    success_at: float = 1.0
    drop_uniform: bool = True

    def __post_init__(self) -> None:
        """Raise ValueError for a count below 2, which cannot be mixed."""
        _check_keep(self.keep, least=2)

    def settled(self, candidates: Sequence[Candidate], started: int) -> bool:
        """Return whether `keep` valid samples of both outcomes, or all samples, have come."""
        valid = _valid(candidates)
        return (len(valid) >= self.keep and self._is_mixed(valid)) or len(candidates) >= started

    def choose(self, candidates: Sequence[Candidate]) -> tuple[str, ...]:
        """Return the keys of the first samples; where their outcomes are alike, the first sample of
        the other outcome replaces the last."""
        valid = _valid(candidates)
        if self._is_mixed(valid):
            both = self._first_of_each(valid)
            fill = [each for each in valid if each.key not in both][: self.keep - len(both)]
            chosen = both | {each.key for each in fill}
            return _keys(each for each in valid if each.key in chosen)
        return () if self.drop_uniform else _keys(valid[: self.keep])

    def _is_mixed(self, candidates: Sequence[Candidate]) -> bool:
        return len(self._first_of_each(candidates)) > 1

    def _first_of_each(self, candidates: Sequence[Candidate]) -> set[str]:
        """Return the keys of the first success and of the first sample without success."""
        first: dict[bool, str] = {}
        for each in candidates:
            if each.reward is not None:
                first.setdefault(each.reward >= self.success_at, each.key)
        return set(first.values())


def darts_rule(allocated: int, most: int, keep: int, longest: int) -> Rule:
    """Return the rule of a prompt with `allocated` samples (DARTS §4.3.1): saturated at `most`, it
    is pruned."""
    return ShortestFirst(keep) if allocated >= most > keep else DualEnd(keep, longest)


def _check_keep(keep: int, least: int) -> None:
    if keep < least:
        raise ValueError(f"keep must be at least {least}, is {keep}")


def _valid(candidates: Iterable[Candidate]) -> list[Candidate]:
    return [each for each in candidates if not each.failed]


def _keys(candidates: Iterable[Candidate]) -> tuple[str, ...]:
    return tuple(each.key for each in candidates)


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
    LATE = "late"  # its group would have ended too late for its weight version


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
