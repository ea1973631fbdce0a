"""A cell: what walls one action or session off from the others of its zygote, made by the kernel in about 2 ms.

bubblewrap's sandbox is the wall to the host. Inside it each cell has user, mount, process, network and IPC namespaces
of its own: an empty private /tmp, no view of other cells' processes, not even a loopback in common. All of it is gone
when the cell's first process dies. A cell holds no capability, and can make no further namespace.
"""

import contextlib
import os
import signal
from collections.abc import Callable

from treadle_tools.sandbox.inside import kernel

NAMESPACES = kernel.CLONE_NEWUSER | kernel.CLONE_NEWNS | kernel.CLONE_NEWPID | kernel.CLONE_NEWNET | kernel.CLONE_NEWIPC
OOM_SCORE = 500  # as if it held half of the machine's memory
MOST_FILES = 16384  # inodes of a work folder: kernel memory that its size in bytes does not count


def begin(work_bytes: int, first_process: Callable[[], None], failed: Callable[[OSError], None]) -> None:
    """Fork a new cell from this single-threaded process: `first_process` runs as its process 1, or `failed` in its
    place where the kernel refuses.

    Raises OSError where it refuses namespaces altogether.
    """
    if kernel.fork(NAMESPACES) == 0:
        try:
            wall_off(work_bytes)
            first_process()
        except OSError as error:
            failed(error)
        finally:
            os._exit(1)


def wall_off(work_bytes: int) -> None:
    """Make this process, which is in namespaces of its own, process 1 of a cell."""
    uid, gid = os.getuid(), os.getgid()
    # After a change of uid the kernel lets only root write /proc/self/uid_map, unless the process is dumpable.
    kernel.set_dumpable(True)
    kernel.map_ids(uid, gid)
    kernel.mount("none", "/", "none", kernel.MS_REC | kernel.MS_PRIVATE)
    for folder in ("/tmp", "/dev/shm"):
        options = f"size={work_bytes},nr_inodes={MOST_FILES},mode=0700,uid={uid},gid={gid}"
        kernel.mount("tmpfs", folder, "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, options)
    offer_to_oom_killer()
    hide_processes()
    close_doors()


def offer_to_oom_killer() -> None:
    """Where memory runs out, the kernel should take a cell, not the door it came through."""
    with contextlib.suppress(PermissionError):
        kernel.write("/proc/self/oom_score_adj", str(OOM_SCORE))


def hide_processes() -> None:
    """Show this cell's own /proc; an empty one where the kernel allows no new one (bubblewrap started as root covers
    parts).
    """
    flags = kernel.MS_NOSUID | kernel.MS_NODEV | kernel.MS_NOEXEC
    try:
        kernel.mount("proc", "/proc", "proc", flags)
    except PermissionError:
        kernel.mount("tmpfs", "/proc", "tmpfs", flags | kernel.MS_RDONLY, "mode=0555")


def close_doors() -> None:
    """Drop what a cell does not need any more: capabilities, namespaces, a memory that others may look into, and
    Python's handler of SIGINT: a signal that process 1 does not handle never reaches it from inside.
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    kernel.drop_capabilities()
    kernel.filter_system_calls()
    kernel.set_dumpable(False)
    os.chdir("/tmp")
