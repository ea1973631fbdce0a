"""The state of the controller, which the handlers of all events share. Each part keeps its own invariants."""

import heapq
import math
from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from treadle_core.events import StepRequested
from treadle_core.model import Policy, TrajectoryRecord
from treadle_core.planning.plans import Planner
from treadle_core.planning.siting import Siting
from treadle_core.ranking.priorities import Priorities, token_s
from treadle_core.steps.shares import Shares
from treadle_core.steps.transfers import MeasuredMoves
from treadle_core.tables.engines import EngineTable
from treadle_core.tables.histories import Histories
from treadle_core.tables.jobs import JobTable
from treadle_core.tables.open_waits import OpenWaits
from treadle_core.tables.trajectories import TrajectoryTable
from treadle_core.tuning import Tuning


class Deadlines:
    """One time for each id, in a heap, so that a tick looks only at ids whose time has come."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, str]] = []
        self._due_s: dict[str, float] = {}

    def set(self, name: str, due_s: float) -> None:
        """Set the time of an id, in place of an earlier one."""
        self._due_s[name] = due_s
        heapq.heappush(self._heap, (due_s, name))

    def take_due(self, now: float) -> list[str]:
        """Remove and return the ids whose time has come, earliest first."""
        names: list[str] = []
        while self._heap and self._heap[0][0] <= now:
            due_s, name = heapq.heappop(self._heap)
            if self._due_s.get(name) == due_s:  # otherwise it was set again later
                del self._due_s[name]
                names.append(name)
        return names


class Place(NamedTuple):
    """A place in the queue of an engine; the smallest starts first."""

    negated_priority: float
    arrival: int
    trajectory_id: str


class WaitingSteps:
    """Requests for tickets that are not answered yet; those of first steps stand in one queue for each job and engine.

    A trajectory stands in at most one queue, by its priority at the time of `enqueue`, then by arrival. Nothing of it
    is stored: after a restart the clients ask again. `requests`, by trajectory id, and `jobs`, the queues by the name
    of the job and then by engine, are for others to read only.
    """

    def __init__(self) -> None:
        self.requests: dict[str, tuple[int, StepRequested]] = {}
        self._arrivals = 0
        self.jobs: dict[str, dict[str, list[Place]]] = {}
        self._places: dict[str, tuple[str, str, Place]] = {}

    def __contains__(self, trajectory_id: str) -> bool:
        return trajectory_id in self.requests

    def add(self, event: StepRequested) -> bool:
        """Keep a request; a repeat replaces it and keeps its arrival. Returns whether it is new."""
        known = self.requests.get(event.trajectory_id)
        self._arrivals += known is None
        self.requests[event.trajectory_id] = (known[0] if known else self._arrivals, event)
        return known is None

    def request(self, trajectory_id: str) -> StepRequested:
        return self.requests[trajectory_id][1]

    def by_arrival(self, trajectory_ids: Iterable[str]) -> list[str]:
        """Those of the trajectories that wait, in the order of arrival."""
        return sorted(self.requests.keys() & trajectory_ids, key=lambda each: self.requests[each][0])

    def remove(self, trajectory_id: str) -> None:
        """Remove a request, if it is here."""
        self.requests.pop(trajectory_id, None)
        self.dequeue(trajectory_id)

    def queued_engines(self) -> list[str]:
        """Ids of the engines that have a queue, in order."""
        return sorted({engine_id for queues in self.jobs.values() for engine_id in queues})

    def queues(self, job: str) -> Mapping[str, Sequence[Place]]:
        """The queues of a job, by engine: a view that changes with them."""
        return self.jobs.get(job, {})

    def queue(self, engine_id: str, job: str = "") -> Sequence[Place]:
        """A queue, next to start first: a view that changes with it."""
        return self.queues(job).get(engine_id, ())

    def waiting_for(self, engine_id: str) -> Iterator[str]:
        """The trajectories in the queues of an engine, job by job."""
        return (place.trajectory_id for queues in self.jobs.values() for place in queues.get(engine_id, ()))

    def enqueue(self, engine_id: str, trajectory_id: str, priority: float, job: str = "") -> None:
        """Give a waiting trajectory this place instead of its former one."""
        place = Place(-priority, self.requests[trajectory_id][0], trajectory_id)
        if self._places.get(trajectory_id) == (job, engine_id, place):
            return
        self.dequeue(trajectory_id)
        self._places[trajectory_id] = (job, engine_id, place)
        insort(self.jobs.setdefault(job, {}).setdefault(engine_id, []), place)

    def dequeue(self, trajectory_id: str) -> None:
        """Take a trajectory out of its queue, if it is in one; its request stays."""
        found = self._places.pop(trajectory_id, None)
        if found is not None:
            job, engine_id, place = found
            queues = self.jobs[job]
            queue = queues[engine_id]
            del queue[bisect_left(queue, place)]
            if not queue:
                del queues[engine_id]
            if not queues:
                del self.jobs[job]


@dataclass
class State:
    """The parts. announcements: closed trajectories whose closing is to be published, and when. sweeps: when each
    trajectory is looked at: its ticket may have expired, it may be abandoned, or be forgotten. loads: when an engine
    that is behind is asked again. mean_tool_s: over all tool calls. mean_observed_tokens: what tools add to a context
    in a turn. measured_moves: how long moves took. restored_s: when this controller took over from an earlier one;
    until then, clients could not reach it."""

    tuning: Tuning
    policy: Policy
    jobs: JobTable
    engines: EngineTable
    table: TrajectoryTable
    siting: Siting
    planner: Planner
    shares: Shares
    priorities: Priorities
    mean_observed_tokens: float
    measured_moves: MeasuredMoves
    mean_tool_s: float = 0.0
    restored_s: float = -math.inf
    announcements: dict[str, float] = field(default_factory=dict)
    sweeps: Deadlines = field(default_factory=Deadlines)
    loads: Deadlines = field(default_factory=Deadlines)
    waiting: WaitingSteps = field(default_factory=WaitingSteps)
    open_waits: OpenWaits = field(default_factory=OpenWaits)
    histories: Histories = field(default_factory=Histories)

    @classmethod
    def new(cls, policy: Policy, tuning: Tuning, epoch_s: float, planner: type[Planner]) -> "State":
        engines = EngineTable(tuning.lease_ttl_s)
        table = TrajectoryTable(tuning)
        jobs = JobTable(tuning.job_lease_s, tuning.job_resume_s)
        return cls(
            tuning=tuning,
            policy=policy,
            jobs=jobs,
            engines=engines,
            table=table,
            siting=Siting(engines, table, tuning),
            planner=planner(engines, table, tuning),
            shares=Shares(engines, table, jobs),
            priorities=Priorities(tuning, epoch_s),
            mean_observed_tokens=tuning.expected_observed_tokens,
            measured_moves=MeasuredMoves(tuning.move_newest_weight),
        )

    def priority(self, record: TrajectoryRecord) -> float:
        """The priority of a trajectory's step on its present engine."""
        return self.priorities.priority(record, token_s(self.engines.spec(record.engine_id)))
