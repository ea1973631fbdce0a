"""What the migrator service does with a move: brings the KV over the link and asks for the switch of the owner.

Owner of the transfers; it alone takes KV from one simulated engine to another.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from treadle_core.actions import CancelMigration, StartMigration
from treadle_core.events import Event, MoveAccepted, MoveEnded, SwitchRequested
from treadle_core.refusals import Refusal

from treadle_sim.cluster import Link
from treadle_sim.engine import SimEngine
from treadle_sim.events import Timeline
from treadle_sim.progress import Progress
from treadle_sim.transfers import Transfers


class Migrator:
    """`tell` hands an event to the controller; `dead` says of an engine, by its index, whether it is gone."""

    def __init__(
        self,
        link: Link,
        timeline: Timeline,
        trajectories: Mapping[str, tuple[int, Progress]],
        engines: Sequence[SimEngine],
        tell: Callable[[Event], None],
        dead: Callable[[int], bool],
    ) -> None:
        self._timeline = timeline
        self._trajectories = trajectories
        self._engines = engines
        self._engine_index = {engine.engine_id: index for index, engine in enumerate(engines)}
        self._tell = tell
        self._dead = dead
        self._transfers = Transfers(link, timeline, self._kv_bytes, self._arrived, self._gave_up)

    def start(self, move: StartMigration) -> None:
        """Takes a move."""
        migration_id = self._transfers.start(move)
        self._timeline.after(0.0, self._tell, MoveAccepted(move.trajectory_id, move.move_id, migration_id))

    def cancel(self, action: CancelMigration) -> None:
        """The step came back first."""
        self._transfers.cancel(action.migration_id)
        self._timeline.after(0.0, self._tell, MoveEnded(action.trajectory_id, action.migration_id, reason="cancelled"))

    def _kv_bytes(self, move: StartMigration) -> float:
        index, progress = self._trajectories[move.trajectory_id]
        source = self._engines[self._engine_index[move.source.engine_id]]
        return float(source.cache.peek(index) or progress.context_tokens) * move.source.kv_bytes_per_token

    def _gave_up(self, move: StartMigration, migration_id: str) -> None:
        self._tell(MoveEnded(move.trajectory_id, migration_id, move.move_id, reason="took too long"))

    def _arrived(self, move: StartMigration, migration_id: str) -> None:
        index, progress = self._trajectories[move.trajectory_id]
        source, target = (self._engine_index[end.engine_id] for end in (move.source, move.target))
        if self._dead(source) or self._dead(target):
            self._tell(MoveEnded(move.trajectory_id, migration_id, move.move_id, reason="an engine is gone"))
            return
        try:
            self._tell(SwitchRequested(migration_id, move.trajectory_id, move.expected_revision, move.target.engine_id))
        except Refusal as refusal:
            self._tell(MoveEnded(move.trajectory_id, migration_id, move.move_id, reason=refusal.reason))
            return
        self._engines[target].receive(index, self._engines[source].cache.take(index))
        progress.times.migrations += 1
        progress.engine = target
        self._tell(MoveEnded(move.trajectory_id, migration_id, move.move_id, moved=True))
