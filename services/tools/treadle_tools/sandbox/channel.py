"""Carry messages with open descriptors over a unix socket, between the service and its daemon; and
name the messages.

This module owns the socket; a descriptor that is posted is closed once it is on its way.
Invariants: messages arrive in the order in which they were posted; what was sent before `flush`
returns reaches the other side even if this process is killed.

The service sends `hello` first (protocol, recipes, warm, cgroups, keep_s); then `request` (tool,
count), `kill` (sandbox), `bind` (record, sandbox), `note` (session, facts), `forget` (session,
closed_by), `end`. The daemon answers none of them, and carries them out in their order, also after
the service was killed. The daemon sends `welcome` (cgroups, closed), a `session` (record, and its
sandbox if that is alive) each, `ready`; then `sandbox` and `failed` as sandboxes are made. A
sandbox comes with one descriptor: a connection to its init.
"""

import asyncio
import contextlib
import os
import socket
from collections import deque
from collections.abc import Mapping
from typing import Any

from treadle_tools.sandbox.inside import messages
from treadle_tools.sandbox.processes import wait_readable

# Raised with every change that an older daemon, or a sandbox of an older worker, would not
# understand. Such a daemon ends when a service sends its hello, and its sessions with it.
PROTOCOL = 3

OP = "op"  # the field that names a message
HELLO, REQUEST, KILL, BIND, NOTE, FORGET, END = (
    "hello",
    "request",
    "kill",
    "bind",
    "note",
    "forget",
    "end",
)
WELCOME, SESSION, READY, SANDBOX, FAILED = "welcome", "session", "ready", "sandbox", "failed"

READ_BYTES = 64 * 1024
MOST_DESCRIPTORS = 64  # in one read; a message carries one at most
DESCRIPTORS = "descriptors"  # the field with how many a message carries: 0 or 1


class Channel:
    """One end of the connection between the service and its daemon."""

    def __init__(self, end: socket.socket) -> None:
        end.setblocking(False)
        self._socket = end
        self._outgoing: deque[tuple[bytes, int | None]] = deque()
        self._empty = asyncio.Event()
        self._empty.set()
        self._received = bytearray()
        self._descriptors: deque[int] = deque()

    def post(self, message: Mapping[str, Any], descriptor: int | None = None) -> None:
        """Post a message without waiting.

        Nothing is sent where the other side has gone; `receive` reports that.
        """
        self._outgoing.append(
            (messages.encode({**message, DESCRIPTORS: int(descriptor is not None)}), descriptor)
        )
        if self._socket.fileno() < 0:
            self._drop()
        elif len(self._outgoing) == 1:
            self._send()

    async def flush(self) -> None:
        """Return once the kernel has everything that was posted."""
        await self._empty.wait()

    async def receive(self) -> tuple[dict[str, Any], int | None] | None:
        """Return the next message and its descriptor, which the caller closes; None once the other
        side has gone.

        Raises FrameError where the other side sends something else than frames.
        """
        while (message := messages.take_message(self._received)) is None:
            await wait_readable(self._socket)
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
        return message, self._descriptors.popleft() if message.pop(DESCRIPTORS, 0) else None

    def close(self) -> None:
        """Disconnect; what was not sent is lost."""
        self._drop()
        while self._descriptors:
            _close(self._descriptors.popleft())
        self._socket.close()

    def _send(self) -> None:
        while self._outgoing:
            data, descriptor = self._outgoing[0]
            try:
                fds = [] if descriptor is None else [descriptor]
                sent = (
                    socket.send_fds(self._socket, [data], fds) if fds else self._socket.send(data)
                )
            except BlockingIOError:
                self._empty.clear()
                asyncio.get_running_loop().add_writer(self._socket.fileno(), self._send)
                return
            except OSError:
                self._drop()
                return
            _close(descriptor)
            if sent < len(data):
                self._outgoing[0] = (data[sent:], None)
            else:
                self._outgoing.popleft()
        self._stop_waiting()

    def _drop(self) -> None:
        while self._outgoing:
            _close(self._outgoing.popleft()[1])
        self._stop_waiting()

    def _stop_waiting(self) -> None:
        if not self._empty.is_set():
            asyncio.get_running_loop().remove_writer(self._socket.fileno())
            self._empty.set()


def _close(descriptor: int | None) -> None:
    if descriptor is not None:
        with contextlib.suppress(OSError):
            os.close(descriptor)
