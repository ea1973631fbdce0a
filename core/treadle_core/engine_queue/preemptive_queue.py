"""Queue of one engine: which waiting step gets a slot, and which running step is evicted (Heddle
4.2, Algorithm 1).

A state machine without tasks or clock: the caller reports what happened (`add`, `report_progress`,
`confirm_eviction`, `remove`, ...), then calls `decide` and carries out each action once. The step
with the larger priority starts first; of equal ones the earlier arrival.

At most `slots` steps hold a slot; a step that is being evicted still holds its own, and waits with
its original arrival afterwards. Only a pause evicts a step that is not preemptible. The lowest
preemptible step is evicted for a waiting one whose priority is larger by more than `hysteresis`,
and only after `min_run_tokens` tokens since its admission, so that two steps never take turns
without progress.

Long prompts are paced. An engine prefills all its new steps before it decodes, so prompts that
arrive together would stop every decode until the last of them is read, and the tools that those
decodes end in could not begin. So one long prompt is read at a time, and after it the steps of
higher priority decode for as long as it took before the next one is admitted. Shorter prefills pass
the long ones that wait. So does a step whose earlier turns the engine has read, however long its
tool's answer: while it waited, the engine could evict them.

Shared prefills run once. Several waiting steps may have to prefill the same tokens, such as the
prompt of samples that start together. An engine that gets them together prefills these tokens for
each step. So the queue admits one of the steps, and the others wait until it has its first token.

Short prefills are gathered. A pass of prefill stops every decode, whatever it reads. So a step may
wait though a slot is free, until the free slots have lost half (GATHER) of the time that one more
pass takes from the running steps. By then other steps often wait too, and one pass reads them all.
Steps that are not preemptible are admitted without regard to prefills.

Jobs share the slots by their weights (ADR 0039): a free slot goes to a job that has less than its
share of them, of several such jobs to the one that was served least (`fair_share`), and within the
job to its best step. Across jobs priorities are not compared. A step is evicted for a step of
another job only where that job has less than its share, its own more, and the difference in service
has become large (`job_lines`).
"""

import math
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from treadle_core.fair_share import RANK, Entry, JobLines, State

# Priority units: doublings of the work left, for the makespan. A step ends soon by itself, and
# predictions err, so only one with about four times the work left evicts. On two CPU engines in
# simulation 2 ended batches of public traces 1% sooner than 0, and 1.5% where a pass of prefill
# takes long; on H200s the two differed by no more than chance.
DEFAULT_HYSTERESIS = 2.0
# An eviction costs a prefill of what the radix tree did not keep (under one page and the last
# token) and a queue pass, together about two decode steps: little against 16 tokens.
DEFAULT_MIN_RUN_TOKENS = 16
# A prompt is long where it takes as long as this many decode steps of one sequence: less hardly
# delays a decode.
LONG_PREFILL_STEPS = 16.0
# Seconds of decoding after a long prefill, for each second of it. On public traces in simulation
# 0.5 to 1 ended rollouts with long prompts 4% sooner than 0, and 3 was worse.
PACE = 1.0
# Seconds of free slots for each second that one more pass of prefill takes from running steps. On
# batches of public traces on two CPU engines in simulation, where half of the time is passes, 0.5
# ended them 2 to 5% sooner than 0 and 1 by 3 to 8%; on H200s up to 5% sooner. On live CPU engines,
# where a pass is measured with the wait for the decode step before it, 1 held turns of few tokens
# for too long.
GATHER = 0.5
MOST_HELD_S = 1.0  # that a waiting step is held for others, should passes seem to take long
# by which the least seconds of a pass grow with each pass, so that they follow an engine that
# changes
PASS_RISE = 1.02
ROUNDING_S = 1e-6  # less is no time to wait
MOST_PASSED = 32  # waiting steps that others may pass in one decision, which bounds its time


class QueueFull(Exception):  # noqa: N818 - a condition, not a fault
    """The queue is full: as many steps wait as may, so that the step was not taken."""

    def __init__(self, capacity: int) -> None:
        super().__init__(f"{capacity} steps wait already")
        self.capacity = capacity


@dataclass(frozen=True)
class QueuePolicy:
    """Limits of the queue. slots: steps that run at once; capacity: steps that may wait; hysteresis
    in priority units; pace: seconds of decoding for each second of a long prompt, 0 for none;
    gather: see GATHER, 0 for none."""

    slots: int
    capacity: int
    preempt: bool = True
    hysteresis: float = DEFAULT_HYSTERESIS
    min_run_tokens: int = DEFAULT_MIN_RUN_TOKENS
    pace: float = PACE
    gather: float = GATHER


class Prefill(NamedTuple):
    """Prefill that a waiting step needs. steps: how long that takes now, in decode steps of one
    sequence. first: a key of the first tokens to prefill; two steps with the same key have to
    prefill the same tokens. None: it is not known, or there is nothing to prefill. returns: the
    engine has read earlier turns of it."""

    steps: float = 0.0
    first: Hashable = None
    returns: bool = False


NO_PREFILL = Prefill()


@dataclass(frozen=True)
class Admit:
    """Start the step on the engine."""

    step_id: str


@dataclass(frozen=True)
class Evict:
    """Abort the step on the engine, then call `confirm_eviction`. `by`: the step that gets the
    slot; empty in a pause."""

    step_id: str
    by: str


class StepQueue:
    """Waiting and running steps of one engine. Step ids are the caller's; an unknown one raises
    KeyError except where a method states otherwise.

    prefill_of: the prefill that a waiting step needs; without it no prefill is long, shared or
    gathered. wake_s: when `decide` is to be called again though nobody reports anything, infinite
    where it is not.
    """

    def __init__(
        self, policy: QueuePolicy, prefill_of: Callable[[str], Prefill] | None = None
    ) -> None:
        self.policy = policy
        self.wake_s = math.inf
        self.paused = False
        self._entries: dict[str, Entry] = {}
        self._arrivals = 0
        # Entries wait in `_lines`, or are in `_running`, or are being evicted.
        self._lines = JobLines()
        self._running: dict[str, Entry] = {}
        self._prefill_of = prefill_of
        self._being_read: set[Hashable] = set()  # `reads` of all entries
        self._reading: tuple[str, float] | None = None  # the long prefill that runs, and since when
        self._rest_until_s = 0.0  # long prefills wait for decodes
        self._pass: tuple[str, float] | None = (
            None  # a step whose first token ends a pass, and since when
        )
        self._pass_s = 0.0  # from an admission to the first token, the least of late; 0: not known
        # since when so many slots are free for waiting steps
        self._idle: tuple[float, int] = (0.0, 0)
        self._lost_s = 0.0  # by free slots before that, since the last admission
        self._held_since_s: float | None = (
            None  # since when the best waiting step is held though a slot is free
        )

    def add(
        self,
        step_id: str,
        priority: float,
        *,
        preemptible: bool = True,
        job: str = "",
        weight: float = 1.0,
    ) -> None:
        """Add a step. preemptible: whether a waiting step may evict it while it runs. job, weight >
        0: whose share it takes; the newest weight of a job counts. Raises QueueFull, and ValueError
        for an id that is here already."""
        if step_id in self._entries:
            raise ValueError(f"step {step_id!r} is in the queue already")
        free = 0 if self.paused else self.policy.slots - self.running
        if self.waiting - free >= self.policy.capacity:
            raise QueueFull(self.policy.capacity)
        entry = self._entries[step_id] = Entry(
            step_id, priority, self._arrivals, preemptible, self._lines.enter(job, weight)
        )
        self._arrivals += 1
        self._lines.put(entry)

    def report_progress(self, step_id: str, tokens: int) -> bool:
        """Report the tokens of a step since its admission. Returns True where `decide` may now
        evict it for a waiting one."""
        entry = self._entries[step_id]
        before, entry.tokens = entry.tokens, tokens
        return before < self.policy.min_run_tokens <= tokens and self.waiting > 0

    def finish_prefill(self, step_id: str, now: float) -> bool:
        """Report the first token of a step since its admission. Returns True where `decide` may now
        admit others for it."""
        if self._pass is not None and self._pass[0] == step_id:
            took_s, self._pass = now - self._pass[1], None
            self._pass_s = min(PASS_RISE * self._pass_s, took_s) if self._pass_s else took_s
        shared = self._end_reading(self._entries[step_id])
        if self._reading is None or self._reading[0] != step_id:
            return shared and self.waiting > 0
        self._rest_until_s = now + self.policy.pace * (now - self._reading[1])
        self._reading = None
        return self.waiting > 0

    def reprioritize(self, step_id: str, priority: float) -> bool:
        """Change a priority. Returns False where the step is not here."""
        entry = self._entries.get(step_id)
        if entry is None:
            return False
        waits = entry.state is State.WAITING
        if waits:
            self._lines.take(entry)
        entry.priority = priority
        if waits:
            self._lines.put(entry)
        elif entry is entry.line.lowest:
            entry.line.lowest = None
        else:
            entry.line.compare_lowest(entry)
        return True

    def confirm_eviction(self, step_id: str) -> None:
        """Confirm that the engine has aborted the step; it waits again, in its old place."""
        entry = self._entries[step_id]
        if entry.state is State.WAITING:
            return
        self._stop(entry)
        entry.state, entry.tokens = State.WAITING, 0
        self._lines.put(entry)

    def remove(self, step_id: str) -> None:
        """Remove a step in any state, if it is here."""
        entry = self._entries.pop(step_id, None)
        if entry is None:
            return
        if entry.state is State.WAITING:
            self._lines.take(entry)
        self._stop(entry)
        self._lines.leave(entry.line)

    def decide(self, now: float = 0.0) -> list[Admit | Evict]:
        """Return what to do now, best rank first, and change the states as if it were done. Call it
        after every report, and at `wake_s`. now: seconds of the clock of `finish_prefill`."""
        self.wake_s = math.inf
        self._lines.charge(now)
        since_s, slots = self._idle
        self._lost_s += slots * (now - since_s)
        actions = list(self._evictions_for_pause() if self.paused else self._decisions(now))
        self._lines.note_held()
        self._idle = (
            now,
            0 if self.paused else min(max(self.policy.slots - self.running, 0), self.waiting),
        )
        return actions

    def _decisions(self, now: float) -> Iterator[Admit | Evict]:
        if not self._lines.waiting:
            self._held_since_s = None  # whoever was held is gone
            return
        if self._must_gather(now):
            return
        slots, lines, passed = self.policy.slots, self._lines, 0
        lines.look_anew()
        while (
            self.running < slots
            and passed < MOST_PASSED
            and (line := lines.next(slots)) is not None
        ):
            entry = line.waiting[line.passed]
            prefill = self._prefill(entry)
            long = self._is_long(prefill)
            if prefill.first in self._being_read or (long and self._must_rest(entry, now)):
                line.passed += 1
                passed += 1
                continue
            self._lines.take(entry)
            entry.state, entry.tokens = State.RUNNING, 0
            self._lost_s, self._held_since_s = 0.0, None
            if self._pass is None and not long:
                self._pass = (entry.step_id, now)
            self._running[entry.step_id] = entry
            line.start(entry)
            if long:
                self._reading = (entry.step_id, now)
            if prefill.first is not None:
                entry.reads = prefill.first
                self._being_read.add(prefill.first)
            yield Admit(entry.step_id)
        if not self.policy.preempt:
            return
        # The best waiting steps get the slots of steps that are being evicted already.
        lines.look_anew()
        given = self.running - len(self._running)
        while (line := lines.next(slots)) is not None:
            candidate = line.waiting[line.passed]
            line.passed += 1
            if given > 0:
                given -= 1
                line.granted += 1
                continue
            prefill = self._prefill(candidate)
            held = prefill.first in self._being_read or (
                self._is_long(prefill) and self._must_rest(candidate, now)
            )
            lowest = None if held else self._find_victim(candidate, now)
            if lowest is None:
                # the following ones of the job rank lower, so they evict none either
                line.passed = len(line.waiting)
                continue
            line.granted += 1
            yield self._evict(lowest, candidate.step_id)

    def _find_victim(self, candidate: Entry, now: float) -> Entry | None:
        """Return the running step that gives its slot to a waiting one. Sets `wake_s` where one
        will do so later."""
        policy, line = self.policy, candidate.line
        other, after_s = self._lines.owing(line, policy.slots)
        if other is not None:
            lowest = other.find_lowest()
            if after_s <= ROUNDING_S and lowest.tokens >= policy.min_run_tokens:
                return lowest
            self.wake_s = min(self.wake_s, now + after_s) if after_s > ROUNDING_S else self.wake_s
        if not line.preemptible:
            return None
        lowest = line.find_lowest()
        outranked = candidate.priority > lowest.priority + policy.hysteresis
        return lowest if outranked and lowest.tokens >= policy.min_run_tokens else None

    def _must_gather(self, now: float) -> bool:
        """Return whether waiting steps are held though a slot is free. Sets `wake_s` to when that
        ends."""
        free = min(self.policy.slots - self.running, self.waiting)
        if (
            free <= 0
            or self._prefill_of is None
            or not self._best().preemptible
            or not self.policy.preempt
        ):
            return False
        left_s = (self.policy.gather * len(self._running) * self._pass_s - self._lost_s) / free
        if self._held_since_s is not None:
            left_s = min(left_s, self._held_since_s + MOST_HELD_S - now)
        if left_s <= ROUNDING_S:
            return False
        self._held_since_s = now if self._held_since_s is None else self._held_since_s
        self.wake_s = now + min(left_s, MOST_HELD_S)
        return True

    def _best(self) -> Entry:
        """Return the waiting step that is next; there must be one."""
        self._lines.look_anew()
        line = self._lines.next(self.policy.slots)
        assert line is not None, "a step waits"
        return line.waiting[0]

    def _prefill(self, entry: Entry) -> Prefill:
        return (
            NO_PREFILL
            if self._prefill_of is None or not entry.preemptible
            else self._prefill_of(entry.step_id)
        )

    def _is_long(self, prefill: Prefill) -> bool:
        return (
            self.policy.pace > 0.0 and prefill.steps >= LONG_PREFILL_STEPS and not prefill.returns
        )

    def _end_reading(self, entry: Entry) -> bool:
        """Note that the entry prefills no more. Returns whether others may have waited for that."""
        if entry.reads is None:
            return False
        self._being_read.discard(entry.reads)
        entry.reads = None
        return True

    def _must_rest(self, entry: Entry, now: float) -> bool:
        """Return whether a long prefill waits: for another one, or for decodes that rank higher or
        are of other jobs."""
        if self._reading is not None:
            return True
        before = (
            other.line is not entry.line or other.rank < entry.rank
            for other in self._running.values()
        )
        if now >= self._rest_until_s or not any(before):
            return False
        self.wake_s = min(self.wake_s, self._rest_until_s)
        return True

    def _evictions_for_pause(self) -> Iterator[Evict]:
        for entry in sorted(self._running.values(), key=RANK):
            yield self._evict(entry, "")

    def _evict(self, entry: Entry, by: str) -> Evict:
        entry.state = State.EVICTING
        self._stop(entry)
        return Evict(entry.step_id, by)

    def _stop(self, entry: Entry) -> None:
        if self._reading is not None and self._reading[0] == entry.step_id:
            self._reading = None
        if self._pass is not None and self._pass[0] == entry.step_id:
            self._pass = None
        self._end_reading(entry)
        if self._running.pop(entry.step_id, None) is not None:
            entry.line.stop(entry)

    @property
    def running(self) -> int:
        """Return how many steps hold a slot."""
        return len(self._entries) - self._lines.waiting

    @property
    def waiting(self) -> int:
        """Return how many steps hold no slot."""
        return self._lines.waiting

    def __contains__(self, step_id: str) -> bool:
        return step_id in self._entries
