"""A mesh of real services as processes in front of a fake engine, for tests that kill clients and services."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import NamedTuple

import grpc.aio
from support.fake_sglang import fake_sglang
from support.processes import ServiceProcess, StartService, free_port
from support.scheduler import SchedulerClient
from treadle.engine.v1 import engine_pb2, engine_pb2_grpc
from treadle.scheduler.v1 import scheduler_pb2 as pb

CALL_S = 10.0
TOKEN_S = 0.05
LEASE_S = 6.0


class Mesh(NamedTuple):
    """other: a service that the scheduler's directory names. settings: start the scheduler again."""

    scheduler: ServiceProcess
    other: ServiceProcess
    sidecar: ServiceProcess
    settings: dict[str, str]
    calls: SchedulerClient

    async def trajectories(self, *, open_only: bool = False) -> list[pb.Trajectory]:
        """All that the scheduler knows."""
        answer = await self.calls.call("ListTrajectories", pb.ListTrajectoriesRequest(open_only=open_only))
        return list(answer.trajectories)

    async def running_steps(self) -> int:
        """By the sidecar."""
        async with grpc.aio.insecure_channel(self.sidecar.address) as channel:
            answer = await engine_pb2_grpc.EngineServiceStub(channel).GetLoad(
                engine_pb2.GetLoadRequest(), timeout=CALL_S
            )
        return answer.load.running_steps


@asynccontextmanager
async def mesh(start_service: StartService, other: str, slots: int, **settings: str) -> AsyncIterator[Mesh]:
    """A scheduler with leases of LEASE_S, the service `other`, and one engine that takes TOKEN_S a token; `settings`
    are those of `other`, in upper case."""
    name = other.removeprefix("treadle_").upper()
    served = await start_service(other, {f"TREADLE_{name}_{key}": value for key, value in settings.items()})
    scheduler_settings = {
        "TREADLE_SCHEDULER_LISTEN": f"127.0.0.1:{free_port()}",
        "TREADLE_SCHEDULER_JOB_LEASE_S": str(LEASE_S),
        f"TREADLE_SCHEDULER_{name}": served.address,
    }
    scheduler = await start_service("treadle_scheduler", scheduler_settings)
    async with AsyncExitStack() as stack:
        engine = await stack.enter_async_context(fake_sglang(token_s=TOKEN_S))
        sidecar = await start_service(
            "treadle_sidecar",
            {
                "TREADLE_SIDECAR_ENGINE_ID": "e0",
                "TREADLE_SIDECAR_ENGINE_URL": engine.url,
                "TREADLE_SIDECAR_SCHEDULER": scheduler.address,
                "TREADLE_SIDECAR_SLOTS": str(slots),
                "TREADLE_SIDECAR_PROBE_S": "0",
            },
        )
        channel = await stack.enter_async_context(grpc.aio.insecure_channel(scheduler.address))
        calls = SchedulerClient(scheduler.address, channel)
        await calls.until_registered(1)
        yield Mesh(scheduler, served, sidecar, scheduler_settings, calls)
