"""Gateways outlive the mesh: while it is away, again and again, every request ends with its tokens,
no gateway exits, and nothing stays open.

Real processes: nats-server, schedulers, two sidecars, three gateways with their defaults. Engines
are fakes, for load.
"""

import asyncio
import json
import os
import signal
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import Any, cast

import aiohttp
import grpc.aio
import psutil
import pytest
import treadle
from support import mesh_of_processes
from support.conditions import until, until_said
from support.fake_sglang import expected
from support.mesh_of_processes import fleet
from support.nats_server import NatsServer
from support.processes import ServiceProcess, StartService, free_port
from support.scheduler import SchedulerClient, scheduler
from treadle.adapters.sessions import Sessions
from treadle.connection import FOLLOWING, RECOVERING, follow, merge_options
from treadle.scheduler.v1 import scheduler_pb2 as pb
from treadle_gateway.engines import Engines
from treadle_gateway.http.fleet import Fleet
from treadle_gateway.mesh import MeshLink

GATEWAYS, TALKERS = 3, 4  # talkers of each gateway, who have a session after the other
TOKENS = 20
LEASE_S = 4.0  # of engines and jobs
AWAY_AFTER_S = 2.0  # the gateway's default
SHORT_S, LONG_S, VERY_LONG_S = 1.0, 3.0, 8.0  # absences, shorter and longer than that
IDLE_S = 2.0  # then the gateway closes a session
ANSWER_S = 120.0
BACK_S = 60.0

pytestmark = pytest.mark.timeout(600)


@dataclass
class Doors:
    """Gateways in front of a mesh, with load. answered: requests by gateway. standby: the scheduler
    that does not lead, if there is one. control: of the one that leads."""

    made: mesh_of_processes.Fleet
    nats: NatsServer
    standby: ServiceProcess | None
    control: SchedulerClient
    gateways: list[ServiceProcess]
    urls: list[str]
    http: aiohttp.ClientSession
    answered: list[int] = field(default_factory=lambda: [0] * GATEWAYS)
    enough: asyncio.Event = field(default_factory=asyncio.Event)
    numbers: "count[int]" = field(default_factory=count)

    async def ask(self, number: int, prompt: list[int], session: str) -> list[int]:
        """The tokens that a gateway answers."""
        body = {
            "input_ids": prompt,
            "sampling_params": {"max_new_tokens": TOKENS, "temperature": 0.0},
            "return_logprob": True,
        }
        headers = {"X-Session-ID": session} if session else {}
        async with self.http.post(
            f"{self.urls[number]}/generate", json=body, headers=headers
        ) as response:
            answer = await response.json()
            assert response.status == 200, answer
            output: list[int] = answer["output_ids"]
            return output

    async def talk(self, number: int, *, named: bool) -> None:
        """Sessions of three turns, one after the other, until it is enough; each answer has the
        tokens of an undisturbed run."""
        while not self.enough.is_set():
            mine = next(self.numbers)
            context = [3 + mine // 900, 3 + mine % 900, 7]
            for _ in range(3):
                async with asyncio.timeout(ANSWER_S):
                    output = await self.ask(number, context, f"s{mine}" if named else "")
                assert output == expected(context, TOKENS)
                self.answered[number] += 1
                context = [*context, *output, 9]

    async def health(self, number: int) -> str:
        """Where a gateway says that the mesh is."""
        async with self.http.get(f"{self.urls[number]}/health") as response:
            where: str = (await response.json())["mesh"]
            return where

    async def until_mesh(self, where: str) -> None:
        for number in range(GATEWAYS):
            await until_said(partial(self.health, number), lambda said: said == where, BACK_S)

    async def until_more_answers(self, each: int = 2) -> None:
        """Every gateway has answered so many requests more."""
        wanted = [answered + each for answered in self.answered]
        await until(
            lambda: all(a >= b for a, b in zip(self.answered, wanted, strict=True)), ANSWER_S
        )

    async def connections(self) -> Counter[str]:
        """Those of all gateways, by what they lead to."""
        known = {each.url.rpartition(":")[2]: "engine" for each in self.made.engines}
        known |= {each.address.rpartition(":")[2]: "sidecar" for each in self.made.sidecars}
        known[self.nats.url.rpartition(":")[2]] = "nats"
        schedulers = [self.made.scheduler, *([self.standby] if self.standby else [])]
        known |= {each.address.rpartition(":")[2]: "scheduler" for each in schedulers}
        http = {int(url.rpartition(":")[2]) for url in self.urls}
        return Counter(
            known.get(str(each.raddr.port), f"port {each.raddr.port}")
            for gateway in self.gateways
            for each in psutil.Process(gateway.pid).net_connections()
            if each.status == psutil.CONN_ESTABLISHED and each.laddr.port not in http
        )

    async def open_trajectories(self) -> int:
        answer = await self.control.call(
            "ListTrajectories", pb.ListTrajectoriesRequest(open_only=True)
        )
        return len(answer.trajectories)

    async def clients(self) -> int:
        """Those that hold a job."""
        found = (await self.control.call("ListJobs", pb.ListJobsRequest())).jobs
        return sum(each.clients for each in found)


@asynccontextmanager
async def doors(
    start: StartService, nats: NatsServer, *, standby: bool = False
) -> AsyncIterator[Doors]:
    """Three gateways under load. At the end, after the last absence: all requests end, the gateways
    run, nothing is open, and they end in order. standby: a second scheduler runs."""
    leases = {"JOB_LEASE_S": str(LEASE_S)}
    async with (
        fleet(start, lease_ttl_s=LEASE_S, scheduler_settings=leases, PROBE_S="0") as made,
        AsyncExitStack() as channels,
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http,
    ):
        spare, addresses = None, made.scheduler.address
        if standby:
            spare = await start_scheduler(made, f"127.0.0.1:{free_port()}")
            addresses = f"{addresses},{spare.address}"
            await follow_both(made, addresses)

        def connect(address: str) -> grpc.aio.Channel:
            channel = grpc.aio.insecure_channel(address, merge_options(RECOVERING, FOLLOWING))
            channels.push_async_callback(channel.close)
            return channel

        control = SchedulerClient(addresses, follow(addresses, connect))
        urls = [f"http://127.0.0.1:{free_port()}" for _ in range(GATEWAYS)]
        gateways = [
            await start(
                "treadle_gateway",
                {
                    "TREADLE_GATEWAY_HTTP_LISTEN": url.removeprefix("http://"),
                    "TREADLE_GATEWAY_SCHEDULER": addresses,
                    "TREADLE_GATEWAY_IDLE_S": str(IDLE_S),
                    "TREADLE_GATEWAY_UNNAMED_IDLE_S": str(IDLE_S),
                },
            )
            for url in urls
        ]
        found = Doors(made, nats, spare, control, gateways, urls, http)
        await found.until_mesh("there")
        async with asyncio.TaskGroup() as talks:
            for number in range(GATEWAYS):
                for talker in range(TALKERS):
                    talks.create_task(found.talk(number, named=talker % 2 == 0))
            await found.until_more_answers()
            yield found
            await found.until_mesh("there")
            await found.until_more_answers()
            found.enough.set()
        assert [gateway.returncode for gateway in gateways] == [None] * GATEWAYS
        await until_said(found.open_trajectories, lambda number: number == 0, BACK_S)
        await until_said(found.clients, lambda number: number == GATEWAYS, BACK_S)
        # Of each gateway its watch and the client of the present visit have connections.
        most = Counter(
            nats=GATEWAYS,
            scheduler=2 * GATEWAYS * (1 + standby),
            sidecar=GATEWAYS * len(made.sidecars),
        )
        await until_said(found.connections, lambda now: now <= most, BACK_S)
        for gateway in gateways:
            gateway.terminate()
        assert [await gateway.wait() for gateway in gateways] == [0] * GATEWAYS
        for gateway in gateways:
            assert "Traceback" not in gateway.stderr_text(), gateway.stderr_text()


async def start_scheduler(made: mesh_of_processes.Fleet, listen: str) -> ServiceProcess:
    return await made.start(
        "treadle_scheduler", {**made.settings, "TREADLE_SCHEDULER_LISTEN": listen}
    )


async def follow_both(made: mesh_of_processes.Fleet, addresses: str) -> None:
    """Start the sidecars again, with the addresses of both schedulers."""
    for number, engine in enumerate(made.engines):
        await made.sidecars[number].end()
        own = {"ENGINE_ID": f"e{number}", "ENGINE_URL": engine.url, "PROBE_S": "0"}
        own["SCHEDULER"] = addresses
        made.sidecars[number] = await made.start(
            "treadle_sidecar", {f"TREADLE_SIDECAR_{name}": value for name, value in own.items()}
        )


Absence = Callable[[Doors, float], Awaitable[None]]


async def kill_scheduler(found: Doors, away_s: float) -> None:
    address = found.made.scheduler.address
    found.made.scheduler.kill()
    await asyncio.sleep(away_s)
    found.made.scheduler = await start_scheduler(found.made, address)


async def replace_leader(found: Doors, away_s: float) -> None:
    """The other scheduler leads, and the killed one comes back to stand by."""
    assert found.standby is not None
    killed, found.made.scheduler = found.made.scheduler, found.standby
    killed.kill()
    await asyncio.sleep(away_s)
    found.standby = await start_scheduler(found.made, killed.address)


async def stop_scheduler(found: Doors, away_s: float) -> None:
    found.made.scheduler.hang()
    await asyncio.sleep(away_s)
    os.kill(found.made.scheduler.pid, signal.SIGCONT)


async def kill_nats(found: Doors, away_s: float) -> None:
    found.nats.kill()
    await asyncio.sleep(away_s)
    found.nats.start()


async def stop_engines(found: Doors, away_s: float) -> None:
    """Their processes end and start again, which breaks their streams."""
    for engine in found.made.engines:
        await engine.stop()
    await asyncio.sleep(away_s)
    for engine in found.made.engines:
        await engine.start()


async def kill_sidecars(found: Doors, away_s: float) -> None:
    """No engine is registered once the leases have expired; their servers go on."""
    for sidecar in found.made.sidecars:
        sidecar.kill()
    await asyncio.sleep(LEASE_S + away_s)
    for number in range(len(found.made.engines)):
        await found.made.start_sidecar(number)


async def test_gateways_outlive_a_scheduler_that_is_killed_and_comes_back(
    start_service: StartService, nats_server: NatsServer
) -> None:
    """The mesh is away for longer than a gateway waits for it, and then for a moment."""
    async with doors(start_service, nats_server) as found:
        await kill_scheduler(found, VERY_LONG_S)
        await found.until_mesh("there")
        await found.until_more_answers()
        await kill_scheduler(found, 0.0)


async def test_a_visit_that_cannot_begin_is_begun_at_the_next_look(nats_url: str) -> None:
    """No client can be made at first, as while the files of a certificate are replaced. Result: the
    gateway does without the mesh until one can; while it drains, its health says so."""
    async with scheduler(nats_url) as control:
        await control.register("e0", url="http://127.0.0.1:1")
        made = list[treadle.Client]()

        def make_client() -> treadle.Client:
            if len(made) < 1:
                made.append(treadle.Client(control.address))
                raise ValueError("no key with its certificate")
            made.append(treadle.Client(control.address))
            return made[-1]

        link = MeshLink(
            control.stub,
            make_client,
            lambda client: Sessions(client, 1.0, 1.0),
            lambda _: {},
            2.0,
            60.0,
        )
        watching = asyncio.create_task(link.watch())
        await link.looked.wait()
        assert link.visit is None and link.engines
        await until(lambda: link.visit is not None)
        engines, stopping = Engines(link), asyncio.Event()
        answer = Fleet(link, engines, cast(Any, None), "", stopping).health
        assert ((await answer(cast(Any, None))).status_code, link.visits()) == (200, 1)
        stopping.set()
        said = await answer(cast(Any, None))
        assert (said.status_code, json.loads(bytes(said.body))["mesh"]) == (503, "draining")
        await engines.close()
        watching.cancel()
        await asyncio.wait({watching})
        with pytest.raises(treadle.TreadleError, match="CLIENT_CLOSED"):
            await made[1].open(prompt_id="p", sample=0, prompt=[1])


@pytest.mark.full
async def test_gateways_outlive_ten_absences_of_the_scheduler(
    start_service: StartService, nats_server: NatsServer
) -> None:
    async with doors(start_service, nats_server) as found:
        for _ in range(10):
            await kill_scheduler(found, VERY_LONG_S)
            await found.until_mesh("there")
            await found.until_more_answers()


@pytest.mark.full
@pytest.mark.parametrize(
    "absence", [kill_scheduler, stop_scheduler, kill_nats, stop_engines, kill_sidecars]
)
async def test_gateways_outlive_every_kind_of_absence_however_long_and_in_quick_turns(
    start_service: StartService, nats_server: NatsServer, absence: Absence
) -> None:
    """A stopped scheduler and a NATS that is away outlast all leases."""
    async with doors(start_service, nats_server) as found:
        for away_s in (SHORT_S, LONG_S, VERY_LONG_S):
            await absence(found, away_s)
            await found.until_mesh("there")
            await found.until_more_answers()
        for turn in range(8):
            await absence(found, SHORT_S + 0.5 * (turn % 3))
            await asyncio.sleep(SHORT_S + 0.5 * (turn % 4))


@pytest.mark.full
async def test_gateways_follow_the_scheduler_that_leads(
    start_service: StartService, nats_server: NatsServer
) -> None:
    async with doors(start_service, nats_server, standby=True) as found:
        for _ in range(4):
            await replace_leader(found, LONG_S)
            await found.until_mesh("there")
            await found.until_more_answers()
