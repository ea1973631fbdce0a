"""The nouns of elastic scheduling: an action, its vector of costs, its elasticity, its duration (ARL-Tangram §4.1).

A dimension is a name, such as those below or `api_quota:example.org` (the paper: each website's quota is a type of its
own). Amounts are whole units of it: cores, bytes, GPUs, bytes/s, requests. All are frozen values; `action_input` says
what is refused.

What an action may say of itself, checked once when it is submitted, so that no kernel meets a NaN or an empty set.

Invariant: an error's `field` is the path within the action, e.g. `cost[cpu_cores].units`."""

from __future__ import annotations

import enum
import itertools
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Protocol

from treadle_core.refusals import CoreError

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
    on its GPUs, each number of which is a service of its own (§5.3).
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
        """Whether more units are known to help: elasticity and duration are both known (Algorithm 1, line 5)."""
        known = self.duration.knowledge is not Knowledge.UNKNOWN
        return known and self.key is not None and self.elasticity is not None


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


MOST_UNITS = 1 << 53  # beyond it floats skip whole numbers; eight petabytes
MOST_CHOICES = 1_024  # numbers of units that one action may get; a row of the queue's tables is that wide
MOST_SECONDS = 1e9  # thirty years


class InvalidActionError(CoreError):
    """An action with a figure that is none, or whose parts do not belong together."""


class UnknownDimensionError(InvalidActionError):
    """An action asks for a dimension that no pool has."""


class NeverFitsError(InvalidActionError):
    """The least an action asks for is more than a pool has when it is empty."""


def check_action(action: Action, dimensions: Collection[str]) -> None:
    """Raises InvalidActionError or UnknownDimensionError naming the first bad field and what would be right."""
    if not action.cost:
        raise InvalidActionError("cost", "is empty; name at least one dimension")
    for dimension, demand in action.cost.items():
        if dimension not in dimensions:
            known = ", ".join(sorted(dimensions))
            raise UnknownDimensionError(f"cost[{dimension}]", f"no pool has it; use one of {known}")
        _check_demand(f"cost[{dimension}]", demand)
    if action.duration.knowledge is not Knowledge.UNKNOWN:
        _check_number("duration.single_unit_s", action.duration.single_unit_s, MOST_SECONDS)
    if action.key is None:
        if action.elasticity is not None:
            raise InvalidActionError("key", "is missing; name the dimension that the elasticity is of")
        return
    if action.key not in action.cost:
        raise InvalidActionError("key", f"{action.key!r} is not in cost; give it a demand there or leave the key out")
    _check_key(action, action.cost[action.key])


def check_fits(action: Action, capacities: Mapping[str, int]) -> None:
    """Raises NeverFitsError; capacities: by dimension, the most that one action can get of it."""
    for dimension, demand in action.cost.items():
        if demand.least > capacities[dimension]:
            raise NeverFitsError(
                f"cost[{dimension}]",
                f"at least {demand.least} asked for, {capacities[dimension]} in all: never fits; ask for less",
            )


def _check_key(action: Action, demand: Demand) -> None:
    field = f"cost[{action.key}]"
    if isinstance(demand, Range) and demand.most - demand.least >= MOST_CHOICES:
        raise InvalidActionError(field, f"more than {MOST_CHOICES} numbers of units; use a coarser unit or a UnitSet")
    if isinstance(action.elasticity, Measured):
        at = [units for units, _ in action.elasticity.points]
        if not at or at != sorted(set(at)):
            raise InvalidActionError("elasticity.points", "must be at one or more ascending numbers of units")
    if action.elasticity is None:
        return
    for units in key_units(demand):
        efficiency = action.elasticity.efficiency(units)
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
            if not units:
                raise InvalidActionError(f"{field}.units", "is empty; name at least one number of units")
            if len(units) > MOST_CHOICES:
                raise InvalidActionError(f"{field}.units", f"must be {MOST_CHOICES} at most, are {len(units)}")
            for index, choice in enumerate(units):
                _check_units(f"{field}.units[{index}]", choice)
            if list(units) != sorted(set(units)):
                raise InvalidActionError(f"{field}.units", "must ascend without repeats")


def _check_units(field: str, units: float) -> None:
    """Whole numbers are asked for, but a caller without types may hand over a float."""
    _check_number(field, units, MOST_UNITS)
    if units < 1 or units != int(units):
        raise InvalidActionError(
            field, f"must be a whole number, 1 at least, is {units}; leave out what is not asked for"
        )


def _check_number(field: str, value: float, most: float) -> None:
    if math.isnan(value) or not 0 <= value <= most:
        raise InvalidActionError(field, f"must be a number from 0 to {most:g}, is {value}")
