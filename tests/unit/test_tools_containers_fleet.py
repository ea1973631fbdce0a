"""Sandboxes, connections and sessions of containers, on a fake host whose workers are real
processes."""

import asyncio
import os
import signal
from pathlib import Path

import pytest
from support.conditions import until
from support.fake_host import FakeContainer, FakeHost
from support.fleets import COUNTER, fleet_on
from treadle_tools.builtin import PYTHON
from treadle_tools.sandbox.inside.container import LineRequests
from treadle_tools.sandbox.sandboxes import Sandbox, SandboxLost, WorkerFailed
from treadle_tools.tool import MIB, WORKER_BYTES, Granted, Kind, Limits, Status, Tool

RECORD = {"session_id": "s-1", "tool": "counter"}


async def open_counter(sandbox: Sandbox, start: int = 1) -> None:
    assert (await sandbox.ask("open", {"start": start}, COUNTER.limits, 64, request_id="o"))[
        "output"
    ] == str(start)


async def step(sandbox: Sandbox, id: str, **arguments: object) -> str:
    return str((await sandbox.ask("step", arguments, COUNTER.limits, 64, request_id=id))["output"])


def container_of(host: FakeHost, sandbox: Sandbox) -> FakeContainer:
    return host.containers[sandbox.name]


async def test_each_sandbox_is_used_once_and_an_orderly_end_leaves_none(tmp_path: Path) -> None:
    host = FakeHost()
    async with fleet_on([host], tmp_path / "state", tools=[PYTHON], warm=2) as fleet:
        names = set()
        for n in range(4):
            sandbox = await fleet.take("python")
            assert (await sandbox.ask("call", {"code": f"{n} * 2"}, PYTHON.limits, 64))[
                "output"
            ] == f"{n * 2}\n"
            names.add(sandbox.name)
            sandbox.close()
            sandbox.close()
            assert not sandbox.alive
        assert len(names) == 4
        await until(lambda: not names & set(host.containers))
        fleet.records.bind(RECORD, (await fleet.take("python")).name)
    assert host.containers == {}
    assert list(tmp_path.iterdir()) == []  # noqa: ASYNC240 - a moment at the end of a test


async def test_limits_are_written_before_an_action_and_only_where_they_change(
    tmp_path: Path,
) -> None:
    """Cores for each action; memory when a session opens, and not again in its steps."""
    host = FakeHost()
    async with fleet_on([host], tmp_path, tools=[COUNTER]) as fleet:
        sandbox = await fleet.take("counter")
        allotted = container_of(host, sandbox).allotted
        ready = len(allotted)
        small = Limits(memory_bytes=64 * MIB)
        await sandbox.ask("open", {}, small, 64)
        for granted in (
            Granted(cores=(3,)),
            Granted(cores=(3,)),
            Granted(cpu_cores=2, cores=(4, 5)),
            Limits(),
        ):
            await sandbox.ask("step", {"add": 1}, granted, 64)
        written = allotted[ready:]
        assert [one.cores for one in written] == [(), (3,), (4, 5), ()]
        assert [one.cpu_cores for one in written] == [1, 1, 2, 1]
        assert len({one.memory_bytes for one in written}) == 1
        assert written[0].memory_bytes is not None
        assert (
            64 * MIB + WORKER_BYTES < written[0].memory_bytes < 64 * MIB + WORKER_BYTES + 100 * MIB
        )
        sandbox.close()


async def test_a_connection_that_breaks_is_made_again_and_a_step_is_taken_once(
    tmp_path: Path,
) -> None:
    host = FakeHost()
    async with fleet_on([host], tmp_path, tools=[COUNTER]) as fleet:
        sandbox = await fleet.take("counter")
        await open_counter(sandbox)
        slow = asyncio.create_task(step(sandbox, "s1", add=2, pause_s=0.5))
        await asyncio.sleep(0.2)
        container_of(host, sandbox).pipes[-1].cut()
        assert await slow == "3"
        container_of(host, sandbox).pipes[-1].cut()
        assert await step(sandbox, "s2", add=4) == "7"
        assert len(container_of(host, sandbox).pipes) == 3
        sandbox.close()


async def test_a_worker_that_is_killed_is_lost_and_says_how(tmp_path: Path) -> None:
    host = FakeHost()
    async with fleet_on([host], tmp_path, tools=[COUNTER]) as fleet:
        sandbox = await fleet.take("counter")
        await open_counter(sandbox)
        slow = asyncio.create_task(step(sandbox, "s1", add=2, pause_s=5.0))
        await asyncio.sleep(0.2)
        os.kill(container_of(host, sandbox).process.pid, signal.SIGKILL)
        with pytest.raises(SandboxLost, match="exit code 137") as lost:
            await slow
        assert lost.value.status is Status.CRASHED
        sandbox.close()


async def test_the_next_run_finds_sessions_and_removes_all_other_containers(tmp_path: Path) -> None:
    """GIVEN   a fleet with an open session, a closed one, and warm containers, that is killed in the
    middle of a message
    Result: the next one finds the open session with its notes and goes on with it, and the request
    that closed the
            other; it leaves no other container of the first"""
    host = FakeHost()
    async with fleet_on([host], tmp_path, tools=[COUNTER], keep_on_exit=True) as fleet:
        sandbox, other = await fleet.take("counter"), await fleet.take("counter")
        fleet.records.bind(RECORD, sandbox.name)
        fleet.records.bind({"session_id": "s-2", "tool": "counter"}, other.name)
        await open_counter(sandbox)
        assert await step(sandbox, "s1", add=1) == "2"
        fleet.records.note("s-1", {"steps": 1})
        fleet.records.forget("s-2", closed_by="close-request")
        await container_of(host, sandbox).pipes[-1].write(b'{"op":"step","id":"half","argum')
    async with fleet_on([host], tmp_path, tools=[COUNTER]) as fleet:
        (found,) = fleet.found
        assert found.record == {**RECORD, "steps": 1}
        assert fleet.records.closed == {"s-2": "close-request"}
        assert found.sandbox is not None
        assert sandbox.name in host.containers and other.name not in host.containers
        assert (await found.sandbox.ask("recall", None, COUNTER.limits, 64))["id"] == "s1"
        assert await step(found.sandbox, "s2", add=5) == "7"
        fleet.records.forget("s-1")
        found.sandbox.close()
    assert host.containers == {}


async def test_a_session_whose_container_is_gone_is_found_without_a_sandbox(tmp_path: Path) -> None:
    host = FakeHost()
    async with fleet_on([host], tmp_path, tools=[COUNTER], keep_on_exit=True) as fleet:
        sandbox = await fleet.take("counter")
        fleet.records.bind(RECORD, sandbox.name)
    await host.remove(sandbox.name)
    (tmp_path / "s-3.session.json").write_text("{ written by")
    async with fleet_on([host], tmp_path, tools=[COUNTER]) as fleet:
        assert [(found.record, found.sandbox) for found in fleet.found] == [(RECORD, None)]


async def test_a_tool_that_cannot_be_imported_fails_its_callers_with_the_reason(
    tmp_path: Path,
) -> None:
    broken = Tool("broken", Kind.STATELESS, "", "support.container_tools:missing", {})
    host = FakeHost()
    async with fleet_on([host], tmp_path, tools=[broken]) as fleet:
        with pytest.raises(WorkerFailed, match=r"'broken' did not start: .*exit code 1"):
            await fleet.take("broken")


async def test_a_silent_service_is_not_waited_for(tmp_path: Path) -> None:
    """A container that hears nothing for long enough ends by itself; half a message is no
    request."""
    ours, theirs = os.pipe()
    answers, written = os.pipe()
    requests = LineRequests(ours, written, silence_s=0.05)
    hello, whole = b'{"op":"hello","hello":"word"}', b'{"op":"call","id":"whole","body":4}'
    halves = [b'{"op":"call","id":"half', whole + b"\nha"]
    os.write(
        theirs, b"\n".join([halves[0], b"", hello, halves[1], b"", hello, whole, b"true", b""])
    )
    request = requests.next_request()
    assert request is not None
    assert (request.header["id"], os.pread(request.body.file, 9, 0)) == ("whole", b"true")
    request.close()
    assert b'"hello":"word"' in os.read(answers, 4096)
    assert requests.next_request() is None
    for descriptor in (ours, theirs, answers, written):
        os.close(descriptor)
