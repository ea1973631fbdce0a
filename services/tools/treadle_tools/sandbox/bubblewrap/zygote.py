"""One sandboxed worker process as the keeper sees it: imports a tool once, then makes doors on demand.

Owns: the bubblewrap process and its control socket. Invariant: `close` returns when the process and all its doors and
cells are gone.
"""

import asyncio
import contextlib
import os
import signal
import socket
from asyncio.subprocess import DEVNULL, Process
from pathlib import Path
from typing import BinaryIO

import structlog

from treadle_tools.sandbox.bubblewrap.cell import CellLost, WorkerFailed
from treadle_tools.sandbox.bubblewrap.cgroups import Cgroups
from treadle_tools.sandbox.bubblewrap.command import identity
from treadle_tools.sandbox.bubblewrap.door import Door
from treadle_tools.sandbox.inside import frames
from treadle_tools.sandbox.keeper.recipe import Recipe

log = structlog.get_logger()

START_TIMEOUT_S = 120.0  # reasoning-gym imports in 2 s on an idle core; two busy cores on a small machine are slower
STDERR_LOGGED_CHARS = 8192  # the last of it: a traceback through a deep import
CHILD_POLL_S = 0.005  # bubblewrap forks some ms after its start
END_DEADLINE_S = 10.0  # a killed worker that is still there then is stuck in the kernel


class Zygote:
    """See the module. Made by `Zygote.start`."""

    def __init__(self, tool: str, process: Process, control: socket.socket, stderr: BinaryIO) -> None:
        self._tool = tool
        self._process = process
        self._control = control
        self._stderr = stderr
        self._can_make_cells = False

    @classmethod
    async def start(cls, recipe: Recipe) -> "Zygote":
        """A worker that has imported its tool. Raises WorkerFailed."""
        control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        control.setblocking(False)
        stderr = os.fdopen(os.memfd_create("stderr"), "w+b")
        try:
            process = await asyncio.create_subprocess_exec(
                *recipe.command,
                stdin=theirs.fileno(),
                stdout=DEVNULL,
                stderr=stderr.fileno(),
                **identity(recipe.user),
            )
        except OSError as error:
            control.close()
            stderr.close()
            raise WorkerFailed(f"tool {recipe.tool!r}: {error}") from error
        finally:
            theirs.close()
        zygote = cls(recipe.tool, process, control, stderr)
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
            raise WorkerFailed(f"tool {self._tool!r} was not ready after {START_TIMEOUT_S:g} s") from None
        except OSError:  # it ended with our socket unread
            said = b""
        if not said:
            code = await self._process.wait()
            self._stderr.seek(0)
            why = self._stderr.read().decode(errors="replace").strip()[-STDERR_LOGGED_CHARS:]
            log.error("a tool's worker did not start", tool=self._tool, stderr=why)
            last = why.splitlines()[-1] if why else f"exit code {code}"
            raise WorkerFailed(f"tool {self._tool!r} did not start: {last}")
        self._can_make_cells = bool(frames.decode(said)["cells"])
        log.info("tool ready", tool=self._tool, warm_cells=self._can_make_cells)

    @property
    def single_use(self) -> bool:
        """Whether the kernel refuses namespaces in the sandbox, so that this worker is good for one cell only."""
        return not self._can_make_cells

    async def door(self, cgroups: Cgroups | None) -> Door:
        """A new door. Raises WorkerFailed; the zygote should be closed then."""
        try:
            return await Door.open(self._control, cgroups)
        except (OSError, CellLost) as error:
            raise WorkerFailed(f"tool {self._tool!r} has no door: {error}") from error

    async def close(self) -> None:
        """Kill the worker and every door and cell of its. Safe to call again."""
        if self._process.returncode is None:
            await self._kill_first_process()
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
        await self._process.wait()
        if self._control.fileno() < 0:
            return
        # bubblewrap's own end comes first; the sandbox behind it is gone when nobody holds the other end any more.
        try:
            async with asyncio.timeout(END_DEADLINE_S):
                with contextlib.suppress(OSError):
                    while await asyncio.get_running_loop().sock_recv(self._control, frames.MAX_FRAME_BYTES):
                        pass
        except TimeoutError:
            log.error("a killed worker does not end", tool=self._tool)
        finally:
            self._control.close()
            self._stderr.close()

    async def _kill_first_process(self) -> None:
        """Kill the sandbox's process 1, and with it everything inside.

        It would die with bubblewrap, but for the time in which it is still setting the sandbox up.
        """
        with contextlib.suppress(TimeoutError, OSError):
            async with asyncio.timeout(END_DEADLINE_S):
                while True:
                    for pid in _children(self._process.pid):
                        os.kill(pid, signal.SIGKILL)
                        return
                    await asyncio.sleep(CHILD_POLL_S)


def _children(pid: int) -> list[int]:
    """Of a process with one thread. Raises FileNotFoundError where it has ended."""
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
