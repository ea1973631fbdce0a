"""Attempts to get out, which every sandbox must withstand. Each prints `contained` and nothing
else, or raises.

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
    "a descriptor of another process": """
import ctypes, os
libc = ctypes.CDLL(None)
print("contained" if libc.syscall(438, os.pidfd_open(os.getpid()), 1, 0) < 0 else "taken")
""",
    "limits of another process, of which one on CPU seconds would end process 1": """
import os, resource
child = os.fork()
if child == 0:
    os.read(os.pipe()[0], 1)
try:
    resource.prlimit(child, resource.RLIMIT_CORE, (0, 0))
    print("limited")
except OSError:
    print("contained")
os.kill(child, 9)
ended = os.waitpid(child, 0)
""",
    # AF_VSOCK, AF_ALG, AF_PACKET, AF_TIPC: their addresses, or what they ask of the kernel, are
    # everybody's.
    "sockets beside the network's": """
import socket
made = []
for family in (40, 38, 17, 30):
    for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM, socket.SOCK_SEQPACKET, socket.SOCK_RAW):
        try:
            socket.socket(family, kind)
            made.append(family)
        except OSError as error:
            if error.errno != 97:
                made.append((family, error.errno))
print(made or "contained")
""",
    "watches of the file system, which the kernel counts for all": """
import ctypes
fanotify_init = {"x86_64": 300, "aarch64": 262}[__import__("platform").machine()]
print("contained" if ctypes.CDLL(None).syscall(fanotify_init, 0x200, 0) < 0 else "made")
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
