"""The scheduler's state in a JetStream bucket: one key a trajectory, one an engine, one for the policy.

Owns the bucket. `put` and `remove` note what a key should hold; `settle` returns once it does. Per key the newest value
wins and writes follow each other; a write that failed is made again by the next `settle` of its key, or by
`settle_all`. Nothing is answered before its keys are settled, so that a SIGKILL loses nothing that a client has been
told.

Core records as JSON, for the state store.

Fields that hold their default are left out, unknown ones are ignored, so that a newer scheduler reads what an older one
stored and the other way round. Enums stand by value, tuples as lists. Raises CorruptRecord for what is no record of the
asked class."""

import asyncio
import dataclasses
import enum
import functools
import json
import types
import typing
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import structlog
from nats.js.kv import KeyValue
from treadle_core.model import EngineRecord, Policy, TrajectoryRecord
from treadle_runtime.bus import Bus, entries_of, kv_key

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


log = structlog.get_logger()

BUCKET = "treadle_trajectories"
TRAJECTORY, ENGINE = "trajectory", "engine"
POLICY_KEY = "policy"
# Deleted keys leave markers; those older than this are swept.
MARKERS_KEPT_S = 600


@dataclass(frozen=True, slots=True)
class MeshRecord:
    """What holds for the mesh: the policy of new trajectories, and when it first started (`epoch_s`, Unix time)."""

    policy: Policy
    epoch_s: float


@dataclass(frozen=True, slots=True)
class Stored:
    """All that an earlier run left."""

    trajectories: tuple[TrajectoryRecord, ...]
    engines: tuple[EngineRecord, ...]
    mesh: MeshRecord | None


@dataclass(slots=True)
class _Slot:
    """A key that is not settled: `value` None removes it."""

    value: bytes | None
    version: int = 1
    stored: int = 0
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


def trajectory_key(trajectory_id: str) -> str:
    """The key of a trajectory's record."""
    return kv_key(TRAJECTORY, trajectory_id)


def engine_key(engine_id: str) -> str:
    """The key of an engine's record."""
    return kv_key(ENGINE, engine_id)


class Store:
    """See the module."""

    def __init__(self, bucket: KeyValue) -> None:
        self._bucket = bucket
        self._slots: dict[str, _Slot] = {}

    @classmethod
    async def open(cls, bus: Bus) -> "Store":
        """The bucket, made if it is not there."""
        return cls(await bus.key_value(BUCKET))

    async def load(self) -> Stored:
        """Everything in the bucket. Raises CorruptRecord."""
        trajectories: list[TrajectoryRecord] = []
        engines: list[EngineRecord] = []
        mesh: MeshRecord | None = None
        for entry in await entries_of(self._bucket):
            value = entry.value or b""
            if entry.key == POLICY_KEY:
                mesh = decoded(MeshRecord, value)
            elif entry.key.startswith(f"{TRAJECTORY}."):
                trajectories.append(decoded(TrajectoryRecord, value))
            else:
                engines.append(decoded(EngineRecord, value))
        return Stored(tuple(trajectories), tuple(engines), mesh)

    def put(self, key: str, record: TrajectoryRecord | EngineRecord | MeshRecord) -> None:
        """`key` is to hold the record."""
        self._note(key, encoded(record))

    def remove(self, key: str) -> None:
        """`key` is to be gone."""
        self._note(key, None)

    async def settle(self, keys: Iterable[str]) -> None:
        """Returns once each key holds what was noted last, or newer. Raises nats.errors.Error; what failed stays
        noted."""
        unsettled = [key for key in keys if key in self._slots]
        if len(unsettled) == 1:
            await self._write(unsettled[0])
        elif unsettled:
            async with asyncio.TaskGroup() as group:
                for key in unsettled:
                    group.create_task(self._write(key))

    async def settle_all(self) -> None:
        """Settles every key, one after the other. Raises nats.errors.Error."""
        for key in list(self._slots):
            await self._write(key)

    async def sweep(self) -> None:
        """Forgets the markers of keys removed long ago. Raises nats.errors.Error."""
        await self._bucket.purge_deletes(olderthan=MARKERS_KEPT_S)

    def _note(self, key: str, value: bytes | None) -> None:
        slot = self._slots.get(key)
        if slot is None:
            self._slots[key] = _Slot(value)
        else:
            slot.value = value
            slot.version += 1

    async def _write(self, key: str) -> None:
        slot = self._slots.get(key)
        if slot is None:
            return
        wanted = slot.version
        async with slot.lock:
            if slot.stored >= wanted:
                return
            version, value = slot.version, slot.value
            if value is None:
                await self._bucket.delete(key)
            else:
                await self._bucket.put(key, value)
            slot.stored = version
            if slot.stored == slot.version and self._slots.get(key) is slot:
                del self._slots[key]
