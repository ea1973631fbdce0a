"""Answer a repeated mutation from the record of its first answer, by request_id.

Invariants: a record is made of an answer, never of an error, so a call that failed may be tried
again with the same id. The first record of an id wins. Records are in a bucket
`treadle_requests_<service>` (kept 1 h, or until newer ones fill what `bound` allows) and in a cache
in front of it. A new id costs one write, which the caller need not wait for (`later`), and no read:
the ids of earlier processes of the service are read once at start. One process at a time serves a
service's mutations.
"""

import asyncio
import hashlib
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from functools import wraps
from typing import Any, Protocol, TypeVar, get_type_hints

import nats.errors
import nats.js.errors
import structlog
from google.protobuf.message import Message
from nats.js.kv import KeyValue

from treadle_runtime.buckets import entries_of
from treadle_runtime.bus import Bus, kv_key
from treadle_runtime.errors import InvalidArgument
from treadle_runtime.fields import identifier

log = structlog.get_logger()

R = TypeVar("R", bound=Message)
Request = TypeVar("Request", bound=Message)
Context = TypeVar("Context")
Servicer = TypeVar("Servicer", bound="_HasRecords")
Later = Callable[[Coroutine[Any, Any, None]], object]

RECORDS_KEPT_S = 3600.0  # far beyond any client's retries
CACHED_RECORDS = 16_384
CACHED_BYTES = 64 * 1024 * 1024
# NATS takes 1 MiB a message by default; longer answers are recorded in parts
PART_BYTES = 512 * 1024
FINGERPRINT_BYTES = 16
_PARTS_BYTES = 4  # count of parts that follow the first, big-endian


@dataclass(frozen=True)
class _Record:
    fingerprint: bytes
    response: bytes


@dataclass
class _Running:
    fingerprint: bytes
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    error: Exception | None = None


class RequestRecords:
    """Records of one service's answers, which `RequestRecords.open` makes."""

    def __init__(self, bus: Bus, service: str) -> None:
        self._bus = bus
        self._service = service
        self._most_bytes: int | None = None
        # Keys that are in the bucket and not in the cache, oldest first, each with the loop time at
        # which it may be forgotten.
        self._elsewhere: OrderedDict[str, float] = OrderedDict()
        self._cache: OrderedDict[str, _Record] = OrderedDict()
        self._cached_bytes = 0
        self._unsaved: set[str] = set()
        self._running: dict[str, _Running] = {}

    @classmethod
    async def open(cls, bus: Bus, service: str) -> "RequestRecords":
        """Open the records of `service`, also those of its earlier processes."""
        records = cls(bus, service)
        await records._open_bucket()
        expires_at = asyncio.get_running_loop().time() + RECORDS_KEPT_S
        for entry in await entries_of(records._bucket, keys_only=True):
            records._elsewhere[entry.key] = expires_at
        return records

    async def _open_bucket(self) -> None:
        self._bucket: KeyValue = await self._bus.key_value(
            f"treadle_requests_{self._service}",
            ttl_s=RECORDS_KEPT_S,
            max_bytes=self._most_bytes,
            oldest_go=True,
        )

    async def bound(self, most_bytes: int) -> None:
        """Limit all records together to so many bytes from now on, which JetStream reserves, and
        remove the oldest beyond that: for services whose answers hold output of foreign code.
        Raises StartError where JetStream has not that much."""
        self._most_bytes = most_bytes
        await self._open_bucket()

    async def once(
        self,
        method: str,
        request: Message,
        response_type: type[R],
        call: Callable[[], Awaitable[R]],
        later: Later | None = None,
    ) -> R:
        """Return the answer to `request`: of `call` the first time, of the record afterwards.
        Concurrent repeats wait for the first.

        later: starts the saving of the record, for which this call then does not wait. It suits
        calls that change nothing in this service: if the process is killed before the record is
        saved, a repeat calls again. Raises InvalidArgument for an empty request_id and for an id
        that was used with another request; what `call` raises; and nats.errors.Error (UNAVAILABLE
        to the caller) where the record cannot be saved. The answer is then cached, and a repeat
        tries to save it again.
        """
        request_id: str = identifier("request_id", request.request_id)  # type: ignore[attr-defined]
        key = kv_key(method, request_id)
        content = request.SerializeToString(deterministic=True)
        fingerprint = hashlib.blake2b(content, digest_size=FINGERPRINT_BYTES).digest()
        while True:
            record = self._cache.get(key) or await self._recall(key)
            if record is not None:
                _require_same(record.fingerprint, fingerprint, request_id)
                if key in self._unsaved:
                    await self._save(key, record)
                self._cache.move_to_end(key)
                return response_type.FromString(record.response)
            first = self._running.get(key)
            if first is None:
                return await self._first(key, fingerprint, call, later)
            _require_same(first.fingerprint, fingerprint, request_id)
            await first.ended.wait()
            if first.error is not None:
                raise first.error
            # Either the record is there now, or the first call was cancelled, and this one calls.

    async def _first(
        self, key: str, fingerprint: bytes, call: Callable[[], Awaitable[R]], later: Later | None
    ) -> R:
        running = self._running[key] = _Running(fingerprint)
        try:
            response = await call()
            record = _Record(fingerprint, response.SerializeToString())
            self._remember(key, record)
            self._unsaved.add(key)
            if later is None:
                await self._save(key, record)
            else:
                later(self._try_to_save(key, record))
            return response
        except Exception as error:
            running.error = error
            raise
        finally:
            del self._running[key]
            running.ended.set()

    async def _try_to_save(self, key: str, record: _Record) -> None:
        try:
            await self._save(key, record)
        except (nats.errors.Error, OSError) as error:
            log.warning("an answer is not recorded yet", key=key, error=repr(error))

    async def _save(self, key: str, record: _Record) -> None:
        body = record.response
        parts = [
            body[start : start + PART_BYTES] for start in range(PART_BYTES, len(body), PART_BYTES)
        ]
        for index, part in enumerate(parts):
            await self._bucket.put(_part_key(key, index), part)
        head = record.fingerprint + len(parts).to_bytes(_PARTS_BYTES, "big") + body[:PART_BYTES]
        try:
            await self._bucket.create(key, head)
        except nats.js.errors.KeyWrongLastSequenceError:
            # An earlier try arrived although its acknowledgement did not: the same record is there.
            # Or only the first part arrived.
            present = await self._load(key)
            if present is None:
                await self._bucket.put(key, head)
            elif present.fingerprint != record.fingerprint:
                raise
        except nats.js.errors.NoStreamResponseError:  # a NATS server that lost its store
            await self._open_bucket()
            raise
        self._unsaved.discard(key)

    async def _recall(self, key: str) -> _Record | None:
        if key not in self._elsewhere:
            return None
        record = await self._load(key)
        self._elsewhere.pop(key, None)
        if record is not None:
            self._remember(key, record)
        return record

    async def _load(self, key: str) -> _Record | None:
        try:
            head = (await self._bucket.get(key)).value or b""
            parts = int.from_bytes(
                head[FINGERPRINT_BYTES : FINGERPRINT_BYTES + _PARTS_BYTES], "big"
            )
            body = head[FINGERPRINT_BYTES + _PARTS_BYTES :]
            for index in range(parts):
                body += (await self._bucket.get(_part_key(key, index))).value or b""
        except nats.js.errors.KeyNotFoundError:  # the record has expired
            return None
        return _Record(head[:FINGERPRINT_BYTES], body)

    def _remember(self, key: str, record: _Record) -> None:
        self._cache[key] = record
        self._cached_bytes += len(record.response)
        now = asyncio.get_running_loop().time()
        while len(self._cache) > CACHED_RECORDS or (
            self._cached_bytes > CACHED_BYTES and len(self._cache) > 1
        ):
            oldest, dropped = self._cache.popitem(last=False)
            self._cached_bytes -= len(dropped.response)
            self._elsewhere[oldest] = now + RECORDS_KEPT_S
        while self._elsewhere and next(iter(self._elsewhere.values())) <= now:
            self._elsewhere.popitem(last=False)


class _HasRecords(Protocol):
    records: RequestRecords


def answered_once(
    rpc: Callable[[Servicer, Request, Context], Awaitable[R]],
) -> Callable[[Servicer, Request, Context], Awaitable[R]]:
    """Answer a repeat of a servicer's mutation from the servicer's `records`; see
    `RequestRecords.once`."""
    response_type: type[R] = get_type_hints(rpc)["return"]

    @wraps(rpc)
    async def answer(self: Servicer, request: Request, context: Context) -> R:
        return await self.records.once(
            rpc.__name__, request, response_type, lambda: rpc(self, request, context)
        )

    return answer


def _part_key(key: str, index: int) -> str:
    return f"{key}.part/{index}"


def _require_same(recorded: bytes, given: bytes, request_id: str) -> None:
    if recorded != given:
        raise InvalidArgument(
            "request_id",
            f"{request_id!r} was used with a different request; mint a new id for each logical "
            "call",
            "REQUEST_ID_REUSED",
            request_id=request_id,
        )
