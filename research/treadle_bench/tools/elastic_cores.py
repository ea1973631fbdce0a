"""CPU nodes under the elastic scheduler (ARL-Tangram §5.2): each node has a gateway with the
dispatcher that it runs.

A trajectory stays on the node that its first action was placed on, by balance of memory, and holds
its memory there as long as it lives.
"""

from collections import deque
from dataclasses import dataclass

from treadle_core.tools.action import CPU_CORES, MEMORY_BYTES, Demand, Fixed
from treadle_core.tools.cpu import CpuManager, Machine
from treadle_core.tools.decision import Executing
from treadle_core.tools.dispatcher import Dispatcher, Resources
from treadle_sim.cluster import Timeline

from treadle_bench.tools.trace import Asked, Dispatched, Executor, Report, Trace


class UnforeseeingCpuManager(CpuManager):
    """Decisions do not count on actions that have yet to arrive: the paper's scheduler as
    printed."""

    def executing(self, now_s: float) -> list[Executing]:
        return [each._replace(scalable=False) for each in super().executing(now_s)]


@dataclass(slots=True)
class _Node:
    """free_memory_bytes: that no trajectory was placed on."""

    machine: Machine
    gateway: Dispatched
    free_memory_bytes: int

    @property
    def free_cores(self) -> int:
        return self.gateway.dispatcher.resources.usage(0.0)[0].free


class ElasticCores(Executor):
    """On CPU nodes. overhead_s: the system's own seconds before each action runs. foresees:
    decisions count on actions that have yet to arrive."""

    def __init__(
        self,
        timeline: Timeline,
        report: Report,
        machines: tuple[Machine, ...],
        overhead_s: float,
        foresees: bool = True,
    ) -> None:
        super().__init__(timeline, report)
        manager = CpuManager if foresees else UnforeseeingCpuManager
        self._nodes = [
            _Node(
                machine,
                Dispatched(
                    timeline,
                    report,
                    Dispatcher(Resources([manager([machine])]), 0.0),
                    self.decisions,
                    lambda started: overhead_s,
                ),
                machine.memory_bytes,
            )
            for machine in machines
        ]
        self._homes: dict[str, _Node] = {}
        # first actions of trajectories that no node has memory for
        self._homeless: deque[Asked] = deque()

    def close(self, trace: Trace) -> None:
        """Free the trajectory's memory, and place trajectories that waited for it."""
        node = self._homes.pop(trace.trajectory_id, None)
        if node is None:
            return
        node.free_memory_bytes += trace.memory_bytes
        node.gateway.dispatcher.forget(trace.trajectory_id)
        node.gateway.wake()
        while self._homeless and self._place(self._homeless[0]):
            self._submit(self._homeless.popleft())

    def submit(self, asked: Asked) -> None:
        if asked.trace.trajectory_id in self._homes or (not self._homeless and self._place(asked)):
            self._submit(asked)
        else:
            self._homeless.append(asked)

    def _place(self, asked: Asked) -> bool:
        """Choose the node with the largest share of its memory free, one with free cores before
        others."""
        needed = asked.trace.memory_bytes
        fits = [node for node in self._nodes if node.free_memory_bytes >= needed]
        least = asked.call.cost[CPU_CORES].least
        best = max(
            [node for node in fits if node.free_cores >= least] or fits,
            key=lambda node: node.free_memory_bytes / max(node.machine.memory_bytes, 1),
            default=None,
        )
        if best is None:
            return False
        best.free_memory_bytes -= needed
        self._homes[asked.trace.trajectory_id] = best
        return True

    def _submit(self, asked: Asked) -> None:
        call, trace = asked.call, asked.trace
        cost: dict[str, Demand] = dict(call.cost)
        if trace.memory_bytes:
            cost[MEMORY_BYTES] = Fixed(trace.memory_bytes)
        gateway = self._homes[trace.trajectory_id].gateway
        if call.profiled_s is None:
            gateway.submit(asked, cost, key=call.key)
        else:
            gateway.submit(asked, cost, call.profiled_s, call.key, call.elasticity)


def equal_machines(count: int, cores: int, memory_bytes: int) -> tuple[Machine, ...]:
    """Return `count` machines that are alike."""
    return tuple(Machine(f"node-{at}", (tuple(range(cores)),), memory_bytes) for at in range(count))
