"""Sample buffer of one rollout: groups on their way from submission to training (RollArt's
SampleBuffer).

A prompt is sampled several times. Its group settles by its rule (`group.py`), or once all
samples are in, however many of them failed; samples that came and that the rule does not choose are
dropped then. Once `keep_groups` groups have settled with samples, the others are withdrawn
(redundant groups, RollArt §5.3). A trajectory keeps its first verdict; a sample that would be
dropped now would be dropped at any later time, so a caller may act on an early look at the verdict.

A settled group stays settled, unless `replace_stale` is set: then each sample that grows too old
(RollArt's asynchronous bound) is replaced by one more, for which its group opens again until it is
taken.

`decide_*` changes nothing and returns what would happen; `apply` folds what did happen, so that a
stored list of events rebuilds the buffer even after the policy has changed. A kept trajectory
leaves exactly once, taken or dropped; a group leaves whole; a batch id always names the same batch;
`revision` is the number of events applied.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from math import inf

from treadle_core.rollouts.group import DropReason, Group, Sample, Verdict, is_stale
from treadle_core.rollouts.spec import RolloutSpec


class SampleTakenError(Exception):
    """This sample of the prompt was submitted before, by another trajectory."""

    def __init__(self, prompt_id: str, sample: int, trajectory_id: str) -> None:
        super().__init__(
            f"sample {sample} of prompt {prompt_id} was handed in by trajectory {trajectory_id}"
        )
        self.prompt_id = prompt_id
        self.trajectory_id = trajectory_id


class RolloutState(Enum):
    """State of a rollout. FINISHED and CANCELLED are final."""

    RUNNING = "running"
    FINISHED = "finished"
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True)
class Arrived:
    """A sample was submitted and got its verdict. dropped: samples that were kept until then, of
    its group not chosen, of other groups withdrawn."""

    sample: Sample
    verdict: Verdict
    dropped: tuple[str, ...] = ()


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
        """Return the trajectories of the batch."""
        return [
            trajectory_id for _, trajectory_ids in self.groups for trajectory_id in trajectory_ids
        ]

    def part(self, index: int, parts: int, payload_bytes: Mapping[str, int]) -> "Batch":
        """Return the part of the batch that the rank `index` of `parts` takes. payload_bytes: by
        trajectory. Groups are dealt from the largest on, forwards and backwards in turn, so that
        the ranks have about the same work."""
        size = {
            prompt_id: sum(payload_bytes[name] for name in names)
            for prompt_id, names in self.groups
        }
        descending = sorted(self.groups, key=lambda group: -size[group[0]])
        turn = [*range(parts), *reversed(range(parts))]
        dealt = {
            group[0] for place, group in enumerate(descending) if turn[place % len(turn)] == index
        }
        return replace(self, groups=tuple(group for group in self.groups if group[0] in dealt))


@dataclass(frozen=True, slots=True)
class Cancelled:
    """The rollout was cancelled; trajectories kept in groups that had not settled are dropped."""

    dropped: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Aborted:
    """A sample ended before it was submitted, after `tokens` sampled tokens."""

    prompt_id: str
    trajectory_id: str
    tokens: int


@dataclass(frozen=True, slots=True)
class GroupDropped:
    """A group was dropped whole before it was taken. dropped: the samples that it had kept."""

    prompt_id: str
    reason: DropReason
    dropped: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Admitted:
    """So many groups may have begun, in the order of the prompts, where the rollout keeps a
    pace."""

    groups: int


Event = Arrived | Advanced | Batch | Cancelled | Aborted | GroupDropped | Admitted


class GroupTooLargeError(Exception):
    """A group does not fit into a batch of limited size."""

    def __init__(self, prompt_id: str, group_bytes: int, limit_bytes: float) -> None:
        super().__init__(
            f"the group of prompt {prompt_id} has {group_bytes} bytes, a batch may have "
            f"{limit_bytes}"
        )
        self.prompt_id = prompt_id


class SampleBuffer:
    """State of one rollout, its groups included. Only `apply` changes it."""

    def __init__(self, spec: RolloutSpec) -> None:
        self.spec = spec
        self.groups: dict[str, Group] = {}
        for index, prompt_id in enumerate(spec.prompt_ids):
            samples = spec.samples_of(index)
            rule = spec.selection.rule_of(spec.keep_per_prompt, samples)
            self.groups[prompt_id] = Group(prompt_id, samples, rule)
        self.samples: dict[str, Sample] = {}  # every sample submitted, by trajectory
        self.batches: dict[str, Batch] = {}
        self.drops: Counter[DropReason] = Counter()
        self.dropped_later: dict[str, DropReason] = {}  # samples that were kept at first
        self.newest_version: int | None = None
        self.cancelled = False
        self.revision = 0
        self.taken_total = 0
        self.settled_total = 0
        self.settlements = 0  # one that is repeated counts again
        self.withdrawn = False  # groups that have not settled are not needed
        self.admitted = 0  # groups, where the rollout keeps a pace

    @property
    def state(self) -> RolloutState:
        if self.cancelled:
            return RolloutState.CANCELLED
        if self.spec.replace_stale and self.complete:  # what waits may still be replaced
            return (
                RolloutState.FINISHED
                if all(each.gone for each in self.groups.values())
                else RolloutState.RUNNING
            )
        return RolloutState.FINISHED if self.complete else RolloutState.RUNNING

    @property
    def over(self) -> bool:
        return self.state is not RolloutState.RUNNING

    @property
    def complete(self) -> bool:
        """Return whether no sample is wanted now."""
        return self.cancelled or self.withdrawn or self.settled_total == len(self.groups)

    @property
    def groups_admitted(self) -> int:
        """Return how many groups may have begun, in the order of the prompts."""
        if self.spec.batch_groups is not None:
            return self.admitted
        room = self.spec.max_open_groups
        if room is None:
            return len(self.groups)
        for index, group in enumerate(self.groups.values()):
            if not group.gone:
                if not room:
                    return index
                room -= 1
        return len(self.groups)

    @property
    def buffered(self) -> int:
        """Return the number of trajectories kept and not yet taken."""
        return sum(len(group.kept) for group in self.groups.values() if not group.taken)

    def samples_of(self, group: Group) -> list[Sample]:
        """Return the samples of a group that came, in their order."""
        return [self.samples[name] for name in group.verdicts]

    def drop_reason_of(self, trajectory_id: str) -> DropReason | None:
        """Return the reason for which a sample that came is not kept; None where it is."""
        later = self.dropped_later.get(trajectory_id)
        group = self.groups[self.samples[trajectory_id].prompt_id]
        return later if later is not None else group.verdicts[trajectory_id].drop_reason

    def decide_arrival(self, sample: Sample) -> Arrived:
        """Return the verdict for a sample; for a known trajectory its first one. Raises KeyError
        for an unknown prompt, SampleTakenError."""
        group = self.groups[sample.prompt_id]
        first = group.verdicts.get(sample.trajectory_id)
        if first is not None:
            return Arrived(sample, first)
        owner = group.owners.get(sample.sample)
        if owner is not None:
            raise SampleTakenError(sample.prompt_id, sample.sample, owner)
        reason = self._drop_reason(sample, group)
        if group.settled or self.complete:
            return Arrived(sample, Verdict(reason, group_settled=True))
        candidates = group.candidates(sample, reason)
        if not group.rule.settled(candidates, group.started + self._is_replaced(reason)):
            return Arrived(sample, Verdict(reason, group_settled=False))
        chosen = set(group.rule.choose(candidates))
        if reason is None and sample.trajectory_id not in chosen:
            reason = DropReason.NOT_CHOSEN
        dropped = [each.trajectory_id for each in group.kept if each.trajectory_id not in chosen]
        if self._enough(bool(chosen)):
            others = (
                each for each in self.groups.values() if each is not group and not each.settled
            )
            dropped += [each.trajectory_id for other in others for each in other.kept]
        return Arrived(sample, Verdict(reason, group_settled=True), tuple(dropped))

    def _enough(self, more: int = 0) -> bool:
        """Return whether as many groups as are kept have settled with samples, when `more` are
        added."""
        if self.spec.keep_groups is None:
            return False
        filled = sum(group.settled and bool(group.kept) for group in self.groups.values())
        return filled + more >= self.spec.keep_groups

    def _is_replaced(self, reason: DropReason | None) -> bool:
        return self.spec.replace_stale and reason is DropReason.STALE

    def _drop_reason(self, sample: Sample, group: Group) -> DropReason | None:
        if self.cancelled:
            return DropReason.CANCELLED
        if sample.failed:
            return DropReason.FAILED
        if group.settled:
            return DropReason.GROUP_SETTLED
        if self.withdrawn:
            return DropReason.WITHDRAWN
        if sample.left_out:
            return DropReason.CUT
        stale = is_stale(sample.oldest_version, self.newest_version, self.spec.max_staleness)
        return DropReason.STALE if stale else None

    def decide_version(self, version: int) -> Advanced | None:
        """Return the kept samples that become stale with a trainer at `version`, in groups not yet
        taken; None for a version that is not newer."""
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
        """Return the size of a batch's trajectories."""
        return sum(self.samples[trajectory_id].payload_bytes for trajectory_id in batch.members)

    def decide_batch(
        self, batch_id: str, max_groups: int, wait: bool, max_bytes: float = inf
    ) -> Batch | None:
        """Return whole groups for training, oldest tokens first, then as they settled; a known id
        gives its batch again.

        None where the caller should wait: fewer than `max_groups` are ready, `wait` is set and more
        can come. A batch is also full at `max_bytes`. Raises GroupTooLargeError where the oldest
        group alone is larger.
        """
        first = self.batches.get(batch_id)
        if first is not None:
            return first
        ready = sorted(
            (group for group in self.groups.values() if group.ready), key=lambda group: group.age
        )
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
        if wait and not full and not self.complete:
            return None
        groups = tuple((g.prompt_id, tuple(s.trajectory_id for s in g.kept)) for g in chosen)
        return Batch(batch_id, groups, exhausted=self.complete and len(chosen) == len(ready))

    def decide_cancel(self) -> Cancelled | None:
        """Return the samples that cancelling drops: kept samples of groups that have not settled;
        None where the rollout is over."""
        if self.over:
            return None
        dropped = (
            s.trajectory_id
            for group in self.groups.values()
            if not group.settled
            for s in group.kept
        )
        return Cancelled(tuple(dropped))

    def decide_drop(self, prompt_id: str, reason: DropReason) -> GroupDropped | None:
        """Return what dropping a group drops; None where it is taken or has nothing to lose any
        more. Raises KeyError for an unknown prompt."""
        group = self.groups[prompt_id]
        if group.gone or self.over:
            return None
        return GroupDropped(prompt_id, reason, tuple(each.trajectory_id for each in group.kept))

    def apply(self, event: Event) -> None:
        """Apply an event that was decided on the present state."""
        self.revision += 1
        match event:
            case Arrived():
                self._apply_arrival(event)
            case Advanced():
                self.newest_version = event.version
                self._drop_stale(event.stale)
            case Batch():
                self.batches[event.batch_id] = event
                for prompt_id, trajectory_ids in event.groups:
                    self.groups[prompt_id].taken = True
                    self.groups[prompt_id].taken_version = self.newest_version
                    self.taken_total += len(trajectory_ids)
            case Cancelled():
                self.cancelled = True
                self._drop(event.dropped, DropReason.CANCELLED)
            case GroupDropped():
                self._drop(event.dropped, event.reason)
                group = self.groups[event.prompt_id]
                group.revision = self.revision
                if not group.settled:
                    self._settle(group)
            case Admitted():
                self.admitted = event.groups
            case Aborted():
                self.groups[event.prompt_id].aborted[event.trajectory_id] = event.tokens

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
        if self.complete or group.settled:
            return
        group.started += self._is_replaced(verdict.drop_reason)
        own = [name for name in event.dropped if self.samples[name].prompt_id == group.prompt_id]
        self._drop(own, DropReason.NOT_CHOSEN)
        self._drop([name for name in event.dropped if name not in own], DropReason.WITHDRAWN)
        if verdict.group_settled:
            self._settle(group)

    def _settle(self, group: Group) -> None:
        group.settled_order = self.settlements
        self.settlements += 1
        self.settled_total += 1
        self.withdrawn = self._enough()

    def _drop_stale(self, trajectory_ids: tuple[str, ...]) -> None:
        """Drop samples that grew too old, and open the groups again whose samples are replaced."""
        self._drop(trajectory_ids, DropReason.STALE)
        if not self.spec.replace_stale:
            return
        for trajectory_id in trajectory_ids:
            group = self.groups[self.samples[trajectory_id].prompt_id]
            group.started += 1
            if group.settled:
                group.settled_order = None
                self.settled_total -= 1

    def _drop(self, trajectory_ids: Iterable[str], reason: DropReason) -> None:
        for trajectory_id in trajectory_ids:
            sample = self.samples[trajectory_id]
            group = self.groups[sample.prompt_id]
            group.kept.remove(sample)
            group.revision = self.revision
            self.drops[reason] += 1
            self.dropped_later[trajectory_id] = reason
