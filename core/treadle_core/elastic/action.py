"""The nouns of elastic scheduling: an action, its vector of costs, its elasticity, its duration (ARL-Tangram §4.1).

A dimension is a name, such as those below or `api_quota:example.org` (the paper: each website's quota is a type of its
own). Amounts are whole units of it: cores, bytes, GPUs, bytes/s, requests. All are frozen values; `action_input` says
what is refused.
"""

from __future__ import annotations

import enum
import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

CPU_CORES = "cpu_cores"
MEMORY_BYTES = "memory_bytes"
GPUS = "gpus"
GPU_MEMORY_BYTES = "gpu_memory_bytes"
BANDWIDTH_BYTES_PER_S = "bandwidth_bytes_per_s"


@dataclass(frozen=True, slots=True)
class Fixed:
    """Exactly so many units."""

    units: int

    @property
    def least(self) -> int:
        return self.units


@dataclass(frozen=True, slots=True)
class Range:
    """Any number of units from `least` to `most`."""

    least: int
    most: int


@dataclass(frozen=True, slots=True)
class UnitSet:
    """One of these numbers of units, ascending, such as 1, 2, 4, 8."""

    units: tuple[int, ...]

    @property
    def least(self) -> int:
        return self.units[0]


Demand = Fixed | Range | UnitSet


class Elasticity(Protocol):
    """E(m) of eq. 1: how well m units of the key dimension are used, in (0, 1]."""

    def efficiency(self, units: int) -> float: ...


@dataclass(frozen=True, slots=True)
class Amdahl:
    """A share of the work, in [0, 1], runs on one unit whatever the others do: E(m) = 1 / (1 + share * (m - 1)).

    Its durations are convex in m, which makes arranging them cheap (`marginal`).
    """

    serial_share: float

    def efficiency(self, units: int) -> float:
        return 1.0 / (1.0 + self.serial_share * (units - 1))


@dataclass(frozen=True, slots=True)
class Measured:
    """E by units, at the ascending numbers of units at which it was measured; linear between, level outside."""

    points: tuple[tuple[int, float], ...]

    def efficiency(self, units: int) -> float:
        if units <= self.points[0][0]:
            return self.points[0][1]
        for (low, low_e), (high, high_e) in itertools.pairwise(self.points):
            if units <= high:
                return low_e + (high_e - low_e) * (units - low) / (high - low)
        return self.points[-1][1]


class Knowledge(enum.Enum):
    """Where a duration is from. Only PROFILED and LEARNED ones are scaled."""

    PROFILED = "profiled"
    LEARNED = "learned"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Duration:
    """T of eq. 1: seconds on a single unit, a mean where learned; 0 where unknown, which is not read."""

    knowledge: Knowledge
    single_unit_s: float = 0.0


UNKNOWN_DURATION = Duration(Knowledge.UNKNOWN)


@dataclass(frozen=True, slots=True)
class Action:
    """One invocation of a tool or a reward.

    arrival: its place in the order of submission, any ascending integers. cost: the demand by dimension. key: the
    one dimension that its duration depends on; None: none does. node_id: the CPU node that the trajectory lives on;
    None: this is its first action, and its memory is the whole trajectory's (§5.2). service: the model that it needs
    on its GPUs, each number of which is a service of its own (§5.3). follows_from: granted so many cores or more, it
    spreads over whatever it has while it runs, so that idle ones can be lent to it (`managers.loans`); 0: it does not.
    """

    action_id: str
    trajectory_id: str
    arrival: int
    cost: Mapping[str, Demand]
    duration: Duration = UNKNOWN_DURATION
    key: str | None = None
    elasticity: Elasticity | None = None
    node_id: str | None = None
    service: str | None = None
    follows_from: int = 0

    @property
    def scalable(self) -> bool:
        """Whether more units are known to help: elasticity and duration are both known (Algorithm 1, line 5)."""
        known = self.duration.knowledge is not Knowledge.UNKNOWN
        return known and self.key is not None and self.elasticity is not None

    def follows(self, cores: int) -> bool:
        """Whether cores can be lent to it once it was granted so many."""
        return self.scalable and 0 < self.follows_from <= cores


def key_units(demand: Demand) -> tuple[int, ...]:
    """The numbers of units that a demand allows, ascending."""
    match demand:
        case Fixed(units):
            return (units,)
        case Range(least, most):
            return tuple(range(least, most + 1))
        case UnitSet(units):
            return units


def seconds_at(action: Action, units: int) -> float:
    """T / (E(m) * m), eq. 1. Of an action whose elasticity is not known T itself, whatever it gets."""
    if action.elasticity is None:
        return action.duration.single_unit_s
    return action.duration.single_unit_s / (action.elasticity.efficiency(units) * units)
