"""Tools in containers of a real Docker daemon, through the real service. Skipped where there is none."""

import asyncio
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import grpc.aio
import pytest
from support.docker_daemon import DockerDaemon, docker_daemon
from support.fleets import COUNTER, fleet_on
from support.processes import StartService
from support.rpc import error_of
from support.tools import ToolsCalls, tools
from treadle.tools.v1 import tools_pb2 as pb
from treadle_tools.builtin import PYTHON
from treadle_tools.limits import Granted
from treadle_tools.sandbox.containers.docker import DockerHost

__all__ = ["docker_daemon"]

OK = pb.RESULT_STATUS_OK
MIB = 1024 * 1024


@pytest.fixture
def owner() -> str:
    """Whose containers they are."""
    return f"test-{uuid.uuid4().hex[:8]}"


@asynccontextmanager
async def life(
    start_service: StartService, daemon: DockerDaemon, owner: str, folder: Path, *builtin: str, **settings: str
) -> AsyncIterator[ToolsCalls]:
    """One life of a service whose tools run in containers."""
    given = {
        "BACKEND": "docker", "DOCKER_HOSTS": daemon.url, "IMAGE": daemon.image, "OWNER": owner,
        "STATE_DIR": str(folder / "state"), "MODULES": "support.container_tools", "WARM_SANDBOXES": "1",
    }  # fmt: skip
    async with tools(start_service, *builtin, **{**given, **settings}) as calls:
        yield calls


async def test_calls_and_sessions_run_in_containers_and_leave_none(
    start_service: StartService, docker_daemon: DockerDaemon, owner: str, tmp_path: Path
) -> None:
    """
    GIVEN   a service with the docker backend
    WHEN    a snippet runs, a session counts, runs code that writes to its /tmp, and another session looks for it
    Result: each answers as in bubblewrap; no session sees another's files; when the service has ended, no container is
            left
    """
    async with life(start_service, docker_daemon, owner, tmp_path, "python") as calls:
        said = await calls.python("import os; print(os.getuid()); 6 * 7")
        assert (said.status, said.output) == (OK, "65534\n42\n")
        one, other = [(await calls.open("counter", {"start": n})).session.session_id for n in (1, 10)]
        assert (await calls.step(one, {"add": 2})).output == "3"
        assert (await calls.step(one, {"code": "open('/tmp/mine', 'w').write('x')"})).status == OK
        assert (await calls.step(one, {"code": "print(open('/tmp/mine').read())"})).output == "x\n"
        assert (await calls.step(other, {"code": "open('/tmp/mine')"})).status == pb.RESULT_STATUS_TOOL_ERROR
        assert (await calls.step(other, {"add": 5})).output == "15"
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await calls.open("counter", {"start": -1})
        assert error_of(refused.value).code == grpc.StatusCode.INVALID_ARGUMENT
        await calls.close(one)
        assert len(docker_daemon.containers(owner)) >= 2
        calls.process.terminate()
        assert await calls.process.wait() == 0
    assert docker_daemon.containers(owner) == []


async def test_sessions_outlive_a_killed_service(
    start_service: StartService, docker_daemon: DockerDaemon, owner: str, tmp_path: Path
) -> None:
    """
    GIVEN   two sessions, one in the middle of a step
    WHEN    the service is killed, and started again
    Result: both go on; the step in flight was taken once, and its repeat is answered; warm containers were removed
    """
    async with life(start_service, docker_daemon, owner, tmp_path) as calls:
        one, other = [(await calls.open("counter", {"start": n})).session.session_id for n in (1, 10)]
        told = await calls.step(other, {"add": 1}, id="told")
        in_flight = asyncio.create_task(calls.step(one, {"add": 2, "pause_s": 2.0}, id="in-flight"))
        await asyncio.sleep(0.7)
        calls.process.kill()
        with pytest.raises(grpc.aio.AioRpcError):
            await in_flight
        before = set(docker_daemon.containers(owner))
    async with life(start_service, docker_daemon, owner, tmp_path) as calls:
        assert (await calls.step(one, {"add": 2, "pause_s": 2.0}, id="in-flight")).output == "3"
        assert (await calls.step(other, {"add": 1}, id="told")).output == told.output
        assert (await calls.step(one, {"add": 4})).output == "7"
        assert (await calls.step(other, {"add": 4})).output == "15"
        assert [(await calls.session(id)).steps for id in (one, other)] == [2, 2]
        assert len(before & set(docker_daemon.containers(owner))) == 2  # the sessions': the warm ones were removed
        calls.process.terminate()
        assert await calls.process.wait() == 0
    assert docker_daemon.containers(owner) == []


async def test_granted_cores_are_the_containers_before_each_action(
    docker_daemon: DockerDaemon, owner: str, tmp_path: Path
) -> None:
    """Allocate on execution: number, quota and memory are written before the action; memory stays for a session."""
    look = "print(sorted(os.sched_getaffinity(0)), *(open(f).read().strip() for f in FILES if os.path.exists(f)))"
    files = "import os; FILES = ('/sys/fs/cgroup/cpu/cpu.cfs_quota_us', '/sys/fs/cgroup/cpu.max')\n"
    async with fleet_on([DockerHost(docker_daemon.url, owner=owner)], tmp_path, image=docker_daemon.image) as fleet:
        sandbox = await fleet.take("counter")
        limits = COUNTER.limits
        await sandbox.ask("open", {"start": 1}, limits, 64)
        told = []
        for granted in (Granted(cpu_cores=1, cores=(1,)), Granted(cpu_cores=1, cores=(0,)), Granted(cpu_cores=2)):
            reply = await sandbox.ask("step", {"code": files + look}, granted, 64)
            told.append(reply["output"].split()[:2])
        (name,) = [name for name in docker_daemon.containers(owner, running=True) if name == sandbox.name]
        memory = docker_daemon.inspected(name)["HostConfig"]["Memory"]  # type: ignore[index]
        assert told[0] == ["[1]", "100000"]
        assert told[1] == ["[0]", "100000"]
        assert told[2][0] == "[0," and told[2][1] == "1]"
        busy = "import time; began = time.process_time()\nwhile time.process_time() < began + 0.3: pass"
        assert 0.3 <= (await sandbox.ask("step", {"code": busy}, limits, 64))["cpu_s"] < 2.0
        assert (await sandbox.ask("step", {"add": 1}, limits, 64))["cpu_s"] < 0.3
        assert limits.memory_bytes < memory < limits.memory_bytes + 200 * MIB
        sandbox.close()


async def test_a_host_that_does_not_answer_is_passed_over(
    docker_daemon: DockerDaemon, owner: str, tmp_path: Path
) -> None:
    """
    GIVEN   two daemons, one of them not there, as the less loaded of the two
    Result: containers are made on the other; nothing is left there when the fleet has ended
    """
    hosts = [DockerHost(f"unix://{tmp_path}/nobody.sock", owner=owner), DockerHost(docker_daemon.url, owner=owner)]
    async with fleet_on(hosts, tmp_path / "ledger", image=docker_daemon.image) as fleet:
        for _ in range(3):
            sandbox = await fleet.take("python")
            assert (await sandbox.ask("call", {"code": "2 + 2"}, PYTHON.limits, 64))["output"] == "4\n"
            sandbox.close()
    assert docker_daemon.containers(owner) == []


async def test_a_tool_whose_worker_does_not_start_says_why(
    start_service: StartService, docker_daemon: DockerDaemon, owner: str, tmp_path: Path
) -> None:
    """Its calls are refused with the last line of the worker's own words; other tools run."""
    modules = "support.container_tools,support.container_broken_tools"
    async with life(start_service, docker_daemon, owner, tmp_path, "python", MODULES=modules) as calls:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await calls.invoke({}, tool="broken")
        error = error_of(refused.value)
        assert (error.code, error.reason) == (grpc.StatusCode.UNAVAILABLE, "TOOL_NOT_READY")
        assert "no module of this name" in str(refused.value.details())
        assert (await calls.python("1 + 1")).output == "2\n"


async def test_a_session_is_written_down_and_goes_on_in_another_container(
    docker_daemon: DockerDaemon, owner: str, tmp_path: Path
) -> None:
    """The state travels within the messages, since no open file can go to a container; one that is too large stays."""
    host = DockerHost(docker_daemon.url, owner=owner)
    async with fleet_on([host], tmp_path / "ledger", tools=[COUNTER], image=docker_daemon.image) as fleet:
        one, other = await fleet.take("counter"), await fleet.take("counter")
        limits = COUNTER.limits
        await one.ask("open", {"start": 1}, limits, 64)
        await one.ask("step", {"code": "open('/tmp/kept', 'w').write('kept')"}, limits, 64)
        await one.ask("step", {"add": 41}, limits, 64)
        with (tmp_path / "state").open("w+b") as state:
            taken = await one.ask("snapshot", None, limits, 64, file=state.fileno())
            assert (taken["status"], taken["alive"]) == ("ok", True)
            state.seek(0)
            said = {"output": "42", "reward": None, "data_json": ""}
            first = await other.ask("restore", said, limits, 64, file=state.fileno())
        assert (first["status"], first["output"], first["error"]) == ("ok", "42", "")
        assert [(await sandbox.ask("step", {"add": 1}, limits, 64))["output"] for sandbox in (one, other)] == [
            "43",
            "43",
        ]
        assert (await other.ask("step", {"code": "print(open('/tmp/kept').read())"}, limits, 64))["output"] == "kept\n"
        await one.ask("step", {"code": "open('/tmp/large', 'wb').write(b'x' * 20_000_000)"}, limits, 64)
        with (tmp_path / "large").open("w+b") as state:
            refused = await one.ask("snapshot", None, limits, 64, file=state.fileno())
        assert refused["status"] == "tool_error" and "are the most that leave a container" in refused["error"]
        assert (await one.ask("step", {"add": 1}, limits, 64))["output"] == "44"
        one.close()
        other.close()
