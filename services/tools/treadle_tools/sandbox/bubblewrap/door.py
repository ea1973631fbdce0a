"""A door: a fork of a zygote that stands in a control group of its own and makes one cell after the other there.

Owns: its control socket and its slot. Invariant: one cell at a time, so that the slot's limits and counts are that
cell's.
"""

import asyncio
import contextlib
import os
import select
import signal
import socket
import struct

from treadle_tools.sandbox.bubblewrap.cell import CellLost
from treadle_tools.sandbox.bubblewrap.cgroups import Cgroups, Slot
from treadle_tools.sandbox.bubblewrap.held import HeldCell, readable
from treadle_tools.sandbox.inside import frames

START_TIMEOUT_S = 30.0  # 10 ms on an idle core
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid


class Door:
    """See the module. Made by `Zygote.door`."""

    def __init__(self, control: socket.socket, pid: int, cgroups: Cgroups | None, slot: Slot | None) -> None:
        self._control = control
        self._handle = os.pidfd_open(pid)
        self._cgroups = cgroups
        self._slot = slot

    @classmethod
    async def open(cls, order_to: socket.socket, cgroups: Cgroups | None) -> "Door":
        """A new door of the zygote that listens at the other end of `order_to`. Raises CellLost or OSError."""
        control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        control.setblocking(False)
        control.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        try:
            socket.send_fds(order_to, [b"door"], [theirs.fileno()])
            theirs.close()
            async with asyncio.timeout(START_TIMEOUT_S):
                _, pid = await greeting(control)
            slot: Slot | None = None
            if cgroups is not None:
                slot = cgroups.take()
                await asyncio.to_thread(slot.join, pid)  # a slot that cannot be joined is not given back
            return cls(control, pid, cgroups, slot)
        except BaseException:
            control.close()
            raise
        finally:
            theirs.close()

    @property
    def alive(self) -> bool:
        """Whether its process runs."""
        poll = select.poll()
        poll.register(self._handle, select.POLLIN)
        return not poll.poll(0)

    async def cell(self) -> HeldCell:
        """A new cell. The one before must be dead. Raises CellLost, OSError or TimeoutError."""
        control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        control.setblocking(False)
        control.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        try:
            socket.send_fds(self._control, [b"cell"], [theirs.fileno()])
            theirs.close()
            async with asyncio.timeout(START_TIMEOUT_S):
                body, pid = await greeting(control)
            hello = frames.decode(body[frames.HEADER.size :])
            if "failed" in hello:
                raise CellLost(f"the sandbox could not be divided: {hello['failed']}")
            return HeldCell(control, pid, self._slot)
        except BaseException:
            control.close()
            raise
        finally:
            theirs.close()

    async def close(self) -> None:
        """End it. Its cell must be dead."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._handle, signal.SIGKILL)
        try:
            await readable(self._handle)
        finally:
            self._control.close()
            os.close(self._handle)
        if self._cgroups is not None and self._slot is not None:
            self._cgroups.give_back(self._slot)


async def greeting(link: socket.socket) -> tuple[bytes, int]:
    """The first message on `link` and the process id of who sent it. Raises CellLost where there is none.

    The kernel says who speaks, in our own numbers: inside its namespace a process only knows another number of itself.
    """
    await readable(link)
    body, ancillary, _, _ = link.recvmsg(frames.HEADER.size + 4096, socket.CMSG_SPACE(_CREDENTIALS.size))
    for level, kind, data in ancillary:
        if body and (level, kind) == (socket.SOL_SOCKET, socket.SCM_CREDENTIALS):
            return body, int(_CREDENTIALS.unpack(data[: _CREDENTIALS.size])[0])
    raise CellLost("the worker ended before it was ready")
