"""A forked process whose output is captured and which answers over a link of frames, until a deadline.

Owns: the fork, its pipes, its resource limits. Invariants: the parent never blocks on what the child writes or does not
write; the child holds no descriptor but its own pipe and link, and no other process may look into its memory until it
says so itself.

What a call has left in its cell: removes it, so that the next call finds the cell as the first one did.

Runs in process 1, which no foreign code can look into or stop. Invariant: what cannot be removed is named, and then
nothing runs in that cell again."""

import contextlib
import io
import math
import os
import random
import resource
import select
import shutil
import signal
import socket
import stat
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from treadle_tools.sandbox.inside import frames, kernel

READ_BYTES = 64 * 1024  # a pipe's whole buffer at a time
MOST_DESCRIPTORS = 256
CPU_GRACE_S = 1  # of CPU seconds over wall clock x cores, so that the wall clock speaks first


@dataclass(frozen=True)
class Budget:
    """What the child may use. baseline_bytes: address space that the preloaded worker takes before anything runs."""

    memory_bytes: int
    baseline_bytes: int
    file_bytes: int
    processes: int
    cpu_s: float | None  # None where wall clock alone bounds it

    def enforce(self) -> None:
        """Set the limits of this process, for good."""
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


class Captured:
    """The first `most` bytes of an output; whether there was more."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._bytes = bytearray()
        self.cut = False

    def add(self, piece: bytes) -> None:
        """Keep what still fits."""
        room = self._most - len(self._bytes)
        self._bytes += piece[:room]
        self.cut = self.cut or len(piece) > room

    def text(self) -> str:
        """What was kept, and a line that says so where something was cut."""
        text = self._bytes.decode("utf-8", "ignore" if self.cut else "backslashreplace")
        return f"{text}\n[output cut at {self._most} bytes]" if self.cut else text


@dataclass(frozen=True)
class Exited:
    """The child has ended. wait_status: as of waitpid."""

    wait_status: int


class TimedOut:
    """The deadline has passed; the child still runs."""


Event = dict[str, object] | Exited | TimedOut


class Child:
    """One forked process. `main(link)` runs in it; whatever it does, the process ends after it."""

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
        self._received = bytearray()
        self._poll = select.poll()
        for descriptor in (self._output, self.link.fileno(), self._ended):
            self._poll.register(descriptor, select.POLLIN)

    def send(self, message: dict[str, object], file: int | None = None) -> None:
        """Send a frame to the child, and an open file with it. Raises OSError where it is gone."""
        self.link.setblocking(True)
        try:
            frames.send(self.link, message, file)
        finally:
            self.link.setblocking(False)

    def next_event(self, deadline: float, captured: Captured) -> Event:
        """The next frame, the end, or the deadline (time.monotonic); output up to then goes to `captured`.

        Raises FrameError where the child sends what is no frame.
        """
        while True:
            message = frames.taken(self._received)
            if message is not None:
                self._drain(captured)
                return message
            left = deadline - time.monotonic()
            if left <= 0:
                self._drain(captured)
                return TimedOut()
            ready = {descriptor for descriptor, _ in self._poll.poll(math.ceil(left * 1e3))}
            if self._output in ready:
                self._drain(captured, at_most=READ_BYTES)
            if self.link.fileno() in ready and self._receive():
                continue
            if self._ended in ready:
                self._drain(captured)
                return Exited(os.waitpid(self.pid, 0)[1])

    def kill(self) -> None:
        """Kill the process and what it left in its process group, and reap it."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self.pid, 0)
        os.close(self._ended)
        os.close(self._output)
        self.link.close()

    def _receive(self) -> bool:
        try:
            piece = self.link.recv(READ_BYTES)
        except (BlockingIOError, ConnectionResetError):
            return False
        if not piece:
            self._poll.unregister(self.link.fileno())
        self._received += piece
        return bool(piece)

    def _drain(self, captured: Captured, at_most: int = 4 * READ_BYTES) -> None:
        while at_most > 0:
            try:
                piece = os.read(self._output, READ_BYTES)
            except BlockingIOError:
                return
            if not piece:
                with contextlib.suppress(KeyError):
                    self._poll.unregister(self._output)
                return
            captured.add(piece)
            at_most -= len(piece)


def _run(main: Callable[[socket.socket], None], link: socket.socket, output: int) -> None:
    """The child's side: never returns."""
    try:
        os.setsid()
        signal.signal(signal.SIGINT, signal.default_int_handler)
        nothing = os.open(os.devnull, os.O_RDONLY)
        for descriptor, standard in ((nothing, 0), (output, 1), (output, 2)):
            os.dup2(descriptor, standard)
        kept = link.fileno()
        os.closerange(3, kept)
        os.closerange(kept + 1, MOST_DESCRIPTORS * 4)
        kernel.set_dumpable(False)
        # A killed snippet still shows what it printed; a lone surrogate is no reason to fail.
        sys.stdout, sys.stderr = _printing_to(1), _printing_to(2)
        reseed()
        main(link)
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(0)


def _printing_to(descriptor: int) -> io.TextIOWrapper:
    raw = io.FileIO(descriptor, "w", closefd=False)
    return io.TextIOWrapper(io.BufferedWriter(raw), encoding="utf-8", errors="backslashreplace", line_buffering=True)


def reseed() -> None:
    """Forks of one process must not share their random numbers."""
    random.seed()
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(int.from_bytes(os.urandom(4), "big"))  # without a number it takes 7 ms to find one


FOLDERS = (Path("/tmp"), Path("/dev/shm"))  # all that a cell can write
FOLDER_MODE = 0o700
ALL_CORES = range(1024)  # the widest mask that the kernel takes from the standard library
LIMITS = tuple(getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_"))


@dataclass(frozen=True)
class Standing:
    """What processes of the same user may change of process 1, and its children inherit."""

    limits: tuple[tuple[int, int], ...]
    priority: int
    scheduler: int

    @classmethod
    def now(cls) -> "Standing":
        """Of this process."""
        limits = tuple(resource.getrlimit(which) for which in LIMITS)
        return cls(limits, os.getpriority(os.PRIO_PROCESS, 0), os.sched_getscheduler(0))


def removable() -> bool:
    """Whether this is process 1 of namespaces of its own, so that every other process is the calls'."""
    return os.getpid() == 1


def remove(before: Standing) -> str:
    """What could not be removed or put right; empty where the cell is as it was. before: of process 1, at its start.

    Only where `removable`: it kills every other process that it sees.
    """
    _kill_all()
    try:
        for folder in FOLDERS:
            _empty(folder)
        # A mask that was set here holds for every later child; within what the control group allows, all is as before.
        os.sched_setaffinity(0, ALL_CORES)
    except (OSError, RecursionError) as error:
        return f"left behind: {error}"
    if kernel.ipc_objects():
        return "left behind: System V IPC objects"
    return "" if Standing.now() == before else "process 1 has other limits than before"


def _kill_all() -> None:
    """Kill and reap every other process of the cell. One that forks meanwhile is killed before its fork is done."""
    with contextlib.suppress(ProcessLookupError):
        while True:
            os.kill(-1, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                while True:
                    os.waitpid(-1, 0)


def _empty(folder: Path) -> None:
    if stat.S_IMODE(folder.stat().st_mode) != FOLDER_MODE:
        folder.chmod(FOLDER_MODE)
    for each in folder.iterdir():
        if each.is_dir() and not each.is_symlink():
            shutil.rmtree(each)
        else:
            each.unlink()
    for name in os.listxattr(folder):
        os.removexattr(folder, name)
