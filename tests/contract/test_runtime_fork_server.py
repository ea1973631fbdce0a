"""A fork server with real children: each is a process like any other, and none outlives the fork
server."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from support.conditions import until
from treadle_runtime.fork_server import EXIT_STATUS, ForkedProcess, ForkServer

PROGRAM = """
import os, signal, sys, time
print(sys.argv[1:], os.environ.get("NAME"), "HOME" in os.environ, os.getcwd(), os.getsid(0) == os.getpid(), flush=True)
print("to stderr", file=sys.stderr, flush=True)
import json.decoder  # imported already
if sys.argv[1] == "exit":
    sys.exit(int(sys.argv[2]))
if sys.argv[1] == "raise":
    raise RuntimeError("on purpose")
time.sleep(1000)
"""
IMPORTING = """
import os, sys, time
from treadle_runtime.fork_server import ForkServer
server = ForkServer(["slow"], env={"PYTHONPATH": sys.argv[1]})
while not os.path.exists(sys.argv[1] + "/importing"):
    time.sleep(0.01)
print(server.pid, flush=True)
time.sleep(1000)
"""
SLOW = (
    "import pathlib, time; pathlib.Path(__file__).with_name('importing').touch(); time.sleep(1000)"
)
CALLER = """
import os, sys, time
from treadle_runtime.fork_server import ForkServer
server = ForkServer(["json"])
child = server.start("program", {"PYTHONPATH": sys.argv[1]}, 2, arguments=["sleep"])
print(server.pid, child.pid, flush=True)
time.sleep(1000)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "program.py").write_text(PROGRAM)
    return tmp_path


@pytest.fixture
def server() -> Iterator[ForkServer]:
    with ForkServer(["json", "no_such_module"]) as server:
        yield server


def start(
    server: ForkServer, folder: Path, *arguments: str, new_session: bool = False
) -> ForkedProcess:
    with (folder / "output").open("ab") as output:
        return server.start(
            "program",
            {"NAME": "treadle", "PYTHONPATH": str(folder)},
            output.fileno(),
            arguments=arguments,
            cwd=str(folder),
            new_session=new_session,
        )


def test_a_child_has_its_own_arguments_environment_folder_output_and_exit_code(
    server: ForkServer, folder: Path
) -> None:
    child = start(server, folder, "exit", "7", new_session=True)
    assert child.wait() == 7 and child.poll() == 7
    assert (
        folder / "output"
    ).read_text() == f"['exit', '7'] treadle False {folder} True\nto stderr\n"


def test_modules_are_imported_with_the_environment_that_is_given_and_a_child_has_its_own(
    folder: Path,
) -> None:
    (folder / "imported.py").write_text(
        "import os, tempfile\nname, temp = os.environ['NAME'], tempfile.gettempdir()\n"
    )
    (folder / "program.py").write_text(
        "import imported, os, tempfile\n"
        "print(imported.name, imported.temp, os.environ['NAME'], tempfile.gettempdir())\n"
    )
    theirs, own = folder / "theirs", folder / "own"
    theirs.mkdir()
    own.mkdir()
    env = {"PYTHONPATH": str(folder), "NAME": "server", "TMPDIR": str(theirs)}
    with (
        (folder / "output").open("ab") as output,
        ForkServer(["imported"], python=sys.executable, env=env) as server,
    ):
        environment = {**env, "NAME": "child", "TMPDIR": str(own)}
        assert server.start("program", environment, output.fileno()).wait() == 0
    assert (folder / "output").read_text() == f"server {theirs} child {own}\n"


def test_a_fork_server_that_still_imports_ends_at_once_when_it_is_closed(folder: Path) -> None:
    (folder / "program.py").write_text("import time\ntime.sleep(1000)\n")
    server = ForkServer(["program"], env={"PYTHONPATH": str(folder)})
    server.close()
    assert not psutil.pid_exists(server.pid)


def test_a_fork_server_that_ends_at_once_is_reported_to_who_waits_for_it(folder: Path) -> None:
    python = folder / "python"
    python.write_text("#!/bin/sh\nexit 3\n")
    python.chmod(0o755)
    for _ in range(20):  # it ends before or after the caller sends the first message
        with (
            ForkServer(["json"], python=str(python)) as broken,
            pytest.raises(ChildProcessError, match="ended with 3"),
        ):
            broken.wait_until_ready()


def test_an_uncaught_exception_ends_a_child_as_it_ends_any_program(
    server: ForkServer, folder: Path
) -> None:
    assert start(server, folder, "raise").wait() == 1
    assert "RuntimeError: on purpose" in (folder / "output").read_text()


def test_a_child_ends_after_its_threads_and_exit_handlers_with_all_that_it_printed(
    server: ForkServer, folder: Path
) -> None:
    (folder / "program.py").write_text(
        "import atexit, sys, threading, time\natexit.register(lambda: print('handler'))\n"
        "threading.Thread(target=lambda: (time.sleep(0.2), print('thread'))).start()\n"
        "print('main')\nsys.exit('why')\n"
    )
    assert start(server, folder).wait() == 1
    assert sorted((folder / "output").read_text().split()) == ["handler", "main", "thread", "why"]


async def test_signals_reach_a_child_and_its_exit_code_names_the_signal(
    server: ForkServer, folder: Path
) -> None:
    first, second = start(server, folder, "sleep"), start(server, folder, "sleep")
    await until(lambda: (folder / "output").read_text().count("to stderr") == 2)
    assert (
        " ".join(psutil.Process(first.pid).cmdline()).rstrip()
        == f"{sys.executable} -m program sleep"
    )
    assert first.poll() is None
    first.terminate()
    assert first.wait() == -signal.SIGTERM
    second.kill()
    assert second.wait() == -signal.SIGKILL
    second.kill()  # it has ended: nothing is signalled


def test_a_signal_to_a_child_that_has_ended_unheard_of_is_no_error() -> None:
    """The child is reaped, and its exit code has not arrived yet."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    exit_fd, their_exit_fd = os.pipe()
    child = ForkedProcess(process.pid, exit_fd)
    child.terminate()
    os.write(their_exit_fd, EXIT_STATUS.pack(0))
    os.close(their_exit_fd)
    assert child.wait() == 0


async def test_the_end_of_a_fork_server_ends_its_children(server: ForkServer, folder: Path) -> None:
    child = start(server, folder, "sleep")
    await until(
        lambda: (folder / "output").exists() and "to stderr" in (folder / "output").read_text()
    )
    server.close()
    await until(lambda: child.poll() is not None)
    assert child.returncode == -signal.SIGKILL
    await until(lambda: not psutil.pid_exists(child.pid))
    with pytest.raises(OSError):
        start(server, folder, "exit", "0")


def test_nothing_is_left_where_the_caller_is_killed(folder: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with (folder / "errors").open("wb") as errors:
        caller = subprocess.Popen(
            [sys.executable, "-c", CALLER, str(folder)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=errors,
        )
    assert caller.stdout is not None
    pids = [int(word) for word in caller.stdout.readline().split()]
    assert all(map(psutil.pid_exists, pids))
    caller.kill()
    caller.communicate()
    ended = [psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)]
    assert psutil.wait_procs(ended, timeout=30.0)[1] == []


def test_a_fork_server_that_still_imports_dies_with_its_caller(folder: Path) -> None:
    (folder / "slow.py").write_text(SLOW)
    command = [sys.executable, "-c", IMPORTING, str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as caller:
        assert caller.stdout is not None
        server = psutil.Process(int(caller.stdout.readline()))
        caller.kill()
    assert psutil.wait_procs([server], timeout=30.0)[1] == []
