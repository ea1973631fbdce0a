"""Serve as the service's side of the sandbox daemon: find or start the daemon, request sandboxes,
use them.

`BubblewrapSandbox` owns the connection to one sandbox's init; the processes belong to the daemon.
`DaemonClient` owns the connection to the daemon, and the daemon's process where this service has
started it. Invariant: the daemon carries out what was posted even if this process is killed right
afterwards. A lost daemon takes its sandboxes with it, and the client starts another.
"""

import asyncio
import contextlib
import os
import select
import socket
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

import structlog
from tenacity import AsyncRetrying, retry_if_exception_type, wait_fixed
from treadle_runtime.bus import run_beside

from treadle_tools.sandbox import channel
from treadle_tools.sandbox.bubblewrap import Recipe
from treadle_tools.sandbox.cgroups import MemoryCounts, Root, Slot
from treadle_tools.sandbox.channel import Channel
from treadle_tools.sandbox.inside import messages
from treadle_tools.sandbox.processes import wait_for_growth
from treadle_tools.sandbox.sandboxes import (
    Backend,
    FoundSession,
    Sandbox,
    SandboxLost,
    SessionRecords,
    WorkerFailed,
)
from treadle_tools.sandbox.state_folder import StateFolder
from treadle_tools.tool import BACKSTOP_S, WORKER_BYTES, WORKER_PROCESSES, Granted, Limits

PIECE_BYTES = 1024 * 1024


class BubblewrapSandbox(Sandbox):
    """`Sandbox` of bubblewrap, which the sandbox daemon has made.

    name: given by the daemon. pid: of its init. end: has the sandbox killed, without waiting.
    """

    reusable = True

    def __init__(
        self,
        name: str,
        connection: socket.socket,
        pid: int,
        slot: Slot | None,
        end: Callable[[], None],
    ) -> None:
        connection.setblocking(False)
        self.name = name
        self._connection = connection
        self._pid = pid
        self._slot = slot
        self._end = end
        self._killed_above = False  # by this service, during the last request
        self._counts_before = MemoryCounts()  # the last request

    @property
    def alive(self) -> bool:
        """Return whether it can take a request.

        The sandbox sends nothing but answers, so anything to read here is its end.
        """
        if self._connection.fileno() < 0:
            return False
        poll = select.poll()
        poll.register(self._connection, select.POLLIN)
        return not poll.poll(0)

    async def _exchange(
        self, header: dict[str, Any], body: bytes, limits: Limits, processes: int
    ) -> dict[str, Any]:
        self._killed_above, self._counts_before = False, self._count_memory()
        slot = None if header["op"] == "recall" else self._slot
        used_s = None if slot is None else self._limit(slot, header["op"], limits, processes)
        try:
            async with asyncio.timeout(limits.wall_s + BACKSTOP_S):
                # Without a control group this kills the sandbox above its memory limit.
                watches = (
                    []
                    if self._slot is not None
                    else [partial(self._kill_above, limits.memory_bytes)]
                )
                async with run_beside(watches):
                    reply = await self._exchange_messages(header, body)
        finally:
            if slot is not None:
                slot.unpin()
        if slot is not None and used_s is not None and (now_s := slot.cpu_s()) is not None:
            reply["cpu_s"] = now_s - used_s
        return reply

    def _limit(self, slot: Slot, op: str, limits: Limits, processes: int) -> float | None:
        """Limit the slot for an action; return the CPU seconds that the slot has used before."""
        try:
            slot.limit(
                memory_bytes=None if op == "step" else limits.memory_bytes + WORKER_BYTES,
                cpu_cores=limits.cpu_cores,
                processes=processes + WORKER_PROCESSES,
                cores=limits.cores if isinstance(limits, Granted) else (),
            )
        except FileNotFoundError as error:
            raise SandboxLost("the worker's control group is gone, and so is the worker") from error
        return slot.cpu_s()

    def _was_killed_for_memory(self) -> bool:
        before, now = self._counts_before, self._count_memory()
        return self._killed_above or (now.kills > before.kills and now.full > before.full)

    def _machine_ran_out(self) -> bool:
        before, now = self._counts_before, self._count_memory()
        return now.kills > before.kills and now.full == before.full

    def _count_memory(self) -> MemoryCounts:
        if self._slot is None:
            return MemoryCounts()
        try:
            return self._slot.memory_counts()
        except FileNotFoundError:  # removed after the sandbox's end
            return MemoryCounts()

    async def _kill_above(self, memory_bytes: int) -> None:
        await wait_for_growth(self._pid, memory_bytes)
        self._killed_above = True
        self._end()

    async def _exchange_messages(self, header: Mapping[str, Any], body: bytes) -> dict[str, Any]:
        try:
            data = messages.encode(header) + body
            await asyncio.get_running_loop().sock_sendall(self._connection, data)
            received = bytearray()
            length = messages.read_length(await self._take(received, messages.HEADER.size))
            said = messages.decode(await self._take(received, length))
            printed = await self._take(received, messages.size_of(said, "printed"))
            return messages.read_answer(
                said, printed, await self._take(received, messages.size_of(said, "answer"))
            )
        except (OSError, messages.FrameError) as error:
            raise SandboxLost(f"the worker ended without an answer ({error})") from error

    async def _take(self, received: bytearray, count: int) -> bytes:
        """Return the next bytes of the answer. received: bytes of it that have come and were not
        taken."""
        while len(received) < count:
            piece = await asyncio.get_running_loop().sock_recv(self._connection, PIECE_BYTES)
            if not piece:
                raise SandboxLost("the worker ended without an answer")
            received += piece
        taken = bytes(received[:count])
        del received[:count]
        return taken

    def close(self) -> None:
        if self._connection.fileno() >= 0:
            self.disconnect()
            self._end()

    def disconnect(self) -> None:
        """Leave the sandbox to the daemon. No request may be under way."""
        self._connection.close()


log = structlog.get_logger()

TRIES = 5  # one daemon may just be ending, and another be of an older version
START_TIMEOUT_S = 30.0  # 0.2 s on an idle core
END_TIMEOUT_S = 30.0  # killing what it holds takes well under a second
RESTART_PAUSE_S = 1.0


class DaemonFailed(Exception):  # noqa: N818 - named for what happened
    """There is no sandbox daemon and none can be started; the message gives the reason."""


class DaemonRecords(SessionRecords):
    """Sessions that the daemon stores.

    post: sends the daemon an order. closed: what the daemon knew when this service came.
    """

    def __init__(self, post: Callable[[Mapping[str, Any]], None]) -> None:
        super().__init__()
        self._post = post

    def bind(self, record: Mapping[str, Any], sandbox: str) -> None:
        self._post({channel.OP: channel.BIND, "record": record, "sandbox": sandbox})

    def note(self, session_id: str, facts: Mapping[str, Any]) -> None:
        self._post({channel.OP: channel.NOTE, "session": session_id, "facts": facts})

    def forget(self, session_id: str, closed_by: str = "") -> None:
        self._post({channel.OP: channel.FORGET, "session": session_id, "closed_by": closed_by})


class DaemonClient(Backend):
    """`Backend` of bubblewrap's sandboxes, which the sandbox daemon holds.

    keep_s: how long the daemon waits for the next service. keep_on_exit: whether it also waits
    after an orderly end.
    """

    def __init__(
        self,
        folder: StateFolder,
        recipes: Sequence[Recipe],
        failures: Mapping[str, str],
        *,
        warm: int,
        cgroups: bool,
        keep_s: float,
        keep_on_exit: bool,
        lazy: Collection[str] = (),
    ) -> None:
        super().__init__(
            DaemonRecords(self._post),
            [recipe.tool for recipe in recipes],
            failures,
            warm=warm,
            lazy=lazy,
        )
        self._folder = folder
        self._hello = {
            channel.OP: channel.HELLO,
            "protocol": channel.PROTOCOL,
            "recipes": [asdict(recipe) for recipe in recipes],
            "warm": warm,
            "cgroups": cgroups,
            "keep_s": keep_s,
        }
        self._keep_on_exit = keep_on_exit
        self._channel: Channel | None = None
        self._started: list[int] = []  # daemons by process id, not reaped yet
        self.root: Root | None = None  # of the control groups that limit the sandboxes, if any do
        self._slots: dict[str, Slot] = {}
        self._sandboxes: dict[str, BubblewrapSandbox] = {}  # all that came and were not ended

    async def connect(self) -> None:
        """Find the daemon of the folder, or start one. Raises DaemonFailed."""
        for _ in range(TRIES):
            connection = Channel(self._folder.connect() or self._start())
            try:
                async with asyncio.timeout(START_TIMEOUT_S):
                    if await self._greet(connection):
                        self._channel = connection
            except (TimeoutError, messages.FrameError) as error:
                log.warning("the sandbox daemon gave no welcome", error=str(error))
            finally:
                if self._channel is None:
                    connection.close()
            if self._channel is not None:
                for warm in self._warm.values():
                    warm.fill()
                return
        raise DaemonFailed(
            f"no sandbox daemon starts in {self._folder.path}; {self._folder.log} says why"
        )

    async def run(self) -> None:
        """Take in sandboxes until cancelled, and replace a daemon that is lost."""

        async def connect() -> None:
            try:
                await self.connect()
            except DaemonFailed as failure:
                log.error("no sandbox daemon", error=str(failure))
                raise

        failed, pause = retry_if_exception_type(DaemonFailed), wait_fixed(RESTART_PAUSE_S)
        while True:
            try:
                await self._receive_sandboxes()
            except messages.FrameError as error:
                log.error("the sandbox daemon sends no frames", error=str(error))
            log.error("the sandbox daemon is gone: its sessions have crashed")
            self._disconnect()
            for warm in self._warm.values():
                warm.drop()
            await AsyncRetrying(retry=failed, wait=pause)(connect)
            # Of yet another daemon: this service has called them crashed already
            for session in self.found:
                if session.sandbox is not None:
                    session.sandbox.close()
                self.records.forget(str(session.record["session_id"]))

    async def take(self, tool: str) -> Sandbox:
        if self._channel is None:
            raise WorkerFailed("the sandbox daemon is being started again")
        return await super().take(tool)

    async def flush(self) -> None:
        if self._channel is not None:
            await self._channel.flush()

    async def close(self) -> None:
        """Disconnect from the daemon.

        With `keep_on_exit` the daemon waits for the next service, else it ends with everything in
        it.
        """
        if self._channel is not None and not self._keep_on_exit:
            self._post({channel.OP: channel.END})
            try:
                async with asyncio.timeout(END_TIMEOUT_S):
                    while (received := await self._channel.receive()) is not None:
                        if received[1] is not None:
                            os.close(received[1])
                    for pid in self._started:
                        await asyncio.to_thread(_has_ended, pid, 0)
            except TimeoutError:
                log.error("the sandbox daemon does not end", folder=str(self._folder.path))
        self._disconnect()
        for sandbox in self._sandboxes.values():
            sandbox.disconnect()
        self._folder.release(keep=self._keep_on_exit)

    def _start(self) -> socket.socket:
        self._started = [pid for pid in self._started if not _has_ended(pid, os.WNOHANG)]
        with self._folder.listen() as listener, self._folder.log.open("wb") as output:
            program = [
                sys.executable,
                "-m",
                f"{__package__}.daemon",
                str(self._folder.path.absolute()),
            ]
            descriptors = ((listener.fileno(), 0), (output.fileno(), 1), (output.fileno(), 2))
            # Not a child that asyncio waits for, since it may outlive this process; in a session of
            # its own, so that Ctrl-C at the service's terminal does not reach it.
            actions = [(os.POSIX_SPAWN_DUP2, ours, theirs) for ours, theirs in descriptors]
            self._started.append(
                os.posix_spawn(
                    sys.executable, program, os.environ, file_actions=actions, setsid=True
                )
            )
            connection = self._folder.connect()
        if connection is None:
            raise DaemonFailed(
                f"nothing listens in {self._folder.path}; {self._folder.log} says why"
            )
        return connection

    async def _greet(self, connection: Channel) -> bool:
        """Send the hello and take over the sessions; return False where the daemon ended
        instead."""
        connection.post(self._hello)
        self.found, self._slots = [], {}
        while (received := await connection.receive()) is not None:
            match received[0]:
                case {"op": channel.WELCOME, "cgroups": root, "closed": closed}:
                    self.root, self.records.closed = None if root is None else Root(**root), closed
                case {"op": channel.SESSION, "record": record}:
                    self.found.append(FoundSession(record, self._take_in(connection, *received)))
                case {"op": channel.READY}:
                    return True
        return False

    async def _receive_sandboxes(self) -> None:
        connection = self._channel
        assert connection is not None
        while (received := await connection.receive()) is not None:
            message, _ = received
            if message.get(channel.OP) == channel.FAILED:
                log.error("a tool's worker failed", tool=message["tool"], error=message["error"])
                self._warm[message["tool"]].failure = str(message["error"])
            elif (sandbox := self._take_in(connection, *received)) is not None:
                self._warm[message["sandbox"]["tool"]].add(sandbox)

    def _take_in(
        self, connection: Channel, message: Mapping[str, Any], descriptor: int | None
    ) -> BubblewrapSandbox | None:
        """Return the sandbox that comes with a message.

        It is ended through the daemon that made it, never through another.
        """
        if descriptor is None:
            return None
        made = message["sandbox"]
        name = str(made["name"])

        def end() -> None:
            self._sandboxes.pop(name, None)
            connection.post({channel.OP: channel.KILL, "sandbox": name})

        if (slot := made["slot"]) is not None and self.root is not None and slot not in self._slots:
            self._slots[slot] = Slot(self.root, slot)
        own = socket.socket(fileno=descriptor)
        sandbox = BubblewrapSandbox(name, own, made["pid"], self._slots.get(slot), end)
        self._sandboxes[name] = sandbox
        return sandbox

    def _request(self, tool: str, count: int) -> None:
        self._post({channel.OP: channel.REQUEST, "tool": tool, "count": count})

    def _post(self, message: Mapping[str, Any]) -> None:
        if self._channel is not None:
            self._channel.post(message)

    def _disconnect(self) -> None:
        if self._channel is not None:
            with contextlib.suppress(OSError):
                self._channel.close()
            self._channel = None


def _has_ended(pid: int, options: int) -> bool:
    """Return whether a child process has ended, also where another part of this process has reaped
    it.

    options: as of waitpid.
    """
    try:
        return os.waitpid(pid, options)[0] == pid
    except ChildProcessError:
        return True
