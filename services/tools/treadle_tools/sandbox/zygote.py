"""One sandboxed worker process as the service sees it: imports a tool once, then makes doors on demand.

Owns: the bubblewrap process and its control socket. Invariant: `close` returns when the process and all its doors and
cells are gone.
"""

import asyncio
import contextlib
import os
import socket
from asyncio.subprocess import DEVNULL, Process
from typing import BinaryIO

import structlog

from treadle_tools.inside import frames
from treadle_tools.sandbox.bubblewrap import Bubblewrap, identity, program_of
from treadle_tools.sandbox.cell import CellLost
from treadle_tools.sandbox.cgroups import Cgroups
from treadle_tools.sandbox.door import Door
from treadle_tools.tool import Tool

log = structlog.get_logger()

START_TIMEOUT_S = 120.0  # reasoning-gym imports in 2 s on an idle core; two busy cores on a small machine are slower
STDERR_LOGGED_CHARS = 8192  # the last of it: a traceback through a deep import
END_DEADLINE_S = 10.0  # a killed worker that is still there then is stuck in the kernel


class WorkerFailed(Exception):  # noqa: N818 - named for what happened
    """A worker did not start or could not make a door; the message says why."""


class Zygote:
    """See the module. Made by `Zygote.start`."""

    def __init__(self, tool: Tool, process: Process, control: socket.socket, stderr: BinaryIO) -> None:
        self._tool = tool
        self._process = process
        self._control = control
        self._stderr = stderr
        self._can_make_cells = False

    @classmethod
    async def start(cls, sandbox: Bubblewrap, tool: Tool) -> "Zygote":
        """A worker that has imported `tool`. Raises WorkerFailed."""
        control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        control.setblocking(False)
        stderr = os.fdopen(os.memfd_create("stderr"), "w+b")
        try:
            program = program_of(tool)
            command = sandbox.command(
                readable=program.readable,
                work_bytes=tool.work_bytes,
                argv=program.argv(tool, drop_root=sandbox.drop_root),
            )
            process = await asyncio.create_subprocess_exec(
                *command,
                stdin=theirs.fileno(),
                stdout=DEVNULL,
                stderr=stderr.fileno(),
                **identity(sandbox.user),
            )
        except (OSError, ModuleNotFoundError) as error:
            control.close()
            stderr.close()
            raise WorkerFailed(f"tool {tool.name!r}: {error}") from error
        finally:
            theirs.close()
        zygote = cls(tool, process, control, stderr)
        try:
            await zygote._ready()
        except BaseException:
            await zygote.close()
            raise
        return zygote

    async def _ready(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                said = await loop.sock_recv(self._control, frames.MAX_FRAME_BYTES)
        except TimeoutError:
            raise WorkerFailed(f"tool {self._tool.name!r} was not ready after {START_TIMEOUT_S:g} s") from None
        except OSError:  # it ended with our socket unread
            said = b""
        if not said:
            code = await self._process.wait()
            self._stderr.seek(0)
            why = self._stderr.read().decode(errors="replace").strip()[-STDERR_LOGGED_CHARS:]
            log.error("a tool's worker did not start", tool=self._tool.name, stderr=why)
            last = why.splitlines()[-1] if why else f"exit code {code}"
            raise WorkerFailed(f"tool {self._tool.name!r} did not start: {last}")
        self._can_make_cells = bool(frames.decode(said)["cells"])
        log.info("tool ready", tool=self._tool.name, warm_cells=self._can_make_cells)

    @property
    def single_use(self) -> bool:
        """Whether the kernel refuses namespaces in the sandbox, so that this worker is good for one cell only."""
        return not self._can_make_cells

    async def door(self, cgroups: Cgroups | None) -> Door:
        """A new door. Raises WorkerFailed; the zygote should be closed then."""
        try:
            return await Door.open(self._control, cgroups)
        except (OSError, CellLost) as error:
            raise WorkerFailed(f"tool {self._tool.name!r} has no door: {error}") from error

    async def close(self) -> None:
        """Kill the worker and every door and cell of its. Safe to call again."""
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()  # its process 1 dies with it, and with that one everything in the sandbox
        await self._process.wait()
        if self._control.fileno() < 0:
            return
        # bubblewrap's own end comes first; the sandbox behind it is gone when nobody holds the other end any more.
        try:
            async with asyncio.timeout(END_DEADLINE_S):
                with contextlib.suppress(OSError):
                    while await asyncio.get_running_loop().sock_recv(self._control, frames.MAX_FRAME_BYTES):
                        pass
        finally:
            self._control.close()
            self._stderr.close()
