"""Isolate a sandbox from others of its fork server, with namespaces, mounts, capabilities and a
system-call filter.

bubblewrap isolates the fork server from the host. Inside it each sandbox has user, mount, process,
network and IPC namespaces of its own, made in about 2 ms: an empty private /tmp, no view of other
sandboxes' processes, no shared loopback. The kernel removes all of it when the sandbox's init ends.
A sandbox holds no capability and can make no further namespace. The standard library lacks these
system calls; every failure of one is an OSError.
"""

import contextlib
import ctypes
import errno
import fcntl
import os
import platform
import resource
import signal
import socket
import struct
from collections.abc import Callable, Iterable
from pathlib import Path

from treadle_tools.tool import WORK_FOLDER_INODES

_libc = ctypes.CDLL(None, use_errno=True)
# Keeps the interpreter's lock during the call: both processes hold it after a clone.
_holding = ctypes.PyDLL(None, use_errno=True)
_holding.syscall.argtypes = (ctypes.c_long, ctypes.c_ulong, *[ctypes.c_void_p] * 4)
_holding.syscall.restype = ctypes.c_long
_python = ctypes.pythonapi
_libc.mount.argtypes = (
    ctypes.c_char_p,
    ctypes.c_char_p,
    ctypes.c_char_p,
    ctypes.c_ulong,
    ctypes.c_char_p,
)
_libc.prctl.argtypes = (
    ctypes.c_int,
    ctypes.c_ulong,
    ctypes.c_ulong,
    ctypes.c_ulong,
    ctypes.c_ulong,
)

CLONE_NEWNS = 0x00020000
CLONE_NEWIPC = 0x08000000
CLONE_NEWUSER = 0x10000000
CLONE_NEWPID = 0x20000000
CLONE_NEWNET = 0x40000000

NAMESPACES = CLONE_NEWUSER | CLONE_NEWNS | CLONE_NEWPID | CLONE_NEWNET | CLONE_NEWIPC

MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REC, MS_PRIVATE = 1, 2, 4, 8, 16384, 1 << 18

# Of what the kernel counts by user, and all sandboxes have the same user outside their namespaces.
PTYS = 16
MOST_SIGNALS = 256  # that wait to be taken
MOST_INOTIFY = {"max_inotify_instances": 16, "max_inotify_watches": 8192}
USUAL_UMASK = 0o022  # whatever that of the service is, foreign code sees the one of most systems
OOM_SCORE = 500  # as if it held half of the machine's memory

_SHM_INFO, _MSG_INFO, _SEM_INFO = 14, 12, 19
_INFO_BYTES = 256  # more than any of their structures has

_SIOCSIFFLAGS, _IFF_UP = 0x8914, 1
_FS_IOC_GETFLAGS = 0x80086601
_PR_GET_TIMERSLACK = 30
_PR_SET_PDEATHSIG = 1
_PR_SET_DUMPABLE = 4
_PR_GET_NO_NEW_PRIVS = 39
_PR_SET_SECCOMP = 22
_SECCOMP_MODE_FILTER = 2
_CAPABILITY_VERSION_3 = 0x20080522


def _check(result: int, what: str) -> int:
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{what}: {os.strerror(code)}")
    return result


def fork_isolated(
    work_bytes: int, run_init: Callable[[], None], report: Callable[[OSError], None]
) -> None:
    """Fork a new sandbox from this single-threaded process.

    `run_init` runs as its init, or `report` in its place where the kernel refuses. work_bytes: size
    of its /tmp.

    Raises OSError where the kernel refuses namespaces altogether.
    """
    if _clone(NAMESPACES) == 0:
        try:
            _isolate(work_bytes)
            run_init()
        except OSError as error:
            report(error)
        finally:
            os._exit(1)


def _isolate(work_bytes: int) -> None:
    """Make this process, which has just been cloned into new namespaces, the init of a sandbox."""
    uid, gid = os.getuid(), os.getgid()
    # After a change of uid the kernel lets only root write /proc/self/uid_map, unless the process
    # is dumpable.
    set_dumpable(True)
    for name, line in (
        ("setgroups", "deny"),
        ("uid_map", f"{uid} {uid} 1"),
        ("gid_map", f"{gid} {gid} 1"),
    ):
        _write(f"/proc/self/{name}", line)
    _start_loopback()
    _mount("none", "/", "none", MS_REC | MS_PRIVATE)
    for folder in ("/tmp", "/dev/shm"):
        options = f"size={work_bytes},nr_inodes={WORK_FOLDER_INODES},mode=0700,uid={uid},gid={gid}"
        _mount("tmpfs", folder, "tmpfs", MS_NOSUID | MS_NODEV, options)
    # Terminals of its own, few of them: the kernel limits how many there are on the machine.
    _mount(
        "devpts",
        "/dev/pts",
        "devpts",
        MS_NOSUID | MS_NOEXEC,
        f"newinstance,ptmxmode=0666,mode=0600,max={PTYS}",
    )
    # Where memory runs out, the kernel should kill a sandbox first
    with contextlib.suppress(PermissionError):
        _write("/proc/self/oom_score_adj", str(OOM_SCORE))
    for name, most in MOST_INOTIFY.items():
        with contextlib.suppress(OSError):  # /proc/sys may be read-only
            _write(f"/proc/sys/user/{name}", str(most))
    flags = MS_NOSUID | MS_NODEV | MS_NOEXEC
    try:
        _mount("proc", "/proc", "proc", flags)
    except (
        PermissionError
    ):  # bubblewrap started as root covers parts of /proc, and the kernel allows no new one
        _mount("tmpfs", "/proc", "tmpfs", flags | MS_RDONLY, "mode=0555")
    resource.setrlimit(resource.RLIMIT_SIGPENDING, (MOST_SIGNALS, MOST_SIGNALS))
    drop_privileges()


def _start_loopback() -> None:
    """Let programs in this network namespace reach each other; it has no other network."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        fcntl.ioctl(any_socket, _SIOCSIFFLAGS, struct.pack("16sh22x", b"lo", _IFF_UP))


def drop_privileges() -> None:
    """Give up what a sandbox does not need any more.

    That is capabilities, new namespaces and readable memory; and Python's handler of SIGINT,
    because a signal that init does not handle never reaches it from inside its namespace.
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.umask(USUAL_UMASK)
    drop_capabilities()
    _filter_system_calls(_FILTER)
    set_dumpable(False)
    os.chdir("/tmp")


def _clone(flags: int) -> int:
    """Fork as os.fork does, into the new namespaces named by `flags` (CLONE_NEW…), as process 1 of
    a new process namespace.

    The process must have one thread. Raises OSError on a machine that is not in `_MACHINES`. One
    fork instead of the two that unshare takes for a process namespace: a fork of a Python costs the
    kernel 1 ms.
    """
    if platform.machine() not in _MACHINES:
        raise OSError(errno.ENOSYS, f"clone: no table for {platform.machine()}")
    number = _MACHINES[platform.machine()][1][0]
    _python.PyOS_BeforeFork()  # os.fork calls these three too
    pid = _holding.syscall(number, flags | signal.SIGCHLD, None, None, None, None)
    failed = ctypes.get_errno()
    if pid == 0:
        _python.PyOS_AfterFork_Child()
    else:
        _python.PyOS_AfterFork_Parent()
    if pid < 0:
        raise OSError(failed, f"clone: {os.strerror(failed)}")
    return int(pid)


def _write(path: str, text: str) -> None:
    """Write a file of the kernel.

    This takes a tenth of the time of pathlib, which counts where every action pays it.
    """
    descriptor = os.open(path, os.O_WRONLY)
    try:
        os.write(descriptor, text.encode())
    finally:
        os.close(descriptor)


def _mount(source: str, target: str, kind: str, flags: int, options: str = "") -> None:
    _check(
        _libc.mount(source.encode(), target.encode(), kind.encode(), flags, options.encode()),
        f"mount {target}",
    )


def set_dumpable(dumpable: bool) -> None:
    """Allow or refuse processes of the same user to read this one's memory and descriptors."""
    _check(_libc.prctl(_PR_SET_DUMPABLE, int(dumpable), 0, 0, 0), "prctl dumpable")


def die_with_parent(signal_number: int) -> None:
    """Have the kernel send this process a signal when its parent ends."""
    _check(_libc.prctl(_PR_SET_PDEATHSIG, signal_number, 0, 0, 0), "prctl pdeathsig")


def has_no_new_privileges() -> bool:
    """Return whether set-user-id programs and file capabilities give this process nothing."""
    return _check(_libc.prctl(_PR_GET_NO_NEW_PRIVS, 0, 0, 0, 0), "prctl no_new_privs") == 1


def drop_capabilities() -> None:
    """Give up every capability, also those that may be taken back or inherited."""
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION_3, 0)
    _check(_libc.capset(ctypes.byref(header), ctypes.byref((ctypes.c_uint32 * 6)())), "capset")


def read_inode_flags(folder: Path) -> int:
    """Return a folder's flags as chattr shows them; 0 where its file system has none."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        return int.from_bytes(fcntl.ioctl(descriptor, _FS_IOC_GETFLAGS, bytes(8)), "little")
    except OSError:
        return 0
    finally:
        os.close(descriptor)


def read_io_and_timer_ranks() -> tuple[int, int]:
    """Return the I/O priority of this process, and how late its timers may be in ns."""
    number = {"x86_64": 252, "aarch64": 31}.get(platform.machine())
    io_rank = -1 if number is None else int(_libc.syscall(number, 1, 0))
    return io_rank, int(_libc.prctl(_PR_GET_TIMERSLACK, 0, 0, 0, 0))


def count_ipc_objects() -> int:
    """Return how many shared memory segments, semaphore sets and message queues of System V this
    IPC namespace has.
    """
    counted = ctypes.create_string_buffer(_INFO_BYTES)
    total = 0
    for call, arguments, at in (
        (_libc.shmctl, (0, _SHM_INFO), 0),  # struct shm_info: used_ids
        (_libc.msgctl, (0, _MSG_INFO), 0),  # struct msginfo: msgpool
        (_libc.semctl, (0, 0, _SEM_INFO), 7),  # struct seminfo: semusz
    ):
        _check(call(*arguments, counted), "counting IPC objects")
        total += ctypes.cast(counted, ctypes.POINTER(ctypes.c_int))[at]
    return total


# The filter refuses what no tool needs and what escapes and leaks between actions use: more
# namespaces, other processes' memory and descriptors, kernel keyrings (they outlive an action),
# programs that the kernel interprets, watches whose number the kernel limits for all sandboxes
# together, sockets of families whose addresses are shared, limits of another process (one on CPU
# seconds would end init). Per machine: audit architecture; clone, clone3, prlimit64, socket,
# socketpair; the refused calls: unshare setns ptrace process_vm_readv
# process_vm_writev add_key request_key keyctl bpf perf_event_open userfaultfd io_uring_setup
# pidfd_getfd fanotify_init; those that make memory which no process has mapped: memfd_create
# memfd_secret shmget.
_MACHINES = {
    "x86_64": (
        0xC000003E,
        (56, 435, 302, 41, 53),
        (272, 308, 101, 310, 311, 248, 249, 250, 321, 298, 323, 425, 438, 300),
        (319, 447, 29),
    ),
    "aarch64": (
        0xC00000B7,
        (220, 435, 261, 198, 199),
        (97, 268, 117, 270, 271, 217, 218, 219, 280, 241, 282, 425, 438, 262),
        (279, 447, 194),
    ),
}
_SOCKETS = (1, 2, 10, 16)  # AF_UNIX, AF_INET, AF_INET6, AF_NETLINK
_X32_CALLS = 0x40000000  # x86_64's second table of numbers
_LOAD, _JUMP_EQUAL, _JUMP_AT_LEAST, _JUMP_SET, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
# Offsets in struct seccomp_data, little-endian
_NUMBER_AT, _ARCHITECTURE_AT, _FIRST_ARGUMENT_AT = 0, 4, 16
_ALLOW, _NO_PERMISSION, _NO_SUCH_CALL, _NO_FAMILY = (
    0x7FFF0000,
    0x00050000 | 1,
    0x00050000 | 38,
    0x00050000 | 97,
)


def _head(machine: str) -> list[tuple[int, int, int, int]]:
    """Return the beginning of a filter, which refuses calls of another machine's table, then loads
    the number of the call."""
    return [
        (_LOAD, 0, 0, _ARCHITECTURE_AT),
        (_JUMP_EQUAL, 1, 0, _MACHINES[machine][0]),
        (_RETURN, 0, 0, _NO_SUCH_CALL),
        (_LOAD, 0, 0, _NUMBER_AT),
        (_JUMP_AT_LEAST, 0, 1, _X32_CALLS),
        (_RETURN, 0, 0, _NO_SUCH_CALL),
    ]


def _refuse(numbers: Iterable[int]) -> list[tuple[int, int, int, int]]:
    return [
        step
        for number in numbers
        for step in ((_JUMP_EQUAL, 0, 1, number), (_RETURN, 0, 0, _NO_PERMISSION))
    ]


def _filter_program(machine: str) -> list[tuple[int, int, int, int]]:
    """Return the filter of the calls that every sandbox is refused."""
    _, (clone, clone3, prlimit, *sockets), refused, _ = _MACHINES[machine]
    # glibc falls back to clone, whose flags the filter can read; those of clone3 are behind a
    # pointer.
    program = [
        *_head(machine),
        (_JUMP_EQUAL, 0, 1, clone3),
        (_RETURN, 0, 0, _NO_SUCH_CALL),
        *_refuse(refused),
        (_JUMP_EQUAL, 0, 4, prlimit),
        (_LOAD, 0, 0, _FIRST_ARGUMENT_AT),
        (_JUMP_EQUAL, 0, 1, 0),  # the calling process
        (_RETURN, 0, 0, _ALLOW),
        (_RETURN, 0, 0, _NO_PERMISSION),
    ]
    for number in sockets:
        program += [(_JUMP_EQUAL, 0, len(_SOCKETS) + 3, number), (_LOAD, 0, 0, _FIRST_ARGUMENT_AT)]
        program += [
            (_JUMP_EQUAL, len(_SOCKETS) - at, 0, family) for at, family in enumerate(_SOCKETS)
        ]
        program += [(_RETURN, 0, 0, _NO_FAMILY), (_RETURN, 0, 0, _ALLOW)]
    return [
        *program,
        (_JUMP_EQUAL, 0, 3, clone),
        (_LOAD, 0, 0, _FIRST_ARGUMENT_AT),
        (_JUMP_SET, 0, 1, CLONE_NEWUSER),
        (_RETURN, 0, 0, _NO_PERMISSION),
        (_RETURN, 0, 0, _ALLOW),
    ]


def _memory_program(machine: str) -> list[tuple[int, int, int, int]]:
    """Return the filter of the calls that are refused where the service alone counts memory."""
    return [*_head(machine), *_refuse(_MACHINES[machine][3]), (_RETURN, 0, 0, _ALLOW)]


def _packed(program: Callable[[str], list[tuple[int, int, int, int]]]) -> bytes | None:
    """Return a filter as the kernel reads it (struct sock_filter[]); None on a machine that is not
    in `_MACHINES`.
    """
    machine = platform.machine()
    return (
        b"".join(struct.pack("=HBBI", *step) for step in program(machine))
        if machine in _MACHINES
        else None
    )


def _filter_system_calls(program: bytes | None) -> None:
    """Refuse these calls from now on, for children too; this cannot be undone.

    Does nothing on a machine without a table.
    """
    if program is None:
        return
    code = ctypes.create_string_buffer(program)
    # struct sock_fprog: a 16-bit count, padding, a pointer.
    fprog = ctypes.create_string_buffer(
        struct.pack("@H6xP", len(program) // 8, ctypes.addressof(code))
    )
    _check(
        _libc.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.addressof(fprog), 0, 0), "seccomp"
    )


def refuse_unmapped_memory() -> None:
    """Refuse memory that no process has mapped, since a sum over the processes does not contain
    it."""
    _filter_system_calls(_MEMORY_FILTER)


_FILTER = _packed(_filter_program)
_MEMORY_FILTER = _packed(_memory_program)
