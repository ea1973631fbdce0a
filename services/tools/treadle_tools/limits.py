"""Limits of one action in a sandbox: cores, memory, seconds and bytes of output.

How many processes an action may have, and how large its /tmp may be, are properties of its tool (`Tool.processes`,
`Tool.work_bytes`). Invariant: standard library only, because this module is read on both sides of the sandbox's wall.
"""

from dataclasses import dataclass, fields
from typing import Any

MIB = 1024 * 1024

WORKER_BYTES = 64 * MIB  # beside an action's memory: pages of the preloaded modules that a fork copies; the supervisor
WORKER_PROCESSES = 4  # beside an action's processes: init, the environment, and one that is being forked
WORK_FOLDER_INODES = 16384  # kernel memory that the size of a work folder in bytes does not count
BACKSTOP_S = 2.0  # the sandbox enforces its own wall clock; this long later the service stops waiting for its answer


@dataclass(frozen=True)
class Limits:
    """What one action may use. memory_bytes counts what the action adds to its preloaded worker, children included."""

    cpu_cores: int = 1
    memory_bytes: int = 512 * MIB
    wall_s: float = 10.0
    output_bytes: int = 64 * 1024

    def message(self) -> dict[str, Any]:
        """The limits that the sandbox enforces by itself, as JSON."""
        return {field.name: getattr(self, field.name) for field in fields(Limits)}


@dataclass(frozen=True)
class Granted(Limits):
    """What one action gets. cpu_cores: how many; cores: which, ascending; empty where any will do."""

    cores: tuple[int, ...] = ()
