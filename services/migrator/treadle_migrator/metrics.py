"""Metrics of the migrator (docs/metrics.md)."""

from collections.abc import Callable

from treadle_runtime.telemetry import Metrics

from treadle_migrator.migrations import Migration, State


class Meters:
    """Instruments of the migrator. count_open: returns how many moves wait or run."""

    def __init__(self, metrics: Metrics, count_open: Callable[[], int]) -> None:
        self._move_s = metrics.seconds(
            "move", "From the start of a move to its end, by how it ended"
        )
        self._moves = metrics.total("moves", "move", "Moves that have ended, by how and why")
        what = "Tokens of the prefixes that moved, by the way that their KV took"
        self._tokens = metrics.total("tokens", "token", what)
        metrics.gauge("open_moves", "move", "Moves that wait or run", count_open)

    def record_end(self, migration: Migration) -> None:
        """Count a move that has ended."""
        ended = {"state": migration.state.name.lower()}
        self._moves(1, {**ended, "reason": migration.failure_reason.lower() or "none"})
        if migration.started_at_s is not None and migration.ended_at_s is not None:
            self._move_s(migration.ended_at_s - migration.started_at_s, ended)
        if migration.state is State.DONE and migration.prefix is not None:
            self._tokens(migration.prefix.tokens, {"path": migration.prefix.path.value})
