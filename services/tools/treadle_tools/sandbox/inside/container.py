"""The first program of a container or a pod: imports a tool once, then answers the service on its standard input.

Each message is one line: the body of a frame (ASCII JSON holds no line break). A service that comes after one which was
killed in the middle of a message begins with an empty line, and so finds the border again; it says hello with a word of
its own and passes over everything until it hears it back. Owns: process 1 of the container. Invariants: foreign code
never runs in this process and cannot reach its input or output, so nothing in the container speaks in its place; it
ends when it has heard nothing for `silence_s`, so that a container nobody remembers does not live for ever.
"""

import base64
import contextlib
import gc
import json
import os
import resource
import select
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from treadle_tools.sandbox.inside import cell, frames
from treadle_tools.sandbox.inside.supervisor import Supervisor
from treadle_tools.sandbox.inside.zygote import load

HELLO = "hello"
READ_BYTES = 1024 * 1024
# The kernel counts a user's processes over all containers alike; this container's own limit is the one that holds.
ANY_PROCESSES = 1 << 22
MOST_STATE_BYTES = frames.MAX_FRAME_BYTES * 3 // 4 - 65536  # of a snapshot: it travels within a message
CPU_USAGE, CPU_STAT = Path("/sys/fs/cgroup/cpuacct/cpuacct.usage"), Path("/sys/fs/cgroup/cpu.stat")
OOM_COUNTS = (Path("/sys/fs/cgroup/memory.events"), Path("/sys/fs/cgroup/memory/memory.oom_control"))


def main(config: Mapping[str, Any]) -> None:
    """config: as a zygote's, and {"silence_s": seconds}."""
    orders, answers = os.dup(0), os.dup(1)
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 0)
    os.dup2(nothing, 1)
    os.close(nothing)
    worker = replace(load(config), processes=ANY_PROCESSES)
    gc.collect()
    gc.freeze()  # as in a zygote: every action is a fork of this process
    cell.close_doors()
    Supervisor(worker).converse(Post(orders, answers, silence_s=float(config["silence_s"])))


class Post:
    """Requests that come as lines. orders, answers: descriptors."""

    def __init__(self, orders: int, answers: int, *, silence_s: float) -> None:
        self._orders = orders
        self._answers = answers
        self._silence_ms = int(silence_s * 1e3)
        self._received = bytearray()
        self._looked = 0
        self._state: int | None = None  # a copy of the file that the present request writes

    def next_request(self) -> tuple[dict[str, Any], int | None] | None:
        """The next request, and the file that it writes or reads; None at the end of the input, or of patience."""
        while (line := self._next_line()) is not None:
            with contextlib.suppress(frames.FrameError):  # half a message: its sender was killed
                request = frames.decode(line)
                if request.get("op") != HELLO:
                    return request, self._file_of(request)
                self.answer({HELLO: request[HELLO], "resident_bytes": resident_bytes()})
        return None

    def answer(self, message: Mapping[str, Any]) -> None:
        """Say it, together with what the kernel has counted here: kills for memory, CPU seconds."""
        told = {**message, **self._written(), "oom_kills": oom_kills(), "cpu_used_s": cpu_used_s()}
        left = memoryview(frames.encode(told)[frames.HEADER.size :] + b"\n")
        while left:
            left = left[os.write(self._answers, left) :]

    def _file_of(self, request: dict[str, Any]) -> int | None:
        """No file comes over a line: one in memory stands for it, and what is in it travels within the message."""
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

    def _written(self) -> dict[str, Any]:
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
        poll.register(self._orders, select.POLLIN)
        while True:
            end = self._received.find(b"\n", self._looked)
            if end >= 0:
                line = bytes(self._received[:end])
                del self._received[: end + 1]
                self._looked = 0
                return line
            self._looked = len(self._received)
            if self._looked > frames.MAX_FRAME_BYTES or not poll.poll(self._silence_ms):
                return None
            piece = os.read(self._orders, READ_BYTES)
            if not piece:
                return None
            self._received += piece


def resident_bytes() -> int:
    """Of this process: what the container's memory limit must leave room for before any action."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def oom_kills() -> int:
    """Processes that the kernel has killed in this container for its memory; 0 where it does not say."""
    for file in OOM_COUNTS:
        with contextlib.suppress(OSError):
            lines = [line.split() for line in file.read_text().splitlines()]
            return sum(int(count) for name, count in lines if name == "oom_kill")
    return 0


def cpu_used_s() -> float | None:
    """CPU seconds of this container's whole life; None where nobody counts."""
    with contextlib.suppress(OSError):
        return int(CPU_USAGE.read_text()) / 1e9
    with contextlib.suppress(OSError):
        lines = [line.split() for line in CPU_STAT.read_text().splitlines()]
        return next((int(count) / 1e6 for name, count in lines if name == "usage_usec"), None)
    return None


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
