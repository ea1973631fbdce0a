"""The init of a container or a pod: imports a tool once, then answers the service on its standard input and output.

Each message is one line: the body of a frame (ASCII JSON holds no line break). A service may be killed in the middle of
a message: the next one begins with an empty line, which is a border, then says hello with a random word and ignores
everything until that word comes back. Invariants: foreign code never runs in this process and cannot reach its input or
output, so nothing in the container answers in its place; it ends where no request comes for `silence_s`, so that a
container which no service knows any more ends too.
"""

import base64
import contextlib
import os
import resource
import select
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from treadle_tools.sandbox.inside import frames, isolation
from treadle_tools.sandbox.inside.supervisor import Supervisor, Worker, hide_standard_streams

HELLO = "hello"
READ_BYTES = 1024 * 1024
# The kernel counts a user's processes over all containers together; the container's own limit holds instead.
ANY_PROCESSES = 1 << 22
MOST_STATE_BYTES = frames.MAX_FRAME_BYTES * 3 // 4 - 65536  # of a snapshot: it travels within a message
CPU_USAGE, CPU_STAT = Path("/sys/fs/cgroup/cpuacct/cpuacct.usage"), Path("/sys/fs/cgroup/cpu.stat")
OOM_COUNTS = (Path("/sys/fs/cgroup/memory.events"), Path("/sys/fs/cgroup/memory/memory.oom_control"))


def main(config: Mapping[str, Any]) -> None:
    """config: that of a fork server, and {"silence_s": seconds}."""
    requests, answers = hide_standard_streams()
    worker = replace(Worker.load(config), processes=ANY_PROCESSES)
    isolation.drop_privileges()
    Supervisor(worker).serve(LineRequests(requests, answers, silence_s=float(config["silence_s"])))


class LineRequests:
    """Requests that come as lines. requests, answers: descriptors."""

    def __init__(self, requests: int, answers: int, *, silence_s: float) -> None:
        self._requests = requests
        self._answers = answers
        self._silence_ms = int(silence_s * 1e3)
        self._received = bytearray()
        self._searched = 0
        self._state: int | None = None  # a copy of the file that the present request writes

    def next_request(self) -> tuple[dict[str, Any], int | None] | None:
        """The next request, and the file that it writes or reads; None where no more comes within `silence_s`."""
        while (line := self._next_line()) is not None:
            with contextlib.suppress(frames.FrameError):  # half a message: its sender was killed
                request = frames.decode(line)
                if request.get("op") != HELLO:
                    return request, self._open_file(request)
                self.answer({HELLO: request[HELLO], "resident_bytes": read_resident_bytes()})
        return None

    def answer(self, message: Mapping[str, Any]) -> None:
        """Send an answer, with what the kernel has counted here: processes killed for memory, CPU seconds."""
        whole = {**message, **self._read_state(), "oom_kills": count_oom_kills(), "cpu_used_s": read_cpu_used_s()}
        left = memoryview(frames.encode(whole)[frames.HEADER.size :] + b"\n")
        while left:
            left = left[os.write(self._answers, left) :]

    def _open_file(self, request: dict[str, Any]) -> int | None:
        """A file in memory for a snapshot, whose content travels within a message: no descriptor can reach here."""
        if request["op"] not in ("snapshot", "restore"):
            return None
        file = os.memfd_create("state")
        if request["op"] == "snapshot":
            self._state = os.dup(file)
        else:
            with os.fdopen(os.dup(file), "wb") as state:
                state.write(base64.b64decode(request.pop("file")))
            os.lseek(file, 0, os.SEEK_SET)
        return file

    def _read_state(self) -> dict[str, Any]:
        if self._state is None:
            return {}
        with os.fdopen(self._state, "rb") as state:
            self._state = None
            state.seek(0)
            body = state.read()
        if len(body) > MOST_STATE_BYTES:
            error = f"a state of {len(body)} bytes; {MOST_STATE_BYTES} are the most that leave a container"
            return {"status": "tool_error", "error": error}
        return {"file": base64.b64encode(body).decode("ascii")}

    def _next_line(self) -> bytes | None:
        poll = select.poll()
        poll.register(self._requests, select.POLLIN)
        while True:
            end = self._received.find(b"\n", self._searched)
            if end >= 0:
                line = bytes(self._received[:end])
                del self._received[: end + 1]
                self._searched = 0
                return line
            self._searched = len(self._received)
            if self._searched > frames.MAX_FRAME_BYTES or not poll.poll(self._silence_ms):
                return None
            if not (piece := os.read(self._requests, READ_BYTES)):
                return None
            self._received += piece


def read_resident_bytes() -> int:
    """Memory of this process, which the container's limit must leave room for beside any action."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def count_oom_kills() -> int:
    """Processes that the kernel has killed in this container for its memory; 0 where it does not count."""
    counts = [_read_counter(file, "oom_kill") for file in OOM_COUNTS]
    return next((count for count in counts if count is not None), 0)


def read_cpu_used_s() -> float | None:
    """CPU seconds of this container's whole life; None where the kernel does not count."""
    with contextlib.suppress(OSError):
        return int(CPU_USAGE.read_text()) / 1e9
    used_us = _read_counter(CPU_STAT, "usage_usec")
    return None if used_us is None else used_us / 1e6


def _read_counter(file: Path, name: str) -> int | None:
    with contextlib.suppress(OSError):
        for line in file.read_text().splitlines():
            if line.startswith(f"{name} "):
                return int(line.split()[1])
    return None
