"""Share one resource among jobs by weight: start-time fair queueing (Goyal, Vin and Cheng, SIGCOMM
1996).

Each job has a tag: the service that it was given, divided by its weight. Whoever waits with the
smallest tag is next. A job that begins to wait gets at least the smallest tag of those that wait
already, so that an idle job saves nothing; what a job got above its share is remembered as long as
any job waits. While two jobs both wait, their tags differ by at most the largest piece of service
of each, divided by its weight (theorem 1 there).

Used for slots of an engine (`engine_queue.preemptive_queue`), for slots and KV of the mesh
(`tables.jobs`), and for the pool that computes the rewards of all jobs (RollArt §4, principle 3),
where a job that submits ten thousand at once must not delay a job that submits ten. `FairOrder`
does the same for the actions of tools.

Pure state machines: no clock, no task. All service has one unit, which the caller chooses.
"""

import math
from collections import deque
from typing import Generic, TypeVar

T = TypeVar("T")


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
