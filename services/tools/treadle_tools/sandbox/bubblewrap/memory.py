"""Counts the memory of a cell where control groups cannot: the sum over its first process and all descendants.

A process tree that outgrows its limit within one interval can exceed it until the next; RLIMIT_AS bounds each process
meanwhile, and the limit on processes bounds their number.
"""

import asyncio
import resource
from pathlib import Path

INTERVAL_S = 0.1  # a look costs about 0.1 ms of CPU for a handful of processes
PAGE_BYTES = resource.getpagesize()


def private_bytes(pid: int, inherited_bytes: int = 0, proc: Path = Path("/proc")) -> int:
    """Resident bytes of `pid` and its descendants that no file backs; 0 once it is gone.

    inherited_bytes: what each of them shares with the worker it was forked from, not counted again for each.
    """
    total, waiting = 0, [pid]
    while waiting:
        process = proc / str(waiting.pop())
        try:
            total += max(0, _own_bytes(process) - inherited_bytes)
            for thread in (process / "task").iterdir():
                waiting += [int(child) for child in (thread / "children").read_text().split()]
        except (FileNotFoundError, ProcessLookupError):
            continue
    return total


def _own_bytes(process: Path) -> int:
    try:
        resident, shared = (process / "statm").read_text().split()[1:3]
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return max(0, int(resident) - int(shared)) * PAGE_BYTES


async def outgrows(pid: int, limit_bytes: int) -> None:
    """Returns once the tree of `pid` holds `limit_bytes` more than now; cancel it otherwise."""
    inherited = _own_bytes(Path("/proc") / str(pid))
    most = private_bytes(pid, inherited) + limit_bytes
    while True:
        if private_bytes(pid, inherited) > most:
            return
        await asyncio.sleep(INTERVAL_S)
