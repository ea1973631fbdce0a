"""Lines of the jobs in front of one engine: whose step is next, and which job has to give a slot
back (ADR 0039).

A job has a line while a step of it waits or holds a slot. Its share of the slots is its weight over
the weights of all lines. A job that has less than its share goes before one that does not; then the
job that was served least, in seconds of a slot for its weight. A line whose steps begin to wait
goes on from its present service: it gets nothing for the time in which it had none. With one line
there is nothing to share, and it is simply the waiting steps, best rank first.
"""

import enum
from bisect import bisect_left, insort
from collections.abc import Hashable
from dataclasses import dataclass, field
from operator import attrgetter

from treadle_core.fair_share import FairShare

# Seconds of the whole engine by which a job was served less than its share before it evicts a step
# of another job. An eviction costs about two decode steps, so two jobs that take turns on one slot
# lose a few percent to it.
FAIR_LAG_S = 2.0


class State(enum.Enum):
    """State of a step. EVICTING: it holds its slot until the engine has aborted it."""

    WAITING = enum.auto()
    RUNNING = enum.auto()
    EVICTING = enum.auto()


@dataclass(slots=True)
class Entry:
    """A step in the queue. tokens: since its admission. reads: `Prefill.first` of its prefill,
    while it runs."""

    step_id: str
    priority: float
    arrival: int
    preemptible: bool
    line: "Line"
    state: State = State.WAITING
    tokens: int = 0
    reads: Hashable = None

    @property
    def rank(self) -> tuple[float, int]:
        """Return the rank within the job; the smaller one runs first."""
        return (-self.priority, self.arrival)


RANK = attrgetter("rank")


@dataclass(slots=True, eq=False)
class Line:
    """Steps of one job; `steps` is their number. waiting: best rank first. running: those that run
    and are not being evicted; `preemptible` are some of them, `lowest` ranks last of these, None
    where it must be searched.

    passed, granted: waiting steps that the present decision has looked at, and slots that they will
    get.
    """

    job: str
    weight: float
    steps: int = 0
    waiting: list[Entry] = field(default_factory=list)
    running: int = 0
    preemptible: dict[str, Entry] = field(default_factory=dict)
    lowest: Entry | None = None
    passed: int = 0
    granted: int = 0

    def start(self, entry: Entry) -> None:
        """Count a step that gets a slot."""
        self.running += 1
        if entry.preemptible:
            self.preemptible[entry.step_id] = entry
        self.compare_lowest(entry)

    def stop(self, entry: Entry) -> None:
        """Remove a step that gives its slot back, or is being evicted."""
        self.running -= 1
        self.preemptible.pop(entry.step_id, None)
        if entry is self.lowest:
            self.lowest = None

    def find_lowest(self) -> Entry:
        """Return the preemptible step that ranks last; there must be one."""
        self.lowest = self.lowest or max(self.preemptible.values(), key=RANK)
        return self.lowest

    def compare_lowest(self, entry: Entry) -> None:
        """Keep `lowest` right after a step started or got another priority."""
        if (
            self.lowest is not None
            and entry.step_id in self.preemptible
            and entry.rank > self.lowest.rank
        ):
            self.lowest = entry


class JobLines:
    """Lines of all jobs of one engine. waiting: steps in all lines that hold no slot."""

    def __init__(self) -> None:
        self.waiting = 0
        self._lines: dict[str, Line] = {}
        self._share = FairShare()
        # job, slots and weight, as the last decision left them
        self._held: list[tuple[str, int, float]] = []
        self._decided_s = 0.0

    def enter(self, job: str, weight: float) -> Line:
        """Count one more step of a job, and return its line; the newest weight counts."""
        line = self._lines.get(job) or self._lines.setdefault(job, Line(job, weight))
        line.weight = weight
        line.steps += 1
        return line

    def leave(self, line: Line) -> None:
        """Remove a step that has left for good."""
        line.steps -= 1
        if not line.steps:
            del self._lines[line.job]
            self._share.end_waiting(line.job)

    def put(self, entry: Entry) -> None:
        """Add a step to the waiting ones."""
        insort(entry.line.waiting, entry, key=RANK)
        self.waiting += 1

    def take(self, entry: Entry) -> None:
        """Remove a step from the waiting ones. No two ranks are equal, since no two arrivals
        are."""
        waiting = entry.line.waiting
        del waiting[bisect_left(waiting, entry.rank, key=RANK)]
        self.waiting -= 1

    def charge(self, now: float) -> None:
        """Begin a decision: charge the slots that each job has had since the last one, and note
        which jobs wait."""
        took_s, self._decided_s = now - self._decided_s, now
        if len(self._lines) < 2 and not self._held:
            return
        for job, slots, weight in self._held:
            self._share.charge(job, slots * took_s, weight)
        for line in self._lines.values():
            if line.waiting:
                self._share.begin_waiting(line.job)
            else:
                self._share.end_waiting(line.job)

    def note_held(self) -> None:
        """End a decision: note which slots each job has from now on."""
        if len(self._lines) > 1 or (self._held and len(self._share) > 1):
            self._held = [(line.job, line.running, line.weight) for line in self._lines.values()]
        elif self._held:
            self._held = []

    def look_anew(self) -> None:
        """Look at the waiting steps from the first one on: none is passed yet."""
        for line in self._lines.values():
            line.passed = line.granted = 0

    def next(self, slots: int) -> Line | None:
        """Return the line that has the next waiting step that is not passed; None where all are
        passed."""
        lines = [line for line in self._lines.values() if line.passed < len(line.waiting)]
        if len(lines) < 2:  # as with one job always
            return lines[0] if lines else None
        tag, surplus = self._share.tag, self._surplus
        return min(
            lines,
            key=lambda line: (
                surplus(line, slots) >= 0.0,
                tag(line.job),
                line.waiting[line.passed].rank,
            ),
        )

    def owing(self, line: Line, slots: int) -> tuple[Line | None, float]:
        """Return the job that has to give one of its slots to `line`, None for none, and in how
        many seconds."""
        if len(self._lines) < 2 or self._surplus(line, slots) >= 0.0:
            return None, 0.0
        above = [
            each
            for each in self._lines.values()
            if each.preemptible and self._surplus(each, slots) > 0.0
        ]
        if not above:
            return None, 0.0
        other = max(above, key=lambda each: self._surplus(each, slots) / each.weight)
        # to seconds of the whole engine
        scale = sum(each.weight for each in self._lines.values()) / slots
        lag_s = scale * (self._share.tag(other.job) - self._share.tag(line.job))
        rate = scale * (other.running / other.weight - line.running / line.weight)
        if lag_s >= FAIR_LAG_S:
            return other, 0.0
        return (other, (FAIR_LAG_S - lag_s) / rate) if rate > 0.0 else (None, 0.0)

    def _surplus(self, line: Line, slots: int) -> float:
        """Return how many slots a job has, or will get, above its share."""
        weights = sum(each.weight for each in self._lines.values())
        return line.running + line.granted - slots * line.weight / weights
