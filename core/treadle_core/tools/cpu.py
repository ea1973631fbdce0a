"""Cores and memory of nodes, allocated on execution (ARL-Tangram §5.2).

A core belongs to one action at a time. A trajectory's memory is held from its first action until it
is forgotten, and its actions stay on that action's node, which `CpuNodes.assign` chooses: where the
largest share of memory is free.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from treadle_core.tools.action import CPU_CORES, MEMORY_BYTES, Action, InvalidActionError
from treadle_core.tools.decision import Executing, Start
from treadle_core.tools.grants import CpuGrant, Ended, InvalidHoldingError, Manager, Usage
from treadle_core.tools.pools import CpuNodes, InvalidPoolError

Cores = tuple[frozenset[int], ...]  # by NUMA node


@dataclass(frozen=True, slots=True)
class Machine:
    """Node with cores and memory. numa: the numbers of the cores of each NUMA node that actions may
    use."""

    node_id: str
    numa: tuple[tuple[int, ...], ...]
    memory_bytes: int

    @property
    def cores(self) -> int:
        """Return how many cores actions may use."""
        return sum(map(len, self.numa))


@dataclass
class _Node:
    machine: Machine
    free: Cores
    free_memory_bytes: int

    @property
    def free_cores(self) -> int:
        return sum(map(len, self.free))


@dataclass
class _Running:
    node: _Node
    cores: Cores
    count: int
    ends_at_s: float
    scalable: bool


@dataclass
class _Home:
    node: _Node
    memory_bytes: int = 0


class CpuManager(Manager):
    """Owner of the cores and the memory of all nodes."""

    dimensions: ClassVar[tuple[str, ...]] = (CPU_CORES, MEMORY_BYTES)

    def __init__(self, machines: Sequence[Machine]) -> None:
        """Create the manager. Raises InvalidPoolError for a node or a core twice, or memory below
        0."""
        self._nodes: dict[str, _Node] = {}
        for index, machine in enumerate(machines):
            if machine.node_id in self._nodes:
                raise InvalidPoolError(
                    f"machines[{index}].node_id", f"{machine.node_id!r} is there twice"
                )
            if len({core for numa in machine.numa for core in numa}) < machine.cores:
                raise InvalidPoolError(f"machines[{index}].numa", "has a core twice")
            if machine.memory_bytes < 0:
                raise InvalidPoolError(f"machines[{index}].memory_bytes", "must be at least 0")
            self._nodes[machine.node_id] = _Node(
                machine, tuple(map(frozenset, machine.numa)), machine.memory_bytes
            )
        self._running: dict[str, _Running] = {}
        self._homes: dict[str, _Home] = {}

    def home(self, trajectory_id: str) -> str | None:
        """Return the node that a trajectory lives on; None before its first action."""
        home = self._homes.get(trajectory_id)
        return None if home is None else home.node.machine.node_id

    def send_home(self, action: Action) -> Action:
        """Return the action for the node that its trajectory lives on, if any, without the memory
        held there."""
        node_id = self.home(action.trajectory_id)
        if node_id is None:
            return action
        cost = {
            dimension: demand
            for dimension, demand in action.cost.items()
            if dimension != MEMORY_BYTES
        }
        return replace(action, node_id=node_id, cost=cost or action.cost)

    def check(self, action: Action) -> None:
        if action.node_id is not None and action.node_id not in self._nodes:
            raise InvalidActionError(
                "node_id", f"no node is called {action.node_id!r}; place its trajectory anew"
            )

    def pools(self, now_s: float) -> tuple[CpuNodes, ...]:
        nodes = self._nodes.values()
        capacity = [(node.machine.cores, node.machine.memory_bytes) for node in nodes]
        return (
            CpuNodes(
                self._nodes, capacity, [(node.free_cores, node.free_memory_bytes) for node in nodes]
            ),
        )

    def executing(self, now_s: float) -> list[Executing]:
        return [
            Executing(
                CPU_CORES,
                each.count,
                each.ends_at_s - now_s,
                each.node.machine.node_id,
                each.scalable,
            )
            for each in self._running.values()
        ]

    def take(
        self, start: Start, units: Mapping[str, int], now_s: float, expected_s: float
    ) -> CpuGrant:
        assert start.node_id is not None
        action, node = start.action, self._nodes[start.node_id]
        count, memory_bytes = units.get(CPU_CORES, 0), units.get(MEMORY_BYTES, 0)
        if count > node.free_cores or memory_bytes > node.free_memory_bytes:
            raise InvalidHoldingError("start.units", "more than is free")
        cores = pick_cores(node.free, count)
        node.free = tuple(free - taken for free, taken in zip(node.free, cores, strict=True))
        node.free_memory_bytes -= memory_bytes
        home = self._homes.setdefault(action.trajectory_id, _Home(node))
        home.memory_bytes += memory_bytes
        self._running[action.action_id] = _Running(
            node, cores, count, now_s + expected_s, action.scalable
        )
        return CpuGrant(
            start.node_id, tuple(sorted(core for numa in cores for core in numa)), home.memory_bytes
        )

    def give_back(self, action_id: str, ended: Ended, now_s: float) -> None:
        ran = self._running.pop(action_id)
        ran.node.free = tuple(
            free | held for free, held in zip(ran.node.free, ran.cores, strict=True)
        )

    def forget(self, trajectory_id: str) -> None:
        home = self._homes.pop(trajectory_id, None)
        if home is not None:
            home.node.free_memory_bytes += home.memory_bytes

    def usage(self, now_s: float) -> tuple[Usage, ...]:
        nodes = self._nodes.values()
        cores, free_cores = (
            sum(node.machine.cores for node in nodes),
            sum(node.free_cores for node in nodes),
        )
        size = sum(node.machine.memory_bytes for node in nodes)
        free_bytes = sum(node.free_memory_bytes for node in nodes)
        return (
            Usage(CPU_CORES, cores, cores - free_cores, free_cores),
            Usage(MEMORY_BYTES, size, size - free_bytes, free_bytes),
        )


def pick_cores(free: Cores, count: int) -> Cores:
    """Return `count` of the free cores, of which there are at least as many.

    They are all of one NUMA node where one has enough, of the fullest such node, so that emptier
    ones stay for larger actions; else of as few nodes as possible: the emptiest first, and as the
    last one again the fullest that has enough.
    """
    left = [set(cores) for cores in free]
    picked: list[frozenset[int]] = [frozenset()] * len(free)
    while count > 0:
        enough = [(len(cores), at) for at, cores in enumerate(left) if len(cores) >= count]
        at = (
            min(enough)[1]
            if enough
            else max(range(len(left)), key=lambda index: (len(left[index]), -index))
        )
        picked[at] = frozenset(sorted(left[at])[:count])
        count -= len(picked[at])
        left[at].clear()
    return tuple(picked)
