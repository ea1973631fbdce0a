"""FakeEngine: EngineService in memory, as the client, the scheduler and the migrator see it.

Tokens depend on the prompt and the index only: any engine continues a step exactly as the first one
would have, so that a test can tell a whole sequence from a mended one.
"""

import asyncio
import time
import uuid
from array import array
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio
from support.fake_servicer import FakeServicer, Gate, Port, Refusal, answer, refuse
from treadle.common.v1 import tokens_pb2
from treadle.common.v1.ticket_pb2 import Ticket
from treadle.engine.v1 import engine_pb2 as pb
from treadle.engine.v1 import engine_pb2_grpc
from treadle.scheduler.v1 import scheduler_pb2, scheduler_pb2_grpc
from treadle.telemetry.v1 import facts_pb2
from treadle.types import pack_ids, pack_logprobs, unpack_ids
from treadle_runtime.bus import Bus
from treadle_runtime.facts import make_fact

CHUNK_TOKENS = 2
HOUR_S = 3600.0  # a lost engine may stay away for long; whoever goes elsewhere does not wait for it
RPC_TIMEOUT_S = 5.0
RENEW_S = 0.2
TOKEN_S = 0.005  # of an engine with a lease
WEIGHT_VERSION = "0"
KEEPS_TRYING = (("grpc.max_reconnect_backoff_ms", 200), ("grpc.min_reconnect_backoff_ms", 100))


def token_at(prompt: Sequence[int], index: int) -> int:
    """The only possible token there."""
    return (sum(prompt) * 31 + len(prompt) * 7 + index * 13) % 50_000


def logprob_at(index: int) -> float:
    """Exact in float32."""
    return -(index % 64) / 8


@dataclass
class Script:
    """What goes wrong, at which count of output tokens. None: nothing."""

    lose_at: int | None = None  # the stream ends UNAVAILABLE ENGINE_LOST
    die_at: int | None = None  # `die` is called: the server goes away under the stream
    hold_at: int | None = None  # waits there until aborted or cancelled
    preempt_at: int | None = None
    skip_at: int | None = None  # leaves one token out
    repeat_at: int | None = None  # sends one token twice
    version_from: dict[int, str] | None = None  # weight version from that token on
    times: int = 1  # how many streams it goes wrong in
    only_max_new_tokens: int | None = (
        None  # streams that ask for another number are served in order
    )

    def meant_for(self, request: pb.GenerateRequest) -> bool:
        """Whether it goes wrong in this stream."""
        return self.times > 0 and self.only_max_new_tokens in (
            None,
            request.sampling.max_new_tokens,
        )


class FakeEngine(FakeServicer, engine_pb2_grpc.EngineServiceServicer):
    """script: for the streams to come. finished: told each ticket whose step ended in order. bus:
    for the facts of steps; None: nobody is told. prefixes: trajectory → tokens that are here.
    stored: whether shared storage has what the source of a move has."""

    def __init__(
        self,
        engine_id: str,
        finished: Callable[[str], None] = lambda _: None,
        bus: Bus | None = None,
        slots: int = 4,
        token_s: float = 0.0,
    ) -> None:
        super().__init__()
        self.engine_id, self.slots = engine_id, slots
        self.address = ""
        self.script = Script()
        self.die: Callable[[], None] = lambda: None
        self.holding = asyncio.Event()  # a stream has come to hold_at
        self.running: set[str] = set()
        self.aborted: list[str] = []
        self.refused: list[str] = []  # tickets
        self.ran: Counter[tuple[str, int]] = Counter()  # by trajectory and turn
        self.lease_id = ""
        self.silent = False  # does not renew its lease
        self.prefixes: dict[str, int] = {}
        self.stored = False
        self.cache_salt = WEIGHT_VERSION
        self.tokens_short = 0  # by so many the prefetched prefix is shorter than the source's
        self.gate = Gate()  # of a move, at the target before it reads
        self.slot = Gate()  # of steps: before each start of an attempt
        self.loads = Gate()  # of GetLoad: closed, the sidecar hangs
        self.port: Port | None = None
        self._finished, self._bus, self._token_s = finished, bus, token_s
        self._aborts: dict[str, asyncio.Event] = {}

    async def Generate(
        self, request: pb.GenerateRequest, context: Any
    ) -> AsyncIterator[pb.GenerateResponse]:
        self.log("Generate", request, context)
        ticket, refusal = request.ticket, self.next_refusal("Generate")
        if (bad := self._bad_ticket(ticket)) is not None:
            self.refused.append(ticket.ticket_id)
            refusal = bad
        if refusal is not None:
            await refuse(context, refusal)
        script = Script()
        if self.script.meant_for(request):
            script = self.script
            script.times -= 1
        step = facts_pb2.StepRef(
            ticket_id=ticket.ticket_id,
            trajectory_id=ticket.trajectory_id,
            turn=ticket.turn,
            engine_id=self.engine_id,
        )
        self._aborts[ticket.ticket_id] = asyncio.Event()
        self.running.add(ticket.ticket_id)
        await self._publish(step_started=facts_pb2.StepStarted(step=step))
        try:
            async for event in self._events(request, context, script):
                if event.HasField("finished"):
                    await self._finish(step, request, event.finished)
                yield event
        finally:
            self.running.discard(ticket.ticket_id)

    def _bad_ticket(self, ticket: Ticket) -> Refusal | None:
        """What a sidecar finds wrong with a ticket."""
        if not ticket.HasField("expires_at"):
            invalid = grpc.StatusCode.INVALID_ARGUMENT
            return Refusal(invalid, "INVALID_ARGUMENT", fields=("ticket.expires_at",))
        if ticket.expires_at.ToNanoseconds() <= time.time_ns():
            return Refusal(grpc.StatusCode.PERMISSION_DENIED, "TICKET_EXPIRED")
        if ticket.engine_id != self.engine_id:
            return Refusal(grpc.StatusCode.FAILED_PRECONDITION, "TICKET_WRONG_ENGINE")
        if ticket.ticket_id in self._aborts:
            return Refusal(grpc.StatusCode.FAILED_PRECONDITION, "TICKET_USED")
        return None

    async def _finish(
        self, step: facts_pb2.StepRef, request: pb.GenerateRequest, end: pb.StepFinished
    ) -> None:
        prompt_tokens = len(request.prompt.int32_le) // 4
        self._finished(step.ticket_id)
        self.ran[step.trajectory_id, step.turn] += 1
        self.prefixes[step.trajectory_id] = prompt_tokens + end.output_tokens
        fact = facts_pb2.StepFinished(
            step=step,
            reason=end.reason,
            context_tokens=prompt_tokens,
            output_tokens=end.output_tokens,
        )
        await self._publish(step_finished=fact)

    async def _publish(self, **fact: Any) -> None:
        if self._bus is not None:
            await self._bus.publish(make_fact(f"sidecar/{self.engine_id}", **fact))

    async def _events(
        self, request: pb.GenerateRequest, context: Any, script: Script
    ) -> AsyncIterator[pb.GenerateResponse]:
        prompt, abort = unpack_ids(request.prompt.int32_le), self._aborts[request.ticket.ticket_id]
        first = count = len(request.resumed_output.int32_le) // 4
        version, spans = WEIGHT_VERSION, list[tokens_pb2.VersionSpan]()
        reason = pb.FINISH_REASON_LENGTH
        await self.slot.pass_through()
        yield pb.GenerateResponse(started=pb.StepStarted(attempt=0))
        while True:
            if count == script.lose_at:
                await refuse(
                    context,
                    Refusal(grpc.StatusCode.UNAVAILABLE, "ENGINE_LOST", retry_after_s=HOUR_S),
                )
            if count >= request.sampling.max_new_tokens:
                break
            if count == script.die_at:
                self.die()
                await asyncio.Event().wait()
            if count == script.hold_at:
                self.holding.set()
                await abort.wait()
            if abort.is_set():
                reason = pb.FINISH_REASON_ABORTED
                break
            if count == script.preempt_at:
                preempted = pb.StepPreempted(output_tokens=count, by_ticket_id="other")
                yield pb.GenerateResponse(preempted=preempted)
                await self.slot.pass_through()
                yield pb.GenerateResponse(started=pb.StepStarted(attempt=1))
            version = (script.version_from or {}).get(count, version)
            end = min(count + CHUNK_TOKENS, request.sampling.max_new_tokens)
            offset = count + (count == script.skip_at) - (count == script.repeat_at)
            chunk = pb.TokenChunk(
                offset=offset,
                token_ids=tokens_pb2.TokenIds(
                    int32_le=pack_ids([token_at(prompt, i) for i in range(count, end)])
                ),
                logprobs=tokens_pb2.Logprobs(
                    float32_le=pack_logprobs([logprob_at(i) for i in range(count, end)])
                ),
                weight_version=version,
            )
            spans.append(
                tokens_pb2.VersionSpan(weight_version=version, start_token=count, end_token=end)
            )
            await asyncio.sleep(self._token_s * (end - count))
            yield pb.GenerateResponse(tokens=chunk)
            count = end
        finished = pb.StepFinished(
            reason=reason, output_tokens=count, version_spans=spans, cached_tokens=first
        )
        yield pb.GenerateResponse(finished=finished)

    @answer
    def Abort(self, request: pb.AbortRequest) -> pb.AbortResponse | Refusal:
        self.aborted.append(request.ticket_id)
        if request.ticket_id not in self.running:
            return Refusal(grpc.StatusCode.NOT_FOUND, "STEP_NOT_FOUND")
        self._aborts[request.ticket_id].set()
        return pb.AbortResponse()

    async def GetLoad(self, request: pb.GetLoadRequest, context: Any) -> pb.GetLoadResponse:
        self.log("GetLoad", request, context)
        await self.loads.pass_through()
        return pb.GetLoadResponse()

    @answer
    def Reprioritize(self, _: pb.ReprioritizeRequest) -> pb.ReprioritizeResponse:
        return pb.ReprioritizeResponse()

    async def PrefetchPrefix(self, request: pb.PrefetchPrefixRequest, context: Any) -> Any:
        self.log("PrefetchPrefix", request, context)
        if refusal := self.next_refusal("PrefetchPrefix"):
            await refuse(context, refusal)
        reference = getattr(request, "from")
        async with grpc.aio.insecure_channel(reference.engine_address) as channel:
            source = engine_pb2_grpc.EngineServiceStub(channel)
            export = pb.ExportPrefixRequest(trajectory_id=reference.trajectory_id)
            try:
                held = (
                    len(
                        (
                            await source.ExportPrefix(export, timeout=RPC_TIMEOUT_S)
                        ).token_ids.int32_le
                    )
                    // 4
                )
            except grpc.aio.AioRpcError:
                await refuse(context, Refusal(grpc.StatusCode.UNAVAILABLE, "SOURCE_UNAVAILABLE"))
        await self.gate.pass_through()
        if request.storage_only and not self.stored:
            await refuse(context, Refusal(grpc.StatusCode.FAILED_PRECONDITION, "PREFIX_NOT_STORED"))
        tokens = self.prefixes[request.trajectory_id] = held - self.tokens_short
        stored = tokens if self.stored else 0
        return pb.PrefetchPrefixResponse(
            prefix_tokens=tokens, tokens_from_storage=stored, tokens_prefilled=tokens - stored
        )

    @answer
    def ExportPrefix(self, request: pb.ExportPrefixRequest) -> pb.ExportPrefixResponse | Refusal:
        if request.trajectory_id not in self.prefixes:
            return Refusal(grpc.StatusCode.NOT_FOUND, "PREFIX_NOT_FOUND")
        count = self.prefixes[request.trajectory_id]
        response = pb.ExportPrefixResponse(cache_salt=self.cache_salt, prefix_tokens=count)
        if not request.counts_only:
            response.token_ids.int32_le = array("i", range(count)).tobytes()
        return response

    @answer
    def ReleasePrefix(self, request: pb.ReleasePrefixRequest) -> pb.ReleasePrefixResponse:
        self.prefixes.pop(request.trajectory_id, None)
        return pb.ReleasePrefixResponse()

    async def hold_lease(self, scheduler_address: str) -> None:
        """Register, and renew for ever; register again where the lease is gone."""
        async with grpc.aio.insecure_channel(scheduler_address, options=KEEPS_TRYING) as channel:
            scheduler = scheduler_pb2_grpc.SchedulerServiceStub(channel)
            while True:
                try:
                    if not self.silent:
                        await self._renew(scheduler)
                except grpc.aio.AioRpcError as error:
                    if error.code() is grpc.StatusCode.NOT_FOUND:
                        self.lease_id = ""
                        continue
                await asyncio.sleep(RENEW_S)

    async def _renew(self, scheduler: Any) -> None:
        if not self.lease_id:
            info = pb.EngineInfo(
                engine_id=self.engine_id,
                address=self.address,
                model="fake",
                weight_version=WEIGHT_VERSION,
                slot_limit=self.slots,
                max_context_tokens=100_000,
                tensor_parallel=1,
                decode_curve=pb.DecodeCurve(
                    base_s=TOKEN_S, per_sequence_s=0.0001, prefill_tokens_per_s=100_000
                ),
            )
            request = scheduler_pb2.RegisterEngineRequest(request_id=uuid.uuid4().hex, info=info)
            self.lease_id = (
                await scheduler.RegisterEngine(request, timeout=RPC_TIMEOUT_S)
            ).lease_id
        load = pb.Load(slot_limit=self.slots, engine_healthy=True, weight_version=WEIGHT_VERSION)
        renewal = scheduler_pb2.RenewEngineLeaseRequest(
            lease_id=self.lease_id, engine_id=self.engine_id, load=load
        )
        await scheduler.RenewEngineLease(renewal, timeout=RPC_TIMEOUT_S)


def engine_port(engine: FakeEngine) -> Port:
    """A server for one fake engine, not yet started."""
    port = engine.port = Port(engine_pb2_grpc.add_EngineServiceServicer_to_server, engine)
    engine.address = port.address
    return port


@asynccontextmanager
async def leased_engines(
    bus: Bus | None, scheduler_address: str, engine_ids: Sequence[str], slots: int = 4
) -> AsyncIterator[list[FakeEngine]]:
    """Serving and holding their leases for the time of the block."""
    engines = [FakeEngine(name, bus=bus, slots=slots, token_s=TOKEN_S) for name in engine_ids]  # type: ignore[abstract]
    async with AsyncExitStack() as stack:
        for engine in engines:
            await stack.enter_async_context(engine_port(engine))
        leases = [asyncio.create_task(engine.hold_lease(scheduler_address)) for engine in engines]
        try:
            yield engines
        finally:
            for lease in leases:
                lease.cancel()
            await asyncio.gather(*leases, return_exceptions=True)
