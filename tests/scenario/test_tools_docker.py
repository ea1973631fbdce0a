"""Tools in containers of a real Docker daemon, and what they cannot do. Skipped where there is no
daemon.

Limits of memory, disk and time are tried beside those of bubblewrap (`test_tools_sandbox.py`).
"""

import asyncio
import time
import uuid
from collections.abc import Iterator
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import grpc
import grpc.aio
import pytest
from support.docker_daemon import DockerDaemon, docker_daemon
from support.escapes import ATTEMPTS as ATTEMPTS_ANYWHERE
from support.fleets import COUNTER, fleet_on
from support.processes import ServiceProcess, StartService
from support.rpc import refused
from support.tools import ToolsCalls, shared_tools, tools
from treadle.tools.v1 import tools_pb2 as pb
from treadle_tools.sandbox.containers.docker import DockerHost
from treadle_tools.tool import Granted

__all__ = ["docker_daemon"]

OK = pb.RESULT_STATUS_OK
MIB = 1024 * 1024
SHARED_OWNER = "test-docker"
END_S = 15.0


@pytest.fixture
def owner() -> str:
    """Whose containers they are."""
    return f"test-{uuid.uuid4().hex[:8]}"


def run(
    start_service: StartService,
    daemon: DockerDaemon,
    owner: str,
    folder: Path,
    *builtin: str,
    **settings: str,
) -> AbstractAsyncContextManager[ToolsCalls]:
    """One run of a service whose tools run in containers."""
    settings = {**daemon.settings(owner, folder), "WARM_SANDBOXES": "1", **settings}
    return tools(start_service, *builtin, **settings)


async def test_calls_and_sessions_run_in_containers_and_leave_none(
    start_service: StartService, docker_daemon: DockerDaemon, owner: str, tmp_path: Path
) -> None:
    """They answer as in bubblewrap, no session sees another's files, and none is left when the
    service has ended."""
    async with run(start_service, docker_daemon, owner, tmp_path, "python") as calls:
        said = await calls.python("import os; print(os.getuid()); 6 * 7")
        assert (said.status, said.output) == (OK, "65534\n42\n")
        one, other = [
            (await calls.open("counter", {"start": n})).session.session_id for n in (1, 10)
        ]
        assert (await calls.step(one, {"add": 2})).output == "3"
        assert (await calls.step(one, {"code": "open('/tmp/mine', 'w').write('x')"})).status == OK
        assert (await calls.step(one, {"code": "print(open('/tmp/mine').read())"})).output == "x\n"
        assert (
            await calls.step(other, {"code": "open('/tmp/mine')"})
        ).status == pb.RESULT_STATUS_TOOL_ERROR
        assert (await calls.step(other, {"add": 5})).output == "15"
        with refused("INVALID_ARGUMENT", grpc.StatusCode.INVALID_ARGUMENT):
            await calls.open("counter", {"start": -1})
        await calls.close(one)
        assert len(docker_daemon.containers(owner)) >= 2
        calls.process.terminate()
        assert await calls.process.wait() == 0
    assert docker_daemon.containers(owner) == []


async def test_sessions_outlive_a_killed_service(
    start_service: StartService, docker_daemon: DockerDaemon, owner: str, tmp_path: Path
) -> None:
    """The step in flight was taken once, and its repeat is answered; warm containers were
    removed."""
    async with run(start_service, docker_daemon, owner, tmp_path) as calls:
        one, other = [
            (await calls.open("counter", {"start": n})).session.session_id for n in (1, 10)
        ]
        answered = await calls.step(other, {"add": 1}, id="answered")
        in_flight = asyncio.create_task(calls.step(one, {"add": 2, "pause_s": 2.0}, id="in-flight"))
        await asyncio.sleep(0.7)
        calls.process.kill()
        with pytest.raises(grpc.aio.AioRpcError):
            await in_flight
        before = set(docker_daemon.containers(owner))
    async with run(start_service, docker_daemon, owner, tmp_path) as calls:
        assert (await calls.step(one, {"add": 2, "pause_s": 2.0}, id="in-flight")).output == "3"
        assert (await calls.step(other, {"add": 1}, id="answered")).output == answered.output
        assert (await calls.step(one, {"add": 4})).output == "7"
        assert (await calls.step(other, {"add": 4})).output == "15"
        assert [(await calls.session(id)).steps for id in (one, other)] == [2, 2]
        # the sessions': the warm ones were removed
        assert len(before & set(docker_daemon.containers(owner))) == 2
        calls.process.terminate()
        assert await calls.process.wait() == 0
    assert docker_daemon.containers(owner) == []


async def test_granted_cores_are_the_containers_before_each_action(
    docker_daemon: DockerDaemon, owner: str, tmp_path: Path
) -> None:
    """Allocate on execution: number, quota and memory are written before the action; memory stays
    for a session."""
    look = (
        "print(sorted(os.sched_getaffinity(0)), *(open(f).read().strip() for f in FILES if "
        "os.path.exists(f)))"
    )
    files = "import os; FILES = ('/sys/fs/cgroup/cpu/cpu.cfs_quota_us', '/sys/fs/cgroup/cpu.max')\n"
    async with fleet_on(
        [DockerHost(docker_daemon.url, owner=owner)], tmp_path, image=docker_daemon.image
    ) as fleet:
        sandbox = await fleet.take("counter")
        limits = COUNTER.limits
        await sandbox.ask("open", {"start": 1}, limits, 64)
        limited = []
        for granted in (
            Granted(cpu_cores=1, cores=(1,)),
            Granted(cpu_cores=1, cores=(0,)),
            Granted(cpu_cores=2),
        ):
            reply = await sandbox.ask("step", {"code": files + look}, granted, 64)
            limited.append(reply["output"].split()[:2])
        (name,) = [
            name for name in docker_daemon.containers(owner, running=True) if name == sandbox.name
        ]
        memory = docker_daemon.inspect(name)["HostConfig"]["Memory"]  # type: ignore[index]
        assert limited[0] == ["[1]", "100000"]
        assert limited[1] == ["[0]", "100000"]
        assert limited[2][0] == "[0," and limited[2][1] == "1]"
        busy = (
            "import time; began = time.process_time()\nwhile time.process_time() < began + "
            "0.3: pass"
        )
        assert 0.3 <= (await sandbox.ask("step", {"code": busy}, limits, 64))["cpu_s"] < 2.0
        assert (await sandbox.ask("step", {"add": 1}, limits, 64))["cpu_s"] < 0.3
        assert limits.memory_bytes < memory < limits.memory_bytes + 200 * MIB
        sandbox.close()


async def test_a_tool_whose_worker_does_not_start_says_why(
    start_service: StartService, docker_daemon: DockerDaemon, owner: str, tmp_path: Path
) -> None:
    """Its calls are refused with the last line of the worker's own words; other tools run."""
    modules = "support.container_tools,support.container_broken_tools"
    async with run(
        start_service, docker_daemon, owner, tmp_path, "python", MODULES=modules
    ) as calls:
        with refused(
            "TOOL_NOT_READY", grpc.StatusCode.UNAVAILABLE, says="has no attribute 'missing'"
        ):
            await calls.invoke({}, tool="broken")
        assert (await calls.python("1 + 1")).output == "2\n"


@pytest.fixture(scope="module")
def service(
    docker_daemon: DockerDaemon, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServiceProcess]:
    """One service for all tests of isolation."""
    folder = tmp_path_factory.mktemp("docker")
    with shared_tools(folder, "python", **docker_daemon.settings(SHARED_OWNER, folder)) as process:
        yield process
    assert docker_daemon.containers(SHARED_OWNER) == []


# Each prints `contained` and nothing else, or raises.
ATTEMPTS = {
    **ATTEMPTS_ANYWHERE,
    "the daemon's socket and the host's files": """
import os
paths = ("/var/run/docker.sock", "/run/docker.sock", SECRET, "/work", "/host", "/var/lib/docker")
print([path for path in paths if os.path.exists(path)] or "contained")
""",
    "its own limits": """
import glob
written = []
for path in glob.glob("/sys/fs/cgroup/**/*.max", recursive=True) + glob.glob("/sys/fs/cgroup/*/*limit*"):
    try:
        open(path, "w")
        written.append(path)
    except OSError:
        pass
print(written or "contained")
""",
    "a fork bomb": """
import os, time
children = 0
try:
    while children < 500:
        if os.fork() == 0:
            time.sleep(30)
            os._exit(0)
        children += 1
except OSError:
    pass
print("contained" if children < 80 else children)
""",
}


async def test_no_attempt_gets_out(calls: ToolsCalls, docker_daemon: DockerDaemon) -> None:
    """Every row of the table, in one service, which serves afterwards as before."""
    port = calls.process.address.rpartition(":")[2]
    folders = ["/etc", "/var", "/sys", "/sys/fs/cgroup", "/opt"]
    settings = (
        f"PORT = {port}; SECRET = {docker_daemon.url.removeprefix('unix://')!r}; FOLDERS = "
        f"{folders}\n"
    )
    for name, code in ATTEMPTS.items():
        result = await calls.python(settings + code)
        assert (name, result.output, result.error) == (name, "contained\n", "")
    assert (await calls.python("1 + 1")).output == "2\n"


async def test_no_container_has_more_than_it_needs(
    calls: ToolsCalls, docker_daemon: DockerDaemon
) -> None:
    """What the daemon itself says of a session's container."""
    session = (await calls.open("counter")).session.session_id
    found = [
        docker_daemon.inspect(name) for name in docker_daemon.containers(SHARED_OWNER, running=True)
    ]
    # else removed meanwhile: an earlier test's
    running = [about for about in found if about is not None]
    assert running
    for about in running:
        host, config = about["HostConfig"], about["Config"]
        assert isinstance(host, dict) and isinstance(config, dict)
        assert host["NetworkMode"] == "none"
        assert host["CapDrop"] == ["ALL"]
        assert host["ReadonlyRootfs"] is True
        assert "no-new-privileges" in host["SecurityOpt"]
        assert config["User"] == "65534:65534"
        assert host["PidsLimit"] > 0
        assert 0 < host["Memory"] == host["MemorySwap"]
        assert all(mount["RW"] is False for mount in about["Mounts"])  # type: ignore[attr-defined]
    await calls.close(session)


async def test_a_container_that_an_operator_kills_is_a_crash_and_another_is_made(
    calls: ToolsCalls, docker_daemon: DockerDaemon
) -> None:
    """The step has crashed and says so, the session takes no more, others go on."""
    before = set(docker_daemon.containers(SHARED_OWNER, running=True))
    session = (await calls.open("counter", {"start": 1})).session.session_id
    step = asyncio.create_task(calls.step(session, {"add": 1, "pause_s": 10.0}))
    await asyncio.sleep(0.5)
    ends_at = time.monotonic() + END_S
    while not step.done() and time.monotonic() < ends_at:
        for name in before & set(docker_daemon.containers(SHARED_OWNER, running=True)):
            if "counter" in name:
                docker_daemon.kill(name)
        await asyncio.sleep(0.1)
    lost = await step
    assert lost.status == pb.RESULT_STATUS_CRASHED
    assert "exit code 137" in lost.error
    with refused("SESSION_ENDED"):
        await calls.step(session, {"add": 1})
    again = (await calls.open("counter", {"start": 5})).session.session_id
    assert (await calls.step(again, {"add": 1})).output == "6"
    await calls.close(again)
