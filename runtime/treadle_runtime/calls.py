"""Guard every call that is served with deadline, size limit, errors, times and spans, and open
channels for the calls that a service makes.

Invariants of calls served: a servicer raises and never aborts, because a call that has been aborted
counts as finished for gRPC although the servicer still runs, so that a drain would not wait for it
(grpc/grpc#37239). A cancelled call passes through untouched. Every exception becomes exactly one
status; an exception that no table knows is INTERNAL and is logged with its traceback. The async
generator of a stream is closed in its own task before the call ends, so that its `finally` blocks
run at once.

Invariant of calls made: a call made while an RPC is served never outlives that RPC. Its timeout is
the smaller of what the caller gave and what the RPC has left.
"""

from __future__ import annotations

import asyncio
import contextvars
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence
from contextlib import ExitStack, aclosing, contextmanager
from dataclasses import dataclass
from typing import Any, cast

import grpc
import grpc.aio
import nats.errors
import structlog
from google.protobuf.message import DecodeError
from opentelemetry import trace
from treadle.certificates import Certificates, Options, open_channel
from treadle.connection import FOLLOWING, RECOVERING, follow, merge_options
from treadle.errors import error_from

from treadle_runtime.errors import (
    DETAILS_KEY,
    DeadlineExceeded,
    ErrorTable,
    Internal,
    InvalidArgument,
    TreadleError,
    Unavailable,
    Unimplemented,
    message_of,
    status_of,
)
from treadle_runtime.identity import Border, TenantLimits, caller_of
from treadle_runtime.telemetry import BOUNDS_S, Metrics

log = structlog.get_logger()

MESSAGE_FIELD = "(message)"  # stands for the whole request where no field is to blame
RETRY_S = 0.2  # a NATS server or service that was restarted is back about then
RETRY_DRAINING_S = 0.5  # by then a client has found another server, or this one has been replaced

# Fields of requests that become attributes `treadle.<field>` of spans.
SPAN_FIELDS = ("trajectory_id", "rollout_id", "engine_id", "ticket_id", "migration_id", "tool")

# gRPC's own services have rules of their own: health checks and reflection come without a deadline
# from common tools.
_FOREIGN = "/grpc."

CONNECT_MS = 1_000  # how long one attempt to connect may take
SHORTEST_TIMEOUT_S = (
    0.001  # gRPC ends a call with timeout 0 before it is made, with a less clear error
)


@dataclass
class _Served:
    ends_at: float  # loop time, seconds
    active: bool = True


_served: contextvars.ContextVar[_Served | None] = contextvars.ContextVar(
    "treadle_deadline", default=None
)


def remaining_s() -> float | None:
    """Return the seconds left to the RPC being served, at least 0; None outside one, or where it
    has no deadline."""
    served = _served.get()
    if served is None or not served.active:
        return None
    return max(0.0, served.ends_at - asyncio.get_running_loop().time())


def detached_context() -> contextvars.Context:
    """Return the present context without the deadline: `create_task(..., context=)` for work that
    outlives its RPC."""
    context = contextvars.copy_context()
    context.run(_served.set, None)
    return context


@contextmanager
def limit_to(time_remaining_s: float | None) -> Iterator[None]:
    """Set the deadline that `remaining_s` counts down to within the block; None: no deadline."""
    if time_remaining_s is None:
        yield
        return
    served = _Served(asyncio.get_running_loop().time() + time_remaining_s)
    token = _served.set(served)
    try:
        yield
    finally:
        served.active = False
        _served.reset(token)


def _within_deadline(details: grpc.aio.ClientCallDetails) -> grpc.aio.ClientCallDetails:
    left = remaining_s()
    if left is None:
        return details
    timeout = left if details.timeout is None else min(details.timeout, left)
    # A named tuple, which the stubs forget.
    stated: Any = details
    shortened: grpc.aio.ClientCallDetails = stated._replace(
        timeout=max(timeout, SHORTEST_TIMEOUT_S)
    )
    return shortened


class UnaryDeadlines(grpc.aio.UnaryUnaryClientInterceptor):
    """Interceptor that passes the served RPC's deadline on to unary calls."""

    async def intercept_unary_unary(
        self,
        continuation: Callable[..., Any],
        client_call_details: grpc.aio.ClientCallDetails,
        request: Any,
    ) -> Any:
        return await continuation(_within_deadline(client_call_details), request)


class StreamDeadlines(grpc.aio.UnaryStreamClientInterceptor):
    """Interceptor that passes the served RPC's deadline on to server-streaming calls."""

    intercept_unary_stream = UnaryDeadlines.intercept_unary_unary


class CallTimes(grpc.aio.UnaryUnaryClientInterceptor):
    """Interceptor that records how long unary calls take and how they end, also those that reach no
    server."""

    def __init__(self, metrics: Metrics) -> None:
        what = "Duration of calls made, by the answer's status"
        self._record = metrics.histogram("rpc.client.call.duration", "s", what, BOUNDS_S)

    async def intercept_unary_unary(
        self,
        continuation: Callable[..., Any],
        client_call_details: grpc.aio.ClientCallDetails,
        request: Any,
    ) -> Any:
        began_s, code = time.monotonic(), grpc.StatusCode.CANCELLED
        call = await continuation(client_call_details, request)
        try:
            code = await call.code()
        except asyncio.CancelledError:
            call.cancel()
            raise
        finally:
            self._record(time.monotonic() - began_s, _rpc_labels(client_call_details.method, code))
        return call


def _rpc_labels(method: str | bytes, code: grpc.StatusCode) -> dict[str, str]:
    """Return OpenTelemetry's attributes of an RPC."""
    name = method.decode() if isinstance(method, bytes) else method
    return {
        "rpc.system.name": "grpc",
        "rpc.method": name.lstrip("/"),
        "rpc.response.status_code": code.name,
    }


class Channels:
    """Channels of one process, one for each address. certificates: None for plaintext."""

    def __init__(
        self,
        receive_limit_bytes: int,
        telemetry: Sequence[grpc.aio.ClientInterceptor] = (),
        certificates: Certificates | None = None,
    ) -> None:
        self._certificates = certificates
        self._options: Options = (
            ("grpc.max_receive_message_length", receive_limit_bytes),
            ("grpc.min_reconnect_backoff_ms", CONNECT_MS),
            *RECOVERING,
        )
        self._interceptors = [*telemetry, UnaryDeadlines(), StreamDeadlines()]
        self._open: dict[tuple[str, str, Options], grpc.aio.Channel] = {}

    def get(self, address: str, service: str) -> grpc.aio.Channel:
        """Return the channel to the `service` (scheduler, sidecar, ...) at `address` (host:port),
        which is opened at the first use."""
        return self._get(address, service, self._options)

    def follow(self, addresses: str, service: str) -> grpc.aio.Channel:
        """Return a channel to a service of several processes (addresses with commas between) of
        which one serves at a time."""
        options = merge_options(self._options, FOLLOWING)
        return follow(addresses, lambda address: self._get(address, service, options))

    def _get(self, address: str, service: str, options: Options) -> grpc.aio.Channel:
        key = (address, service, options)
        if key not in self._open:
            self._open[key] = open_channel(
                address, service, self._certificates, options, self._interceptors
            )
        return self._open[key]

    async def close(self) -> None:
        """Close all channels, which cancels the calls in flight on them."""
        while self._open:
            _, channel = self._open.popitem()
            await channel.close()


class Interceptor(grpc.aio.ServerInterceptor):
    """Interceptor of one server. `domain` goes into each ErrorInfo; `tracing` is OpenTelemetry's
    interceptor, or None. `admit` is awaited before each call, and what it raises is the answer.
    tenants: limits of each tenant, where callers have certificates; None in plaintext, where
    callers are not known. `metrics` get the time and the status of each call."""

    def __init__(
        self,
        *,
        domain: str,
        errors: ErrorTable,
        max_message_bytes: int,
        stopping: asyncio.Event,
        metrics: Metrics,
        tracing: grpc.aio.ServerInterceptor | None = None,
        admit: Callable[[], Awaitable[None]] | None = None,
        tenants: TenantLimits | None = None,
    ) -> None:
        self._tenants = tenants
        self._domain = domain
        self._errors: ErrorTable = {**_RUNTIME_ERRORS, **errors}
        self._max_message_bytes = max_message_bytes
        self._stopping = stopping
        what = "Duration of calls served, by status; of a stream, until its end"
        self._record = metrics.histogram("rpc.server.call.duration", "s", what, BOUNDS_S)
        self._tracing = tracing
        self._may_serve = admit
        self._handlers: dict[str, grpc.RpcMethodHandler[Any, Any]] = {}
        self._in_flight = 0
        self.idle = asyncio.Event()  # no call is being served, servicer code included
        self.idle.set()

    async def intercept_service(
        self,
        continuation: Callable[
            [grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]
        ],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        method = handler_call_details.method
        if method in self._handlers:
            return self._handlers[method]
        handler = await continuation(handler_call_details)
        if handler is None or method.startswith(_FOREIGN):
            return handler
        if handler.request_streaming:
            raise NotImplementedError(f"{method}: no RPC of Treadle streams requests")
        self._handlers[method] = await self._guarded(handler, handler_call_details)
        return self._handlers[method]

    async def _guarded(
        self, handler: grpc.RpcMethodHandler[Any, Any], details: grpc.HandlerCallDetails
    ) -> grpc.RpcMethodHandler[Any, Any]:
        behavior: Any = self._behavior(handler, details.method)
        deserialize = self._limited(handler.request_deserializer)
        if self._tracing is not None:
            # To OpenTelemetry both kinds are one coroutine; given a generator, it would close ours
            # late and elsewhere.
            plain = grpc.unary_unary_rpc_method_handler(
                behavior, deserialize, handler.response_serializer
            )

            async def give(_: grpc.HandlerCallDetails) -> Any:
                return plain

            traced: Any = await self._tracing.intercept_service(give, details)
            behavior = traced.unary_unary
        if handler.response_streaming:
            return grpc.unary_stream_rpc_method_handler(
                behavior, deserialize, handler.response_serializer
            )
        return grpc.unary_unary_rpc_method_handler(
            behavior, deserialize, handler.response_serializer
        )

    def _behavior(
        self, handler: grpc.RpcMethodHandler[Any, Any], method: str
    ) -> Callable[[Any, Any], Awaitable[Any]]:
        name = method.rpartition("/")[2]
        border = None if self._tenants is None else Border(method, self._tenants)
        serve: Any = handler.unary_stream if handler.response_streaming else handler.unary_unary

        async def respond(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
            if not handler.response_streaming:
                return await serve(request, context)
            async with aclosing(serve(request, context)) as responses:
                if name.startswith("Watch"):
                    return await self._write_until_stopping(responses, context)
                async for response in responses:
                    await context.write(response)
            return None

        async def behavior(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
            self._count(context)
            _note_ids(request)
            began_s, code = time.monotonic(), grpc.StatusCode.OK
            try:
                with ExitStack() as admitted:
                    if border is not None:
                        now = asyncio.get_running_loop().time()
                        admitted.enter_context(border.admit(caller_of(context), request, now))
                    admitted.enter_context(self._admit(request, context, name))
                    if self._may_serve is not None:
                        await self._may_serve()
                    return await respond(request, context)
            except asyncio.CancelledError:
                late = context.time_remaining() == 0
                code = grpc.StatusCode.DEADLINE_EXCEEDED if late else grpc.StatusCode.CANCELLED
                raise
            except Exception as raised:  # noqa: BLE001 - any exception becomes a status here
                error = self._mapped(raised, name, context.time_remaining() == 0)
                code = error.code
                await self._abort(error, context)
            finally:
                self._record(time.monotonic() - began_s, _rpc_labels(method, code))

        return behavior

    async def _write_until_stopping(
        self, responses: AsyncGenerator[Any, None], context: grpc.aio.ServicerContext[Any, Any]
    ) -> None:
        """End a watch at drain, since it has no end of its own."""
        stopping = asyncio.ensure_future(self._stopping.wait())
        try:
            while True:
                following = asyncio.ensure_future(anext(responses, _END))
                try:
                    await asyncio.wait((following, stopping), return_when=asyncio.FIRST_COMPLETED)
                finally:
                    if not following.done():
                        following.cancel()
                        await asyncio.wait((following,))
                if following.cancelled():
                    raise Unavailable(
                        "DRAINING", "this server is shutting down", retry_after_s=RETRY_DRAINING_S
                    )
                if (response := following.result()) is _END:
                    return
                await context.write(response)
        finally:
            stopping.cancel()

    def _count(self, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        """Count a call as in flight until gRPC is done with its task: servicer code has ended, the
        answer is sent."""
        self._in_flight += 1
        self.idle.clear()
        context.add_done_callback(self._uncount)  # type: ignore[arg-type]

    def _uncount(self, _: Any) -> None:
        self._in_flight -= 1
        if self._in_flight == 0:
            self.idle.set()

    @contextmanager
    def _admit(
        self, request: Any, context: grpc.aio.ServicerContext[Any, Any], name: str
    ) -> Iterator[None]:
        if isinstance(request, TreadleError):  # the message was refused before it was parsed
            raise request
        # the stubs omit None, for a call without a deadline
        left = cast(float | None, context.time_remaining())
        if left is None and not name.startswith("Watch"):
            raise InvalidArgument(
                "(deadline)",
                "every call needs a deadline: give the call a timeout",
                "DEADLINE_REQUIRED",
                method=name,
            )
        with limit_to(left):
            yield

    def _limited(self, deserialize: Callable[[bytes], Any] | None) -> Callable[[bytes], Any]:
        """Refuse a message by its size before it is parsed, so that an oversize message costs no
        memory twice."""

        def limited(data: bytes) -> Any:
            if len(data) > self._max_message_bytes:
                description = f"has {len(data)} bytes; the limit is {self._max_message_bytes}"
                return InvalidArgument(MESSAGE_FIELD, description, "MESSAGE_TOO_LARGE")
            try:
                return deserialize(data) if deserialize else data
            except DecodeError as error:
                return InvalidArgument(MESSAGE_FIELD, f"is malformed: {error}", "MESSAGE_MALFORMED")

        return limited

    async def _abort(
        self, error: TreadleError, context: grpc.aio.ServicerContext[Any, Any]
    ) -> None:
        details = status_of(error, self._domain).SerializeToString()
        await context.abort(error.code, message_of(error), ((DETAILS_KEY, details),))

    def _mapped(self, raised: Exception, name: str, late: bool) -> TreadleError:
        error = _leaf(raised)
        if isinstance(error, TreadleError):
            return error
        if late and isinstance(error, TimeoutError):
            return DeadlineExceeded(
                "DEADLINE_EXCEEDED", f"{name} did not finish before the deadline"
            )
        known = next((base for base in type(error).__mro__ if base in self._errors), None)
        said = f"{name} failed unexpectedly ({type(error).__name__}); the service's log has more"
        mapped = Internal("INTERNAL", said) if known is None else self._errors[known](error)
        if isinstance(mapped, Internal):
            log.error("unexpected error", rpc=name, exc_info=raised)
        return mapped


_END = object()


def _note_ids(request: Any) -> None:
    """Put the ids of what the request is about on the span of the call."""
    span = trace.get_current_span()
    if span.is_recording():
        for said in (
            request,
            getattr(request, "ticket", None),
            getattr(request, "trajectory", None),
        ):
            for name in SPAN_FIELDS:
                if value := getattr(said, name, ""):
                    span.set_attribute(f"treadle.{name}", value)


def _leaf(error: Exception) -> Exception:
    """Return the error of an ExceptionGroup to report: the first that a caller can read, else the
    first."""
    if not isinstance(error, ExceptionGroup):
        return error
    readable = error.subgroup(TreadleError)
    group: ExceptionGroup[Exception] = readable or error
    return _leaf(group.exceptions[0])


def _upstream(error: grpc.aio.AioRpcError) -> TreadleError:
    if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
        return DeadlineExceeded(
            "UPSTREAM_DEADLINE_EXCEEDED", f"a service this one asks was late: {error.details()}"
        )
    if error_from(error).lost_connection:
        message = f"a service this one asks is not reachable: {error.details()}"
        return Unavailable("UPSTREAM_UNAVAILABLE", message, retry_after_s=RETRY_S)
    return Internal(
        "UPSTREAM_ERROR", f"a service this one asks failed: {error.code()} {error.details()}"
    )


_RUNTIME_ERRORS: ErrorTable = {
    nats.errors.Error: lambda error: Unavailable(
        "BUS_UNAVAILABLE", f"NATS does not answer ({type(error).__name__})", retry_after_s=RETRY_S
    ),
    grpc.aio.AioRpcError: _upstream,
    NotImplementedError: lambda _: Unimplemented(
        "UNIMPLEMENTED", "this service does not answer that RPC"
    ),
}
