"""Move the content of actions between sockets, pipes and files, and leave none of it in this
process's memory.

The supervisor forks the processes that run foreign code, and a fork has all that its parent's
memory holds. So code, arguments, outputs and answers go through one buffer, which is wiped after
each use, into files that the kernel alone holds. No object of Python ever has them.
"""

import os
import socket

from treadle_tools.sandbox.inside.messages import FrameError

BUFFER_BYTES = 64 * 1024  # a pipe's whole buffer at a time
_buffer = memoryview(bytearray(BUFFER_BYTES))
_zeros = memoryview(bytes(BUFFER_BYTES))


class Content:
    """A file in memory that takes `most` bytes.

    size: bytes that it has. cut: whether more came, and was dropped.
    """

    def __init__(self, most: int) -> None:
        self.file = os.memfd_create("content")
        self.most = most
        self.size = 0
        self.cut = False

    def clear(self, most: int | None = None) -> None:
        """Remove the content; from now on the file takes `most` bytes."""
        os.ftruncate(self.file, 0)
        self.most = self.most if most is None else most
        self.size, self.cut = 0, False

    def receive(self, link: socket.socket, at_most: int) -> int:
        """Add what a socket has, up to so many bytes; return how many came, 0 at its end.

        Raises BlockingIOError, OSError.
        """
        return self._keep(link.recv_into(_buffer, min(at_most, BUFFER_BYTES)))

    def receive_exactly(self, link: socket.socket, count: int) -> None:
        """Add so many bytes of a blocking socket.

        Raises FrameError where the socket ends before, OSError.
        """
        while count > 0:
            if not (came := self.receive(link, count)):
                raise FrameError("the other side ended in a message")
            count -= came

    def read(self, file: int) -> int:
        """Add what a pipe has, one buffer at most; return how many bytes came, 0 at its end.

        Raises BlockingIOError.
        """
        return self._keep(os.readv(file, [_buffer]))

    def add(self, piece: memoryview) -> None:
        """Add a piece of a buffer, which is wiped."""
        room = min(len(piece), self.most - self.size)
        self.cut = self.cut or room < len(piece)
        kept = 0
        while kept < room:
            kept += os.pwrite(self.file, piece[kept:room], self.size + kept)
        self.size += room
        for at in range(0, len(piece), BUFFER_BYTES):
            piece[at : at + BUFFER_BYTES] = _zeros[: len(piece) - at]

    def send(self, file: int) -> None:
        """Write the whole content to a blocking socket or pipe. Raises OSError."""
        at = 0
        while at < self.size:
            at += os.sendfile(file, self.file, at, self.size - at)

    def close(self) -> None:
        os.close(self.file)

    def _keep(self, came: int) -> int:
        self.add(_buffer[:came])
        return came


def send_with(link: socket.socket, head: bytes, *contents: Content) -> None:
    """Send a header and contents over a blocking socket: in one piece where they are short, so that
    the other side wakes up once. Raises OSError."""
    end = len(head) + sum(content.size for content in contents)
    if end > BUFFER_BYTES:
        link.sendall(head)
        for content in contents:
            content.send(link.fileno())
        return
    at = len(head)
    _buffer[:at] = head
    for content in contents:
        at += os.preadv(content.file, [_buffer[at : at + content.size]], 0)
    try:
        link.sendall(_buffer[:end])
    finally:
        _buffer[:end] = _zeros[:end]


def take(file: int) -> bytes:
    """Return all of a file in memory and close it; only for processes that may have its content."""
    try:
        return os.pread(file, os.fstat(file).st_size, 0)
    finally:
        os.close(file)
