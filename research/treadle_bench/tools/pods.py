"""A Kubernetes pod for each trajectory, as long as it lives (the baseline of ARL-Tangram §6.1 and
Figure 8a).

A pod requests half a core and may use four. It is bound, first come first served, to the node with
most unrequested CPU where request and memory fit. The node starts its pods one after the other; a
trajectory's first action waits for its pod. Pods of a node share its cores. A reward runs what the
dataset says, a single process unless the rules say more.
"""

import heapq
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from treadle_core.tools.cpu import Machine
from treadle_sim.cluster import Timeline

from treadle_bench.tools.trace import Asked, Executor, Record, Report, Trace

Job = TypeVar("Job")
NEVER_S = float("inf")


@dataclass(slots=True)
class _Class(Generic[Job]):
    """Jobs that can use as many cores. speed: of each, 1 when it has all it can use. clock_s:
    seconds at full speed."""

    clock_s: float = 0.0
    speed: float = 1.0
    jobs: list[tuple[float, int, Job]] = field(default_factory=list)


class SharedCores(Generic[Job]):
    """Processor sharing on one machine: jobs share the cores equally, and none gets more than it
    can use.

    Jobs that can use the same number of cores run at one speed, so a class of them has one virtual
    clock, and a heap of the times on it at which its jobs are done. Times must not go back.
    """

    def __init__(self, cores: int) -> None:
        self._cores = cores
        self._classes: dict[int, _Class[Job]] = {}
        self._now_s = 0.0
        self._count = 0

    def add(self, job: Job, cores: int, full_speed_s: float, now_s: float) -> None:
        """A job that takes `full_speed_s` on as many cores as it can use."""
        self._pass(now_s)
        group = self._classes.setdefault(cores, _Class())
        self._count += 1
        heapq.heappush(group.jobs, (group.clock_s + full_speed_s, self._count, job))
        self._share()

    def next_s(self) -> float:
        """When the first job ends if none comes before; infinite where none runs."""
        return min(
            (self._ends_s(group) for group in self._classes.values() if group.jobs), default=NEVER_S
        )

    def take_next(self) -> Job:
        """The job that `next_s` is about, taken out at that time."""
        group = min((group for group in self._classes.values() if group.jobs), key=self._ends_s)
        self._pass(max(self._ends_s(group), self._now_s))
        done_s, _, job = heapq.heappop(group.jobs)
        group.clock_s = max(group.clock_s, done_s)  # rounding
        self._share()
        return job

    def _ends_s(self, group: _Class[Job]) -> float:
        return self._now_s + (group.jobs[0][0] - group.clock_s) / group.speed

    def _pass(self, now_s: float) -> None:
        for group in self._classes.values():
            group.clock_s += (now_s - self._now_s) * group.speed
        self._now_s = now_s

    def _share(self) -> None:
        left = float(self._cores)
        jobs = sum(len(group.jobs) for group in self._classes.values())
        for cores, group in sorted(self._classes.items()):
            if not group.jobs:
                continue
            level = min(float(cores), left / jobs)
            group.speed = level / cores
            left -= level * len(group.jobs)
            jobs -= len(group.jobs)


@dataclass(frozen=True, slots=True)
class PodRules:
    """What a pod asks for and how fast pods come. ready_timeout_s: a trajectory whose pod is not
    ready by then gives it up, and asks for another after retry_s (infinite: it waits).
    reward_processes: of a reward's tests, at most the pod's limit."""

    request_cores: float = 0.5  # §6.1
    limit_cores: int = 4  # §6.1
    binds_per_s: float = (
        100.0  # of a cluster: what Kubernetes' own scalability tests ask of its scheduler
    )
    starts_per_s: float = (
        5.0  # of a node: the load of Kubernetes' own node-throughput test, images pulled beforehand
    )
    start_s: float = 1.0  # an image that is there, on an idle node
    ready_timeout_s: float = NEVER_S
    retry_s: float = 5.0
    reward_processes: int = 1


@dataclass(slots=True)
class _Node:
    machine: Machine
    requested: float
    free_memory_bytes: int
    cores: SharedCores[tuple[Asked, float, int]]
    starts_next_s: float = 0.0
    turn: int = 0  # of the node's next end; an older one has been overtaken


@dataclass(slots=True)
class _Pod:
    trace: Trace
    asked_s: float
    node: _Node | None = None
    ready: bool = False
    attempt: int = 0
    waiting: list[Asked] = field(default_factory=list)


class Pods(Executor):
    def __init__(
        self, timeline: Timeline, report: Report, machines: Sequence[Machine], rules: PodRules
    ) -> None:
        super().__init__(timeline, report)
        self._rules = rules
        self._nodes = [
            _Node(each, 0.0, each.memory_bytes, SharedCores(each.cores)) for each in machines
        ]
        self._pods: dict[str, _Pod] = {}
        self._pending: deque[_Pod] = deque()
        self._binds_next_s = 0.0

    def open(self, trace: Trace) -> None:
        pod = self._pods[trace.trajectory_id] = _Pod(trace, self._timeline.now)
        self._ask(pod)

    def submit(self, asked: Asked) -> None:
        pod = self._pods[asked.trace.trajectory_id]
        if pod.ready:
            self._run(pod, asked)
        else:
            pod.waiting.append(asked)

    def close(self, trace: Trace) -> None:
        self._leave(self._pods.pop(trace.trajectory_id))

    def _ask(self, pod: _Pod) -> None:
        pod.asked_s = self._timeline.now
        pod.attempt += 1
        self._pending.append(pod)
        if self._rules.ready_timeout_s < NEVER_S:
            self._timeline.after(self._rules.ready_timeout_s, self._give_up, pod, pod.attempt)
        self._bind()

    def _bind(self) -> None:
        while self._pending:
            pod = self._pending[0]
            fits = [
                node
                for node in self._nodes
                if node.requested + self._rules.request_cores <= node.machine.cores
                and node.free_memory_bytes >= pod.trace.memory_bytes
            ]
            if not fits:
                return
            self._pending.popleft()
            node = max(fits, key=lambda each: each.machine.cores - each.requested)
            node.requested += self._rules.request_cores
            node.free_memory_bytes -= pod.trace.memory_bytes
            pod.node = node
            now = self._timeline.now
            self._binds_next_s = max(self._binds_next_s, now) + 1.0 / self._rules.binds_per_s
            node.starts_next_s = (
                max(node.starts_next_s, self._binds_next_s) + 1.0 / self._rules.starts_per_s
            )
            self._timeline.at(
                node.starts_next_s + self._rules.start_s, self._ready, pod, pod.attempt
            )

    def _ready(self, pod: _Pod, attempt: int) -> None:
        if pod.attempt != attempt:
            return
        pod.ready = True
        for asked in pod.waiting:
            self._run(pod, asked)
        pod.waiting = []

    def _give_up(self, pod: _Pod, attempt: int) -> None:
        if pod.attempt != attempt or pod.ready:
            return
        pod.attempt += 1  # what was started for it comes to nothing, but has taken its turn
        if pod.node is None:
            self._pending.remove(pod)
        self._leave(pod)
        self._timeline.after(self._rules.retry_s, self._ask, pod)

    def _leave(self, pod: _Pod) -> None:
        if pod.node is None:
            return
        pod.node.requested -= self._rules.request_cores
        pod.node.free_memory_bytes += pod.trace.memory_bytes
        pod.node = None
        self._bind()

    def _run(self, pod: _Pod, asked: Asked) -> None:
        assert pod.node is not None
        processes = (
            min(self._rules.reward_processes, self._rules.limit_cores)
            if asked.call.elasticity
            else 1
        )
        now = self._timeline.now
        pod.node.cores.add(
            (asked, now, processes), processes, asked.call.seconds_on(processes), now
        )
        self._next_end(pod.node)

    def _next_end(self, node: _Node) -> None:
        node.turn += 1
        ends_s = node.cores.next_s()
        if ends_s < NEVER_S:
            self._timeline.at(ends_s, self._end, node, node.turn)

    def _end(self, node: _Node, turn: int) -> None:
        if node.turn != turn:
            return
        asked, started_s, processes = node.cores.take_next()
        self._next_end(node)
        self._report(Record(asked, started_s, 0.0, self._timeline.now, processes))
