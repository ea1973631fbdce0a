"""Hypothesis strategies of requests to any RPC, made from the descriptors of the protos: good ones,
some with fields that are hostile, and bytes that are no message."""

import json
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from google.protobuf.descriptor import Descriptor, FieldDescriptor, MethodDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from hypothesis import strategies as st
from treadle_runtime.identity import may_call

MOST_ITEMS = 3  # of a repeated field
SHOWN = 100  # characters of a message in a report; some take ten when they are shown
OF_16 = (0, 1, 1, 2, 4, 16)  # how many of 16 fields of a message are hostile
YEAR_2100_S = 4_102_444_800  # no ticket or deadline is over, whenever this runs

INTS = [
    0,
    1,
    -1,
    2,
    3,
    7,
    1000,
    2**15,
    2**31 - 1,
    -(2**31),
    2**31,
    2**32 - 1,
    2**53 + 1,
    2**63 - 1,
    -(2**63),
]
FLOATS = [
    0.0,
    -0.0,
    -1.0,
    0.1,
    1e19,
    -1e19,
    1e308,
    -1e308,
    5e-324,
    float("nan"),
    float("inf"),
    float("-inf"),
]
DEEP = 50_000
JSON_TEXTS = [
    "",
    "{",
    "null",
    "[]",
    "0",
    '"x"',
    "{}",
    '{"":{}}',
    '{"a":NaN}',
    '{"a":1e999}',
    '{"a":-Infinity}',
    '{"seed":1e308}',
    '{"seed":' + "9" * 5000 + "}",
    '{"a":' * DEEP,
    "[" * DEEP + "]" * DEEP,
    '{"a":' + "[" * 900 + "]" * 900 + "}",
    '{"code":"\\ud800"}',
    '{"a":"\\u0000"}',
    '{"code":{}}',
    '{"seed":-1,"size":[]}',
    '{"a":1,"a":2}',
    "\ufeff{}",
]
TEXTS = [
    "",
    " ",
    "\0",
    "a\0b",
    "\x7f\x1b[31m",
    "\r\nx: y",
    "a" * 128,
    "a" * 129,
    "é" * 65,
    "ẞ🙂" * 9,
    "x" * 70_000,
    "🙂" * 20_000,
    "../../etc/passwd",
    "/",
    ":",
    "::",
    "::x",
    "x::",
    "beta::",
    "beta::beta::x",
    "a::b::c",
    "*",
    ">",
    "a.>",
    "$SYS",
    "%s%n{}",
    "-1",
    "nan",
    "1e999",
    "\u202e",
    "\ufeff",
    "\ufffd",
    *JSON_TEXTS[:6],
]
BLOBS = [
    b"",
    b"\0",
    b"\xff" * 3,
    b"\xff" * 4,
    b"\xff" * 8,
    b"\0" * 4096,
    b"\x80" * 16,
    b"\x7f" * 64,
    struct.pack("<f", float("nan")),
    struct.pack("<2d", float("inf"), float("nan")),
    *(text.encode("utf-8", "surrogatepass") for text in JSON_TEXTS),
]
NO_MESSAGES = [
    b"\0",
    b"\xff" * 12,
    b"\x0a\xff\xff\xff\xff\x0f",
    b"\x0a\x02\xc3\x28",
    b"\x0b" * 200,
    b"\x0b" * 20_000,
    b"\x08" + b"\xff" * 9 + b"\x7f",
    b"\x0a\x05\x0a\x03\x0a\x01",
    b"\xfa\xff\xff\xff\x0f\x01x",
    b"\x0d\0\0",
    b"\x0f",
    bytes(range(256)),
]


class Words(dict[str, Sequence[Any]]):
    """Good values by the name of a field, or of its message and the field. A field with none is
    left out, and one that draws None; a message has one True in place of values."""

    def __repr__(self) -> str:
        return "Words"


@dataclass(frozen=True)
class Request:
    """kind: of the caller. damage: what becomes of the message's bytes. sealed: whether a ticket in
    it gets the seal that the scheduler would give it."""

    rpc: MethodDescriptor
    kind: str
    message: Message
    damage: Callable[[bytes], bytes] | None
    sealed: bool

    def __repr__(self) -> str:
        """Return a text that is short also for a batch: where an example has failed, Hypothesis
        warns of a long one, and that warning would be all that the test shows."""
        damaged = ", damaged" if self.damage else ""
        return f"{self.rpc.name} as {self.kind}{damaged}: {str(self.message)[:SHOWN]!r}"

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """Show that text; else Hypothesis shows the fields of a dataclass."""
        printer.text(repr(self))


@st.composite
def requests(draw: st.DrawFn, rpc: MethodDescriptor, words: Words) -> Request:
    """A request from a kind of caller that may send it."""
    kind = draw(
        st.sampled_from(sorted(may_call(f"/{rpc.containing_service.full_name}/{rpc.name}")))
    )
    message = draw(messages(rpc.input_type, words, draw(st.sampled_from(OF_16))))
    damage = draw(damages()) if draw(st.integers(0, 15)) == 15 else None
    return Request(rpc, kind, message, damage, sealed=draw(st.integers(0, 7)) < 7)


@st.composite
def damages(draw: st.DrawFn) -> Callable[[bytes], bytes]:
    """What makes another message, or none, of a message's bytes."""
    how = draw(st.integers(0, 3))
    if how == 0:
        other = draw(st.sampled_from(NO_MESSAGES) | st.binary(max_size=64))
        return lambda data: other
    place = draw(st.floats(0, 1))
    if how == 1:
        return lambda data: data[: int(place * len(data))]
    if how == 2:
        other = draw(st.binary(min_size=1, max_size=4))
        return lambda data: (
            data[: int(place * len(data))] + other + data[int(place * len(data)) + 1 :]
        )
    return lambda data: data + data[int(place * len(data)) :]


@st.composite
def messages(draw: st.DrawFn, kind: Descriptor, words: Words, of_16: int) -> Message:
    """of_16: of how many of 16 fields the value is hostile."""
    message = GetMessageClass(kind)()
    chosen = {group.name: draw(st.sampled_from(list(group.fields))) for group in kind.oneofs}
    for field in kind.fields:
        group = field.containing_oneof
        if group is not None and chosen[group.name] != field:
            continue
        hostile = draw(st.integers(0, 15)) >= 16 - of_16
        given: Sequence[Any] | None = words.get(f"{kind.name}.{field.name}", words.get(field.name))
        if (
            not hostile
            and given is not None
            and not (given and draw(st.sampled_from(given)) is not None)
        ):
            continue
        alone = group is None or len(group.fields) == 1  # an optional field is a group of its own
        if not hostile and given is None and field.has_presence and alone and draw(st.booleans()):
            continue
        if field.message_type is not None and not (hostile and draw(st.booleans())):
            part = messages(field.message_type, words, of_16)
            if field.message_type.full_name in _TIMES:
                part = _times(field.message_type, hostile)
            if field.is_repeated:
                getattr(message, field.name).extend(
                    draw(st.lists(part, min_size=1, max_size=MOST_ITEMS))
                )
            else:
                getattr(message, field.name).CopyFrom(draw(part))
        elif field.message_type is None:
            value = (
                _hostile(field)
                if hostile
                else _good(field)
                if given is None
                else st.sampled_from(given)
            )
            if field.is_repeated:
                getattr(message, field.name).extend(
                    draw(st.lists(value, min_size=not hostile, max_size=MOST_ITEMS))
                )
            else:
                setattr(message, field.name, draw(value))
    return message


_TIMES = ("google.protobuf.Duration", "google.protobuf.Timestamp")


@cache
def _times(kind: Descriptor, hostile: bool) -> st.SearchStrategy[Message]:
    if hostile:
        edges = [seconds for seconds in INTS if -(2**63) <= seconds < 2**63]
        nanos = [0, 1, 999_999_999, 10**9, -1, 2**31 - 1, -(2**31)]
        return st.builds(
            GetMessageClass(kind), seconds=st.sampled_from(edges), nanos=st.sampled_from(nanos)
        )
    good = (
        [(YEAR_2100_S, 0)]
        if kind.name == "Timestamp"
        else [(1, 0), (0, 200_000_000), (2, 500_000_000)]
    )
    return st.sampled_from(
        [GetMessageClass(kind)(seconds=seconds, nanos=nanos) for seconds, nanos in good]
    )


@cache
def _good(field: FieldDescriptor) -> st.SearchStrategy[Any]:
    if field.enum_type is not None:
        return st.sampled_from(
            [value.number for value in field.enum_type.values if value.number] or [0]
        )
    return {
        field.CPPTYPE_STRING: st.just(bytes(8))
        if field.type == field.TYPE_BYTES
        else st.integers(0, 10**6).map("n{}".format),
        field.CPPTYPE_BOOL: st.booleans(),
        field.CPPTYPE_DOUBLE: st.sampled_from([0.5, 1.0, 0.0, 20.0]),
        field.CPPTYPE_FLOAT: st.sampled_from([0.5, 1.0, 0.0]),
    }.get(field.cpp_type, st.integers(0, 8))


@cache
def _hostile(field: FieldDescriptor) -> st.SearchStrategy[Any]:
    if field.enum_type is not None:
        return st.sampled_from([0, 99, -1, 2**31 - 1, -(2**31)])
    if field.type == field.TYPE_BYTES:
        return st.sampled_from(BLOBS) | st.binary(max_size=40)
    if field.type == field.TYPE_STRING:
        return st.sampled_from(JSON_TEXTS if field.name.endswith("_json") else TEXTS) | st.text(
            max_size=20
        )
    if field.type == field.TYPE_BOOL:
        return st.booleans()
    if field.cpp_type in (field.CPPTYPE_DOUBLE, field.CPPTYPE_FLOAT):
        return st.sampled_from(FLOATS) | st.floats(
            width=32 if field.cpp_type == field.CPPTYPE_FLOAT else 64
        )
    bits, unsigned = {
        field.CPPTYPE_INT32: (32, False),
        field.CPPTYPE_INT64: (64, False),
        field.CPPTYPE_UINT32: (32, True),
        field.CPPTYPE_UINT64: (64, True),
    }[field.cpp_type]
    low, high = (0, 2**bits - 1) if unsigned else (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
    return st.sampled_from([number for number in INTS if low <= number <= high]) | st.integers(
        low, high
    )


def fill(message: Message, name: Callable[[str], str]) -> None:
    """Replace each string that stands for a name by the name."""
    for field, value in message.ListFields():
        if field.message_type is not None:
            for part in value if field.is_repeated else [value]:
                fill(part, name)
        elif field.type == field.TYPE_STRING:
            if field.is_repeated:
                value[:] = [name(each) for each in value]
            else:
                setattr(message, field.name, name(value))


def messages_in(message: Message) -> Iterator[Message]:
    """It, and all that it holds."""
    yield message
    for field, value in message.ListFields():
        if field.message_type is not None:
            for part in value if field.is_repeated else [value]:
                yield from messages_in(part)


def json_values() -> st.SearchStrategy[Any]:
    """What may stand in the place of any part of a JSON answer."""
    odd: list[Any] = [
        None,
        True,
        0,
        -1,
        1.5,
        2**31,
        2**70,
        -(2**70),
        float("nan"),
        float("inf"),
        "",
        "x",
        "\ud800",
        "9" * 5000,
        [],
        {},
        [[]],
    ]
    leaves = st.sampled_from(odd) | st.text(max_size=8)
    return st.recursive(
        leaves,
        lambda part: (
            st.lists(part, max_size=3) | st.dictionaries(st.text(max_size=4), part, max_size=3)
        ),
    )


def texts_that_are_no_json() -> st.SearchStrategy[bytes]:
    """Bodies that a JSON parser refuses, or that are hard on it."""
    texts = [text.encode("utf-8", "surrogatepass") for text in JSON_TEXTS]
    return st.sampled_from(
        [*texts, b"\xff\xfe", b"\0", json.dumps({"a": 1}).encode("utf-16")]
    ) | st.binary(max_size=30)
