"""A tools service as a real process, and short ways to call it."""

import asyncio
import contextlib
import json
import os
import uuid
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import grpc.aio
import psutil
import pytest
from google.protobuf.duration_pb2 import Duration
from support.conditions import until
from support.nats_server import NatsServer
from support.processes import ServiceProcess, StartService, command_line, import_path, start_process
from treadle.tools.v1 import tools_pb2 as pb
from treadle.tools.v1 import tools_pb2_grpc

CALL_S = 60.0
GONE_WITHIN_S = 20.0


def limits(wall_s: float = 0.0, **fields: int) -> pb.Limits:
    """Limits of a request."""
    wall = Duration()
    wall.FromNanoseconds(round(wall_s * 1e9))
    return pb.Limits(wall_time=wall, **fields)


class ToolsCalls:
    """The RPCs with a fresh request_id and a deadline, arguments as a mapping."""

    def __init__(self, channel: grpc.aio.Channel, process: ServiceProcess) -> None:
        self.stub = tools_pb2_grpc.ToolsServiceStub(channel)
        self.process = process

    async def invoke(
        self, arguments: dict[str, Any] | None = None, *, id: str = "", **fields: Any
    ) -> pb.ToolResult:
        """One action."""
        request = pb.InvokeRequest(
            request_id=id or uuid.uuid4().hex, arguments_json=json.dumps(arguments or {}), **fields
        )
        return (await self.stub.Invoke(request, timeout=CALL_S)).result

    async def python(self, code: str, **fields: Any) -> pb.ToolResult:
        """The `python` tool."""
        return await self.invoke({"code": code}, tool="python", **fields)

    async def open(
        self, tool: str, arguments: dict[str, Any] | None = None, *, id: str = "", **fields: Any
    ) -> pb.OpenSessionResponse:
        """A new session."""
        request = pb.OpenSessionRequest(
            request_id=id or uuid.uuid4().hex,
            tool=tool,
            arguments_json=json.dumps(arguments or {}),
            **fields,
        )
        return await self.stub.OpenSession(request, timeout=CALL_S)

    async def step(
        self, session_id: str, arguments: dict[str, Any], *, id: str = "", **fields: Any
    ) -> pb.ToolResult:
        """One action of a session."""
        return await self.invoke(arguments, id=id, session_id=session_id, **fields)

    async def close(self, session_id: str, *, id: str = "") -> None:
        """End a session."""
        request = pb.CloseSessionRequest(request_id=id or uuid.uuid4().hex, session_id=session_id)
        await self.stub.CloseSession(request, timeout=CALL_S)

    async def resources(self) -> pb.GetResourcesResponse:
        """How full it is."""
        return await self.stub.GetResources(pb.GetResourcesRequest(), timeout=CALL_S)

    async def session(self, session_id: str) -> pb.Session:
        """Of GetSession."""
        return (
            await self.stub.GetSession(pb.GetSessionRequest(session_id=session_id), timeout=CALL_S)
        ).session


def environment(*builtin: str, PYTHONPATH: str = "", **settings: str) -> dict[str, str]:  # noqa: N803 - as it is called
    """The built-in tools named (each costs the start of a worker) and settings in upper case, as
    variables."""
    env = {
        f"TREADLE_TOOLS_{name}": value
        for name, value in {"BUILTIN": ",".join(builtin), **settings}.items()
    }
    return env | ({"PYTHONPATH": PYTHONPATH} if PYTHONPATH else {})


@asynccontextmanager
async def tools(
    start_service: StartService, *builtin: str, **settings: str
) -> AsyncIterator[ToolsCalls]:
    """A tools service; see `environment`."""
    process = await start_service("treadle_tools", environment(*builtin, **settings))
    async with calls_to(process) as calls:
        yield calls


def shared_tools(
    folder: Path, *builtin: str, **settings: str
) -> contextlib.AbstractContextManager[ServiceProcess]:
    """A tools service with a nats-server of its own."""
    return _tools_alone(folder, builtin, settings, as_user=False, seccomp=None)


@contextmanager
def _tools_alone(
    folder: Path,
    builtin: tuple[str, ...],
    settings: Mapping[str, str],
    *,
    as_user: bool,
    seccomp: Path | None,
) -> Iterator[ServiceProcess]:
    nats = NatsServer(folder / "nats")
    nats.start()
    env = {"TREADLE_NATS_URL": nats.url, **environment(*builtin, **settings)}
    try:
        process = start_process(
            "treadle_tools", "tools", env, folder / "tools", as_user=as_user, seccomp=seccomp
        )
        try:
            asyncio.run(process.ready(60.0))
            yield process
        finally:
            asyncio.run(process.end())
    finally:
        nats.kill()


def serve(
    *builtin: str, as_user: bool = False, seccomp: Path | None = None, **settings: str
) -> Any:
    """A fixture: one tools service for the tests of a module, which leave nothing in it; see
    `environment`.

    as_user, seccomp: see `start_process`. As `service` of the module it is the one that the fixtures `calls`
    and `rewards` call.
    """

    @pytest.fixture(scope="module")
    def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServiceProcess]:
        with _tools_alone(
            tmp_path_factory.mktemp("tools"), builtin, settings, as_user=as_user, seccomp=seccomp
        ) as process:
            yield process

    return service


def daemon_of(calls: ToolsCalls) -> psutil.Process:
    """The sandbox daemon that this run of the service has started."""
    started = psutil.Process(calls.process.pid).children()
    return next(each for each in started if "treadle_tools.sandbox.daemon" in command_line(each))


def groups_of(daemon: psutil.Process) -> list[str]:
    """Return its control groups. Other groups may be removed meanwhile: `os.walk` leaves them out,
    `Path.glob` would raise FileNotFoundError."""
    name = f"/treadle-tools-{daemon.pid}"
    return [folder for folder, _, _ in os.walk("/sys/fs/cgroup") if folder.endswith(name)]


async def gone(processes: list[psutil.Process]) -> None:
    """Returns once none of them runs."""
    await until(
        lambda: not any(process.is_running() for process in processes),
        GONE_WITHIN_S,
        f"one of {processes}",
    )


@asynccontextmanager
async def calls_to(process: ServiceProcess) -> AsyncIterator[ToolsCalls]:
    """Calls to a service that runs."""
    async with grpc.aio.insecure_channel(process.address) as channel:
        yield ToolsCalls(channel, process)


def write_tools(folder: Path, declared: str, code: str) -> dict[str, str]:
    """Settings of a service with the tools of a module `own_tools`, whose code is in a module
    `own_code`."""
    (folder / "own_tools.py").write_text(declared)
    (folder / "own_code.py").write_text(code)
    return {"PYTHONPATH": import_path(folder), "MODULES": "own_tools"}
