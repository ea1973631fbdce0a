"""The daemon's sandboxes of one tool: made on request, killed; its fork server and its spawners."""

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import structlog

from treadle_tools.sandbox.bubblewrap import Recipe
from treadle_tools.sandbox.cgroups import Cgroups
from treadle_tools.sandbox.processes import ForkServer, SandboxProcess, Spawner
from treadle_tools.sandbox.sandboxes import SandboxLost, WorkerFailed, worker_retry_pauses

log = structlog.get_logger()


@dataclass(frozen=True)
class Made:
    """A sandbox and what it was made with. name: unique over all daemons."""

    name: str
    pool: "Pool"
    process: SandboxProcess
    fork_server: ForkServer
    spawner: Spawner


@dataclass(eq=False)
class Pool:
    """Makes and kills the sandboxes of one tool. Owns its fork server and spawners.

    warm: how many spawners stay open without a sandbox. made: the sandboxes of all pools by name. on_made: called with
    each sandbox that was requested; on_failed: with the tool and the reason, each time that the worker does not start.
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
        """Kill a sandbox, unless it is gone already; its spawner makes another when one is requested."""
        if self.made.pop(made.name, None) is None or not await self._end(made.process):
            return  # the spawner of a process that does not end is not used again
        if made.fork_server is self._fork_server and made.spawner.alive and len(self._free) <= self.warm:
            self._free.append(made.spawner)
            return
        await self._close_spawner(made.spawner)
        if made.fork_server.single_use:
            await made.fork_server.close()

    async def run(self) -> None:
        """Make what is requested, until cancelled; then end the worker and its sandboxes."""
        pauses_s = worker_retry_pauses()
        try:
            while True:
                await self._is_requested.wait()
                try:
                    made = await self._make()
                except WorkerFailed as failure:
                    log.error("a tool's worker failed", tool=self.recipe.tool, error=str(failure))
                    self.on_failed(self.recipe.tool, str(failure))
                    await self._close_fork_server()
                    await asyncio.sleep(next(pauses_s))
                    continue
                pauses_s = worker_retry_pauses()
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

    async def _make(self) -> Made:
        """A sandbox of a free spawner, or of a new one. Raises WorkerFailed."""
        if self._fork_server is None:
            self._fork_server = await ForkServer.start(self.recipe)
        fork_server, process = self._fork_server, None
        while process is None:
            fresh = not self._free
            spawner = await fork_server.open_spawner(self.cgroups) if fresh else self._free.pop()
            try:
                process = await spawner.spawn()
            except (OSError, SandboxLost) as error:
                await self._close_spawner(spawner)
                if fresh:
                    raise WorkerFailed(f"tool {self.recipe.tool!r} has no sandbox: {error}") from error
                log.warning("a spawner does not answer", tool=self.recipe.tool, error=str(error))
        if fork_server.single_use:
            self._fork_server = None  # it ends with its sandbox
        made = Made(next(self.names), self, process, fork_server, spawner)
        self.made[made.name] = made
        return made

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
        """Kill a process. False where it does not end."""
        try:
            await process.kill()
        except TimeoutError:
            log.error("a killed process does not end", tool=self.recipe.tool, pid=process.pid)
            return False
        return True
