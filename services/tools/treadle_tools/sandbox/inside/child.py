"""A forked process whose output is captured, and which answers over a socket until a deadline.

Owns: the fork, its pipes, its resource limits. Invariants: the parent never blocks on what the child writes or does not
write, and never has it in its memory; the child holds no descriptor but its own pipe and socket; its memory is hidden
until it shows it itself.
"""

import contextlib
import io
import math
import os
import random
import resource
import select
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from treadle_tools.sandbox.inside import answers, frames, isolation
from treadle_tools.sandbox.inside.content import BUFFER_BYTES as READ_BYTES
from treadle_tools.sandbox.inside.content import Content

MOST_DESCRIPTORS = 256
CPU_GRACE_S = 1  # of CPU seconds above wall clock x cores, so that the wall clock ends the action first


@dataclass(frozen=True)
class Budget:
    """What the child may use. baseline_bytes: address space of the preloaded worker. cpu_s: None: no limit."""

    memory_bytes: int
    baseline_bytes: int
    file_bytes: int
    processes: int
    cpu_s: float | None

    def enforce(self) -> None:
        """Set the limits of this process, which cannot raise them again."""
        pairs = [
            (resource.RLIMIT_AS, self.baseline_bytes + self.memory_bytes),
            (resource.RLIMIT_FSIZE, self.file_bytes),
            (resource.RLIMIT_NPROC, self.processes),
            (resource.RLIMIT_NOFILE, MOST_DESCRIPTORS),
            (resource.RLIMIT_CORE, 0),
            (resource.RLIMIT_MSGQUEUE, 0),
            (resource.RLIMIT_MEMLOCK, 0),
        ]
        for which, most in pairs:
            hard = resource.getrlimit(which)[1]
            value = most if hard == resource.RLIM_INFINITY else min(most, hard)
            resource.setrlimit(which, (value, value))
        if self.cpu_s is not None:
            soft = math.ceil(self.cpu_s) + CPU_GRACE_S
            resource.setrlimit(resource.RLIMIT_CPU, (soft, soft + 1))


@dataclass(frozen=True)
class Event:
    """kind: of what came (answers.py); 0: nothing. late: the deadline has come. wait_status: the child has ended."""

    kind: int = 0
    late: bool = False
    wait_status: int | None = None


class Child:
    """One forked process, which runs `main(link)` and ends, whatever that does."""

    def __init__(self, main: Callable[[socket.socket], None]) -> None:
        output, their_output = os.pipe()
        self.link, theirs = socket.socketpair()
        self.pid = os.fork()
        if self.pid == 0:
            _run(main, theirs, their_output)
        os.close(their_output)
        theirs.close()
        os.set_blocking(output, False)
        self.link.setblocking(False)
        self._output = output
        self._ended = os.pidfd_open(self.pid)
        self._poll = select.poll()
        for descriptor in (self._output, self.link.fileno(), self._ended):
            self._poll.register(descriptor, select.POLLIN)

    def send(self, message: Mapping[str, object], *files: int) -> None:
        """Send a message to the child, and open files with it. Raises OSError where the child is gone."""
        self.link.setblocking(True)
        try:
            frames.send(self.link, message, *files)
        finally:
            self.link.setblocking(False)

    def next_event(self, deadline: float, printed: Content, answer: Content) -> Event:
        """What the child does next, until the deadline (time.monotonic). Adds its output to `printed`, and what it
        sends to `answer`, which is cleared. Raises FrameError where it sends something else than answers.py describes.
        """
        answer.clear(answers.MOST_BYTES)
        head, size = b"", 0
        while True:
            if len(head) == answers.HEAD.size and answer.size == size:
                self._drain(printed)
                return Event(kind=head[0])
            left = deadline - time.monotonic()
            if left <= 0:
                self._drain(printed)
                return Event(late=True)
            ready = {descriptor for descriptor, _ in self._poll.poll(math.ceil(left * 1e3))}
            if self._output in ready:
                self._drain(printed, at_most=READ_BYTES)
            if self.link.fileno() in ready:
                with contextlib.suppress(BlockingIOError, ConnectionResetError):
                    came = 1
                    if len(head) < answers.HEAD.size:
                        piece = self.link.recv(answers.HEAD.size - len(head))
                        head += piece
                        size, came = _size_of(head), len(piece)
                    if came and answer.size < size:
                        came = answer.receive(self.link, size - answer.size)
                    if came:
                        continue
                    self._poll.unregister(self.link.fileno())
            if self._ended in ready:
                self._drain(printed)
                return Event(wait_status=os.waitpid(self.pid, 0)[1])

    def kill(self) -> None:
        """Kill the process and its process group, and reap it."""
        for kill in (os.killpg, os.kill):
            with contextlib.suppress(ProcessLookupError):
                kill(self.pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self.pid, 0)
        os.close(self._ended)
        os.close(self._output)
        self.link.close()

    def _drain(self, printed: Content, at_most: int = 4 * READ_BYTES) -> None:
        while at_most > 0:
            try:
                came = printed.read(self._output)
            except BlockingIOError:
                return
            if not came:
                with contextlib.suppress(KeyError):
                    self._poll.unregister(self._output)
                return
            at_most -= came


def _size_of(head: bytes) -> int:
    """The size of an answer; 0 while its head is incomplete. Raises FrameError."""
    if len(head) < answers.HEAD.size:
        return 0
    kind, size = answers.HEAD.unpack(head)
    if kind not in (answers.ANSWER, answers.LAST, answers.ORDER) or size > answers.MOST_BYTES:
        raise frames.FrameError(f"an answer of kind {kind} and {size} bytes")
    return int(size)


def _run(main: Callable[[socket.socket], None], link: socket.socket, output: int) -> None:
    """Run the child's side. Never returns."""
    try:
        os.setsid()
        signal.signal(signal.SIGINT, signal.default_int_handler)
        nothing = os.open(os.devnull, os.O_RDONLY)
        for descriptor, standard in ((nothing, 0), (output, 1), (output, 2)):
            os.dup2(descriptor, standard)
        kept = link.fileno()
        os.closerange(3, kept)
        os.closerange(kept + 1, MOST_DESCRIPTORS * 4)
        isolation.set_dumpable(False)
        # Line buffering: a killed snippet still shows what it printed. A lone surrogate must not fail.
        sys.stdout, sys.stderr = _open_output(1), _open_output(2)
        _reseed()
        main(link)
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(0)


def _open_output(descriptor: int) -> io.TextIOWrapper:
    raw = io.FileIO(descriptor, "w", closefd=False)
    return io.TextIOWrapper(io.BufferedWriter(raw), encoding="utf-8", errors="backslashreplace", line_buffering=True)


def _reseed() -> None:
    """Seed the random generators anew: forks of one process must not share their random numbers."""
    random.seed()
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(int.from_bytes(os.urandom(4), "big"))  # with no number given it takes 7 ms
