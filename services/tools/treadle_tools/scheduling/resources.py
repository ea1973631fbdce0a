"""Find this machine's cores and memory, and prepare the process to decide who gets them."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from treadle_core.tools.action import CPU_CORES, GPUS, Action, Amdahl, Elasticity, Fixed, Measured, Range, UnitSet
from treadle_core.tools.cpu import CpuManager, Machine
from treadle_core.tools.dispatcher import Dispatcher, Resources
from treadle_core.tools.gpu import GpuManager

NODE_ID = "local"
MEMORY_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))


@dataclass(frozen=True)
class Node:
    """real: the cores have this machine's numbers; else only their count has a meaning."""

    machine: Machine
    real: bool

    @property
    def cores(self) -> int:
        return self.machine.cores


def find_node(cores: int, memory_bytes: int, system: Path = Path("/sys/devices/system/node")) -> Node:
    """This machine with so many cores and bytes; 0: all there are. With more cores than those, actions share them."""
    usable = os.sched_getaffinity(0)
    wanted = cores or len(usable)
    memory_bytes = memory_bytes or total_memory_bytes()
    if wanted > len(usable):
        return Node(Machine(NODE_ID, (tuple(range(wanted)),), memory_bytes), real=False)
    numa = [
        sorted(usable & parse_cpu_list((folder / "cpulist").read_text()))
        for folder in sorted(system.glob("node[0-9]*"))
    ]
    numa.append(sorted(usable.difference(*numa)))
    taken: list[tuple[int, ...]] = []
    for of_node in numa:
        taken.append(tuple(of_node[: wanted - sum(map(len, taken))]))
    return Node(Machine(NODE_ID, tuple(filter(None, taken)), memory_bytes), real=True)


def parse_cpu_list(text: str) -> set[int]:
    """Parse a list as the kernel writes it, such as `0-3,8`."""
    found: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        found |= set(range(int(first), int(last or first) + 1))
    return found


def total_memory_bytes(limits: tuple[Path, ...] = MEMORY_LIMITS) -> int:
    """Return the machine's memory, or less where a control group allows less."""
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for path in limits:
        try:
            text = path.read_text().strip()
        except OSError:
            continue
        if text.isdigit():
            total = min(total, int(text))
    return total


Shape = tuple[Range | UnitSet, Elasticity]
SMOOTH: Shape = (Range(1, 4), Amdahl(0.1))
ROUGH: Shape = (UnitSet((1, 2, 4)), Measured(((1, 1.0), (2, 0.5), (4, 0.9))))  # not convex: arranged by the table


def compile_kernels() -> None:
    """Have the solvers compiled before any action waits: decide on actions of all shapes."""
    for shapes in ((SMOOTH, SMOOTH), (SMOOTH, ROUGH)):
        _decide_all(CpuManager([Machine("warm", (tuple(range(8)),), 1 << 30)]), CPU_CORES, shapes)
    _decide_all(GpuManager(["warm"], 1), GPUS, (ROUGH, ROUGH))


def _decide_all(manager: CpuManager | GpuManager, key: str, shapes: Sequence[Shape]) -> None:
    """Decide until none waits of twelve actions whose demands for `key` have these shapes in turn."""
    dispatcher = Dispatcher(Resources([manager]), 0.0)
    others = {name: Fixed(1) for name in manager.dimensions if name != key}
    dispatcher.start_at_once(Action("alone", "alone", 0, {key: Fixed(1), **others}), 0.0)
    for index in range(12):
        demand, elasticity = shapes[index % 2]
        cost = {key: demand, **others}
        dispatcher.submit(Action(f"w{index}", f"w{index}", index, cost, 1.0 + index, key, elasticity))
    now_s = 0.0
    while len(dispatcher):
        now_s += 1.0
        for started in dispatcher.decide(now_s):
            dispatcher.end(started.action.action_id, now_s)
