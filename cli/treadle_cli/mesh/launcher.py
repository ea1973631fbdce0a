"""Becomes a command that dies with its parent: python -I -S launcher.py PARENT_PID CORES COMMAND [ARGUMENT...]

Purpose: the kernel's parent-death signal must be asked for in the child, and Python's `preexec_fn` is unsafe in a
process that runs threads (gRPC does), so this small program asks for it and then executes COMMAND in its own place:
same pid, session and files. CORES is a comma list of cores to pin COMMAND to, or "" for none.

Standard library only: it is run by path, without site-packages, because it stands in front of every child.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1  # prctl(2); kept over execve, cleared in what the child forks
PARENT_GONE = 97  # exit codes of this program; the command's own never reach it
NOT_STARTED = 98


def main(argv: list[str]) -> int:
    """Executes the command; returns only when that was impossible."""
    parent_pid, cores, command = int(argv[1]), argv[2], argv[3:]
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if cores:
            os.sched_setaffinity(0, {int(core) for core in cores.split(",")})
    if os.getppid() != parent_pid:  # it died before we asked
        return PARENT_GONE
    try:
        os.execvp(command[0], command)
    except OSError as error:
        print(f"{command[0]}: {error.strerror}", file=sys.stderr)
    return NOT_STARTED


if __name__ == "__main__":
    sys.exit(main(sys.argv))
