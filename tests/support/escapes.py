"""Attempts to get out, which every sandbox must withstand. Each prints `contained` and nothing else, or raises.

They read PORT (of the service), SECRET (a path of the host) and FOLDERS (that nobody may write).
"""

ATTEMPTS = {
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
    "the network by address": """
import socket
for address in (("169.254.169.254", 80), ("1.1.1.1", 53), ("127.0.0.1", PORT), ("172.17.0.1", PORT)):
    try:
        socket.create_connection(address, timeout=2)
        print("connected to", address)
    except OSError:
        pass
print("contained")
""",
    "a link out of the work folder": """
import os
os.symlink(SECRET, "/tmp/link")
try:
    print(open("/tmp/link").read())
except OSError:
    print("contained")
""",
    "writing anywhere but /tmp": """
import os, sys
written = []
more = ["/", "/usr", "/usr/bin", "/proc", sys.prefix, os.path.dirname(os.__file__), *filter(None, sys.path)]
for folder in FOLDERS + more:
    try:
        open(os.path.join(folder, "x"), "w")
        written.append(folder)
    except OSError:
        pass
print(written or "contained")
""",
    "process 1, its memory and its connection to the service": """
import ctypes, os
reached = []
if ctypes.CDLL(None).ptrace(16, 1, 0, 0) == 0:
    reached.append("traced")
for path in ("/proc/1/mem", "/proc/1/fd/0", "/proc/1/fd/1", "/proc/1/fd/3", "/proc/1/environ"):
    try:
        open(path, "rb")
        reached.append(path)
    except OSError:
        pass
for number in range(1, 32):
    os.kill(1, number)
print(reached or "contained")
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
