"""What the migrator service does with a move: brings the KV over the link and asks for the switch of the owner.

Owner of the transfers; it alone takes KV from one simulated engine to another.

Migrations on the simulated link: longest first, an engine in one transfer at a time (Heddle §5.3).

The order is the core's (`treadle_core.steps.transfers`), which the migrator service uses too. Owner of what
waits and runs; the driver hears of each end."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from treadle_core.actions import CancelMigration, StartMigration
from treadle_core.events import Event, MoveAccepted, MoveEnded, SwitchRequested
from treadle_core.refusals import Refusal
from treadle_core.steps.transfers import Transfer, next_transfers

from treadle_sim.cluster import Link
from treadle_sim.engine import SimEngine
from treadle_sim.outcome import Progress
from treadle_sim.timeline import Timeline

Arrived = Callable[[StartMigration, str], None]
GaveUp = Callable[[StartMigration, str], None]


class Transfers:
    """`arrived` is called when the KV is at the target, `gave_up` when a transfer ran out of the time it is worth."""

    def __init__(
        self,
        link: Link,
        timeline: Timeline,
        kv_bytes: Callable[[StartMigration], float],
        arrived: Arrived,
        gave_up: GaveUp,
    ) -> None:
        self._link = link
        self._timeline = timeline
        self._kv_bytes = kv_bytes
        self._arrived = arrived
        self._gave_up = gave_up
        self._moves: dict[str, StartMigration] = {}
        self._asked_s: dict[str, float] = {}
        self._running: set[str] = set()
        self._count = 0

    def start(self, move: StartMigration) -> str:
        """Takes a move; its migration id."""
        self._count += 1
        migration_id = f"m{self._count}"
        self._moves[migration_id] = move
        self._asked_s[migration_id] = self._timeline.now
        self._timeline.after(move.give_up_after_s, self._expired, migration_id)
        self._timeline.after(0.0, self._next)
        return migration_id

    def cancel(self, migration_id: str) -> None:
        """The step came back first."""
        self._end(migration_id)

    def _next(self) -> None:
        busy = {
            engine
            for migration_id in self._running
            for engine in (self._moves[migration_id].source.engine_id, self._moves[migration_id].target.engine_id)
        }
        waiting = [
            Transfer(
                migration_id,
                move.source.engine_id,
                move.target.engine_id,
                move.remaining_tokens,
                self._asked_s[migration_id],
            )
            for migration_id, move in self._moves.items()
            if migration_id not in self._running
        ]
        for transfer in next_transfers(waiting, busy):
            self._running.add(transfer.transfer_id)
            seconds = self._link.fixed_s + self._kv_bytes(self._moves[transfer.transfer_id]) / self._link.bytes_per_s
            self._timeline.after(seconds, self._done, transfer.transfer_id)

    def _done(self, migration_id: str) -> None:
        move = self._end(migration_id)
        if move is not None:
            self._arrived(move, migration_id)

    def _expired(self, migration_id: str) -> None:
        move = self._end(migration_id)
        if move is not None:
            self._gave_up(move, migration_id)

    def _end(self, migration_id: str) -> StartMigration | None:
        move = self._moves.pop(migration_id, None)
        if move is not None:
            del self._asked_s[migration_id]
            if migration_id in self._running:
                self._running.remove(migration_id)
                self._timeline.after(0.0, self._next)
        return move


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
