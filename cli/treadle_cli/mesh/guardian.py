"""Kill a process tree whose owner has died: python -I -S guardian.py TEMP_FOLDER < PIPE

The parent-death signal of launcher.py reaches children, not their forks (an engine's workers). So
the owner writes each session that it starts or ends ("+SID", "-SID" lines) and each folder that it
makes for them ("/PATH") to the guardian's standard input; when the pipe closes, because the owner
has ended in any way, the guardian sends SIGKILL to every process in those sessions, removes their
temporary files and those folders, and ends.

It signals only sessions in its list, and never its own. A session leaves the list before its id can
be used again, because the id stays taken while any member lives. Standard library only, run by
path.
"""

import contextlib
import os
import shutil
import signal
import sys
import time
from pathlib import Path

SWEEP_PAUSE_S = 0.05  # a killed process needs a moment to leave /proc
SWEEPS = 100  # 5 s: then what remains is stuck in the kernel, and waiting longer helps nobody


def session_members(session_id: int) -> list[int]:
    """Return the pids whose session is `session_id`, zombies aside. Reads /proc; empty where there
    is none."""
    members = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            # The name stands in parentheses and may hold spaces; what follows is: state ppid pgrp
            # session ...
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
            if int(fields[3]) == session_id and fields[0] not in ("Z", "X"):
                members.append(int(entry.name))
    return members


def kill_sessions(session_ids: set[int]) -> None:
    """Send SIGKILL to all members of these sessions until none is left, at most SWEEPS times."""
    for _ in range(SWEEPS):
        pids = [pid for session_id in session_ids for pid in session_members(session_id)]
        if not pids:
            return
        for pid in pids:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(SWEEP_PAUSE_S)


def main() -> None:
    """Read the pipe to its end, then kill and remove what is left."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # it ends when the tree's owner does, not before
    sessions: set[int] = set()
    folders = [sys.argv[1]]
    for line in sys.stdin:
        if line.startswith("/"):
            folders.append(line.rstrip("\n"))
            continue
        session_id = int(line[1:])
        if line.startswith("+"):
            sessions.add(session_id)
        else:
            sessions.discard(session_id)
    kill_sessions(sessions - {os.getsid(0)})
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
