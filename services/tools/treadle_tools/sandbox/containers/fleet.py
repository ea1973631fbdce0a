"""All containers of this service: a few warm ones for each tool, one for each session or call, and no others.

Owns: the warm containers, the ones in use, the records of sessions. Invariants: a container is used once; one that was
closed is removed, however often its host must be asked; a service that comes after a killed one finds the sessions of
that one, and removes its other containers.
"""

import asyncio
import contextlib
import itertools
import json
import os
import re
import uuid
from collections.abc import Callable, Coroutine, Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import structlog
from tenacity import retry_if_exception_type

from treadle_tools.limits import Limits
from treadle_tools.sandbox.containers.hosts import ContainerLost, Host, HostFailed, Hosts, Recipe, retry_after
from treadle_tools.sandbox.containers.sandbox import ContainerSandbox, Disconnected
from treadle_tools.sandbox.sandboxes import FoundSession, Sandbox, WarmSandboxes, WorkerFailed

log = structlog.get_logger()

MOST_MAKING = 4  # containers at a time: a daemon makes more of them no faster
START_TIMEOUT_S = 120.0  # as of a fork server: slow imports on a busy machine
RETRY_S = 1.0  # after a tool's worker did not start
LONGEST_RETRY_S = 30.0
REMOVE_PAUSES_S = (0.5, 2.0, 8.0, 30.0)
MOST_CLOSED = 4096  # closed sessions remembered, because the next run may get a repeat of the closing
OPEN, CLOSED = ".session.json", ".closed"


@dataclass(frozen=True)
class Entry:
    """A session and the container that it lives in."""

    record: dict[str, Any]
    host: str
    container: str


class SessionFiles:
    """Records of sessions, one file each, which the service's next run reads.

    Invariant: a file is whole, or the one before it; what `write` and `forget` have written outlives this process (not
    the machine, nor do its containers). The lock on the state folder makes the files one service's.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.entries: dict[str, Entry] = {}
        for file in folder.glob(f"*{OPEN}"):
            with contextlib.suppress(ValueError, KeyError, TypeError):  # written by another version
                entry = Entry(**json.loads(file.read_text()))
                self.entries[str(entry.record["session_id"])] = entry
        self.closed = {
            file.name.removesuffix(CLOSED): file.read_text()
            for file in sorted(folder.glob(f"*{CLOSED}"), key=lambda file: file.stat().st_mtime)
        }

    def write(self, entry: Entry) -> None:
        """Store a session, or what has changed of it."""
        session_id = str(entry.record["session_id"])
        self.entries[session_id] = entry
        file = self._folder / f"{session_id}{OPEN}"
        fresh = file.with_suffix(".new")
        fresh.write_text(json.dumps(asdict(entry)))
        fresh.replace(file)

    def forget(self, session_id: str, closed_by: str) -> None:
        """Remove a closed session. closed_by: by which request; "": by none."""
        if closed_by:
            self.closed[session_id] = closed_by
            (self._folder / f"{session_id}{CLOSED}").write_text(closed_by)
            if len(self.closed) > MOST_CLOSED:
                oldest = next(iter(self.closed))
                del self.closed[oldest]
                (self._folder / f"{oldest}{CLOSED}").unlink(missing_ok=True)
        self.entries.pop(session_id, None)
        (self._folder / f"{session_id}{OPEN}").unlink(missing_ok=True)

    def clear(self) -> None:
        """Remove all files: no run will follow."""
        for file in (*self._folder.glob(f"*{OPEN}"), *self._folder.glob(f"*{CLOSED}")):
            file.unlink(missing_ok=True)


class Fleet:
    """A `Backend`. recipes: with the limits that a warm container of the tool gets before its first call. warm:
    containers that wait per tool. failures: why a tool has no recipe. keep_on_exit: whether sessions outlive an orderly
    end of the service too. release: unlocks the folder of `files`.
    """

    def __init__(
        self,
        hosts: Hosts,
        files: SessionFiles,
        recipes: Iterable[tuple[Recipe, Limits]],
        *,
        owner: str,
        warm: int,
        failures: Mapping[str, str],
        keep_on_exit: bool,
        release: Callable[[], None],
    ) -> None:
        self._hosts = hosts
        self._files = files
        self._recipes = {recipe.tool: (recipe, limits) for recipe, limits in recipes}
        self._prefix = f"treadle-{_slug(owner)}"
        self._keep_on_exit = keep_on_exit
        self._release = release
        self._group: asyncio.TaskGroup | None = None
        self._early: list[Coroutine[Any, Any, None]] = []
        self._making = asyncio.Semaphore(MOST_MAKING)
        self._in_use: dict[str, ContainerSandbox] = {}
        self._warm: dict[str, WarmSandboxes[ContainerSandbox]] = {
            tool: WarmSandboxes(warm, self._requester(tool)) for tool in self._recipes
        }
        for tool, why in failures.items():
            self._warm[tool] = WarmSandboxes(0, lambda count: None)
            self._warm[tool].fail(why)
        self.found: list[FoundSession] = []
        self.closed = dict(files.closed)

    async def connect(self) -> None:
        """Find the containers of the stored sessions, and remove all others. A host that does not answer keeps its
        containers, and the sessions there are lost.
        """
        alive: dict[tuple[str, str], Host] = {}
        for host in self._hosts:
            kept = {entry.container for entry in self._files.entries.values() if entry.host == host.name}
            try:
                running = kept.intersection(await host.running())
                alive |= {(host.name, name): host for name in running}
                swept = await host.sweep(running)
            except HostFailed as failure:
                log.error("a host of containers does not answer", host=host.name, error=str(failure))
            else:
                log.info("host of containers", host=host.name, sessions=len(kept), removed=swept)
        for entry in list(self._files.entries.values()):
            sandbox = None
            if (entry.host, entry.container) in alive:
                sandbox = self._add(alive[entry.host, entry.container], entry.container)
                self._hosts.add_load(entry.host, 1)
            self.found.append(FoundSession(entry.record, sandbox))

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            self._group = group
            for work in self._early:
                group.create_task(work)
            for warm in self._warm.values():
                warm.fill()
            await asyncio.Event().wait()

    async def take(self, tool: str) -> ContainerSandbox:
        return await self._warm[tool].take()

    def bind(self, record: Mapping[str, Any], sandbox: Sandbox) -> None:
        self._files.write(Entry(dict(record), self._in_use[sandbox.name].host.name, sandbox.name))

    def note(self, session_id: str, facts: Mapping[str, Any]) -> None:
        if (entry := self._files.entries.get(session_id)) is not None:
            self._files.write(Entry({**entry.record, **facts}, entry.host, entry.container))

    def forget(self, session_id: str, closed_by: str = "") -> None:
        self._files.forget(session_id, closed_by)

    async def flush(self) -> None:
        """Nothing is left to do: `bind`, `note` and `forget` write at once."""

    async def close(self) -> None:
        """Remove every container, but those of sessions that are to outlive the service; `run` has ended."""
        kept: set[str] = set()
        if self._keep_on_exit:
            kept = {entry.container for entry in self._files.entries.values()}
        else:
            self._files.clear()
        for sandbox in self._in_use.values():
            await sandbox.disconnect()
        for host in self._hosts:
            with contextlib.suppress(HostFailed):
                await host.sweep(kept)
            await host.close()
        self._release()

    def _requester(self, tool: str) -> Callable[[int], None]:
        def request(count: int) -> None:
            for _ in range(count):
                self._spawn(self._supply(tool))

        return request

    async def _supply(self, tool: str) -> None:
        """Make one more warm container, however often that fails."""
        warm, pauses_s = self._warm[tool], (RETRY_S * 2**n for n in itertools.count())
        while True:
            try:
                async with self._making:
                    sandbox = await self._make(*self._recipes[tool])
            except WorkerFailed as failure:
                log.error("a tool's worker failed", tool=tool, error=str(failure))
                warm.fail(str(failure))
                await asyncio.sleep(min(next(pauses_s), LONGEST_RETRY_S))
            else:
                warm.add(sandbox)
                return

    async def _make(self, recipe: Recipe, limits: Limits) -> ContainerSandbox:
        """A container whose worker answers. Raises WorkerFailed."""
        tool = recipe.tool
        name = f"{self._prefix}-{_slug(tool)}-{uuid.uuid4().hex[:12]}"
        try:
            host = await self._hosts.make(recipe, name)
        except HostFailed as failure:
            raise WorkerFailed(f"tool {tool!r} has no container: {failure}") from failure
        sandbox = self._add(host, name)
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                await sandbox.start(limits)
        except TimeoutError:
            sandbox.close()
            raise WorkerFailed(f"tool {tool!r} was not ready after {START_TIMEOUT_S:g} s") from None
        except (Disconnected, ContainerLost, HostFailed) as error:
            raise WorkerFailed(f"tool {tool!r} did not start: {await self._explain(sandbox, error)}") from error
        except BaseException:
            sandbox.close()
            raise
        return sandbox

    async def _explain(self, sandbox: ContainerSandbox, error: Exception) -> str:
        """Why a worker ended before it answered; closes its container."""
        try:
            if lines := sandbox.stderr.splitlines():
                log.error("a tool's worker did not start", stderr=sandbox.stderr)
                return lines[-1]
            if isinstance(error, ContainerLost):
                return str(error)
            ending = await sandbox.wait_ending()
            return "out of memory" if ending.out_of_memory else str(ending)
        except HostFailed:
            return str(error)
        finally:
            sandbox.close()

    def _add(self, host: Host, name: str) -> ContainerSandbox:
        sandbox = ContainerSandbox(host, name, self._spawn, lambda closed: self._spawn(self._remove(closed)))
        self._in_use[name] = sandbox
        return sandbox

    async def _remove(self, sandbox: ContainerSandbox) -> None:
        host, failed = sandbox.host, retry_if_exception_type(HostFailed)
        try:
            await retry_after(REMOVE_PAUSES_S, failed, "a container is removed again", container=sandbox.name)(
                host.remove, sandbox.name
            )
        except HostFailed as failure:
            log.error("a container is left", host=host.name, container=sandbox.name, error=str(failure))
        del self._in_use[sandbox.name]
        self._hosts.add_load(host.name, -1)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Start a background task, once `run` runs."""
        if self._group is None:
            self._early.append(work)
            return
        try:
            self._group.create_task(work)
        except RuntimeError:  # the service is ending: `close` removes what is left
            work.close()


def _slug(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")


def default_owner(listen: str) -> str:
    """Name the owner of containers where the settings do not: this machine and port, or this process."""
    port = listen.rpartition(":")[2]
    return f"{os.uname().nodename}-{port if port not in ('', '0') else f'pid-{os.getpid()}'}"
