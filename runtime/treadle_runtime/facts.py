"""Make facts, name their NATS subjects, and subscribe to them (treadle/telemetry/v1/facts.proto).

A subscription only reads: the stream announces what it has stored (`STORED_ROOT`), and the
subscription reads facts by their sequence and keeps its position itself. So a service needs no
right to change anything that is stored for others (ADR 0074).

Invariants of a subscription: handlers begin in the order of the stream but for repeats, each runs
to its first await before the next begins, and none waits until an earlier one has returned: a
handler that changes its state at once and then waits until that is stored delays no other fact. The
position is before the first fact whose handler has not returned. A handler that raises gets its
fact again, `MOST_TRIES` times in all; the fact is then given up with an error in the log. This
process handles a fact_id once.
"""

import asyncio
import datetime
import json
import string
import time
import uuid
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import cache, partial, reduce
from typing import Any

import nats.errors
import nats.js.errors
import structlog
from google.protobuf.descriptor import Descriptor
from google.protobuf.message import DecodeError, Message
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.js import JetStreamContext
from nats.js.api import DiscardPolicy, Header, RePublish, StorageType, StreamConfig
from nats.js.kv import KeyValue
from opentelemetry import propagate, trace
from treadle.telemetry.v1.facts_pb2 import Fact

from treadle_runtime.buckets import until_answered

log = structlog.get_logger()

STREAM = "TREADLE_FACTS"
SUBJECT_ROOT = "treadle.facts"
STORED_ROOT = "treadle.stored"  # where the stream announces each fact that it has stored
# The service that makes the stream of a mesh with certificates. The others cannot: whoever may
# write the configuration of a stream can have NATS copy any other one (ADR 0074).
MAKER = "scheduler"
# What stands before the name of a request about the stream, in place of $JS.API, where the stream
# is in an account of its own.
API_OF_ACCOUNT = "treadle.facts-api"
POSITIONS = "treadle_positions"  # bucket of the positions of durable subscriptions
FACTS_KEPT_S = 3600.0  # a subscription that was away for longer starts from what is left
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
FIRST_REPEAT_S = 0.1  # doubles with each try
# facts whose handlers run; more than come while state is stored, about a second of a busy mesh
MOST_UNHANDLED = 1024
REMEMBERED_FACTS = 65_536  # ids, about 8 MB; far more than the duplicate window holds
BATCH = 256  # facts of one request; about 100 KB
READ_TIMEOUT_S = 2.0  # timeout of a request; a healthy server answers in under 1 ms
RETRY_READ_S = 0.2
POLL_S = 0.02
# How far a server of a cluster that answers a read may be behind the one that announces facts.
LAG_S = 1.0
SAVE_INTERVAL_S = 0.2  # a process that is killed leaves facts of so long to be handled again
FOUND_NOTHING, END_OF_BATCH = "404", "204"  # statuses of answers


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
        allow_direct=True,
        republish=RePublish(f"{SUBJECT_ROOT}.>", f"{STORED_ROOT}.>", headers_only=True),
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
    """Reader of the facts of `subjects` in the stream, which passes each to `handler`.

    js: JetStream of the stream. durable: the key of its position in the bucket that
    `open_positions` opens; None: the position is in memory alone.
    """

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
        open_positions: Callable[[], Awaitable[KeyValue]],
        tracer: trace.Tracer,
    ) -> None:
        self._client, self._js, self._start_task = client, js, start_task
        self._subjects, self._handler, self._tracer = list(subjects), handler, tracer
        self._durable, self._replay, self._open_positions = durable, replay, open_positions
        self._handled: OrderedDict[str, None] = OrderedDict()  # and those whose handlers run
        # A stream that is made again counts from 1.
        self._stream_created: datetime.datetime | None = None
        self._next = 1  # sequence from which to read
        self._open: set[int] = set()  # sequences of the facts whose handlers have not returned
        self._progress = asyncio.Event()  # set when a handler has returned, or all is read
        self._announced = 0  # highest sequence that is known to be stored
        self._read_to = 0  # all facts up to this sequence have been read
        self._look = asyncio.Event()  # set when there may be something to read
        self._answers: asyncio.Queue[Msg] = asyncio.Queue()
        self._inbox, self._requests = client.new_inbox(), 0
        self._waiting: asyncio.Timeout | None = None  # of the request that waits for answers
        self._positions: KeyValue | None = None
        self._saved = 0  # position as it was last stored
        self._closing = False

    async def start(self) -> None:
        """Begin to read: at the stored position of an earlier process, else at the next fact, or
        with `replay` at the first that is kept."""
        await self._client.subscribe(f"{self._inbox}.*", cb=self._answers.put)
        for subject in self._subjects:
            announced = subject.replace(SUBJECT_ROOT, STORED_ROOT, 1)
            await self._client.subscribe(announced, cb=self._on_announcement)
        info = await until_answered(partial(self._js.stream_info, STREAM))
        self._stream_created = info.created
        self._next = 1 if self._replay else info.state.last_seq + 1
        if self._durable is not None:
            self._positions = await self._open_positions()
            stored = await until_answered(self._stored_position)
            self._next = self._next if stored is None else stored
            # From here on, also if this process is killed before the first fact.
            await until_answered(self.save)
            self._start_task(self._save_regularly())
        self._start_task(self._read())

    def ensure(self, created: datetime.datetime | None, *, reconnected: bool) -> None:
        """Read again what may have been missed, all of it where the stream was `created` again."""
        if created != self._stream_created:
            log.warning("the stream of facts was made again", subjects=self._subjects)
            self._stream_created, self._next, self._open = created, 1, set()
            self._announced = self._read_to = self._saved = 0
        if reconnected and self._waiting is not None and not self._waiting.expired():
            self._waiting.reschedule(asyncio.get_running_loop().time())  # the answer is lost
        self._look.set()

    async def catch_up(self, sequence: int) -> None:
        """Wait until all facts up to this sequence of the stream are handled or given up."""
        self._announced = max(self._announced, sequence)
        self._look.set()
        while self._read_to < sequence or any(each <= sequence for each in self._open):
            await self._until_progress()

    def close(self) -> None:
        """Handle no further fact."""
        self._closing = True

    async def save(self) -> None:
        """Store the position of a durable subscription, if it has changed. Raises
        nats.errors.Error."""
        position = min(self._open, default=self._next)
        if self._positions is not None and self._durable is not None and position != self._saved:
            value = {"stream": str(self._stream_created), "next": position}
            await self._positions.put(self._durable, json.dumps(value).encode())
            self._saved = position

    async def _on_announcement(self, message: Msg) -> None:
        stored = int((message.headers or {}).get("Nats-Sequence", 0))
        self._announced = max(self._announced, stored)
        self._look.set()

    async def _read(self) -> None:
        """Read the facts that are stored, as they come; a background task."""
        behind_s = 0.0
        while not self._closing:
            while len(self._open) >= MOST_UNHANDLED:
                await self._until_progress()
            self._look.clear()
            announced = self._announced
            try:
                if await self._read_batch():
                    continue
            except (nats.errors.Error, TimeoutError) as error:
                log.debug("facts are not read, trying again", error=repr(error))
                await asyncio.sleep(RETRY_READ_S)
                continue
            if self._next <= announced and behind_s < LAG_S:
                behind_s += POLL_S
                await asyncio.sleep(POLL_S)
                continue
            behind_s, self._read_to = 0.0, max(announced, self._next - 1)
            self._progress.set()
            await self._look.wait()

    async def _until_progress(self) -> None:
        self._progress.clear()
        await self._progress.wait()

    async def _read_batch(self) -> bool:
        """Start the handlers of the next facts, and return whether more are stored. Raises
        nats.errors.Error and TimeoutError."""
        self._requests += 1
        reply = f"{self._inbox}.{self._requests}"
        request: dict[str, int | str] = {"seq": self._next, "batch": BATCH}
        if len(self._subjects) == 1:  # with several, all are read, and the others left out here
            request |= {"next_by_subj": self._subjects[0]}
        subject = f"{self._js._prefix}.DIRECT.GET.{STREAM}"
        await self._client.publish(subject, json.dumps(request).encode(), reply=reply)
        try:
            async with asyncio.timeout(READ_TIMEOUT_S) as self._waiting:
                while True:
                    message = await self._answers.get()
                    if message.subject != reply:  # of a request that was given up
                        continue
                    headers = message.headers or {}
                    status = headers.get(Header.STATUS)
                    if status is None and "Nats-Sequence" in headers:
                        self._take(message, headers)
                    elif status == END_OF_BATCH:
                        return headers.get("Nats-Num-Pending") != "0"
                    elif status == FOUND_NOTHING:
                        return False
                    else:
                        raise nats.errors.Error(f"NATS does not read facts: {headers}")
        finally:
            self._waiting = None

    def _take(self, message: Msg, headers: dict[str, str]) -> None:
        """Start the handler of a fact that was read, unless it is of another kind, or was handled
        before."""
        if self._closing:
            return
        sequence, subject = int(headers["Nats-Sequence"]), headers["Nats-Subject"]
        self._next = sequence + 1
        if not any(subject.startswith(each.removesuffix(">")) for each in self._subjects):
            return
        try:
            fact = Fact.FromString(message.data)
            # Who may publish under a subject is known; what a message claims to be is not.
            if subject != subject_of(fact):
                raise ValueError("it stands under the subject of another fact")
        except (DecodeError, ValueError) as error:
            log.error("not a fact, dropped", subject=subject, error=repr(error))
            return
        if fact.fact_id in self._handled:
            return
        self._handled[fact.fact_id] = None
        if len(self._handled) > REMEMBERED_FACTS:
            self._handled.popitem(last=False)
        self._open.add(sequence)
        self._start_task(self._handle(fact, sequence, headers, self._open))

    async def _handle(
        self, fact: Fact, sequence: int, headers: dict[str, str], running: set[int]
    ) -> None:
        kind = kind_of(fact)
        about = {"kind": kind, "fact_id": fact.fact_id}
        for tries in range(1, MOST_TRIES + 1):
            try:
                with self._span(kind, headers):
                    await self._handler(fact)
                break
            except Exception:  # on any error the fact is handled again, and no other waits for it
                log.exception("fact handler failed", **about, tries=tries, most_tries=MOST_TRIES)
            if tries < MOST_TRIES:
                await asyncio.sleep(FIRST_REPEAT_S * 2 ** (tries - 1))
        else:
            log.error("fact given up", **about)
        running.discard(sequence)
        self._progress.set()

    def _span(self, kind: str, headers: dict[str, str]) -> AbstractContextManager[object]:
        if isinstance(self._tracer, trace.NoOpTracer):
            return nullcontext()
        return self._tracer.start_as_current_span(
            f"{kind} process", propagate.extract(headers), trace.SpanKind.CONSUMER
        )

    async def _save_regularly(self) -> None:
        """Store the position while it changes; a background task."""
        while not self._closing:
            await asyncio.sleep(SAVE_INTERVAL_S)
            try:
                await self.save()
            except nats.js.errors.NoStreamResponseError:  # a NATS server that lost its store
                with suppress(nats.errors.Error):
                    self._positions = await self._open_positions()
            except nats.errors.Error as error:
                log.debug("the position among facts is not stored yet", error=repr(error))

    async def _stored_position(self) -> int | None:
        """Return the sequence at which an earlier process would go on: 1 where the stream was made
        again since; None where there was no such process."""
        assert self._positions is not None and self._durable is not None
        try:
            value: dict[str, Any] = json.loads(
                (await self._positions.get(self._durable)).value or b"{}"
            )
        except nats.js.errors.KeyNotFoundError:
            return None
        return int(value["next"]) if value["stream"] == str(self._stream_created) else 1
