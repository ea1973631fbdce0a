"""Reading a whole JetStream key-value bucket, as a service does when it starts.

`KeyValue.watchall` and `KeyValue.keys` of nats-py can say "that was all" before the first entry when entries arrive
faster than the answer about the consumer (nats-io/nats.py#842, seen under load after a restart of NATS): state would be
lost in silence. Here a pull consumer is read to its end, and what was delivered is counted against what was received.
"""

import nats.errors
from nats.js.api import AckPolicy, ConsumerConfig, DeliverPolicy
from nats.js.kv import KV_DEL, KV_MARKER_REASON, KV_OP, KV_PURGE, KeyValue

BATCH = 256  # messages of one request; values are a few KB
ANSWER_TIMEOUT_S = 5.0  # of one request; a healthy server answers in milliseconds
CONSUMER_KEPT_S = 30.0  # the server forgets the consumer this long after the last request
MOST_TRIES = 3


async def entries_of(bucket: KeyValue, *, keys_only: bool = False) -> list[KeyValue.Entry]:
    """The newest entry of every key that is in the bucket, in the order of their revisions; deleted ones are left out.

    keys_only: the values are not sent and are empty. Raises nats.errors.Error while NATS does not answer.
    """
    for _ in range(MOST_TRIES):
        entries = await _read(bucket, keys_only)
        if entries is not None:
            return entries
    raise nats.errors.TimeoutError


async def _read(bucket: KeyValue, keys_only: bool) -> list[KeyValue.Entry] | None:
    """None where the connection lost something on the way."""
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
    received = seen = 0
    try:
        while seen < newest:
            info = await consumer.consumer_info()
            if info.delivered is not None and info.delivered.consumer_seq != received:
                return None
            if not info.num_pending:
                break
            for message in await consumer.fetch(min(info.num_pending, BATCH), timeout=ANSWER_TIMEOUT_S):
                received += 1
                seen = message.metadata.sequence.stream
                key = message.subject.removeprefix(bucket._pre)
                headers = message.headers or {}
                entries.pop(key, None)  # written again while we read: its place is at the end
                if headers.get(KV_OP) not in (KV_DEL, KV_PURGE) and KV_MARKER_REASON not in headers:
                    entries[key] = KeyValue.Entry(
                        bucket=bucket._name,
                        key=key,
                        value=message.data,
                        revision=seen,
                        delta=None,
                        created=None,
                        operation=None,
                    )
    finally:
        await consumer.unsubscribe()
    return list(entries.values())
