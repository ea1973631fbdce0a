"""Answer EngineService: convert the request, ask the sidecar's parts, convert back. Each ticket is taken once."""

import asyncio
import heapq
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc.aio
from treadle.engine.v1 import engine_pb2 as pb
from treadle.engine.v1 import engine_pb2_grpc
from treadle_runtime.calls import remaining_s
from treadle_runtime.config import address
from treadle_runtime.errors import (
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    Unavailable,
    finite,
    identifier,
    non_empty,
    require,
)
from treadle_runtime.idempotency import RequestRecords
from treadle_runtime.times import duration, seconds

from treadle_sidecar import convert
from treadle_sidecar.prefixes import Contexts, Export, Prefixes
from treadle_sidecar.runner import StepRunner
from treadle_sidecar.weights import Weights

SHORTEST_WATCH_S = 0.05
DEFAULT_WATCH_S = 1.0
EXPORT_TIMEOUT_S = 30.0  # for another sidecar's ExportPrefix, where the caller's own deadline is further away
RETRY_SOURCE_S = 2.0


class TicketBook:
    """Accepts each ticket of one engine once: used ones are remembered until they expire. Times are Unix seconds."""

    def __init__(self, engine_id: str) -> None:
        self._engine_id = engine_id
        self._used: set[str] = set()
        self._expiries: list[tuple[float, str]] = []

    def check(self, ticket_id: str, engine_id: str, expires_at: float, now: float) -> None:
        """Raises FailedPrecondition TICKET_WRONG_ENGINE, TICKET_EXPIRED, TICKET_USED."""
        if engine_id != self._engine_id:
            reason = "TICKET_WRONG_ENGINE"
            message = f"the ticket is for engine {engine_id!r}, this is {self._engine_id!r}"
        elif expires_at <= now:
            reason = "TICKET_EXPIRED"
            message = f"the ticket expired {now - expires_at:.1f} s ago; schedule the step again"
        elif ticket_id in self._used:
            reason, message = "TICKET_USED", "the ticket was presented before; schedule the step again"
        else:
            return
        raise FailedPrecondition(reason, message, ticket_id=ticket_id)

    def use(self, ticket_id: str, expires_at: float, now: float) -> None:
        """Record the ticket's one use, and forget those that have expired."""
        self._used.add(ticket_id)
        heapq.heappush(self._expiries, (expires_at, ticket_id))
        while self._expiries[0][0] <= now:
            self._used.discard(heapq.heappop(self._expiries)[1])


class EngineServicer(engine_pb2_grpc.EngineServiceServicer):
    """`load` and `info` describe the engine at the moment; `channel` connects to another sidecar."""

    def __init__(
        self,
        *,
        runner: StepRunner,
        tickets: TicketBook,
        contexts: Contexts,
        prefixes: Prefixes,
        weights: Weights,
        records: RequestRecords,
        load: Callable[[], pb.Load],
        info: Callable[[], Awaitable[pb.EngineInfo]],
        channel: Callable[[str], grpc.aio.Channel],
    ) -> None:
        self._runner = runner
        self._tickets = tickets
        self._contexts = contexts
        self._prefixes = prefixes
        self._weights = weights
        self._records = records
        self._load = load
        self._info = info
        self._channel = channel

    async def Generate(self, request: pb.GenerateRequest, context: Any) -> AsyncIterator[pb.GenerateResponse]:
        order = convert.step_order(request)
        expires_at, now = convert.ticket_expiry(request.ticket), time.time()
        self._tickets.check(order.ticket_id, request.ticket.engine_id, expires_at, now)
        step = self._runner.submit(order)
        self._tickets.use(order.ticket_id, expires_at, now)
        try:
            async for event in step.events():
                yield convert.generate_response(event)
        finally:
            self._runner.abandon(step)

    async def Abort(self, request: pb.AbortRequest, context: Any) -> pb.AbortResponse:
        ticket_id = identifier("ticket_id", request.ticket_id)

        async def abort() -> pb.AbortResponse:
            return pb.AbortResponse(output_tokens=await self._runner.abort(ticket_id))

        return await self._records.once("Abort", request, pb.AbortResponse, abort)

    async def Reprioritize(self, request: pb.ReprioritizeRequest, context: Any) -> pb.ReprioritizeResponse:
        require(request.changes, "changes", "must have at least one change")
        for index, change in enumerate(request.changes):
            identifier(f"changes[{index}].ticket_id", change.ticket_id)
            finite(f"changes[{index}].priority", change.priority)

        async def reprioritize() -> pb.ReprioritizeResponse:
            unknown = [
                c.ticket_id for c in request.changes if not self._runner.queue.reprioritize(c.ticket_id, c.priority)
            ]
            self._runner.decide()
            return pb.ReprioritizeResponse(unknown_ticket_ids=unknown)

        return await self._records.once("Reprioritize", request, pb.ReprioritizeResponse, reprioritize)

    async def GetLoad(self, request: pb.GetLoadRequest, context: Any) -> pb.GetLoadResponse:
        return pb.GetLoadResponse(load=self._load())

    async def WatchLoad(self, request: pb.WatchLoadRequest, context: Any) -> AsyncIterator[pb.WatchLoadResponse]:
        interval_s = seconds(request.interval) if request.HasField("interval") else DEFAULT_WATCH_S
        require(
            interval_s >= SHORTEST_WATCH_S, "interval", f"must be at least {SHORTEST_WATCH_S} s, is {interval_s:g} s"
        )
        while True:
            yield pb.WatchLoadResponse(load=self._load())
            await asyncio.sleep(interval_s)

    async def Pause(self, request: pb.PauseRequest, context: Any) -> pb.PauseResponse:
        known = (pb.PAUSE_MODE_ABORT, pb.PAUSE_MODE_KEEP)
        require(request.mode in known, "mode", "must be PAUSE_MODE_ABORT or PAUSE_MODE_KEEP")

        async def pause() -> pb.PauseResponse:
            aborted, kept = await self._weights.pause(abort=request.mode == pb.PAUSE_MODE_ABORT)
            return pb.PauseResponse(aborted_steps=aborted, kept_steps=kept)

        return await self._records.once("Pause", request, pb.PauseResponse, pause)

    async def Resume(self, request: pb.ResumeRequest, context: Any) -> pb.ResumeResponse:
        async def resume() -> pb.ResumeResponse:
            await self._weights.resume()
            return pb.ResumeResponse()

        return await self._records.once("Resume", request, pb.ResumeResponse, resume)

    async def UpdateWeights(self, request: pb.UpdateWeightsRequest, context: Any) -> pb.UpdateWeightsResponse:
        version = identifier("weight_version", request.weight_version)
        model_path = non_empty("model_path", request.model_path)

        async def update() -> pb.UpdateWeightsResponse:
            load_s, previous = await self._weights.update(model_path, version)
            return pb.UpdateWeightsResponse(load_time=duration(load_s), previous_weight_version=previous)

        return await self._records.once("UpdateWeights", request, pb.UpdateWeightsResponse, update)

    async def PrefetchPrefix(self, request: pb.PrefetchPrefixRequest, context: Any) -> pb.PrefetchPrefixResponse:
        trajectory_id = identifier("trajectory_id", request.trajectory_id)
        kind = request.WhichOneof("prefix")
        require(kind, "prefix", "must be set: token_ids or from")
        if kind == "token_ids":
            prefix = convert.token_ids("token_ids", request.token_ids)
            require(prefix, "token_ids", "must have at least one token")

            async def source() -> Export:
                return Export(prefix, "", 0)
        else:
            reference: pb.PrefixRef = getattr(request, "from")
            identifier("from.trajectory_id", reference.trajectory_id)
            try:
                address(reference.engine_address)
            except ValueError as error:
                raise InvalidArgument("from.engine_address", f"must be {error}") from None

            async def source() -> Export:
                return await self._fetch(reference)

        async def prefetch() -> pb.PrefetchPrefixResponse:
            done = await self._prefixes.prefetch(trajectory_id, source, request.cache_salt, request.storage_only)
            return convert.prefetch_response(done)

        return await self._records.once("PrefetchPrefix", request, pb.PrefetchPrefixResponse, prefetch)

    async def ExportPrefix(self, request: pb.ExportPrefixRequest, context: Any) -> pb.ExportPrefixResponse:
        trajectory_id = identifier("trajectory_id", request.trajectory_id)
        export = await self._prefixes.export(trajectory_id, wait=not request.counts_only)
        return convert.export_response(export, counts_only=request.counts_only)

    async def ReleasePrefix(self, request: pb.ReleasePrefixRequest, context: Any) -> pb.ReleasePrefixResponse:
        trajectory_id = identifier("trajectory_id", request.trajectory_id)

        async def release() -> pb.ReleasePrefixResponse:
            self._contexts.forget(trajectory_id)
            return pb.ReleasePrefixResponse()

        return await self._records.once("ReleasePrefix", request, pb.ReleasePrefixResponse, release)

    async def GetEngineInfo(self, request: pb.GetEngineInfoRequest, context: Any) -> pb.GetEngineInfoResponse:
        return pb.GetEngineInfoResponse(info=await self._info())

    async def _fetch(self, reference: pb.PrefixRef) -> Export:
        stub = engine_pb2_grpc.EngineServiceStub(self._channel(reference.engine_address))
        request = pb.ExportPrefixRequest(trajectory_id=reference.trajectory_id)
        try:
            response = await stub.ExportPrefix(
                request, timeout=min(remaining_s() or EXPORT_TIMEOUT_S, EXPORT_TIMEOUT_S)
            )
        except grpc.aio.AioRpcError as error:
            what = f"{reference.engine_address} does not export {reference.trajectory_id!r}: {error.details()}"
            if error.code() is grpc.StatusCode.NOT_FOUND:
                raise NotFound("PREFIX_NOT_FOUND", what, trajectory_id=reference.trajectory_id) from error
            raise Unavailable("SOURCE_UNAVAILABLE", what, retry_after_s=RETRY_SOURCE_S) from error
        return Export(convert.token_ids("token_ids", response.token_ids), response.cache_salt, response.stored_tokens)
