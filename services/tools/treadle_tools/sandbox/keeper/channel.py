"""Frames with open descriptors over a unix socket, between the service and its keeper.

Owns: the socket; a descriptor that is posted is closed once it is on its way. Invariants: frames arrive in the order
they were posted; what `flushed` has seen leave reaches the other side even where this process is killed at once.

What a service and its keeper say to each other, one frame each (`channel.py`).

The service: `hello` first (protocol, recipes, spares, cgroups, keep_s); then `want` (tool, count), `away` (cell),
`bind` (record, cell), `note` (session, facts), `forget` (session, closed_by), `end`. None of them is answered: they are
carried out in their order, also those that a service left behind when it was killed.
The keeper: `welcome` (cgroups, closed), a `session` (record, and its cell if it lives) each, `ready`; then `cell` and
`failed` as cells are made. A cell comes with one descriptor: a line to its first process."""

import asyncio
import contextlib
import os
import socket
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from treadle_tools.sandbox.bubblewrap.held import readable
from treadle_tools.sandbox.inside import frames

READ_BYTES = 64 * 1024
MOST_DESCRIPTORS = 64  # in one read; a message carries one at most
DESCRIPTORS = "descriptors"  # how many belong to a message


class Channel:
    """See the module."""

    def __init__(self, end: socket.socket) -> None:
        end.setblocking(False)
        self._socket = end
        self._outgoing: deque[tuple[bytes, tuple[int, ...]]] = deque()
        self._empty = asyncio.Event()
        self._empty.set()
        self._received = bytearray()
        self._descriptors: deque[int] = deque()

    def post(self, message: Mapping[str, Any], descriptors: Sequence[int] = ()) -> None:
        """Send without waiting. To an end that is gone it sends nothing: `receive` says so."""
        if self._socket.fileno() < 0:
            _close(descriptors)
            return
        self._outgoing.append((frames.encode({**message, DESCRIPTORS: len(descriptors)}), tuple(descriptors)))
        if len(self._outgoing) == 1:
            self._send()

    async def flushed(self) -> None:
        """Returns once all that was posted is the kernel's to deliver."""
        await self._empty.wait()

    async def receive(self) -> tuple[dict[str, Any], list[int]] | None:
        """The next message and its descriptors, which are the caller's; None once the other side has gone.

        Raises FrameError where the other side speaks something else.
        """
        while (message := frames.taken(self._received)) is None:
            await readable(self._socket)
            try:
                piece, descriptors, _, _ = socket.recv_fds(
                    self._socket, READ_BYTES, MOST_DESCRIPTORS, socket.MSG_CMSG_CLOEXEC
                )
            except BlockingIOError:
                continue
            except OSError:
                return None
            if not piece:
                return None
            self._received += piece
            self._descriptors += descriptors
        count = int(message.pop(DESCRIPTORS, 0))
        return message, [self._descriptors.popleft() for _ in range(count)]

    def close(self) -> None:
        """Hang up; what was not sent is lost."""
        self._drop()
        _close(self._descriptors)
        self._descriptors.clear()
        self._socket.close()

    def _send(self) -> None:
        loop = asyncio.get_running_loop()
        while self._outgoing:
            data, descriptors = self._outgoing[0]
            try:
                sent = socket.send_fds(self._socket, [data], descriptors) if descriptors else self._socket.send(data)
            except BlockingIOError:
                self._empty.clear()
                loop.add_writer(self._socket.fileno(), self._send)
                return
            except OSError:
                self._drop()
                return
            _close(descriptors)
            if sent < len(data):
                self._outgoing[0] = (data[sent:], ())
            else:
                self._outgoing.popleft()
        if not self._empty.is_set():
            loop.remove_writer(self._socket.fileno())
            self._empty.set()

    def _drop(self) -> None:
        for _, descriptors in self._outgoing:
            _close(descriptors)
        self._outgoing.clear()
        if not self._empty.is_set():
            asyncio.get_running_loop().remove_writer(self._socket.fileno())
            self._empty.set()


def _close(descriptors: Sequence[int] | deque[int]) -> None:
    for descriptor in descriptors:
        with contextlib.suppress(OSError):
            os.close(descriptor)


# Raised with every change that an older keeper, or a cell that an older worker has made, would not understand. Such a
# keeper ends when it is greeted, and its sessions with it.
PROTOCOL = 1

# What names a message, and its other fields.
OP = "op"
HELLO, WANT, AWAY, BIND, NOTE, FORGET, END = "hello", "want", "away", "bind", "note", "forget", "end"
WELCOME, SESSION, READY, CELL, FAILED = "welcome", "session", "ready", "cell", "failed"
