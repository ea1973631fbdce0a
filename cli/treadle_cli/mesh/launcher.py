"""Execute a command that dies with its parent: python -I -S launcher.py PARENT_PID CORES COMMAND
[ARGUMENT...]

The child itself must request the parent-death signal from the kernel, and Python's `preexec_fn` is
unsafe in a process with threads (gRPC has some). So this program requests the signal and then
executes COMMAND in its own place: same pid, session and files. CORES is a comma-separated list of
cores to pin COMMAND to, or "". Standard library only, run by path without site-packages: it starts
before every child.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1  # prctl(2); kept over execve, cleared in what the child forks
PARENT_GONE = 97  # exit codes of this program; the command's own never reach it
NOT_STARTED = 98


def main(argv: list[str]) -> int:
    """Execute the command; return only if that was impossible."""
    parent_pid, cores, command = int(argv[1]), argv[2], argv[3:]
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if cores:
            os.sched_setaffinity(0, {int(core) for core in cores.split(",")})
    if os.getppid() != parent_pid:  # it died before this process requested the signal
        return PARENT_GONE
    try:
        os.execvp(command[0], command)
    except OSError as error:
        print(f"{command[0]}: {error.strerror}", file=sys.stderr)
    return NOT_STARTED


if __name__ == "__main__":
    sys.exit(main(sys.argv))
