"""Core records as JSON, for the state store.

Fields that hold their default are left out, unknown ones are ignored, so that a newer scheduler reads what an older one
stored and the other way round. Enums stand by value, tuples as lists. Raises CorruptRecord for what is no record of the
asked class.
"""

import dataclasses
import enum
import functools
import json
import types
import typing
from collections.abc import Callable, Hashable, Mapping
from typing import Any, TypeVar

T = TypeVar("T")

_MISSING = dataclasses.MISSING


class CorruptRecord(Exception):  # noqa: N818 - named as what was found
    """Stored bytes that are no record."""


def encoded(record: Any) -> bytes:
    """The JSON of a dataclass."""
    return json.dumps(_plain(record), separators=(",", ":")).encode()


def decoded(cls: type[T], data: bytes) -> T:
    """The dataclass `cls` out of its JSON."""
    try:
        made: T = _dataclass_reader(typing.cast(Hashable, cls))(json.loads(data))
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise CorruptRecord(f"no {cls.__name__}: {error!r} in {data[:200]!r}") from error
    return made


def _plain(value: Any) -> Any:
    if isinstance(value, enum.Enum):
        return value.value
    if dataclasses.is_dataclass(value):
        result: dict[str, Any] = {}
        for name, default in _fields(typing.cast(Hashable, type(value))):
            item = getattr(value, name)
            if item != default:
                result[name] = _plain(item)
        return result
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return value


@functools.cache
def _fields(cls: Any) -> tuple[tuple[str, Any], ...]:
    """(name, default) of each field; the default is a value that equals nothing where there is none."""
    return tuple((field.name, field.default) for field in dataclasses.fields(cls))


@functools.cache
def _reader(kind: Any) -> Callable[[Any], Any]:
    """Makes a value of type `kind` out of plain JSON."""
    if dataclasses.is_dataclass(kind):
        return _dataclass_reader(typing.cast(Hashable, kind))
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (types.UnionType, typing.Union):
        inner = _reader(next(argument for argument in arguments if argument is not types.NoneType))
        return lambda value: None if value is None else inner(value)
    if origin is tuple:
        item = _reader(arguments[0])
        return lambda value: tuple(item(one) for one in value)
    return typing.cast(Callable[[Any], Any], kind)  # an enum, a number, a string


@functools.cache
def _dataclass_reader(cls: Any) -> Callable[[Any], Any]:
    hints: Mapping[str, Any] = typing.get_type_hints(cls)
    readers = {field.name: _reader(hints[field.name]) for field in dataclasses.fields(cls)}

    def read(value: Any) -> Any:
        return cls(**{name: readers[name](item) for name, item in value.items() if name in readers})

    return read
