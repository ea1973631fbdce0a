"""FakeSidecar: an engine's sidecar as the scheduler sees it: leases, tickets taken once, facts on the bus.

There is no engine: a step's tokens are counted out with a pause after each. `ran` counts the steps that ran to their
end, by (trajectory, turn); `commands` holds what the scheduler told this sidecar.
"""

import asyncio
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio
from support.fake_servicer import Refusal, refuse
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


class FakeSidecar(engine_pb2_grpc.EngineServiceServicer):
    """One engine. `hold` keeps steps from ending while it is set."""

    def __init__(self, engine_id: str, bus: Bus, slots: int = 4) -> None:
        self.engine_id = engine_id
        self.address = ""
        self.slots = slots
        self.ran: Counter[tuple[str, int]] = Counter()
        self.refused: list[str] = []
        self.commands: list[Any] = []
        self.lease_id = ""
        self.healthy = True
        self.silent = False  # does not renew
        self._bus = bus
        self._tickets: set[str] = set()
        self.contexts: dict[str, int] = {}  # tokens held of each trajectory

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
        source = f"sidecar/{self.engine_id}"
        await self._bus.publish(make_fact(source, step_started=facts_pb2.StepStarted(step=step)))
        yield engine_pb2.GenerateResponse(started=engine_pb2.StepStarted())
        first = len(request.resumed_output.int32_le) // 4
        count = request.sampling.max_new_tokens
        for offset in range(first, count):
            await asyncio.sleep(TOKEN_S)
            token = tokens_pb2.TokenIds(int32_le=offset.to_bytes(4, "little"))
            yield engine_pb2.GenerateResponse(tokens=engine_pb2.TokenChunk(offset=offset, token_ids=token))
        self.ran[ticket.trajectory_id, ticket.turn] += 1
        self.contexts[ticket.trajectory_id] = len(request.prompt.int32_le) // 4 + count
        finished = facts_pb2.StepFinished(
            step=step,
            reason=engine_pb2.FINISH_REASON_LENGTH,
            context_tokens=len(request.prompt.int32_le) // 4,
            output_tokens=count,
        )
        await self._bus.publish(make_fact(source, step_finished=finished))
        yield engine_pb2.GenerateResponse(
            finished=engine_pb2.StepFinished(reason=engine_pb2.FINISH_REASON_LENGTH, output_tokens=count)
        )

    async def Reprioritize(self, request: engine_pb2.ReprioritizeRequest, context: Any) -> Any:
        """Notes it."""
        self.commands.append(request)
        return engine_pb2.ReprioritizeResponse()

    async def Abort(self, request: engine_pb2.AbortRequest, context: Any) -> Any:
        """Notes it."""
        self.commands.append(request)
        return engine_pb2.AbortResponse()

    async def PrefetchPrefix(self, request: engine_pb2.PrefetchPrefixRequest, context: Any) -> Any:
        """Asks the source how much there is, and has it; nothing is in shared storage."""
        self.commands.append(request)
        if request.storage_only:
            await refuse(context, Refusal(grpc.StatusCode.FAILED_PRECONDITION, "PREFIX_NOT_STORED"))
        source = getattr(request, "from")  # a keyword in Python
        async with grpc.aio.insecure_channel(source.engine_address) as channel:
            ask = engine_pb2.ExportPrefixRequest(trajectory_id=request.trajectory_id, counts_only=True)
            export = await engine_pb2_grpc.EngineServiceStub(channel).ExportPrefix(ask, timeout=RPC_TIMEOUT_S)
        self.contexts[request.trajectory_id] = export.prefix_tokens
        return engine_pb2.PrefetchPrefixResponse(
            prefix_tokens=export.prefix_tokens, tokens_prefilled=export.prefix_tokens
        )

    async def ExportPrefix(self, request: engine_pb2.ExportPrefixRequest, context: Any) -> Any:
        """How much is here."""
        return engine_pb2.ExportPrefixResponse(
            prefix_tokens=self.contexts[request.trajectory_id], cache_salt=WEIGHT_VERSION
        )

    async def ReleasePrefix(self, request: engine_pb2.ReleasePrefixRequest, context: Any) -> Any:
        """Notes it."""
        self.commands.append(request)
        return engine_pb2.ReleasePrefixResponse()

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
