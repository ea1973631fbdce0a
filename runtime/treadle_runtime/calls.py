"""Channels to other services: one per address, closed at drain; deadline and trace context travel with each call.

Owns: the channel cache and the client interceptor of deadlines. A call made while an RPC is served never outlives it:
its timeout is the smaller of what the caller gave and what the RPC has left.

The deadline of the RPC being served: required, known to the code below, passed on to the calls it makes.

Owns: one context variable. The interceptor sets it for the time of an RPC; `channels.py` reads it for each outgoing
call. A task that outlives its RPC sees no deadline once the RPC has ended; one that is started to live on from the
beginning takes `detached_context()`."""

import asyncio
import contextvars
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio


@dataclass
class _Served:
    ends_at: float  # loop time, seconds
    active: bool = True


_served: contextvars.ContextVar[_Served | None] = contextvars.ContextVar("treadle_deadline", default=None)


def remaining_s() -> float | None:
    """Seconds left to the RPC being served, not below 0; None outside one, or where it has no deadline."""
    served = _served.get()
    if served is None or not served.active:
        return None
    return max(0.0, served.ends_at - asyncio.get_running_loop().time())


def detached_context() -> contextvars.Context:
    """The present context without the deadline, for `create_task(..., context=)` of work that outlives its RPC."""
    context = contextvars.copy_context()
    context.run(_served.set, None)
    return context


@contextmanager
def serving_for(time_remaining_s: float | None) -> Iterator[None]:
    """Within the block, `remaining_s` counts down from `time_remaining_s`; None: no deadline."""
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


# A peer that restarts is back within a second; the default backoff of gRPC (up to two minutes) would outwait it.
FIRST_RECONNECT_BACKOFF_MS = 100
LONGEST_RECONNECT_BACKOFF_MS = 1000
# A machine that vanished sends no reset: pings find out within KEEPALIVE_MS + KEEPALIVE_TIMEOUT_MS.
KEEPALIVE_MS = 10_000
KEEPALIVE_TIMEOUT_MS = 5_000
SHORTEST_TIMEOUT_S = 0.001  # gRPC reads 0 as already over before the call is made, with a less clear error


def _within_deadline(details: grpc.aio.ClientCallDetails) -> grpc.aio.ClientCallDetails:
    left = remaining_s()
    if left is None:
        return details
    timeout = left if details.timeout is None else min(details.timeout, left)
    return grpc.aio.ClientCallDetails(
        method=details.method,
        timeout=max(timeout, SHORTEST_TIMEOUT_S),
        metadata=details.metadata,
        credentials=details.credentials,
        wait_for_ready=details.wait_for_ready,
    )


class UnaryDeadlines(grpc.aio.UnaryUnaryClientInterceptor):
    """Passes the served RPC's deadline on to unary calls."""

    async def intercept_unary_unary(
        self, continuation: Callable[..., Any], client_call_details: grpc.aio.ClientCallDetails, request: Any
    ) -> Any:
        return await continuation(_within_deadline(client_call_details), request)


class StreamDeadlines(grpc.aio.UnaryStreamClientInterceptor):
    """Passes the served RPC's deadline on to server-streaming calls."""

    async def intercept_unary_stream(
        self, continuation: Callable[..., Any], client_call_details: grpc.aio.ClientCallDetails, request: Any
    ) -> Any:
        return await continuation(_within_deadline(client_call_details), request)


class Channels:
    """The channels of one process."""

    def __init__(self, receive_limit_bytes: int, tracing: Sequence[grpc.aio.ClientInterceptor] = ()) -> None:
        self._options = [
            ("grpc.max_receive_message_length", receive_limit_bytes),
            ("grpc.initial_reconnect_backoff_ms", FIRST_RECONNECT_BACKOFF_MS),
            ("grpc.min_reconnect_backoff_ms", LONGEST_RECONNECT_BACKOFF_MS),
            ("grpc.max_reconnect_backoff_ms", LONGEST_RECONNECT_BACKOFF_MS),
            ("grpc.keepalive_time_ms", KEEPALIVE_MS),
            ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_MS),
        ]
        self._interceptors = [*tracing, UnaryDeadlines(), StreamDeadlines()]
        self._open: dict[str, grpc.aio.Channel] = {}

    def to(self, address: str) -> grpc.aio.Channel:
        """The channel to `address` (host:port), made at the first use."""
        if address not in self._open:
            self._open[address] = grpc.aio.insecure_channel(
                address, options=self._options, interceptors=self._interceptors
            )
        return self._open[address]

    async def close(self) -> None:
        """Close all; calls in flight on them are cancelled."""
        while self._open:
            _, channel = self._open.popitem()
            await channel.close()
