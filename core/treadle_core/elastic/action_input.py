"""What an action may say of itself, checked once when it is submitted, so that no kernel meets a NaN or an empty set.

Invariant: an error's `field` is the path within the action, e.g. `cost[cpu_cores].units`.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping

from treadle_core.elastic.action import (
    CPU_CORES,
    Action,
    Demand,
    Fixed,
    Knowledge,
    Measured,
    Range,
    UnitSet,
    key_units,
)
from treadle_core.errors import CoreError

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
    if action.follows_from < 0:
        raise InvalidActionError("follows_from", f"must be at least 0, is {action.follows_from}")
    if action.follows_from and (action.key != CPU_CORES or action.elasticity is None):
        raise InvalidActionError("follows_from", f"is for actions with the key {CPU_CORES!r} and an elasticity alone")
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
