"""Ledgers of the time of a trajectory: the parts that the scheduler, engines and clients measure,
and their sum."""

import enum
from dataclasses import dataclass, fields
from typing import NamedTuple


class Cause(enum.Enum):
    """Cause for which a requested step without a ticket waits. HELD: room, a slot or an engine.
    MOVE: its trajectory's KV. WEIGHTS: an engine that loads. The value is the field of
    TrajectoryRecord that counts it."""

    HELD = "held_s"
    MOVE = "move_s"
    WEIGHTS = "weights_s"


class StepTimes(NamedTuple):  # which costs less than a dataclass, at each step
    """Seconds of steps at engines, each second in one part: waiting before it first ran, prefill,
    decode, waiting since an eviction, waiting while the engine was paused for other weights."""

    queue_s: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    preempted_s: float = 0.0
    weights_s: float = 0.0

    def plus(self, other: "StepTimes", times: float = 1.0) -> "StepTimes":
        """Return the sum of both, the other one `times` times."""
        if other is NO_TIMES:
            return self
        return StepTimes(
            self.queue_s + times * other.queue_s,
            self.prefill_s + times * other.prefill_s,
            self.decode_s + times * other.decode_s,
            self.preempted_s + times * other.preempted_s,
            self.weights_s + times * other.weights_s,
        )

    @property
    def total_s(self) -> float:
        return sum(self)


NO_TIMES = StepTimes()


class ClientTimes(NamedTuple):
    """Times of a trajectory that its client has measured by its own clock, from the opening until
    its last report.

    tool_s: between steps, while a tool ran. control_s: its calls without the services' time for
    them, and its own work between steps. lost: times of steps that it had to replace, as it saw
    them, since no engine accounts for these. since_opening_s: how long the trajectory had been open
    when these were measured; 0 where that is not known.
    """

    tool_s: float = 0.0
    control_s: float = 0.0
    lost: StepTimes = NO_TIMES
    since_opening_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Ledger:
    """Seconds of a trajectory by where they went, from its opening on; each second is in one part
    (ADR 0040).

    held_s: a requested step waited in the scheduler for room or for an engine. queue_s, prefill_s,
    decode_s, preempted_s: as in StepTimes. move_s: a step waited until its KV had moved. tool_s,
    control_s: as in ClientTimes. weights_s: a step waited while an engine loaded weights, in the
    scheduler or at the engine.
    """

    held_s: float = 0.0
    queue_s: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    preempted_s: float = 0.0
    move_s: float = 0.0
    tool_s: float = 0.0
    weights_s: float = 0.0
    control_s: float = 0.0

    @property
    def total_s(self) -> float:
        """Return the sum of all parts."""
        total_s: float = sum(getattr(self, name) for name in LEDGER_PARTS)
        return total_s


# in the order in which a step goes through them
LEDGER_PARTS = tuple(part.name for part in fields(Ledger))
