"""Frames between the service and its workers: 4 bytes of big-endian length, then JSON. Read on both sides of the wall.

Invariant: a frame longer than MAX_FRAME_BYTES is refused on both sides, so that neither can be made to hold more.

Whom a cell talks to: lines that the keeper sends in over the cell's control socket, the newest alone.

Owns: the present line. Invariants: a request that was not read whole never happened, and an answer that could not be
sent whole is still in the supervisor's hands; the next line starts at the border of a frame."""

import contextlib
import json
import os
import select
import socket
import struct
from collections.abc import Mapping
from typing import Any

HEADER = struct.Struct(">I")
MAX_FRAME_BYTES = 16 * 1024 * 1024  # the largest arguments or output that pass; gRPC messages end at the same size


class FrameError(Exception):
    """The other side ended in the middle of a frame, or sent what is no frame."""


def encode(message: Mapping[str, Any]) -> bytes:
    """One frame. Raises FrameError where it would be too long."""
    # ASCII JSON: a lone surrogate in a tool's output stays legal on the wire.
    body = json.dumps(message, separators=(",", ":")).encode("ascii")
    if len(body) > MAX_FRAME_BYTES:
        raise FrameError(f"a frame of {len(body)} bytes; {MAX_FRAME_BYTES} are the most")
    return HEADER.pack(len(body)) + body


def length_of(header: bytes) -> int:
    """The length a header announces. Raises FrameError where it is too long."""
    (length,) = HEADER.unpack(header)
    if length > MAX_FRAME_BYTES:
        raise FrameError(f"a frame of {length} bytes; {MAX_FRAME_BYTES} are the most")
    return int(length)


def decode(body: bytes) -> dict[str, Any]:
    """The message of a frame's body. Raises FrameError unless it is a JSON object."""
    try:
        message = json.loads(body)
    except ValueError as error:
        raise FrameError(f"a frame that is no JSON: {error}") from error
    if not isinstance(message, dict):
        raise FrameError("a frame that is no JSON object")
    return message


def taken(received: bytearray) -> dict[str, Any] | None:
    """The first message of what has come in, taken out of it; None where it is not all there. Raises FrameError."""
    if len(received) < HEADER.size:
        return None
    end = HEADER.size + length_of(bytes(received[: HEADER.size]))
    if len(received) < end:
        return None
    body = bytes(received[HEADER.size : end])
    del received[:end]
    return decode(body)


def send(link: socket.socket, message: Mapping[str, Any], file: int | None = None) -> None:
    """Send one frame over a blocking socket, and an open file with it, which stays the caller's."""
    data = encode(message)
    if file is not None:
        data = data[socket.send_fds(link, [data], [file]) :]
    if data:  # an empty send fails where the other side has answered, and is gone, already
        link.sendall(data)


def receive(link: socket.socket) -> dict[str, Any] | None:
    """The next message of a blocking socket; None where the other side has closed it between frames."""
    received = receive_with_file(link)
    if received is None:
        return None
    message, file = received
    if file is not None:
        os.close(file)
    return message


def receive_with_file(link: socket.socket) -> tuple[dict[str, Any], int | None] | None:
    """The same, with the open file that came with the message, which is the caller's."""
    header, files, _, _ = socket.recv_fds(link, HEADER.size, 1, socket.MSG_CMSG_CLOEXEC)
    if not header:
        return None
    file = files[0] if files else None
    try:
        header += _exactly(link, HEADER.size - len(header))
        if len(header) < HEADER.size:
            raise FrameError("the other side ended in a header")
        length = length_of(header)
        body = _exactly(link, length)
        if len(body) < length:
            raise FrameError("the other side ended in a frame")
        return decode(body), file
    except BaseException:
        if file is not None:
            os.close(file)
        raise


def _exactly(link: socket.socket, count: int) -> bytes:
    parts = bytearray()
    while len(parts) < count:
        piece = link.recv(min(count - len(parts), 1024 * 1024))
        if not piece:
            break
        parts += piece
    return bytes(parts)


LONGEST_ORDER_BYTES = 64


class Lines:
    """See the module. control: the keeper's socket; its end is the cell's."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._line: socket.socket | None = None

    def next_request(self) -> tuple[dict[str, Any], int | None] | None:
        """The next request on the present line, and the open file that came with it, which is the caller's. None where
        the keeper has let go.
        """
        while True:
            poll = select.poll()
            poll.register(self._control, select.POLLIN)
            if self._line is not None:
                poll.register(self._line, select.POLLIN)
            ready = {descriptor for descriptor, _ in poll.poll()}
            if self._control.fileno() in ready:
                if not self._changed():
                    return None
            elif self._line is not None and (request := self._received(self._line)) is not None:
                return request

    def answer(self, message: Mapping[str, Any]) -> None:
        """Say it on the present line, if somebody listens there."""
        if self._line is not None:
            try:
                send(self._line, message)
            except OSError:
                self._drop()

    def _changed(self) -> bool:
        """Take the line that the keeper sends. Whether it did."""
        try:
            order, descriptors, _, _ = socket.recv_fds(self._control, LONGEST_ORDER_BYTES, 1)
        except OSError:
            return False
        if not order:
            return False
        self._drop()
        self._line = socket.socket(fileno=descriptors[0])
        return True

    def _received(self, line: socket.socket) -> tuple[dict[str, Any], int | None] | None:
        with contextlib.suppress(OSError, FrameError):
            if (request := receive_with_file(line)) is not None:
                return request
        self._drop()
        return None

    def _drop(self) -> None:
        if self._line is not None:
            self._line.close()
            self._line = None
