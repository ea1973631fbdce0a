"""What foreign code answers, from its process to who reads it: the supervisor in between looks at sizes alone.

A process sends a kind, a length and JSON. The supervisor hands that on unread, with what the process has printed and
with a header of its own; the service, or the environment that asked for a piece of Python, reads it.
"""

import json
import socket
import struct
from collections.abc import Mapping
from typing import Any

from treadle_tools.sandbox.inside.frames import MAX_FRAME_BYTES, FrameError
from treadle_tools.tool import Status

HEAD = struct.Struct(">BI")
ANSWER, LAST, ORDER = 1, 2, 3  # an outcome; that of an environment that does not open; an order to run Python
MOST_BYTES = 4 * 1024 * 1024  # data of 1 MiB, as JSON within JSON, and the output
MOST_ERROR_CHARS = 4096
NOT_VALID = "the tool's answer is not valid"
# What an answer may say; all else is said by the supervisor. The service reads the values (replies.py).
SAYS = ("status", "reward", "done", "data_json", "invalid", "retry_after_s")


def send(link: socket.socket, kind: int, message: Mapping[str, Any]) -> None:
    """Send an answer or an order over a blocking socket. One that is too long is not sent, but an error."""
    body = json.dumps(message, separators=(",", ":")).encode("ascii")  # a lone surrogate stays legal on the wire
    if len(body) > MOST_BYTES:
        error = f"an answer of {len(body)} bytes; {MOST_BYTES} are the most"
        body = json.dumps({"status": Status.TOOL_ERROR, "error": error}).encode("ascii")
        kind = ANSWER
    link.sendall(HEAD.pack(kind, len(body)) + body)


def size_of(header: Mapping[str, Any], name: str) -> int:
    """How many bytes of a content follow a header. Raises FrameError where it is too long to be read."""
    size = int(header[name])
    if not 0 <= size <= MAX_FRAME_BYTES:
        raise FrameError(f"{size} bytes of {name}; {MAX_FRAME_BYTES} are the most")
    return size


def read(header: Mapping[str, Any], printed: bytes, answer: bytes) -> dict[str, Any]:
    """The supervisor's header, with what came of the action: its output, status, error and what else SAYS names.

    printed: what the process wrote to its standard streams. answer: what it sent; not looked at where the supervisor
    knows better how the action ended (`status` of the header).
    """
    if "most_output" not in header:
        return {"id": ""}  # there is no last answer to recall
    reply = {name: value for name, value in header.items() if name not in ("printed", "answer", "most_output")}
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
