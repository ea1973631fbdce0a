"""The service's side of the sandbox daemon: finds the one that runs or starts one, requests sandboxes, stores sessions.

Owns: the connection, and the daemon's process where this service has started it. Invariant: the daemon carries out what
was posted even if this process is killed right afterwards. A lost daemon takes its sandboxes along; another is started.
"""

import asyncio
import contextlib
import os
import socket
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import structlog

from treadle_tools.sandbox import channel
from treadle_tools.sandbox.bubblewrap import Recipe
from treadle_tools.sandbox.bubblewrap_sandbox import BubblewrapSandbox
from treadle_tools.sandbox.cgroups import Root, Slot
from treadle_tools.sandbox.channel import Channel
from treadle_tools.sandbox.inside import frames
from treadle_tools.sandbox.sandboxes import Backend, FoundSession, Sandbox, SessionRecords, WorkerFailed
from treadle_tools.sandbox.state_folder import StateFolder

log = structlog.get_logger()

TRIES = 5  # one daemon may just be ending, and another be of an older version
START_TIMEOUT_S = 30.0  # 0.2 s on an idle core
END_TIMEOUT_S = 30.0  # killing what it holds takes well under a second
RESTART_PAUSE_S = 1.0


class DaemonFailed(Exception):  # noqa: N818 - named for what happened
    """There is no sandbox daemon and none can be started; the message says why."""


class DaemonRecords(SessionRecords):
    """Sessions that the daemon stores. post: sends it an order. closed: what the daemon knew when this service came."""

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
    """See Backend. keep_s: how long the daemon waits for the next service. keep_on_exit: also after an orderly end."""

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
        super().__init__(DaemonRecords(self._post), [recipe.tool for recipe in recipes], failures, warm=warm, lazy=lazy)
        self._folder = folder
        self._hello = {
            channel.OP: channel.HELLO, "protocol": channel.PROTOCOL, "recipes": [asdict(recipe) for recipe in recipes],
            "warm": warm, "cgroups": cgroups, "keep_s": keep_s,
        }  # fmt: skip
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
            except (TimeoutError, frames.FrameError) as error:
                log.warning("the sandbox daemon gave no welcome", error=str(error))
            finally:
                if self._channel is None:
                    connection.close()
            if self._channel is not None:
                for warm in self._warm.values():
                    warm.fill()
                return
        raise DaemonFailed(f"no sandbox daemon starts in {self._folder.path}; {self._folder.log} says why")

    async def run(self) -> None:
        """Take in sandboxes until cancelled, and replace a daemon that is lost."""
        while True:
            try:
                await self._receive_sandboxes()
            except frames.FrameError as error:
                log.error("the sandbox daemon sends no frames", error=str(error))
            log.error("the sandbox daemon is gone: its sessions have crashed")
            self._disconnect()
            for warm in self._warm.values():
                warm.drop()
            while self._channel is None:
                try:
                    await self.connect()
                except DaemonFailed as failure:
                    log.error("no sandbox daemon", error=str(failure))
                    await asyncio.sleep(RESTART_PAUSE_S)
            for session in self.found:  # of yet another daemon: this service has called them crashed already
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
        """Disconnect. With `keep_on_exit` the daemon waits for the next service, else it ends with everything in it."""
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
            program = [sys.executable, "-m", f"{__package__}.daemon", str(self._folder.path.absolute())]
            descriptors = ((listener.fileno(), 0), (output.fileno(), 1), (output.fileno(), 2))
            # Not a child that asyncio waits for, since it may outlive this process; in a session of its own, so that
            # Ctrl-C at the service's terminal does not reach it.
            actions = [(os.POSIX_SPAWN_DUP2, ours, theirs) for ours, theirs in descriptors]
            self._started.append(os.posix_spawn(sys.executable, program, os.environ, file_actions=actions, setsid=True))
            connection = self._folder.connect()
        if connection is None:
            raise DaemonFailed(f"nothing listens in {self._folder.path}; {self._folder.log} says why")
        return connection

    async def _greet(self, connection: Channel) -> bool:
        """Say hello and take over the sessions. False where the daemon ended instead."""
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
        """The sandbox that comes with a message. It is ended through the daemon that made it, never through another."""
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
    """Whether a child process has ended, perhaps reaped elsewhere in this process. options: as of waitpid."""
    try:
        return os.waitpid(pid, options)[0] == pid
    except ChildProcessError:
        return True
