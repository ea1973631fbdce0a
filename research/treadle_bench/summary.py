"""Medians, ranges and rounding of figures, and milliseconds of a call."""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import median
from typing import Any, TypeVar, cast

DIGITS = 4
Value = TypeVar("Value")


def median_of(values: Iterable[float], digits: int = DIGITS) -> float:
    """Their median, rounded."""
    return round(median(values), digits)


def range_of(values: Iterable[float], digits: int = DIGITS) -> list[float]:
    """Least and greatest, rounded."""
    found = list(values)
    return [round(min(found), digits), round(max(found), digits)]


def rounded(value: Value, digits: int = DIGITS) -> Value:
    """The same with each float rounded, also within dictionaries and lists; a tuple becomes a list,
    as in JSON."""
    found: object = value
    if isinstance(value, float):
        found = round(value, digits)
    elif isinstance(value, dict):
        found = {key: rounded(each, digits) for key, each in value.items()}
    elif isinstance(value, list | tuple):
        found = [rounded(each, digits) for each in value]
    return cast("Value", found)


def median_by_key(rows: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    """For each key its median over rows; with several rows also `spread`: the range of each key."""
    found: dict[str, Any] = {key: median_of(row[key] for row in rows) for key in rows[0]}
    if len(rows) > 1:
        found["spread"] = {key: range_of(row[key] for row in rows) for key in rows[0]}
    return found


def milliseconds(call: Callable[[], object], repeats: int, calls: int) -> list[float]:
    """For each repeat the median of so many calls; one call before them is not counted."""
    call()
    return [median(_once_ms(call) for _ in range(calls)) for _ in range(max(repeats, 1))]


def _once_ms(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return (time.perf_counter() - began) * 1e3
