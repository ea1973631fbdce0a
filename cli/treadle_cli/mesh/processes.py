"""Start child processes, wait until they are ready, and leave none behind.

`treadle up` and `treadle demo` run NATS, services and engines as children. Each runs in a session
of its own, so that Ctrl-C in a terminal reaches only this process, which stops the children in
order. A child is registered from the moment that it exists (starting is synchronous, so no
cancellation comes between). When the tree closes, however that happens, every process of every
session that it started is gone; if this process is killed, the parent-death signal (launcher.py)
and the guardian (guardian.py) do the same. Each child has a folder of its own for temporary files
(TMPDIR), which is removed when the child has ended. One asyncio loop owns a tree. Linux only.
"""

import asyncio
import contextlib
import itertools
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Self, TypeVar

from treadle_cli.exits import Failure
from treadle_cli.mesh import guardian

if TYPE_CHECKING:
    from treadle_runtime.fork_server import ForkedProcess, ForkServer

HOST = "127.0.0.1"
LOWEST = 10_000  # above the ports of well-known services
EPHEMERAL_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
EPHEMERAL_FROM = 32_768  # Linux' own default, where that file is not there
CANDIDATES = 1_000  # ports that are tried, at most
T = TypeVar("T")
STOP_GRACE_S = (
    5.0  # SIGTERM to SIGKILL: a drained service ends in under one second, an engine in about two
)
POLL_S = 0.05  # between looks at a readiness condition; a service is up in about half a second
TAIL_LINES = 12  # of a dead child's log: enough for the last line of a traceback and its frames
_HERE = Path(__file__).parent
MOST_RESERVATIONS = 100  # each is an open file
_reservations: deque[int] = deque()
_PLAIN_PYTHON = (sys.executable, "-I", "-S")  # without site-packages: 15 ms to start


class Ports:
    """Free ports of one address of this machine; none is chosen twice, since an earlier one may not
    be bound yet. Other processes that choose ports in this way leave out the newest of them."""

    def __init__(self, host: str = HOST) -> None:
        self.host = host
        self._chosen: set[int] = set()

    def choose(self, count: int) -> list[int]:
        """Return `count` different free ports, at random. Raises OSError if there are not so many.

        They lie below the range from which the kernel takes ports for outgoing connections and for
        port 0, so that no connection takes one of them before its service starts, however long an
        engine loads.
        """
        first = int(EPHEMERAL_RANGE.read_text().split()[0]) if EPHEMERAL_RANGE.exists() else 0
        among = range(LOWEST, first if first >= LOWEST + CANDIDATES else EPHEMERAL_FROM)
        new = (port for port in random.sample(among, CANDIDATES) if port not in self._chosen)
        free = (port for port in new if is_free(port, self.host) and _reserve(port))
        ports = list(itertools.islice(free, count))
        if len(ports) < count:
            among_text = f"from {among.start} to {among.stop - 1}"
            raise OSError(
                f"only {len(ports)} of {count} ports {among_text} are free on {self.host}"
            )
        self._chosen.update(ports)
        return ports


def _reserve(port: int) -> bool:
    """Keep other processes from choosing a port that is not bound yet; return whether none has
    chosen it. The kernel drops such a name with its process, and each network has its own."""
    name = socket.socket(socket.AF_UNIX)
    try:
        name.bind(f"\0treadle-port-{port}")
    except OSError:
        name.close()
        return False
    _reservations.append(name.detach())
    if len(_reservations) > MOST_RESERVATIONS:
        os.close(_reservations.popleft())
    return True


def is_free(port: int, host: str = HOST) -> bool:
    """Return whether no socket listens on this port of an address of this machine."""
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, port))
        except OSError:
            return False
        return True


class Child:
    """One child process. `exited` is set once it has ended and `returncode` is known."""

    def __init__(
        self,
        name: str,
        process: "subprocess.Popen[bytes] | ForkedProcess",
        log_path: Path,
        stage: int,
    ) -> None:
        self.name = name
        self.process = process
        self.pid = process.pid  # also the id of its session and process group
        self.log_path = log_path
        self.stage = stage
        self.exited = asyncio.Event()
        self.stopping = False  # its end is expected
        self.stop_signal = signal.SIGTERM

    @property
    def returncode(self) -> int | None:
        """Return the exit code: None while it runs, minus the signal's number where a signal ended
        it."""
        return self.process.returncode

    def tail(self, lines: int = TAIL_LINES) -> str:
        """Return the last lines of its log."""
        try:
            text = self.log_path.read_text(errors="replace")
        except FileNotFoundError:
            return ""
        return "\n".join(text.rstrip().splitlines()[-lines:])

    async def until(
        self, ready: Callable[[], Awaitable[T | None]], what: str, timeout_s: float
    ) -> T:
        """Call `ready` until it returns something, and return that. Raises ProcessError when the
        child ends first or time is up."""
        give_up_at = time.monotonic() + timeout_s
        while True:
            if self.exited.is_set():
                raise ProcessError(self, describe_exit(self.returncode))
            result = await ready()
            if result is not None:
                return result
            if time.monotonic() > give_up_at:
                raise ProcessError(self, f"showed no {what} within {timeout_s:.0f} s")
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.exited.wait(), POLL_S)


class ProcessError(Failure):
    """Raised where a child failed. The message names it and shows the end of its log."""

    def __init__(self, child: Child, problem: str) -> None:
        shown = "".join(f"\n    {line}" for line in child.tail().splitlines())
        super().__init__(f"{child.name} {problem} (log: {child.log_path}){shown}")


def describe_exit(returncode: int | None) -> str:
    """Return how a process ended: "ended with exit code 2", "was killed by SIGKILL"."""
    if returncode is not None and returncode < 0:
        return f"was killed by {signal.Signals(-returncode).name}"
    return f"ended with exit code {returncode}"


def _start_guardian(temp_folder: Path) -> "subprocess.Popen[bytes]":
    command = [*_PLAIN_PYTHON, str(_HERE / "guardian.py"), str(temp_folder)]
    return subprocess.Popen(command, bufsize=0, stdin=subprocess.PIPE, start_new_session=True)


class ProcessTree:
    """Starts children, and stops them all when the `async with` block ends.

    log_folder: the output of a child goes to NAME.log there. hurry: once set, stopping kills
    without a grace period. fork_server: starts the services; it belongs to the caller, who closes
    it after the tree. engine_forks: the same for engines on a CPU. on_death: called on the loop
    with each child that ends although nobody stopped it. ports: for the children.
    """

    def __init__(
        self,
        log_folder: Path,
        *,
        hurry: asyncio.Event | None = None,
        grace_s: float = STOP_GRACE_S,
        fork_server: "ForkServer | None" = None,
        engine_forks: "ForkServer | None" = None,
    ) -> None:
        self._log_folder = log_folder
        self._fork_server = fork_server
        self.engine_forks = engine_forks
        self._hurry = hurry or asyncio.Event()
        self._grace_s = grace_s
        self.on_death: Callable[[Child], None] = lambda child: None
        self.ports = Ports()
        # in the order of their start; those that ended with their whole session left
        self.children: list[Child] = []

    async def __aenter__(self) -> Self:
        self._log_folder.mkdir(parents=True, exist_ok=True)
        # short: it is in the paths of unix sockets
        self._temp_folder = Path(tempfile.mkdtemp(prefix="treadle-"))
        self._guardian = _start_guardian(self._temp_folder)
        return self

    async def __aexit__(self, *raised: object) -> None:
        # A cancellation that comes now (Ctrl-C while stopping) makes the stop hurry, and is raised
        # after it.
        async with asyncio.TaskGroup() as group:
            closing = group.create_task(self._close())
            cancelled = False
            while not closing.done():
                try:
                    await asyncio.shield(closing)
                except asyncio.CancelledError:
                    self._hurry.set()
                    cancelled = True
        if cancelled:
            raise asyncio.CancelledError

    def start(
        self,
        name: str,
        argv: Sequence[str],
        env: Mapping[str, str] = {},
        *,
        cores: Sequence[int] = (),
        stage: int = 0,
        inherit: bool = True,
    ) -> Child:
        """Start `argv` with `env` beside this process's own environment (`inherit`), pinned to
        `cores` where given.

        Higher stages are stopped first.
        """
        pinned = ",".join(str(core) for core in cores)
        launcher = [*_PLAIN_PYTHON, str(_HERE / "launcher.py"), str(os.getpid()), pinned]
        log_path = self._log_folder / f"{name}.log"
        with log_path.open("ab") as log_file:
            process = subprocess.Popen(
                [*launcher, *argv],
                env=self._environment(name, {**os.environ, **env} if inherit else env),
                stdin=subprocess.DEVNULL,
                stdout=log_file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        return self._watch(Child(name, process, log_path, stage), os.pidfd_open(process.pid))

    async def start_service(
        self,
        name: str,
        module: str,
        env: Mapping[str, str] = {},
        *,
        arguments: Sequence[str] = (),
        cores: Sequence[int] = (),
        stage: int = 0,
    ) -> Child:
        """Start `python -m module arguments` as `start` would, and as a fork where the tree has a
        fork server."""
        if self._fork_server is None:
            return self.start(
                name, [sys.executable, "-m", module, *arguments], env, cores=cores, stage=stage
            )
        await asyncio.to_thread(self._fork_server.wait_until_ready)
        whole_env = {**os.environ, **env}
        return self.fork(
            self._fork_server,
            name,
            module,
            whole_env,
            arguments=arguments,
            cores=cores,
            stage=stage,
        )

    def fork(
        self,
        fork_server: "ForkServer",
        name: str,
        module: str,
        env: Mapping[str, str],
        *,
        arguments: Sequence[str] = (),
        cores: Sequence[int] = (),
        stage: int = 0,
    ) -> Child:
        """Start `python -m module arguments` as a fork of `fork_server`, which is ready, with `env`
        as its whole environment."""
        log_path = self._log_folder / f"{name}.log"
        with log_path.open("ab") as log_file:
            process = fork_server.start(
                module,
                self._environment(name, env),
                log_file.fileno(),
                arguments=arguments,
                cores=cores,
                new_session=True,
            )
        return self._watch(Child(name, process, log_path, stage), os.dup(process.exit_fd))

    def _environment(self, name: str, env: Mapping[str, str]) -> dict[str, str]:
        temp_folder = self._temp_folder / name
        temp_folder.mkdir(exist_ok=True)
        return {**env, "TMPDIR": str(temp_folder)}

    def _watch(self, child: Child, exit_fd: int) -> Child:
        self.children.append(child)
        self._inform_guardian(f"+{child.pid}")
        asyncio.get_running_loop().add_reader(exit_fd, self._on_exit, child, exit_fd)
        return child

    def make_folder(self, parent: Path) -> Path:
        """Make a folder in `parent` for what the children share; it is removed with the tree,
        however that ends."""
        folder = Path(tempfile.mkdtemp(prefix="treadle-", dir=parent)).absolute()
        self._inform_guardian(str(folder))
        return folder

    async def stop(self, children: Sequence[Child]) -> None:
        """Send each child its stop signal, then SIGKILL to what is left after `grace_s` (at once
        under `hurry`). Return when all ended."""
        waiting = [child for child in children if not child.exited.is_set()]
        for child in waiting:
            child.stopping = True
            with contextlib.suppress(ProcessLookupError):
                os.kill(child.pid, child.stop_signal)
        give_up_at = time.monotonic() + self._grace_s
        while any(not child.exited.is_set() for child in waiting):
            if self._hurry.is_set() or time.monotonic() > give_up_at:
                await asyncio.to_thread(guardian.kill_sessions, {child.pid for child in waiting})
            await asyncio.sleep(POLL_S)

    async def _close(self) -> None:
        for stage in sorted({child.stage for child in self.children}, reverse=True):
            await self.stop([child for child in self.children if child.stage == stage])
        await asyncio.to_thread(guardian.kill_sessions, {child.pid for child in self.children})
        # closes its pipe; it removes the temporary files
        await asyncio.to_thread(self._guardian.communicate)

    def _on_exit(self, child: Child, exit_fd: int) -> None:
        asyncio.get_running_loop().remove_reader(exit_fd)
        os.close(exit_fd)
        child.process.poll()
        # an engine's workers outlive a killed engine by a moment
        left = guardian.session_members(child.pid)
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        shutil.rmtree(self._temp_folder / child.name, ignore_errors=True)
        if not left:
            self.children.remove(child)
            self._inform_guardian(f"-{child.pid}")
        child.exited.set()
        if not child.stopping:
            self.on_death(child)

    def _inform_guardian(self, line: str) -> None:
        assert self._guardian.stdin is not None
        with contextlib.suppress(
            BrokenPipeError
        ):  # the guardian was killed: closing the tree still stops everything
            self._guardian.stdin.write(f"{line}\n".encode())
