"""Reach the services of a mesh: channels, deadlines, retries, traces, and one clock for everything
the client records.

Mesh is owned by Client; trajectories, sessions and rollouts borrow it. Invariants: one address, the
scheduler's, is enough, because the others come from Scheduler.GetDirectory at first use; a logical
call ends by its deadline, retries included; its request, and so its request_id, is the same in
every attempt, so that a server answers a repeat from its record.

Where a mesh runs several schedulers, one of them leads and the others stand by: calls go to the one
whose gRPC health is SERVING, and a connection that answers no ping for PING_TIMEOUT_MS is given up.

Retried are UNAVAILABLE and a connection that broke under the call (safe, because every mutation
carries a request_id), and RESOURCE_EXHAUSTED where the server sent a RetryInfo. gRPC's own
retryPolicy is not used: it cannot see RetryInfo, stops at 5 attempts, and two layers of retries
multiply. Its transparent retries, of calls that never left this process, stay on.

A call that is made or in flight when its client closes raises TreadleError CLIENT_CLOSED: gRPC
itself raises UsageError, or a CancelledError in a task that nobody has cancelled.

All calls for one trajectory belong to one trace (`TrajectoryTrace`), by W3C trace context.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import random
import time
import uuid
from collections.abc import AsyncIterable, AsyncIterator, Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar, cast

import grpc

from treadle.certificates import Certificates, Options, open_channel
from treadle.engine.v1 import engine_pb2_grpc
from treadle.errors import TreadleError, error_from, refused
from treadle.rollout.v1 import rollout_pb2_grpc
from treadle.scheduler.v1 import scheduler_pb2, scheduler_pb2_grpc
from treadle.tools.v1 import rewards_pb2_grpc, tools_pb2_grpc

if TYPE_CHECKING:
    from treadle.engine.v1.engine_pb2_grpc import EngineServiceAsyncStub
    from treadle.rollout.v1.rollout_pb2_grpc import RolloutServiceAsyncStub
    from treadle.tools.v1.rewards_pb2_grpc import RewardsServiceAsyncStub
    from treadle.tools.v1.tools_pb2_grpc import ToolsServiceAsyncStub
import secrets
import sys
from contextlib import AbstractContextManager, contextmanager, nullcontext

T = TypeVar("T")
Q = TypeVar("Q")
A = TypeVar("A")

# SubmitTrajectory carries a whole trajectory; gRPC's own limit of 4 MiB is about 450k tokens with
# logprobs and mask.
MAX_MESSAGE_BYTES = 256 * 1024 * 1024
# Options of every channel of the mesh, also of its services.
RECOVERING: Options = (
    ("grpc.initial_reconnect_backoff_ms", 100),
    # A peer that restarts is back within a second; the default of 120 s would miss it for minutes.
    ("grpc.max_reconnect_backoff_ms", 1_000),
    # A machine that vanished, or a process that is stopped, sends no reset: pings notice within 15
    # s. Treadle's servers allow them this often. The last two: by default gRPC waits for a minute
    # for the answer to a ping that measures the link, and sends no other meanwhile; and a stream
    # that only reads may ping once a minute.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.ping_timeout_ms", 5_000),
    ("grpc.http2.max_pings_without_data", 0),
)
_OPTIONS: Options = (
    *RECOVERING,
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.min_reconnect_backoff_ms", 5_000),  # how long one attempt to connect may take
    # Two clients of one process, or of one test, never share a connection and so never each other's
    # backoff.
    ("grpc.use_local_subchannel_pool", 1),
)

# ErrorInfo.reason of a wait that may last longer than a moment, and the text for the log.
_WAITS = {
    "NO_ENGINE": "steps wait for an engine",
    "PAYLOADS_HELD": "finished trajectories wait for room",
}
CLIENT_CLOSED = "CLIENT_CLOSED"  # reason of calls that their own client has ended
STEP_HELD = "STEP_HELD"  # ErrorInfo.reason of a step that waits for space on an engine
PING_TIMEOUT_MS = 2_000
# Options of a channel to processes of which one serves. The server's name may stand for several
# addresses; a process that takes the place of another one has a new address.
FOLLOWING: Options = (
    (
        "grpc.service_config",
        json.dumps(
            {"loadBalancingConfig": [{"round_robin": {}}], "healthCheckConfig": {"serviceName": ""}}
        ),
    ),
    ("grpc.keepalive_time_ms", 2_000),
    ("grpc.keepalive_timeout_ms", PING_TIMEOUT_MS),
    ("grpc.http2.ping_timeout_ms", PING_TIMEOUT_MS),
    # a process that hangs accepts a connection and sends nothing
    ("grpc.min_reconnect_backoff_ms", 1_000),
    ("grpc.dns_min_time_between_resolutions_ms", 1_000),
)

_log = logging.getLogger("treadle")


@dataclass(frozen=True)
class RetryPolicy:
    """Exponential backoff: the n-th wait is drawn evenly from half to the whole of first_delay_s ·
    growth^n, at most max_delay_s. A server's RetryInfo is a lower bound of the wait."""

    first_delay_s: float = 0.05
    growth: float = 2.0
    max_delay_s: float = 1.0  # another scheduler leads within 5 s, and this is a part of them

    def delay_s(self, attempt: int, draw: float, at_least_s: float | None) -> float:
        """Return the seconds before the next attempt; attempt counts from 0, draw is uniform in [0,
        1)."""
        longest = min(self.first_delay_s * self.growth ** min(attempt, 32), self.max_delay_s)
        return max(longest * (0.5 + 0.5 * draw), at_least_s or 0.0)


@dataclass(frozen=True)
class Timeouts:
    """Deadlines of whole logical calls in seconds, retries included; those of a step limit how long
    it may hang, and never how long it waits in a queue.

    step_s: longest time that a step which runs on an engine brings no token, and longest time that
    is spent on attempts which reach no engine. Does not count: waiting for a ticket, waiting in the
    queue of an engine, also when that is full or after a preemption, and the time for which the
    caller keeps a chunk. While the step is in the queue, the client checks each `step_s` that the
    sidecar still has it; where the sidecar does not answer within `cleanup_s`, the step goes to
    another engine.
    """

    control_s: float = 60.0  # open, close, read: outlasts a restart of the scheduler
    schedule_s: float = (
        300.0  # a step waits this long for an engine, or for an answer of the scheduler
    )
    step_s: float = 600.0  # longer than the prefill of any context
    # one stream of an engine as a whole, its time in the queue included
    stream_s: float = 24 * 3600.0
    tool_s: float = 600.0  # the tool's own wall-time limit is shorter
    reward_s: float = 3600.0  # longest wait for a score, which may wait behind scores of other jobs
    batch_s: float = 600.0  # how long get_batch(wait=True) waits
    submit_s: float = (
        600.0  # a finished trajectory waits this long while the store is full and no batch is taken
    )
    weights_s: float = 1800.0  # how long update_weights waits until all engines have loaded
    cleanup_s: float = 10.0  # abort and close at the end, where no caller wants to wait


class Backoff:
    """Waits of one logical call between its attempts, which never go past its deadline."""

    def __init__(self, policy: RetryPolicy, rng: random.Random, timeout_s: float) -> None:
        self._policy, self._rng = policy, rng
        self._deadline = time.monotonic() + timeout_s
        self._attempt = 0

    @property
    def remaining_s(self) -> float:
        """Return the seconds to the deadline; may be negative."""
        return self._deadline - time.monotonic()

    def restart(self) -> None:
        """Make the next wait as short as the first one again, because progress was made."""
        self._attempt = 0

    def exclude(self, seconds: float) -> None:
        """Do not count this much time, which the call spent in a queue."""
        self._deadline += seconds

    async def wait(self, error: TreadleError, at_least_s: float | None) -> None:
        """Sleep before the next attempt; raise `error` when the deadline would come first."""
        delay_s = self._policy.delay_s(self._attempt, self._rng.random(), at_least_s)
        self._attempt += 1
        if delay_s >= self.remaining_s:
            raise error
        await asyncio.sleep(delay_s)


class AnyOf:
    """A channel over several channels, for unary calls: each goes to a server that serves, by its
    gRPC health."""

    def __init__(self, channels: Sequence[grpc.aio.Channel]) -> None:
        self._channels = channels
        self._turns = itertools.count()

    def unary_unary(self, *arguments: Any, **options: Any) -> Callable[..., Any]:
        """Return a unary call as grpc.aio.Channel does."""
        calls = {channel: channel.unary_unary(*arguments, **options) for channel in self._channels}
        return lambda *request, **limits: calls[self._choose()](*request, **limits)

    def _choose(self) -> grpc.aio.Channel:
        """Choose the channel of one call. Where none serves, any fails at once. Where two seem to
        serve, as one of them is cut off, they take turns."""
        states = {channel: channel.get_state(try_to_connect=True) for channel in self._channels}
        ready = [
            channel for channel, state in states.items() if state is grpc.ChannelConnectivity.READY
        ]
        choice = ready or self._channels
        return choice[next(self._turns) % len(choice)]


def merge_options(options: Options, more: Options) -> Options:
    """Merge options of a channel; `more` replace those of the same name."""
    return tuple(dict([*options, *more]).items())


def follow(addresses: str, connect: Callable[[str], grpc.aio.Channel]) -> grpc.aio.Channel:
    """Open a channel to a service of several processes (host:port, with commas between) of which
    one serves at a time.

    connect: opens the channel to one address, with the options FOLLOWING, and closes it in the end.
    """
    channels = [connect(address.strip()) for address in addresses.split(",")]
    return channels[0] if len(channels) == 1 else cast(grpc.aio.Channel, AnyOf(channels))


TRACE_STATE = "treadle=root"  # the services read it in treadle_scheduler.metrics


class TrajectoryTrace:
    """The trace of one trajectory, from its opening to `end`."""

    def __init__(self) -> None:
        carrier: dict[str, str] = {}
        # A process that has not imported OpenTelemetry cannot have set it up, and this package does
        # not depend on it.
        self._otel: Any = sys.modules.get("opentelemetry.trace")
        if self._otel is not None:
            from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

            w3c = TraceContextTextMapPropagator()
            self._span = self._otel.get_tracer("treadle").start_span("trajectory")
            w3c.inject(carrier, self._otel.set_span_in_context(self._span))
        if not carrier:
            carrier = {
                "traceparent": f"00-{secrets.token_hex(16)}-{secrets.token_hex(8)}-01",
                "tracestate": TRACE_STATE,
            }
            if (
                self._otel is not None
            ):  # interceptors of OpenTelemetry find the context in the active span
                self._span = self._otel.get_current_span(w3c.extract(carrier))
        self._metadata = tuple(carrier.items())

    def bind(self, method: Callable[..., T]) -> Callable[..., T]:
        """Return the method with calls that belong to the trace."""

        def start(request: object, timeout: float) -> T:
            with self._active():
                return method(request, timeout=timeout, metadata=self._metadata)

        return start

    def name(self, **ids: str) -> None:
        """Add the ids of the trajectory to its trace, once they are known."""
        if self._otel is not None:
            self._span.set_attributes({f"treadle.{name}": value for name, value in ids.items()})

    def end(self, outcome: str) -> None:
        """End the trace with the outcome of the trajectory, which is closed."""
        if self._otel is not None:
            self.name(outcome=outcome)
            self._span.end()

    def _active(self) -> AbstractContextManager[object]:
        if self._otel is None:
            return nullcontext()
        active: AbstractContextManager[object] = self._otel.use_span(
            self._span, end_on_exit=False, record_exception=False, set_status_on_exception=False
        )
        return active


class Mesh:
    """The services of one mesh. Owns a channel for each address, opened at first use; needs a
    running event loop.

    address: of the scheduler, or of all schedulers with commas between. call_tokens: most tokens of
    one call to an engine, 0 for whole turns. token_interval_s: for which sidecars gather tokens.
    job: whose share of pooled services this client's work takes; empty: its rollout's.
    """

    def __init__(
        self,
        address: str,
        certificates: Certificates | None,
        interceptors: Sequence[grpc.aio.ClientInterceptor],
        timeouts: Timeouts,
        retry: RetryPolicy,
        rng: random.Random,
        call_tokens: int,
        token_interval_s: float,
        job: str,
    ) -> None:
        self.timeouts, self.call_tokens, self.job = timeouts, call_tokens, job
        self.token_interval_s = token_interval_s
        self._certificates, self._interceptors = certificates, tuple(interceptors)
        self._retry, self._rng = retry, rng
        self._clock_offset_s = time.time() - time.monotonic()
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._engines: dict[str, EngineServiceAsyncStub] = {}
        self._directory: scheduler_pb2.GetDirectoryResponse | None = None
        self._directory_lock = asyncio.Lock()
        self._warned: set[str] = set()  # messages that were logged
        self._closed = False
        self._schedulers = address.split(",")
        connect = partial(
            self._channel, service="scheduler", options=merge_options(_OPTIONS, FOLLOWING)
        )
        schedulers = follow(address, connect)
        self.scheduler = scheduler_pb2_grpc.SchedulerServiceStub(schedulers)

    def clock(self) -> float:
        """Return seconds of Unix time that never go back, so that spans of one client are
        comparable."""
        return time.monotonic() + self._clock_offset_s

    def engine(self, address: str) -> EngineServiceAsyncStub:
        """Return the stub of the sidecar at host:port; it is made once an address, as each step
        needs it."""
        if address not in self._engines:
            self._engines[address] = engine_pb2_grpc.EngineServiceStub(
                self._channel(address, "sidecar")
            )
        return self._engines[address]

    async def tools(self) -> ToolsServiceAsyncStub:
        """Return the stub of the tools service. Raises FAILED_PRECONDITION NO_TOOLS_SERVICE where
        the mesh runs none."""
        return tools_pb2_grpc.ToolsServiceStub(
            self._channel(await self._address_of("tools"), "tools")
        )

    async def rewards(self) -> RewardsServiceAsyncStub:
        """Return the stub of the tools service's rewards. Raises FAILED_PRECONDITION
        NO_TOOLS_SERVICE where the mesh runs none."""
        return rewards_pb2_grpc.RewardsServiceStub(
            self._channel(await self._address_of("tools"), "tools")
        )

    async def rollout(self) -> RolloutServiceAsyncStub:
        """Return the stub of the rollout service. Raises FAILED_PRECONDITION NO_ROLLOUT_SERVICE
        where the mesh runs none."""
        return rollout_pb2_grpc.RolloutServiceStub(
            self._channel(await self._address_of("rollout"), "rollout")
        )

    def backoff(self, timeout_s: float) -> Backoff:
        """Start a new deadline, with waits by the client's policy."""
        return Backoff(self._retry, self._rng, timeout_s)

    async def call(
        self,
        method: grpc.aio.UnaryUnaryMultiCallable[Q, A],
        request: Q,
        timeout_s: float,
        trace: TrajectoryTrace | None = None,
    ) -> A:
        """Call a method with retries and return its response. Raises TreadleError when the server
        refuses or the deadline passes. trace: the trace that the call belongs to."""
        start = method if trace is None else trace.bind(method)
        backoff = self.backoff(timeout_s)
        while True:
            try:
                with self.ending_calls():
                    return await start(request, timeout=max(backoff.remaining_s, 0.001))
            except grpc.aio.AioRpcError as failure:
                error = error_from(failure)
            if not error.retryable:
                raise error
            if not error.reason:
                await self._require_trust()
            if error.reason in _WAITS and error.message not in self._warned:
                self._warned.add(error.message)
                _log.warning("%s: %s", _WAITS[error.reason], error.message)
            if error.reason == STEP_HELD:
                # The step waits in the scheduler, which repeats this error: the deadline is for a
                # scheduler that does not answer.
                await asyncio.sleep(error.retry_after_s or 0.0)
                backoff = self.backoff(timeout_s)
            else:
                await backoff.wait(error, error.retry_after_s)

    async def watch(
        self, listen: Callable[[], AsyncIterable[A]], backoff: Backoff
    ) -> AsyncIterator[A]:
        """Yield the messages of a stream to its end; open it again where it breaks. Raises
        TreadleError when the server refuses."""
        while True:
            try:
                with self.ending_calls():
                    async for message in listen():
                        backoff.restart()
                        yield message
                return
            except grpc.aio.AioRpcError as failure:
                error = error_from(failure)
                if (
                    not error.retryable and error.code is not grpc.StatusCode.DEADLINE_EXCEEDED
                ):  # it lasts too long
                    raise error from None
                await backoff.wait(error, error.retry_after_s)

    @contextmanager
    def ending_calls(self) -> Iterator[None]:
        """Raise TreadleError CLIENT_CLOSED where a call in the block ends because of `close`."""
        try:
            yield
        except (grpc.aio.UsageError, asyncio.CancelledError):
            if not self._closed or is_cancelled():
                raise
            raise _client_closed() from None

    async def close(self) -> None:
        """Close every channel; calls that still run on them raise TreadleError CLIENT_CLOSED."""
        self._closed = True
        channels = list(self._channels.values())
        self._channels, self._engines = {}, {}
        for channel in channels:
            await channel.close()

    async def _require_trust(self) -> None:
        """Raise TreadleError UNAUTHENTICATED if a connection failed because of a certificate, which
        no retry cures."""
        if self._certificates is None:
            return
        for address in self._schedulers:
            if refusal := await self._certificates.refusal(address.strip(), "scheduler"):
                raise refusal

    def _channel(self, address: str, service: str, options: Options = _OPTIONS) -> grpc.aio.Channel:
        channel = self._channels.get(address)
        if channel is None:
            if self._closed:
                raise _client_closed()
            channel = open_channel(
                address, service, self._certificates, options, self._interceptors
            )
            self._channels[address] = channel
        return channel

    async def _address_of(self, service: str) -> str:
        async with self._directory_lock:
            if self._directory is None:
                request = scheduler_pb2.GetDirectoryRequest()
                self._directory = await self.call(
                    self.scheduler.GetDirectory, request, self.timeouts.control_s
                )
        address: str = getattr(self._directory, f"{service}_address")
        if not address:
            raise refused(
                f"NO_{service.upper()}_SERVICE",
                f"the scheduler's directory names no {service} service",
            )
        return address


def _client_closed() -> TreadleError:
    message = "the client was closed before the call was answered"
    return TreadleError(grpc.StatusCode.CANCELLED, message, CLIENT_CLOSED, "client.treadle")


def request_id() -> str:
    """Make a new id for one logical call; every attempt of that call uses it."""
    return uuid.uuid4().hex


def is_cancelled() -> bool:
    """Return whether the present task is being cancelled. Otherwise a CancelledError comes from
    what the task awaits."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


async def finish(work: Coroutine[Any, Any, T]) -> T:
    """Await `work` even where the caller is cancelled meanwhile; raise the cancellation afterwards.

    Use it for cleaning up only: `work` must be limited in time by itself.
    """
    task = asyncio.get_running_loop().create_task(work)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            # unlike awaiting the task, this does not cancel it when the caller is cancelled
            await asyncio.wait({task})
        except asyncio.CancelledError as cancellation:
            cancelled = cancellation
    if cancelled is not None:
        if not task.cancelled():
            # retrieved, so that asyncio does not log it: the cancellation is raised
            task.exception()
        raise cancelled
    return task.result()
