"""Action: what it requires, how it scales and how long it takes (ARL-Tangram §4.1).

A dimension is a name such as `cpu_cores` or `api_quota:example.org`: each website's quota is a
dimension of its own. Amounts are whole units of a dimension: cores, bytes, GPUs, requests. All
values are frozen. `check_action` refuses a bad one when it is submitted, so that no solver meets a
NaN or an empty set.
"""

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from treadle_core.refusals import CoreError

CPU_CORES = "cpu_cores"
MEMORY_BYTES = "memory_bytes"
GPUS = "gpus"

MOST_UNITS = 1 << 53  # beyond it floats skip whole numbers; eight petabytes
MOST_CHOICES = (
    1_024  # numbers of units that one action may get; a row of the queue's tables is that wide
)
MOST_SECONDS = 1e9  # thirty years


@dataclass(frozen=True, slots=True)
class Fixed:
    """Demand for exactly `units` units."""

    units: int

    @property
    def least(self) -> int:
        return self.units


@dataclass(frozen=True, slots=True)
class Range:
    """Demand for any number of units from `least` to `most`."""

    least: int
    most: int


@dataclass(frozen=True, slots=True)
class UnitSet:
    """Demand for one of these numbers of units, ascending, such as 1, 2, 4, 8."""

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
    """Elasticity by Amdahl's law: a serial share of the work, in [0, 1], runs on one unit only:
    E(m) = 1 / (1 + share * (m - 1)).

    Durations are convex in m, so `arrangement.marginal_gains` arranges them exactly.
    """

    serial_share: float

    def efficiency(self, units: int) -> float:
        return 1.0 / (1.0 + self.serial_share * (units - 1))


@dataclass(frozen=True, slots=True)
class Measured:
    """Measured elasticity: (units, E) at ascending numbers of units; linear between the points,
    constant outside."""

    points: tuple[tuple[int, float], ...]

    def efficiency(self, units: int) -> float:
        if units <= self.points[0][0]:
            return self.points[0][1]
        for (low, low_e), (high, high_e) in itertools.pairwise(self.points):
            if units <= high:
                return low_e + (high_e - low_e) * (units - low) / (high - low)
        return self.points[-1][1]


@dataclass(frozen=True, slots=True)
class Action:
    """One call of a tool or a reward.

    arrival: place in the order of submission, any ascending integers. cost: the demand by
    dimension. single_unit_s: T of eq. 1, seconds on one unit, profiled or a mean; None: not known.
    key: the dimension that the duration depends on, if any. node_id: the CPU node that the
    trajectory lives on; None: this is its first action, and the memory in `cost` is the whole
    trajectory's (§5.2). service: the model that it needs on its GPUs; each number of GPUs is a
    service of its own (§5.3).
    """

    action_id: str
    trajectory_id: str
    arrival: int
    cost: Mapping[str, Demand]
    single_unit_s: float | None = None
    key: str | None = None
    elasticity: Elasticity | None = None
    node_id: str | None = None
    service: str | None = None

    @property
    def scalable(self) -> bool:
        """Return whether elasticity and duration are both known (Algorithm 1, line 5)."""
        return (
            self.single_unit_s is not None and self.key is not None and self.elasticity is not None
        )

    @property
    def sized_dimension(self) -> str:
        """Return the dimension of which a decision may give more than the least: the key, or the
        first one in `cost`."""
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


def seconds_at(action: Action, units: int) -> float | None:
    """Return the seconds of the action on `units` units, T / (E(m) * m), eq. 1; T itself where the
    elasticity is not known."""
    if action.single_unit_s is None or action.elasticity is None:
        return action.single_unit_s
    return action.single_unit_s / (action.elasticity.efficiency(units) * units)


class InvalidActionError(CoreError):
    """An action with a bad figure, or with parts that do not belong together. `field` is the path
    within the action, e.g. `cost[cpu_cores].units`."""


def check_action(action: Action, capacities: Mapping[str, int]) -> None:
    """Raise InvalidActionError for the first bad field; the message states what would be right.

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
                f"at least {demand.least} asked for, {capacities[dimension]} in all: never fits; "
                "ask for less",
            )
    if (
        action.single_unit_s is not None and not 0.0 <= action.single_unit_s <= MOST_SECONDS
    ):  # NaN fails too
        raise InvalidActionError(
            "single_unit_s",
            f"must be a number from 0 to {MOST_SECONDS:g}, is {action.single_unit_s}",
        )
    if action.key is None:
        if action.elasticity is not None:
            raise InvalidActionError(
                "key", "is missing; name the dimension that the elasticity is of"
            )
        return
    if action.key not in action.cost:
        raise InvalidActionError(
            "key", f"{action.key!r} is not in cost; give it a demand there or leave the key out"
        )
    _check_elasticity(action.elasticity, f"cost[{action.key}]", action.cost[action.key])


def _check_elasticity(elasticity: Elasticity | None, field: str, demand: Demand) -> None:
    if isinstance(demand, Range) and demand.most - demand.least >= MOST_CHOICES:
        raise InvalidActionError(
            field, f"more than {MOST_CHOICES} numbers of units; use a coarser unit or a UnitSet"
        )
    if elasticity is None:
        return
    if isinstance(elasticity, Measured):
        at = [units for units, _ in elasticity.points]
        if not at or at != sorted(set(at)):
            raise InvalidActionError(
                "elasticity.points", "must be at one or more ascending numbers of units"
            )
    for units in key_units(demand):
        efficiency = elasticity.efficiency(units)
        if not 0.0 < efficiency <= 1.0:  # NaN fails too
            raise InvalidActionError("elasticity", f"E({units}) must be in (0, 1], is {efficiency}")


def _check_demand(field: str, demand: Demand) -> None:
    match demand:
        case Fixed(units):
            figures = {"units": units}
        case Range(least, most):
            figures = {"least": least, "most": most}
        case UnitSet(choices):
            if not 1 <= len(choices) <= MOST_CHOICES:
                raise InvalidActionError(
                    f"{field}.units", f"must be 1 to {MOST_CHOICES} numbers, are {len(choices)}"
                )
            figures = {f"units[{index}]": units for index, units in enumerate(choices)}
    for name, units in figures.items():
        if not 1 <= units <= MOST_UNITS or units != int(
            units
        ):  # a caller without types may hand over a float
            wish = f"must be a whole number from 1 to {MOST_UNITS}"
            raise InvalidActionError(
                f"{field}.{name}", f"{wish}, is {units}; leave out what is not asked for"
            )
    if isinstance(demand, Range) and demand.most < demand.least:
        raise InvalidActionError(
            f"{field}.most", f"must be at least {demand.least}, is {demand.most}"
        )
    if isinstance(demand, UnitSet) and list(demand.units) != sorted(set(demand.units)):
        raise InvalidActionError(f"{field}.units", "must ascend without repeats")
