"""Fixtures for all tests: real NATS servers, a bus, and services as real child processes.

Whatever they start is ended by its pid, also when the test fails.
"""

import asyncio
import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

# Before anything imports torch or numpy: other tests run beside this one, and on shared cores threads
# that wait for each other make a small model twenty times slower.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import hypothesis
import pytest
import treadle
from support.client_process import client_processes  # noqa: F401 - a fixture
from support.fake_sglang import FakeSglang, fake_sglang
from support.mesh_in_process import FakeMesh, fake_mesh
from support.nats_server import NatsServer
from support.processes import ServiceProcess, StartService, start_process
from support.rewards import RewardCalls, rewards_of
from support.tools import ToolsCalls, calls_to
from treadle_runtime.bus import Bus, open_bus
from xdist.remote import Producer
from xdist.scheduler import LoadFileScheduling

# What an example takes says nothing: the first one may compile a kernel, and machines are shared.
hypothesis.settings.register_profile("treadle", deadline=None)
if hypothesis.settings.get_current_profile_name() == "default":
    hypothesis.settings.load_profile("treadle")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests with engines come first: each of their two folders is a long piece of work."""
    items.sort(key=lambda item: item.get_closest_marker("engine") is None)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> LoadFileScheduling | None:
    """Give a worker all tests of a folder with engines at once, else those of a file, where
    --dist loadfile is asked for."""
    return FilesAndEngines(config, log) if config.getoption("dist") == "loadfile" else None


class FilesAndEngines(LoadFileScheduling):  # type: ignore[misc]
    """One process of the tests starts the engines that tests share, and at most two processes use
    engines at a time: each needs a core."""

    def _split_scope(self, nodeid: str) -> str:
        file = super()._split_scope(nodeid)
        return str(Path(file).parent) if file.startswith("tests/engine/") else file


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


@pytest.fixture(scope="module")
def shared_nats_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a nats-server for all tests of a module."""
    server = NatsServer(tmp_path_factory.mktemp("nats"))
    server.start()
    yield server.url
    server.kill()


@pytest.fixture
async def bus(nats_url: str) -> AsyncIterator[Bus]:
    """A connection to this test's nats-server."""
    async with open_bus(nats_url, "test") as bus:
        yield bus


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Services in this process notice soon that NATS is away."""
    # Not sooner: beside two engines that start, an answer of NATS may take half of a second.
    monkeypatch.setattr("treadle_runtime.bus.ANSWER_TIMEOUT_S", 1.0)


@pytest.fixture
async def mesh() -> AsyncIterator[FakeMesh]:
    """A mesh of fakes with two engines, in this process."""
    async with fake_mesh() as mesh:
        yield mesh


@pytest.fixture
async def client(mesh: FakeMesh) -> AsyncIterator[treadle.Client]:
    """A client of that mesh."""
    async with mesh.client() as client:
        yield client


@pytest.fixture
async def engine() -> AsyncIterator[FakeSglang]:
    """A fake of SGLang's HTTP server."""
    async with fake_sglang() as engine:
        yield engine


@pytest.fixture
async def start_service(nats_url: str, tmp_path: Path) -> AsyncIterator[StartService]:
    """`await start_service("treadle_scheduler", {"TREADLE_SCHEDULER_X": "1"})` → the process, once
    it serves.

    It listens on a free port and uses this test's nats-server. `service=` says which service's
    variables it reads where the module's name does not.
    """
    started: list[ServiceProcess] = []

    async def start(
        module: str,
        env: dict[str, str] | None = None,
        *,
        service: str | None = None,
        ready_within_s: float = 60.0,
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
