"""The machine that tools run on: its cores by NUMA node, and its memory, as far as this process may use them."""

import os
from dataclasses import dataclass
from pathlib import Path

from treadle_core.managers.cpu import Machine

NODE_ID = "local"
MEMORY_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))


@dataclass(frozen=True)
class Node:
    """real: the cores are this machine's, by their numbers; else only their count means anything."""

    machine: Machine
    real: bool

    @property
    def cores(self) -> int:
        """How many."""
        return sum(map(len, self.machine.numa))


def node_of(cores: int, memory_bytes: int, system: Path = Path("/sys/devices/system/node")) -> Node:
    """What there is; 0: all of it. More cores than there are is a count of actions that share those there are."""
    usable = os.sched_getaffinity(0)
    wanted = cores or len(usable)
    memory_bytes = memory_bytes or total_memory_bytes()
    if wanted > len(usable):
        return Node(Machine(NODE_ID, (tuple(range(wanted)),), memory_bytes), real=False)
    numa = [sorted(usable & listed((folder / "cpulist").read_text())) for folder in sorted(system.glob("node[0-9]*"))]
    known = {core for cores_of in numa for core in cores_of}
    numa = [*numa, sorted(usable - known)]
    taken: list[tuple[int, ...]] = []
    for of_node in numa:
        taken.append(tuple(of_node[: wanted - sum(map(len, taken))]))
    return Node(Machine(NODE_ID, tuple(filter(None, taken)), memory_bytes), real=True)


def listed(text: str) -> set[int]:
    """The numbers of a list as the kernel writes it, such as `0-3,8`."""
    found: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        found |= set(range(int(first), int(last or first) + 1))
    return found


def total_memory_bytes(limits: tuple[Path, ...] = MEMORY_LIMITS) -> int:
    """The machine's, or less where a control group allows less."""
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for path in limits:
        try:
            text = path.read_text().strip()
        except OSError:
            continue
        if text.isdigit():
            total = min(total, int(text))
    return total
