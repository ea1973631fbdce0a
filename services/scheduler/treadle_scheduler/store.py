"""The scheduler's state in a JetStream bucket: one key a trajectory, one an engine, one for the policy.

Owns the bucket. `put` and `remove` note what a key should hold; `settle` returns once it does. Per key the newest value
wins and writes follow each other; a write that failed is made again by the next `settle` of its key, or by
`settle_all`. Nothing is answered before its keys are settled, so that a SIGKILL loses nothing that a client has been
told.
"""

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass, field

import structlog
from nats.js.kv import KeyValue
from treadle_core.model import EngineRecord, Policy, TrajectoryRecord
from treadle_runtime.buckets import entries_of
from treadle_runtime.bus import Bus, kv_key

from treadle_scheduler.codec import decoded, encoded

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
