"""The few system calls that the standard library does not have: namespaces, mounts, capabilities, the system-call
filter.

Invariant: nothing here decides anything; `inside/cell.py` says what to ask for. Every failure is an OSError.
"""

import ctypes
import errno
import os
import platform
import signal
import struct

_libc = ctypes.CDLL(None, use_errno=True)
# Without letting go of the interpreter's lock: who comes back from a clone holds it, in both processes.
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

MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REC, MS_PRIVATE = 1, 2, 4, 8, 16384, 1 << 18

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


def fork(flags: int) -> int:
    """os.fork, whose child is in the new namespaces named by `flags` (CLONE_NEW…), and process 1 of a new process
    namespace. The process must have one thread. On a machine without a table it is an OSError.

    One fork instead of the two that unshare takes for a process namespace: a fork of a Python costs the kernel 1 ms.
    """
    if platform.machine() not in _MACHINES:
        raise OSError(errno.ENOSYS, f"clone: no table for {platform.machine()}")
    number = _MACHINES[platform.machine()][1]
    _python.PyOS_BeforeFork()  # as os.fork does, with these three
    pid = _holding.syscall(number, flags | signal.SIGCHLD, None, None, None, None)
    failed = ctypes.get_errno()
    if pid == 0:
        _python.PyOS_AfterFork_Child()
    else:
        _python.PyOS_AfterFork_Parent()
    if pid < 0:
        raise OSError(failed, f"clone: {os.strerror(failed)}")
    return int(pid)


def map_ids(uid: int, gid: int) -> None:
    """Map the one uid and gid of this process to themselves in the user namespace that it has just made."""
    for name, line in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
        write(f"/proc/self/{name}", line)


def write(path: str, text: str) -> None:
    """Write a file of the kernel's. A tenth of the time of pathlib's, which counts where every action pays it."""
    descriptor = os.open(path, os.O_WRONLY)
    try:
        os.write(descriptor, text.encode())
    finally:
        os.close(descriptor)


def mount(source: str, target: str, kind: str, flags: int, options: str = "") -> None:
    """mount(2)."""
    _check(_libc.mount(source.encode(), target.encode(), kind.encode(), flags, options.encode()), f"mount {target}")


def set_dumpable(dumpable: bool) -> None:
    """Whether processes of the same user may read this one's memory and descriptors."""
    _check(_libc.prctl(_PR_SET_DUMPABLE, int(dumpable), 0, 0, 0), "prctl dumpable")


def die_with_parent(signal_number: int) -> None:
    """Be sent a signal when the parent ends."""
    _check(_libc.prctl(_PR_SET_PDEATHSIG, signal_number, 0, 0, 0), "prctl pdeathsig")


def no_new_privileges() -> bool:
    """Whether programs with setuid or file capabilities give this process nothing."""
    return _check(_libc.prctl(_PR_GET_NO_NEW_PRIVS, 0, 0, 0, 0), "prctl no_new_privs") == 1


def drop_capabilities() -> None:
    """Give up every capability, also those that may be taken back or inherited."""
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION_3, 0)
    _check(_libc.capset(ctypes.byref(header), ctypes.byref((ctypes.c_uint32 * 6)())), "capset")


def ipc_objects() -> int:
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


# The filter. What is refused has no use in a tool, and is where escapes and leaks between actions come from: more
# namespaces, other processes' memory, kernel keyrings (they outlive an action), and the kernel's own little languages.
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


def _program() -> bytes | None:
    """The filter as the kernel reads it (struct sock_filter[]); None for a machine without a table."""
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
        # glibc falls back to clone, whose flags can be looked at; clone3's are behind a pointer.
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


_PROGRAM = _program()


def filter_system_calls() -> bool:
    """Refuse the calls above from here on, for children too; cannot be undone. False on a machine without a table."""
    if _PROGRAM is None:
        return False
    code = ctypes.create_string_buffer(_PROGRAM)
    # struct sock_fprog: a 16-bit count, padding, a pointer.
    fprog = ctypes.create_string_buffer(struct.pack("@H6xP", len(_PROGRAM) // 8, ctypes.addressof(code)))
    _check(_libc.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.addressof(fprog), 0, 0), "seccomp")
    return True
