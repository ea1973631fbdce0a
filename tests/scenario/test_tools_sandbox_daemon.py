"""The sandbox daemon by itself, with a real bubblewrap: broken connections, its own end, its
folder."""

import asyncio
import json
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from support.processes import command_line
from support.sandbox import need_sandbox
from support.tools import gone, groups_of
from treadle_tools.builtin import PYTHON
from treadle_tools.sandbox import channel
from treadle_tools.sandbox.bubblewrap import find_bubblewrap
from treadle_tools.sandbox.channel import Channel
from treadle_tools.sandbox.daemon_client import BubblewrapSandbox, DaemonClient
from treadle_tools.sandbox.inside import messages
from treadle_tools.sandbox.sandboxes import Sandbox, SandboxLost
from treadle_tools.sandbox.state_folder import FolderRefused, StateFolder
from treadle_tools.tool import Limits

LIMITS = Limits(output_bytes=4 * 1024 * 1024)
RECORD = {"session_id": "s-1", "note": "the daemon's own it is not"}
LARGE = 2 * 1024 * 1024  # more than any socket buffer holds


@asynccontextmanager
async def service(state: Path, **changes: Any) -> AsyncIterator[DaemonClient]:
    """A service's side of a daemon, which outlives it by default."""
    need_sandbox()
    bubblewrap = find_bubblewrap()
    settings = {"warm": 1, "cgroups": False, "keep_s": 30.0, "keep_on_exit": True, **changes}
    client = DaemonClient(StateFolder.take(state), [bubblewrap.recipe(PYTHON)], {}, **settings)
    await client.connect()
    running = asyncio.create_task(client.run())
    try:
        yield client
    finally:
        running.cancel()
        with suppress(asyncio.CancelledError):
            await running
        await client.close()


def daemon_process(state: Path) -> psutil.Process:
    """The daemon of a folder."""
    for process in psutil.Process().children():
        if command_line(process).endswith(f" {state}"):
            return process
    raise AssertionError("there is no daemon")


async def take(client: DaemonClient) -> BubblewrapSandbox:
    """A fresh sandbox."""
    sandbox = await client.take("python")
    assert isinstance(sandbox, BubblewrapSandbox)
    return sandbox


async def run(sandbox: Sandbox, code: str, request_id: str) -> dict[str, Any]:
    return await sandbox.ask(
        "call", {"code": code}, LIMITS, PYTHON.processes, request_id=request_id
    )


def request(code: str, request_id: str) -> bytes:
    limits = {
        "memory_bytes": LIMITS.memory_bytes,
        "wall_s": 10.0,
        "output_bytes": LIMITS.output_bytes,
        "cpu_cores": 1,
    }
    body = json.dumps({"code": code}).encode()
    return (
        messages.encode({"op": "call", "id": request_id, "limits": limits, "body": len(body)})
        + body
    )


async def test_an_answer_that_was_read_by_half_is_received_whole(tmp_path: Path) -> None:
    """The next service gets a fresh connection and receives the whole answer, and the sandbox goes
    on."""
    async with service(tmp_path / "s") as first:
        sandbox = await take(first)
        first.records.bind(RECORD, sandbox.name)
        loop = asyncio.get_running_loop()
        await loop.sock_sendall(sandbox._connection, request(f"print('x' * {LARGE})", "one"))
        assert len(await loop.sock_recv(sandbox._connection, 1000)) > 0
    async with service(tmp_path / "s", keep_on_exit=False) as second:
        (found,) = second.found
        assert found.record == RECORD
        assert found.sandbox is not None
        reply = await found.sandbox.ask("recall", None, LIMITS, 1)
        assert (reply["id"], len(reply["output"])) == ("one", LARGE + 1)
        assert (await run(found.sandbox, "1 + 1", "two"))["output"] == "2\n"


async def test_a_request_that_was_sent_by_half_never_happened(tmp_path: Path) -> None:
    async with service(tmp_path / "s") as first:
        sandbox = await take(first)
        first.records.bind(RECORD, sandbox.name)
        whole = request("open('/tmp/x', 'w').write('x')", "one")
        await asyncio.get_running_loop().sock_sendall(sandbox._connection, whole[: len(whole) // 2])
    async with service(tmp_path / "s", keep_on_exit=False) as second:
        (found,) = second.found
        assert found.sandbox is not None
        assert await found.sandbox.ask("recall", None, LIMITS, 1) == {"id": ""}
        assert (await run(found.sandbox, "import os; os.listdir('/tmp')", "two"))[
            "output"
        ] == "[]\n"


async def test_only_sandboxes_of_sessions_outlive_a_service(tmp_path: Path) -> None:
    """What is noted of a session is there, what is forgotten is not; a sandbox that is no session's
    is killed."""
    async with service(tmp_path / "s") as first:
        kept, closed, loose = [await take(first) for _ in range(3)]
        first.records.bind(RECORD, kept.name)
        first.records.bind({"session_id": "s-2"}, closed.name)
        first.records.note("s-1", {"note": "changed"})
        first.records.forget("s-2", closed_by="r-2")
        processes = [psutil.Process(sandbox._pid) for sandbox in (closed, loose)]
    await gone(processes)
    async with service(tmp_path / "s", keep_on_exit=False) as second:
        assert [found.record for found in second.found] == [{**RECORD, "note": "changed"}]
        assert second.records.closed == {"s-2": "r-2"}


async def test_a_sandbox_that_is_closed_is_dead_and_its_session_is_remembered(
    tmp_path: Path,
) -> None:
    async with service(tmp_path / "s") as first:
        sandbox = await take(first)
        first.records.bind(RECORD, sandbox.name)
        process = psutil.Process(sandbox._pid)
        sandbox.close()
        await gone([process])
        with pytest.raises(SandboxLost):
            await run(sandbox, "1", "late")
    async with service(tmp_path / "s", keep_on_exit=False) as second:
        assert [(found.record, found.sandbox) for found in second.found] == [(RECORD, None)]


async def test_a_tools_worker_that_died_is_replaced_before_anybody_misses_it(
    tmp_path: Path,
) -> None:
    """All processes of the daemon are killed while there is no service. Result: the next service
    gets a fresh sandbox at once."""
    async with service(tmp_path / "s") as first:
        first.records.bind(RECORD, (await take(first)).name)
        inside = daemon_process(tmp_path / "s").children(recursive=True)
    for process in inside:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    await gone(inside)
    async with service(tmp_path / "s", keep_on_exit=False) as second:
        assert (await run(await take(second), "1 + 1", "one"))["output"] == "2\n"


@pytest.mark.parametrize(
    "keep_s", [0.0, 0.2, None], ids=["nobody comes", "nobody comes in time", "SIGTERM"]
)
async def test_a_daemon_ends_with_all_it_holds(tmp_path: Path, keep_s: float | None) -> None:
    async with service(
        tmp_path / "s", keep_s=keep_s or 0.0, cgroups=True, keep_on_exit=keep_s is not None
    ) as first:
        daemon = daemon_process(tmp_path / "s")
        first.records.bind(RECORD, (await take(first)).name)
        running = daemon.children(recursive=True)
        if keep_s is None:
            daemon.terminate()
            await gone(running)
    await gone(running)
    await wait_for_end(daemon)
    assert groups_of(daemon) == []
    assert not (tmp_path / "s").exists()


async def test_a_service_of_another_version_gets_a_daemon_of_its_own(tmp_path: Path) -> None:
    """The old one ends on the first word that it does not understand, and its sessions with it."""
    async with service(tmp_path / "s") as first:
        old = daemon_process(tmp_path / "s")
        first.records.bind(RECORD, (await take(first)).name)
        running = old.children(recursive=True)
    folder = StateFolder.take(tmp_path / "s")
    end = folder.connect()
    assert end is not None
    newer = Channel(end)
    newer.post({channel.OP: channel.HELLO, "protocol": channel.PROTOCOL + 1})
    assert await newer.receive() is None
    newer.close()
    folder.release(keep=True)
    await gone(running)
    await wait_for_end(old)
    async with service(tmp_path / "s", keep_on_exit=False) as second:
        assert second.found == []
        assert (await run(await take(second), "1 + 1", "r"))["output"] == "2\n"


async def test_other_control_groups_need_another_daemon(tmp_path: Path) -> None:
    async with service(tmp_path / "s", cgroups=False) as first:
        first.records.bind(RECORD, (await take(first)).name)
        old = daemon_process(tmp_path / "s")
    async with service(tmp_path / "s", cgroups=True, keep_on_exit=False) as second:
        assert second.found == []
        await wait_for_end(old)
        assert (await run(await take(second), "1 + 1", "r"))["output"] == "2\n"


def test_one_service_at_a_time_holds_a_folder(tmp_path: Path) -> None:
    held = StateFolder.take(tmp_path / "s")
    with pytest.raises(FolderRefused, match="another tools service"):
        StateFolder.take(tmp_path / "s")
    held.release(keep=False)
    assert not (tmp_path / "s").exists()
    StateFolder.take(tmp_path / "s").release(keep=False)


@pytest.mark.parametrize("mode", [0o755, 0o770])
def test_a_folder_that_others_may_enter_is_refused(tmp_path: Path, mode: int) -> None:
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(mode)
    with pytest.raises(FolderRefused, match="chmod 700"):
        StateFolder.take(tmp_path / "open")


def test_a_folder_under_another_name_is_refused(tmp_path: Path) -> None:
    """In a folder that all users write to, a link could lead anywhere."""
    (tmp_path / "real").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with pytest.raises(FolderRefused, match="cannot be used"):
        StateFolder.take(tmp_path / "link")
    StateFolder.take(tmp_path / "real").release(keep=False)


async def test_frames_and_descriptors_arrive_in_their_order(tmp_path: Path) -> None:
    """More than a socket holds, with a descriptor on every third message."""
    folder = StateFolder.take(tmp_path / "s")
    with folder.listen() as listener:
        end = folder.connect()
        assert end is not None
        here, there = Channel(end), Channel(listener.accept()[0])
    for number in range(30):
        descriptor = None
        if number % 3 == 0:
            (tmp_path / str(number)).write_text(str(number))
            descriptor = os.open(tmp_path / str(number), os.O_RDONLY)
        here.post({"number": number, "filler": "x" * 50_000}, descriptor)
    for number in range(30):
        received = await there.receive()
        assert received is not None
        message, descriptor = received
        assert message == {"number": number, "filler": "x" * 50_000}
        assert (descriptor is not None) == (number % 3 == 0)
        if descriptor is not None:
            assert os.read(descriptor, 10) == str(number).encode()
            os.close(descriptor)
    await here.flush()
    here.close()
    assert await there.receive() is None
    there.post({"to": "nobody"})
    there.close()
    (tmp_path / "s" / "daemon.sock").unlink()
    folder.release(keep=True)


async def wait_for_end(daemon: psutil.Process) -> None:
    """Return once it is gone: this process has started it and reaps it."""
    await asyncio.to_thread(daemon.wait, 20)
