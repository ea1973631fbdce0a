"""Encodes messages as frames, 4 bytes of big-endian length and then JSON, and sends and receives them over sockets.

Used on both sides of the sandbox's wall. Invariant: neither side can make the other hold more than MAX_FRAME_BYTES.
"""

import json
import os
import socket
import struct
from collections.abc import Mapping
from typing import Any

HEADER = struct.Struct(">I")
MOST_FILES = 2  # that come with one frame
MAX_FRAME_BYTES = 16 * 1024 * 1024  # the largest arguments or output that pass; gRPC messages end at the same size


class FrameError(Exception):
    """The other side ended in the middle of a frame, or sent something else than a frame."""


def encode(message: Mapping[str, Any]) -> bytes:
    """Make one frame. Raises FrameError where it would be too long."""
    # ASCII JSON: a lone surrogate in a tool's output stays legal on the wire.
    body = json.dumps(message, separators=(",", ":")).encode("ascii")
    if len(body) > MAX_FRAME_BYTES:
        raise FrameError(f"a frame of {len(body)} bytes; {MAX_FRAME_BYTES} are the most")
    return HEADER.pack(len(body)) + body


def read_length(header: bytes) -> int:
    """Read the length of a frame's body from its header. Raises FrameError where it is too long."""
    (length,) = HEADER.unpack(header)
    if length > MAX_FRAME_BYTES:
        raise FrameError(f"a frame of {length} bytes; {MAX_FRAME_BYTES} are the most")
    return int(length)


def decode(body: bytes) -> dict[str, Any]:
    """Decode a frame's body. Raises FrameError unless it is a JSON object."""
    try:
        message = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise FrameError(f"a frame that is not JSON: {error}") from error
    if not isinstance(message, dict):
        raise FrameError("a frame that is not a JSON object")
    return message


def take_message(received: bytearray) -> dict[str, Any] | None:
    """Remove the first message from received bytes and return it; None where it is incomplete. Raises FrameError."""
    if len(received) < HEADER.size:
        return None
    end = HEADER.size + read_length(bytes(received[: HEADER.size]))
    if len(received) < end:
        return None
    body = bytes(received[HEADER.size : end])
    del received[:end]
    return decode(body)


def send(link: socket.socket, message: Mapping[str, Any], *files: int) -> None:
    """Send one frame over a blocking socket, and open files with it, which the caller still closes."""
    data = encode(message)
    if files:
        data = data[socket.send_fds(link, [data], list(files)) :]
    if data:  # an empty send fails where the other side has already answered and ended
        link.sendall(data)


def receive(link: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    """Receive the next message and the open files that came with it, which the caller closes; None at an orderly
    end."""
    header, files, _, _ = socket.recv_fds(link, HEADER.size, MOST_FILES, socket.MSG_CMSG_CLOEXEC)
    if not header:
        return None
    try:
        header += _receive_exactly(link, HEADER.size - len(header))
        return decode(_receive_exactly(link, read_length(header))), list(files)
    except BaseException:
        for file in files:
            os.close(file)
        raise


def _receive_exactly(link: socket.socket, count: int) -> bytes:
    parts = bytearray()
    while len(parts) < count:
        if not (piece := link.recv(min(count - len(parts), 1024 * 1024))):
            raise FrameError("the other side ended in a frame")
        parts += piece
    return bytes(parts)
