"""Open a JetStream bucket, read it whole, purge its deleted keys, reserve its storage."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TypeVar

import nats.errors
import nats.js.errors
from nats.js import JetStreamContext
from nats.js.api import (
    AckPolicy,
    ConsumerConfig,
    DeliverPolicy,
    DiscardPolicy,
    KeyValueConfig,
    StorageType,
)
from nats.js.kv import KV_DEL, KV_MARKER_REASON, KV_OP, KV_PURGE, KeyValue

from treadle_runtime.errors import StartError

R = TypeVar("R")

# err_codes of JetStream: the key is not at the revision that a write expects
WRONG_LAST_SEQUENCE = frozenset({10071, 10164})
BATCH = 256  # messages of one request when a bucket is read; values are a few KB
BATCH_TIMEOUT_S = 5.0  # timeout of one such request
CONSUMER_KEPT_S = 30.0  # the server forgets the reader of a bucket this long after its last request
# err_codes of JetStream: the bytes that a stream reserves are more than the server has left;
# replicas without a cluster, or more of them than it has servers.
NO_STORAGE, NO_CLUSTER, NO_PEERS = 10047, 10074, 10005
PEERS_TIMEOUT_S, PEERS_PAUSE_S = 20.0, 0.2  # for the servers of a cluster to see each other
MOST_READS = 3  # times that a bucket is read when the connection loses messages
ASKED_FOR_S = 30.0  # how long a request is repeated: the server's disk or cores may be busy


async def until_answered(ask: Callable[[], Awaitable[R]]) -> R:
    """Send JetStream a request that may safely arrive twice, and repeat it until an answer comes: a
    service must not end at its start because one answer came late. Raises nats.errors.TimeoutError
    after ASKED_FOR_S."""
    ends_at = time.monotonic() + ASKED_FOR_S
    while True:
        try:
            return await ask()
        except nats.errors.TimeoutError:
            if time.monotonic() > ends_at:
                raise


async def open_bucket(
    js: JetStreamContext,
    bucket: str,
    *,
    ttl_s: float | None,
    max_bytes: int | None,
    oldest_go: bool,
    replicas: int | None,
) -> KeyValue:
    """Open a bucket, and make it first if it is not there; see Bus.key_value."""
    store = await _open_or_make(js, bucket, ttl_s)
    config = (await js.stream_info(store._stream)).config
    wanted = config.evolve()
    if replicas is not None:
        # A server that is behind the others may answer a direct read, and a leader would read an
        # old lease.
        wanted = wanted.evolve(num_replicas=replicas, allow_direct=replicas == 1)
    if max_bytes is not None:
        wanted = wanted.evolve(
            max_bytes=max_bytes, discard=DiscardPolicy.OLD if oldest_go else DiscardPolicy.NEW
        )
    if wanted != config:
        await reserve(
            f"{max_bytes} bytes for bucket {bucket}", replicas, partial(js.update_stream, wanted)
        )
        store = await js.key_value(bucket)
    return store


async def _open_or_make(js: JetStreamContext, bucket: str, ttl_s: float | None) -> KeyValue:
    try:
        return await js.key_value(bucket)
    except nats.js.errors.NotFoundError:
        config = KeyValueConfig(bucket=bucket, ttl=ttl_s, storage=StorageType.FILE, direct=True)
    try:
        return await js.create_key_value(config)
    except nats.js.errors.BadRequestError:  # another process made it first, with other settings
        return await js.key_value(bucket)


async def entries_of(bucket: KeyValue, *, keys_only: bool = False) -> list[KeyValue.Entry]:
    """Return the newest entry of every key in a bucket, in the order of revisions, without deleted
    keys.

    keys_only: the values are not sent and are empty. Raises nats.errors.Error while NATS does not
    answer.

    `KeyValue.watchall` and `KeyValue.keys` of nats-py can report the end before the first entry
    when entries arrive faster than the answer about the consumer (nats-io/nats.py#842, seen under
    load after a restart of NATS), and state would be lost in silence. So a pull consumer is read to
    its end, and the messages received are counted.
    """
    return [entry for entry in await _all_entries(bucket, keys_only) if entry.operation is None]


async def purge_markers(bucket: KeyValue) -> None:
    """Remove the markers of deleted keys from a bucket. A key that is written again meanwhile keeps
    its value.

    `KeyValue.purge_deletes` of nats-py removes that value too. Raises nats.errors.Error.
    """
    for entry in await _all_entries(bucket, keys_only=True):
        if entry.operation is not None and entry.revision is not None:
            await bucket._js.purge_stream(
                bucket._stream, subject=f"{bucket._pre}{entry.key}", seq=entry.revision + 1
            )


async def _all_entries(bucket: KeyValue, keys_only: bool) -> list[KeyValue.Entry]:
    for _ in range(MOST_READS):
        entries = await until_answered(partial(_read_bucket, bucket, keys_only))
        if entries is not None:
            return entries
    raise nats.errors.TimeoutError


async def _read_bucket(bucket: KeyValue, keys_only: bool) -> list[KeyValue.Entry] | None:
    """Return the newest entry of every key, or None where the connection lost a message. The entry
    of a deleted key has an `operation`."""
    newest = (await bucket.status()).stream_info.state.last_seq
    consumer = await bucket._js.pull_subscribe(
        f"{bucket._pre}>",
        stream=bucket._stream,
        config=ConsumerConfig(
            deliver_policy=DeliverPolicy.LAST_PER_SUBJECT,
            ack_policy=AckPolicy.NONE,
            headers_only=keys_only,
            inactive_threshold=CONSUMER_KEPT_S,
            mem_storage=True,
        ),
    )
    entries: dict[str, KeyValue.Entry] = {}
    received = revision = 0
    try:
        while revision < newest:
            info = await consumer.consumer_info()
            if info.delivered is not None and info.delivered.consumer_seq != received:
                return None
            if not info.num_pending:
                break
            for message in await consumer.fetch(
                min(info.num_pending, BATCH), timeout=BATCH_TIMEOUT_S
            ):
                received += 1
                revision = message.metadata.sequence.stream
                key = message.subject.removeprefix(bucket._pre)
                headers = message.headers or {}
                entries.pop(key, None)  # written again while we read: the key moves to the end
                operation = (
                    KV_DEL
                    if headers.get(KV_OP) in (KV_DEL, KV_PURGE) or KV_MARKER_REASON in headers
                    else None
                )
                entries[key] = KeyValue.Entry(
                    bucket._name, key, message.data, revision, None, None, operation
                )
    finally:
        await consumer.unsubscribe()
    return list(entries.values())


async def reserve(what: str, replicas: int | None, ask: Callable[[], Awaitable[object]]) -> None:
    """Call `ask`, which makes or changes a stream, and repeat it while servers of a cluster that
    has just started do not see each other.

    Raises StartError where JetStream cannot reserve `what`, or has not so many servers.
    """
    ends_at = time.monotonic() + PEERS_TIMEOUT_S
    while True:
        try:
            await ask()
            return
        except nats.js.errors.APIError as error:
            if error.err_code == NO_PEERS and time.monotonic() < ends_at:
                await asyncio.sleep(PEERS_PAUSE_S)
                continue
            if error.err_code in (NO_PEERS, NO_CLUSTER):
                what = f"TREADLE_NATS_REPLICAS={replicas} replicas"
                cure = "lower it, or give NATS a cluster of that many servers"
            elif error.err_code == NO_STORAGE:
                cure = (
                    "lower it, or give nats-server a larger max_file_store (by default 75% of "
                    "the free disk)"
                )
            else:
                raise
            raise StartError(
                f"JetStream cannot reserve {what} ({error.description}): {cure}"
            ) from error


def is_refusal(error: Exception) -> bool:
    """Return whether a write was refused because a key is not at the revision that it names."""
    return isinstance(error, nats.js.errors.APIError) and error.err_code in WRONG_LAST_SEQUENCE
