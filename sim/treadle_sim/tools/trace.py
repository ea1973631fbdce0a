"""What is replayed: trajectories that alternate between generation and actions, and what became of each action.

A trace is the same whoever runs it: seconds are those on a single unit, and what more units make of them follows from
the call's elasticity (eq. 1 of ARL-Tangram). Times are seconds from the batch's start.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from treadle_core.elastic.action import Demand, Elasticity


@dataclass(frozen=True, slots=True)
class Call:
    """One action, and the generation before it.

    cost: what it asks for while it runs. single_unit_s: how long it takes on one unit of `key`. profiled_s: what is
    known of that beforehand, None: nothing. elasticity None: more units do not help. service: the model it wants.
    follows_from: granted so many cores or more, it can be lent idle ones while it runs; 0: it cannot.
    """

    generation_s: float
    cost: Mapping[str, Demand]
    single_unit_s: float
    reward: bool = False
    key: str | None = None
    elasticity: Elasticity | None = None
    profiled_s: float | None = None
    service: str = ""
    follows_from: int = 0


@dataclass(frozen=True, slots=True)
class Trace:
    """One trajectory. task: the RL task it belongs to. memory_bytes: of its environment, as long as it lives."""

    trajectory_id: str
    task: str
    calls: tuple[Call, ...]
    memory_bytes: int = 0
    starts_s: float = 0.0

    @property
    def generation_s(self) -> float:
        return sum(call.generation_s for call in self.calls)

    @property
    def single_unit_s(self) -> float:
        """Of all its actions, one after the other on one unit each."""
        return sum(call.single_unit_s for call in self.calls)


@dataclass(frozen=True, slots=True)
class Asked:
    """An action that was submitted: the at-th call of a trace."""

    trace: Trace
    at: int
    arrived_s: float

    @property
    def call(self) -> Call:
        return self.trace.calls[self.at]

    @property
    def action_id(self) -> str:
        return f"{self.trace.trajectory_id}/{self.at}"


def ran_s(asked: Asked, units: int) -> float:
    """How long a call takes with so many units."""
    call = asked.call
    if call.elasticity is None:
        return call.single_unit_s
    return call.single_unit_s / (call.elasticity.efficiency(units) * units)


@dataclass(frozen=True, slots=True)
class Record:
    """What became of an action: it arrived, waited until `started_s`, took `overhead_s` of the system's own (restoring
    a model, writing limits) and then ran. tries: how often it was sent. failed: nothing came of it."""

    asked: Asked
    started_s: float
    overhead_s: float
    finished_s: float
    units: int
    tries: int = 1
    failed: bool = False

    @property
    def completion_s(self) -> float:
        """ACT: from submission to the end."""
        return self.finished_s - self.asked.arrived_s

    @property
    def queue_s(self) -> float:
        return self.started_s - self.asked.arrived_s

    @property
    def execution_s(self) -> float:
        return self.finished_s - self.started_s - self.overhead_s


@dataclass(slots=True)
class Decisions:
    """Real seconds that decisions took. felt_s: of each action, the decision that it waited for."""

    took_s: list[float] = field(default_factory=list)
    felt_s: list[float] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Replay:
    """A batch that was played: one record an action, and when each trajectory ended, in the order of the batch."""

    traces: tuple[Trace, ...]
    records: tuple[Record, ...]
    ends_s: Mapping[str, float]
    decisions: Decisions
