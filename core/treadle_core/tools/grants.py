"""The nouns of the managers: what an action gets, how it ended, and how full a dimension is. All frozen values.

What a kind of resource does for the scheduler, whatever it is (ARL-Tangram §5: one interface, three managers)."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from treadle_core.refusals import CoreError
from treadle_core.tools.action import Action
from treadle_core.tools.chunks import Chunk
from treadle_core.tools.completions import Executing
from treadle_core.tools.decision import Start
from treadle_core.tools.pools import Pool


class InvalidHoldingError(CoreError):
    """An action that takes what it holds already or what is not free, or gives back what it does not hold."""


class End(enum.Enum):
    """How an action ended, as far as who served it is concerned: a tool that fails by itself has been served."""

    SERVED = "served"
    FAILED = "failed"
    REFUSED = "refused"  # too many requests
    ABANDONED = "abandoned"  # nobody waited any more: says nothing of who served


@dataclass(frozen=True, slots=True)
class Ended:
    """retry_after_s: seconds from the end until which it was refused; None: it was not said."""

    end: End = End.SERVED
    retry_after_s: float | None = None


SERVED = Ended()


@dataclass(frozen=True, slots=True)
class CpuGrant:
    """Exclusive cores of one node, ascending, the NUMA nodes they are of, and the memory held for the trajectory."""

    node_id: str
    cores: tuple[int, ...]
    numa_nodes: tuple[int, ...]
    memory_bytes: int


@dataclass(frozen=True, slots=True)
class Service:
    """A model served on `degree` GPUs of one chunk: another degree is another service (§5.3).

    bytes_per_gpu: what it takes of each of its GPUs while it is there, room to execute included.
    """

    name: str
    degree: int
    bytes_per_gpu: int


@dataclass(frozen=True, slots=True)
class Resident:
    """A service on a chunk of GPUs."""

    service: Service
    chunk: Chunk


@dataclass(frozen=True, slots=True)
class GpuGrant:
    """A chunk, and what is to be done before the action executes: first evict, then restore.

    restore_bytes: over all GPUs of the service; 0 where it is there already. evicted: services whose GPU memory is to
    be released. service: None for an action that names none: it loads what it needs by itself, evicting all.
    """

    chunk: Chunk
    service: Service | None
    restore_bytes: int
    evicted: tuple[Resident, ...]

    @property
    def restore(self) -> bool:
        """Whether the service has to be restored first."""
        return self.restore_bytes > 0


@dataclass(frozen=True, slots=True)
class Grant:
    """All that a started action holds. units: by dimension."""

    units: Mapping[str, int]
    cpu: CpuGrant | None = None
    gpu: GpuGrant | None = None


@dataclass(frozen=True, slots=True)
class Usage:
    """capacity: units in all. held: by actions (or trajectories) now. free: what may start now; less than the rest
    where a provider refuses or is not trusted."""

    dimension: str
    capacity: int
    held: int
    free: int


def held_units(start: Start) -> dict[str, int]:
    """What a start takes, by dimension: `units` of the key, or of the first it names, the least of the others."""
    action = start.action
    varying = action.key or next(iter(action.cost))
    return {
        dimension: start.units if dimension == varying else demand.least for dimension, demand in action.cost.items()
    }


NEVER_S = float("inf")


class Manager(Protocol):
    """Owner of some dimensions. Invariants: never more units are held than there are; what is taken by an action is
    given back once."""

    @property
    def dimensions(self) -> tuple[str, ...]: ...

    def check(self, action: Action) -> None:
        """Raises InvalidActionError for an action that could not be given what it asks of this manager."""
        ...

    def pools(self, now_s: float) -> Sequence[Pool]:
        """What is free, as `elastic.decide` asks it. Their capacities are the same at all times."""
        ...

    def executing(self, now_s: float) -> Sequence[Executing]:
        """What comes back by itself: of running actions, and when."""
        ...

    def take(
        self, start: Start, units: Mapping[str, int], now_s: float, expected_s: float
    ) -> CpuGrant | GpuGrant | None:
        """The units that a start gets; None: any will do. units: of this manager's dimensions, one at least.

        Raises InvalidHoldingError, and changes nothing then.
        """
        ...

    def give_back(self, action_id: str, ended: Ended, now_s: float) -> None:
        """The action has ended. Raises InvalidHoldingError for one that holds nothing here."""
        ...

    def forget(self, trajectory_id: str) -> None:
        """The trajectory has ended: what is held for it beyond its actions is free. An unknown one is no error."""
        ...

    def next_change_s(self, now_s: float) -> float:
        """When, on the clock of `now_s`, more is free although no action ends; NEVER_S: at no time."""
        ...

    def usage(self, now_s: float) -> Sequence[Usage]:
        """Each dimension's figures."""
        ...
