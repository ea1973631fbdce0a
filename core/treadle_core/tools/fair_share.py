"""Share one pool equally among many jobs: deficit round robin (Shreedhar and Varghese, SIGCOMM 1995).

Rewards of all jobs run in one pool (RollArt §4, principle 3): a job that submits ten thousand at once must not delay a
job that submits ten. Jobs take turns; each turn lets a job spend `quantum` more, and an unspent rest stays with the job
while it has waiting work. Within a job, work starts in the order of submission.

A pure state machine: no clock, no task. All costs have one unit; the caller uses expected seconds of a slot, and
reports with `settle` what a piece of work really cost.

Invariants: while two jobs both wait, their shares differ by at most `quantum` plus twice the largest cost; an idle job
saves nothing; a debt (work that cost more than expected) is remembered as long as any job waits.
"""

import math
from collections import OrderedDict, deque
from dataclasses import dataclass, field
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass
class _Line(Generic[T]):
    """What one job has waiting, as (cost, item); how much it may still spend."""

    waiting: deque[tuple[float, T]] = field(default_factory=deque)
    deficit: float = 0.0


class FairShare(Generic[T]):
    """The jobs, their waiting work and their shares. quantum > 0: about the cost of one piece of work."""

    def __init__(self, quantum: float) -> None:
        if not (quantum > 0 and math.isfinite(quantum)):
            raise ValueError(f"quantum must be > 0 and finite, is {quantum}")
        self._quantum = quantum
        self._lines: OrderedDict[str, _Line[T]] = OrderedDict()  # the first has its turn
        self._begun = False  # whether the first line's turn has been paid in
        self._debts: dict[str, float] = {}  # of jobs that have nothing waiting; <= 0
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def add(self, job: str, item: T, cost: float) -> None:
        """Put `item` behind its job's others. Raises ValueError unless cost is finite and >= 0."""
        if not (cost >= 0 and math.isfinite(cost)):
            raise ValueError(f"cost must be >= 0 and finite, is {cost}")
        line = self._lines.get(job)
        if line is None:
            line = self._lines[job] = _Line(deficit=self._debts.pop(job, 0.0))
        line.waiting.append((cost, item))
        self._count += 1

    def take(self) -> tuple[str, T, float] | None:
        """The next (job, item, cost), and charge it; None where nothing waits."""
        if not self._lines:
            return None
        turns_without = 0
        while True:
            job, line = next(iter(self._lines.items()))
            if not self._begun:
                line.deficit += self._quantum
                self._begun = True
            cost, item = line.waiting[0]
            if cost <= line.deficit:
                line.deficit -= cost
                line.waiting.popleft()
                self._count -= 1
                if not line.waiting:
                    self._leave(job, line)
                return job, item, cost
            self._lines.move_to_end(job)
            self._begun = False
            turns_without += 1
            if turns_without == len(self._lines):
                self._skip_rounds()
                turns_without = 0

    def settle(self, job: str, charged: float, actual: float) -> None:
        """Work of `job` for which `charged` was taken has really cost `actual`."""
        line = self._lines.get(job)
        if line is not None:
            line.deficit += charged - actual
        elif self._lines:
            self._debts[job] = min(0.0, self._debts.get(job, 0.0) + charged - actual)

    def _skip_rounds(self) -> None:
        """Pay in at once for the rounds in which nobody could go."""
        rounds = min(math.ceil((line.waiting[0][0] - line.deficit) / self._quantum) for line in self._lines.values())
        rounds = max(rounds, 1)  # a cost that is next to nothing can be 0 quanta
        for line in self._lines.values():
            line.deficit += (rounds - 1) * self._quantum

    def _leave(self, job: str, line: _Line[T]) -> None:
        del self._lines[job]
        self._begun = False
        if not self._lines:
            self._debts.clear()  # nobody waited for anybody
        elif line.deficit < 0:
            self._debts[job] = line.deficit
