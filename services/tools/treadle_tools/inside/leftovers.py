"""What a call has left in its cell: removes it, so that the next call finds the cell as the first one did.

Runs in process 1, which no foreign code can look into or stop. Invariant: what cannot be removed is named, and then
nothing runs in that cell again.
"""

import contextlib
import os
import resource
import shutil
import signal
import stat
from dataclasses import dataclass
from pathlib import Path

from treadle_tools.inside import kernel

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
