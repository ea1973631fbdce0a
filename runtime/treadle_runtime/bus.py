"""The connection to NATS: facts out, facts in, key-value buckets.

Owns: one connection, which reconnects for ever; the stream of facts; the outbox; the subscriptions. Facts say what
happened and are never commands. Publishing returns when the fact is accepted, not when it has arrived; `flush` and
`drain` wait.

Accepted facts on their way to JetStream: in order, at least once, none lost while the process lives.

Invariants: a message leaves the outbox when the server has acknowledged it, not before. Until then it is sent again
with the same Nats-Msg-Id, which the stream's duplicate window makes harmless. Owns no task: `run` is given to a
TaskGroup."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass

import nats.errors
import nats.js.errors
import structlog
from nats.aio.client import Client
from nats.js import JetStreamContext
from nats.js.api import KeyValueConfig, StorageType, StreamConfig
from nats.js.kv import KeyValue
from opentelemetry import propagate, trace
from treadle.telemetry.v1.facts_pb2 import Fact

from treadle_runtime.background import beside
from treadle_runtime.errors import StartError
from treadle_runtime.facts import KINDS, SUBJECT_ROOT, make_fact, subject_of, subjects_of
from treadle_runtime.subscription import FactSubscription, Handler

log_outbox = structlog.get_logger()

CAPACITY = 65_536  # messages; about 30 MB, minutes of a busy mesh without NATS. Full: publishing waits.
FIRST_RETRY_S = 0.05
LONGEST_RETRY_S = 1.0


@dataclass(frozen=True)
class Outgoing:
    """One message for the stream; `headers` carry its Nats-Msg-Id."""

    subject: str
    payload: bytes
    headers: dict[str, str]


class Outbox:
    """An ordered, bounded queue in front of one stream; `send` returns once the stream has acknowledged the message."""

    def __init__(self, send: Callable[[Outgoing], Awaitable[None]]) -> None:
        self._send = send
        self._queue: asyncio.Queue[Outgoing] = asyncio.Queue(CAPACITY)
        self._unacknowledged = 0

    @property
    def unacknowledged(self) -> int:
        """Messages accepted and not yet in the stream."""
        return self._unacknowledged

    async def put(self, message: Outgoing) -> None:
        """Accept a message; waits only while the outbox is full."""
        await self._queue.put(message)
        self._unacknowledged += 1

    async def flush(self) -> None:
        """Returns once all that was accepted is in the stream."""
        await self._queue.join()

    async def run(self) -> None:
        """Send what is accepted, one after another, for ever."""
        while True:
            message = await self._queue.get()
            await self._deliver(message)
            self._unacknowledged -= 1
            self._queue.task_done()

    async def _deliver(self, message: Outgoing) -> None:
        retry_s = FIRST_RETRY_S
        while True:
            try:
                return await self._send(message)
            except (nats.errors.Error, OSError) as error:
                if retry_s == FIRST_RETRY_S:
                    log_outbox.warning(
                        "fact not acknowledged, sending it again", subject=message.subject, error=repr(error)
                    )
            await asyncio.sleep(retry_s)
            retry_s = min(2 * retry_s, LONGEST_RETRY_S)


__all__ = ["KINDS", "Bus", "BusStartError", "kv_key", "make_fact", "open_bus"]

log = structlog.get_logger()

STREAM = "TREADLE_FACTS"
FACTS_KEPT_S = 3600.0  # a consumer that was away for longer starts from what is left
DUPLICATE_WINDOW_S = 120.0  # how long a retried publish is recognised; retries come within seconds
RECONNECT_WAIT_S = 0.1  # NATS is back within a second of a restart; nothing else is worth waiting for meanwhile
CONNECT_TIMEOUT_S = 2.0  # of one attempt
ANSWER_TIMEOUT_S = 2.0  # of one JetStream request; a healthy server answers in under 1 ms
ENSURE_INTERVAL_S = 10.0  # a consumer can also be lost without a disconnect
RETRY_ENSURE_S = 0.2  # JetStream answers a little later than the server accepts connections

_KEY_CHARS = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-/")


class BusStartError(StartError):
    """NATS could not be reached, or has no JetStream; the message says which and what to do."""


def kv_key(*parts: str) -> str:
    """A valid key of a bucket out of any strings; distinct parts give distinct keys, joined by dots."""
    return ".".join(_escaped(part) for part in parts)


def _escaped(part: str) -> str:
    return "".join(char if char in _KEY_CHARS else "".join(f"={byte:02X}" for byte in char.encode()) for char in part)


class Bus:
    """See the module. Made by `open_bus`."""

    def __init__(self, name: str, tracer: trace.Tracer) -> None:
        self._name = name
        self._client = Client()
        self._js = self._client.jetstream(timeout=ANSWER_TIMEOUT_S)
        self._tracer = tracer
        self._outbox = Outbox(self._send)
        self._subscriptions: list[FactSubscription] = []
        self._connected = asyncio.Event()
        self._ack_timeout: asyncio.Timeout | None = None  # of the publish that waits for its acknowledgement
        self._reconnected = asyncio.Event()
        self._last_error: Exception | None = None
        self._drained = False

    async def publish(self, fact: Fact) -> None:
        """Accept a fact for the stream; waits only while 65,536 others wait. Raises ValueError for one that cannot be
        sent.
        """
        if self._drained:
            raise nats.errors.ConnectionClosedError
        if not fact.fact_id:
            raise ValueError("a fact needs a fact_id; see make_fact")
        payload = fact.SerializeToString()
        if len(payload) > self._client.max_payload:
            raise ValueError(f"fact of {len(payload)} bytes; NATS takes {self._client.max_payload} at most")
        headers = {"Nats-Msg-Id": fact.fact_id}
        propagate.inject(headers)
        await self._outbox.put(Outgoing(subject_of(fact), payload, headers))

    async def subscribe(
        self, kinds: Sequence[str], handler: Handler, *, durable: str | None = None, replay: bool = False
    ) -> None:
        """Feed the facts of `kinds` (all when empty) to `handler`, one at a time, each fact_id once.

        durable: the name under which the server keeps the place, across restarts of this process; without it, a
        subscriber hears what comes from now on. replay: begin with all facts that are kept (for a durable one: at its
        first start). A handler that raises gets the fact again, 5 times in all. Raises ValueError for an unknown
        kind.
        """
        subscription = FactSubscription(
            self._client,
            self._js,
            STREAM,
            subjects_of(kinds),
            handler,
            durable=durable,
            replay=replay,
            tracer=self._tracer,
        )
        await subscription.start()
        self._subscriptions.append(subscription)

    async def caught_up(self) -> None:
        """Returns once every subscription has handled the facts that are in the stream now: a state rebuilt by `replay`
        is then whole. Raises nats.errors.Error while NATS does not answer.
        """
        last = (await self._js.stream_info(STREAM)).state.last_seq
        for subscription in self._subscriptions:
            await subscription.caught_up(last)

    async def key_value(self, bucket: str, *, ttl_s: float | None = None) -> KeyValue:
        """The bucket, made with file storage and one revision a key if it is not there; `ttl_s`: how long a key is
        kept.
        """
        try:
            return await self._js.key_value(bucket)
        except nats.js.errors.NotFoundError:
            config = KeyValueConfig(bucket=bucket, ttl=ttl_s, storage=StorageType.FILE, direct=True)
        try:
            return await self._js.create_key_value(config)
        except nats.js.errors.BadRequestError:  # another process made it first, with other settings
            return await self._js.key_value(bucket)

    @property
    def jetstream(self) -> JetStreamContext:
        """JetStream itself, for what buckets do not offer, such as removing many keys at once."""
        return self._js

    @property
    def connected(self) -> bool:
        """Whether NATS answers at the moment."""
        return self._client.is_connected

    @property
    def max_payload_bytes(self) -> int:
        """The longest message this NATS server takes."""
        return self._client.max_payload

    async def flush(self) -> None:
        """Returns once all facts accepted until now are in the stream."""
        await self._outbox.flush()

    async def drain(self, timeout_s: float = 10.0) -> None:
        """Stop hearing, send what is accepted, close the connection. What NATS does not take in time is logged as
        lost.
        """
        for subscription in self._subscriptions:
            subscription.close()
        try:
            async with asyncio.timeout(timeout_s):
                await self._outbox.flush()
        except TimeoutError:
            log.error("NATS is away: accepted facts are lost with this process", facts=self._outbox.unacknowledged)
        self._drained = True
        with suppress(nats.errors.Error):
            await self._client.drain()
        if not self._client.is_closed:
            await self._client.close()

    async def _connect(self, url: str, timeout_s: float) -> None:
        try:
            async with asyncio.timeout(timeout_s):
                await self._client.connect(
                    url,
                    name=self._name,
                    max_reconnect_attempts=-1,
                    reconnect_time_wait=RECONNECT_WAIT_S,  # type: ignore[arg-type]  # seconds, may be fractions
                    connect_timeout=CONNECT_TIMEOUT_S,  # type: ignore[arg-type]
                    drain_timeout=ANSWER_TIMEOUT_S,  # type: ignore[arg-type]
                    error_cb=self._on_error,
                    disconnected_cb=self._on_disconnect,
                    reconnected_cb=self._on_reconnect,
                )
                await self._make_stream()
                self._connected.set()
        except TimeoutError:
            await self._client.close()
            raise BusStartError(
                f"NATS at {url} did not answer within {timeout_s:g} s ({self._last_error!r}): is it running?"
            ) from None

    async def _make_stream(self) -> None:
        config = StreamConfig(
            name=STREAM,
            subjects=[f"{SUBJECT_ROOT}.>"],
            storage=StorageType.FILE,
            max_age=FACTS_KEPT_S,
            duplicate_window=DUPLICATE_WINDOW_S,
        )
        while True:
            try:
                await self._js.add_stream(config)
                return
            except nats.js.errors.BadRequestError:
                await self._js.update_stream(config)
                return
            except nats.errors.NoRespondersError as error:
                self._last_error = RuntimeError("JetStream is not enabled: start nats-server with -js")
                log.warning("JetStream does not answer", error=repr(error))
            except (nats.js.errors.ServiceUnavailableError, nats.errors.TimeoutError) as error:
                self._last_error = error
            await asyncio.sleep(RETRY_ENSURE_S)

    async def _send(self, message: Outgoing) -> None:
        await self._connected.wait()
        try:
            async with asyncio.timeout(ANSWER_TIMEOUT_S) as self._ack_timeout:
                await self._js.publish(message.subject, message.payload, headers=message.headers)
        except TimeoutError as error:
            raise nats.errors.TimeoutError from error
        except nats.js.errors.NoStreamResponseError:
            # A server that came back with an empty store, or whose JetStream is not up yet.
            await self._make_stream()
            raise
        finally:
            self._ack_timeout = None

    async def _keep_subscriptions(self) -> None:
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(ENSURE_INTERVAL_S):
                    await self._reconnected.wait()
            reconnected = self._reconnected.is_set()
            self._reconnected.clear()
            try:
                for subscription in list(self._subscriptions):
                    await subscription.ensure(reconnected=reconnected)
            except nats.js.errors.NotFoundError:  # the stream itself is gone
                await self._make_stream()
                self._reconnected.set()
            except nats.errors.Error as error:
                log.debug("fact consumers not checked", error=repr(error))
                if reconnected:
                    self._reconnected.set()
                await asyncio.sleep(RETRY_ENSURE_S)

    async def _on_error(self, error: Exception) -> None:
        if repr(error) != repr(self._last_error):  # once, not ten times a second while the server is away
            log.warning("NATS error", error=repr(error))
        self._last_error = error

    async def _on_disconnect(self) -> None:
        self._connected.clear()
        if self._ack_timeout is not None and not self._ack_timeout.expired():
            # The acknowledgement will not come any more.
            self._ack_timeout.reschedule(asyncio.get_running_loop().time())
        if not self._client.is_closed:
            log.warning("NATS is away, reconnecting")

    async def _on_reconnect(self) -> None:
        log.info("NATS is back")
        self._last_error = None
        self._connected.set()
        self._reconnected.set()


@asynccontextmanager
async def open_bus(
    url: str, name: str, *, timeout_s: float = 60.0, tracer: trace.Tracer | None = None
) -> AsyncIterator[Bus]:
    """A connected bus for the time of the block; left without `drain`, it drains. Raises BusStartError."""
    bus = Bus(name, tracer or trace.NoOpTracer())
    await bus._connect(url, timeout_s)
    async with beside([bus._outbox.run, bus._keep_subscriptions]):
        try:
            yield bus
        finally:
            if not bus._client.is_closed:
                await bus.drain()
