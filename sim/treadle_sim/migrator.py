"""Simulated migrator: moves KV between engines over the link and requests from the controller the
change of the owner.

An engine takes part in one transfer at a time, and the longest trajectory goes first (Heddle §5.3);
the order comes from `treadle_core.transfers`, as in the migrator service. Only this class
takes KV from one engine to another.
"""

from collections.abc import Callable, Mapping, Sequence

from treadle_core.actions import CancelMigration, StartMigration
from treadle_core.events import Event, MoveAccepted, MoveEnded, SwitchRequested
from treadle_core.refusals import Refusal
from treadle_core.transfers import Transfer, moves_by_storage, next_transfers

from treadle_sim.cluster import Link, Timeline, engine_index
from treadle_sim.engine import SimEngine
from treadle_sim.outcome import Progress


class Migrator:
    """Migrator of one rollout. trajectories: by id. `send` sends an event to the controller;
    `is_down` returns whether an engine has failed."""

    def __init__(
        self,
        link: Link,
        timeline: Timeline,
        trajectories: Mapping[str, Progress],
        engines: Sequence[SimEngine],
        send: Callable[[Event], None],
        is_down: Callable[[int], bool],
    ) -> None:
        self._link = link
        self._timeline = timeline
        self._trajectories = trajectories
        self._engines = engines
        self._send = send
        self._is_down = is_down
        # by migration id, with when it was requested
        self._moves: dict[str, tuple[StartMigration, float]] = {}
        self._running: set[str] = set()
        self._count = 0

    def start(self, move: StartMigration) -> None:
        """Accept a move; its transfer starts when both engines are free."""
        self._count += 1
        migration_id = f"m{self._count}"
        self._moves[migration_id] = move, self._timeline.now
        self._timeline.after(move.give_up_after_s, self._expire, migration_id)
        self._timeline.after(0.0, self._start_transfers)
        self._timeline.after(
            0.0, self._send, MoveAccepted(move.trajectory_id, move.move_id, migration_id)
        )

    def cancel(self, action: CancelMigration) -> None:
        """End a move because the trajectory's next step arrived first."""
        self._remove(action.migration_id)
        self._timeline.after(
            0.0,
            self._send,
            MoveEnded(action.trajectory_id, action.migration_id, reason="cancelled"),
        )

    def _start_transfers(self) -> None:
        running = [self._moves[migration_id][0] for migration_id in self._running]
        busy = {end.engine_id for move in running for end in (move.source, move.target)}
        waiting = [
            Transfer(
                migration_id,
                move.source.engine_id,
                move.target.engine_id,
                move.remaining_tokens,
                requested_s,
            )
            for migration_id, (move, requested_s) in self._moves.items()
            if migration_id not in self._running
        ]
        for transfer in next_transfers(waiting, busy):
            self._running.add(transfer.transfer_id)
            move, _ = self._moves[transfer.transfer_id]
            seconds = self._link.fixed_s + self._kv_bytes(move) / self._link.bytes_per_s
            self._timeline.after(seconds, self._arrive, transfer.transfer_id)

    def _kv_bytes(self, move: StartMigration) -> float:
        """Return the bytes to move; 0 where the target prefills the context again, which its next
        step does."""
        if not moves_by_storage(move.source, move.target):
            return 0.0
        progress = self._trajectories[move.trajectory_id]
        source = self._engines[engine_index(move.source.engine_id)]
        return (
            float(source.cache.peek(progress.index) or progress.context_tokens)
            * move.source.kv_bytes_per_token
        )

    def _remove(self, migration_id: str) -> StartMigration | None:
        """Remove a move and return it; None if it has already ended."""
        move, _ = self._moves.pop(migration_id, (None, 0.0))
        if migration_id in self._running:
            self._running.remove(migration_id)
            self._timeline.after(0.0, self._start_transfers)
        return move

    def _expire(self, migration_id: str) -> None:
        if move := self._remove(migration_id):
            self._send(
                MoveEnded(move.trajectory_id, migration_id, move.move_id, reason="took too long")
            )

    def _arrive(self, migration_id: str) -> None:
        """Switch the owner, as the KV is at the target, if the controller agrees."""
        move = self._remove(migration_id)
        if move is None:
            return
        progress = self._trajectories[move.trajectory_id]
        source, target = (engine_index(end.engine_id) for end in (move.source, move.target))
        if self._is_down(source) or self._is_down(target):
            self._send(
                MoveEnded(
                    move.trajectory_id, migration_id, move.move_id, reason="an engine is gone"
                )
            )
            return
        try:
            self._send(
                SwitchRequested(
                    migration_id, move.trajectory_id, move.expected_revision, move.target.engine_id
                )
            )
        except Refusal as refusal:
            self._send(
                MoveEnded(move.trajectory_id, migration_id, move.move_id, reason=refusal.reason)
            )
            return
        cache, work = self._engines[source].cache, progress.work
        kept = cache.peek(progress.index)
        cache.drop(progress.index)
        if kept and moves_by_storage(move.source, move.target):
            self._engines[target].cache.put(
                progress.index, work.prompt_id, work.prompt_tokens, kept
            )
        progress.times.migrations += 1
        progress.engine = target
        self._send(MoveEnded(move.trajectory_id, migration_id, move.move_id, moved=True))
