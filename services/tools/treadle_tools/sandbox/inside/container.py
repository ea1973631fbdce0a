"""Run as the init of a container or a pod: import a tool once, then answer the service on standard
input and output.

A request is a line with its header and a line with its arguments (ASCII JSON holds no line break);
an answer is a line with its header, and behind it as many bytes as the header gives. A service may
be killed in the middle of a request: the next one begins with an empty line, which is a border,
then sends a hello with a random word and ignores everything until that word comes back. Invariants:
foreign code never runs in this process and cannot reach its input or output, so nothing in the
container answers in its place; it ends where no request comes for `silence_s`, so that a container
which no service knows any more ends too.
"""

import contextlib
import os
import resource
import select
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from treadle_tools.sandbox.inside import isolation, messages
from treadle_tools.sandbox.inside.content import Content
from treadle_tools.sandbox.inside.supervisor import (
    Request,
    Supervisor,
    Worker,
    hide_standard_streams,
)

HELLO = "hello"
READ_BYTES = 64 * 1024
LONGEST_HEADER_BYTES = 64 * 1024
# The kernel counts a user's processes over all containers together; the container's own limit holds
# instead.
ANY_PROCESSES = 1 << 22
CPU_USAGE, CPU_STAT = Path("/sys/fs/cgroup/cpuacct/cpuacct.usage"), Path("/sys/fs/cgroup/cpu.stat")
OOM_COUNTS = (
    Path("/sys/fs/cgroup/memory.events"),
    Path("/sys/fs/cgroup/memory/memory.oom_control"),
)


def main(config: Mapping[str, Any]) -> None:
    """Import the tool, then answer the service until no request comes for `silence_s`.

    config: that of a fork server, and {"silence_s": seconds}.
    """
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
        self._read = bytearray(READ_BYTES)
        self._buffer = memoryview(self._read)
        self._begin = self._end = 0  # what the buffer holds unread

    def next_request(self) -> Request | None:
        """Return the next request; None where no more comes within `silence_s`."""
        line = Content(LONGEST_HEADER_BYTES)
        try:
            while self._take_line(line):
                # Half a message: its sender was killed
                with contextlib.suppress(messages.FrameError):
                    header = messages.decode(os.pread(line.file, line.size, 0))
                    if header.get("op") == HELLO:
                        # A border here too: contents have no line break at their end
                        os.write(self._answers, b"\n")
                        self._write({HELLO: header[HELLO], "resident_bytes": read_resident_bytes()})
                    elif (request := self._receive(header)) is not None:
                        return request
            return None
        finally:
            line.close()

    def answer(self, header: Mapping[str, Any], printed: Content, answer: Content) -> None:
        """Send an answer, with the kernel's counts: processes killed for memory, CPU seconds. Both
        contents follow the header."""
        self._write(header)
        printed.send(self._answers)
        answer.send(self._answers)

    def _receive(self, header: dict[str, Any]) -> Request | None:
        """Read the body of a request and return the request; None where its message is cut."""
        body = Content(messages.MAX_FRAME_BYTES)
        if not self._take_line(body) or body.size != header["body"]:
            body.close()
            return None
        return Request(header, body)

    def _write(self, message: Mapping[str, Any]) -> None:
        whole = {**message, "oom_kills": count_oom_kills(), "cpu_used_s": read_cpu_used_s()}
        left = memoryview(messages.encode(whole)[messages.HEADER.size :] + b"\n")
        while left:
            left = left[os.write(self._answers, left) :]

    def _take_line(self, content: Content) -> bool:
        """Read one line, without its end, into `content`.

        Returns False where none comes in time, or it is too long.
        """
        content.clear()
        poll = select.poll()
        poll.register(self._requests, select.POLLIN)
        while True:
            buffered = self._read.find(b"\n", self._begin, self._end)
            content.add(self._buffer[self._begin : self._end if buffered < 0 else buffered])
            if buffered >= 0:
                self._begin = buffered + 1
                return not content.cut
            self._begin = self._end = 0
            if content.cut or not poll.poll(self._silence_ms):
                return False
            self._end = os.readv(self._requests, [self._buffer])
            if not self._end:
                return False


def read_resident_bytes() -> int:
    """Return the memory of this process, for which the container's limit must leave room beside any
    action."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def count_oom_kills() -> int:
    """Return how many processes the kernel has killed in this container for its memory; 0 where it
    does not count.
    """
    counts = [_read_counter(file, "oom_kill") for file in OOM_COUNTS]
    return next((count for count in counts if count is not None), 0)


def read_cpu_used_s() -> float | None:
    """Return the CPU seconds of this container's whole life; None where the kernel does not
    count."""
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
