"""Run the sandbox daemon, `python -m treadle_tools.sandbox.daemon FOLDER`, which holds the
sandboxes and outlives the service.

The service starts it with the state folder's socket as standard input. It serves one service at a
time, waits a while for the next, and ends with all it holds. It owns the listening socket, the
control groups, the records of sessions, and a `Pool` of sandboxes for each tool. Invariants: a
sandbox without a session dies with its service, and everything in sandboxes with the daemon.
"""

import asyncio
import itertools
import os
import resource
import signal
import socket
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import structlog
from tenacity import AsyncRetrying, retry_if_exception_type, wait_chain, wait_fixed

from treadle_tools.sandbox import channel, state_folder
from treadle_tools.sandbox.bubblewrap import Recipe
from treadle_tools.sandbox.cgroups import Cgroups, find_cgroups
from treadle_tools.sandbox.channel import Channel
from treadle_tools.sandbox.inside import messages
from treadle_tools.sandbox.processes import ForkServer, SandboxProcess, Spawner, wait_for_growth
from treadle_tools.sandbox.sandboxes import (
    RETRY_PAUSES_S,
    SandboxLost,
    SessionRecords,
    WorkerFailed,
)

log = structlog.get_logger()


@dataclass(frozen=True)
class Made:
    """A sandbox and what made it. name: unique over all daemons."""

    name: str
    pool: "Pool"
    process: SandboxProcess
    fork_server: ForkServer
    spawner: Spawner


@dataclass(eq=False)
class Pool:
    """Makes and kills the sandboxes of one tool. Owns its fork server and spawners.

    warm: how many spawners stay open without a sandbox. made: the sandboxes of all pools by name.
    on_made: called with each sandbox that was requested; on_failed: with the tool and the reason,
    each time that the worker does not start.
    """

    recipe: Recipe
    cgroups: Cgroups | None
    warm: int
    names: Iterator[str]
    made: dict[str, Made]
    on_made: Callable[[Made], None]
    on_failed: Callable[[str, str], None]
    _requested: int = field(default=0, init=False)
    _is_requested: asyncio.Event = field(default_factory=asyncio.Event, init=False)
    _fork_server: ForkServer | None = field(default=None, init=False)
    _free: list[Spawner] = field(default_factory=list, init=False)  # of that fork server

    def request(self, count: int) -> None:
        """Make that many more sandboxes."""
        self._requested += count
        self._is_requested.set()

    def cancel_requests(self) -> None:
        """Make no more: the service that requested them has gone."""
        self._requested = 0
        self._is_requested.clear()

    async def kill(self, made: Made) -> None:
        """Kill a sandbox, unless it is gone already; its spawner makes another when one is
        requested.
        """
        if self.made.pop(made.name, None) is None or not await self._end(made.process):
            return  # the spawner of a process that does not end is not used again
        if (
            made.fork_server is self._fork_server
            and made.spawner.alive
            and len(self._free) <= self.warm
        ):
            self._free.append(made.spawner)
            return
        await self._close_spawner(made.spawner)
        if made.fork_server.single_use:
            await made.fork_server.close()

    async def run(self) -> None:
        """Make what is requested, until cancelled; then end the worker and its sandboxes."""
        failed, pauses = retry_if_exception_type(WorkerFailed), map(wait_fixed, RETRY_PAUSES_S)
        until_made = AsyncRetrying(retry=failed, wait=wait_chain(*pauses))
        try:
            while True:
                made: Made = await until_made(self._make_requested)
                if self._requested == 0:
                    await self.kill(made)
                    continue
                self._requested -= 1
                if self._requested == 0:
                    self._is_requested.clear()
                self.on_made(made)
        finally:
            for made in [made for made in self.made.values() if made.pool is self]:
                await self.kill(made)
            await self._close_fork_server()

    async def _make_requested(self) -> Made:
        """Make a sandbox once one is requested. Reports and raises WorkerFailed."""
        await self._is_requested.wait()
        try:
            return await self._make()
        except WorkerFailed as failure:
            log.error("a tool's worker failed", tool=self.recipe.tool, error=str(failure))
            self.on_failed(self.recipe.tool, str(failure))
            await self._close_fork_server()
            raise

    async def _make(self) -> Made:
        """Make a sandbox by a free spawner, or by a new one. Raises WorkerFailed.

        A fork server or spawner from an earlier call may have ended since, and another one is
        started then.
        """
        process = None
        while process is None:
            started = self._fork_server is None
            fork_server = self._fork_server or await ForkServer.start(self.recipe)
            self._fork_server = fork_server
            fresh = not self._free
            try:
                spawner = (
                    await fork_server.open_spawner(self.cgroups) if fresh else self._free.pop()
                )
                process = await self._spawn(spawner)
            except WorkerFailed as error:
                if fresh and started:
                    raise
                log.warning("a tool's worker has ended", tool=self.recipe.tool, error=str(error))
                if fresh:
                    await self._close_fork_server()
        if fork_server.single_use:
            self._fork_server = None  # it ends with its sandbox
        made = Made(next(self.names), self, process, fork_server, spawner)
        self.made[made.name] = made
        return made

    async def _spawn(self, spawner: Spawner) -> SandboxProcess:
        try:
            return await spawner.spawn()
        except (OSError, SandboxLost) as error:
            await self._close_spawner(spawner)
            raise WorkerFailed(f"tool {self.recipe.tool!r} has no sandbox: {error}") from error

    async def _close_fork_server(self) -> None:
        while self._free:
            await self._close_spawner(self._free.pop())
        fork_server, self._fork_server = self._fork_server, None
        if fork_server is not None:
            await fork_server.close()

    async def _close_spawner(self, spawner: Spawner) -> None:
        """End a spawner whose sandbox is dead."""
        if await self._end(spawner) and self.cgroups is not None and spawner.slot is not None:
            self.cgroups.give_back(spawner.slot)

    async def _end(self, process: SandboxProcess | Spawner) -> bool:
        """Kill a process; return False where it does not end."""
        try:
            await process.kill()
        except TimeoutError:
            log.error("a killed process does not end", tool=self.recipe.tool, pid=process.pid)
            return False
        return True


FIRST_KEEP_S = 60.0  # until the first service sends how long to wait for another one


class Daemon:
    """Carries out the orders of the services that come one after another.

    Invariant: a sandbox belongs to the pool that made it; where its tool is changed or removed,
    they end together.
    """

    def __init__(self, group: asyncio.TaskGroup) -> None:
        self.keep_s = FIRST_KEEP_S
        self._group = group
        self._pools: dict[str, tuple[Pool, asyncio.Task[None]]] = {}  # by tool
        self._names = (f"{os.getpid()}-{number}" for number in itertools.count(1))
        self._made: dict[str, Made] = {}
        self._watches: list[asyncio.Task[None]] = []
        self._sessions = SessionRecords()
        self._cgroups: Cgroups | None = None
        self._uses_cgroups: bool | None = None  # as the first service requested
        self._service: Channel | None = None

    async def serve(self, service: Channel) -> bool:
        """Serve one service until it goes; return False where the daemon is to end.

        That service reads the end of the connection once this process has ended, and everything
        with it.
        """
        more = True
        try:
            more = await self._serve(service)
        except messages.FrameError as error:
            log.error("a service that sends no frames was disconnected", error=str(error))
        self._service = None
        self._keep_sessions_only()
        if more:
            service.close()
        return more

    async def _serve(self, service: Channel) -> bool:
        if (first := await service.receive()) is None:
            return True
        hello = first[0]
        speaks = (
            hello.get(channel.OP) == channel.HELLO and hello.get("protocol") == channel.PROTOCOL
        )
        if not speaks or self._uses_cgroups not in (None, hello["cgroups"]):
            log.warning("a service needs another daemon", protocol=hello.get("protocol"))
            return False
        await self._welcome(service, hello)
        while (received := await service.receive()) is not None:
            if received[0].get(channel.OP) == channel.END:
                return False
            self._carry_out(received[0])
        return True

    async def close(self) -> None:
        """Kill all pools with their sandboxes."""
        tasks = [*self._watches, *(task for _, task in self._pools.values())]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._cgroups is not None:
            await asyncio.to_thread(self._cgroups.close)

    async def _welcome(self, service: Channel, hello: Mapping[str, Any]) -> None:
        if self._uses_cgroups is None:
            self._uses_cgroups = bool(hello["cgroups"])
            self._cgroups = await asyncio.to_thread(find_cgroups) if self._uses_cgroups else None
        self.keep_s = float(hello["keep_s"])
        recipes = [
            Recipe(**{**recipe, "command": tuple(recipe["command"])}) for recipe in hello["recipes"]
        ]
        await self._set_tools({recipe.tool: recipe for recipe in recipes}, int(hello["warm"]))
        root = None if self._cgroups is None else asdict(self._cgroups.root)
        service.post(
            {channel.OP: channel.WELCOME, "cgroups": root, "closed": self._sessions.closed}
        )
        for session_id, record in self._sessions.records.items():
            made = self._made.get(self._sessions.sandboxes.get(session_id, ""))
            _post(service, {channel.OP: channel.SESSION, "record": record}, made)
        service.post({channel.OP: channel.READY})
        for watch in self._watches:  # the service watches memory itself
            watch.cancel()
        self._watches = []
        self._service = service

    async def _set_tools(self, recipes: Mapping[str, Recipe], warm: int) -> None:
        """Have a pool for each tool.

        A pool whose tool is gone, or whose recipe has changed, loses its sandboxes.
        """
        for tool, (pool, task) in list(self._pools.items()):
            if recipes.get(tool) != pool.recipe:
                log.info("a tool was changed or removed", tool=tool)
                del self._pools[tool]
                task.cancel()
                await asyncio.wait((task,))
        for tool in recipes.keys() - self._pools.keys():
            pool = Pool(
                recipes[tool],
                self._cgroups,
                warm,
                self._names,
                self._made,
                on_made=self._send_made,
                on_failed=self._send_failed,
            )
            self._pools[tool] = (pool, self._group.create_task(pool.run()))

    def _carry_out(self, order: Mapping[str, Any]) -> None:
        match order:
            case {"op": channel.REQUEST, "tool": tool, "count": count}:
                if tool in self._pools:
                    self._pools[tool][0].request(count)
            case {"op": channel.KILL, "sandbox": sandbox}:
                self._kill(sandbox)
            case {"op": channel.BIND, "record": record, "sandbox": sandbox}:
                self._sessions.bind(record, sandbox)
            case {"op": channel.NOTE, "session": session_id, "facts": facts}:
                self._sessions.note(session_id, facts)
            case {"op": channel.FORGET, "session": session_id, "closed_by": closed_by}:
                self._sessions.forget(session_id, closed_by)
            case _:
                log.error("an unknown order", op=order.get(channel.OP))

    def _kill(self, name: str) -> None:
        """Kill a sandbox without waiting."""
        if (made := self._made.get(name)) is not None:
            self._group.create_task(made.pool.kill(made))

    def _keep_sessions_only(self) -> None:
        """Keep only the sandboxes of sessions, because the service has gone.

        Their memory is watched here where no control group counts it.
        """
        for pool, _ in self._pools.values():
            pool.cancel_requests()
        kept = set(self._sessions.sandboxes.values())
        for made in list(self._made.values()):
            if made.name not in kept:
                self._kill(made.name)
            elif made.process.slot is None:
                self._watches.append(self._group.create_task(self._watch(made)))

    async def _watch(self, made: Made) -> None:
        await wait_for_growth(made.process.pid, made.pool.recipe.memory_bytes)
        log.warning("a sandbox outgrew its memory", tool=made.pool.recipe.tool)
        self._kill(made.name)

    def _send_made(self, made: Made) -> None:
        if self._service is None:
            self._kill(made.name)
        else:
            _post(self._service, {channel.OP: channel.SANDBOX}, made)

    def _send_failed(self, tool: str, why: str) -> None:
        if self._service is not None:
            self._service.post({channel.OP: channel.FAILED, "tool": tool, "error": why})


def _post(service: Channel, message: Mapping[str, Any], made: Made | None) -> None:
    """Send a message with a sandbox, if there is one that is alive."""
    connection = made.process.connect() if made is not None and made.process.alive else None
    sandbox = None
    if made is not None and connection is not None:
        slot = made.process.slot and made.process.slot.name
        sandbox = {
            "name": made.name,
            "tool": made.pool.recipe.tool,
            "pid": made.process.pid,
            "slot": slot,
        }
    service.post({**message, "sandbox": sandbox}, connection)


async def serve(listener: socket.socket, folder: Path) -> None:
    """Serve on the socket of the state folder until a service ends the daemon, or none comes for
    `keep_s`.
    """
    loop = asyncio.get_running_loop()
    main = asyncio.current_task()
    assert main is not None
    loop.add_signal_handler(signal.SIGTERM, main.cancel)
    listener.setblocking(False)
    async with asyncio.TaskGroup() as group:
        daemon = Daemon(group)
        try:
            more = True
            while more:
                try:
                    async with asyncio.timeout(daemon.keep_s):
                        connection, _ = await loop.sock_accept(listener)
                except TimeoutError:
                    log.info("no service has come", keep_s=daemon.keep_s)
                    break
                more = await daemon.serve(Channel(connection))
        finally:
            # The socket's name goes first: a service that finds no name starts another daemon with
            # a name of its own.
            (folder / state_folder.SOCKET).unlink(missing_ok=True)
            listener.close()
            await daemon.close()
            state_folder.clear(folder)
    log.info("ended")


if __name__ == "__main__":
    # What the service had open: its port must be free for the next one
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))
    listening = socket.socket(fileno=os.dup(0))
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    # A sandbox takes four, and 1024 is a usual limit
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    os.chdir("/")  # it may live longer than the folder in which its service was started
    asyncio.run(serve(listening, Path(sys.argv[1])))
