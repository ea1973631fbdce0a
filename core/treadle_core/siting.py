"""Which engine runs a trajectory: the placement rules, as choices among the engines that can.

Owns the round-robin count alone. A pinned engine always wins. PINNED places once and stays; LEAST_LOAD chooses at each
step; PLANNED opens where least predicted work is, goes where the plan says as long as no step has run (a move is free
then), and stays afterwards: later moves are migrations (`moves.py`). Any rule leaves an engine that is gone or
unhealthy.
"""

from collections.abc import Sequence

from treadle_core.engines import EngineRegistry
from treadle_core.model import EngineRecord, PlacementRule, TrajectoryRecord
from treadle_core.refusals import ContextTooLong
from treadle_core.remaining import remaining_tokens, token_s
from treadle_core.trajectories import TrajectoryTable
from treadle_core.tuning import Tuning


class Siting:
    """Chooses engines; keeps the place of the round-robin."""

    def __init__(self, engines: EngineRegistry, table: TrajectoryTable, tuning: Tuning) -> None:
        self._engines = engines
        self._table = table
        self._tuning = tuning
        self._pinned = 0

    def restore(self) -> None:
        """Goes on counting where the stored trajectories left off."""
        self._pinned = sum(
            1 for record in self._table if record.policy.placement is PlacementRule.PINNED and record.engine_id
        )

    def choose(
        self, record: TrajectoryRecord, *, target: str = "", avoid: str = "", context_tokens: int = 0
    ) -> EngineRecord | None:
        """The engine for the trajectory's next step, or None where none may take it now.

        `target` is the plan's wish; `avoid` an engine that has just lost a stream of this trajectory, taken only where
        there is no other. Raises ContextTooLong where engines exist and none takes `context_tokens`.
        """
        if record.pinned_engine_id:
            pinned = self._engines.get(record.pinned_engine_id)
            return (
                pinned
                if pinned is not None and _healthy(pinned) and _fits_or_raises([pinned], context_tokens)
                else None
            )
        able = [engine for engine in self._engines if _healthy(engine) and carries_tags(engine, record)]
        able = _fits_or_raises(able, context_tokens)
        able = [engine for engine in able if engine.spec.engine_id != avoid] or able
        if not able:
            return None
        rule = record.policy.placement
        if rule is PlacementRule.LEAST_LOAD:
            return min(_unsuspected(able), key=self._load)
        here = {engine.spec.engine_id: engine for engine in able}
        if rule is PlacementRule.PLANNED and record.ticket is None and target in here and here[target].usable:
            return here[target]
        if record.engine_id in here:
            return here[record.engine_id]
        if rule is PlacementRule.PINNED:
            engines = _unsuspected(able)
            self._pinned += 1
            return engines[(self._pinned - 1) % len(engines)]
        return min(_unsuspected(able), key=lambda engine: self._work(engine, record))

    def _load(self, engine: EngineRecord) -> tuple[float, float, str]:
        """Steps out there for each slot; the count of tickets is newer than any measured load."""
        tickets = self._table.tally(engine.spec.engine_id).live_tickets
        waiting = engine.load.waiting_steps if engine.load is not None else 0
        return (tickets / max(1, engine.spec.slot_limit), float(waiting), engine.spec.engine_id)

    def _work(self, engine: EngineRecord, record: TrajectoryRecord) -> tuple[float, int, str]:
        """Seconds of predicted work with this trajectory added, all slots decoding."""
        tally = self._table.tally(engine.spec.engine_id)
        tokens = tally.tokens + remaining_tokens(record, self._tuning)
        return (
            tokens * token_s(engine.spec) / max(1, engine.spec.slot_limit),
            tally.trajectories,
            engine.spec.engine_id,
        )


def carries_tags(engine: EngineRecord, record: TrajectoryRecord) -> bool:
    """Whether the engine has all the hardware tags that the trajectory asks for."""
    return set(record.hardware_tags) <= set(engine.spec.hardware_tags)


def _healthy(engine: EngineRecord) -> bool:
    return engine.load is None or engine.load.engine_healthy


def _unsuspected(able: Sequence[EngineRecord]) -> Sequence[EngineRecord]:
    return [engine for engine in able if engine.usable] or able


def _fits_or_raises(able: list[EngineRecord], context_tokens: int) -> list[EngineRecord]:
    """Those that take a context this long and one token more."""
    fitting = [
        engine
        for engine in able
        if not engine.spec.max_context_tokens or context_tokens < engine.spec.max_context_tokens
    ]
    if able and not fitting:
        longest = max(engine.spec.max_context_tokens for engine in able)
        raise ContextTooLong(
            "context_tokens",
            f"{context_tokens} tokens leave no room to generate: the longest context of an engine is {longest}",
        )
    return fitting
