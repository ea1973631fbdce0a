"""Fixtures for all tests: a real NATS server per test, and services as real child processes.

Whatever they start is ended by its pid, also when the test fails.
"""

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import hypothesis
import pytest
from support.nats_server import NatsServer
from support.processes import ServiceProcess, StartService, start_process
from support.rewards import RewardCalls, rewards_of
from support.tools import ToolsCalls, calls_to

# What an example takes says nothing: the first one may compile a kernel, and machines are shared.
hypothesis.settings.register_profile("treadle", deadline=None)
if hypothesis.settings.get_current_profile_name() == "default":
    hypothesis.settings.load_profile("treadle")


@pytest.fixture
def nats_server(tmp_path: Path) -> Iterator[NatsServer]:
    """A nats-server with JetStream of this test's own, which the test may kill and start again."""
    server = NatsServer(tmp_path / "nats")
    server.start()
    yield server
    server.kill()


@pytest.fixture
def nats_url(nats_server: NatsServer) -> str:
    """The address of this test's nats-server."""
    return nats_server.url


@pytest.fixture
async def start_service(nats_url: str, tmp_path: Path) -> AsyncIterator[StartService]:
    """`await start_service("treadle_scheduler", {"TREADLE_SCHEDULER_X": "1"})` → the process, once it serves.

    It listens on a free port and uses this test's nats-server. A path to a script does in place of a module; then
    `service=` says which service's variables it reads.
    """
    started: list[ServiceProcess] = []

    async def start(
        module: str, env: dict[str, str] | None = None, *, service: str | None = None, ready_within_s: float = 60.0
    ) -> ServiceProcess:
        name = service or module.removeprefix("treadle_")
        folder = tmp_path / f"{name}-{len(started)}"
        process = start_process(module, name, {"TREADLE_NATS_URL": nats_url, **(env or {})}, folder)
        started.append(process)
        await process.ready(ready_within_s)
        return process

    yield start
    await asyncio.gather(*(process.end() for process in started))


@pytest.fixture
async def calls(service: ServiceProcess) -> AsyncIterator[ToolsCalls]:
    """Calls to the tools service that the test's module has as its fixture `service`."""
    async with calls_to(service) as made:
        yield made


@pytest.fixture
async def rewards(service: ServiceProcess) -> AsyncIterator[RewardCalls]:
    """Calls to the RewardsService of the same."""
    async with rewards_of(service) as made:
        yield made
