"""Every service ends in order when it is told to, whatever it does and whatever else dies."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import aiohttp
import pytest
from support.conditions import until
from support.mesh_of_processes import Fleet, fleet
from support.nats_server import NatsServer
from support.processes import ServiceProcess, StartService, free_port

REQUESTS = 12
START_S = 120.0  # placement compiles its kernels at the first start on a machine
GRACE_S = "1"
OTHERS = ("placement", "predictor", "migrator", "rollout", "tools", "console")

pytestmark = pytest.mark.timeout(300)


@asynccontextmanager
async def services_of(
    start: StartService, others: Sequence[str]
) -> AsyncIterator[tuple[Fleet, dict[str, ServiceProcess], str]]:
    """A mesh of a scheduler, two sidecars, a gateway and `others`; its services by name, and the
    URL of its gateway."""
    grace = {"DRAIN_GRACE_S": GRACE_S}
    listen = {name: f"127.0.0.1:{free_port()}" for name in others}
    directory = {name.upper(): listen[name] for name in others if name != "console"}
    async with fleet(
        start, scheduler_settings={**grace, **directory}, PROBE_S="0", DRAIN_GRACE_S=GRACE_S
    ) as made:
        http = {name: f"127.0.0.1:{free_port()}" for name in ("gateway", "console")}

        async def begin(name: str) -> ServiceProcess:
            own = {**grace}
            if name in listen:
                own["LISTEN"] = listen[name]
            if name in http:
                own["HTTP_LISTEN"] = http[name]
            if name in ("gateway", "console", "migrator"):
                own["SCHEDULER"] = made.scheduler.address
            variables = {f"TREADLE_{name.upper()}_{key}": value for key, value in own.items()}
            return await start(f"treadle_{name}", variables, ready_within_s=START_S)

        names = (*others, "gateway")
        found = dict(zip(names, await asyncio.gather(*map(begin, names)), strict=True))
        found |= {f"sidecar{at}": process for at, process in enumerate(made.sidecars)}
        yield made, found | {"scheduler": made.scheduler}, f"http://{http['gateway']}"


@pytest.mark.parametrize(
    ("others", "dies"),
    [
        ((), "scheduler"),
        *(pytest.param(OTHERS, dies, marks=pytest.mark.full) for dies in ("", "scheduler", "nats")),
    ],
)
async def test_every_service_ends_in_order_although_what_it_needs_dies_at_that_moment(
    start_service: StartService, nats_server: NatsServer, others: Sequence[str], dies: str
) -> None:
    """Under load. Result: exit code 0, and no traceback; a request that is cut is answered so."""

    async def ask(http: aiohttp.ClientSession, url: str, number: int) -> int:
        body = {"input_ids": [3 + number, 7], "sampling_params": {"max_new_tokens": 2000}}
        async with http.post(f"{url}/generate", json=body) as response:
            await response.read()
            return response.status

    async with (
        services_of(start_service, others) as (made, services, url),
        aiohttp.ClientSession() as http,
    ):
        asked = [asyncio.create_task(ask(http, url, number)) for number in range(REQUESTS)]
        await until(lambda: sum(engine.sampled for engine in made.engines) > 100)
        if dies == "nats":
            nats_server.kill()
        elif dies:
            services.pop(dies).kill()
        for process in services.values():
            process.terminate()
        codes = {name: await process.wait() for name, process in services.items()}
        assert set(await asyncio.gather(*asked)) <= {200, 503}
        said = {name: process.stderr_text() for name, process in services.items()}
        assert codes == dict.fromkeys(services, 0), said
        assert not {name: text for name, text in said.items() if "Traceback" in text}
