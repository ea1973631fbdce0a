"""Processor sharing on one machine: what runs shares the cores equally, and nobody gets more than it can use.

Each running job can use so many cores; where they all want more than there are, a level is found up to which each is
served (equal shares, as control groups of equal weight get them). Jobs of one demand go at one speed, so a class keeps
one virtual clock and a heap of the times on it at which its jobs are done.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field
from typing import Generic, TypeVar

Job = TypeVar("Job")
NEVER_S = float("inf")


@dataclass(slots=True)
class _Class(Generic[Job]):
    """Jobs that can use as many cores. speed: of each, 1 when it has all it can use. clock_s: seconds at full speed."""

    clock_s: float = 0.0
    speed: float = 1.0
    jobs: list[tuple[float, int, Job]] = field(default_factory=list)


class SharedCores(Generic[Job]):
    """See the module. Times must not go back."""

    def __init__(self, cores: int) -> None:
        self._cores = cores
        self._classes: dict[int, _Class[Job]] = {}
        self._now_s = 0.0
        self._count = 0

    def add(self, job: Job, cores: int, full_speed_s: float, now_s: float) -> None:
        """A job that takes `full_speed_s` on as many cores as it can use."""
        self._pass(now_s)
        group = self._classes.setdefault(cores, _Class())
        self._count += 1
        heapq.heappush(group.jobs, (group.clock_s + full_speed_s, self._count, job))
        self._share()

    def next_s(self) -> float:
        """When the first job ends if none comes before; infinite where none runs."""
        return min((self._ends_s(group) for group in self._classes.values() if group.jobs), default=NEVER_S)

    def take_next(self) -> Job:
        """The job that `next_s` is about, taken out at that time."""
        group = min((group for group in self._classes.values() if group.jobs), key=self._ends_s)
        self._pass(max(self._ends_s(group), self._now_s))
        done_s, _, job = heapq.heappop(group.jobs)
        group.clock_s = max(group.clock_s, done_s)  # rounding
        self._share()
        return job

    def _ends_s(self, group: _Class[Job]) -> float:
        return self._now_s + (group.jobs[0][0] - group.clock_s) / group.speed

    def _pass(self, now_s: float) -> None:
        for group in self._classes.values():
            group.clock_s += (now_s - self._now_s) * group.speed
        self._now_s = now_s

    def _share(self) -> None:
        left = float(self._cores)
        jobs = sum(len(group.jobs) for group in self._classes.values())
        for cores, group in sorted(self._classes.items()):
            if not group.jobs:
                continue
            level = min(float(cores), left / jobs)
            group.speed = level / cores
            left -= level * len(group.jobs)
            jobs -= len(group.jobs)
