"""A cell: what walls one action or session off from the others of its zygote, made by the kernel in about 2 ms.

bubblewrap's sandbox is the wall to the host. Inside it each cell has user, mount, process, network and IPC namespaces
of its own: an empty private /tmp, no view of other cells' processes, not even a loopback in common. All of it is gone
when the cell's first process dies. A cell holds no capability, and can make no further namespace.
"""

import contextlib
import os
import signal
from collections.abc import Callable

from treadle_tools.inside import kernel

NAMESPACES = kernel.CLONE_NEWUSER | kernel.CLONE_NEWNS | kernel.CLONE_NEWPID | kernel.CLONE_NEWNET | kernel.CLONE_NEWIPC
OOM_SCORE = 500  # as if it held half of the machine's memory
MOST_FILES = 16384  # inodes of a work folder: kernel memory that its size in bytes does not count


def enter(work_bytes: int, first_process: Callable[[], None]) -> None:
    """Turn this (forked, single-threaded) process into the door of a new cell: `first_process` runs as its process 1.

    Returns in the door, which should exit then. Raises OSError where the kernel refuses.
    """
    uid, gid = os.getuid(), os.getgid()
    # After a change of uid the kernel lets only root write /proc/self/uid_map, unless the process is dumpable.
    kernel.set_dumpable(True)
    kernel.unshare(NAMESPACES)
    kernel.map_ids(uid, gid)
    kernel.mount("none", "/", "none", kernel.MS_REC | kernel.MS_PRIVATE)
    for folder in ("/tmp", "/dev/shm"):
        options = f"size={work_bytes},nr_inodes={MOST_FILES},mode=0700,uid={uid},gid={gid}"
        kernel.mount("tmpfs", folder, "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, options)
    if os.fork() == 0:
        try:
            offer_to_oom_killer()
            hide_processes()
            close_doors()
            first_process()
        finally:
            os._exit(1)


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
