"""Grants of actions, ends of actions, and the interface of all resource managers (ARL-Tangram
§5)."""

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from treadle_core.refusals import CoreError
from treadle_core.tools.action import Action
from treadle_core.tools.arrangement import Chunk
from treadle_core.tools.decision import Executing, Start
from treadle_core.tools.pools import Pool

NEVER_S = float("inf")


class InvalidHoldingError(CoreError):
    """An action takes what it holds already or what is not free, or gives back what it does not
    hold."""


class End(enum.Enum):
    """Way in which an action ended for its provider: a tool that fails by itself has been
    served."""

    SERVED = "served"
    FAILED = "failed"
    REFUSED = "refused"  # too many requests
    ABANDONED = "abandoned"  # its caller is gone: no sign of the provider's state


@dataclass(frozen=True, slots=True)
class Ended:
    """End of an action. retry_after_s: seconds for which the provider requested a pause; None: it
    gave none."""

    end: End = End.SERVED
    retry_after_s: float | None = None


SERVED = Ended()


@dataclass(frozen=True, slots=True)
class CpuGrant:
    """Exclusive cores of one node, ascending, and the memory that the trajectory holds."""

    node_id: str
    cores: tuple[int, ...]
    memory_bytes: int


@dataclass(frozen=True, slots=True)
class Service:
    """Model served on `degree` GPUs of one chunk; each degree is a service of its own (§5.3).

    bytes_per_gpu: of each of its GPUs while it is resident, room to execute included.
    """

    name: str
    degree: int
    bytes_per_gpu: int


@dataclass(frozen=True, slots=True)
class Resident:
    """A service in the memory of a chunk of GPUs."""

    service: Service
    chunk: Chunk


@dataclass(frozen=True, slots=True)
class GpuGrant:
    """Chunk of GPUs, and what is to be done before the action executes: evict, then restore.

    restore_bytes: over all GPUs of the service; 0 where it is resident already. evicted: services
    whose GPU memory is to be released. service: None for an action that names none: it loads what
    it needs itself, and evicts all.
    """

    chunk: Chunk
    service: Service | None
    restore_bytes: int
    evicted: tuple[Resident, ...]

    @property
    def restore(self) -> bool:
        """Return whether the service has to be restored first."""
        return self.restore_bytes > 0


@dataclass(frozen=True, slots=True)
class Grant:
    """All that a started action holds. units: by dimension."""

    units: Mapping[str, int]
    cpu: CpuGrant | None = None
    gpu: GpuGrant | None = None


@dataclass(frozen=True, slots=True)
class Usage:
    """Use of one dimension. capacity: units in all. held: by actions or trajectories now. free:
    units that may be taken now; less than the rest while a provider refuses or its circuit breaker
    is open."""

    dimension: str
    capacity: int
    held: int
    free: int


def units_of(start: Start) -> dict[str, int]:
    """Return the units that a start takes, by dimension."""
    action = start.action
    sized = action.sized_dimension
    return {
        dimension: start.units if dimension == sized else demand.least
        for dimension, demand in action.cost.items()
    }


class Manager(Protocol):
    """Owner of some dimensions. Invariants: never more units are held than there are; an action
    gives back once."""

    @property
    def dimensions(self) -> tuple[str, ...]: ...

    def check(self, action: Action) -> None:
        """Raise InvalidActionError for an action whose demand this manager could never meet."""

    def pools(self, now_s: float) -> Sequence[Pool]:
        """Return the free resources for a decision. Capacities are the same at all times."""

    def executing(self, now_s: float) -> Sequence[Executing]:
        """Return the units that running actions will give back, and when."""

    def take(
        self, start: Start, units: Mapping[str, int], now_s: float, expected_s: float
    ) -> CpuGrant | GpuGrant | None:
        """Take the units of a start; returns None where any units will do. units: of this manager's
        dimensions, one at least.

        Raises InvalidHoldingError where they are not free, and changes nothing then.
        """

    def give_back(self, action_id: str, ended: Ended, now_s: float) -> None:
        """Give back the units of an action that has ended. Raises KeyError for one that holds
        nothing here."""

    def forget(self, trajectory_id: str) -> None:
        """Free what the trajectory holds beyond its actions. An unknown trajectory is no error."""

    def next_change_s(self, now_s: float) -> float:
        """Return when more becomes free although no action ends; NEVER_S: at no time."""
        return NEVER_S

    def usage(self, now_s: float) -> Sequence[Usage]: ...
