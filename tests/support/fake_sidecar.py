"""FakeSidecar: an engine's sidecar as the scheduler and the migrator see it: leases, tickets, facts, prefixes.

There is no engine: a step's tokens are counted out with a pause after each. `ran` counts the steps that ran to their
end, by (trajectory, turn).
"""

import asyncio
import uuid
from array import array
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio
from support.fake_servicer import FakeServicer, Gate, Refusal, refuse
from treadle.common.v1 import tokens_pb2
from treadle.engine.v1 import engine_pb2, engine_pb2_grpc
from treadle.scheduler.v1 import scheduler_pb2, scheduler_pb2_grpc
from treadle.telemetry.v1 import facts_pb2
from treadle_runtime.bus import Bus
from treadle_runtime.facts import make_fact

RPC_TIMEOUT_S = 5.0
RENEW_S = 0.2
TOKEN_S = 0.005
WEIGHT_VERSION = "v0"
KEEPS_ITS_WAY = (("grpc.max_reconnect_backoff_ms", 200), ("grpc.min_reconnect_backoff_ms", 100))


class FakeSidecar(FakeServicer, engine_pb2_grpc.EngineServiceServicer):
    """prefixes: trajectory → tokens that are here. stored: whether shared storage has what the source has.

    Without a bus no facts are published.
    """

    def __init__(self, engine_id: str, bus: Bus | None = None, slots: int = 4) -> None:
        super().__init__()
        self.engine_id = engine_id
        self.address = ""
        self.slots = slots
        self.ran: Counter[tuple[str, int]] = Counter()
        self.refused: list[str] = []
        self.lease_id = ""
        self.healthy = True
        self.silent = False  # does not renew
        self._bus = bus
        self._tickets: set[str] = set()
        self.prefixes: dict[str, int] = {}
        self.stored = False
        self.cache_salt = WEIGHT_VERSION
        self.tokens_short = 0  # by so many the prefetched prefix is shorter than the source's
        self.gate = Gate()  # of PrefetchPrefix

    def info(self) -> engine_pb2.EngineInfo:
        """What it announces."""
        return engine_pb2.EngineInfo(
            engine_id=self.engine_id,
            address=self.address,
            model="fake",
            weight_version=WEIGHT_VERSION,
            slot_limit=self.slots,
            max_context_tokens=100_000,
            tensor_parallel=1,
            decode_curve=engine_pb2.DecodeCurve(base_s=TOKEN_S, per_sequence_s=0.0001, prefill_tokens_per_s=100_000),
        )

    async def Generate(
        self, request: engine_pb2.GenerateRequest, context: Any
    ) -> AsyncIterator[engine_pb2.GenerateResponse]:
        """Counts out max_new_tokens tokens, less those that are resumed."""
        ticket = request.ticket
        if ticket.ticket_id in self._tickets or ticket.engine_id != self.engine_id:
            self.refused.append(ticket.ticket_id)
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "TICKET_USED")
        self._tickets.add(ticket.ticket_id)
        step = facts_pb2.StepRef(
            ticket_id=ticket.ticket_id, trajectory_id=ticket.trajectory_id, turn=ticket.turn, engine_id=self.engine_id
        )
        await self._publish(step_started=facts_pb2.StepStarted(step=step))
        yield engine_pb2.GenerateResponse(started=engine_pb2.StepStarted())
        first = len(request.resumed_output.int32_le) // 4
        count = request.sampling.max_new_tokens
        for offset in range(first, count):
            await asyncio.sleep(TOKEN_S)
            token = tokens_pb2.TokenIds(int32_le=offset.to_bytes(4, "little"))
            yield engine_pb2.GenerateResponse(tokens=engine_pb2.TokenChunk(offset=offset, token_ids=token))
        self.ran[ticket.trajectory_id, ticket.turn] += 1
        self.prefixes[ticket.trajectory_id] = len(request.prompt.int32_le) // 4 + count
        finished = facts_pb2.StepFinished(
            step=step,
            reason=engine_pb2.FINISH_REASON_LENGTH,
            context_tokens=len(request.prompt.int32_le) // 4,
            output_tokens=count,
        )
        await self._publish(step_finished=finished)
        yield engine_pb2.GenerateResponse(
            finished=engine_pb2.StepFinished(reason=engine_pb2.FINISH_REASON_LENGTH, output_tokens=count)
        )

    async def Reprioritize(self, request: engine_pb2.ReprioritizeRequest, context: Any) -> Any:
        self.log("Reprioritize", request, context)
        return engine_pb2.ReprioritizeResponse()

    async def Abort(self, request: engine_pb2.AbortRequest, context: Any) -> Any:
        self.log("Abort", request, context)
        return engine_pb2.AbortResponse()

    async def PrefetchPrefix(self, request: engine_pb2.PrefetchPrefixRequest, context: Any) -> Any:
        self.log("PrefetchPrefix", request, context)
        await self.gate.pass_through()
        if refusal := self.next_refusal("PrefetchPrefix"):
            await refuse(context, refusal)
        if request.storage_only and not self.stored:
            await refuse(context, Refusal(grpc.StatusCode.FAILED_PRECONDITION, "PREFIX_NOT_STORED"))
        reference = getattr(request, "from")
        async with grpc.aio.insecure_channel(reference.engine_address) as channel:
            source = engine_pb2_grpc.EngineServiceStub(channel)
            export = engine_pb2.ExportPrefixRequest(trajectory_id=reference.trajectory_id)
            held = len((await source.ExportPrefix(export, timeout=RPC_TIMEOUT_S)).token_ids.int32_le) // 4
        tokens = held - self.tokens_short
        self.prefixes[request.trajectory_id] = tokens
        response = engine_pb2.PrefetchPrefixResponse(prefix_tokens=tokens)
        if self.stored:
            response.tokens_from_storage = tokens
        else:
            response.tokens_prefilled = tokens
        return response

    async def ExportPrefix(self, request: engine_pb2.ExportPrefixRequest, context: Any) -> Any:
        self.log("ExportPrefix", request, context)
        if request.trajectory_id not in self.prefixes:
            await refuse(context, Refusal(grpc.StatusCode.NOT_FOUND, "PREFIX_NOT_FOUND"))
        count = self.prefixes[request.trajectory_id]
        response = engine_pb2.ExportPrefixResponse(cache_salt=self.cache_salt, prefix_tokens=count)
        if not request.counts_only:
            response.token_ids.int32_le = array("i", range(count)).tobytes()
        return response

    async def ReleasePrefix(self, request: engine_pb2.ReleasePrefixRequest, context: Any) -> Any:
        self.log("ReleasePrefix", request, context)
        if refusal := self.next_refusal("ReleasePrefix"):
            await refuse(context, refusal)
        self.prefixes.pop(request.trajectory_id, None)
        return engine_pb2.ReleasePrefixResponse()

    async def _publish(self, **fact: Any) -> None:
        if self._bus is not None:
            await self._bus.publish(make_fact(f"sidecar/{self.engine_id}", **fact))

    async def hold_lease(self, scheduler_address: str) -> None:
        """Registers, and renews for ever; registers again where the lease is gone."""
        async with grpc.aio.insecure_channel(scheduler_address, options=KEEPS_ITS_WAY) as channel:
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
            request = scheduler_pb2.RegisterEngineRequest(request_id=uuid.uuid4().hex, info=self.info())
            self.lease_id = (await scheduler.RegisterEngine(request, timeout=RPC_TIMEOUT_S)).lease_id
        load = engine_pb2.Load(slot_limit=self.slots, engine_healthy=self.healthy, weight_version=WEIGHT_VERSION)
        renewal = scheduler_pb2.RenewEngineLeaseRequest(lease_id=self.lease_id, engine_id=self.engine_id, load=load)
        await scheduler.RenewEngineLease(renewal, timeout=RPC_TIMEOUT_S)


@asynccontextmanager
async def sidecars(
    bus: Bus, scheduler_address: str, engine_ids: Sequence[str], slots: int = 4
) -> AsyncIterator[list[FakeSidecar]]:
    """Serving and holding their leases for the time of the block."""
    fakes, servers, leases = list[FakeSidecar](), list[grpc.aio.Server](), list[asyncio.Task[None]]()
    try:
        for engine_id in engine_ids:
            fake = FakeSidecar(engine_id, bus, slots)  # type: ignore[abstract]
            server = grpc.aio.server()
            engine_pb2_grpc.add_EngineServiceServicer_to_server(fake, server)
            fake.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
            await server.start()
            fakes.append(fake)
            servers.append(server)
            leases.append(asyncio.create_task(fake.hold_lease(scheduler_address)))
        yield fakes
    finally:
        for lease in leases:
            lease.cancel()
        await asyncio.gather(*leases, return_exceptions=True)
        for server in servers:
            await server.stop(0)
