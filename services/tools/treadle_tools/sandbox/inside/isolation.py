"""Isolates a sandbox from others of its fork server, with namespaces, mounts, capabilities and a system-call filter.

bubblewrap isolates the fork server from the host. Inside it each sandbox has user, mount, process, network and IPC
namespaces of its own, made in about 2 ms: an empty private /tmp, no view of other sandboxes' processes, no shared
loopback. The kernel removes all of it when the sandbox's init ends. A sandbox holds no capability and can make no
further namespace. The standard library lacks these system calls; every failure of one is an OSError.
"""

import contextlib
import ctypes
import errno
import os
import platform
import signal
import struct
from collections.abc import Callable

from treadle_tools.tool import WORK_FOLDER_INODES

_libc = ctypes.CDLL(None, use_errno=True)
# Keeps the interpreter's lock during the call: both processes hold it after a clone.
_holding = ctypes.PyDLL(None, use_errno=True)
_holding.syscall.argtypes = (ctypes.c_long, ctypes.c_ulong, *[ctypes.c_void_p] * 4)
_holding.syscall.restype = ctypes.c_long
_python = ctypes.pythonapi
_libc.mount.argtypes = (ctypes.c_char_p, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_ulong, ctypes.c_char_p)
_libc.prctl.argtypes = (ctypes.c_int, ctypes.c_ulong, ctypes.c_ulong, ctypes.c_ulong, ctypes.c_ulong)

CLONE_NEWNS = 0x00020000
CLONE_NEWIPC = 0x08000000
CLONE_NEWUSER = 0x10000000
CLONE_NEWPID = 0x20000000
CLONE_NEWNET = 0x40000000

NAMESPACES = CLONE_NEWUSER | CLONE_NEWNS | CLONE_NEWPID | CLONE_NEWNET | CLONE_NEWIPC

MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REC, MS_PRIVATE = 1, 2, 4, 8, 16384, 1 << 18

OOM_SCORE = 500  # as if it held half of the machine's memory

_SHM_INFO, _MSG_INFO, _SEM_INFO = 14, 12, 19
_INFO_BYTES = 256  # more than any of their structures has

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


def fork_isolated(work_bytes: int, run_init: Callable[[], None], report: Callable[[OSError], None]) -> None:
    """Fork a new sandbox from this single-threaded process. `run_init` runs as its init, or `report` in its place
    where the kernel refuses. work_bytes: size of its /tmp.

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
    # After a change of uid the kernel lets only root write /proc/self/uid_map, unless the process is dumpable.
    set_dumpable(True)
    for name, line in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
        _write(f"/proc/self/{name}", line)
    _mount("none", "/", "none", MS_REC | MS_PRIVATE)
    for folder in ("/tmp", "/dev/shm"):
        options = f"size={work_bytes},nr_inodes={WORK_FOLDER_INODES},mode=0700,uid={uid},gid={gid}"
        _mount("tmpfs", folder, "tmpfs", MS_NOSUID | MS_NODEV, options)
    with contextlib.suppress(PermissionError):  # where memory runs out, the kernel should kill a sandbox first
        _write("/proc/self/oom_score_adj", str(OOM_SCORE))
    flags = MS_NOSUID | MS_NODEV | MS_NOEXEC
    try:
        _mount("proc", "/proc", "proc", flags)
    except PermissionError:  # bubblewrap started as root covers parts of /proc, and the kernel allows no new one
        _mount("tmpfs", "/proc", "tmpfs", flags | MS_RDONLY, "mode=0555")
    drop_privileges()


def drop_privileges() -> None:
    """Give up what a sandbox does not need any more: capabilities, new namespaces, readable memory; and Python's
    handler of SIGINT, because a signal that init does not handle never reaches it from inside its namespace."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    drop_capabilities()
    _filter_system_calls()
    set_dumpable(False)
    os.chdir("/tmp")


def _clone(flags: int) -> int:
    """os.fork, whose child is in the new namespaces named by `flags` (CLONE_NEW…), and process 1 of a new process
    namespace. The process must have one thread. OSError on a machine that is not in `_MACHINES`.

    One fork instead of the two that unshare takes for a process namespace: a fork of a Python costs the kernel 1 ms.
    """
    if platform.machine() not in _MACHINES:
        raise OSError(errno.ENOSYS, f"clone: no table for {platform.machine()}")
    number = _MACHINES[platform.machine()][1]
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
    """Write a file of the kernel. A tenth of the time of pathlib's, which counts where every action pays it."""
    descriptor = os.open(path, os.O_WRONLY)
    try:
        os.write(descriptor, text.encode())
    finally:
        os.close(descriptor)


def _mount(source: str, target: str, kind: str, flags: int, options: str = "") -> None:
    _check(_libc.mount(source.encode(), target.encode(), kind.encode(), flags, options.encode()), f"mount {target}")


def set_dumpable(dumpable: bool) -> None:
    """Let processes of the same user read this one's memory and descriptors, or refuse it."""
    _check(_libc.prctl(_PR_SET_DUMPABLE, int(dumpable), 0, 0, 0), "prctl dumpable")


def die_with_parent(signal_number: int) -> None:
    """Have the kernel send this process a signal when its parent ends."""
    _check(_libc.prctl(_PR_SET_PDEATHSIG, signal_number, 0, 0, 0), "prctl pdeathsig")


def has_no_new_privileges() -> bool:
    """Whether set-user-id programs and file capabilities give this process nothing."""
    return _check(_libc.prctl(_PR_GET_NO_NEW_PRIVS, 0, 0, 0, 0), "prctl no_new_privs") == 1


def drop_capabilities() -> None:
    """Give up every capability, also those that may be taken back or inherited."""
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION_3, 0)
    _check(_libc.capset(ctypes.byref(header), ctypes.byref((ctypes.c_uint32 * 6)())), "capset")


def count_ipc_objects() -> int:
    """How many shared memory segments, semaphore sets and message queues of System V this IPC namespace has."""
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


# The filter refuses what no tool needs and what escapes and leaks between actions use: more namespaces, other
# processes' memory, kernel keyrings (they outlive an action), and programs that the kernel interprets.
# Per machine: audit architecture, clone, clone3, then the refused calls: unshare setns ptrace process_vm_readv
# process_vm_writev add_key request_key keyctl bpf perf_event_open userfaultfd io_uring_setup.
_MACHINES = {
    "x86_64": (0xC000003E, 56, 435, (272, 308, 101, 310, 311, 248, 249, 250, 321, 298, 323, 425)),
    "aarch64": (0xC00000B7, 220, 435, (97, 268, 117, 270, 271, 217, 218, 219, 280, 241, 282, 425)),
}
_X32_CALLS = 0x40000000  # x86_64's second table of numbers
_LOAD, _JUMP_EQUAL, _JUMP_AT_LEAST, _JUMP_SET, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_NUMBER_AT, _ARCHITECTURE_AT, _FIRST_ARGUMENT_AT = 0, 4, 16  # offsets in struct seccomp_data, little-endian
_ALLOW, _NO_PERMISSION, _NO_SUCH_CALL = 0x7FFF0000, 0x00050000 | 1, 0x00050000 | 38


def _filter_program() -> bytes | None:
    """The filter as the kernel reads it (struct sock_filter[]); None on a machine that is not in `_MACHINES`."""
    if platform.machine() not in _MACHINES:
        return None
    architecture, clone, clone3, refused = _MACHINES[platform.machine()]
    program = [
        (_LOAD, 0, 0, _ARCHITECTURE_AT),
        (_JUMP_EQUAL, 1, 0, architecture),
        (_RETURN, 0, 0, _NO_SUCH_CALL),
        (_LOAD, 0, 0, _NUMBER_AT),
        (_JUMP_AT_LEAST, 0, 1, _X32_CALLS),
        (_RETURN, 0, 0, _NO_SUCH_CALL),
        # glibc falls back to clone, whose flags the filter can read; those of clone3 are behind a pointer.
        (_JUMP_EQUAL, 0, 1, clone3),
        (_RETURN, 0, 0, _NO_SUCH_CALL),
    ]
    for number in refused:
        program += [(_JUMP_EQUAL, 0, 1, number), (_RETURN, 0, 0, _NO_PERMISSION)]
    program += [
        (_JUMP_EQUAL, 0, 3, clone),
        (_LOAD, 0, 0, _FIRST_ARGUMENT_AT),
        (_JUMP_SET, 0, 1, CLONE_NEWUSER),
        (_RETURN, 0, 0, _NO_PERMISSION),
        (_RETURN, 0, 0, _ALLOW),
    ]
    return b"".join(struct.pack("=HBBI", *step) for step in program)


def _filter_system_calls() -> None:
    """Refuse these calls from now on, for children too; cannot be undone. Nothing on a machine without a table."""
    if _FILTER is None:
        return
    code = ctypes.create_string_buffer(_FILTER)
    # struct sock_fprog: a 16-bit count, padding, a pointer.
    fprog = ctypes.create_string_buffer(struct.pack("@H6xP", len(_FILTER) // 8, ctypes.addressof(code)))
    _check(_libc.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.addressof(fprog), 0, 0), "seccomp")


_FILTER = _filter_program()
