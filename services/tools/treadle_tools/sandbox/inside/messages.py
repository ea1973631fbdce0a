"""Encode and decode what crosses the sandbox's wall: frames of JSON, and the answers of foreign
code.

Both sides import this.

A frame is 4 bytes of big-endian length and then JSON. An answer is a kind, a length and JSON: the
supervisor hands it on unread, with what the process has printed and with a header of its own; the
service, or the environment that orders a piece of Python, reads it. Invariant: neither side can
make the other hold more than MAX_FRAME_BYTES.
"""

import json
import os
import socket
import struct
from collections.abc import Mapping
from typing import Any

from treadle_tools.tool import Status

HEADER = struct.Struct(">I")
MOST_FILES = 2  # that come with one frame
# The largest arguments or output that pass; gRPC messages end at the same size
MAX_FRAME_BYTES = 16 * 1024 * 1024


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
    """Remove the first message from received bytes and return it; None where it is incomplete.

    Raises FrameError.
    """
    if len(received) < HEADER.size:
        return None
    end = HEADER.size + read_length(bytes(received[: HEADER.size]))
    if len(received) < end:
        return None
    body = bytes(received[HEADER.size : end])
    del received[:end]
    return decode(body)


def send(link: socket.socket, message: Mapping[str, Any], *files: int) -> None:
    """Send one frame over a blocking socket, and open files with it, which the caller still
    closes."""
    data = encode(message)
    if files:
        data = data[socket.send_fds(link, [data], list(files)) :]
    if data:  # an empty send fails where the other side has already answered and ended
        link.sendall(data)


def receive(link: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    """Receive the next message and the open files that came with it, which the caller closes; None
    at an orderly end.
    """
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


ANSWER_HEAD = struct.Struct(">BI")
# An outcome; that of an environment that does not open; an order to run Python
ANSWER, LAST, ORDER = 1, 2, 3
MOST_ANSWER_BYTES = 4 * 1024 * 1024  # data of 1 MiB, as JSON within JSON, and the output
MOST_ERROR_CHARS = 4096
NOT_VALID = "the tool's answer is not valid"
# Fields that an answer may have; the supervisor gives all others. The service reads the values
# (replies.py).
SAYS = ("status", "reward", "done", "data_json", "invalid", "retry_after_s")


def send_answer(link: socket.socket, kind: int, message: Mapping[str, Any]) -> None:
    """Send an answer or an order over a blocking socket.

    In place of a message that is too long, an error is sent.
    """
    # A lone surrogate stays legal on the wire
    body = json.dumps(message, separators=(",", ":")).encode("ascii")
    if len(body) > MOST_ANSWER_BYTES:
        error = f"an answer of {len(body)} bytes; {MOST_ANSWER_BYTES} are the most"
        body = json.dumps({"status": Status.TOOL_ERROR, "error": error}).encode("ascii")
        kind = ANSWER
    link.sendall(ANSWER_HEAD.pack(kind, len(body)) + body)


def size_of(header: Mapping[str, Any], name: str) -> int:
    """Return how many bytes of a content follow a header.

    Raises FrameError where it is too long to be read.
    """
    size = int(header[name])
    if not 0 <= size <= MAX_FRAME_BYTES:
        raise FrameError(f"{size} bytes of {name}; {MAX_FRAME_BYTES} are the most")
    return size


def read_answer(header: Mapping[str, Any], printed: bytes, answer: bytes) -> dict[str, Any]:
    """Return the supervisor's header with the result of the action: its output, status, error and
    the other fields of SAYS.

    printed: what the process wrote to its standard streams. answer: what it sent; not read where
    the supervisor knows better how the action ended (`status` of the header).
    """
    if "most_output" not in header:
        return {"id": ""}  # there is no last answer to recall
    reply = {
        name: value
        for name, value in header.items()
        if name not in ("printed", "answer", "most_output")
    }
    said: dict[str, Any] = {}
    if not reply.get("status"):
        try:
            event = json.loads(answer)
        except (ValueError, RecursionError):
            event = None
        fields: dict[str, Any] = event if isinstance(event, dict) else {"error": None}
        output, error = fields.get("output", ""), fields.get("error", "")
        if isinstance(output, str) and isinstance(error, str):
            said = {"status": "", **{name: fields[name] for name in SAYS if name in fields}}
            printed += output.encode("utf-8", "backslashreplace")
            reply["error"] = error[:MOST_ERROR_CHARS]
        else:
            reply |= {"status": Status.CRASHED, "error": NOT_VALID}
    most = int(header["most_output"])
    truncated = bool(reply.get("truncated")) or len(printed) > most
    text = printed[:most].decode("utf-8", "ignore" if truncated else "backslashreplace")
    reply["output"] = f"{text}\n[output cut at {most} bytes]" if truncated else text
    return {**said, **reply, "truncated": truncated}
