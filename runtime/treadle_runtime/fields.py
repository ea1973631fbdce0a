"""Check the fields of a request, convert times and enums between messages and code, make names of a
tenant, and cut lists into pages.

Each check returns the value, or raises InvalidArgument naming the field. Messages carry Duration
and Timestamp; code counts in float seconds. Both directions are exact to the nanosecond as far as a
float is. An enum of the code and one of protobuf give their values the same names, behind a prefix
in protobuf. A name of a tenant is `TENANT::name`, so that the name alone shows its owner.
"""

import enum
import hashlib
import math
import re
from collections.abc import Callable, Iterable
from heapq import nsmallest
from typing import Any, TypeVar

from google.protobuf.duration_pb2 import Duration
from google.protobuf.timestamp_pb2 import Timestamp

from treadle_runtime.config import address
from treadle_runtime.errors import InvalidArgument

LONGEST_DURATION_S = 315_576_000_000  # longest value of a Duration: 10,000 years
LAST_TIMESTAMP_S = 253_402_300_799  # latest value of a Timestamp: the end of the year 9999
NANOSECONDS = 1e9  # in a second

E = TypeVar("E", bound=enum.Enum)


_IDENTIFIER = re.compile(r"[A-Za-z0-9_.:-]{1,128}")

Number = TypeVar("Number", int, float)
Item = TypeVar("Item")
Place = tuple[float, str]  # an item's creation, Unix seconds, and its id

TENANT_MARK = "::"  # a name that belongs to a tenant begins with the tenant's and this

DEFAULT_PAGE = 100
LARGEST_PAGE = 1000


def require(condition: object, field: str, description: str) -> None:
    """Refuse the request unless `condition` holds; `description` says what would be right."""
    if not condition:
        raise InvalidArgument(field, description)


def finite(field: str, value: float) -> float:
    """Return the number if it is neither NaN nor infinite."""
    require(math.isfinite(value), field, f"must be a finite number, is {value}")
    return value


def positive(field: str, value: Number) -> Number:
    """Return the number if it is finite and > 0."""
    finite(field, value)
    require(value > 0, field, f"must be > 0, is {value}")
    return value


def non_negative(field: str, value: Number) -> Number:
    """Return the number if it is finite and >= 0."""
    finite(field, value)
    require(value >= 0, field, f"must be >= 0, is {value}")
    return value


def non_empty(field: str, value: str) -> str:
    """Return the string, bytes or list if it is not empty."""
    require(value, field, "must not be empty")
    return value


def at_most(field: str, value: str, longest: int) -> str:
    """Return the string if it has at most `longest` characters."""
    require(len(value) <= longest, field, f"must be at most {longest} characters, is {len(value)}")
    return value


def endpoint(field: str, value: str) -> str:
    """Return the address if it is host:port."""
    try:
        return address(value)
    except ValueError as error:
        raise InvalidArgument(field, f"must be {error}, is {value[:64]!r}") from None


def optional_identifier(field: str, value: str) -> str:
    """Return the id if it is valid or empty."""
    return identifier(field, value) if value else value


def identifier(field: str, value: str) -> str:
    """Return the id if it is 1 to 128 characters of A-Z a-z 0-9 _ . : -"""
    require(value, field, "must not be empty")
    valid = _IDENTIFIER.fullmatch(value)
    require(valid, field, f"must be 1 to 128 characters of A-Z a-z 0-9 _ . : -, is {value[:64]!r}")
    return value


def owner_of(name: str) -> str:
    """Return the tenant that owns what has this name; empty: none."""
    owner, mark, _ = name.partition(TENANT_MARK)
    return owner if mark else ""


def like(name: str, value: str) -> str:
    """Return `value` as a name of the tenant that `name` belongs to."""
    owner = owner_of(name)
    return f"{owner}{TENANT_MARK}{value}" if owner else value


def minted(kind: str, request_id: str) -> str:
    """Return the id `KIND-...` of what a request makes: the same for each repeat, and of the tenant
    that sent it."""
    return like(request_id, f"{kind}-{hashlib.sha256(request_id.encode()).hexdigest()[:20]}")


def duration(seconds: float) -> Duration:
    """Return seconds as a Duration; below 0 is 0, and more than a Duration can be is the longest
    one."""
    message = Duration()
    message.FromNanoseconds(round(min(max(seconds, 0.0), LONGEST_DURATION_S) * NANOSECONDS))
    return message


def timestamp(unix_s: float) -> Timestamp:
    """Return seconds since the epoch as a Timestamp. Raises ValueError outside of the years 1 to
    9999."""
    message = Timestamp()
    message.FromNanoseconds(round(unix_s * NANOSECONDS))
    return message


def seconds(message: Duration | Timestamp) -> float:
    """Return the seconds of a Duration, or the seconds since the epoch of a Timestamp."""
    return message.seconds + message.nanos / NANOSECONDS


def require_duration(field: str, value: Duration) -> float:
    """Return the seconds of a request's field, >= 0. Raises InvalidArgument naming the field where
    it is no such duration."""
    valid = 0 <= value.seconds <= LONGEST_DURATION_S and 0 <= value.nanos < NANOSECONDS
    require(valid, field, "must be a duration >= 0")
    return seconds(value)


def require_timestamp(field: str, value: Timestamp) -> float:
    """Return the seconds since the epoch of a request's field. Raises InvalidArgument naming the
    field where it is no time."""
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


def page_of(
    items: Iterable[Item], place: Callable[[Item], Place], size: int, token: str
) -> tuple[list[Item], str]:
    """Return the items after `token`, oldest first, at most `size` (0: DEFAULT_PAGE), and the token
    of the next page, empty after the last.

    A token names the last item of its page, so that items that come or go between two pages neither
    repeat nor hide others. Raises InvalidArgument naming page_size or page_token.
    """
    require(
        0 <= size <= LARGEST_PAGE,
        "page_size",
        f"must be 1..{LARGEST_PAGE}, or 0 for {DEFAULT_PAGE}, is {size}",
    )
    after = _place_in(token) if token else (-math.inf, "")
    size = size or DEFAULT_PAGE
    following = nsmallest(size + 1, (item for item in items if place(item) > after), key=place)
    page = following[:size]
    if len(page) == len(following):
        return page, ""
    created_s, name = place(page[-1])
    return page, f"{created_s.hex()}/{name}"


def _place_in(token: str) -> Place:
    created, slash, name = token.partition("/")
    try:
        if slash:
            return float.fromhex(created), name
    except (ValueError, OverflowError):
        pass
    raise InvalidArgument("page_token", "must be a next_page_token of an earlier answer, or empty")
