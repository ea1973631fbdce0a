"""Cores and memory of nodes, allocated on execution (ARL-Tangram §5.2).

A core is of one action at a time. A trajectory's memory is held from its first action until it is forgotten, and its
actions stay on that action's node; which node is for `CpuNodes.seat` to say: where the largest share of memory is free.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

from treadle_core.tools.action import CPU_CORES, MEMORY_BYTES, Action, InvalidActionError
from treadle_core.tools.completions import Executing
from treadle_core.tools.decision import Start
from treadle_core.tools.grants import NEVER_S, CpuGrant, Ended, InvalidHoldingError, Usage
from treadle_core.tools.numa import Cores, ascending, count_of, minus, pick, plus
from treadle_core.tools.pools import CpuNode, CpuNodes, InvalidPoolError


@dataclass(frozen=True, slots=True)
class Machine:
    """A node. numa: the numbers of the cores of each NUMA node that actions may use."""

    node_id: str
    numa: tuple[tuple[int, ...], ...]
    memory_bytes: int

    @property
    def cores(self) -> int:
        """How many cores of it actions may use."""
        return sum(map(len, self.numa))


@dataclass
class _Node:
    machine: Machine
    free: Cores
    free_memory_bytes: int
    cores: int

    @property
    def free_cores(self) -> int:
        return count_of(self.free)


@dataclass
class _Held:
    """Of an action."""

    node: _Node
    cores: Cores
    count: int
    ends_at_s: float
    scalable: bool


@dataclass
class _Home:
    """Of a trajectory."""

    node: _Node
    memory_bytes: int = field(default=0)


class CpuManager:
    """See the module."""

    dimensions: ClassVar[tuple[str, ...]] = (CPU_CORES, MEMORY_BYTES)

    def __init__(self, machines: Sequence[Machine]) -> None:
        """Raises InvalidPoolError for a node or a core twice, or memory below 0."""
        self._nodes: dict[str, _Node] = {}
        for index, machine in enumerate(machines):
            cores = [core for numa in machine.numa for core in numa]
            if machine.node_id in self._nodes:
                raise InvalidPoolError(f"machines[{index}].node_id", f"{machine.node_id!r} is there twice")
            if len(set(cores)) < len(cores):
                raise InvalidPoolError(f"machines[{index}].numa", "has a core twice")
            if machine.memory_bytes < 0:
                raise InvalidPoolError(f"machines[{index}].memory_bytes", "must be at least 0")
            free = tuple(map(frozenset, machine.numa))
            self._nodes[machine.node_id] = _Node(machine, free, machine.memory_bytes, len(cores))
        self._held: dict[str, _Held] = {}
        self._homes: dict[str, _Home] = {}

    def home(self, trajectory_id: str) -> str | None:
        """The node that a trajectory lives on; None before its first action."""
        home = self._homes.get(trajectory_id)
        return None if home is None else home.node.machine.node_id

    def at_home(self, action: Action) -> Action:
        """The action as it is to be queued: of a trajectory that lives somewhere, there and without its memory."""
        node_id = self.home(action.trajectory_id)
        if node_id is None:
            return action
        cost = {dimension: demand for dimension, demand in action.cost.items() if dimension != MEMORY_BYTES}
        return replace(action, node_id=node_id, cost=cost or action.cost)

    def check(self, action: Action) -> None:
        """Raises InvalidActionError for a node that is not there."""
        if action.node_id is not None and action.node_id not in self._nodes:
            raise InvalidActionError("node_id", f"no node is called {action.node_id!r}; place its trajectory anew")

    def pools(self, now_s: float) -> tuple[CpuNodes, ...]:
        return (
            CpuNodes(
                tuple(
                    CpuNode(
                        name, node.cores, node.free_cores, node.machine.memory_bytes, node.free_memory_bytes
                    )
                    for name, node in self._nodes.items()
                )
            ),
        )  # fmt: skip

    def executing(self, now_s: float) -> list[Executing]:
        """Cores only: memory comes back when trajectories end, and nobody knows when."""
        return [
            Executing(CPU_CORES, held.count, held.ends_at_s - now_s, held.node.machine.node_id, held.scalable)
            for held in self._held.values()
            if held.count
        ]

    def take(self, start: Start, units: Mapping[str, int], now_s: float, expected_s: float) -> CpuGrant:
        action = start.action
        node = self._nodes.get(start.node_id or "")
        if node is None:
            raise InvalidHoldingError("start.node_id", f"no node is called {start.node_id!r}")
        home = self._homes.get(action.trajectory_id) or _Home(node)
        if home.node is not node:
            raise InvalidHoldingError("start.node_id", f"its trajectory lives on {home.node.machine.node_id!r}")
        if action.action_id in self._held:
            raise InvalidHoldingError("start.action.action_id", f"{action.action_id!r} holds cores already")
        count, memory_bytes = units.get(CPU_CORES, 0), units.get(MEMORY_BYTES, 0)
        if count > node.free_cores or memory_bytes > node.free_memory_bytes:
            raise InvalidHoldingError("start.units", "more than is free")
        cores = pick(node.free, count)
        node.free = minus(node.free, cores)
        node.free_memory_bytes -= memory_bytes
        home.memory_bytes += memory_bytes
        self._homes[action.trajectory_id] = home
        self._held[action.action_id] = _Held(node, cores, count, now_s + expected_s, action.scalable)
        return CpuGrant(
            node.machine.node_id,
            ascending(cores),
            tuple(at for at, taken in enumerate(cores) if taken),
            home.memory_bytes,
        )

    def give_back(self, action_id: str, ended: Ended, now_s: float) -> None:
        held = self._held.pop(action_id, None)
        if held is None:
            raise InvalidHoldingError("action_id", f"{action_id!r} holds no cores")
        held.node.free = plus(held.node.free, held.cores)

    def forget(self, trajectory_id: str) -> None:
        home = self._homes.pop(trajectory_id, None)
        if home is not None:
            home.node.free_memory_bytes += home.memory_bytes

    def next_change_s(self, now_s: float) -> float:
        return NEVER_S

    def usage(self, now_s: float) -> tuple[Usage, ...]:
        nodes = self._nodes.values()
        free_cores, cores = sum(node.free_cores for node in nodes), sum(node.cores for node in nodes)
        free_bytes = sum(node.free_memory_bytes for node in nodes)
        memory_bytes = sum(node.machine.memory_bytes for node in nodes)
        return (
            Usage(CPU_CORES, cores, cores - free_cores, free_cores),
            Usage(MEMORY_BYTES, memory_bytes, memory_bytes - free_bytes, free_bytes),
        )
