"""Convert times and enums between the code and protobuf, and check those of a request.

Messages carry Duration and Timestamp; code counts in float seconds. Both directions are exact to the
nanosecond as far as a float is. An enum of the code and one of protobuf give their values the same names,
behind a prefix in protobuf.
"""

import enum
from typing import Any, TypeVar

from google.protobuf.duration_pb2 import Duration
from google.protobuf.timestamp_pb2 import Timestamp

from treadle_runtime.errors import require

LONGEST_DURATION_S = 315_576_000_000  # what a Duration can be at most: 10,000 years
LAST_TIMESTAMP_S = 253_402_300_799  # what a Timestamp can be at most: the end of the year 9999
NANOSECONDS = 1e9  # of a second

E = TypeVar("E", bound=enum.Enum)


def duration(seconds: float) -> Duration:
    """Seconds as a Duration; below 0 is 0, and more than a Duration can be is the longest one."""
    message = Duration()
    message.FromNanoseconds(round(min(max(seconds, 0.0), LONGEST_DURATION_S) * NANOSECONDS))
    return message


def timestamp(unix_s: float) -> Timestamp:
    """Seconds since the epoch as a Timestamp. Raises ValueError outside of the years 1 to 9999."""
    message = Timestamp()
    message.FromNanoseconds(round(unix_s * NANOSECONDS))
    return message


def seconds(message: Duration | Timestamp) -> float:
    """The seconds of a Duration, or the seconds since the epoch of a Timestamp."""
    return message.seconds + message.nanos / NANOSECONDS


def require_duration(field: str, value: Duration) -> float:
    """The seconds of a request's field, >= 0. Raises InvalidArgument naming the field where it is no such duration."""
    valid = 0 <= value.seconds <= LONGEST_DURATION_S and 0 <= value.nanos < NANOSECONDS
    require(valid, field, "must be a duration >= 0")
    return seconds(value)


def require_timestamp(field: str, value: Timestamp) -> float:
    """The seconds since the epoch of a request's field. Raises InvalidArgument naming the field where it is no time."""
    valid = 0 <= value.seconds <= LAST_TIMESTAMP_S and 0 <= value.nanos < NANOSECONDS
    require(valid, field, "must be a time between 1970 and 9999")
    return seconds(value)


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
