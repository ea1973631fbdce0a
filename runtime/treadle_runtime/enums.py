"""Convert between enums of the core and protobuf enums, whose values have the same names behind a prefix."""

import enum
from typing import Any, TypeVar

from treadle_runtime.errors import require

E = TypeVar("E", bound=enum.Enum)


def number_of(value: enum.Enum, message_enum: Any) -> Any:
    """Return the number of the value with the same name in a protobuf enum."""
    return message_enum.Value(f"{_prefix(message_enum)}{value.name}")


def value_of(kind: type[E], field: str, message_enum: Any, number: int) -> E:
    """Return the value of `kind` that a request's field names.

    Raises InvalidArgument naming the field where the number is unspecified or unknown.
    """
    known = number != 0 and number in message_enum.values()
    require(known, field, f"must be one of {', '.join(message_enum.keys()[1:])}, is {number}")
    return kind[message_enum.Name(number).removeprefix(_prefix(message_enum))]


def _prefix(message_enum: Any) -> str:
    """Return what the names of a protobuf enum begin with, e.g. `OUTCOME_`."""
    return str(message_enum.Name(0)).removesuffix("UNSPECIFIED")
