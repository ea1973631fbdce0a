"""One cell as the keeper holds it: the control socket of its first process, a handle to kill it.

Owns: both. Invariants: the cell lives for as long as the keeper holds the control socket, whoever it talks to
meanwhile; after `kill` returns, no process of the cell runs.

Waiting for a descriptor."""

import asyncio
import contextlib
import os
import select
import signal
import socket

from treadle_tools.sandbox.bubblewrap.cell import CellLost
from treadle_tools.sandbox.bubblewrap.cgroups import Slot


async def readable(file: socket.socket | int) -> None:
    """Returns once `file` (a socket, a pidfd) can be read, or has ended."""
    loop = asyncio.get_running_loop()
    ready = asyncio.Event()
    descriptor = file if isinstance(file, int) else file.fileno()
    loop.add_reader(descriptor, ready.set)
    try:
        await ready.wait()
    finally:
        loop.remove_reader(descriptor)


KILL_DEADLINE_S = 10.0  # a killed process that is still there then is stuck in the kernel


class HeldCell:
    """See the module. Made by `Door.cell`. pid: of its first process, in the keeper's own numbers."""

    def __init__(self, control: socket.socket, pid: int, slot: Slot | None) -> None:
        try:
            self._handle = os.pidfd_open(pid)
        except ProcessLookupError as error:
            raise CellLost("the worker ended before it was ready") from error
        self._control = control
        self._killed = False
        self.pid = pid
        self.slot = slot

    @property
    def alive(self) -> bool:
        """Whether its first process runs."""
        poll = select.poll()
        poll.register(self._handle, select.POLLIN)
        return not self._killed and not poll.poll(0)

    def link(self) -> int | None:
        """A fresh line to the cell, as a descriptor; None where the cell is dead.

        The cell drops the line that it had: what was half said on that one is forgotten, and so are frames' borders.
        """
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                socket.send_fds(self._control, [b"link"], [theirs.fileno()])
            except OSError:
                ours.close()
                return None
        return ours.detach()

    async def kill(self) -> None:
        """Kill every process of the cell and wait for their end. Safe to call again."""
        if self._killed:
            return
        self._killed = True
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._handle, signal.SIGKILL)
        try:
            async with asyncio.timeout(KILL_DEADLINE_S):
                await readable(self._handle)
        finally:
            self._control.close()
            os.close(self._handle)
