"""How much of the machine other programs took: a comparison of two arms means little where one of them had company.

Counts the CPU time of all cores against that of this process and everything below it; what a hypervisor steals counts
as others'.
Processes that end meanwhile are missed where nobody has collected them yet, so small shares are noise.
"""

import contextlib
import time

import psutil


class OtherPrograms:
    """Begins to count when made."""

    def __init__(self) -> None:
        self._wall_s, self._busy_s, self._own_s = time.monotonic(), _busy_s(), _own_s()

    def share(self) -> float:
        """The part of all cores' time that went to others since then, between 0 and 1."""
        wall_s = (time.monotonic() - self._wall_s) * (psutil.cpu_count() or 1)
        others_s = (_busy_s() - self._busy_s) - (_own_s() - self._own_s)
        return min(1.0, max(0.0, others_s / wall_s)) if wall_s > 0 else 0.0


def _busy_s() -> float:
    times = psutil.cpu_times()
    return float(times.user + times.nice + times.system + times.irq + times.softirq + times.steal)


def _own_s() -> float:
    me = psutil.Process()
    total = 0.0
    for process in (me, *me.children(recursive=True)):
        with contextlib.suppress(psutil.NoSuchProcess):
            times = process.cpu_times()
            total += times.user + times.system + times.children_user + times.children_system
    return total
