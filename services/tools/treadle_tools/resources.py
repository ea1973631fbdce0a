"""Define what resources actions request, and what this machine has of them.

`Demands` makes an action of the scheduler out of what a tool declares, and learns how long each
tool's actions take. `find_node` counts the cores and the memory. An action that requests more cores
than the node has may get all of them.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from treadle_core.tools.action import (
    CPU_CORES,
    GPUS,
    MEMORY_BYTES,
    MOST_UNITS,
    Action,
    Amdahl,
    Demand,
    Elasticity,
    Fixed,
    InvalidActionError,
    Measured,
    Range,
    UnitSet,
    check_action,
)
from treadle_core.tools.cpu import CpuManager, Machine
from treadle_core.tools.dispatcher import Dispatcher, Resources
from treadle_core.tools.gpu import GpuManager
from treadle_core.tools.providers import BasicManager

from treadle_tools.tool import Kind, Limits, Result, Scaling, Tool

UNORDERED = 0  # the arrival of an action until the scheduler has given it its place
RECENT_SHARE = 0.2  # of the newest in the average: five actions back still count for a third


class RecentMeans(dict[str, float]):
    """A moving average of the values of each key, in which newer ones count for more."""

    def add(self, key: str, value: float) -> None:
        """Move the key's average towards its newest value."""
        known = self.setdefault(key, value)
        self[key] = known + RECENT_SHARE * (value - known)


def elasticity(scaling: Scaling) -> Elasticity:
    """Return E of eq. 1 (ARL-Tangram) for a Scaling."""
    return Measured(scaling.efficiency) if scaling.efficiency else Amdahl(scaling.serial_share)


class Demands:
    """Makes actions, and learns each tool's overhead, seconds of work on one core and speedup from
    those that ended.

    cores, memory_bytes: of the node. providers: by name.
    """

    def __init__(
        self, cores: int, memory_bytes: int, providers: Mapping[str, BasicManager]
    ) -> None:
        self._cores = cores
        self._memory_bytes = memory_bytes
        self._providers = providers
        self._overhead_s = RecentMeans()
        self._single_core_s = RecentMeans()
        self._speedup = RecentMeans()

    def learn(self, tool: Tool, result: Result) -> None:
        """Learn from the result of an action that its provider did not refuse."""
        factor = (
            1.0
            if tool.scaling is None
            else elasticity(tool.scaling).efficiency(result.cores) * result.cores
        )
        self._overhead_s.add(tool.name, result.overhead_s)
        self._single_core_s.add(tool.name, result.execution_s * factor)
        self._speedup.add(tool.name, factor)

    def expected_s(self, tool: Tool) -> float:
        """Return the seconds of the next action from its start, with as many cores as lately; 0:
        not known."""
        if tool.name not in self._speedup:
            return 0.0
        return (
            self._overhead_s[tool.name] + self._single_core_s[tool.name] / self._speedup[tool.name]
        )

    def action(self, action_id: str, holder: str, tool: Tool, limits: Limits) -> Action:
        """Return one action of `tool` as the scheduler takes it.

        holder: the session, whose memory is held until its end, or the action itself.

        A single call requests no memory, as no more such calls run than there are cores: else they
        would wait for sessions to end, which wait for what their trajectories call. Without a
        Scaling it is not known how an action scales, but its duration is given all the same.
        """
        most = min(limits.cpu_cores, self._cores)
        cost: dict[str, Demand] = {CPU_CORES: cores_demand(tool.scaling, most)}
        stays = tool.kind is Kind.ENVIRONMENT
        if stays:
            cost[MEMORY_BYTES] = Fixed(
                min(tool.reserve_bytes, limits.memory_bytes, self._memory_bytes)
            )
        if tool.provider:
            cost |= self._providers[tool.provider].cost()
        return Action(
            action_id,
            holder,
            UNORDERED,
            cost,
            self._next_single_core_s(tool),
            key=CPU_CORES,
            elasticity=elasticity(tool.scaling) if tool.scaling is not None else None,
            node_id=None if stays else NODE_ID,
        )

    def _next_single_core_s(self, tool: Tool) -> float | None:
        """Return the seconds of the next action on one core, as profiled or learned; None: not
        known."""
        if tool.scaling is not None and tool.scaling.single_core_s is not None:
            return tool.scaling.single_core_s
        known = tool.name in self._single_core_s
        return self._overhead_s[tool.name] + self._single_core_s[tool.name] if known else None


def check_scaling(tool: Tool) -> None:
    """Raise InvalidActionError for a Scaling with an invalid number, or more cores than the tool's
    limit."""
    if (scaling := tool.scaling) is None:
        return
    single_core_s = 1.0 if scaling.single_core_s is None else scaling.single_core_s
    cost = {CPU_CORES: UnitSet(scaling.cores)}
    declared = Action(tool.name, tool.name, 0, cost, single_core_s, CPU_CORES, elasticity(scaling))
    check_action(declared, {CPU_CORES: MOST_UNITS})
    if scaling.cores[-1] > tool.limits.cpu_cores:
        raise InvalidActionError(
            "cores", f"must be at most limits.cpu_cores, {tool.limits.cpu_cores}"
        )


def cores_demand(scaling: Scaling | None, most: int) -> Demand:
    """Return how many cores an action requests, where it can have `most`."""
    if scaling is None:
        return Fixed(most)
    choices = tuple(cores for cores in scaling.cores if cores <= most) or (most,)
    if choices == tuple(range(choices[0], choices[-1] + 1)):
        return Range(choices[0], choices[-1])
    return UnitSet(choices)


NODE_ID = "local"
MEMORY_LIMITS = (
    Path("/sys/fs/cgroup/memory.max"),
    Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
)


@dataclass(frozen=True)
class Node:
    """This machine's cores and memory.

    real: the cores have this machine's numbers; else only their count has a meaning.
    """

    machine: Machine
    real: bool

    @property
    def cores(self) -> int:
        return self.machine.cores


def find_node(
    cores: int, memory_bytes: int, system: Path = Path("/sys/devices/system/node")
) -> Node:
    """Return this machine with so many cores and bytes; 0: all there are.

    With more cores than the machine has, actions share them.
    """
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
# Not convex: arranged by the table
ROUGH: Shape = (UnitSet((1, 2, 4)), Measured(((1, 1.0), (2, 0.5), (4, 0.9))))


def compile_kernels() -> None:
    """Have the solvers compiled before any action waits, by deciding on actions of all shapes."""
    for shapes in ((SMOOTH, SMOOTH), (SMOOTH, ROUGH)):
        _decide_all(CpuManager([Machine("warm", (tuple(range(8)),), 1 << 30)]), CPU_CORES, shapes)
    _decide_all(GpuManager(["warm"], 1), GPUS, (ROUGH, ROUGH))


def _decide_all(manager: CpuManager | GpuManager, key: str, shapes: Sequence[Shape]) -> None:
    """Decide, until none waits, on twelve actions whose demands for `key` have these shapes in
    turn."""
    dispatcher = Dispatcher(Resources([manager]), 0.0)
    others = {name: Fixed(1) for name in manager.dimensions if name != key}
    dispatcher.start_at_once(Action("alone", "alone", 0, {key: Fixed(1), **others}), 0.0)
    for index in range(12):
        demand, elasticity = shapes[index % 2]
        cost = {key: demand, **others}
        dispatcher.submit(
            Action(f"w{index}", f"w{index}", index, cost, 1.0 + index, key, elasticity)
        )
    now_s = 0.0
    while len(dispatcher):
        now_s += 1.0
        for started in dispatcher.decide(now_s):
            dispatcher.end(started.action.action_id, now_s)
