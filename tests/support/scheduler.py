"""A scheduler in this process, on a real port and a real nats-server, and a few words to speak to
it."""

import uuid
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import grpc.aio
from support.conditions import until_said
from treadle.common.v1 import tokens_pb2
from treadle.common.v1.ticket_pb2 import Ticket
from treadle.engine.v1 import engine_pb2, engine_pb2_grpc
from treadle.scheduler.v1 import scheduler_pb2 as pb
from treadle.scheduler.v1 import scheduler_pb2_grpc
from treadle_runtime.server import serving
from treadle_scheduler.config import SchedulerSettings
from treadle_scheduler.wire import wire

TIMEOUT_S = 60.0
GENERATE_S = 90.0


class SchedulerClient:
    """Raw calls with a deadline, and short forms of the usual ones."""

    def __init__(self, address: str, channel: grpc.aio.Channel) -> None:
        self.address = address
        self.stub = scheduler_pb2_grpc.SchedulerServiceStub(channel)

    async def call(self, rpc: str, request: Any) -> Any:
        """Any RPC by name."""
        return await getattr(self.stub, rpc)(request, timeout=TIMEOUT_S)

    async def register(self, engine_id: str, **fields: Any) -> pb.RegisterEngineResponse:
        """An engine, which nobody serves."""
        given = {"address": "127.0.0.1:1", "slot_limit": 4, "weight_version": "v0", **fields}
        info = engine_pb2.EngineInfo(engine_id=engine_id, **given)
        request = pb.RegisterEngineRequest(request_id=uuid.uuid4().hex, info=info)
        return await self.stub.RegisterEngine(request, timeout=TIMEOUT_S)

    async def registered(self) -> list[pb.RegisteredEngine]:
        """The engines that hold leases, by id."""
        return list(
            (await self.stub.ListEngines(pb.ListEnginesRequest(), timeout=TIMEOUT_S)).engines
        )

    async def engines(self) -> list[engine_pb2.EngineInfo]:
        """What they said of themselves."""
        return [each.info for each in await self.registered()]

    async def until_registered(self, count: int) -> None:
        """So many engines hold leases."""
        await until_said(self.engines, lambda engines: len(engines) == count)

    async def set_policy(self, **fields: Any) -> None:
        """The policy of trajectories that are opened later."""
        given = {
            "ordering": pb.ORDERING_PROGRESSIVE,
            "placement": pb.PLACEMENT_RULE_PLANNED,
            **fields,
        }
        await self.call(
            "SetPolicy", pb.SetPolicyRequest(request_id=uuid.uuid4().hex, policy=pb.Policy(**given))
        )

    async def open(self, trajectory_id: str = "", **fields: Any) -> pb.Trajectory:
        """A trajectory."""
        given = {"request_id": uuid.uuid4().hex, "prompt_id": "p", "prompt_tokens": 10, **fields}
        request = pb.OpenTrajectoryRequest(trajectory_id=trajectory_id, **given)
        return (await self.stub.OpenTrajectory(request, timeout=TIMEOUT_S)).trajectory

    async def step(
        self, trajectory_id: str, turn: int, *, timeout_s: float = TIMEOUT_S, **fields: Any
    ) -> Ticket:
        """A ticket."""
        given = {
            "request_id": uuid.uuid4().hex,
            "context_tokens": 10,
            "max_new_tokens": 8,
            **fields,
        }
        request = pb.ScheduleStepRequest(trajectory_id=trajectory_id, turn=turn, **given)
        return (await self.stub.ScheduleStep(request, timeout=timeout_s)).ticket

    async def close(self, trajectory_id: str, **fields: Any) -> None:
        """End a trajectory."""
        given = {"request_id": uuid.uuid4().hex, "outcome": pb.OUTCOME_CANCELLED, **fields}
        await self.call(
            "CloseTrajectory", pb.CloseTrajectoryRequest(trajectory_id=trajectory_id, **given)
        )

    async def trajectory(self, trajectory_id: str) -> pb.Trajectory:
        """As the scheduler knows it."""
        request = pb.GetTrajectoryRequest(trajectory_id=trajectory_id)
        return (await self.stub.GetTrajectory(request, timeout=TIMEOUT_S)).trajectory


async def generate(ticket: Ticket, tokens: int, channel: grpc.aio.Channel | None = None) -> None:
    """Run a step of 10 prompt tokens to its end."""
    async with AsyncExitStack() as stack:
        if channel is None:
            channel = await stack.enter_async_context(
                grpc.aio.insecure_channel(ticket.engine_address)
            )
        request = engine_pb2.GenerateRequest(
            ticket=ticket,
            prompt=tokens_pb2.TokenIds(int32_le=bytes(40)),
            sampling=tokens_pb2.SamplingParams(max_new_tokens=tokens),
        )
        stream = engine_pb2_grpc.EngineServiceStub(channel).Generate(request, timeout=GENERATE_S)
        kinds = [event.WhichOneof("event") async for event in stream]
    assert kinds[0] == "started" and set(kinds[1:-1]) == {"tokens"} and kinds[-1] == "finished"


@asynccontextmanager
async def scheduler(nats_url: str, **settings: Any) -> AsyncIterator[SchedulerClient]:
    """Served for the time of the block."""
    given = {"nats_url": nats_url, "listen": "127.0.0.1:0", "lease_ttl_s": 60.0, **settings}
    async with (
        serving(SchedulerSettings(**given), wire) as served,
        scheduler_client(served.address) as client,
    ):
        yield client


@asynccontextmanager
async def scheduler_client(address: str) -> AsyncIterator[SchedulerClient]:
    """For a scheduler that runs already."""
    async with grpc.aio.insecure_channel(address) as channel:
        yield SchedulerClient(address, channel)
