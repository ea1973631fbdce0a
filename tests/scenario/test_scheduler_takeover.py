"""Several schedulers run, and one of them leads: it is killed, stopped, or asked to end, and another one goes on.

Real processes: nats-server, schedulers, sidecars in front of a fake engine, and a client in this process.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial

import grpc
import grpc.aio
import treadle
from grpc_health.v1 import health_pb2, health_pb2_grpc
from support.conditions import until_said
from support.fake_sglang import fake_sglang
from support.processes import ServiceProcess, StartService, free_port
from support.scheduler import scheduler_client

TOKEN_S = 0.02
TOKENS = 12
TURNS = 5
TRAJECTORIES = 16
SLOTS = 4  # of each of two engines: half of the steps wait for a ticket
PROMPT = [5, 6, 7]
DONE_S = 120.0
CALL_S = 10.0
SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING


class Schedulers:
    """Schedulers of one mesh. The first one leads."""

    def __init__(self, start: StartService, **settings: object) -> None:
        self._start = start
        self._settings = {f"TREADLE_SCHEDULER_{name.upper()}": str(value) for name, value in settings.items()}
        self.processes: list[ServiceProcess] = []

    @property
    def addresses(self) -> str:
        """As a client or a sidecar takes them."""
        return ",".join(process.address for process in self.processes)

    async def add(self) -> ServiceProcess:
        """One more."""
        listen = {"TREADLE_SCHEDULER_LISTEN": f"127.0.0.1:{free_port()}"}
        self.processes.append(await self._start("treadle_scheduler", {**self._settings, **listen}))
        return self.processes[-1]

    async def restart(self, index: int) -> None:
        """Start an ended one again, at its address."""
        listen = {"TREADLE_SCHEDULER_LISTEN": self.processes[index].address}
        self.processes[index] = await self._start("treadle_scheduler", {**self._settings, **listen})

    async def health(self, index: int, service: str = "") -> health_pb2.HealthCheckResponse.ServingStatus.ValueType:
        """As the process says."""
        async with grpc.aio.insecure_channel(self.processes[index].address) as channel:
            request = health_pb2.HealthCheckRequest(service=service)
            return (await health_pb2_grpc.HealthStub(channel).Check(request, timeout=CALL_S)).status

    async def until_leads(self, index: int) -> None:
        """It serves."""
        await until_said(partial(self.health, index), lambda status: status == SERVING)


@asynccontextmanager
async def schedulers(start: StartService, count: int = 2, **settings: object) -> AsyncIterator[Schedulers]:
    """The first one leads, and the others stand by."""
    group = Schedulers(start, **settings)
    for _ in range(count):
        await group.add()
    yield group


@asynccontextmanager
async def engines(start: StartService, addresses: str, count: int = 2) -> AsyncIterator[list[ServiceProcess]]:
    """Sidecars that follow the schedulers, each in front of a fake engine."""
    async with AsyncExitStack() as stack:
        started = []
        for number in range(count):
            engine = await stack.enter_async_context(fake_sglang(token_s=TOKEN_S))
            settings = {
                "ENGINE_ID": f"e{number}",
                "ENGINE_URL": engine.url,
                "SCHEDULER": addresses,
                "SLOTS": str(SLOTS),
                "PROBE_S": "0",
            }
            env = {f"TREADLE_SIDECAR_{name}": value for name, value in settings.items()}
            started.append(await start("treadle_sidecar", env))
        yield started


async def until_registered(address: str, count: int) -> None:
    async with scheduler_client(address) as calls:
        await calls.until_registered(count)


class Work:
    """Trajectories of one client, each with TURNS turns of TOKENS tokens; `hold` may keep turns from beginning."""

    def __init__(self, client: treadle.Client) -> None:
        self._client = client
        self.outputs: dict[str, list[int]] = {}
        self.turns = 0
        self.may_go_on = asyncio.Event()
        self.may_go_on.set()

    async def run(self, sample: int) -> None:
        """One trajectory from opening to closing."""
        trajectory = await self._client.open(prompt_id="p", sample=sample, prompt=[*PROMPT, sample])
        tokens = self.outputs[trajectory.id] = []
        for _ in range(TURNS):
            await self.may_go_on.wait()
            sampling = treadle.Sampling(max_new_tokens=TOKENS, ignore_eos=True)
            async for chunk in trajectory.generate(sampling):
                tokens += chunk.token_ids
            self.turns += 1
            trajectory.extend([9])
        await trajectory.close()

    def has_run(self, turns: int) -> bool:
        """Whether so many turns are over, of all trajectories together."""
        return self.turns >= turns


async def all_work(addresses: str, disturb: Callable[[Work], "asyncio.Future[None]"]) -> Work:
    raise NotImplementedError
