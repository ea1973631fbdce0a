"""The service's side of the keeper: finds the one that runs, or starts one; asks for cells; tells it of sessions.

Owns: the connection, and the keeper's process where this service has started it. Invariant: what is told is carried out
by the keeper although this process is killed right afterwards. A keeper that is lost takes every sandbox with it; a new
one is started then.
"""

import asyncio
import contextlib
import os
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import structlog

from treadle_tools.sandbox import seam as backend
from treadle_tools.sandbox.bubblewrap.cell import Cell, WorkerFailed
from treadle_tools.sandbox.bubblewrap.cgroups import Root, Slot
from treadle_tools.sandbox.bubblewrap.pool import Spares
from treadle_tools.sandbox.inside import frames
from treadle_tools.sandbox.keeper import channel as protocol
from treadle_tools.sandbox.keeper.channel import Channel
from treadle_tools.sandbox.keeper.folder import StateFolder
from treadle_tools.sandbox.keeper.recipe import Recipe

log = structlog.get_logger()

TRIES = 5  # one keeper may just be ending, and another be of an older kind
START_TIMEOUT_S = 30.0  # 0.2 s on an idle core
END_TIMEOUT_S = 30.0  # killing what it holds takes well under a second
RESTART_PAUSE_S = 1.0


class KeeperFailed(Exception):  # noqa: N818 - named for what happened
    """There is no keeper and none can be started; the message says why."""


@dataclass(frozen=True)
class Terms:
    """What the service wants of its keeper. failures: why a tool has no recipe. keep_s: how long to wait for the next
    service. keep_on_exit: whether sessions outlive an orderly end of the service too. lazy: tools whose worker starts
    when a cell is first asked for.
    """

    recipes: tuple[Recipe, ...]
    failures: Mapping[str, str]
    spares: int
    cgroups: bool
    keep_s: float
    keep_on_exit: bool
    lazy: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Found:
    """A session of an earlier life of the service. cell: None where its environment has ended."""

    record: Mapping[str, Any]
    cell: Cell | None


class KeeperClient:
    """See the module. found, closed: what the keeper knew when this service came (closed: session id → request)."""

    def __init__(self, folder: StateFolder, terms: Terms) -> None:
        self._folder = folder
        self._terms = terms
        self._channel: Channel | None = None
        self._started: list[int] = []  # keepers, by process id, not reaped yet
        self._root: Root | None = None
        self._slots: dict[str, Slot] = {}
        self._spares: dict[str, Spares[Cell]] = {}
        self._cells: dict[str, Cell] = {}  # all that came and were not ended
        self.found: list[Found] = []
        self.closed: dict[str, str] = {}
        for recipe in terms.recipes:
            self._spares[recipe.tool] = Spares(terms.spares, self._wanter(recipe.tool), lazy=recipe.tool in terms.lazy)
        for tool, why in terms.failures.items():
            self._spares[tool] = Spares(0, self._wanter(tool))
            self._spares[tool].fail(why)

    @property
    def cgroups_version(self) -> int | None:
        """Which control groups limit the cells; None where none do."""
        return None if self._root is None else self._root.version

    async def connect(self) -> None:
        """Find the keeper of the folder, or start one. Raises KeeperFailed."""
        for _ in range(TRIES):
            end = self._folder.connect() or self._start()
            channel = Channel(end)
            try:
                async with asyncio.timeout(START_TIMEOUT_S):
                    greeted = await self._greeted(channel)
            except (TimeoutError, frames.FrameError) as error:
                log.warning("the keeper gave no welcome", error=str(error))
                greeted = False
            except BaseException:
                channel.close()
                raise
            if greeted:
                self._channel = channel
                for recipe in self._terms.recipes:
                    self._spares[recipe.tool].fill()
                return
            channel.close()
        raise KeeperFailed(f"no keeper starts in {self._folder.path}; {self._folder.log} says why")

    async def run(self) -> None:
        """Take in cells, for ever."""
        while True:
            try:
                await self._listen()
            except frames.FrameError as error:
                log.error("the keeper speaks no frames", error=str(error))
            log.error("the keeper is gone: its sessions have crashed")
            self._hang_up()
            for spares in self._spares.values():
                spares.lose()
            while self._channel is None:
                try:
                    await self.connect()
                except KeeperFailed as failure:
                    log.error("no keeper", error=str(failure))
                    await asyncio.sleep(RESTART_PAUSE_S)
            for lost in self.found:  # by then they are told to have crashed
                if lost.cell is not None:
                    lost.cell.close()
                self.forget(str(lost.record["session_id"]))

    async def take(self, tool: str) -> Cell:
        """A fresh cell. Raises WorkerFailed where the tool's worker does not start."""
        if self._channel is None:
            raise WorkerFailed("the keeper of the sandboxes is being started again")
        return await self._spares[tool].take()

    def bind(self, record: Mapping[str, Any], cell: backend.Cell) -> None:
        """A session lives in `cell` from now on, which outlives this process. record: JSON, with its session_id."""
        self._post({protocol.OP: protocol.BIND, "record": record, "cell": cell.name})

    def note(self, session_id: str, facts: Mapping[str, Any]) -> None:
        """What has changed in its record."""
        self._post({protocol.OP: protocol.NOTE, "session": session_id, "facts": facts})

    def forget(self, session_id: str, closed_by: str = "") -> None:
        """It is closed. closed_by: by which request, which may be repeated to a later life of the service."""
        self._post({protocol.OP: protocol.FORGET, "session": session_id, "closed_by": closed_by})

    async def told(self) -> None:
        """Returns once all of that is out of this process's hands."""
        if self._channel is not None:
            await self._channel.flushed()

    async def close(self) -> None:
        """Leave: with `keep_on_exit` the keeper waits for the next service, else it ends, and everything with it."""
        if self._channel is not None and not self._terms.keep_on_exit:
            self._post({protocol.OP: protocol.END})
            try:
                async with asyncio.timeout(END_TIMEOUT_S):
                    while (received := await self._channel.receive()) is not None:
                        for descriptor in received[1]:
                            os.close(descriptor)
                    for pid in self._started:
                        await asyncio.to_thread(_has_ended, pid, 0)
            except TimeoutError:
                log.error("the keeper does not end", folder=str(self._folder.path))
        self._hang_up()
        for cell in self._cells.values():
            cell.hang_up()
        self._folder.release(keep=self._terms.keep_on_exit)

    def _start(self) -> socket.socket:
        self._reap()
        with self._folder.listen() as listener, self._folder.log.open("wb") as output:
            program = [sys.executable, "-m", __package__, str(self._folder.path.absolute())]
            descriptors = ((listener.fileno(), 0), (output.fileno(), 1), (output.fileno(), 2))
            # Neither a child that asyncio waits for, since it may outlive this process, nor in its session: what is
            # typed at the service's terminal is not for it.
            actions = [(os.POSIX_SPAWN_DUP2, ours, theirs) for ours, theirs in descriptors]
            pid = os.posix_spawn(sys.executable, program, os.environ, file_actions=actions, setsid=True)
            self._started.append(pid)
            end = self._folder.connect()
        if end is None:
            raise KeeperFailed(f"nothing listens in {self._folder.path}; {self._folder.log} says why")
        return end

    def _reap(self) -> None:
        """Forget the keepers of ours that have ended."""
        self._started = [pid for pid in self._started if not _has_ended(pid, os.WNOHANG)]

    async def _greeted(self, channel: Channel) -> bool:
        """Whether it took us in; False where it ended instead."""
        terms = self._terms
        channel.post({
            protocol.OP: protocol.HELLO, "protocol": protocol.PROTOCOL, "spares": terms.spares,
            "recipes": [recipe.message() for recipe in terms.recipes],
            "cgroups": terms.cgroups, "keep_s": terms.keep_s,
        })  # fmt: skip
        self.found, self._slots = [], {}
        while (received := await channel.receive()) is not None:
            message, descriptors = received
            op = message.get(protocol.OP)
            if op == protocol.WELCOME:
                self._root = None if message["cgroups"] is None else Root.of(message["cgroups"])
                self.closed = message["closed"]
            elif op == protocol.SESSION:
                self.found.append(Found(message["record"], self._cell(channel, message, descriptors)))
            elif op == protocol.READY:
                return True
        return False

    async def _listen(self) -> None:
        channel = self._channel
        assert channel is not None
        while (received := await channel.receive()) is not None:
            message, descriptors = received
            if message.get(protocol.OP) == protocol.FAILED:
                log.error("a tool's worker failed", tool=message["tool"], error=message["error"])
                self._spares[message["tool"]].fail(str(message["error"]))
            elif (cell := self._cell(channel, message, descriptors)) is not None:
                self._spares[message["cell"]["tool"]].add(cell)

    def _cell(self, channel: Channel, message: Mapping[str, Any], descriptors: Sequence[int]) -> Cell | None:
        """The cell that comes with a message. It is ended through the keeper that made it, and no later one."""
        if not descriptors:
            return None
        made = message["cell"]
        name = str(made["name"])

        def end() -> None:
            self._cells.pop(name, None)
            channel.post({protocol.OP: protocol.AWAY, "cell": name})

        line = socket.socket(fileno=descriptors[0])
        cell = self._cells[name] = Cell(name, line, made["pid"], self._slot(made["slot"]), end)
        return cell

    def _slot(self, name: str | None) -> Slot | None:
        if name is None or self._root is None:
            return None
        if name not in self._slots:
            self._slots[name] = Slot(self._root, name)
        return self._slots[name]

    def _wanter(self, tool: str) -> Callable[[int], None]:
        return lambda count: self._post({protocol.OP: protocol.WANT, "tool": tool, "count": count})

    def _post(self, message: Mapping[str, Any]) -> None:
        if self._channel is not None:
            self._channel.post(message)

    def _hang_up(self) -> None:
        if self._channel is not None:
            with contextlib.suppress(OSError):
                self._channel.close()
            self._channel = None


def _has_ended(pid: int, options: int) -> bool:
    """Of waitpid's options; a process that somebody else has reaped has ended."""
    try:
        return os.waitpid(pid, options)[0] == pid
    except ChildProcessError:
        return True
