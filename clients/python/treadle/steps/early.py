"""What a client does before it has a ticket: it opens calls, and asks the engine to begin the step.

A call and its answer take 1.1 to 1.4 ms between two idle processes, and 0.5 to 0.7 where the call is open already (ADR
0067). gRPC sends one message and a stream of messages in the same way, so a server whose method takes one request sees
no difference: it begins when the request comes. An engine that begins early hides the way of the ticket (ADR 0068).

Invariants: a request for a ticket goes out on one call only; a call that gets no request is cancelled. Nothing depends
on what engines are told.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

import grpc

from treadle.connection import TELL_TIMEOUT_S, Mesh
from treadle.engine.v1 import engine_pb2
from treadle.errors import StreamBroken
from treadle.scheduler.v1 import scheduler_pb2

Q = TypeVar("Q")
A = TypeVar("A")

if TYPE_CHECKING:
    from treadle.tracing import TrajectoryTrace

    OpenCall = grpc.aio.StreamStreamCall[Q, A]

KEPT_S = 5.0  # most tools take less; beside one that takes longer, a millisecond does not count
# A prompt is sent once more with its ticket. Beside a longer one, a millisecond does not count.
MOST_PROMPT_BYTES = 4 * 32_768


class EarlyCall(Generic[Q, A]):
    """An open call without a request, which is given up after KEPT_S."""

    def __init__(self, call: OpenCall[Q, A]) -> None:
        self._call: OpenCall[Q, A] | None = call
        self._timer = asyncio.get_running_loop().call_later(KEPT_S, self.drop)

    def take(self) -> OpenCall[Q, A] | None:
        """The call, which the caller then owns; None where it is given up, or has failed."""
        call, self._call = self._call, None
        self._timer.cancel()
        return None if call is None or call.done() else call

    def drop(self) -> None:
        """Cancel it, if nobody has taken it."""
        if (call := self.take()) is not None:
            call.cancel()


async def _ask(call: OpenCall[Q, A], request: Q) -> A:
    """The only answer of an open call. Raises AioRpcError."""
    with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
        await call.write(request)  # where the call has failed, whoever reads it hears so
    answer = await call.read()
    if answer is grpc.aio.EOF:
        raise StreamBroken("a call ended without an answer")
    return cast(A, answer)


class EarlyCalls:
    """What a trajectory does early. Calls are opened only where the client has no interceptors, which are to see each
    request."""

    def __init__(self, mesh: Mesh, trace: TrajectoryTrace) -> None:
        self._mesh, self._trace = mesh, trace
        self._ticket: EarlyCall[scheduler_pb2.ScheduleStepRequest, scheduler_pb2.ScheduleStepResponse] | None = None
        self._begin: EarlyCall[engine_pb2.BeginStepRequest, engine_pb2.BeginStepResponse] | None = None
        self._address = ""  # of the sidecar of the call `_begin`

    def open(self, address: str) -> None:
        """Open the calls of the next turn: for its ticket, and to the sidecar that it will probably name."""
        self.drop()
        if (ticket := self._mesh.early_ticket()) is not None:
            self._ticket = EarlyCall(self._trace.bind(ticket)(None, timeout=self._mesh.timeouts.schedule_s))
        if self._mesh.early_steps.may_tell(address) and (begin := self._mesh.early_begin(address)) is not None:
            self._begin = EarlyCall(self._trace.bind(begin)(None, timeout=KEPT_S + TELL_TIMEOUT_S))
            self._address = address

    def ask(
        self, request: scheduler_pb2.ScheduleStepRequest, **limits: Any
    ) -> Awaitable[scheduler_pb2.ScheduleStepResponse]:
        """As the stub's ScheduleStep; the first request goes out on the open call."""
        call = self._ticket.take() if self._ticket is not None else None
        return self._mesh.scheduler.ScheduleStep(request, **limits) if call is None else _ask(call, request)

    def tell(self, address: str, request: engine_pb2.BeginStepRequest) -> None:
        """Tell the sidecar at `address` of a step whose ticket is being asked for."""
        steps = self._mesh.early_steps
        if len(request.prompt.int32_le) > MOST_PROMPT_BYTES or not steps.may_tell(address):
            return
        call = self._begin.take() if self._begin is not None and address == self._address else None
        if call is None:
            begin = self._trace.bind(self._mesh.engine(address).BeginStep)
            steps.tell(address, partial(begin, request, timeout=TELL_TIMEOUT_S))
        else:
            steps.tell(address, partial(_ask, call, request))

    def drop(self) -> None:
        """Close what is open: there is no next turn, or it is another one."""
        for early in (self._ticket, self._begin):
            if early is not None:
                early.drop()
        self._ticket = self._begin = None
