"""The queue of one engine: which waiting step gets a slot, and which running step gives one up (Heddle 4.2, Algorithm
1).

A pure state machine: it owns no task, clock or client. The driver reports what happened (`add`, `progress`,
`evicted`, `remove`, ...) and then asks `decide` what to do; each action is to be carried out once. Larger priority
runs first; ties go to the earlier arrival.

Invariants: at most `slots` steps hold a slot, a step that is being evicted still holding its own; a step that is not
preemptible is evicted by a pause alone; no step is evicted while a preemptible one that ranks below it keeps running;
an evicted step waits with its original arrival; a step is evicted for one that outranks it by more than `hysteresis`,
and only after `min_run_tokens` tokens since its admission, so that two steps never take turns without getting on.
"""

import enum
from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import dataclass

DEFAULT_HYSTERESIS = 0.0  # priority units; only strictly larger priorities evict
# An eviction costs a prefill of what the radix tree did not keep (under one page and the last token) and a queue
# pass, together about the time of two decode steps; after 16 tokens that is little against what the step got done.
DEFAULT_MIN_RUN_TOKENS = 16


class QueueFull(Exception):  # noqa: N818 - a condition of the queue, named as callers speak of it
    """The waiting line is at its capacity; the step was not taken."""

    def __init__(self, capacity: int) -> None:
        super().__init__(f"{capacity} steps wait already")
        self.capacity = capacity


@dataclass(frozen=True)
class QueuePolicy:
    """slots: steps that run at once; capacity: steps that may wait; hysteresis in priority units."""

    slots: int
    capacity: int
    preempt: bool = True
    hysteresis: float = DEFAULT_HYSTERESIS
    min_run_tokens: int = DEFAULT_MIN_RUN_TOKENS


@dataclass(frozen=True)
class Admit:
    """Start the step on the engine."""

    step_id: str


@dataclass(frozen=True)
class Evict:
    """Abort the step on the engine, then report `evicted`; `by` is the step that is to take the slot, empty for a
    pause.
    """

    step_id: str
    by: str


class _State(enum.Enum):
    WAITING = enum.auto()
    RUNNING = enum.auto()
    EVICTING = enum.auto()


@dataclass(slots=True)
class _Entry:
    step_id: str
    priority: float
    arrival: int
    preemptible: bool
    state: _State = _State.WAITING
    tokens: int = 0  # since its admission

    @property
    def rank(self) -> tuple[float, int]:
        """Smaller runs first."""
        return (-self.priority, self.arrival)


def _rank(entry: _Entry) -> tuple[float, int]:
    return entry.rank


class StepQueue:
    """See the module. Step ids are the caller's; unknown ones raise KeyError except where said otherwise."""

    def __init__(self, policy: QueuePolicy) -> None:
        self.policy = policy
        self.paused = False
        self._entries: dict[str, _Entry] = {}
        self._arrivals = 0
        # Those that wait, best ranked first, and those that run; the rest are being evicted.
        self._waiting: list[_Entry] = []
        self._running: dict[str, _Entry] = {}
        self._preemptible: dict[str, _Entry] = {}  # of those that run
        self._lowest: _Entry | None = None  # of the preemptible ones; None where it is to be looked for

    def add(self, step_id: str, priority: float, *, preemptible: bool = True) -> None:
        """A step arrived. preemptible: whether a waiting step may evict it while it runs. Raises QueueFull, ValueError
        for an id that is here already."""
        if step_id in self._entries:
            raise ValueError(f"step {step_id!r} is in the queue already")
        free = 0 if self.paused else self.policy.slots - self._held()
        if self.waiting - free >= self.policy.capacity:
            raise QueueFull(self.policy.capacity)
        entry = self._entries[step_id] = _Entry(step_id, priority, self._arrivals, preemptible)
        self._arrivals += 1
        insort(self._waiting, entry, key=_rank)

    def progress(self, step_id: str, tokens: int) -> bool:
        """The step has made `tokens` tokens since its admission; True when that makes it evictable while others wait:
        then `decide`.
        """
        entry = self._entries[step_id]
        before, entry.tokens = entry.tokens, tokens
        return before < self.policy.min_run_tokens <= tokens and self.waiting > 0

    def reprioritize(self, step_id: str, priority: float) -> bool:
        """False where the step is not here."""
        entry = self._entries.get(step_id)
        if entry is None:
            return False
        waits = entry.state is _State.WAITING
        if waits:
            self._take(entry)
        entry.priority = priority
        if waits:
            insort(self._waiting, entry, key=_rank)
        elif entry is self._lowest:
            self._lowest = None
        else:
            self._ran(entry)
        return True

    def evicted(self, step_id: str) -> None:
        """The engine has let the step go; it waits again, in its old place."""
        entry = self._entries[step_id]
        if entry.state is _State.WAITING:
            return
        self._stopped(entry)
        entry.state, entry.tokens = _State.WAITING, 0
        insort(self._waiting, entry, key=_rank)

    def remove(self, step_id: str) -> None:
        """The step is over, whatever it was doing. Unknown ids are fine."""
        entry = self._entries.pop(step_id, None)
        if entry is None:
            return
        if entry.state is _State.WAITING:
            self._take(entry)
        self._stopped(entry)

    def decide(self) -> list[Admit | Evict]:
        """What to do now, best ranked first. The states change as if it were done; call it after every report."""
        return list(self._evictions_for_pause() if self.paused else self._decisions())

    def _decisions(self) -> Iterator[Admit | Evict]:
        free = self.policy.slots - self._held()
        for _ in range(min(free, len(self._waiting))):
            entry = self._waiting.pop(0)
            entry.state, entry.tokens = _State.RUNNING, 0
            self._running[entry.step_id] = entry
            if entry.preemptible:
                self._preemptible[entry.step_id] = entry
            self._ran(entry)
            yield Admit(entry.step_id)
        if not self.policy.preempt:
            return
        # Slots that are being given up already are spoken for by the best of those that still wait.
        for candidate in self._waiting[self._held() - len(self._running) :]:
            if not self._preemptible:
                return
            lowest = self._lowest = self._lowest or max(self._preemptible.values(), key=_rank)
            outranked = candidate.priority > lowest.priority + self.policy.hysteresis
            if not outranked or lowest.tokens < self.policy.min_run_tokens:
                return  # those that follow rank below this candidate, so they evict nobody either
            yield self._evict(lowest, candidate.step_id)

    def _evictions_for_pause(self) -> Iterator[Evict]:
        for entry in sorted(self._running.values(), key=_rank):
            yield self._evict(entry, "")

    def _evict(self, entry: _Entry, by: str) -> Evict:
        entry.state = _State.EVICTING
        self._stopped(entry)
        return Evict(entry.step_id, by)

    def _ran(self, entry: _Entry) -> None:
        """It runs, or runs with another priority."""
        if self._lowest is not None and entry.step_id in self._preemptible and entry.rank > self._lowest.rank:
            self._lowest = entry

    def _stopped(self, entry: _Entry) -> None:
        """It does not run any more, if it did."""
        self._running.pop(entry.step_id, None)
        self._preemptible.pop(entry.step_id, None)
        if entry is self._lowest:
            self._lowest = None

    def _take(self, entry: _Entry) -> None:
        """Out of the waiting line. Ranks differ, since arrivals do."""
        del self._waiting[bisect_left(self._waiting, entry.rank, key=_rank)]

    def _held(self) -> int:
        return len(self._entries) - len(self._waiting)

    @property
    def running(self) -> int:
        """Steps that hold a slot."""
        return self._held()

    @property
    def waiting(self) -> int:
        """Steps that hold none."""
        return len(self._waiting)

    def __contains__(self, step_id: str) -> bool:
        return step_id in self._entries
