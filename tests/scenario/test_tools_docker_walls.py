"""What code in a container cannot do, and what is told of its end, with a real Docker daemon; skipped without one."""

import asyncio
import time
from collections.abc import AsyncIterator, Iterator

import pytest
from support.docker_daemon import DockerDaemon, docker_daemon
from support.escapes import ATTEMPTS as ATTEMPTS_ANYWHERE
from support.processes import ServiceProcess
from support.rpc import error_of
from support.tools import ToolsCalls, calls_to, limits, shared_tools
from treadle.tools.v1 import tools_pb2 as pb

__all__ = ["docker_daemon"]

MIB = 1024 * 1024
OWNER = "test-walls"
OK, OUT_OF_MEMORY = pb.RESULT_STATUS_OK, pb.RESULT_STATUS_OUT_OF_MEMORY
END_S = 15.0


@pytest.fixture(scope="module")
def service(docker_daemon: DockerDaemon, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServiceProcess]:
    """One service for all of these tests."""
    folder = tmp_path_factory.mktemp("docker")
    settings = {
        "BACKEND": "docker", "DOCKER_HOSTS": docker_daemon.url, "IMAGE": docker_daemon.image, "OWNER": OWNER,
        "STATE_DIR": str(folder / "state"), "MODULES": "support.container_tools",
    }  # fmt: skip
    with shared_tools(folder, "python", **settings) as process:
        yield process
    assert docker_daemon.containers(OWNER) == []


@pytest.fixture
async def calls(service: ServiceProcess) -> AsyncIterator[ToolsCalls]:
    async with calls_to(service) as made:
        yield made


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
    "a full disk": """
written = 0
try:
    for n in range(64):
        with open(f"/tmp/{n}", "wb") as file:
            written += file.write(b"x" * 2**22)
except OSError:
    pass
print("contained" if written <= 2**26 else written)
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
    settings = f"PORT = {port}; SECRET = {docker_daemon.url.removeprefix('unix://')!r}; FOLDERS = {folders}\n"
    for name, code in ATTEMPTS.items():
        result = await calls.python(settings + code)
        assert (name, result.output, result.error) == (name, "contained\n", "")
    assert (await calls.python("1 + 1")).output == "2\n"


async def test_no_container_has_more_than_it_needs(calls: ToolsCalls, docker_daemon: DockerDaemon) -> None:
    """What the daemon itself says of a session's container."""
    session = (await calls.open("counter")).session.session_id
    for name in docker_daemon.containers(OWNER, running=True):
        about = docker_daemon.inspected(name)
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


async def test_memory_is_counted_over_processes_and_told_apart_from_a_crash(calls: ToolsCalls) -> None:
    """
    WHEN    a process and its children together take more than the action may, each of them less; when one takes it all;
            when one kills itself
    Result: the first two are out of memory, the last has crashed
    """
    together = """
import os, time
for _ in range(4):
    if os.fork() == 0:
        held = b"x" * (30 * 2**20)
        time.sleep(20)
        os._exit(0)
time.sleep(0.5)
held = b"x" * (110 * 2**20)
time.sleep(20)
"""
    filled = await calls.python(together, limits=limits(memory_bytes=128 * MIB))
    assert filled.status == OUT_OF_MEMORY
    assert str(128 * MIB) in filled.error
    alone = await calls.python("x = bytearray(2**30)", limits=limits(memory_bytes=128 * MIB))
    assert alone.status == OUT_OF_MEMORY
    crashed = await calls.python("import os, signal; os.kill(os.getpid(), signal.SIGKILL)")
    assert crashed.status == pb.RESULT_STATUS_CRASHED
    assert crashed.error == "killed by SIGKILL"


async def test_an_endless_loop_ends_in_time_and_the_session_goes_on(calls: ToolsCalls) -> None:
    looped = await calls.python("while True: pass", limits=limits(wall_s=1.0))
    assert looped.status == pb.RESULT_STATUS_TIMED_OUT
    session = (await calls.open("counter", {"start": 1})).session.session_id
    flood = await calls.step(session, {"code": "while True: print('x' * 10000)"}, limits=limits(wall_s=1.0))
    assert flood.output_truncated
    assert (await calls.step(session, {"add": 1})).output == "2"
    await calls.close(session)


async def test_a_container_that_an_operator_kills_is_a_crash_and_another_is_made(
    calls: ToolsCalls, docker_daemon: DockerDaemon
) -> None:
    """
    WHEN    the container of a session is killed while a step runs
    Result: the step has crashed and says so, the session takes no more, others go on
    """
    before = set(docker_daemon.containers(OWNER, running=True))
    session = (await calls.open("counter", {"start": 1})).session.session_id
    step = asyncio.create_task(calls.step(session, {"add": 1, "pause_s": 10.0}))
    await asyncio.sleep(0.5)
    ends_at = time.monotonic() + END_S
    while not step.done() and time.monotonic() < ends_at:
        for name in before & set(docker_daemon.containers(OWNER, running=True)):
            if "counter" in name:
                docker_daemon.kill(name)
        await asyncio.sleep(0.1)
    lost = await step
    assert lost.status == pb.RESULT_STATUS_CRASHED
    assert "exit code 137" in lost.error
    with pytest.raises(Exception) as ended:
        await calls.step(session, {"add": 1})
    assert error_of(ended.value).reason == "SESSION_ENDED"  # type: ignore[arg-type]
    again = (await calls.open("counter", {"start": 5})).session.session_id
    assert (await calls.step(again, {"add": 1})).output == "6"
    await calls.close(again)
