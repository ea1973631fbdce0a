"""The keeper's main: serves one service at a time, waits a while for the next, and ends with all it holds.

Owns: the listening socket, the cells, the control groups, the table of sessions. Invariants: a cell that is no
session's dies with the service that wanted it; when the keeper ends, in whatever way, everything in the sandboxes ends.

The keeper's table of sessions: what the service has told of each, and which cell is its.

Invariant: a record is the service's own, kept word for word; the keeper reads nothing in it but its id. Owns: no
process; `keeper.py` does."""

import asyncio
import signal
import socket
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import structlog

from treadle_tools.sandbox.bubblewrap.cgroups import Cgroups
from treadle_tools.sandbox.bubblewrap.hierarchy import find_cgroups
from treadle_tools.sandbox.inside import frames
from treadle_tools.sandbox.keeper import channel as protocol
from treadle_tools.sandbox.keeper import folder
from treadle_tools.sandbox.keeper.cells import Cells, Entry
from treadle_tools.sandbox.keeper.channel import Channel
from treadle_tools.sandbox.keeper.recipe import Recipe

MOST_CLOSED = 4096  # closings remembered, for a service that comes back and is asked for one again

Record = dict[str, Any]


class Table:
    """See the module. closed: session id → the request that closed it."""

    def __init__(self) -> None:
        self._records: dict[str, Record] = {}
        self._cells: dict[str, str] = {}
        self.closed: OrderedDict[str, str] = OrderedDict()

    def __iter__(self) -> Iterator[tuple[Record, str | None]]:
        for session_id, record in self._records.items():
            yield record, self._cells.get(session_id)

    def bind(self, record: Record, cell: str) -> None:
        """A session, new or again, lives in a cell."""
        session_id = str(record["session_id"])
        self._records[session_id] = record
        self._cells[session_id] = cell

    def note(self, session_id: str, facts: Mapping[str, Any]) -> None:
        """What has changed."""
        if session_id in self._records:
            self._records[session_id].update(facts)

    def forget(self, session_id: str, closed_by: str) -> None:
        """It was closed. closed_by: by which request, "" where by none."""
        self._records.pop(session_id, None)
        self._cells.pop(session_id, None)
        if closed_by:
            self.closed[session_id] = closed_by
            while len(self.closed) > MOST_CLOSED:
                self.closed.popitem(last=False)

    def unbind(self, cell: str) -> None:
        """The cell is gone; the session's record stays."""
        for session_id in [session_id for session_id, its in self._cells.items() if its == cell]:
            del self._cells[session_id]

    def cells(self) -> set[str]:
        """Every cell that a session lives in."""
        return set(self._cells.values())


log = structlog.get_logger()

FIRST_KEEP_S = 60.0  # until the first service says how long it wants to be waited for


class Keeper:
    """See the module."""

    def __init__(self, group: asyncio.TaskGroup) -> None:
        self.keep_s = FIRST_KEEP_S
        self._cells = Cells(group, self._made, self._failed)
        self._table = Table()
        self._cgroups: Cgroups | None = None
        self._cgroups_setting: bool | None = None
        self._service: Channel | None = None

    async def serve(self, service: Channel) -> bool:
        """Serve one service until it goes. Whether there should be another: False where it asked for the end.

        That one hears the end of the line when this process has ended, and everything with it.
        """
        try:
            more = await self._serve(service)
        except frames.FrameError as error:
            log.error("a service that speaks no frames was hung up on", error=str(error))
            more = True
        self._service = None
        self._cells.keep_only(self._table.cells())
        if more:
            service.close()
        return more

    async def _serve(self, service: Channel) -> bool:
        first = await service.receive()
        if first is None:
            return True
        if not self._understands(first[0]):
            log.warning("a service that needs another keeper", protocol=first[0].get("protocol"))
            return False
        await self._greet(service, first[0])
        while (received := await service.receive()) is not None:
            if received[0].get(protocol.OP) == protocol.END:
                return False
            self._obey(received[0])
        return True

    async def end(self) -> None:
        """Kill everything."""
        await self._cells.end()
        if self._cgroups is not None:
            await asyncio.to_thread(self._cgroups.close)

    def _understands(self, hello: Mapping[str, Any]) -> bool:
        if hello.get(protocol.OP) != protocol.HELLO or hello.get("protocol") != protocol.PROTOCOL:
            return False
        return self._cgroups_setting in (None, hello["cgroups"])

    async def _greet(self, service: Channel, hello: Mapping[str, Any]) -> None:
        if self._cgroups_setting is None:
            self._cgroups_setting = bool(hello["cgroups"])
            self._cgroups = await asyncio.to_thread(find_cgroups) if self._cgroups_setting else None
        self.keep_s = float(hello["keep_s"])
        recipes = {recipe.tool: recipe for recipe in map(Recipe.of, hello["recipes"])}
        await self._cells.set_tools(recipes, self._cgroups, int(hello["spares"]))
        root = self._cgroups.root if self._cgroups is not None else None
        service.post({
            protocol.OP: protocol.WELCOME,
            "cgroups": None if root is None else root.message(),
            "closed": dict(self._table.closed),
        })  # fmt: skip
        for record, name in self._table:
            entry = None if name is None else self._cells.get(name)
            self._post(service, {protocol.OP: protocol.SESSION, "record": record}, entry)
        service.post({protocol.OP: protocol.READY})
        self._cells.stop_watching()
        self._service = service

    def _obey(self, order: Mapping[str, Any]) -> None:
        op = order.get(protocol.OP)
        if op == protocol.WANT:
            self._cells.want(str(order["tool"]), int(order["count"]))
        elif op == protocol.AWAY:
            self._table.unbind(str(order["cell"]))
            self._cells.put_away(str(order["cell"]))
        elif op == protocol.BIND:
            self._table.bind(dict(order["record"]), str(order["cell"]))
        elif op == protocol.NOTE:
            self._table.note(str(order["session"]), order["facts"])
        elif op == protocol.FORGET:
            self._table.forget(str(order["session"]), str(order["closed_by"]))
        else:
            log.error("an order that is none", op=op)

    def _made(self, entry: Entry) -> None:
        if self._service is None:
            self._cells.put_away(entry.name)
        else:
            self._post(self._service, {protocol.OP: protocol.CELL}, entry)

    def _post(self, service: Channel, message: Mapping[str, Any], entry: Entry | None) -> None:
        line = entry.cell.link() if entry is not None else None
        if entry is None or line is None:
            service.post({**message, "cell": None})
            return
        slot = entry.cell.slot
        cell = {"name": entry.name, "tool": entry.tool, "pid": entry.cell.pid, "slot": slot.name if slot else None}
        service.post({**message, "cell": cell}, (line,))

    def _failed(self, tool: str, why: str) -> None:
        if self._service is not None:
            self._service.post({protocol.OP: protocol.FAILED, "tool": tool, "error": why})


async def keep(listener: socket.socket, path: Path) -> None:
    """Serve on `listener`, the socket of the state folder `path`, for as long as anybody comes."""
    loop = asyncio.get_running_loop()
    main = asyncio.current_task()
    assert main is not None
    loop.add_signal_handler(signal.SIGTERM, main.cancel)
    listener.setblocking(False)
    async with asyncio.TaskGroup() as group:
        keeper = Keeper(group)
        try:
            more = True
            while more:
                try:
                    async with asyncio.timeout(keeper.keep_s):
                        connection, _ = await loop.sock_accept(listener)
                except TimeoutError:
                    log.info("no service has come", keep_s=keeper.keep_s)
                    break
                more = await keeper.serve(Channel(connection))
        finally:
            # The name goes first: whoever finds no name makes a keeper of its own and a new name, which is not ours.
            (path / folder.SOCKET).unlink(missing_ok=True)
            listener.close()
            await keeper.end()
            folder.clear(path)
    log.info("ended")
