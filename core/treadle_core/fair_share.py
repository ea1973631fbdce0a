"""Share one resource among jobs by weight: start-time fair queueing (Goyal, Vin and Cheng, SIGCOMM
1996); and the lines of the jobs in front of one engine.

Each job has a tag: the service that it was given, divided by its weight. Whoever waits with the
smallest tag is next. A job that begins to wait gets at least the smallest tag of those that wait
already, so that an idle job saves nothing; what a job got above its share is remembered as long as
any job waits. While two jobs both wait, their tags differ by at most the largest piece of service
of each, divided by its weight (theorem 1 there).

Used for slots of an engine (`JobLines`), for slots and KV of the mesh (`tables.jobs`), and for the
pool that computes the rewards of all jobs (RollArt §4, principle 3), where a job that submits ten
thousand at once must not delay a job that submits ten. `FairOrder` does the same for the actions of
tools.

`JobLines` decides whose step is next on an engine, and which job has to give a slot back (ADR
0039). A job has a line while a step of it waits or holds a slot. Its share of the slots is its
weight over the weights of all lines. A job that has less than its share goes before one that does
not; then the job that was served least, in seconds of a slot for its weight. A line whose steps
begin to wait goes on from its present service: it gets nothing for the time in which it had none.
With one line there is nothing to share, and it is simply the waiting steps, best rank first.

Pure state machines: no clock, no task. All service has one unit, which the caller chooses.
"""

import enum
import math
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Generic, TypeVar

T = TypeVar("T")

# Seconds of the whole engine by which a job was served less than its share before it evicts a step
# of another job. An eviction costs about two decode steps, so two jobs that take turns on one slot
# lose a few percent to it.
FAIR_LAG_S = 2.0


class FairShare:
    """Tags of the jobs that share one resource."""

    def __init__(self) -> None:
        self._tags: dict[str, float] = {}
        self._waiting: set[str] = set()

    def __len__(self) -> int:
        """Return how many jobs wait, or got more than those that wait."""
        return len(self._tags)

    def begin_waiting(self, job: str) -> None:
        """Note that the job waits from now on; no change for one that does already."""
        if job not in self._waiting:
            self._tags[job] = self.tag(job)
            self._waiting.add(job)

    def end_waiting(self, job: str) -> None:
        """Note that the job does not wait any more. When no job waits all tags are forgotten."""
        self._waiting.discard(job)
        if not self._waiting:
            self._tags.clear()

    def charge(self, job: str, service: float, weight: float = 1.0) -> None:
        """Add service that the job was given; below 0 for what it was charged and did not get."""
        if not self._waiting:
            return
        self._tags[job] = self.tag(job) + service / weight
        if len(self._tags) > len(self._waiting):
            least = min(self._tags[other] for other in self._waiting)
            self._tags = {
                other: tag
                for other, tag in self._tags.items()
                if other in self._waiting or tag > least
            }

    def tag(self, job: str) -> float:
        """Return the job's service over its weight, as compared with other jobs; the smallest is
        next."""
        tags = self._tags
        if job in self._waiting:
            return tags[job]
        return max(
            tags.get(job, -math.inf), min((tags[other] for other in self._waiting), default=0.0)
        )


class FairQueue(Generic[T]):
    """Waiting work of several jobs of equal weight: first come, first served within a job. All
    costs have one unit; the caller uses expected seconds of a slot, and reports with `settle` what
    a piece of work really cost."""

    def __init__(self) -> None:
        self._share = FairShare()
        self._lines: dict[str, deque[tuple[float, T]]] = {}
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def add(self, job: str, item: T, cost: float) -> None:
        """Put `item` behind its job's others. Raises ValueError unless cost is finite and >= 0."""
        if not (cost >= 0 and math.isfinite(cost)):
            raise ValueError(f"cost must be >= 0 and finite, is {cost}")
        self._share.begin_waiting(job)
        self._lines.setdefault(job, deque()).append((cost, item))
        self._count += 1

    def take(self) -> tuple[str, T, float] | None:
        """Remove and return the next (job, item, cost), and charge the job; None where nothing
        waits."""
        if not self._lines:
            return None
        job = min(self._lines, key=self._share.tag)
        line = self._lines[job]
        cost, item = line.popleft()
        self._count -= 1
        self._share.charge(job, cost)
        if not line:
            del self._lines[job]
            self._share.end_waiting(job)
        return job, item, cost

    def settle(self, job: str, charged: float, actual: float) -> None:
        """Correct the charge of work of `job`, for which `charged` was taken, to the `actual`
        cost."""
        self._share.charge(job, actual - charged)


class FairOrder:
    """Places in a queue that is sorted by them, so that jobs of equal weight share the resource:
    the start tags of the paper. Service is in seconds, expected when a place is given and known at
    the end.

    A place is a number; smaller is earlier, and each place is larger than the job's earlier
    ones.
    """

    def __init__(self) -> None:
        self._now_us = 0
        self._next_us: dict[str, int] = {}

    def __len__(self) -> int:
        """Return how many jobs have places behind the one that began last."""
        return len(self._next_us)

    def place(self, job: str, service_s: float) -> int:
        """Return a place for work of a job that should take `service_s`."""
        place = max(self._now_us, self._next_us.get(job, 0))
        self._next_us[job] = place + 1 + round(1e6 * service_s)
        return place

    def begin(self, place: int) -> None:
        """Note that the work at a place begins."""
        if place > self._now_us:
            self._now_us = place
            self._next_us = {
                job: next_us for job, next_us in self._next_us.items() if next_us > place
            }

    def settle(self, job: str, service_s: float, took_s: float) -> None:
        """Correct the service of work for which `service_s` was expected to `took_s`, 0 where the
        work was given up."""
        if job in self._next_us:
            self._next_us[job] += round(1e6 * (took_s - service_s))


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
