"""Make facts, name their NATS subjects, and subscribe to them (treadle/telemetry/v1/facts.proto).

Invariants of a subscription: handlers begin in the order of the stream but for redeliveries, each
runs to its first await before the next begins, and none waits until an earlier one has returned: a
handler that changes its state at once and then waits until that is stored delays no other fact. A
fact is acknowledged after its handler has returned. A fact whose handler raises is delivered again,
`MOST_TRIES` times in all, and is then given up with an error in the log. This process handles a
fact_id once.
"""

import asyncio
import datetime
import string
import time
import uuid
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import cache, partial, reduce

import nats.errors
import nats.js.errors
import structlog
from google.protobuf.descriptor import Descriptor
from google.protobuf.message import DecodeError, Message
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.js import JetStreamContext
from nats.js.api import (
    AckPolicy,
    ConsumerConfig,
    DeliverPolicy,
    DiscardPolicy,
    StorageType,
    StreamConfig,
)
from opentelemetry import propagate, trace
from treadle.telemetry.v1.facts_pb2 import Fact

from treadle_runtime.buckets import until_answered

log = structlog.get_logger()

STREAM = "TREADLE_FACTS"
SUBJECT_ROOT = "treadle.facts"
FACTS_KEPT_S = 3600.0  # a consumer that was away for longer starts from what is left
DUPLICATE_WINDOW_S = 120.0  # how long a repeated publish is recognised; repeats come within seconds
KINDS: frozenset[str] = frozenset(
    field.name for field in Fact.DESCRIPTOR.oneofs_by_name["fact"].fields
)

# The id in a fact's subject is the first of these that is set; facts about a step have it in
# `step`.
_SUBJECT_FIELDS = ("trajectory_id", "engine_id", "migration_id")
_NESTED_FIELDS = ("step", "info")
_TOKEN_CHARS = frozenset(string.ascii_letters + string.digits + "-_:")

Handler = Callable[[Fact], Awaitable[None]]

MOST_TRIES = 5
FIRST_REDELIVERY_S = 0.1  # doubles with each try
ACK_WAIT_S = 30.0  # longer than any handler runs: handlers start work and do not wait for it
# facts whose handlers run; more than come while state is stored, about a second of a busy mesh
MOST_UNHANDLED = 1024
REMEMBERED_FACTS = 65_536  # ids, about 8 MB; far more than the duplicate window holds
CAUGHT_UP_POLL_S = 0.02  # how often to request the progress of a replay from the server
INACTIVE_THRESHOLD_S = (
    60.0  # the server forgets a consumer without subscriber after this, unless durable
)


def stream_config(max_bytes: int, replicas: int) -> StreamConfig:
    """Return the configuration of the stream of facts. Beyond `max_bytes` the oldest facts are
    removed: refusing new ones would stop the services that publish. replicas: the servers that
    store it."""
    return StreamConfig(
        name=STREAM,
        subjects=[f"{SUBJECT_ROOT}.>"],
        storage=StorageType.FILE,
        max_age=FACTS_KEPT_S,
        max_bytes=max_bytes,
        num_replicas=replicas,
        discard=DiscardPolicy.OLD,
        duplicate_window=DUPLICATE_WINDOW_S,
    )


def make_fact(source: str, **kind_message: Message) -> Fact:
    """Return a fact with a fresh id and the present time, e.g. make_fact("sidecar/e0",
    step_finished=StepFinished(...)).

    source: service and instance. Exactly one kind is given, by the name of its field. Raises
    TypeError otherwise.
    """
    if len(kind_message) != 1 or not KINDS.issuperset(kind_message):
        raise TypeError(
            f"a fact has exactly one kind of {sorted(KINDS)}, not {sorted(kind_message)}"
        )
    fact = Fact(fact_id=uuid.uuid4().hex, source=source, **kind_message)  # type: ignore[arg-type]
    fact.time.FromNanoseconds(time.time_ns())
    return fact


def kind_of(fact: Fact) -> str:
    """Return the name of the set field of `fact`. Raises ValueError where none is set."""
    kind = fact.WhichOneof("fact")
    if kind is None:
        raise ValueError(f"fact {fact.fact_id!r} has no kind")
    return kind


def subject_of(fact: Fact) -> str:
    """Return treadle.facts.<kind>.<trajectory or engine id>; `none` where the fact is about
    neither."""
    kind = kind_of(fact)
    said = getattr(fact, kind)
    values = (reduce(getattr, path, said) for path in _id_paths(said.DESCRIPTOR))
    return f"{SUBJECT_ROOT}.{kind.replace('_', '-')}.{_token(next(filter(None, values), 'none'))}"


def subjects_of(kinds: Sequence[str]) -> list[str]:
    """Return the subject filters of some kinds; of all when `kinds` is empty. Raises ValueError for
    an unknown kind."""
    unknown = sorted(set(kinds) - KINDS)
    if unknown:
        raise ValueError(f"no such kind of fact: {unknown}; there are {sorted(KINDS)}")
    return [f"{SUBJECT_ROOT}.{kind.replace('_', '-')}.>" for kind in kinds] or [f"{SUBJECT_ROOT}.>"]


@cache
def _id_paths(kind: Descriptor) -> tuple[tuple[str, ...], ...]:
    """Return the fields of a kind of fact that may name what it is about, each as a path."""
    for nested in _NESTED_FIELDS:
        if nested in kind.fields_by_name:
            return tuple(
                (nested, *path) for path in _id_paths(kind.fields_by_name[nested].message_type)
            )
    return tuple((name,) for name in _SUBJECT_FIELDS if name in kind.fields_by_name)


def _token(text: str) -> str:
    """Return the text as one token of a NATS subject, without dot, space or wildcard."""
    if _TOKEN_CHARS.issuperset(text):
        return text
    return "".join(char if char.isalnum() or char in "-_:" else "_" for char in text)


class FactSubscription:
    """JetStream push consumer of `subjects` that passes each fact to `handler`; `ensure` restores
    it where the server has lost it."""

    def __init__(
        self,
        client: Client,
        js: JetStreamContext,
        start_task: Callable[[Coroutine[None, None, None]], object],
        subjects: Sequence[str],
        handler: Handler,
        *,
        durable: str | None,
        replay: bool,
        tracer: trace.Tracer,
    ) -> None:
        self._client, self._js, self._start_task = client, js, start_task
        self._subjects, self._handler, self._tracer = list(subjects), handler, tracer
        self._durable, self._replay = durable, replay
        self._name = durable or f"ephemeral-{uuid.uuid4().hex}"
        # A durable consumer keeps its subject, so that a restarted process goes on receiving from
        # the same consumer.
        self._deliver_subject = f"treadle.deliver.{self._name}"
        self._handled: OrderedDict[str, None] = OrderedDict()
        self._in_hand: set[str] = set()  # ids of facts whose handlers run
        self._stream_created: datetime.datetime | None = (
            None  # a stream that is made again counts from 1
        )
        self._next_sequence: int | None = None  # where in the stream a lost consumer goes on
        self._open_sequences: set[int] = set()  # facts received, neither acknowledged nor given up
        self._closing = False

    async def start(self) -> None:
        """Continue with the durable consumer of an earlier process, or subscribe and then make a
        consumer."""
        info = await until_answered(partial(self._js.stream_info, STREAM))
        self._stream_created = info.created
        # Before the consumer is made, since a process that hangs still listens there, and would get
        # all that is sent again.
        await self._client.subscribe(self._deliver_subject, cb=self._on_message)
        if not await until_answered(self._adopt):
            if not self._replay:
                # From here on, also if the consumer is lost before the first fact.
                self._next_sequence = info.state.last_seq + 1
            await self._create()

    async def ensure(self, *, reconnected: bool) -> None:
        """Make the consumer again if the server no longer knows it; after a reconnect, have it send
        lost facts again.

        Raises nats.js.errors.NotFoundError where the stream itself is gone, nats.errors.Error while
        NATS does not answer.
        """
        try:
            await self._js.consumer_info(STREAM, self._name)
        except nats.js.errors.NotFoundError:
            info = await self._js.stream_info(STREAM)
            if info.created != self._stream_created:
                self._stream_created = info.created
                self._next_sequence = 1
                self._open_sequences.clear()
            await self._create()
            log.warning("fact consumer was lost and is made again", consumer=self._name)
        else:
            if reconnected:
                await self._rewind()

    async def catch_up(self, sequence: int) -> None:
        """Wait until all facts up to this sequence of the stream are handled or given up. Raises
        nats.errors.Error."""
        while True:
            info = await until_answered(partial(self._js.consumer_info, STREAM, self._name))
            waiting = (info.num_pending or 0) + (info.num_ack_pending or 0)
            done = info.ack_floor.stream_seq if info.ack_floor is not None else 0
            if not waiting or done >= sequence:
                return
            await asyncio.sleep(CAUGHT_UP_POLL_S)

    def close(self) -> None:
        """Handle no further fact; unacknowledged facts stay with the server."""
        self._closing = True

    async def _create(self) -> None:
        config = self._config()
        if self._next_sequence is not None:
            config.deliver_policy = DeliverPolicy.BY_START_SEQUENCE
            config.opt_start_seq = min(self._open_sequences, default=self._next_sequence)
        self._open_sequences.clear()
        await until_answered(partial(self._js.add_consumer, STREAM, config))

    async def _adopt(self) -> bool:
        """Continue with the durable consumer of an earlier process; return False where there is
        none."""
        if self._durable is None:
            return False
        try:
            present = (await self._js.consumer_info(STREAM, self._name)).config
        except nats.js.errors.NotFoundError:
            return False
        # The consumer keeps its place in the stream; only its subjects may have changed.
        config = self._config()
        config.deliver_policy, config.opt_start_seq = present.deliver_policy, present.opt_start_seq
        await self._js.add_consumer(STREAM, config)
        await self._rewind()
        return True

    async def _rewind(self) -> None:
        """Have the server send unacknowledged facts at once rather than after ACK_WAIT_S."""
        with suppress(
            nats.js.errors.ServiceUnavailableError
        ):  # a server before 2.14 cannot: the facts come late
            await self._js.reset_consumer(STREAM, self._name)

    def _config(self) -> ConsumerConfig:
        return ConsumerConfig(
            name=self._name,
            durable_name=self._durable,
            deliver_subject=self._deliver_subject,
            deliver_policy=DeliverPolicy.ALL if self._replay else DeliverPolicy.NEW,
            ack_policy=AckPolicy.EXPLICIT,
            ack_wait=ACK_WAIT_S,
            max_deliver=MOST_TRIES,
            max_ack_pending=MOST_UNHANDLED,
            filter_subjects=self._subjects,
            inactive_threshold=None if self._durable else INACTIVE_THRESHOLD_S,
        )

    async def _on_message(self, message: Msg) -> None:
        if self._closing or not message.reply:
            return
        sequence = message.metadata.sequence.stream
        self._next_sequence = max(self._next_sequence or 0, sequence + 1)
        self._open_sequences.add(sequence)
        self._start_task(self._take(message, sequence))

    async def _take(self, message: Msg, sequence: int) -> None:
        try:
            if await self._handle(message):
                self._open_sequences.discard(sequence)
        except nats.errors.Error as error:
            log.debug(
                "a fact was not acknowledged and comes again",
                subject=message.subject,
                error=repr(error),
            )

    def _span(self, kind: str, message: Msg) -> AbstractContextManager[object]:
        if isinstance(self._tracer, trace.NoOpTracer):
            return nullcontext()
        context = propagate.extract(message.headers or {})
        return self._tracer.start_as_current_span(
            f"{kind} process", context, trace.SpanKind.CONSUMER
        )

    async def _handle(self, message: Msg) -> bool:
        """Return True once the fact is handled, dropped or given up, and False where it is
        delivered again."""
        try:
            fact = Fact.FromString(message.data)
            kind = kind_of(fact)
        except (DecodeError, ValueError) as error:
            log.error("not a fact, dropped", subject=message.subject, error=repr(error))
            await message.term()
            return True
        if fact.fact_id in self._in_hand:
            return False
        if fact.fact_id not in self._handled:
            self._in_hand.add(fact.fact_id)
            with self._span(kind, message):
                try:
                    await self._handler(fact)
                except (
                    Exception
                ):  # on any error the fact is delivered again, and no other fact waits for it
                    tries, about = (
                        message.metadata.num_delivered,
                        {"kind": kind, "fact_id": fact.fact_id},
                    )
                    log.exception(
                        "fact handler failed", **about, tries=tries, most_tries=MOST_TRIES
                    )
                    if tries < MOST_TRIES:
                        await message.nak(delay=FIRST_REDELIVERY_S * 2 ** (tries - 1))
                        return False
                    log.error("fact given up", **about)
                    await message.term()
                    return True
                finally:
                    self._in_hand.discard(fact.fact_id)
            self._handled[fact.fact_id] = None
            if len(self._handled) > REMEMBERED_FACTS:
                self._handled.popitem(last=False)
        await message.ack()
        return True
