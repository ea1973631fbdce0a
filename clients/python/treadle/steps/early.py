"""Open calls before their requests are known: the one for a ticket, and the one to the engine that it will name.

A call and its answer take 1.1 to 1.4 ms between two idle processes, and 0.5 to 0.7 where the call is open already (ADR
0067). gRPC sends one message and a stream of messages in the same way, so a server whose method takes one request sees
no difference: it begins when the request comes.

Invariants: a request goes out on one call only; a call that gets no request is cancelled.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

import grpc

from treadle.connection import Mesh
from treadle.engine.v1 import engine_pb2
from treadle.errors import StreamBroken
from treadle.scheduler.v1 import scheduler_pb2
from treadle.tracing import TrajectoryTrace

Q = TypeVar("Q")
A = TypeVar("A")

if TYPE_CHECKING:
    OpenCall = grpc.aio.StreamStreamCall[Q, A]
    GenerateStream = OpenCall[engine_pb2.GenerateRequest, engine_pb2.GenerateResponse]

# A ticket that takes longer waits for room. Its step may go to another engine, and thousands of streams would be open.
STREAM_KEPT_S = 0.1
# Most tools take less. Beside one that takes longer, a millisecond does not count.
TICKET_KEPT_S = 5.0


class EarlyCall(Generic[Q, A]):
    """An open call without a request, which is given up after `kept_s`."""

    def __init__(self, call: OpenCall[Q, A], kept_s: float) -> None:
        self._call: OpenCall[Q, A] | None = call
        self._timer = asyncio.get_running_loop().call_later(kept_s, self.drop)

    def take(self) -> OpenCall[Q, A] | None:
        """The call, which the caller then owns; None where it is given up, or has failed."""
        call, self._call = self._call, None
        self._timer.cancel()
        return None if call is None or call.done() else call

    def drop(self) -> None:
        """Cancel it, if nobody has taken it."""
        if (call := self.take()) is not None:
            call.cancel()


async def send(call: OpenCall[Q, Any], request: Q) -> None:
    """Send the request. Where the call has failed, whoever reads it hears so."""
    with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
        await call.write(request)


class EarlyTicket:
    """The call for a trajectory's next ticket, open from now on for a while; none where the client has interceptors,
    which are to see each request."""

    def __init__(self, mesh: Mesh, trace: TrajectoryTrace) -> None:
        self._scheduler = mesh.scheduler
        opening = mesh.early_ticket()
        self._early: EarlyCall[scheduler_pb2.ScheduleStepRequest, scheduler_pb2.ScheduleStepResponse] | None = None
        if opening is not None:
            self._early = EarlyCall(trace.bind(opening)(None, timeout=mesh.timeouts.schedule_s), TICKET_KEPT_S)

    def ask(
        self, request: scheduler_pb2.ScheduleStepRequest, **limits: Any
    ) -> Awaitable[scheduler_pb2.ScheduleStepResponse]:
        """As the stub's ScheduleStep; the first request goes out on the open call."""
        call = self._early.take() if self._early is not None else None
        return self._scheduler.ScheduleStep(request, **limits) if call is None else _ask(call, request)

    def drop(self) -> None:
        """There is no next ticket."""
        if self._early is not None:
            self._early.drop()


async def _ask(call: OpenCall[Q, A], request: Q) -> A:
    """The only answer of a call. Raises AioRpcError."""
    await send(call, request)
    answer = await call.read()
    if answer is grpc.aio.EOF:
        raise StreamBroken("a call ended without an answer")
    return cast(A, answer)


class EarlyStream:
    """The stream to the sidecar at `address`, opened a moment after the block begins, so that the request for the
    ticket goes out before it. None is opened where the address is empty, or the client has interceptors."""

    def __init__(self, mesh: Mesh, trace: TrajectoryTrace, address: str) -> None:
        self._mesh, self._trace, self._address = mesh, trace, address
        self._early: EarlyCall[engine_pb2.GenerateRequest, engine_pb2.GenerateResponse] | None = None
        self._next: asyncio.Handle | None = None

    def __enter__(self) -> EarlyStream:
        if self._address:
            self._next = asyncio.get_running_loop().call_soon(self._open_soon)
        return self

    def __exit__(self, *_: object) -> None:
        if self._next is not None:
            self._next.cancel()
        if self._early is not None:
            self._early.drop()

    def take(self, address: str) -> GenerateStream | None:
        """The stream, which the caller then owns, where it is open and goes to this address."""
        return self._early.take() if self._early is not None and address == self._address else None

    def _open_soon(self) -> None:
        # A call to the scheduler is sent by a task of gRPC, which waits in the loop by now.
        self._next = asyncio.get_running_loop().call_soon(self._open)

    def _open(self) -> None:
        opening: Callable[..., GenerateStream] | None = self._mesh.early_generate(self._address)
        if opening is not None:
            self._early = EarlyCall(
                self._trace.bind(opening)(None, timeout=self._mesh.timeouts.stream_s), STREAM_KEPT_S
            )
