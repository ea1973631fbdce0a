"""A Treadle service as a real child process."""

import atexit
import functools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from itertools import count
from pathlib import Path
from typing import Protocol

import psutil
from support.conditions import until
from support.sandbox import need_sandbox
from treadle_cli.mesh.processes import Ports
from treadle_cli.mesh.services import SERVICE_MODULES
from treadle_runtime.fork_server import ForkedProcess, ForkServer

END_DEADLINE_S = 60.0
HELD_WITHIN_S = 10.0  # a signal stops a thread within milliseconds, also on a busy machine
CLEAR_UP_S = 20.0  # after the test: SIGKILL does no harm then
SUPPORT = Path(__file__).parent
AS_USER = ("unshare", "--user", "--map-user=1000", "--map-group=1000")
PORTS = Ports()


@functools.cache
def fork_server() -> ForkServer:
    """Return the fork server of this run of the tests, which starts all services and clients; it is
    started at the first call."""
    server = ForkServer((*SERVICE_MODULES, "support.client_process"))
    atexit.register(server.close)
    return server


def hold_still(pid: int) -> None:
    """Stop a process by SIGSTOP, and return once each of its threads stands still: after the signal
    alone, those that run on other processors go on for a moment. Raises AssertionError where one
    does not stand still in time."""
    os.kill(pid, signal.SIGSTOP)
    ends_at = time.monotonic() + HELD_WITHIN_S
    while states := {_state_of(thread) for thread in Path(f"/proc/{pid}/task").iterdir()} - {"T"}:
        assert time.monotonic() < ends_at, f"threads of {pid} are in the states {states}"


def _state_of(thread: Path) -> str:
    """Return the state of a thread as a letter (proc(5)); T for one that has ended meanwhile."""
    try:
        return (thread / "stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return "T"


class ServiceProcess:
    """A started service. `address` is known once `ready` has returned."""

    def __init__(self, process: subprocess.Popen[bytes] | ForkedProcess, folder: Path) -> None:
        self._process = process
        self._folder = folder
        self.address = ""

    @property
    def pid(self) -> int:
        """Of the process, running or not."""
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        """The exit code; None while it runs."""
        return self._process.poll()

    async def ready(self, within_s: float) -> None:
        """Return once the service listens. Raises AssertionError with its stderr if it ends or
        takes too long."""
        file = self._folder / "ready.json"
        await self._until(lambda: file.exists() or self.returncode is not None, within_s)
        assert file.exists(), f"the service ended with {self.returncode}:\n{self.stderr_text()}"
        self.address = json.loads(file.read_text())["address"]

    def terminate(self) -> None:
        """SIGTERM: drain."""
        self._process.send_signal(signal.SIGTERM)

    def hang(self) -> None:
        """SIGSTOP: the system goes on accepting connections for it."""
        hold_still(self.pid)

    def kill(self) -> None:
        """SIGKILL, and reap."""
        self._process.kill()
        self._process.wait()

    async def wait(self, within_s: float = END_DEADLINE_S) -> int:
        """The exit code, once there is one. Raises AssertionError with stderr if it takes too
        long."""
        await self._until(lambda: self.returncode is not None, within_s)
        return self._process.wait()

    async def _until(self, condition: Callable[[], object], within_s: float) -> None:
        try:
            await until(condition, within_s)
        except AssertionError as late:
            self.kill()
            raise AssertionError(
                f"the service did not begin or end within {within_s} s:\n{self.stderr_text()}"
            ) from late

    def stderr_text(self) -> str:
        """All that the service has written to stderr."""
        return (self._folder / "stderr").read_text()

    async def end(self) -> None:
        """Make sure that it is gone: SIGTERM, and SIGKILL where that does not help."""
        if self.returncode is not None:
            return
        self._process.send_signal(signal.SIGCONT)
        self.terminate()
        try:
            await self.wait(CLEAR_UP_S)
        except AssertionError:
            self.kill()


def worker_number() -> int:
    """Return which worker of pytest-xdist this process is, from 0; 0 without workers."""
    return int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))


def free_port() -> int:
    """A port that no socket listens on, and that no other call in this run of the tests has
    returned: each worker of pytest-xdist has ports of its own."""
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    return next(port for _ in count() if (port := PORTS.choose(1)[0]) % workers == worker_number())


def command_line(process: psutil.Process) -> str:
    """The words of a process with blanks between; empty once it has ended, or waits only to be
    cleared up."""
    try:
        return "" if process.status() == psutil.STATUS_ZOMBIE else " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return ""


class StartService(Protocol):
    """The type of the fixture `start_service`."""

    async def __call__(
        self,
        module: str,
        env: dict[str, str] | None = None,
        *,
        service: str | None = None,
        ready_within_s: float = 60.0,
    ) -> ServiceProcess: ...


def clean_environment(extra: Mapping[str, str]) -> dict[str, str]:
    """This process's environment without any TREADLE_ variable, and `extra`, whose PYTHONPATH comes
    first."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("TREADLE_")}
    paths = [
        environment["PYTHONPATH"] for environment in (extra, kept) if environment.get("PYTHONPATH")
    ]
    return {**kept, **extra, "PYTHONPATH": os.pathsep.join(paths)}


def import_path(*more: Path) -> str:
    """PYTHONPATH of a service that tests start: this folder, `more`, and the tests' own."""
    return os.pathsep.join(
        map(str, (SUPPORT.parent, *more, *filter(None, [os.environ.get("PYTHONPATH")])))
    )


def start_process(
    module: str,
    service: str,
    env: Mapping[str, str],
    folder: Path,
    *,
    as_user: bool = False,
    seccomp: Path | None = None,
) -> ServiceProcess:
    """Start `python -m module` on a free port; its ready file and stderr go to `folder`. as_user:
    as a user who is not root and has no right over the machine, in a namespace where this user is
    another one. seccomp: under this profile of system calls, as in a container."""
    if service == "tools" and not env.keys() & {"TREADLE_TOOLS_BACKEND", "TREADLE_TOOLS_BWRAP"}:
        need_sandbox()
    folder.mkdir(parents=True, exist_ok=True)
    prefix = f"TREADLE_{service.upper()}_"
    own = {
        f"{prefix}LISTEN": "127.0.0.1:0",
        f"{prefix}READY_FILE": str(folder / "ready.json"),
        "PYTHONPATH": import_path(),
    }
    environment = clean_environment({**own, **env})
    process: subprocess.Popen[bytes] | ForkedProcess
    with (folder / "stderr").open("ab") as stderr:
        if seccomp is not None or (as_user and os.geteuid() == 0):
            user = AS_USER if as_user and os.geteuid() == 0 else ()
            under = () if seccomp is None else ("support.seccomp", str(seccomp))
            command = [*user, sys.executable, "-m", *under, module]
            process = subprocess.Popen(command, env=environment, stdout=stderr, stderr=stderr)
        else:
            process = fork_server().start(module, environment, stderr.fileno())
    return ServiceProcess(process, folder)
