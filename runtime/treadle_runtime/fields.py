"""Checks of request fields. Each raises InvalidArgument naming the field and what would be right, and returns the
value.
"""

import math
import re

from treadle_runtime.errors import InvalidArgument

LONGEST_IDENTIFIER_CHARS = 128
_IDENTIFIER = re.compile(r"[A-Za-z0-9_.:-]{1,128}")

Number = int | float


def require(condition: object, field: str, description: str) -> None:
    """Refuse the request unless `condition` holds; `description` says what would be right."""
    if not condition:
        raise InvalidArgument(field, description)


def finite(field: str, value: float) -> float:
    """A number that is neither NaN nor infinite."""
    require(math.isfinite(value), field, f"must be a finite number, is {value}")
    return value


def positive(field: str, value: Number) -> Number:
    """A finite number > 0."""
    finite(field, value)
    require(value > 0, field, f"must be > 0, is {value}")
    return value


def non_negative(field: str, value: Number) -> Number:
    """A finite number >= 0."""
    finite(field, value)
    require(value >= 0, field, f"must be >= 0, is {value}")
    return value


def non_empty(field: str, value: str) -> str:
    """A string, bytes or list with something in it."""
    require(value, field, "must not be empty")
    return value


def identifier(field: str, value: str) -> str:
    """An id: 1 to 128 characters of A-Z a-z 0-9 _ . : -"""
    require(value, field, "must not be empty")
    if not _IDENTIFIER.fullmatch(value):
        raise InvalidArgument(
            field, f"must be 1 to {LONGEST_IDENTIFIER_CHARS} characters of A-Z a-z 0-9 _ . : -, is {value[:64]!r}"
        )
    return value
