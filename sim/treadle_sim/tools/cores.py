"""CPU nodes under the elastic scheduler: the same `decide` that the gateway runs, on arrivals and completions (§5.2).

A trajectory's first action is placed by balance of memory and the others follow it there, so each node is decided on by
itself; all nodes at once only while first actions wait. Decisions of one instant are one. Where nobody waits and an
action can have no choice of units nothing is decided: it takes the units it asks for, as a decision would have it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from treadle_core.tools.action import (
    CPU_CORES,
    MEMORY_BYTES,
    UNKNOWN_DURATION,
    Action,
    Demand,
    Duration,
    Fixed,
    Knowledge,
    seconds_at,
)
from treadle_core.tools.completions import Executing
from treadle_core.tools.decision import DEPTH, decide
from treadle_core.tools.pools import CpuNode, CpuNodes, capacities
from treadle_core.tools.queue import Waiting

from treadle_sim.timeline import Timeline
from treadle_sim.tools.trace import Asked, Decisions, Record, Report, Trace, ran_s

FIRST_TYPICAL_S = 1.0  # until an action has ended; then the mean of all that are not profiled


class _Running(NamedTuple):
    units: int
    ends_s: float  # as expected
    scalable: bool


@dataclass(slots=True)
class _Node:
    """A machine, what runs on it and who waits for it alone."""

    static: CpuNode
    waiting: Waiting
    free_cores: int
    free_memory_bytes: int
    running: dict[str, _Running]
    dirty: bool = False

    def now(self) -> CpuNode:
        return replace(self.static, free_cores=self.free_cores, free_memory_bytes=self.free_memory_bytes)


class ElasticCores:
    """See the module. overhead_s: of the system's own before each action runs. foresees: decisions count on those that
    come, which the paper's do not."""

    def __init__(
        self,
        timeline: Timeline,
        report: Report,
        nodes: tuple[CpuNode, ...],
        overhead_s: float,
        foresees: bool = True,
        depth: int = DEPTH,
        stopwatch: Callable[[], float] = time.perf_counter,
    ) -> None:
        most = capacities([CpuNodes(nodes)])
        self._timeline, self._report = timeline, report
        self._nodes = {
            node.node_id: _Node(node, Waiting(most), node.free_cores, node.free_memory_bytes, {}) for node in nodes
        }
        self._everyone = Waiting(most)  # used only while some wait for no particular node
        self._homeless = 0
        self._homes: dict[str, str] = {}
        self._asked: dict[str, Asked] = {}
        self._arrivals = 0
        self._overhead_s, self._depth, self._stopwatch = overhead_s, depth, stopwatch
        self._foresees = foresees
        self._plain_s, self._plain = 0.0, 0
        self._settling = False
        self.decisions = Decisions()

    def open(self, trace: Trace) -> None:
        """Nothing is held before the first action."""

    def close(self, trace: Trace) -> None:
        home = self._homes.pop(trace.trajectory_id, None)
        if home is not None:
            self._nodes[home].free_memory_bytes += trace.memory_bytes
            if self._homeless:
                self._wake(None)

    def submit(self, asked: Asked) -> None:
        began = self._stopwatch()
        action = self._action(asked)
        self._asked[action.action_id] = asked
        home = action.node_id
        passes_nobody = not self._homeless and not (home is not None and len(self._nodes[home].waiting))
        if not action.scalable and passes_nobody:
            node = self._seat(action)
            if node is not None:
                self._felt(1, began)
                self._start(action, action.cost[CPU_CORES].least, node, waited=False)
                return
        self._everyone.add(action)
        if home is None:
            self._homeless += 1
        else:
            self._nodes[home].waiting.add(action)
        self._wake(home)

    @property
    def _typical_s(self) -> float:
        return self._plain_s / self._plain if self._plain else FIRST_TYPICAL_S

    def _action(self, asked: Asked) -> Action:
        call, home = asked.call, self._homes.get(asked.trace.trajectory_id)
        duration = UNKNOWN_DURATION if call.profiled_s is None else Duration(Knowledge.PROFILED, call.profiled_s)
        cost: dict[str, Demand] = dict(call.cost)
        if home is None and asked.trace.memory_bytes:
            cost[MEMORY_BYTES] = Fixed(asked.trace.memory_bytes)
        self._arrivals += 1
        return Action(
            asked.action_id,
            asked.trace.trajectory_id,
            self._arrivals,
            cost,
            duration,
            call.key,
            call.elasticity if call.profiled_s is not None else None,
            home,
        )

    def _seat(self, action: Action) -> str | None:
        """Where an action that waits behind nobody goes: as a decision would have it."""
        if action.node_id is not None:
            fits = self._nodes[action.node_id].free_cores >= action.cost[CPU_CORES].least
            return action.node_id if fits else None
        needs = [[action.cost[each].least if each in action.cost else 0 for each in (CPU_CORES, MEMORY_BYTES)]]
        pool = CpuNodes(tuple(node.now() for node in self._nodes.values()))
        lane = int(pool.seat(np.array(needs, np.int64), np.array([-1], np.int64))[0])
        return None if lane < 0 else pool.members[lane].node_id

    def _wake(self, node: str | None) -> None:
        if node is not None:
            self._nodes[node].dirty = True
        if not self._settling:
            self._settling = True
            self._timeline.at(self._timeline.now, self._settle)

    def _settle(self) -> None:
        self._settling = False
        if self._homeless:
            self._decide(list(self._nodes.values()), self._everyone)
        else:
            for node in self._nodes.values():
                if node.dirty and node.free_cores and len(node.waiting):
                    self._decide([node], node.waiting)
        for node in self._nodes.values():
            node.dirty = False

    def _decide(self, nodes: list[_Node], waiting: Waiting) -> None:
        began = self._stopwatch()
        now = self._timeline.now
        executing = [
            Executing(CPU_CORES, run.units, run.ends_s - now, node.static.node_id, run.scalable)
            for node in nodes
            for run in node.running.values()
        ]
        pool = CpuNodes(tuple(node.now() for node in nodes))
        starts = decide(waiting, [pool], executing, self._typical_s, depth=self._depth)
        self._felt(len(starts), began)
        for start in starts:
            assert start.node_id is not None
            self._start(start.action, start.units, start.node_id, waited=True)

    def _felt(self, actions: int, began: float) -> None:
        took_s = self._stopwatch() - began
        self.decisions.took_s.append(took_s)
        self.decisions.felt_s += [took_s] * actions

    def _start(self, action: Action, units: int, home: str, waited: bool) -> None:
        node, now = self._nodes[home], self._timeline.now
        if waited:
            self._everyone.remove(action.action_id)
            if action.node_id is None:
                self._homeless -= 1
            else:
                node.waiting.remove(action.action_id)
        asked = self._asked.pop(action.action_id)
        if action.node_id is None:
            self._homes[action.trajectory_id] = home
            node.free_memory_bytes -= asked.trace.memory_bytes
        node.free_cores -= units
        profiled = asked.call.profiled_s is not None
        expected_s = seconds_at(action, units) if profiled else self._typical_s
        node.running[action.action_id] = _Running(
            units, now + self._overhead_s + expected_s, self._foresees and action.scalable
        )
        took_s = ran_s(asked, units)
        record = Record(asked, now, self._overhead_s, now + self._overhead_s + took_s, units)
        self._timeline.at(record.finished_s, self._finish, record, home)

    def _finish(self, record: Record, home: str) -> None:
        node = self._nodes[home]
        node.free_cores += record.units
        del node.running[record.asked.action_id]
        if record.asked.call.profiled_s is None:
            self._plain_s, self._plain = self._plain_s + record.execution_s, self._plain + 1
        if self._homeless or len(node.waiting):
            self._wake(home)
        self._report(record)


def equal_nodes(count: int, cores: int, memory_bytes: int) -> tuple[CpuNode, ...]:
    """So many machines that are alike, empty."""
    return tuple(CpuNode(f"node-{at}", cores, cores, memory_bytes, memory_bytes) for at in range(count))
