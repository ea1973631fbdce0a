"""A scheduler in this process, on a real port and a real nats-server, and a few words to speak to it."""

import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc.aio
from treadle.engine.v1 import engine_pb2
from treadle.scheduler.v1 import scheduler_pb2 as pb
from treadle.scheduler.v1 import scheduler_pb2_grpc
from treadle_runtime.server import serving
from treadle_scheduler.config import SchedulerSettings
from treadle_scheduler.wire import wire

TIMEOUT_S = 10.0


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
        response = await self.call("RegisterEngine", pb.RegisterEngineRequest(request_id=uuid.uuid4().hex, info=info))
        assert isinstance(response, pb.RegisterEngineResponse)
        return response

    async def open(self, trajectory_id: str = "", **fields: Any) -> pb.Trajectory:
        """A trajectory."""
        given = {"request_id": uuid.uuid4().hex, "prompt_id": "p", "prompt_tokens": 10, **fields}
        response = await self.call("OpenTrajectory", pb.OpenTrajectoryRequest(trajectory_id=trajectory_id, **given))
        assert isinstance(response, pb.OpenTrajectoryResponse)
        return response.trajectory

    async def step(self, trajectory_id: str, turn: int, **fields: Any) -> Any:
        """A ticket."""
        given = {"request_id": uuid.uuid4().hex, "context_tokens": 10, "max_new_tokens": 8, **fields}
        request = pb.ScheduleStepRequest(trajectory_id=trajectory_id, turn=turn, **given)
        return (await self.call("ScheduleStep", request)).ticket


@asynccontextmanager
async def scheduler(nats_url: str, **settings: Any) -> AsyncIterator[SchedulerClient]:
    """Served for the time of the block."""
    given = {"nats_url": nats_url, "listen": "127.0.0.1:0", "lease_ttl_s": 60.0, **settings}
    async with (
        serving(SchedulerSettings(**given), wire) as served,
        grpc.aio.insecure_channel(served.address) as channel,
    ):
        yield SchedulerClient(served.address, channel)
