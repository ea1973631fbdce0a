"""A trajectory's calls run in one sandbox after the other, and none finds anything of the one
before."""

import asyncio
import os

import pytest
from support.escapes import FORK_BOMB
from support.tools import ToolsCalls, daemon_of, groups_of, limits, serve
from treadle.tools.v1 import tools_pb2 as pb

KEPT = 3

# Sandboxes that live at the same time have work folders on different devices. Of two calls in one
# sandbox the second has the larger process id, and the first call of any sandbox has the same one.
WHERE = "import os; print(os.stat('/tmp').st_dev, os.getpid())"

# What a call can see of its sandbox.
LOOK = """
import ctypes, os, resource, stat
libc = ctypes.CDLL(None)
for folder in ("/tmp", "/dev/shm"):
    print(folder, os.listdir(folder), stat.S_IMODE(os.stat(folder).st_mode), os.listxattr(folder))
    print(os.stat(folder).st_mtime == 987654321)
print([libc.shmget(7, 0, 0), libc.semget(7, 0, 0), libc.msgget(7, 0)])
print([resource.getrlimit(getattr(resource, name)) for name in dir(resource) if name.startswith("RLIMIT_")])
print(os.getpriority(os.PRIO_PROCESS, 0), os.sched_getscheduler(0), os.sched_getaffinity(0))
print([pid for pid in range(2, os.getpid()) if os.path.exists(f"/proc/{pid}/stat")])
try:
    os.kill(-1, 0)
    print("others run")
except ProcessLookupError:
    print("alone")
"""

# Looks for an earlier call's code and output in all that this process was forked with. Its own code
# has the mark in two parts.
SEARCH = """
import gc, sys
mark, found, frame = "EARLIER", [], sys._getframe()
while frame:
    found += [name for name, value in frame.f_locals.items() if f"{mark}-SECRET" in repr(value)]
    frame = frame.f_back
for each in gc.get_objects():
    values = each.values() if type(each) is dict else each if type(each) is list else ()
    found += [type(each) for value in list(values) if type(value) in (str, bytes) and f"{mark}-SECRET" in str(value)]
print(found or "contained")
"""

REMOVED = {
    "nothing": "",
    "files": """
import os
for folder in ("/tmp", "/dev/shm"):
    open(f"{folder}/file", "w").write("x" * 1000)
    os.makedirs(f"{folder}/.a/b/c")
    os.symlink("/usr", f"{folder}/link")
    os.mkfifo(f"{folder}/.a/fifo")
""",
    "times of a folder": "import os; os.utime('/tmp', (123456789, 987654321))",
    "a work folder that nobody may "
    "enter": "import os; os.chmod('/tmp', 0); os.chmod('/dev/shm', 0o7777)",
    "processes": """
import subprocess, sys
held = "import signal, time; signal.signal(15, signal.SIG_IGN); open('/tmp/held', 'w').write('x'); time.sleep(1000)"
for _ in range(5):
    subprocess.Popen([sys.executable, "-c", held], start_new_session=True)
""",
    "a mask of cores for process "
    "1": "import os; os.sched_setaffinity(1, {min(os.sched_getaffinity(0))})",
    "an exception": "raise ValueError",
    "its own end": "import os; os.kill(os.getpid(), 9)",
}

TOO_MUCH = {
    "shared memory": "import ctypes; print(ctypes.CDLL(None).shmget(7, 4096, 0o1600) >= 0)",
    "semaphores": "import ctypes; print(ctypes.CDLL(None).semget(7, 1, 0o1600) >= 0)",
    "a message queue": "import ctypes; print(ctypes.CDLL(None).msgget(7, 0o1600) >= 0)",
    "a nice process "
    "1": "import os; os.setpriority(os.PRIO_PROCESS, 1, os.nice(0) + 3); print(True)",
    "a rank of process 1 at disks": """
import ctypes, platform
ioprio_set = {"x86_64": 251, "aarch64": 30}[platform.machine()]
print(ctypes.CDLL(None).syscall(ioprio_set, 1, 1, (2 << 13) | 7) == 0)
""",
    "flags of a folder": """
import fcntl, os
no_dump = 0x40
fcntl.ioctl(os.open("/tmp", os.O_RDONLY), 0x40086602, no_dump.to_bytes(8, "little"))
print(True)
""",
    "folders too deep to be walked": """
import os
os.chdir("/tmp")
for _ in range(3000):
    os.mkdir("d")
    os.chdir("d")
print(True)
""",
    "a folder that nobody may "
    "read": "import os; os.makedirs('/tmp/a/b'); os.chmod('/tmp/a', 0); print(True)",
}


service = serve("python", REUSED_SANDBOXES=str(KEPT), PIN="off", CORES="4")


async def where(calls: ToolsCalls, trajectory_id: str) -> tuple[int, int]:
    """The call's device and process id."""
    device, pid = (await calls.python(WHERE, trajectory_id=trajectory_id)).output.split()
    return int(device), int(pid)


async def device(calls: ToolsCalls, trajectory_id: str) -> int:
    return (await where(calls, trajectory_id))[0]


async def runs_in_a_fresh_sandbox(calls: ToolsCalls, trajectory_id: str) -> bool:
    _, first_pid = await where(calls, "")
    return (await where(calls, trajectory_id))[1] == first_pid


@pytest.mark.parametrize("left", REMOVED)
async def test_what_a_call_leaves_is_removed(calls: ToolsCalls, left: str) -> None:
    """The trajectory's next call runs in the same sandbox and sees what a first call sees."""
    left_id = left.replace(" ", "-")
    fresh = await calls.python(LOOK, trajectory_id=f"before.{left_id}")
    sandbox = await device(calls, left_id)
    await calls.python(REMOVED[left], trajectory_id=left_id)
    assert await device(calls, left_id) == sandbox
    looked = await calls.python(LOOK, trajectory_id=left_id)
    assert (looked.output, looked.error) == (fresh.output, "")


@pytest.mark.parametrize("left", TOO_MUCH)
async def test_what_cannot_be_removed_costs_the_sandbox(calls: ToolsCalls, left: str) -> None:
    """Nothing runs in that sandbox again: the next call has a fresh one, and nobody notices."""
    if left == "shared memory" and not groups_of(daemon_of(calls)):
        pytest.skip("no control group counts shared memory here, so sandboxes refuse it")
    left_id = left.replace(" ", "-")
    fresh = await calls.python(LOOK, trajectory_id=f"before.{left_id}")
    assert (await calls.python(TOO_MUCH[left], trajectory_id=left_id)).output == "True\n"
    assert await runs_in_a_fresh_sandbox(calls, left_id)
    await calls.python(TOO_MUCH[left], trajectory_id=left_id)
    looked = await calls.python(LOOK, trajectory_id=left_id)
    assert (looked.output, looked.error) == (fresh.output, "")


async def test_without_pinning_an_action_may_run_anywhere(calls: ToolsCalls) -> None:
    result = await calls.python("import os; os.sched_getaffinity(0)")
    assert result.output == f"{os.sched_getaffinity(0)}\n"


async def test_a_stopped_call_costs_its_trajectory_nothing(calls: ToolsCalls) -> None:
    """A fork bomb that is stopped at the wall clock, then the next call in the same sandbox."""
    sandbox = await device(calls, "bomb")
    assert (
        await calls.python(FORK_BOMB, trajectory_id="bomb", limits=limits(0.5))
    ).status != pb.RESULT_STATUS_OK
    assert await device(calls, "bomb") == sandbox


async def test_no_two_trajectories_share_a_sandbox(calls: ToolsCalls) -> None:
    """Neither two that take turns, nor calls of no trajectory."""
    first, second = await device(calls, "one"), await device(calls, "two")
    assert first != second
    assert (await device(calls, "one"), await device(calls, "two")) == (first, second)
    assert await runs_in_a_fresh_sandbox(calls, "")


async def test_two_calls_at_once_have_a_sandbox_each(calls: ToolsCalls) -> None:
    code = "import os, time; open('/tmp/mine', 'x'); time.sleep(0.5); print(os.stat('/tmp').st_dev)"
    both = await asyncio.gather(*(calls.python(code, trajectory_id="twice") for _ in range(2)))
    outputs = [each.output for each in both]
    assert len(set(outputs)) == 2
    assert f"{await device(calls, 'twice')}\n" in outputs


async def test_as_many_wait_as_are_allowed(calls: ToolsCalls) -> None:
    """Of one more than that, the one that has waited longest has a fresh sandbox next, the others
    do not."""
    names = [f"waiting-{at}" for at in range(KEPT + 1)]
    for name in names:
        await where(calls, name)
    assert [await runs_in_a_fresh_sandbox(calls, name) for name in names[1:]] == [False] * KEPT
    assert await runs_in_a_fresh_sandbox(calls, names[0])


async def test_a_call_finds_nothing_of_the_one_before_in_its_memory(calls: ToolsCalls) -> None:
    """A process of foreign code is a fork of one that has passed on the call before."""
    for _ in range(3):
        told = await calls.python("print('EARLIER-SECRET')", trajectory_id="t-memory")
        assert told.output == "EARLIER-SECRET\n"
        assert (await calls.python(SEARCH, trajectory_id="t-memory")).output == "contained\n"
