"""An action, what it asks for, how it scales and how long it takes (ARL-Tangram §4.1).

A dimension is a name such as `cpu_cores` or `api_quota:example.org`: each website's quota is a dimension of its own.
Amounts are whole units of a dimension: cores, bytes, GPUs, requests. All values are frozen. `check_action` refuses a
bad one when it is submitted, so that no solver meets a NaN or an empty set.
"""

from __future__ import annotations

import enum
import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from treadle_core.refusals import CoreError

CPU_CORES = "cpu_cores"
MEMORY_BYTES = "memory_bytes"
GPUS = "gpus"

MOST_UNITS = 1 << 53  # beyond it floats skip whole numbers; eight petabytes
MOST_CHOICES = 1_024  # numbers of units that one action may get; a row of the queue's tables is that wide
MOST_SECONDS = 1e9  # thirty years


@dataclass(frozen=True, slots=True)
class Fixed:
    """Exactly `units` units."""

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
    """A serial share of the work, in [0, 1], runs on one unit only: E(m) = 1 / (1 + share * (m - 1)).

    Durations are convex in m, so `arrangement.MarginalGains` arranges them exactly.
    """

    serial_share: float

    def efficiency(self, units: int) -> float:
        return 1.0 / (1.0 + self.serial_share * (units - 1))


@dataclass(frozen=True, slots=True)
class Measured:
    """(units, E) at ascending numbers of units; linear between the points, constant outside."""

    points: tuple[tuple[int, float], ...]

    def efficiency(self, units: int) -> float:
        if units <= self.points[0][0]:
            return self.points[0][1]
        for (low, low_e), (high, high_e) in itertools.pairwise(self.points):
            if units <= high:
                return low_e + (high_e - low_e) * (units - low) / (high - low)
        return self.points[-1][1]


class Knowledge(enum.Enum):
    """Where a duration comes from. Only actions with PROFILED and LEARNED durations are scaled."""

    PROFILED = "profiled"
    LEARNED = "learned"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Duration:
    """T of eq. 1: seconds on one unit; a mean where learned, not read where unknown."""

    knowledge: Knowledge
    single_unit_s: float = 0.0


UNKNOWN_DURATION = Duration(Knowledge.UNKNOWN)


@dataclass(frozen=True, slots=True)
class Action:
    """One call of a tool or a reward.

    arrival: place in the order of submission, any ascending integers. cost: the demand by dimension. key: the dimension
    that the duration depends on, if any. node_id: the CPU node that the trajectory lives on; None: this is its first
    action, and the memory it asks for is the whole trajectory's (§5.2). service: the model that it needs on its GPUs;
    each number of GPUs is a service of its own (§5.3).
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

    @property
    def scalable(self) -> bool:
        """Whether elasticity and duration are both known (Algorithm 1, line 5)."""
        known = self.duration.knowledge is not Knowledge.UNKNOWN
        return known and self.key is not None and self.elasticity is not None

    @property
    def sized_dimension(self) -> str:
        """The dimension that a decision gives more than the least of: the key, or the first one in `cost`."""
        return self.key or next(iter(self.cost))


def key_units(demand: Demand) -> tuple[int, ...]:
    """Return the numbers of units that a demand allows, ascending."""
    match demand:
        case Fixed(units):
            return (units,)
        case Range(least, most):
            return tuple(range(least, most + 1))
        case UnitSet(units):
            return units


def seconds_at(action: Action, units: int) -> float:
    """T / (E(m) * m), eq. 1; T itself where the elasticity is not known."""
    if action.elasticity is None:
        return action.duration.single_unit_s
    return action.duration.single_unit_s / (action.elasticity.efficiency(units) * units)


class InvalidActionError(CoreError):
    """An action with a bad figure, or with parts that do not belong together. `field` is the path within the action,
    e.g. `cost[cpu_cores].units`."""


def check_action(action: Action, capacities: Mapping[str, int]) -> None:
    """Raise InvalidActionError for the first bad field; the message says what would be right.

    capacities: by dimension, the most that one action can get of it.
    """
    if not action.cost:
        raise InvalidActionError("cost", "is empty; name at least one dimension")
    for dimension, demand in action.cost.items():
        if dimension not in capacities:
            known = ", ".join(sorted(capacities))
            raise InvalidActionError(f"cost[{dimension}]", f"no pool has it; use one of {known}")
        _check_demand(f"cost[{dimension}]", demand)
        if demand.least > capacities[dimension]:
            raise InvalidActionError(
                f"cost[{dimension}]",
                f"at least {demand.least} asked for, {capacities[dimension]} in all: never fits; ask for less",
            )
    if action.duration.knowledge is not Knowledge.UNKNOWN:
        _check_number("duration.single_unit_s", action.duration.single_unit_s, MOST_SECONDS)
    if action.key is None:
        if action.elasticity is not None:
            raise InvalidActionError("key", "is missing; name the dimension that the elasticity is of")
        return
    if action.key not in action.cost:
        raise InvalidActionError("key", f"{action.key!r} is not in cost; give it a demand there or leave the key out")
    _check_elasticity(action.elasticity, f"cost[{action.key}]", action.cost[action.key])


def _check_elasticity(elasticity: Elasticity | None, field: str, demand: Demand) -> None:
    if isinstance(demand, Range) and demand.most - demand.least >= MOST_CHOICES:
        raise InvalidActionError(field, f"more than {MOST_CHOICES} numbers of units; use a coarser unit or a UnitSet")
    if elasticity is None:
        return
    if isinstance(elasticity, Measured):
        at = [units for units, _ in elasticity.points]
        if not at or at != sorted(set(at)):
            raise InvalidActionError("elasticity.points", "must be at one or more ascending numbers of units")
    for units in key_units(demand):
        efficiency = elasticity.efficiency(units)
        if not 0.0 < efficiency <= 1.0:  # NaN fails too
            raise InvalidActionError("elasticity", f"E({units}) must be in (0, 1], is {efficiency}")


def _check_demand(field: str, demand: Demand) -> None:
    match demand:
        case Fixed(units):
            _check_units(f"{field}.units", units)
        case Range(least, most):
            _check_units(f"{field}.least", least)
            _check_units(f"{field}.most", most)
            if most < least:
                raise InvalidActionError(f"{field}.most", f"must be at least {least}, is {most}")
        case UnitSet(units):
            if not 1 <= len(units) <= MOST_CHOICES:
                raise InvalidActionError(f"{field}.units", f"must be 1 to {MOST_CHOICES} numbers, are {len(units)}")
            for index, choice in enumerate(units):
                _check_units(f"{field}.units[{index}]", choice)
            if list(units) != sorted(set(units)):
                raise InvalidActionError(f"{field}.units", "must ascend without repeats")


def _check_units(field: str, units: float) -> None:
    """A caller without types may hand over a float."""
    _check_number(field, units, MOST_UNITS)
    if units < 1 or units != int(units):
        raise InvalidActionError(
            field, f"must be a whole number, 1 at least, is {units}; leave out what is not asked for"
        )


def _check_number(field: str, value: float, most: float) -> None:
    if math.isnan(value) or not 0 <= value <= most:
        raise InvalidActionError(field, f"must be a number from 0 to {most:g}, is {value}")
