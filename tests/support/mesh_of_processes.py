"""Meshes of real services as processes in front of fake engines, for tests that kill clients and
services."""

from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

import grpc.aio
import treadle
from support.conditions import until_said
from support.fake_sglang import FakeSglang, expected, fake_sglang
from support.mesh_in_process import QUICK
from support.processes import ServiceProcess, StartService, free_port
from support.scheduler import SchedulerClient, scheduler_client
from treadle.engine.v1 import engine_pb2, engine_pb2_grpc
from treadle.scheduler.v1 import scheduler_pb2 as pb

CALL_S = 60.0
TOKEN_S = 0.05
LEASE_S = 6.0
PROMPT = list(range(10, 40))
STEP_S = 30.0  # a connection that hangs is given up sooner


class Mesh(NamedTuple):
    """other: a service that the scheduler's directory names. settings: start the scheduler again;
    other_settings: start the other."""

    scheduler: ServiceProcess
    other: ServiceProcess
    sidecar: ServiceProcess
    settings: dict[str, str]
    other_settings: dict[str, str]
    calls: SchedulerClient

    async def trajectories(self, *, open_only: bool = False) -> list[pb.Trajectory]:
        """All that the scheduler knows."""
        answer = await self.calls.call(
            "ListTrajectories", pb.ListTrajectoriesRequest(open_only=open_only)
        )
        return list(answer.trajectories)

    async def running_steps(self) -> int:
        """By the sidecar."""
        return (await load_of(self.sidecar)).running_steps


async def load_of(sidecar: ServiceProcess) -> engine_pb2.Load:
    """What a sidecar says of itself."""
    async with grpc.aio.insecure_channel(sidecar.address) as channel:
        engine = engine_pb2_grpc.EngineServiceStub(channel)
        return (await engine.GetLoad(engine_pb2.GetLoadRequest(), timeout=CALL_S)).load


@asynccontextmanager
async def mesh(
    start_service: StartService, other: str, slots: int, **settings: str
) -> AsyncIterator[Mesh]:
    """A scheduler with leases of LEASE_S, the service `other`, and one engine that takes TOKEN_S a
    token; `settings` are those of `other`, in upper case."""
    name = other.removeprefix("treadle_").upper()
    settings = {"LISTEN": f"127.0.0.1:{free_port()}", **settings}
    other_settings = {f"TREADLE_{name}_{key}": value for key, value in settings.items()}
    served = await start_service(other, other_settings)
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
        yield Mesh(scheduler, served, sidecar, scheduler_settings, other_settings, calls)


@dataclass
class Fleet:
    """A scheduler and two engines, e0 and e1, each with its sidecar. settings: of the scheduler.
    sidecar_settings: of each sidecar, in upper case. sampling: the trajectories that have tokens.
    """

    start: StartService
    settings: dict[str, str]
    sidecar_settings: dict[str, str]
    scheduler: ServiceProcess
    engines: list[FakeSglang]
    control: SchedulerClient
    client: treadle.Client
    sidecars: list[ServiceProcess] = field(default_factory=list)
    sampling: set[str] = field(default_factory=set)

    async def run(
        self, name: str, tokens: int = 40, *, max_total_tokens: int = 0
    ) -> treadle.Trajectory:
        """A trajectory of one turn, which has the tokens of an undisturbed run."""
        trajectory = await self.client.open(
            prompt_id=name, sample=0, prompt=PROMPT, max_total_tokens=max_total_tokens
        )
        async for _ in trajectory.generate(
            treadle.Sampling(max_new_tokens=tokens, temperature=0.0)
        ):
            self.sampling.add(name)
        assert trajectory.steps[-1].token_ids == expected(PROMPT, tokens)
        return trajectory

    def pace(self, token_s: float) -> None:
        """What a token takes from now on, on both engines."""
        for engine in self.engines:
            engine.token_s = token_s

    async def start_sidecar(self, number: int, *, clock_ahead_s: float = 0.0) -> None:
        """Of an engine, the first time or again. clock_ahead_s: of the clock of its machine."""
        own = {
            "ENGINE_ID": f"e{number}",
            "ENGINE_URL": self.engines[number].url,
            "SCHEDULER": self.scheduler.address,
        }
        own |= {"DECODE_BASE_S": "0.01", "PREFILL_TOKENS_PER_S": "10000", **self.sidecar_settings}
        variables = {f"TREADLE_SIDECAR_{name}": value for name, value in own.items()}
        self.sidecars[number:] = [
            await start_at(self.start, "treadle_sidecar", variables, clock_ahead_s),
            *self.sidecars[number + 1 :],
        ]

    async def stop_engine(self, number: int) -> None:
        """Stop an engine, and return once its sidecar has noticed and its lease has ended. A lease
        may end before a late sidecar notices, and for that sidecar an engine that is back by then
        has never been away."""
        before = len(await self.control.registered())
        await self.engines[number].stop()
        async with grpc.aio.insecure_channel(self.sidecars[number].address) as channel:
            call = engine_pb2_grpc.EngineServiceStub(channel).GetLoad
            await until_said(
                lambda: call(engine_pb2.GetLoadRequest(), timeout=CALL_S),
                lambda answer: not answer.load.engine_healthy,
            )
        await self.control.until_registered(before - 1)

    async def restart_scheduler(self, *, clock_ahead_s: float = 0.0) -> None:
        """Kill it by SIGKILL, and start the next one. clock_ahead_s: of the clock of its
        machine."""
        self.scheduler.kill()
        self.scheduler = await start_at(
            self.start, "treadle_scheduler", self.settings, clock_ahead_s
        )


async def start_at(
    start: StartService, module: str, settings: Mapping[str, str], clock_ahead_s: float
) -> ServiceProcess:
    """Start a service on a machine whose clock is so many seconds ahead."""
    if not clock_ahead_s:
        return await start(module, dict(settings))
    clock = {"MODULE": module, "CLOCK_AHEAD_S": str(clock_ahead_s)}
    variables = {f"TREADLE_TEST_{name}": value for name, value in clock.items()}
    service = module.removeprefix("treadle_")
    return await start("support.off_clock", {**settings, **variables}, service=service)


@asynccontextmanager
async def fleet(
    start: StartService,
    *,
    sidecars: int = 2,
    token_s: float = 0.01,
    lease_ttl_s: float = 3.0,
    step_s: float = STEP_S,
    scheduler_settings: Mapping[str, str] | None = None,
    **sidecar: str,
) -> AsyncIterator[Fleet]:
    """With so many of the two engines registered. scheduler_settings: more of them, in upper
    case."""
    own = {
        "LISTEN": f"127.0.0.1:{free_port()}",
        "LEASE_TTL_S": str(lease_ttl_s),
        **(scheduler_settings or {}),
    }
    settings = {f"TREADLE_SCHEDULER_{name}": value for name, value in own.items()}
    scheduler = await start("treadle_scheduler", settings)
    async with (
        fake_sglang(token_s=token_s) as first,
        fake_sglang(token_s=token_s) as second,
        scheduler_client(scheduler.address) as control,
        treadle.Client(
            scheduler.address, retry=QUICK, timeouts=treadle.Timeouts(step_s=step_s)
        ) as client,
    ):
        made = Fleet(start, settings, sidecar, scheduler, [first, second], control, client)
        for number in range(sidecars):
            await made.start_sidecar(number)
        await control.until_registered(sidecars)
        yield made
