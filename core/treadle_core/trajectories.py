"""The table of trajectories, with the sums over each engine that placement asks for all the time.

Owns every TrajectoryRecord. Invariant: the tallies equal what a walk over the open records would give; only `put` and
`forget` write.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from treadle_core.model import TrajectoryRecord
from treadle_core.refusals import TrajectoryNotFound
from treadle_core.remaining import remaining_tokens
from treadle_core.tuning import Tuning


@dataclass(slots=True)
class Tally:
    """Of one engine: open trajectories, live tickets, predicted tokens left."""

    trajectories: int = 0
    live_tickets: int = 0
    tokens: float = 0.0


class TrajectoryTable:
    """Trajectories by id, in the order of opening."""

    def __init__(self, tuning: Tuning) -> None:
        self._tuning = tuning
        self._records: dict[str, TrajectoryRecord] = {}
        self._open: dict[str, None] = {}
        self._on: dict[str, dict[str, None]] = {}
        self._tallies: dict[str, Tally] = {}
        self._counted: dict[str, float] = {}  # the tokens that each open trajectory stands for in its engine's tally

    def __len__(self) -> int:
        return len(self._records)

    def __iter__(self) -> Iterator[TrajectoryRecord]:
        return iter(list(self._records.values()))

    def get(self, trajectory_id: str) -> TrajectoryRecord | None:
        """The trajectory, or None."""
        return self._records.get(trajectory_id)

    def require(self, trajectory_id: str) -> TrajectoryRecord:
        """The trajectory. Raises TrajectoryNotFound."""
        record = self._records.get(trajectory_id)
        if record is None:
            raise TrajectoryNotFound(
                f"no trajectory {trajectory_id}: never opened here, or closed long ago", trajectory_id=trajectory_id
            )
        return record

    def open_records(self) -> list[TrajectoryRecord]:
        """Those that are open, in the order of opening."""
        return [self._records[trajectory_id] for trajectory_id in self._open]

    def on(self, engine_id: str) -> list[TrajectoryRecord]:
        """The open ones whose engine this is."""
        return [self._records[trajectory_id] for trajectory_id in self._on.get(engine_id, ())]

    def open_count(self) -> int:
        """How many are open."""
        return len(self._open)

    def tally(self, engine_id: str) -> Tally:
        """The sums of an engine; zeros where it has none."""
        return self._tallies.get(engine_id, Tally())

    def put(self, record: TrajectoryRecord) -> None:
        """Makes this the record of its trajectory."""
        old = self._records.get(record.trajectory_id)
        if old is not None:
            self._discount(old)
        self._records[record.trajectory_id] = record
        if record.is_open:
            self._open[record.trajectory_id] = None
            self._count(record)
        else:
            self._open.pop(record.trajectory_id, None)

    def forget(self, trajectory_id: str) -> None:
        """Removes a trajectory."""
        record = self._records.pop(trajectory_id, None)
        if record is not None:
            self._discount(record)
            self._open.pop(trajectory_id, None)

    def _count(self, record: TrajectoryRecord) -> None:
        tally = self._tallies.setdefault(record.engine_id, Tally())
        tokens = remaining_tokens(record, self._tuning)
        self._counted[record.trajectory_id] = tokens
        self._on.setdefault(record.engine_id, {})[record.trajectory_id] = None
        tally.trajectories += 1
        tally.tokens += tokens
        if record.live_ticket is not None:
            tally.live_tickets += 1

    def _discount(self, record: TrajectoryRecord) -> None:
        tokens = self._counted.pop(record.trajectory_id, None)
        if tokens is None:
            return
        del self._on[record.engine_id][record.trajectory_id]
        tally = self._tallies[record.engine_id]
        tally.trajectories -= 1
        tally.tokens -= tokens
        if record.live_ticket is not None:
            tally.live_tickets -= 1
        if tally.trajectories == 0:
            del self._tallies[record.engine_id]  # and with it the rounding of its sums
            del self._on[record.engine_id]
