"""Attempts at more rights, which every sandbox must withstand. Each prints `contained` and nothing else, or raises."""

OF_PRIVILEGE = {
    "root": """
import os
tried = []
for call, *arguments in ((os.setuid, 0), (os.setgid, 0), (os.chroot, "/tmp"), (os.mknod, "/tmp/d", 0o60600, 1)):
    try:
        call(*arguments)
        tried.append("allowed")
    except OSError:
        pass
print(tried or "contained", end="" if os.getresuid() == (65534,) * 3 == os.getresgid() else "not nobody")
print()
""",
    # PR_GET_NO_NEW_PRIVS (39): the kernel gives nothing to who runs a set-user-id program.
    "capabilities and set-user-id programs": """
import ctypes
header, data = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
libc = ctypes.CDLL(None)
assert libc.capget(header, data) == 0
print("contained" if not any(data) and libc.prctl(39, 0, 0, 0, 0) == 1 else list(data))
""",
    "a namespace of its own": """
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
print("contained" if all(libc.unshare(flag) < 0 for flag in (0x10000000, 0x20000, 0x40000000)) else "unshared")
""",
}

FORK_BOMB = """
import os
while True:
    try:
        os.fork()
    except OSError:
        pass
"""
