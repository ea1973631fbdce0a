"""The sandbox daemon, `python -m treadle_tools.sandbox.daemon FOLDER`: holds the sandboxes and outlives the service.

The service starts it with the state folder's socket as standard input. It serves one service at a time, waits a while
for the next, and ends with all it holds. Owns: the listening socket, the sandboxes, the control groups, the records of
sessions. Invariants: a sandbox without a session dies with the service that requested it; however the daemon ends,
everything in the sandboxes ends.
"""

import asyncio
import os
import resource
import signal
import socket
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import structlog

from treadle_tools.sandbox.bubblewrap.cgroups import Cgroups, find_cgroups
from treadle_tools.sandbox.bubblewrap.command import Recipe
from treadle_tools.sandbox.daemon import channel, state_folder
from treadle_tools.sandbox.daemon.channel import Channel
from treadle_tools.sandbox.daemon.pools import Made, Pools
from treadle_tools.sandbox.inside import frames

log = structlog.get_logger()

MOST_CLOSED = 4096  # closed sessions remembered, because the next service may get a repeat of the closing
FIRST_KEEP_S = 60.0  # until the first service says how long to wait for another one


class Daemon:
    """Carries out the orders of the services that come one after another.

    Records of sessions are kept as the service wrote them; only their session_id is read here.
    """

    def __init__(self, group: asyncio.TaskGroup) -> None:
        self.keep_s = FIRST_KEEP_S
        self._pools = Pools(group, self._send_made, self._send_failed)
        self._records: dict[str, dict[str, Any]] = {}
        self._bound: dict[str, str] = {}  # session id -> name of its sandbox
        self._closed: dict[str, str] = {}  # session id -> the request that closed it
        self._cgroups: Cgroups | None = None
        self._uses_cgroups: bool | None = None  # as the first service asked
        self._service: Channel | None = None

    async def serve(self, service: Channel) -> bool:
        """Serve one service until it goes. False where the daemon is to end.

        That service reads the end of the connection once this process has ended, and everything with it.
        """
        try:
            more = await self._serve(service)
        except frames.FrameError as error:
            log.error("a service that sends no frames was disconnected", error=str(error))
            more = True
        self._service = None
        self._pools.keep_only(self._bound.values())
        if more:
            service.close()
        return more

    async def _serve(self, service: Channel) -> bool:
        first = await service.receive()
        if first is None:
            return True
        hello = first[0]
        speaks = hello.get(channel.OP) == channel.HELLO and hello.get("protocol") == channel.PROTOCOL
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
        """Kill everything."""
        await self._pools.close()
        if self._cgroups is not None:
            await asyncio.to_thread(self._cgroups.close)

    async def _welcome(self, service: Channel, hello: Mapping[str, Any]) -> None:
        if self._uses_cgroups is None:
            self._uses_cgroups = bool(hello["cgroups"])
            self._cgroups = await asyncio.to_thread(find_cgroups) if self._uses_cgroups else None
        self.keep_s = float(hello["keep_s"])
        recipes = [Recipe(**{**recipe, "command": tuple(recipe["command"])}) for recipe in hello["recipes"]]
        await self._pools.set_tools({recipe.tool: recipe for recipe in recipes}, self._cgroups, int(hello["warm"]))
        root = None if self._cgroups is None else self._cgroups.root.encode()
        service.post({channel.OP: channel.WELCOME, "cgroups": root, "closed": self._closed})
        for session_id, record in self._records.items():
            made = self._pools.find(self._bound.get(session_id, ""))
            self._post(service, {channel.OP: channel.SESSION, "record": record}, made)
        service.post({channel.OP: channel.READY})
        self._pools.stop_watching()
        self._service = service

    def _carry_out(self, order: Mapping[str, Any]) -> None:
        op, session_id = order.get(channel.OP), str(order.get("session"))
        if op == channel.REQUEST:
            self._pools.request(str(order["tool"]), int(order["count"]))
        elif op == channel.KILL:
            killed = str(order["sandbox"])
            self._bound = {session: name for session, name in self._bound.items() if name != killed}
            self._pools.kill(killed)
        elif op == channel.BIND:
            session_id = str(order["record"]["session_id"])
            self._records[session_id], self._bound[session_id] = dict(order["record"]), str(order["sandbox"])
        elif op == channel.NOTE:
            if session_id in self._records:
                self._records[session_id].update(order["facts"])
        elif op == channel.FORGET:
            self._records.pop(session_id, None)
            self._bound.pop(session_id, None)
            if order["closed_by"]:
                self._closed[session_id] = str(order["closed_by"])
                if len(self._closed) > MOST_CLOSED:
                    del self._closed[next(iter(self._closed))]
        else:
            log.error("an unknown order", op=op)

    def _send_made(self, made: Made) -> None:
        if self._service is None:
            self._pools.kill(made.name)
        else:
            self._post(self._service, {channel.OP: channel.SANDBOX}, made)

    def _post(self, service: Channel, message: Mapping[str, Any], made: Made | None) -> None:
        connection = made.process.connect() if made is not None else None
        if made is None or connection is None:
            service.post({**message, "sandbox": None})
            return
        slot = made.process.slot
        sandbox = {"name": made.name, "tool": made.tool, "pid": made.process.pid, "slot": slot.name if slot else None}
        service.post({**message, "sandbox": sandbox}, (connection,))

    def _send_failed(self, tool: str, why: str) -> None:
        if self._service is not None:
            self._service.post({channel.OP: channel.FAILED, "tool": tool, "error": why})


async def serve(listener: socket.socket, folder: Path) -> None:
    """Serve on the socket of the state folder until a service ends the daemon, or none comes for `keep_s`."""
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
            # The socket's name goes first: a service that finds no name starts another daemon with a name of its own.
            (folder / state_folder.SOCKET).unlink(missing_ok=True)
            listener.close()
            await daemon.close()
            state_folder.clear(folder)
    log.info("ended")


if __name__ == "__main__":
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))  # what the service had open: its port must be free for the next one
    listening = socket.socket(fileno=os.dup(0))
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # a sandbox takes four, and 1024 is a usual limit
    os.chdir("/")  # it may live longer than the folder in which its service was started
    asyncio.run(serve(listening, Path(sys.argv[1])))
