"""Answer EngineService: check the request and call the sidecar's parts. Each ticket is taken
once."""

import asyncio
import heapq
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from opentelemetry import trace
from treadle.common.v1.ticket_pb2 import Ticket
from treadle.engine.v1 import engine_pb2 as pb
from treadle.engine.v1 import engine_pb2_grpc
from treadle_runtime.errors import FailedPrecondition, PermissionDenied
from treadle_runtime.fields import duration, finite, identifier, non_empty, require, seconds
from treadle_runtime.idempotency import RequestRecords, answered_once
from treadle_runtime.identity import SealCheck

from treadle_sidecar import convert
from treadle_sidecar.prefixes import Prefixes
from treadle_sidecar.runner import StepRunner
from treadle_sidecar.weights import Weights

SHORTEST_WATCH_S = 0.05
DEFAULT_WATCH_S = 1.0


class TicketBook:
    """Accepts each ticket of one engine once: used tickets are remembered until they expire. Times
    are Unix seconds by the scheduler's clock. seals: of this engine; None in plaintext."""

    def __init__(self, engine_id: str, seals: SealCheck | None) -> None:
        self._engine_id, self._seals = engine_id, seals
        self._used: set[str] = set()
        self._expiries: list[tuple[float, str]] = []

    def check(self, ticket: Ticket, expires_at: float, now: float) -> None:
        """Raise PermissionDenied TICKET_EXPIRED, SEAL_REFUSED; FailedPrecondition
        TICKET_WRONG_ENGINE, TICKET_USED; or Unavailable ENGINE_NOT_REGISTERED, unless the ticket is
        good."""
        ticket_id, engine_id = ticket.ticket_id, ticket.engine_id
        if self._seals is not None:
            self._seals.check(ticket)
        if expires_at <= now:
            message = f"the ticket expired {now - expires_at:.1f} s ago; schedule the step again"
            raise PermissionDenied("TICKET_EXPIRED", message, ticket_id=ticket_id)
        if engine_id != self._engine_id:
            reason = "TICKET_WRONG_ENGINE"
            message = f"the ticket is for engine {engine_id!r}, this is {self._engine_id!r}"
        elif ticket_id in self._used:
            reason, message = (
                "TICKET_USED",
                "the ticket was presented before; schedule the step again",
            )
        else:
            return
        raise FailedPrecondition(reason, message, ticket_id=ticket_id)

    def use(self, ticket_id: str, expires_at: float, now: float) -> None:
        """Record the ticket's one use, and forget the tickets that have expired."""
        self._used.add(ticket_id)
        heapq.heappush(self._expiries, (expires_at, ticket_id))
        while self._expiries[0][0] <= now:
            self._used.discard(heapq.heappop(self._expiries)[1])


@dataclass(eq=False)
class EngineServicer(engine_pb2_grpc.EngineServiceServicer):
    """EngineService of one engine. `load` and `info` describe the engine at the moment of their
    call; `now` is the time by the scheduler's clock."""

    runner: StepRunner
    tickets: TicketBook
    prefixes: Prefixes
    weights: Weights
    records: RequestRecords
    load: Callable[[], pb.Load]
    info: Callable[[], Awaitable[pb.EngineInfo]]
    now: Callable[[], float]

    async def Generate(
        self, request: pb.GenerateRequest, context: Any
    ) -> AsyncIterator[pb.GenerateResponse]:
        order = convert.step_order(request)
        expires_at, now = convert.ticket_expiry(request.ticket), self.now()
        self.tickets.check(request.ticket, expires_at, now)
        step = self.runner.submit(order)
        self.tickets.use(order.ticket_id, expires_at, now)
        try:
            async for event in step.events():
                if (kind := event.WhichOneof("event") or "") != "tokens":
                    trace.get_current_span().add_event(kind)
                yield event
        finally:
            self.runner.abandon(step)

    @answered_once
    async def Abort(self, request: pb.AbortRequest, context: Any) -> pb.AbortResponse:
        return pb.AbortResponse(
            output_tokens=await self.runner.abort(identifier("ticket_id", request.ticket_id))
        )

    @answered_once
    async def Reprioritize(
        self, request: pb.ReprioritizeRequest, context: Any
    ) -> pb.ReprioritizeResponse:
        require(request.changes, "changes", "must have at least one change")
        for index, change in enumerate(request.changes):
            identifier(f"changes[{index}].ticket_id", change.ticket_id)
            finite(f"changes[{index}].priority", change.priority)
        unknown = [
            c.ticket_id
            for c in request.changes
            if not self.runner.queue.reprioritize(c.ticket_id, c.priority)
        ]
        self.runner.decide()
        return pb.ReprioritizeResponse(unknown_ticket_ids=unknown)

    async def GetLoad(self, request: pb.GetLoadRequest, context: Any) -> pb.GetLoadResponse:
        return pb.GetLoadResponse(load=self.load())

    async def WatchLoad(
        self, request: pb.WatchLoadRequest, context: Any
    ) -> AsyncIterator[pb.WatchLoadResponse]:
        interval_s = seconds(request.interval) if request.HasField("interval") else DEFAULT_WATCH_S
        allowed = interval_s >= SHORTEST_WATCH_S
        require(allowed, "interval", f"must be at least {SHORTEST_WATCH_S} s, is {interval_s:g} s")
        while True:
            yield pb.WatchLoadResponse(load=self.load())
            await asyncio.sleep(interval_s)

    @answered_once
    async def Pause(self, request: pb.PauseRequest, context: Any) -> pb.PauseResponse:
        aborted, kept = await self.weights.pause(abort=convert.ends_steps(request.mode))
        return pb.PauseResponse(aborted_steps=aborted, kept_steps=kept)

    @answered_once
    async def Resume(self, request: pb.ResumeRequest, context: Any) -> pb.ResumeResponse:
        await self.weights.resume()
        return pb.ResumeResponse()

    @answered_once
    async def UpdateWeights(
        self, request: pb.UpdateWeightsRequest, context: Any
    ) -> pb.UpdateWeightsResponse:
        version = convert.weight_version(request.weight_version)
        loaded = await self.weights.update(non_empty("model_path", request.model_path), version)
        return pb.UpdateWeightsResponse(
            load_time=duration(loaded.load_s), previous_weight_version=loaded.previous
        )

    @answered_once
    async def PushWeights(
        self, request: pb.PushWeightsRequest, context: Any
    ) -> pb.PushWeightsResponse:
        pushed = await self.weights.push(convert.push_part(request))
        return pb.PushWeightsResponse(
            push_time=duration(pushed.load_s), previous_weight_version=pushed.previous
        )

    @answered_once
    async def JoinWeightsGroup(
        self, request: pb.JoinWeightsGroupRequest, context: Any
    ) -> pb.JoinWeightsGroupResponse:
        await self.weights.join_group(convert.group(request))
        return pb.JoinWeightsGroupResponse()

    @answered_once
    async def LeaveWeightsGroup(
        self, request: pb.LeaveWeightsGroupRequest, context: Any
    ) -> pb.LeaveWeightsGroupResponse:
        await self.weights.leave_group(identifier("group_name", request.group_name))
        return pb.LeaveWeightsGroupResponse()

    @answered_once
    async def Sleep(self, request: pb.SleepRequest, context: Any) -> pb.SleepResponse:
        abort, tags = convert.ends_steps(request.mode), convert.memory_tags(request.tags)
        (aborted, kept), asleep = await self.weights.sleep(tags, abort=abort)
        return pb.SleepResponse(aborted_steps=aborted, kept_steps=kept, asleep_tags=sorted(asleep))

    @answered_once
    async def Wake(self, request: pb.WakeRequest, context: Any) -> pb.WakeResponse:
        return pb.WakeResponse(
            asleep_tags=sorted(await self.weights.wake(convert.memory_tags(request.tags)))
        )

    @answered_once
    async def PrefetchPrefix(
        self, request: pb.PrefetchPrefixRequest, context: Any
    ) -> pb.PrefetchPrefixResponse:
        trajectory_id = identifier("trajectory_id", request.trajectory_id)
        source = convert.prefix_source(request)
        return await self.prefixes.prefetch(
            trajectory_id, source, request.cache_salt, request.storage_only
        )

    async def ExportPrefix(
        self, request: pb.ExportPrefixRequest, context: Any
    ) -> pb.ExportPrefixResponse:
        trajectory_id = identifier("trajectory_id", request.trajectory_id)
        return await self.prefixes.export(trajectory_id, counts_only=request.counts_only)

    @answered_once
    async def ReleasePrefix(
        self, request: pb.ReleasePrefixRequest, context: Any
    ) -> pb.ReleasePrefixResponse:
        self.prefixes.contexts.forget(identifier("trajectory_id", request.trajectory_id))
        return pb.ReleasePrefixResponse()

    async def GetEngineInfo(
        self, request: pb.GetEngineInfoRequest, context: Any
    ) -> pb.GetEngineInfoResponse:
        return pb.GetEngineInfoResponse(info=await self.info())
