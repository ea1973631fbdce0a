"""The daemon's sandboxes: made on request, found by name, killed; a fork server and its spawners for each tool."""

import asyncio
import itertools
import os
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass

import structlog

from treadle_tools.sandbox.bubblewrap.cgroups import Cgroups
from treadle_tools.sandbox.bubblewrap.command import Recipe
from treadle_tools.sandbox.bubblewrap.fork_server import ForkServer, SandboxProcess, Spawner
from treadle_tools.sandbox.bubblewrap.sandbox import wait_for_growth
from treadle_tools.sandbox.sandboxes import SandboxLost, WorkerFailed

log = structlog.get_logger()

RETRY_S = 1.0  # after a worker failed to start
LONGEST_RETRY_S = 30.0


@dataclass(frozen=True)
class Made:
    """A sandbox and what it was made with. name: unique over all daemons."""

    name: str
    tool: str
    process: SandboxProcess
    fork_server: ForkServer
    spawner: Spawner


class Pool:
    """Makes and kills the sandboxes of one tool. Owns its fork server and spawners.

    warm: how many spawners stay open without a sandbox. on_made: called with each sandbox that was requested;
    on_failed: with the tool and the reason, each time that the worker does not start.
    """

    def __init__(
        self,
        recipe: Recipe,
        cgroups: Cgroups | None,
        warm: int,
        names: Iterator[str],
        *,
        on_made: Callable[[Made], None],
        on_failed: Callable[[str, str], None],
    ) -> None:
        self.recipe = recipe
        self.made: dict[str, Made] = {}
        self._cgroups = cgroups
        self._warm = warm
        self._names = names
        self._on_made = on_made
        self._on_failed = on_failed
        self._requested = 0
        self._requests = asyncio.Event()
        self._fork_server: ForkServer | None = None
        self._free: list[tuple[ForkServer, Spawner]] = []

    def request(self, count: int) -> None:
        """Make that many more sandboxes."""
        self._requested += count
        self._requests.set()

    def cancel_requests(self) -> None:
        """Make no more: the service that requested them has gone."""
        self._requested = 0

    async def kill(self, name: str) -> None:
        """Kill a sandbox, unless it is gone already; its spawner makes another when one is requested."""
        made = self.made.pop(name, None)
        if made is None:
            return
        try:
            await made.process.kill()
        except TimeoutError:  # its spawner is not used again
            log.error("a killed sandbox does not end", tool=self.recipe.tool, pid=made.process.pid)
            return
        if made.fork_server.single_use:
            await made.spawner.close()
            await made.fork_server.close()
        elif made.fork_server is self._fork_server and made.spawner.alive and len(self._free) <= self._warm:
            self._free.append((made.fork_server, made.spawner))
        else:
            await made.spawner.close()

    async def run(self) -> None:
        """Make what is requested, until cancelled; then end the worker and its sandboxes."""
        pause_s = RETRY_S
        try:
            while True:
                if self._requested == 0:
                    self._requests.clear()
                    await self._requests.wait()
                    continue
                try:
                    made = await self._make()
                except WorkerFailed as failure:
                    log.error("a tool's worker failed", tool=self.recipe.tool, error=str(failure))
                    self._on_failed(self.recipe.tool, str(failure))
                    await self._close_fork_server()
                    await asyncio.sleep(pause_s)
                    pause_s = min(2 * pause_s, LONGEST_RETRY_S)
                    continue
                pause_s = RETRY_S
                if self._requested > 0:
                    self._requested -= 1
                    self._on_made(made)
                else:
                    await self.kill(made.name)
        finally:
            for name in list(self.made):
                await self.kill(name)
            await self._close_fork_server()

    async def _make(self) -> Made:
        """A sandbox of a free spawner, or of a new one. Raises WorkerFailed."""
        while self._free:
            fork_server, spawner = self._free.pop()
            try:
                return self._add(await spawner.spawn(), fork_server, spawner)
            except (OSError, SandboxLost) as error:
                log.warning("a spawner does not answer", tool=self.recipe.tool, error=str(error))
                await spawner.close()
        if self._fork_server is None:
            self._fork_server = await ForkServer.start(self.recipe)
        fork_server = self._fork_server
        spawner = await fork_server.open_spawner(self._cgroups)
        try:
            process = await spawner.spawn()
        except (OSError, SandboxLost) as error:
            await spawner.close()
            raise WorkerFailed(f"tool {self.recipe.tool!r} has no sandbox: {error}") from error
        if fork_server.single_use:
            self._fork_server = None  # it ends with its sandbox
        return self._add(process, fork_server, spawner)

    def _add(self, process: SandboxProcess, fork_server: ForkServer, spawner: Spawner) -> Made:
        made = Made(next(self._names), self.recipe.tool, process, fork_server, spawner)
        self.made[made.name] = made
        return made

    async def _close_fork_server(self) -> None:
        free, self._free = self._free, []
        for _, spawner in free:
            await spawner.close()
        fork_server, self._fork_server = self._fork_server, None
        if fork_server is not None:
            await fork_server.close()


class Pools:
    """A pool for each tool. on_made, on_failed: as of `Pool`.

    Invariant: a sandbox belongs to the pool that made it; where its tool is changed or removed, they end together.
    """

    def __init__(
        self, group: asyncio.TaskGroup, on_made: Callable[[Made], None], on_failed: Callable[[str, str], None]
    ) -> None:
        self._group = group
        self._on_made = on_made
        self._on_failed = on_failed
        self._names = (f"{os.getpid()}-{number}" for number in itertools.count(1))
        self._watches: list[asyncio.Task[None]] = []
        self._pools: dict[str, tuple[Pool, asyncio.Task[None]]] = {}

    async def set_tools(self, recipes: Mapping[str, Recipe], cgroups: Cgroups | None, warm: int) -> None:
        """Have a pool for each tool. A tool whose recipe has changed, or that is not there any more, loses its
        sandboxes.
        """
        for tool, (pool, task) in list(self._pools.items()):
            if recipes.get(tool) != pool.recipe:
                log.info("a tool was changed or removed", tool=tool)
                del self._pools[tool]
                task.cancel()
                await asyncio.wait((task,))
        for tool in recipes.keys() - self._pools.keys():
            pool = Pool(recipes[tool], cgroups, warm, self._names, on_made=self._on_made, on_failed=self._on_failed)
            self._pools[tool] = (pool, self._group.create_task(pool.run()))

    def request(self, tool: str, count: int) -> None:
        """Make that many more sandboxes of a tool."""
        if tool in self._pools:
            self._pools[tool][0].request(count)

    def find(self, name: str) -> Made | None:
        """The sandbox of that name, if it is alive."""
        made = next((pool.made[name] for pool, _ in self._pools.values() if name in pool.made), None)
        return made if made is not None and made.process.alive else None

    def kill(self, name: str) -> None:
        """Kill a sandbox without waiting."""
        for pool, _ in self._pools.values():
            if name in pool.made:
                self._group.create_task(pool.kill(name))

    def keep_only(self, kept: Collection[str]) -> None:
        """The service has gone: make no more, kill all sandboxes but `kept`, and watch the memory of those where no
        control group does.
        """
        for pool, _ in self._pools.values():
            pool.cancel_requests()
            for name, made in list(pool.made.items()):
                if name not in kept:
                    self._group.create_task(pool.kill(name))
                elif made.process.slot is None:
                    self._watches.append(self._group.create_task(self._watch(pool, made)))

    def stop_watching(self) -> None:
        """A service has come, which watches memory itself."""
        watches, self._watches = self._watches, []
        for watch in watches:
            watch.cancel()

    async def close(self) -> None:
        """Kill everything."""
        self.stop_watching()
        tasks = [task for _, task in self._pools.values()]
        self._pools = {}
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    async def _watch(self, pool: Pool, made: Made) -> None:
        await wait_for_growth(made.process.pid, pool.recipe.memory_bytes)
        log.warning("a sandbox outgrew its memory", tool=made.tool)
        self.kill(made.name)
