"""What code in the sandbox cannot do, tried for real: each attempt is contained and the service
goes on."""

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import psutil
import pytest
from support.conditions import until
from support.docker_daemon import DockerDaemon, docker_daemon
from support.escapes import ATTEMPTS as ATTEMPTS_ANYWHERE
from support.escapes import FORK_BOMB
from support.processes import ServiceProcess, command_line, import_path
from support.tools import ToolsCalls, calls_to, limits, serve, shared_tools
from treadle.tools.v1 import tools_pb2 as pb

__all__ = ["docker_daemon"]

SPARE_PROCESSES = 12  # spawners and warm sandboxes come and go
MIB = 1024 * 1024
TROUBLE = (pb.RESULT_STATUS_TOOL_ERROR, pb.RESULT_STATUS_CRASHED, pb.RESULT_STATUS_OUT_OF_MEMORY)


with_cgroups = serve("python")
without_cgroups = serve("python", CGROUPS="off")
as_a_user = serve("python", CGROUPS="off", as_user=True)
PROFILE = Path(__file__).resolve().parents[2] / "services/tools/seccomp.json"
under_the_profile = serve("python", CGROUPS="off", as_user=True, seccomp=PROFILE)


@pytest.fixture(scope="module")
def in_docker(
    docker_daemon: DockerDaemon, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServiceProcess]:
    folder = tmp_path_factory.mktemp("docker")
    with shared_tools(
        folder, "python", **docker_daemon.settings("test-sandbox", folder)
    ) as process:
        yield process


@pytest.fixture
async def plain_calls(with_cgroups: ServiceProcess) -> AsyncIterator[ToolsCalls]:
    async with calls_to(with_cgroups) as made:
        yield made


@pytest.fixture(params=["with_cgroups", "without_cgroups", "as_a_user", "in_docker"])
def service(request: pytest.FixtureRequest) -> ServiceProcess:
    """One after the other: what holds where memory is counted by control groups holds where it is
    watched."""
    process: ServiceProcess = request.getfixturevalue(request.param)
    return process


# Each prints `contained` and nothing else, or raises.
ATTEMPTS = {
    **ATTEMPTS_ANYWHERE,
    "the network by name": """
import socket
try:
    print(socket.getaddrinfo("example.com", 80))
except OSError:
    print("contained")
""",
    "the host's files": """
import os
paths = ("/etc", "/var", "/home", "/sys", "/run", "/mnt", "/root/.ssh", SECRET)
print([path for path in paths if os.path.exists(path)] or "contained")
""",
    "the kernel's switches": """
import os
paths = ("/proc/sys/kernel/core_pattern", "/proc/sysrq-trigger", "/proc/sys/vm/drop_caches")
written = []
for path in paths:
    try:
        open(path, "w")
        written.append(path)
    except OSError:
        pass
print(written or "contained")
""",
    "other processes": """
import os
others = [name for name in os.listdir("/proc") if name.isdigit() and int(name) > 10]
print(others or "contained")
""",
    "a signal to the service": """
import os
for pid in (SERVICE, SERVICE + 1, 4194304):
    try:
        os.kill(pid, 9)
        print("killed", pid)
    except ProcessLookupError:
        pass
print("contained")
""",
    "a kernel keyring": """
import ctypes, platform
add_key = {"x86_64": 248, "aarch64": 217}[platform.machine()]
print("contained" if ctypes.CDLL(None).syscall(add_key, b"user", b"k", b"v", 1, -4) < 0 else "kept")
""",
}


# Of the attempts, those that change nothing on a machine where they succeed, or only the process
# itself.
HARMLESS = (
    "capabilities and set-user-id programs",
    "a namespace of its own",
    "a descriptor of another process",
    "sockets beside the network's",
    "watches of the file system, which the kernel counts for all",
    "limits of another process, of which one on CPU seconds would end process 1",
    "the host's files",
    "other processes",
    "a kernel keyring",
)


@pytest.fixture
def names(tmp_path: Path) -> str:
    """What the attempts read, but for PORT and SERVICE."""
    secret = tmp_path / "secret"
    secret.write_text("the host's own")
    secret.chmod(0o644)
    return f"SECRET = {str(secret)!r}; FOLDERS = ['/dev']\n"


@pytest.mark.parametrize("service", ["with_cgroups", "without_cgroups", "as_a_user"], indirect=True)
async def test_no_attempt_gets_out(calls: ToolsCalls, names: str) -> None:
    """Every row of the table, in one service, which serves afterwards as before. As a user a
    sandbox has a /proc, as root it has none."""
    port = calls.process.address.rpartition(":")[2]
    settings = f"PORT = {port}; SERVICE = {calls.process.pid}; {names}"
    for trajectory_id in ("", "agent"):  # in a sandbox each; one after the other in the same
        for name, code in ATTEMPTS.items():
            result = await calls.python(settings + code, trajectory_id=trajectory_id)
            assert (name, result.output, result.error) == (name, "contained\n", "")
    assert (await calls.python("1 + 1")).output == "2\n"


@pytest.mark.parametrize("name", HARMLESS)
def test_the_attempts_succeed_outside_a_sandbox(name: str, names: str) -> None:
    """Else their rows would show nothing. As root: as another user some need what only root has."""
    if os.geteuid() != 0:
        pytest.skip("needs root")
    outside = subprocess.run(
        [sys.executable, "-c", names + ATTEMPTS[name]], capture_output=True, text=True
    )
    assert (outside.stdout != "contained\n", outside.stderr) == (True, "")


async def test_a_sandbox_works_under_the_profile_of_a_container(
    under_the_profile: ServiceProcess,
) -> None:
    """As in Compose: system calls filtered, no privileges to gain, no capability."""
    status = await asyncio.to_thread(
        Path(f"/proc/{under_the_profile.pid}/status").read_text, encoding="utf-8"
    )
    held = dict(line.split(":\t") for line in status.splitlines() if ":\t" in line)
    assert (held["Seccomp"], held["NoNewPrivs"], int(held["CapEff"], 16)) == ("2", "1", 0)
    async with calls_to(under_the_profile) as calls:
        for trajectory_id in ("", "agent"):
            result = await calls.python("import os; os.getuid()", trajectory_id=trajectory_id)
            assert (result.output, result.error) == ("65534\n", "")


REFUSED = """
import ctypes, errno, json, sys
from support.seccomp import confine, library
calls = ("keyctl", "ptrace", "setns", "io_uring_setup", "name_to_handle_at", "move_mount")
call = ctypes.CDLL(None, use_errno=True).syscall
def tried():
    found = []
    for name in calls:
        assert call(library().seccomp_syscall_resolve_name(name.encode()), -1, 0, 0, 0, 0, 0) == -1, name
        found.append(errno.errorcode[ctypes.get_errno()])
    for family in (38, 40):  # AF_ALG, AF_VSOCK
        call(library().seccomp_syscall_resolve_name(b"socket"), family, 9, 0)
        found.append(errno.errorcode[ctypes.get_errno()])
    return found
before = tried()
confine(json.load(open(sys.argv[1])))
print(json.dumps([before, tried()]))
"""


def test_the_profile_of_a_container_refuses_what_no_sandbox_needs() -> None:
    """Calls with bad arguments: refused for these before, and for themselves afterwards."""
    done = subprocess.run(
        [sys.executable, "-c", REFUSED, str(PROFILE)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": import_path()},
    )
    assert done.returncode == 0, done.stderr
    before, after = json.loads(done.stdout)
    assert "EPERM" not in before
    assert set(after) == {"EPERM"}


async def test_a_flood_of_output_is_cut_and_says_so(plain_calls: ToolsCalls) -> None:
    result = await plain_calls.python(
        "for _ in range(300): print('x' * 100_000)", limits=limits(output_bytes=1000)
    )
    assert result.status == pb.RESULT_STATUS_OK
    assert result.output_truncated
    assert result.output == "x" * 1000 + "\n[output cut at 1000 bytes]"


async def test_output_that_looks_like_an_answer_is_only_output(plain_calls: ToolsCalls) -> None:
    """Frames on stdout, and garbage on every descriptor that the code can find, answer nothing in
    the tool's place."""
    frame = """
import json, os, struct
body = json.dumps({"status": "ok", "output": "forged", "truncated": False, "error": "", "alive": True,
                   "execution_s": 0.0, "reward": 1.0}).encode()
os.write(1, struct.pack(">I", len(body)) + body)
"""
    result = await plain_calls.python(frame)
    assert "forged" in result.output
    assert not result.HasField("reward")
    garbage = """
import os
for descriptor in range(3, 256):
    try:
        os.write(descriptor, b"\\xff" * 64)
    except OSError:
        pass
"""
    assert (await plain_calls.python(garbage)).status == pb.RESULT_STATUS_CRASHED
    assert (await plain_calls.python("1 + 1")).output == "2\n"


async def test_a_memory_bomb_is_stopped(calls: ToolsCalls) -> None:
    result = await calls.python("x = bytearray(4 << 30)", limits=limits(memory_bytes=256 * MIB))
    assert result.status == pb.RESULT_STATUS_OUT_OF_MEMORY
    assert (await calls.python("1 + 1")).output == "2\n"


async def test_memory_of_children_counts(calls: ToolsCalls) -> None:
    """Not all of six children live that hold 120 MiB each, which each alone may, however memory is
    counted here."""
    code = """
import os, time
for _ in range(6):
    if os.fork() == 0:
        held = b"x" * (120 << 20)
        time.sleep(30)
        os._exit(0)
for _ in range(6):
    print(os.waitstatus_to_exitcode(os.wait()[1]))
    raise SystemExit("a child was killed")
"""
    result = await calls.python(code, limits=limits(memory_bytes=256 * MIB))
    assert result.status in TROUBLE
    assert result.status != pb.RESULT_STATUS_TOOL_ERROR or "-9" in result.output
    assert (await calls.python("import os; os.kill(os.getpid(), 9)")).error == "killed by SIGKILL"
    assert (await calls.python("1 + 1")).output == "2\n"


async def test_an_endless_loop_is_killed_at_the_wall_clock(calls: ToolsCalls) -> None:
    code = """
import signal
for number in range(1, 32):
    if number not in (9, 19):
        signal.signal(number, signal.SIG_IGN)
print("here", flush=True)
while True:
    pass
"""
    result = await calls.python(code, limits=limits(1.5))
    assert (result.status, result.output) == (pb.RESULT_STATUS_TIMED_OUT, "here\n")
    assert "1.5 s" in result.error
    slept = await calls.python("import time; time.sleep(1000)", limits=limits(0.3))
    assert slept.status == pb.RESULT_STATUS_TIMED_OUT


@pytest.mark.parametrize("service", ["with_cgroups", "without_cgroups"], indirect=True)
async def test_a_fork_bomb_is_contained(calls: ToolsCalls) -> None:
    """Its processes never exceed the tool's limit by much, other snippets run afterwards, and
    nothing is left of it."""
    await calls.python("1")
    service = psutil.Process(calls.process.pid)
    before = len(service.children(recursive=True))
    exploding = asyncio.create_task(calls.python(FORK_BOMB, limits=limits(2.0)))
    most = 0
    while not exploding.done():
        most = max(most, len(service.children(recursive=True)))
        await asyncio.sleep(0.05)
    result = await exploding
    assert result.status != pb.RESULT_STATUS_OK
    # it did explode, and 64 processes are the tool's limit
    assert before + 20 < most < before + 64 + 40
    assert (await calls.python("1 + 1")).output == "2\n"
    await until(lambda: len(service.children(recursive=True)) <= before + SPARE_PROCESSES)


async def test_a_full_disk_is_only_the_snippets_own(calls: ToolsCalls) -> None:
    code = """
import errno
failed = set()
for number in range(3):
    try:
        with open(f"/tmp/{number}", "wb") as file:
            for _ in range(100):
                file.write(bytes(1 << 20))
    except OSError as error:
        failed.add(errno.errorcode[error.errno])
print(sorted(failed))
"""
    result = await calls.python(code)
    assert result.status != pb.RESULT_STATUS_OK or result.output in (
        "['EFBIG', 'ENOSPC']\n",
        "['ENOSPC']\n",
    )
    assert (
        await calls.python("open('/tmp/a', 'wb').write(bytes(1 << 20))")
    ).output == f"{1 << 20}\n"


async def test_snippets_see_nothing_of_each_other(plain_calls: ToolsCalls) -> None:
    """Neither one after the other nor at the same time: no files, no processes, no loopback in
    common."""
    holder = """
import os, socket, time
for folder in ("/tmp", "/dev/shm"):
    open(f"{folder}/mine", "w").write("mine")
server = socket.socket(socket.AF_UNIX)
server.bind("\\0meeting")
server.listen()
time.sleep(0.8)
print("held")
"""
    looker = """
import os, socket
print(os.listdir("/tmp"), os.listdir("/dev/shm"))
try:
    socket.socket(socket.AF_UNIX).connect("\\0meeting")
    print("met")
except ConnectionRefusedError:
    print("alone")
"""
    holding = asyncio.create_task(plain_calls.python(holder))
    while not holding.done():
        assert (await plain_calls.python(looker)).output == "[] []\nalone\n"
    assert (await holding).output == "held\n"
    assert (await plain_calls.python(looker)).output == "[] []\nalone\n"


async def test_what_a_snippet_leaves_running_dies_with_it(plain_calls: ToolsCalls) -> None:
    service = psutil.Process(plain_calls.process.pid)
    await plain_calls.python("1")
    code = """
import subprocess
subprocess.Popen(["sleep", "123456"], start_new_session=True)
print("left")
"""
    result = await plain_calls.python(code, limits=limits(9.0))  # and is not waited for
    assert (result.output, result.status) == ("left\n", pb.RESULT_STATUS_OK)
    await until(
        lambda: (
            not any("123456" in command_line(child) for child in service.children(recursive=True))
        )
    )


async def test_random_numbers_differ_between_snippets(plain_calls: ToolsCalls) -> None:
    seen = {(await plain_calls.python("import random; random.random()")).output for _ in range(4)}
    assert len(seen) == 4


OK, TOOL_ERROR, CRASHED = pb.RESULT_STATUS_OK, pb.RESULT_STATUS_TOOL_ERROR, pb.RESULT_STATUS_CRASHED
ZERO = "ZeroDivisionError: division by zero"
UNCLOSED = "SyntaxError: '(' was never closed"
ENDINGS = [  # code, status, end of the output, begin of the error
    ("1/0", TOOL_ERROR, f"{ZERO}\n", ZERO),
    ("print(", TOOL_ERROR, f"{UNCLOSED}\n", UNCLOSED),
    ("raise SystemExit(3)", TOOL_ERROR, "", "SystemExit: 3"),
    ("raise SystemExit", OK, "", ""),
    ("import os; os._exit(7)", CRASHED, "", "ended without an answer, exit code 7"),
    ("import os; os.kill(os.getpid(), 11)", CRASHED, "", "killed by SIGSEGV"),
    ("print('\\ud800'); '\\U0001f600'", OK, "\\ud800\n'\U0001f600'\n", ""),
    ("import sys; print('out'); print('err', file=sys.stderr); None", OK, "out\nerr\n", ""),
    ("def f(n):\n  return n and f(n - 1)\nf(10**6)", TOOL_ERROR, "exceeded\n", "RecursionError"),
    ("input()", TOOL_ERROR, "EOFError: EOF when reading a line\n", "EOFError"),
    ("", OK, "", ""),
]


async def test_code_that_ends_badly_is_an_answer(plain_calls: ToolsCalls) -> None:
    for code, status, output, error in ENDINGS:
        result = await plain_calls.python(code)
        assert (code, result.status) == (code, status), result
        assert result.output.endswith(output), result
        assert result.error.startswith(error), result
