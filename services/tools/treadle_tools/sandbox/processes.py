"""Start, watch and kill fork servers, spawners and sandboxes of bubblewrap as processes, for the
daemon.

A `ForkServer` is a bubblewrap whose Python has imported a tool; it forks a `Spawner`, which stands
in a control group of its own and forks one sandbox after the other (`SandboxProcess`) into that
group. This module owns the processes' handles and control sockets. Invariant: after `close` or
`kill` returns, no process of it runs.

Where there are no control groups, memory is summed over the process tree ten times a second, shared
memory once for each process that has it mapped: a tree can exceed its limit for one interval, and
RLIMIT_AS and the limit on processes bound by how much. What no process has mapped is refused
(`isolation.refuse_unmapped_memory`), but for the buffers of sockets.
"""

import asyncio
import contextlib
import os
import re
import select
import signal
import socket
import struct
from asyncio.subprocess import DEVNULL, Process
from collections.abc import AsyncIterator
from pathlib import Path
from typing import BinaryIO

import structlog

from treadle_tools.sandbox.bubblewrap import Recipe
from treadle_tools.sandbox.cgroups import Cgroups, Slot
from treadle_tools.sandbox.inside import messages
from treadle_tools.sandbox.inside.fork_server import SANDBOX, SPAWNER, UNCOUNTED_SANDBOX
from treadle_tools.sandbox.sandboxes import SandboxLost, WorkerFailed

log = structlog.get_logger()

# reasoning-gym imports in 2 s on an idle core; two busy cores on a small machine are slower
START_TIMEOUT_S = 120.0
FORK_TIMEOUT_S = 30.0  # 10 ms on an idle core
STDERR_LOGGED_CHARS = 8192  # the last of it: a traceback through a deep import
CHILD_POLL_S = 0.005  # bubblewrap forks some ms after its start
KILL_TIMEOUT_S = 10.0  # a killed process that is still there then is stuck in the kernel
MEMORY_INTERVAL_S = 0.1  # a look costs about 0.1 ms of CPU for a handful of processes
RESIDENT = re.compile(r"^Rss(?:Anon|Shmem):\s+(\d+) kB$", re.MULTILINE)  # of /proc/PID/status
ENDED_EARLY = "the worker ended before it was ready"
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid


async def wait_readable(file: socket.socket | int) -> None:
    """Return once `file` (a socket or a pidfd) can be read, or has ended."""
    loop, ready = asyncio.get_running_loop(), asyncio.Event()
    descriptor = file if isinstance(file, int) else file.fileno()
    loop.add_reader(descriptor, ready.set)
    try:
        await ready.wait()
    finally:
        loop.remove_reader(descriptor)


class _Forked:
    """A process that a fork server has forked for us, with our end of its control socket.

    pid: as this process's namespace numbers it.
    """

    def __init__(self, control: socket.socket, pid: int, slot: Slot | None) -> None:
        try:
            self._pidfd = os.pidfd_open(pid)
        except ProcessLookupError as error:
            raise SandboxLost(ENDED_EARLY) from error
        self._control = control
        self._killed = False
        self.pid = pid
        self.slot = slot

    @property
    def alive(self) -> bool:
        """Return whether the process runs."""
        if self._killed:
            return False
        poll = select.poll()
        poll.register(self._pidfd, select.POLLIN)
        return not poll.poll(0)

    async def kill(self) -> None:
        """Kill the process and wait for its end. May be called again. Raises TimeoutError."""
        if self._killed:
            return
        self._killed = True
        try:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
            async with asyncio.timeout(KILL_TIMEOUT_S):
                await wait_readable(self._pidfd)
        finally:
            os.close(self._pidfd)
            self._control.close()


class SandboxProcess(_Forked):
    """The init of one sandbox: with it every process of the sandbox ends.

    Invariant: the sandbox lives as long as the daemon holds the control socket, also while no
    service is connected.
    """

    def connect(self) -> int | None:
        """Return a fresh connection to the sandbox, as a descriptor; None where it has ended.

        The sandbox drops its earlier connection, with any message that was sent by half.
        """
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                socket.send_fds(self._control, [b"connection"], [theirs.fileno()])
            except OSError:
                ours.close()
                return None
        return ours.detach()


class Spawner(_Forked):
    """Forks one sandbox at a time, so that its slot's limits and counts are that sandbox's.

    The sandbox must be killed before its spawner.
    """

    async def spawn(self) -> SandboxProcess:
        """Fork a new sandbox.

        The sandbox before must be dead. Raises SandboxLost, OSError or TimeoutError.
        """
        order = UNCOUNTED_SANDBOX if self.slot is None else SANDBOX
        async with _order(self._control, order) as (control, body, pid):
            hello = messages.decode(body[messages.HEADER.size :])
            if "failed" in hello:
                raise SandboxLost(f"the sandbox cannot be isolated: {hello['failed']}")
            return SandboxProcess(control, pid, self.slot)


@contextlib.asynccontextmanager
async def _order(
    forker: socket.socket, what: bytes
) -> AsyncIterator[tuple[socket.socket, bytes, int]]:
    """Order a fork; yield the new process's control socket, its first message, and its id.

    The block owns the socket unless it raises. Raises SandboxLost where the process ends before its
    first message, OSError, TimeoutError.

    The kernel reports who sent the message, in our own numbers: in its namespace a process only
    knows another number.
    """
    control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    control.setblocking(False)
    control.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
    try:
        with theirs:
            socket.send_fds(forker, [what], [theirs.fileno()])
        async with asyncio.timeout(FORK_TIMEOUT_S):
            await wait_readable(control)
        body, ancillary, _, _ = control.recvmsg(
            messages.HEADER.size + 4096, socket.CMSG_SPACE(_CREDENTIALS.size)
        )
        pids = [
            int(_CREDENTIALS.unpack(data[: _CREDENTIALS.size])[0])
            for level, kind, data in ancillary
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_CREDENTIALS)
        ]
        if not body or not pids:
            raise SandboxLost(ENDED_EARLY)
        yield control, body, pids[0]
    except BaseException:
        control.close()
        raise


class ForkServer:
    """A bubblewrap whose Python has imported a tool. Made by `start`.

    single_use: whether the kernel refuses namespaces in the sandbox, so that it can serve one
    sandbox only.
    """

    def __init__(
        self, tool: str, process: Process, control: socket.socket, stderr: BinaryIO
    ) -> None:
        self._tool = tool
        self._process = process
        self._control = control
        self._stderr = stderr
        self.single_use = True

    @classmethod
    async def start(cls, recipe: Recipe) -> "ForkServer":
        """Start a fork server and wait until it has imported its tool. Raises WorkerFailed."""
        control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        control.setblocking(False)
        stderr = os.fdopen(os.memfd_create("stderr"), "w+b")
        try:
            process = await asyncio.create_subprocess_exec(
                *recipe.command, stdin=theirs.fileno(), stdout=DEVNULL, stderr=stderr.fileno()
            )
        except OSError as error:
            control.close()
            stderr.close()
            raise WorkerFailed(f"tool {recipe.tool!r}: {error}") from error
        finally:
            theirs.close()
        fork_server = cls(recipe.tool, process, control, stderr)
        try:
            await fork_server._wait_ready()
        except BaseException:
            await fork_server.close()
            raise
        return fork_server

    async def _wait_ready(self) -> None:
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                message = await asyncio.get_running_loop().sock_recv(
                    self._control, messages.MAX_FRAME_BYTES
                )
        except TimeoutError:
            raise WorkerFailed(
                f"tool {self._tool!r} was not ready after {START_TIMEOUT_S:g} s"
            ) from None
        except OSError:  # it ended with our socket unread
            message = b""
        if not message:
            code = await self._process.wait()
            self._stderr.seek(0)
            why = self._stderr.read().decode(errors="replace").strip()[-STDERR_LOGGED_CHARS:]
            log.error("a tool's worker did not start", tool=self._tool, stderr=why)
            last = why.splitlines()[-1] if why else f"exit code {code}"
            raise WorkerFailed(f"tool {self._tool!r} did not start: {last}")
        self.single_use = not messages.decode(message)["isolated"]
        log.info("tool ready", tool=self._tool, forks=not self.single_use)

    async def open_spawner(self, cgroups: Cgroups | None) -> Spawner:
        """Fork a new spawner. Raises WorkerFailed; the fork server should be closed then."""
        try:
            async with _order(self._control, SPAWNER) as (control, _, pid):
                slot = None if cgroups is None else cgroups.take()
                if slot is not None:
                    # A slot that cannot be joined is not given back
                    await asyncio.to_thread(slot.join, pid)
                return Spawner(control, pid, slot)
        except (OSError, SandboxLost) as error:
            raise WorkerFailed(f"tool {self._tool!r} has no spawner: {error}") from error

    async def close(self) -> None:
        """Kill the fork server with all its spawners and sandboxes. May be called again."""
        if self._process.returncode is None:
            await self._kill_init()
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
        await self._process.wait()
        if self._control.fileno() < 0:
            return
        # bubblewrap itself ends first; the processes behind it have ended once no process holds the
        # other end.
        try:
            async with asyncio.timeout(KILL_TIMEOUT_S):
                with contextlib.suppress(OSError):
                    while await asyncio.get_running_loop().sock_recv(
                        self._control, messages.MAX_FRAME_BYTES
                    ):
                        pass
        except TimeoutError:
            log.error("a killed worker does not end", tool=self._tool)
        finally:
            self._control.close()
            self._stderr.close()

    async def _kill_init(self) -> None:
        """Kill process 1 of bubblewrap's namespace, and with it everything inside.

        It would die with bubblewrap, except while it is still setting the sandbox up.
        """
        with contextlib.suppress(TimeoutError, OSError):
            async with asyncio.timeout(KILL_TIMEOUT_S):
                while True:
                    for pid in _list_children(self._process.pid):
                        os.kill(pid, signal.SIGKILL)
                        return
                    await asyncio.sleep(CHILD_POLL_S)


def _list_children(pid: int) -> list[int]:
    """Return the children of a process with one thread. Raises FileNotFoundError where it has
    ended."""
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def read_private_bytes(pid: int, inherited_bytes: int = 0, proc: Path = Path("/proc")) -> int:
    """Return the resident bytes of `pid` and its descendants that no file on a disk backs; 0 once
    it has ended.

    inherited_bytes: what each of them shares with the worker it was forked from, not counted again
    for each.
    """
    total, waiting = 0, [pid]
    while waiting:
        process = proc / str(waiting.pop())
        try:
            total += max(0, _read_own_bytes(process) - inherited_bytes)
            for thread in (process / "task").iterdir():
                waiting += [int(child) for child in (thread / "children").read_text().split()]
        except (FileNotFoundError, ProcessLookupError):
            continue
    return total


def _read_own_bytes(process: Path) -> int:
    try:
        status = (process / "status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return 1024 * sum(int(size) for size in RESIDENT.findall(status))


async def wait_for_growth(pid: int, more_bytes: int) -> None:
    """Return once the process tree of `pid` holds `more_bytes` more than now."""
    inherited = _read_own_bytes(Path("/proc") / str(pid))
    most = read_private_bytes(pid, inherited) + more_bytes
    while True:
        if read_private_bytes(pid, inherited) > most:
            return
        await asyncio.sleep(MEMORY_INTERVAL_S)
