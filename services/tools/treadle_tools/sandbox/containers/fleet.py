"""Keep all containers of this service: a few warm ones for each tool, one for each session or call,
and no others.

This module owns the warm containers, the ones in use, and the records of sessions. Invariants: a
container is used once; one that was closed is removed, however often that must be tried; of a
killed service's containers only its sessions' are kept.
"""

import asyncio
import contextlib
import json
import os
import re
import uuid
from collections.abc import Coroutine, Iterable, Mapping
from pathlib import Path
from typing import Any

import structlog
from tenacity import AsyncRetrying, retry_if_exception_type, wait_chain, wait_fixed

from treadle_tools.sandbox.containers.hosts import (
    ContainerLost,
    Host,
    HostFailed,
    Hosts,
    Recipe,
    retry_after,
    sweep,
)
from treadle_tools.sandbox.containers.sandbox import ContainerSandbox, Disconnected
from treadle_tools.sandbox.sandboxes import (
    RETRY_PAUSES_S,
    Backend,
    FoundSession,
    SessionRecords,
    WorkerFailed,
)
from treadle_tools.sandbox.state_folder import StateFolder

log = structlog.get_logger()

MOST_MAKING = 4  # containers at a time: a daemon makes more of them no faster
START_TIMEOUT_S = 120.0  # as of a fork server: slow imports on a busy machine
REMOVE_PAUSES_S = (0.5, 2.0, 8.0, 30.0)
OPEN, CLOSED = ".session.json", ".closed"


class SessionFiles(SessionRecords):
    """Records of sessions, one file each, which the service's next run reads.

    A sandbox is named as its container.

    Invariant: a file is whole, or the one before it; what was stored and forgotten outlives this
    process (not the machine, nor do its containers). The lock on the state folder makes the files
    one service's.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder = folder
        for file in folder.glob(f"*{OPEN}"):
            with contextlib.suppress(ValueError, KeyError, TypeError):  # written by another version
                stored = json.loads(file.read_text())
                super().bind(stored["record"], str(stored["container"]))
        for file in sorted(folder.glob(f"*{CLOSED}"), key=lambda file: file.stat().st_mtime):
            self.closed[file.name.removesuffix(CLOSED)] = file.read_text()

    def bind(self, record: Mapping[str, Any], sandbox: str) -> None:
        super().bind(record, sandbox)
        self._write(str(record["session_id"]))

    def note(self, session_id: str, facts: Mapping[str, Any]) -> None:
        super().note(session_id, facts)
        if session_id in self.records:
            self._write(session_id)

    def forget(self, session_id: str, closed_by: str = "") -> None:
        oldest = next(iter(self.closed), session_id)
        super().forget(session_id, closed_by)
        if closed_by:
            (self._folder / f"{session_id}{CLOSED}").write_text(closed_by)
        if oldest not in self.closed:
            (self._folder / f"{oldest}{CLOSED}").unlink(missing_ok=True)
        (self._folder / f"{session_id}{OPEN}").unlink(missing_ok=True)

    def _write(self, session_id: str) -> None:
        file = self._folder / f"{session_id}{OPEN}"
        fresh = file.with_suffix(".new")
        fresh.write_text(
            json.dumps(
                {"record": self.records[session_id], "container": self.sandboxes[session_id]}
            )
        )
        fresh.replace(file)

    def clear(self) -> None:
        """Remove all files, since no run will follow."""
        for file in (*self._folder.glob(f"*{OPEN}"), *self._folder.glob(f"*{CLOSED}")):
            file.unlink(missing_ok=True)


class Fleet(Backend):
    """`Backend` of Docker containers or Kubernetes pods.

    folder: for records of sessions. keep_on_exit: whether sessions outlive an orderly end too.
    """

    records: SessionFiles

    def __init__(
        self,
        hosts: Hosts,
        folder: StateFolder,
        recipes: Iterable[Recipe],
        failures: Mapping[str, str],
        *,
        owner: str,
        warm: int,
        keep_on_exit: bool,
    ) -> None:
        self._recipes = {recipe.tool.name: recipe for recipe in recipes}
        super().__init__(SessionFiles(folder.path), self._recipes, failures, warm=warm)
        self._hosts = hosts
        self._folder = folder
        self._prefix = f"treadle-{_slug(owner)}"
        self._keep_on_exit = keep_on_exit
        self._group: asyncio.TaskGroup | None = None
        self._early: list[Coroutine[Any, Any, None]] = []
        self._making = asyncio.Semaphore(MOST_MAKING)
        self._in_use: dict[str, ContainerSandbox] = {}

    async def connect(self) -> None:
        """Find the containers of stored sessions, and remove all others.

        The sessions of a silent host are lost.
        """
        stored, alive = set(self.records.sandboxes.values()), dict[str, Host]()
        for host in self._hosts:
            try:
                running = stored.intersection(await host.list_names(running=True))
                alive |= dict.fromkeys(running, host)
                swept = await sweep(host, running)
            except HostFailed as failure:
                log.error(
                    "a host of containers does not answer", host=host.name, error=str(failure)
                )
            else:
                log.info("host of containers", host=host.name, sessions=len(running), removed=swept)
        for session_id, record in self.records.records.items():
            sandbox, name = None, self.records.sandboxes[session_id]
            if name in alive:
                sandbox = self._add(alive[name], name)
                self._hosts.add_load(alive[name].name, 1)
            self.found.append(FoundSession(dict(record), sandbox))

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            self._group = group
            for work in self._early:
                group.create_task(work)
            for warm in self._warm.values():
                warm.fill()
            await asyncio.Event().wait()

    async def close(self) -> None:
        """Remove every container, but those of sessions that are to outlive the service; `run` has
        ended."""
        kept = set(self.records.sandboxes.values()) if self._keep_on_exit else set()
        if not self._keep_on_exit:
            self.records.clear()
        for sandbox in self._in_use.values():
            await sandbox.disconnect()
        for host in self._hosts:
            with contextlib.suppress(HostFailed):
                await sweep(host, kept)
            await host.close()
        self._folder.release(keep=self._keep_on_exit)

    def _request(self, tool: str, count: int) -> None:
        for _ in range(count):
            self._spawn(self._supply(tool))

    async def _supply(self, tool: str) -> None:
        """Make one more warm container, however often that fails."""

        async def make() -> ContainerSandbox:
            try:
                async with self._making:
                    return await self._make(self._recipes[tool])
            except WorkerFailed as failure:
                log.error("a tool's worker failed", tool=tool, error=str(failure))
                self._warm[tool].failure = str(failure)
                raise

        failed, pauses = retry_if_exception_type(WorkerFailed), map(wait_fixed, RETRY_PAUSES_S)
        self._warm[tool].add(await AsyncRetrying(retry=failed, wait=wait_chain(*pauses))(make))

    async def _make(self, recipe: Recipe) -> ContainerSandbox:
        """Make a container whose worker answers. Raises WorkerFailed."""
        tool = recipe.tool.name
        name = f"{self._prefix}-{_slug(tool)}-{uuid.uuid4().hex[:12]}"
        try:
            host = await self._hosts.make(recipe, name)
        except HostFailed as failure:
            raise WorkerFailed(f"tool {tool!r} has no container: {failure}") from failure
        sandbox = self._add(host, name)
        with contextlib.ExitStack() as undo:
            undo.callback(sandbox.close)
            try:
                async with asyncio.timeout(START_TIMEOUT_S):
                    await sandbox.start(recipe.tool.limits)
            except TimeoutError:
                raise WorkerFailed(
                    f"tool {tool!r} was not ready after {START_TIMEOUT_S:g} s"
                ) from None
            except (Disconnected, ContainerLost, HostFailed) as error:
                raise WorkerFailed(
                    f"tool {tool!r} did not start: {await _explain(sandbox, error)}"
                ) from error
            undo.pop_all()
        return sandbox

    def _add(self, host: Host, name: str) -> ContainerSandbox:
        sandbox = ContainerSandbox(
            host, name, self._spawn, lambda closed: self._spawn(self._remove(closed))
        )
        self._in_use[name] = sandbox
        return sandbox

    async def _remove(self, sandbox: ContainerSandbox) -> None:
        host, failed = sandbox.host, retry_if_exception_type(HostFailed)
        try:
            retry = retry_after(
                REMOVE_PAUSES_S, failed, "a container is removed again", container=sandbox.name
            )
            await retry(host.remove, sandbox.name)
        except HostFailed as failure:
            log.error(
                "a container is left", host=host.name, container=sandbox.name, error=str(failure)
            )
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


async def _explain(sandbox: ContainerSandbox, error: Exception) -> str:
    """Return why a worker ended before it answered."""
    if lines := sandbox.stderr.splitlines():
        log.error("a tool's worker did not start", stderr=sandbox.stderr)
        return lines[-1]
    if isinstance(error, ContainerLost):
        return str(error)
    try:
        ending = await sandbox.wait_ending()
    except HostFailed:
        return str(error)
    return "out of memory" if ending.out_of_memory else str(ending)


def _slug(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")


def default_owner(listen: str) -> str:
    """Name the owner of containers where the settings do not: this machine and port, or this
    process.
    """
    port = listen.rpartition(":")[2]
    return f"{os.uname().nodename}-{port if port not in ('', '0') else f'pid-{os.getpid()}'}"
