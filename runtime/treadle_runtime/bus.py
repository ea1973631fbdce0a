"""Publish facts, subscribe to facts, and keep key-value buckets on NATS JetStream.

A `Bus` owns one connection, which reconnects for ever, the stream of facts, the outbox and the
subscriptions. Facts report what happened and are never commands. `publish` returns when the fact is
accepted, not when it has arrived; `flush` and `drain` wait.

Invariants of the outbox: accepted facts reach the stream at least once and none is lost while the
process lives, in order but for those that NATS did not take at first. Many are sent before the
first is acknowledged, since facts would otherwise wait for a round trip each. A fact is sent again,
with the same Nats-Msg-Id, until the server has acknowledged it; the stream's duplicate window makes
that harmless.
"""

import asyncio
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Any, TypeVar, cast

import nats.errors
import nats.js.errors
import structlog
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.js import JetStreamContext
from nats.js.api import Header, PubAck
from nats.js.kv import KV_DEL, KV_OP, KeyValue
from opentelemetry import propagate, trace
from treadle.certificates import NATS_NAME, Certificates
from treadle.telemetry.v1.facts_pb2 import Fact

from treadle_runtime.buckets import NO_CLUSTER, open_bucket, reserve, until_answered
from treadle_runtime.config import DEFAULT_FACTS_BYTES, hide_passwords
from treadle_runtime.errors import StartError
from treadle_runtime.facts import (
    API_OF_ACCOUNT,
    MAKER,
    POSITIONS,
    STREAM,
    FactSubscription,
    Handler,
    stream_config,
    subject_of,
    subjects_of,
)

log = structlog.get_logger()

OUTBOX_CAPACITY = (
    65_536  # facts; about 30 MB, minutes of a busy mesh without NATS. When full, publishing waits.
)
MOST_UNACKNOWLEDGED = (
    256  # facts sent together; about 100 KB, and far more than come in a round trip
)
LONGEST_SUBJECT = 2048  # NATS closes the connection of a client whose lines have 4,096 characters
FIRST_RETRY_S, LONGEST_RETRY_S = 0.05, 1.0
RECONNECT_WAIT_S = 0.1  # NATS is back within a second of a restart
CONNECT_TIMEOUT_S = 2.0  # timeout of one attempt
ANSWER_TIMEOUT_S = 2.0  # timeout of a JetStream request; a healthy server answers in under 1 ms
ENSURE_INTERVAL_S = 10.0  # how often JetStream and the subscriptions are checked
RETRY_ENSURE_S = 0.2  # JetStream answers a little later than the server accepts connections
SILENT_S = 10.0  # JetStream that has not answered for so long needs somebody; see SILENT
CLOSE_TIMEOUT_S = 1.0  # how long to wait until a connection is closed

# The header that names the subject to which Nats-Expected-Last-Subject-Sequence applies, where that
# is not the message's own.
EXPECTED_LAST_SUBJECT_SEQUENCE_SUBJECT = "Nats-Expected-Last-Subject-Sequence-Subject"
_KEY_CHARS = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-/")

# Errors of a request while JetStream does not answer.
NO_ANSWERS = (
    nats.errors.NoRespondersError,
    nats.errors.TimeoutError,
    nats.js.errors.ServiceUnavailableError,
)
SILENT = (
    "NATS is connected, and its JetStream does not answer or store. Was nats-server started with "
    "-js? Where its disk was full a stream stores nothing more, also once there is space: free "
    "some, then restart nats-server"
)

R = TypeVar("R")
Message = tuple[str, bytes, dict[str, str]]  # subject, payload, headers


async def _wait_for(awaitable: Awaitable[R], timeout: float | None) -> R:
    async with asyncio.timeout(timeout):
        return await awaitable


if sys.version_info < (3, 12):
    # nats-py waits for answers with asyncio.wait_for. Before Python 3.12 that loses a cancellation
    # which comes together with the answer (python/cpython#86296): a task that writes at that moment
    # goes on for ever, and its process does not end at SIGTERM. 3.12 does it as above.
    asyncio.wait_for = _wait_for  # type: ignore[assignment]


class _JetStream(JetStreamContext):
    """JetStream that notes of each message whether it was stored. Its `publish_async` reports a
    refusal: in nats-py the answer raises in a callback, and the message waits for its
    acknowledgement for ever.

    note: called with what was asked, and with the error of a request without an answer.
    """

    def __init__(
        self, client: Client, note: Callable[[str, Exception | None], None], **options: Any
    ) -> None:
        super().__init__(client, timeout=ANSWER_TIMEOUT_S, **options)
        self._note = note

    async def publish(self, subject: str, *arguments: Any, **options: Any) -> PubAck:
        try:
            acknowledgement = await super().publish(subject, *arguments, **options)
        except nats.errors.TimeoutError as error:
            self._note(_stream_of(subject), error)
            raise
        self._note(_stream_of(subject), None)
        return acknowledgement

    async def _handle_async_reply(self, msg: Msg) -> None:
        try:
            await super()._handle_async_reply(msg)
        except nats.js.errors.APIError as error:
            self._publish_async_futures[msg.subject.rpartition(".")[2]].set_exception(error)


def bus_name(service: str) -> str:
    """Return the name under which a service connects."""
    return f"treadle-{service}"


def kv_key(*parts: str) -> str:
    """Return a valid key of a bucket made of any strings; distinct parts give distinct keys, joined
    by dots."""
    return ".".join(
        part
        if _KEY_CHARS.issuperset(part)
        else "".join(
            char if char in _KEY_CHARS else "".join(f"={byte:02X}" for byte in char.encode())
            for char in part
        )
        for part in parts
    )


class Bus:
    """Connection to NATS, which `open_bus` makes."""

    def __init__(
        self,
        name: str,
        tracer: trace.Tracer,
        facts_bytes: int | None,
        replicas: int | None,
        certificates: Certificates | None,
    ) -> None:
        self._name = name
        self._facts_bytes = facts_bytes
        self._replicas = replicas
        self._client = Client()
        self._certificates = certificates
        self._tls = None if certificates is None else certificates.context()
        self._js = _JetStream(self._client, self._note_answer)
        # With certificates the stream of facts is in an account of its own, which lets one service
        # make it (`nats_config` of the command line).
        shared = certificates is None
        self._makes_stream = shared or name == bus_name(MAKER)
        self._facts_js = (
            self._js
            if shared
            else _JetStream(self._client, self._note_answer, prefix=API_OF_ACCOUNT)
        )
        self._tracer = tracer
        self._traces = not isinstance(tracer, trace.NoOpTracer)
        self._outbox: asyncio.Queue[Message] = asyncio.Queue(OUTBOX_CAPACITY)  # accepted facts
        self._unacknowledged = 0  # facts accepted and not yet in the stream
        self._subscriptions: list[FactSubscription] = []
        self._connected = asyncio.Event()
        # When JetStream first and last did not answer or store, by what was asked.
        self._unanswered_s: dict[str, tuple[float, float]] = {}
        self._is_silent = False  # for SILENT_S, as far as is known
        self.changed = asyncio.Event()  # set when `connected` may have changed
        # runs the handlers of facts; set before the bus is handed out
        self._handlers: asyncio.TaskGroup
        self._ack_timeouts: set[asyncio.Timeout] = set()  # of waits for acknowledgements
        self._one_sends = asyncio.Lock()
        self._look = asyncio.Event()  # set when JetStream is to be looked at
        self._reconnected = False  # since JetStream was looked at
        self._last_error: Exception | None = None
        self._drained = False

    async def publish(self, fact: Fact) -> None:
        """Accept a fact for the stream, and wait only while the outbox is full. Raises ValueError
        for a fact that cannot be sent."""
        if self._drained:
            raise nats.errors.ConnectionClosedError
        if not fact.fact_id:
            raise ValueError("a fact needs a fact_id; see make_fact")
        payload = fact.SerializeToString()
        if len(payload) > self._client.max_payload:
            raise ValueError(
                f"fact of {len(payload)} bytes; NATS takes {self._client.max_payload} at most"
            )
        subject = subject_of(fact)
        if len(subject) > LONGEST_SUBJECT:
            raise ValueError(f"fact with a subject of {len(subject)} characters: {subject[:64]}...")
        headers = {"Nats-Msg-Id": fact.fact_id}
        if self._traces:
            propagate.inject(headers)
        await self._outbox.put((subject, payload, headers))
        self._unacknowledged += 1

    async def subscribe(
        self,
        kinds: Sequence[str],
        handler: Handler,
        *,
        durable: str | None = None,
        replay: bool = False,
    ) -> None:
        """Pass the facts of `kinds` (all when empty) to `handler`, each fact_id once. Its calls
        begin in the order of the stream, and none waits until an earlier one has returned.

        durable: the name under which the position is stored, across restarts of this process;
        without it, a subscriber gets the facts that are published from now on. replay: begin with
        all facts that are kept (for a durable subscription: at its first start). A handler that
        raises gets the fact again, 5 times in all. Raises ValueError for an unknown kind.
        """
        subscription = FactSubscription(
            self._client,
            self._facts_js,
            self._handlers.create_task,
            subjects_of(kinds),
            handler,
            durable=durable,
            replay=replay,
            open_positions=partial(self.key_value, POSITIONS),
            tracer=self._tracer,
        )
        await subscription.start()
        self._subscriptions.append(subscription)

    async def catch_up(self) -> None:
        """Wait until every subscription has handled the facts that are in the stream now: a state
        rebuilt by `replay` is then complete. Raises nats.errors.Error while NATS does not answer.
        """
        last = (await until_answered(partial(self._facts_js.stream_info, STREAM))).state.last_seq
        for subscription in self._subscriptions:
            await subscription.catch_up(last)

    async def key_value(
        self,
        bucket: str,
        *,
        ttl_s: float | None = None,
        max_bytes: int | None = None,
        oldest_go: bool = False,
    ) -> KeyValue:
        """Open a bucket, and make it first if it is not there: on disk, with one revision of each
        key, which is kept for `ttl_s`. max_bytes: what it may hold, also if it is there already;
        JetStream reserves that, and refuses writes beyond it or, with `oldest_go`, removes the
        oldest keys. None: the limit stays as it is. Raises StartError where JetStream has not that
        much left."""
        how = partial(
            open_bucket,
            ttl_s=ttl_s,
            max_bytes=max_bytes,
            oldest_go=oldest_go,
            replicas=self._replicas,
        )
        return await until_answered(partial(how, self._js, bucket))

    async def write_entries(
        self,
        bucket: str,
        values: Mapping[str, bytes | None],
        *,
        fence: tuple[str, int] | None = None,
    ) -> dict[str, Exception]:
        """Write keys of a bucket, or delete those whose value is None: all are sent before the
        first is acknowledged. Returns the keys that are not known to be written, with the reason.

        fence: a key of the bucket and its revision. Each value is then written only while that key
        is at this revision; see `buckets.is_refusal`. NATS 2.11 or newer.
        """
        fenced = {} if fence is None else _fence_of(bucket, *fence)
        messages = [
            (
                f"$KV.{bucket}.{key}",
                value or b"",
                fenced | ({KV_OP: KV_DEL} if value is None else {}),
            )
            for key, value in values.items()
        ]
        results = await self._send_all(messages)
        return {
            key: result
            for key, result in zip(values, results, strict=True)
            if isinstance(result, Exception)
        }

    async def update_entry(self, bucket: str, key: str, value: bytes, *, revision: int) -> int:
        """Write a key of a bucket that is at this revision (0: it is not there), and return its new
        revision. Raises nats.errors.Error; `buckets.is_refusal` is true of it if the revision is
        another."""
        (result,) = await self._send_all(
            [(f"$KV.{bucket}.{key}", value, _fence_of(bucket, key, revision))]
        )
        if isinstance(result, Exception):
            raise result
        return result.seq

    @property
    def jetstream(self) -> JetStreamContext:
        """Return JetStream itself, for what buckets do not offer, such as removing many keys at
        once."""
        return self._js

    @property
    def unacknowledged(self) -> int:
        """Return the number of facts that were accepted and are not in the stream yet."""
        return self._unacknowledged

    @property
    def connected(self) -> bool:
        """Return whether there is a connection to NATS now, and its JetStream answers and
        stores."""
        return self._connected.is_set() and not self._is_silent

    @property
    def max_payload_bytes(self) -> int:
        """Return the length of the longest message that this NATS server takes."""
        return self._client.max_payload

    async def flush(self) -> None:
        """Wait until all facts accepted until now are in the stream."""
        await self._outbox.join()

    async def drain(self, timeout_s: float = 10.0) -> None:
        """Stop the subscriptions, send the accepted facts, and close the connection. Facts that
        NATS does not take in time are lost, and the log says how many."""
        for subscription in self._subscriptions:
            subscription.close()
        try:
            async with asyncio.timeout(timeout_s):
                await self.flush()
        except TimeoutError:
            log.error(
                "NATS is away: accepted facts are lost with this process",
                facts=self._unacknowledged,
            )
        self._drained = True
        # A position that is not stored lets the next process handle facts again.
        with suppress(nats.errors.Error, OSError, TimeoutError):
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                for subscription in self._subscriptions:
                    await subscription.save()
        await self._close()

    async def _close(self) -> None:
        """Close the connection in a bounded time: asyncio never reports the end of a connection
        whose TLS handshake has failed, and nats-py waits for it. Errors of a server that is going
        away change nothing any more; uvloop has a RuntimeError for a transport that is closed."""
        with suppress(nats.errors.Error, OSError, TimeoutError, RuntimeError):
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                await self._client.close()

    async def _connect(self, url: str, timeout_s: float) -> None:
        try:
            async with asyncio.timeout(timeout_s):
                await self._client.connect(
                    url.split(","),
                    name=self._name,
                    inbox_prefix=f"_INBOX.{self._name}",  # subjects that this service may read
                    max_reconnect_attempts=-1,
                    # Seconds, which may be fractions.
                    reconnect_time_wait=RECONNECT_WAIT_S,  # type: ignore[arg-type]
                    connect_timeout=CONNECT_TIMEOUT_S,  # type: ignore[arg-type]
                    drain_timeout=ANSWER_TIMEOUT_S,  # type: ignore[arg-type]
                    error_cb=self._on_error,
                    disconnected_cb=self._on_disconnect,
                    tls=self._tls,
                    tls_hostname=None if self._tls is None else NATS_NAME,
                    tls_handshake_first=self._tls
                    is not None,  # else a server may announce that it wants none
                    reconnected_cb=self._on_reconnect,
                )
                what = f"TREADLE_FACTS_BYTES={self._facts_bytes or DEFAULT_FACTS_BYTES}"
                await reserve(what, self._replicas, self._make_stream)
                self._note_answer(STREAM, None)
                self._connected.set()
        except TimeoutError:
            silent = (
                f"NATS at {hide_passwords(url)} did not answer within {timeout_s:g} s "
                f"({self._last_error!r}): is it running?"
            )
            raise StartError(silent) from None
        finally:
            if not self._connected.is_set():
                await self._close()

    async def _make_stream(self) -> None:
        """Make the stream of facts, or wait until the service that may do so has made it; wait for
        JetStream too."""
        while True:
            try:
                if self._makes_stream:
                    await self._add_stream()
                else:
                    await self._facts_js.stream_info(STREAM)
                return
            except nats.js.errors.NotFoundError:
                self._last_error = RuntimeError(f"the {MAKER} has not made the stream of facts")
            except NO_ANSWERS as error:
                self._last_error = RuntimeError(f"{SILENT}: {error!r}")
            await asyncio.sleep(RETRY_ENSURE_S)

    async def _add_stream(self) -> None:
        config = stream_config(self._facts_bytes or DEFAULT_FACTS_BYTES, self._replicas or 1)
        try:
            await self._facts_js.add_stream(config)
        except nats.js.errors.BadRequestError as error:
            if error.err_code == NO_CLUSTER:
                raise
            # the stream is there, with other settings
            present = (await self._facts_js.stream_info(STREAM)).config
            if self._facts_bytes is None:
                config.max_bytes = present.max_bytes
            if self._replicas is None:
                config.num_replicas = present.num_replicas
            await self._facts_js.update_stream(config)

    async def _send_accepted(self) -> None:
        while True:
            messages = [await self._outbox.get()]
            while len(messages) < MOST_UNACKNOWLEDGED and not self._outbox.empty():
                messages.append(self._outbox.get_nowait())
            retry_s = FIRST_RETRY_S
            while messages:
                await self._connected.wait()
                results = list(zip(messages, await self._send_all(messages), strict=True))
                messages = [message for message, result in results if isinstance(result, Exception)]
                for _ in range(len(results) - len(messages)):
                    self._unacknowledged -= 1
                    self._outbox.task_done()
                errors = [result for _, result in results if isinstance(result, Exception)]
                if errors:
                    self._look.set()
                    if retry_s == FIRST_RETRY_S:
                        log.warning(
                            "facts not acknowledged, sending again",
                            facts=len(errors),
                            error=repr(errors[0]),
                        )
                    if any(
                        isinstance(error, nats.js.errors.NoStreamResponseError) for error in errors
                    ):
                        # A server that came back with an empty store, or whose JetStream is not up
                        # yet.
                        await self._make_stream()
                    await asyncio.sleep(retry_s)
                    retry_s = min(2 * retry_s, LONGEST_RETRY_S)

    async def _send_all(self, messages: Sequence[Message]) -> list[PubAck | Exception]:
        """Send messages to JetStream, wait for all acknowledgements, and return for each message
        its acknowledgement, or why it is not known to be stored."""
        results: list[asyncio.Future[PubAck] | Exception] = []
        async with (
            self._one_sends
        ):  # the first call of publish_async loses the answers of others at that moment
            for subject, payload, headers in messages:
                try:
                    results.append(
                        await self._js.publish_async(subject, payload, headers=headers or None)
                    )
                except (nats.errors.Error, OSError) as error:
                    results.append(error)
        waiting = [result for result in results if isinstance(result, asyncio.Future)]
        with suppress(TimeoutError):
            async with asyncio.timeout(ANSWER_TIMEOUT_S) as timeout:
                self._ack_timeouts.add(timeout)
                try:
                    if waiting:
                        await asyncio.wait(waiting)
                finally:
                    self._ack_timeouts.discard(timeout)
                    for future in waiting:
                        future.cancel()
        outcomes = [_outcome(result) for result in results]
        answered = any(isinstance(each, PubAck | nats.js.errors.APIError) for each in outcomes)
        lost = [each for each in outcomes if isinstance(each, TimeoutError)]
        if answered or lost:
            self._note_answer(_stream_of(messages[0][0]), None if answered else lost[0])
        return outcomes

    async def _run_handlers(self, begun: asyncio.Event) -> None:
        async with asyncio.TaskGroup() as self._handlers:
            begun.set()
            await asyncio.Event().wait()

    async def _watch_jetstream(self) -> None:
        """Look regularly whether JetStream answers, and have subscriptions read what they may have
        missed; a background task."""
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(ENSURE_INTERVAL_S):
                    await self._look.wait()
            self._look.clear()
            try:
                created = (await self._facts_js.stream_info(STREAM)).created
            except nats.js.errors.NotFoundError:  # the stream itself is gone
                await self._make_stream()
                self._look.set()
            except nats.errors.Error as error:
                if isinstance(error, NO_ANSWERS):
                    self._note_answer(STREAM, error)
                self._look.set()
                await asyncio.sleep(RETRY_ENSURE_S)
            else:
                self._note_answer(STREAM, None)
                reconnected, self._reconnected = self._reconnected, False
                for subscription in self._subscriptions:
                    subscription.ensure(created, reconnected=reconnected)

    def _note_answer(self, asked: str, error: Exception | None) -> None:
        """Note whether JetStream answers, and log where that changes. asked: a stream, or a subject
        whose messages it stores. error: of a request without an answer."""
        now = time.monotonic()
        if error is None:
            self._unanswered_s.pop(asked, None)
        elif self._connected.is_set():
            self._unanswered_s[asked] = (self._unanswered_s.get(asked, (now, now))[0], now)
        silent = [
            name for name, (first, last) in self._unanswered_s.items() if last - first >= SILENT_S
        ]
        if bool(silent) == self._is_silent:
            return
        self._is_silent = bool(silent)
        self.changed.set()
        if silent:
            log.error(SILENT, asked=silent, error=repr(error))
        else:
            log.info("JetStream answers and stores again")

    async def _on_error(self, error: Exception) -> None:
        if repr(error) != repr(
            self._last_error
        ):  # once, not ten times a second while the server is away
            log.warning("NATS error", error=repr(error))
        self._last_error = error

    async def _on_disconnect(self) -> None:
        self._connected.clear()
        self.changed.set()
        if self._certificates is not None and self._tls is not None:
            self._certificates.renew(self._tls)
        for timeout in self._ack_timeouts:
            if not timeout.expired():  # the acknowledgements will not come any more
                timeout.reschedule(asyncio.get_running_loop().time())
        if not self._client.is_closed:
            log.warning("NATS is away, reconnecting")

    async def _on_reconnect(self) -> None:
        log.info("NATS is back")
        self._last_error = None
        self._unanswered_s.clear()  # of the server before
        self._is_silent = False
        self._connected.set()
        self.changed.set()
        self._reconnected = True
        self._look.set()


@asynccontextmanager
async def open_bus(
    url: str,
    name: str,
    *,
    timeout_s: float = 60.0,
    tracer: trace.Tracer | None = None,
    facts_bytes: int | None = None,
    replicas: int | None = None,
    certificates: Certificates | None = None,
) -> AsyncIterator[Bus]:
    """Yield a connected bus for the time of the block, and drain it at the end. Raises StartError
    where NATS or JetStream does not answer.

    url: one server, or several with commas between. facts_bytes: what the stream of facts may hold.
    replicas: the servers that store each stream and bucket. With None, those that are there stay as
    they are. certificates: None for a server that takes plaintext.
    """
    bus = Bus(name, tracer or trace.NoOpTracer(), facts_bytes, replicas, certificates)
    await bus._connect(url, timeout_s)
    begun = asyncio.Event()
    async with run_beside(
        [bus._send_accepted, bus._watch_jetstream, partial(bus._run_handlers, begun)]
    ):
        try:
            await begun.wait()
            yield bus
        finally:
            if not bus._client.is_closed:
                await bus.drain()


@asynccontextmanager
async def run_beside(
    tasks: Sequence[Callable[[], Coroutine[Any, Any, None]]],
) -> AsyncIterator[None]:
    """Run `tasks` during the block and cancel them at its end.

    A task that fails cancels the block, and its error is raised in an ExceptionGroup. What the
    block itself raises is not wrapped in a group.
    """
    raised: Exception | None = None
    async with asyncio.TaskGroup() as group:
        running = [group.create_task(task()) for task in tasks]
        try:
            yield
        except Exception as error:  # noqa: BLE001 - raised again below, outside of the group
            raised = error
        finally:
            for task in running:
                task.cancel()
    if raised is not None:
        raise raised


def _stream_of(subject: str) -> str:
    """Return the part of a message's subject that tells its stream, e.g. $KV.treadle_positions."""
    return ".".join(subject.split(".")[:2])


def _outcome(result: asyncio.Future[PubAck] | Exception) -> PubAck | Exception:
    """Return a message's acknowledgement, or why it is not known to be stored."""
    if isinstance(result, Exception):
        return result
    if result.cancelled():
        return nats.errors.TimeoutError()
    return cast(Exception | None, result.exception()) or result.result()


def _fence_of(bucket: str, key: str, revision: int) -> dict[str, str]:
    """Return the headers with which JetStream refuses a write unless the key is at this
    revision."""
    return {
        Header.EXPECTED_LAST_SUBJECT_SEQUENCE.value: str(revision),
        EXPECTED_LAST_SUBJECT_SEQUENCE_SUBJECT: f"$KV.{bucket}.{key}",
    }
