"""A whole mesh of processes in front of two fakes of SGLang, for tests that look at where the time
went."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

import treadle
from support.conditions import until_said
from support.fake_sglang import FakeSglang, fake_sglang
from support.mesh_in_process import QUICK
from support.processes import ServiceProcess, StartService, free_port
from support.scheduler import SchedulerClient, scheduler_client
from support.tools import environment
from treadle.scheduler.v1 import scheduler_pb2 as pb

TOKEN_S = 0.01
COUNTED_S = (
    60.0  # a fact that a killed scheduler had in hand is delivered again after half a minute
)
PROMPT = list(range(10, 40))


@dataclass
class Mesh:
    """settings: of the scheduler, to start it again. client: of the mesh."""

    start: StartService
    settings: dict[str, str]
    scheduler: ServiceProcess
    migrator: ServiceProcess
    engines: list[FakeSglang]
    sidecars: list[ServiceProcess]
    control: SchedulerClient
    client: treadle.Client

    async def restart_scheduler(self) -> None:
        """SIGKILL, and another process at the same address."""
        self.scheduler.kill()
        self.scheduler = await self.start("treadle_scheduler", self.settings)

    async def ledger(self, t: treadle.Trajectory) -> pb.Ledger:
        """Of a closed trajectory, once the accounts of all its steps have come."""

        async def closed() -> pb.Trajectory:
            return await self.control.trajectory(t.trajectory_id)

        return (
            await until_said(closed, lambda said: said.gen_tokens == t.gen_tokens, COUNTED_S)
        ).ledger


@asynccontextmanager
async def mesh(start: StartService, *, engines: int = 2, slots: int = 1) -> AsyncIterator[Mesh]:
    """Up for the time of the block: scheduler, migrator, tools and sidecars as processes, and their
    engines."""
    tools = await start("treadle_tools", environment("python", CORES="2"))
    address, migrator_address = (f"127.0.0.1:{free_port()}" for _ in range(2))
    settings = {
        "TREADLE_SCHEDULER_LISTEN": address,
        "TREADLE_SCHEDULER_TOOLS": tools.address,
        "TREADLE_SCHEDULER_MIGRATOR": migrator_address,
    }
    scheduler = await start("treadle_scheduler", settings)
    moving = {"TREADLE_MIGRATOR_LISTEN": migrator_address, "TREADLE_MIGRATOR_SCHEDULER": address}
    migrator = await start("treadle_migrator", moving)
    async with AsyncExitStack() as stack:
        fakes, sidecars = [], []
        for number in range(engines):
            fakes.append(await stack.enter_async_context(fake_sglang(token_s=TOKEN_S)))
            own = {
                "ENGINE_ID": f"e{number}",
                "ENGINE_URL": fakes[-1].url,
                "SCHEDULER": address,
                "SLOTS": str(slots),
            }
            own |= {"DECODE_BASE_S": str(TOKEN_S), "PREFILL_TOKENS_PER_S": "10000"}
            variables = {f"TREADLE_SIDECAR_{name}": value for name, value in own.items()}
            sidecars.append(await start("treadle_sidecar", variables))
        control = await stack.enter_async_context(scheduler_client(address))
        client = await stack.enter_async_context(treadle.Client(address, retry=QUICK))
        await control.until_registered(engines)
        yield Mesh(start, settings, scheduler, migrator, fakes, sidecars, control, client)
