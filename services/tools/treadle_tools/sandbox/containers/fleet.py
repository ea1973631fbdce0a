"""All containers of this service: a few ready for each tool, one for each session or call, none that nobody knows.

Owns: the spare containers, the ones in use, the ledger of sessions. Invariants: a container is used once; one that was
closed is removed, however often its host must be asked; a service that comes after one that was killed finds the
sessions of that one, and removes what else it has left.
"""

import asyncio
import contextlib
import itertools
import os
import re
import uuid
from collections.abc import Callable, Coroutine, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import structlog

from treadle_tools.limits import Limits
from treadle_tools.sandbox.bubblewrap.cell import WorkerFailed
from treadle_tools.sandbox.bubblewrap.pool import Spares
from treadle_tools.sandbox.containers.cell import ContainerCell, LineEnded, ending_of, told
from treadle_tools.sandbox.containers.hosts import Hosts
from treadle_tools.sandbox.containers.ledger import Ledger
from treadle_tools.sandbox.containers.recipe import HostFailed, Recipe, Vessel, VesselLost
from treadle_tools.sandbox.seam import Cell

log = structlog.get_logger()

MAKING = 4  # containers at a time: a daemon makes more of them no faster
START_TIMEOUT_S = 120.0  # as of a zygote: slow imports on a busy machine
RETRY_S = 1.0  # after a tool's worker did not start
LONGEST_RETRY_S = 30.0
REMOVE_PAUSES_S = (0.5, 2.0, 8.0, 30.0)


@dataclass(frozen=True)
class Ware:
    """What is made for one tool. limits: what a spare is given before anybody has asked for it."""

    recipe: Recipe
    limits: Limits


@dataclass(frozen=True)
class FoundSession:
    """See `backend.Found`."""

    record: Mapping[str, Any]
    cell: ContainerCell | None


class Fleet:
    """See the module. spares: containers that stand ready per tool. failures: why a tool has no ware. keep_on_exit:
    whether sessions outlive an orderly end of the service too. release: lets go of the ledger's folder.
    """

    def __init__(
        self,
        hosts: Hosts,
        ledger: Ledger,
        wares: Iterable[Ware],
        *,
        owner: str,
        spares: int,
        failures: Mapping[str, str],
        keep_on_exit: bool,
        release: Callable[[], None],
    ) -> None:
        self._release = release
        self._hosts = hosts
        self._ledger = ledger
        self._wares = {ware.recipe.tool: ware for ware in wares}
        self._prefix = f"treadle-{re.sub(r'[^a-z0-9]+', '-', owner.lower()).strip('-')}"
        self._keep_on_exit = keep_on_exit
        self._group: asyncio.TaskGroup | None = None
        self._early: list[Coroutine[Any, Any, None]] = []
        self._making = asyncio.Semaphore(MAKING)
        self._in_use: dict[str, tuple[ContainerCell, str]] = {}
        self._spares: dict[str, Spares[ContainerCell]] = {
            tool: Spares(spares, self._wanter(tool)) for tool in self._wares
        }
        for tool, why in failures.items():
            self._spares[tool] = Spares(0, lambda count: None)
            self._spares[tool].fail(why)
        self.found: list[FoundSession] = []
        self.closed = dict(ledger.closed)

    async def connect(self) -> None:
        """Find the containers of the sessions that the ledger knows, and remove all others. A host that does not answer
        keeps what it has, and the sessions there are lost.
        """
        vessels: dict[tuple[str, str], Vessel] = {}
        for host in self._hosts:
            kept = {entry.container for entry in self._ledger.entries.values() if entry.host == host.name}
            try:
                vessels |= {(host.name, one.name): one for one in await host.running() if one.name in kept}
                swept = await host.sweep({name for of, name in vessels if of == host.name})
            except HostFailed as failure:
                log.error("a host of containers does not answer", host=host.name, error=str(failure))
            else:
                log.info("host of containers", host=host.name, sessions=len(kept), removed=swept)
        for entry in list(self._ledger.entries.values()):
            vessel = vessels.get((entry.host, entry.container))
            cell = None
            if vessel is not None:
                self._hosts.carries(entry.host)
                cell = self._cell(vessel, entry.host)
            self.found.append(FoundSession(entry.record, cell))

    async def run(self) -> None:
        """See `backend.Backend`."""
        async with asyncio.TaskGroup() as group:
            self._group = group
            for work in self._early:
                group.create_task(work)
            for spares in self._spares.values():
                spares.fill()
            await asyncio.Event().wait()

    async def take(self, tool: str) -> ContainerCell:
        """See `backend.Backend`."""
        return await self._spares[tool].take()

    def bind(self, record: Mapping[str, Any], cell: Cell) -> None:
        """See `backend.Backend`."""
        _, host = self._in_use[cell.name]
        self._ledger.bind(record, host, cell.name)

    def note(self, session_id: str, facts: Mapping[str, Any]) -> None:
        """See `backend.Backend`."""
        self._ledger.note(session_id, facts)

    def forget(self, session_id: str, closed_by: str = "") -> None:
        """See `backend.Backend`."""
        self._ledger.forget(session_id, closed_by)

    async def told(self) -> None:
        """See `backend.Backend`: the ledger has been written by then."""

    async def close(self) -> None:
        """Remove every container, unless sessions are to outlive an orderly end too; `run` has ended."""
        kept: set[str] = set()
        if self._keep_on_exit:
            kept = {entry.container for entry in self._ledger.entries.values()}
        else:
            self._ledger.clear()
        for cell, _ in self._in_use.values():
            await cell.let_go()
        for host in self._hosts:
            with contextlib.suppress(HostFailed):
                await host.sweep(kept)
            await host.close()
        self._release()

    def _wanter(self, tool: str) -> Callable[[int], None]:
        def want(count: int) -> None:
            for _ in range(count):
                self._spawn(self._supply(tool))

        return want

    async def _supply(self, tool: str) -> None:
        """One more spare, however long it takes."""
        spares, pauses_s = self._spares[tool], (RETRY_S * 2**n for n in itertools.count())
        while True:
            try:
                async with self._making:
                    cell = await self._made(self._wares[tool])
            except WorkerFailed as failure:
                log.error("a tool's worker failed", tool=tool, error=str(failure))
                spares.fail(str(failure))
                await asyncio.sleep(min(next(pauses_s), LONGEST_RETRY_S))
            else:
                spares.add(cell)
                return

    async def _made(self, ware: Ware) -> ContainerCell:
        """A container whose worker answers. Raises WorkerFailed."""
        tool = ware.recipe.tool
        name = f"{self._prefix}-{re.sub(r'[^a-z0-9]+', '-', tool.lower()).strip('-')}-{uuid.uuid4().hex[:12]}"
        try:
            host, vessel = await self._hosts.make(ware.recipe, name)
        except HostFailed as failure:
            raise WorkerFailed(f"tool {tool!r} has no container: {failure}") from failure
        cell = self._cell(vessel, host.name)
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                await cell.ready(ware.limits)
        except TimeoutError:
            cell.close()
            raise WorkerFailed(f"tool {tool!r} was not ready after {START_TIMEOUT_S:g} s") from None
        except (LineEnded, VesselLost, HostFailed) as error:
            raise WorkerFailed(f"tool {tool!r} did not start: {await self._why(cell, error)}") from error
        except BaseException:
            cell.close()
            raise
        return cell

    async def _why(self, cell: ContainerCell, error: Exception) -> str:
        """Why a worker ended before it answered; its container is closed."""
        try:
            if lines := cell.complaints.splitlines():
                log.error("a tool's worker did not start", stderr=cell.complaints)
                return lines[-1]
            if isinstance(error, VesselLost):
                return str(error)
            ending = await ending_of(cell.vessel)
            return "out of memory" if ending.out_of_memory else told(ending)
        except HostFailed:
            return str(error)
        finally:
            cell.close()

    def _cell(self, vessel: Vessel, host: str) -> ContainerCell:
        cell = ContainerCell(vessel, self._spawn, self._put_away)
        self._in_use[cell.name] = (cell, host)
        return cell

    def _put_away(self, cell: ContainerCell) -> None:
        _, host = self._in_use[cell.name]
        self._spawn(self._remove(cell, host))

    async def _remove(self, cell: ContainerCell, host: str) -> None:
        for pause_s in (*REMOVE_PAUSES_S, None):
            try:
                await cell.vessel.remove()
            except HostFailed as failure:
                if pause_s is None:
                    log.error("a container is left", host=host, container=cell.name, error=str(failure))
                    break
                await asyncio.sleep(pause_s)
            else:
                break
        del self._in_use[cell.name]
        self._hosts.freed(host)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Start work that nobody waits for; once `run` has begun."""
        if self._group is None:
            self._early.append(work)
            return
        try:
            self._group.create_task(work)
        except RuntimeError:  # the service is ending: `close` removes what is left
            work.close()


def default_owner(listen: str) -> str:
    """Whose containers they are, where no name was given: this machine's service at this address, or this process."""
    port = listen.rpartition(":")[2]
    return f"{os.uname().nodename}-{port if port not in ('', '0') else f'pid-{os.getpid()}'}"
