"""Lanes: what waits for one kind of resource, shared out equally among jobs, a fixed number at a time.

Owns: the fair share and the slots of each lane. Nothing here runs anything: `starts` says what is to be started.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from treadle_core.fair_share import FairShare

QUANTUM_S = 0.1  # of a slot: cheap functions go a few at a time, judges one by one
UNKNOWN_S = 1.0  # what a function is taken to cost before it has run
RECENT_SHARE = 0.2  # of the newest time in the learned one


@dataclass(frozen=True)
class Start:
    """Give `reward_id` of `job` a slot of `lane`; `charged_s` was taken from its job's share."""

    lane: str
    job: str
    function: str
    reward_id: str
    charged_s: float


class _Lane:
    def __init__(self, slots: int) -> None:
        self.free = slots
        self.share: FairShare[tuple[str, str]] = FairShare(QUANTUM_S)


class Lanes:
    """See the module. slots: of each lane."""

    def __init__(self, slots: dict[str, int]) -> None:
        self._lanes = {name: _Lane(count) for name, count in slots.items()}
        self._learned_s: dict[str, float] = {}

    def __len__(self) -> int:
        """How many wait."""
        return sum(len(lane.share) for lane in self._lanes.values())

    def add(self, lane: str, job: str, function: str, reward_id: str) -> None:
        """One more waits."""
        self._lanes[lane].share.add(job, (function, reward_id), self._learned_s.get(function, UNKNOWN_S))

    def starts(self) -> Iterator[Start]:
        """What is to be started now; each takes a slot until `ended`."""
        for name, lane in self._lanes.items():
            while lane.free and (taken := lane.share.take()) is not None:
                lane.free -= 1
                job, (function, reward_id), charged_s = taken
                yield Start(name, job, function, reward_id, charged_s)

    def ended(self, start: Start, busy_s: float) -> None:
        """Give the slot back. busy_s: how long it was used; 0.0 where it was not."""
        lane = self._lanes[start.lane]
        lane.free += 1
        lane.share.settle(start.job, start.charged_s, busy_s)
        if busy_s > 0:
            known = self._learned_s.setdefault(start.function, busy_s)
            self._learned_s[start.function] = known + RECENT_SHARE * (busy_s - known)
