"""The table of open waits: since when a requested step has had no ticket, and what it waits for.

A wait begins with the first request, also with one that is refused as no engine can run the step, and ends with the
ticket or the closing: repeats of a request go on with it. What it waits for may change; each second counts for one
cause. Nothing of it is stored: after a restart a wait begins with the next request, and what the client waited before
that is in the client's own measure.
"""

import enum
from collections.abc import Iterable
from typing import NamedTuple

from treadle_core.model import TrajectoryRecord, copy_with


class Cause(enum.Enum):
    """What a request waits for. HELD: room, a slot or an engine. MOVE: the trajectory's KV. WEIGHTS: an engine that
    loads. The value is the field of TrajectoryRecord that it counts in."""

    HELD = "held_s"
    MOVE = "move_s"
    WEIGHTS = "weights_s"


class _Wait(NamedTuple):
    """held_s, move_s, weights_s: until `since_s`, when `cause` became what it waits for."""

    began_s: float
    since_s: float
    cause: Cause
    spent_s: dict[Cause, float]


class OpenWaits:
    """Waits by trajectory."""

    def __init__(self) -> None:
        self._waits: dict[str, _Wait] = {}
        self._loading: set[str] = set()  # engines whose queue waits for WEIGHTS

    def note(self, trajectory_id: str, cause: Cause, now: float) -> None:
        """A request waits for `cause` from now on, if it did not before."""
        wait = self._waits.get(trajectory_id)
        if wait is None:
            self._waits[trajectory_id] = _Wait(now, now, cause, {})
        elif wait.cause is not cause:
            self._waits[trajectory_id] = _Wait(wait.began_s, now, cause, _spent_until(wait, now))

    def note_queue(self, engine_id: str, trajectory_ids: Iterable[str], loads: bool, now: float) -> None:
        """An engine begins or ends to load weights, for which its queue of first steps waits; else nothing changes."""
        if loads is (engine_id in self._loading):
            return
        (self._loading.add if loads else self._loading.discard)(engine_id)
        for trajectory_id in trajectory_ids:
            self.note(trajectory_id, Cause.WEIGHTS if loads else Cause.HELD, now)

    def count(self, record: TrajectoryRecord, now: float) -> TrajectoryRecord:
        """The record with its open wait, if it has one, counted until now."""
        wait = self._waits.get(record.trajectory_id)
        if wait is None:
            return record
        spent = _spent_until(wait, now)
        return copy_with(record, **{cause.value: getattr(record, cause.value) + s for cause, s in spent.items()})

    def waited_s(self, trajectory_id: str, now: float) -> float:
        """Seconds of the open wait so far; 0 without one."""
        wait = self._waits.get(trajectory_id)
        return now - wait.began_s if wait is not None else 0.0

    def end(self, trajectory_id: str) -> None:
        """Forget a wait, if there is one."""
        self._waits.pop(trajectory_id, None)


def _spent_until(wait: _Wait, now: float) -> dict[Cause, float]:
    return {**wait.spent_s, wait.cause: wait.spent_s.get(wait.cause, 0.0) + now - wait.since_s}
