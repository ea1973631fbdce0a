"""Store rollouts in JetStream buckets: a log of records for each rollout, what training runs have
learned from theirs, and the tokens of trajectories.

Tokens have a bound of their own, so that they cannot fill the JetStream that the scheduler needs
(ADR 0033).

A log entry is a key of its own, `<rollout>.<position>`, created and never changed: creating it is a
compare-and-swap, so that two processes cannot both write one position. Payloads are cut into chunks
below NATS's message limit and named by their digest, so that a trajectory that is submitted twice
with other tokens cannot overwrite the first. Ids are hex in keys, because an id may hold dots and
colons.
"""

import asyncio
import hashlib
import json
import zlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

import structlog
from nats.js import JetStreamContext
from nats.js.errors import KeyNotFoundError, KeyWrongLastSequenceError, ServiceUnavailableError
from nats.js.kv import KeyValue
from pydantic import TypeAdapter
from treadle_core.rollouts.buffer import (
    Aborted,
    Admitted,
    Advanced,
    Arrived,
    Batch,
    Cancelled,
    Event,
    GroupDropped,
)
from treadle_core.rollouts.history import RolloutHistory
from treadle_core.rollouts.spec import RolloutSpec
from treadle_runtime.buckets import entries_of
from treadle_runtime.errors import FailedPrecondition, ResourceExhausted
from treadle_runtime.fields import require

# A rollout of thousands of prompts, or a batch of them, comes near NATS's 1 MiB; ids compress to a
# fraction.
COMPRESS_FROM_BYTES = 64 * 1024
LOG_BUCKET = "treadle-rollout-log"
HISTORY_BUCKET = "treadle-rollout-history"
PAYLOAD_BUCKET = "treadle-rollout-payload"
# half of NATS's default max_payload (1 MiB), which headers and subject count against
CHUNK_BYTES = 512 * 1024
# Requests in flight to NATS for one batch: enough to hide the round trip, few enough to share the
# connection.
REQUESTS_AT_ONCE = 16
MESSAGE_BYTES = 30  # size of JetStream's record of a message beside its subject and data
FULL = 10077  # err_code of JetStream for a write beyond the bound of a stream
# Room is freed when a trainer takes a batch, which is minutes away, and each try sends a whole
# trajectory: 6,400 of 40k tokens that wait send 230 MB a second.
RETRY_FULL_S = 10.0
POSITION_DIGITS = 9
DIGEST_CHARACTERS = 32  # length of a payload's digest

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Created:
    """First record of a log."""

    rollout_id: str
    spec: RolloutSpec
    request_id: str  # a repeat of this request finds its own rollout, not somebody else's


# The fields that are stored of each kind of record. Names are only added, never renamed or given
# another meaning.
BODIES: dict[str, type[Any]] = {
    "created": Created,
    "arrived": Arrived,
    "advanced": Advanced,
    "batch": Batch,
    "cancelled": Cancelled,
    "aborted": Aborted,
    "group_dropped": GroupDropped,
    "admitted": Admitted,
}
KINDS = {body: kind for kind, body in BODIES.items()}
STORED: dict[str, TypeAdapter[Any]] = {kind: TypeAdapter(body) for kind, body in BODIES.items()}


@dataclass(frozen=True, slots=True)
class Record:
    """One entry of a log.

    `at_s` is Unix time; `request` is the fingerprint of the request behind a batch; `payload` names
    a sample's tokens.
    """

    at_s: float
    body: Created | Event
    request: str = ""
    payload: str = ""


def encode(record: Record) -> bytes:
    """Return the JSON of a record, compressed where it is long."""
    kind = KINDS[type(record.body)]
    document = {
        "kind": kind,
        "at_s": record.at_s,
        **STORED[kind].dump_python(record.body, mode="json", exclude_defaults=True),
    }
    if record.request:
        document["request"] = record.request
    if record.payload:
        document["payload"] = record.payload
    data = json.dumps(document, separators=(",", ":")).encode()
    return data if len(data) < COMPRESS_FROM_BYTES else zlib.compress(data)


def decode(data: bytes) -> Record:
    """Return the record of its JSON. Raises ValueError or KeyError where it is no record."""
    document = json.loads(data if data.startswith(b"{") else zlib.decompress(data))
    if document["kind"] not in STORED:
        raise ValueError(f"no such record: {document['kind']!r}")
    return Record(
        at_s=float(document["at_s"]),
        body=STORED[document["kind"]].validate_python(document),
        request=document.get("request", ""),
        payload=document.get("payload", ""),
    )


class RolloutLog:
    """Append-only logs, one for each rollout."""

    def __init__(self, bucket: KeyValue, jetstream: JetStreamContext) -> None:
        self._bucket = bucket
        self._jetstream = jetstream

    async def append(self, rollout_id: str, position: int, data: bytes) -> bool:
        """Write the entry at `position`; return False where another writer was first."""
        try:
            await self._bucket.create(_log_key(rollout_id, position), data)
        except KeyWrongLastSequenceError:
            return False
        return True

    async def read_from(self, rollout_id: str, position: int) -> list[bytes]:
        """Return the entries at `position` and after it."""
        entries: list[bytes] = []
        while True:
            try:
                entry = await self._bucket.get(_log_key(rollout_id, position + len(entries)))
            except KeyNotFoundError:
                return entries
            entries.append(entry.value or b"")

    async def everything(self) -> AsyncIterator[tuple[str, int, bytes]]:
        """Yield all entries of all rollouts as (rollout, position, data); each rollout's own in
        their order."""
        for entry in await entries_of(self._bucket):
            rollout, _, position = entry.key.partition(".")
            yield bytes.fromhex(rollout).decode(), int(position), entry.value or b""

    async def forget(self, rollout_id: str) -> None:
        """Remove a rollout's log."""
        await _remove(self._jetstream, LOG_BUCKET, f"{_hex(rollout_id)}.*")


_HISTORY = TypeAdapter(RolloutHistory)


class HistoryStore:
    """Store of what training runs have learned, by name: one compressed JSON each, changed by
    compare-and-swap."""

    def __init__(self, bucket: KeyValue) -> None:
        self._bucket = bucket

    async def read(self, name: str) -> tuple[RolloutHistory, int]:
        """Return the history and its revision; an empty one of revision 0 where there is none."""
        try:
            entry = await self._bucket.get(_hex(name))
        except KeyNotFoundError:
            return RolloutHistory(), 0
        return _HISTORY.validate_json(zlib.decompress(entry.value or b"")), entry.revision or 0

    async def write(self, name: str, history: RolloutHistory, revision: int) -> bool:
        """Write a history that was made of `revision`; return False where another writer was
        first."""
        data = zlib.compress(_HISTORY.dump_json(history))
        try:
            await self._bucket.update(_hex(name), data, last=revision)
        except KeyWrongLastSequenceError:
            return False
        return True


class PayloadStore:
    """Serialised trajectories, by rollout, trajectory and digest.

    max_payload_bytes: the longest message that NATS takes. room_bytes: the size of the bucket.
    can_be_freed: whether a batch or a sweep can remove any; the owner of the rollouts sets it.
    """

    def __init__(
        self,
        bucket: KeyValue,
        jetstream: JetStreamContext,
        max_payload_bytes: int,
        room_bytes: float,
    ) -> None:
        self._bucket = bucket
        self._jetstream = jetstream
        self._room_bytes = room_bytes
        self.can_be_freed: Callable[[], bool] = lambda: True
        self._chunk_bytes = max(1, min(CHUNK_BYTES, max_payload_bytes // 2))
        self._requests = asyncio.Semaphore(REQUESTS_AT_ONCE)
        self._full_until = (
            0.0  # loop time; until then, or until tokens are released, writes are not tried
        )

    async def put(self, rollout_id: str, trajectory_id: str, data: bytes) -> str:
        """Store a payload and return its name: digest and number of chunks. Storing the same again
        changes nothing.

        Raises ResourceExhausted where the bucket has no room for it, and leaves no part of it
        there; InvalidArgument where it would not fit into the empty bucket.
        """
        now_s = asyncio.get_running_loop().time()
        starts = range(0, len(data), self._chunk_bytes)
        subject_bytes = (
            len(f"$KV.{PAYLOAD_BUCKET}.{_payload_prefix(rollout_id, trajectory_id)}..")
            + DIGEST_CHARACTERS
        )
        beside_bytes = sum(
            MESSAGE_BYTES + subject_bytes + len(str(index)) for index in range(len(starts))
        )
        require(
            len(data) + beside_bytes <= self._room_bytes,
            "trajectory",
            f"has {len(data)} bytes, more than the store of tokens has room for in all "
            f"({self._room_bytes:.0f}): raise TREADLE_ROLLOUT_PAYLOAD_BYTES, or generate fewer "
            "tokens a trajectory (max_total_tokens)",
        )
        if now_s < self._full_until:
            raise self._full(len(data))
        chunks = [data[start : start + self._chunk_bytes] for start in starts]
        digest = hashlib.sha256(data).hexdigest()[:DIGEST_CHARACTERS]
        prefix = f"{_payload_prefix(rollout_id, trajectory_id)}.{digest}"
        try:
            for index, chunk in enumerate(chunks):
                await self._bucket.put(f"{prefix}.{index}", chunk)
        except ServiceUnavailableError as error:
            if error.err_code != FULL:
                raise
            log.warning(
                "the store of tokens is full: trajectories wait for room",
                can_be_freed=self.can_be_freed(),
            )
            await _remove(self._jetstream, PAYLOAD_BUCKET, f"{prefix}.*")
            self._full_until = now_s + RETRY_FULL_S
            raise self._full(len(data)) from error
        return f"{digest}.{len(chunks)}"

    async def chunks(
        self, rollout_id: str, trajectory_id: str, name: str
    ) -> AsyncIterator[tuple[bytes, bool]]:
        """Yield the chunks of a payload by its name, each with whether it is the last, which comes
        only where the digest is right. Raises FailedPrecondition where the payload has been
        released."""
        expected, _, count = name.partition(".")
        prefix = _payload_prefix(rollout_id, trajectory_id)
        digest = hashlib.sha256()
        for left in reversed(range(int(count))):
            try:
                async with self._requests:
                    entry = await self._bucket.get(f"{prefix}.{expected}.{int(count) - 1 - left}")
            except KeyNotFoundError as error:
                raise payload_lost(trajectory_id) from error
            chunk = entry.value or b""
            digest.update(chunk)
            if not left and digest.hexdigest()[:DIGEST_CHARACTERS] != expected:
                raise payload_lost(trajectory_id)
            yield chunk, not left

    async def release(self, rollout_id: str, trajectory_id: str) -> None:
        """Remove all payloads of a trajectory; removing none is not an error."""
        async with self._requests:
            await _remove(
                self._jetstream, PAYLOAD_BUCKET, f"{_payload_prefix(rollout_id, trajectory_id)}.>"
            )
        self._full_until = 0.0

    async def forget(self, rollout_id: str) -> None:
        """Remove all payloads of a rollout."""
        await _remove(self._jetstream, PAYLOAD_BUCKET, f"{_hex(rollout_id)}.>")
        self._full_until = 0.0

    def _full(self, size_bytes: int) -> ResourceExhausted:
        cure = "raise TREADLE_ROLLOUT_PAYLOAD_BYTES, for which the service may be restarted"
        if self.can_be_freed():
            reason, lack = (
                "PAYLOADS_FULL",
                f"the store of tokens has no room for {size_bytes} bytes",
            )
            cure = f"take batches and confirm them (ConfirmBatch), which frees room, or {cure}"
        else:  # without the size, so that a client can report it once for all
            reason, lack = (
                "PAYLOADS_HELD",
                "groups that have not settled hold all of the store of tokens",
            )
            cure = f"no batch can free room: {cure}, or cancel a rollout"
        message = f"{lack}: {cure}; then send the same request again"
        return ResourceExhausted(reason, message, retry_after_s=RETRY_FULL_S)


def _hex(identifier: str) -> str:
    return identifier.encode().hex()


def _log_key(rollout_id: str, position: int) -> str:
    return f"{_hex(rollout_id)}.{position:0{POSITION_DIGITS}d}"


def _payload_prefix(rollout_id: str, trajectory_id: str) -> str:
    return f"{_hex(rollout_id)}.{_hex(trajectory_id)}"


async def _remove(jetstream: JetStreamContext, bucket: str, keys: str) -> None:
    """Purge the subjects themselves: deleting by key would leave a marker for each."""
    await jetstream.purge_stream(f"KV_{bucket}", subject=f"$KV.{bucket}.{keys}")


def payload_lost(trajectory_id: str) -> FailedPrecondition:
    """Return the error for tokens that were released after their batch could no longer be
    repeated."""
    return FailedPrecondition(
        "BATCH_EXPIRED",
        f"the tokens of trajectory {trajectory_id} are gone: a batch can be repeated until it is "
        "confirmed, and for a limited time only",
    )
