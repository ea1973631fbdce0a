"""Table of waiting steps: requests for tickets that are not answered yet."""

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from treadle_core.events import StepRequested


class Place(NamedTuple):
    """A place in the queue of an engine; the smallest starts first."""

    negated_priority: float
    arrival: int
    trajectory_id: str


class WaitingSteps:
    """Requests for tickets that are not answered yet; those of first steps stand in one queue for
    each job and engine.

    A trajectory stands in at most one queue, by its priority at the time of `enqueue`, then by
    arrival. Nothing of it is stored: after a restart the clients request again. `requests`, by
    trajectory id, and `jobs`, the queues by the name of the job and then by engine, are read-only
    for others.
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
        """Return the given trajectories that wait, in the order of arrival."""
        return sorted(
            self.requests.keys() & trajectory_ids, key=lambda each: self.requests[each][0]
        )

    def remove(self, trajectory_id: str) -> None:
        """Remove a request, if it is here."""
        self.requests.pop(trajectory_id, None)
        self.dequeue(trajectory_id)

    def queued_engines(self) -> list[str]:
        """Return the ids of the engines that have a queue, in order."""
        return sorted({engine_id for queues in self.jobs.values() for engine_id in queues})

    def queues(self, job: str) -> Mapping[str, Sequence[Place]]:
        """Return the queues of a job, by engine: a view that changes with them."""
        return self.jobs.get(job, {})

    def queue(self, engine_id: str, job: str = "") -> Sequence[Place]:
        """Return a queue, next to start first: a view that changes with it."""
        return self.queues(job).get(engine_id, ())

    def waiting_for(self, engine_id: str) -> Iterator[str]:
        """Return the trajectories in the queues of an engine, job by job."""
        return (
            place.trajectory_id
            for queues in self.jobs.values()
            for place in queues.get(engine_id, ())
        )

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
