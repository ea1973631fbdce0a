"""Start services as forks of one process that has imported them already.

Importing a service takes a second of processor time, and a mesh or a test run starts many services.
A fork server imports them once. Each service that it starts is a process of its own: its own pid,
environment, output, signals and exit code. The fork server only imports, forks and collects exit
codes: it has no thread and opens no connection, so that a fork of it is safe. multiprocessing's
fork server was tried: it runs the caller's main module in every child, and leaves files behind when
its caller is killed.

The caller (`ForkServer`) and the fork server (`python -m treadle_runtime.fork_server`) share a
socket. The first message names the modules to import. Each later one is an `Order` with two file
descriptors: the output of the child, and the end of a pipe for its exit code. The answer to an
order is the pid. When the caller ends in any way, the socket closes, the fork server ends, and the
kernel kills its children. Linux only.
"""

import atexit
import contextlib
import ctypes
import gc
import importlib
import json
import os
import runpy
import selectors
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import setproctitle

PR_SET_PDEATHSIG = 1  # prctl(2)
MOST_REQUEST_BYTES = 1 << 20  # an environment is a few kilobytes
EXIT_STATUS = struct.Struct("i")
PID = struct.Struct("i")
READY = PID.pack(0)  # the first message of the fork server: all modules are imported
# exit code of a child whose fork server is gone, since the kernel kills it then
KILLED_EXIT_CODE = -signal.SIGKILL
# gRPC's own fork handlers only complain in a process that has not used gRPC. The variable is read
# when gRPC is imported.
WITHOUT_FORK_HANDLERS = {"GRPC_ENABLE_FORK_SUPPORT": "false"}


class ForkedProcess:
    """Process that a fork server started; the methods are those of `subprocess.Popen`."""

    def __init__(self, pid: int, exit_fd: int) -> None:
        self.pid = pid
        # The pipe becomes readable when the process has ended.
        self.exit_fd = exit_fd
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Return the exit code (minus the signal's number where a signal ended it), or None while
        the process runs."""
        if self.returncode is None and self._has_ended():
            self.wait()
        return self.returncode

    def wait(self) -> int:
        """Return the exit code, once there is one."""
        if self.returncode is None:
            status = os.read(self.exit_fd, EXIT_STATUS.size)
            os.close(self.exit_fd)
            whole = len(status) == EXIT_STATUS.size
            self.returncode = (
                os.waitstatus_to_exitcode(*EXIT_STATUS.unpack(status))
                if whole
                else KILLED_EXIT_CODE
            )
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send a signal to the process if it still runs."""
        # Between its end and the arrival of its exit code the process is unknown to the kernel.
        with contextlib.suppress(ProcessLookupError):
            if self.poll() is None:
                os.kill(self.pid, number)

    def terminate(self) -> None:
        """Send SIGTERM if the process still runs."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL if the process still runs."""
        self.send_signal(signal.SIGKILL)

    def _has_ended(self) -> bool:
        with selectors.DefaultSelector() as selector:
            selector.register(self.exit_fd, selectors.EVENT_READ)
            return bool(selector.select(0))


class ForkServer:
    """Fork server with these modules imported, as its caller sees it. Close it, or use it in a
    `with` block.

    python, env: the Python of another virtual environment that has setproctitle, and the
    environment variables with which the modules are imported there; by default the fork server
    imports as its caller does. output: what `subprocess.Popen` takes as the fork server's own
    stdout and stderr.
    """

    def __init__(
        self,
        modules: Sequence[str],
        *,
        python: str = sys.executable,
        env: Mapping[str, str] | None = None,
        output: int | None = None,
    ) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, MOST_REQUEST_BYTES)
        self._is_ready = False
        self._lock = threading.Lock()
        with theirs:
            # By path: it needs nothing else of this package. -P: and imports nothing beside it.
            command = [python, "-P", __file__, str(theirs.fileno())]
            if env is None:
                env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
            self._process = subprocess.Popen(
                command,
                env={**env, **WITHOUT_FORK_HANDLERS},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # Ctrl-C in a terminal is for the caller
            )
        # `wait_until_ready` reports a fork server that has ended already.
        with contextlib.suppress(BrokenPipeError):
            self._socket.send(json.dumps(list(modules)).encode())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def pid(self) -> int:
        """Return the pid of the fork server itself."""
        return self._process.pid

    def wait_until_ready(self) -> None:
        """Wait until all modules are imported. Raises ChildProcessError where the fork server is
        gone."""
        with self._lock:
            if not self._is_ready:
                self._is_ready = self._receive() == READY

    def start(
        self,
        module: str,
        env: Mapping[str, str],
        output_fd: int,
        *,
        arguments: Sequence[str] = (),
        cwd: str = "",
        cores: Sequence[int] = (),
        new_session: bool = False,
    ) -> ForkedProcess:
        """Run `python -m module arguments` with exactly this environment, its stdout and stderr at
        `output_fd`.

        cwd: empty for the caller's present folder. cores: the cores to which the process is pinned;
        empty for all. new_session: whether the process leads a session of its own. Waits until the
        modules are imported. Raises ChildProcessError where the fork server is gone.
        """
        order = Order(
            module, tuple(arguments), dict(env), cwd or str(Path.cwd()), tuple(cores), new_session
        )
        exit_fd, their_exit_fd = os.pipe()
        try:
            self.wait_until_ready()
            with self._lock:
                with contextlib.suppress(BrokenPipeError):  # `_receive` reports that it has ended
                    socket.send_fds(self._socket, [order.to_json()], [output_fd, their_exit_fd])
                (pid,) = PID.unpack(self._receive())
        except OSError:
            os.close(exit_fd)
            raise
        finally:
            os.close(their_exit_fd)
        return ForkedProcess(pid, exit_fd)

    def close(self) -> None:
        """End the fork server; the kernel kills all processes that it started."""
        self._socket.close()
        self._process.kill()  # it may still import
        self._process.wait()

    def _receive(self) -> bytes:
        try:
            answer = self._socket.recv(PID.size)
        except ConnectionResetError:  # it has ended with an unread message
            answer = b""
        if not answer:
            raise ChildProcessError(f"the fork server ended with {self._process.wait()}")
        return answer


@dataclass(frozen=True)
class Order:
    """Description of a process that the fork server is to start: the arguments of
    `ForkServer.start`."""

    module: str
    arguments: Sequence[str]
    env: Mapping[str, str]
    cwd: str
    cores: Sequence[int]
    new_session: bool

    def to_json(self) -> bytes:
        """Return the message that `from_json` reads."""
        return json.dumps(vars(self)).encode()

    @classmethod
    def from_json(cls, message: bytes) -> "Order":
        """Read a message of `to_json`."""
        return cls(**json.loads(message))


def serve(orders: socket.socket) -> tuple[Order, int] | None:
    """Fork for each order that arrives. Return None in the fork server once its caller is gone, and
    the order and its output in each child."""
    server_pid = os.getpid()
    exit_fds: dict[int, tuple[int, int]] = {}  # by pidfd: the pid, and where its exit status goes
    with orders, selectors.DefaultSelector() as selector:
        selector.register(orders, selectors.EVENT_READ)
        orders.send(READY)
        while True:
            for key, _ in selector.select():
                if key.fileobj is not orders:
                    selector.unregister(key.fd)
                    _report_exit(key.fd, *exit_fds.pop(key.fd))
                    continue
                message, fds, *_ = socket.recv_fds(orders, MOST_REQUEST_BYTES, 2)
                if not message:
                    return None
                output_fd, exit_fd = fds
                pid = os.fork()
                if pid == 0:
                    for other_pidfd, (_, other_exit_fd) in exit_fds.items():
                        os.close(other_pidfd)
                        os.close(other_exit_fd)
                    os.close(exit_fd)
                    _die_with(server_pid)
                    return Order.from_json(message), output_fd
                os.close(output_fd)
                pidfd = os.pidfd_open(pid)
                exit_fds[pidfd] = pid, exit_fd
                selector.register(pidfd, selectors.EVENT_READ)
                orders.send(PID.pack(pid))


def _report_exit(pidfd: int, pid: int, exit_fd: int) -> None:
    _, status = os.waitpid(pid, 0)
    with contextlib.suppress(BrokenPipeError):  # the caller has forgotten this process
        os.write(exit_fd, EXIT_STATUS.pack(status))
    os.close(exit_fd)
    os.close(pidfd)


def _die_with(parent_pid: int) -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:  # the parent died before prctl took effect
        os._exit(KILLED_EXIT_CODE)


def become(order: Order, output_fd: int) -> None:
    """Turn this child into the process that was ordered, and run its module to the end."""
    if order.new_session:
        os.setsid()
    if order.cores:
        os.sched_setaffinity(0, order.cores)
    sys.stdout.flush()
    os.dup2(output_fd, sys.stdout.fileno())
    os.dup2(output_fd, sys.stderr.fileno())
    os.close(output_fd)
    os.chdir(order.cwd)
    os.environ.clear()
    os.environ.update(order.env)
    tempfile.tempdir = None  # an import may have asked for it under another TMPDIR
    sys.path[:0] = [
        path for path in order.env.get("PYTHONPATH", "").split(os.pathsep) if path not in sys.path
    ]
    setproctitle.setproctitle(" ".join([sys.executable, "-m", order.module, *order.arguments]))
    sys.argv = [order.module, *order.arguments]
    runpy.run_module(order.module, run_name="__main__", alter_sys=True)


def import_modules(names: Sequence[str]) -> None:
    """Import the modules, and leave their objects out of garbage collections, so that children
    share their memory.

    A module that cannot be imported is left out: the process that runs it reports why.
    """
    for name in names:
        try:
            importlib.import_module(name)
        except ImportError:
            continue
    gc.collect()
    gc.freeze()


class Ending:
    """End of a child, without the work of Python's own end: that deletes every module, so it
    writes to all memory that the child shares with the fork server (0.06 processor seconds)."""

    def __init__(self) -> None:
        self._exit_code: int | None = None
        # Python calls what is registered first as the last, after threads and other exit handlers.
        atexit.register(self._leave)

    @contextlib.contextmanager
    def follows(self) -> Iterator[None]:
        """End this process soon after the block, with the exit code that Python gives it."""
        try:
            yield
            self._exit_code = 0
        except SystemExit as ended:
            code = ended.code
            self._exit_code = code if isinstance(code, int) else int(code is not None)
            raise
        except Exception:
            self._exit_code = 1
            raise

    def _leave(self) -> None:
        if self._exit_code is not None:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(self._exit_code & 0xFF)


def main() -> None:
    """Import the modules that the first message names, then start processes until the caller is
    gone."""
    ending = Ending()
    _die_with(os.getppid())  # it may still import, and then reads nothing from the socket
    # its first call must come before `become`
    setproctitle.setproctitle(f"{sys.executable} {__file__}")
    orders = socket.socket(fileno=int(sys.argv[1]))
    import_modules(json.loads(orders.recv(MOST_REQUEST_BYTES)))
    ordered = serve(orders)
    if ordered is not None:
        with ending.follows():
            become(*ordered)


if __name__ == "__main__":
    main()
