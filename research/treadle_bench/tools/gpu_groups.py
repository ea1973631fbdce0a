"""Reward models on GPU nodes: the elastic scheduler with evict-on-execution, and baselines
(ARL-Tangram §5.3, Figures 6, 8b).

`StaticGroups`: every model has GPUs of its own, always in memory. `LoadingGroups`: groups of one
degree that any model can be loaded onto, and start-up by locality, as ServerlessLLM does it: a
request waits for a group that has its model where that takes less time than loading it elsewhere.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from treadle_core.tools.action import GPUS, Action, Fixed, Measured, key_units
from treadle_core.tools.arrangement import NODE_GPUS
from treadle_core.tools.dispatcher import Dispatcher, Resources, Started
from treadle_core.tools.gpu import GpuManager
from treadle_core.tools.grants import Service
from treadle_sim.cluster import Timeline

from treadle_bench.tools.reward_models import DEGREES, GPU_BYTES, Restoring
from treadle_bench.tools.trace import Asked, Dispatched, Executor, Record, Report

MISS_SHARE = 0.05  # of the newest in the share of a degree's starts that had to restore


class ElasticGpus(Executor):
    """gpus: in nodes of 8; the last node may have fewer. aware: the scheduler knows the execution
    and the mean restoring of a degree; else execution only, as in the paper.

    Of a high degree many services fit beside each other, so it restores seldom; the paper's
    scheduler does not see that.
    """

    def __init__(
        self,
        timeline: Timeline,
        report: Report,
        gpus: int,
        services: Sequence[Service],
        restoring: Restoring,
        aware: bool = True,
    ) -> None:
        super().__init__(timeline, report)
        self._restoring, self._aware = restoring, aware
        nodes = [f"gpus-{at}" for at in range(-(-gpus // NODE_GPUS))]
        dispatcher = Dispatcher(Resources([GpuManager(nodes, GPU_BYTES, services)]), 0.0)
        self._take_away(dispatcher, NODE_GPUS * len(nodes) - gpus)
        self._gateway = Dispatched(timeline, report, dispatcher, self.decisions, self._restore_s)
        self._missed = dict.fromkeys(DEGREES, 1.0)

    def submit(self, asked: Asked) -> None:
        cost = asked.call.cost
        seconds = {degree: asked.call.seconds_on(degree) for degree in key_units(cost[GPUS])}
        if self._aware:
            seconds = {
                each: took + self._missed[each] * self._restoring.seconds(each)
                for each, took in seconds.items()
            }
        one_s = seconds[1]
        used = Measured(
            tuple((degree, min(1.0, one_s / (degree * took))) for degree, took in seconds.items())
        )
        self._gateway.submit(asked, cost, one_s, GPUS, used)

    @staticmethod
    def _take_away(dispatcher: Dispatcher, gpus: int) -> None:
        """Hold GPUs that are not there for good, in chunks of their number's binary digits."""
        for level in (1, 2, 4):
            if gpus & level:
                dispatcher.submit(Action(f"missing-{level}", "missing", 0, {GPUS: Fixed(level)}))
        dispatcher.decide(0.0)

    def _restore_s(self, started: Started) -> float:
        """Seconds to restore the service of an action that starts; counted in what its degree costs
        on average."""
        grant = started.grant.gpu
        assert grant is not None
        self._missed[started.units] += MISS_SHARE * (grant.restore - self._missed[started.units])
        return self._restoring.seconds(started.units) if grant.restore else 0.0


class StaticGroups(Executor):
    """replicas: groups of each model, of `degree` GPUs."""

    def __init__(
        self,
        timeline: Timeline,
        report: Report,
        services: Sequence[str],
        degree: int,
        replicas: int = 1,
    ) -> None:
        super().__init__(timeline, report)
        self._degree = degree
        self._free = dict.fromkeys(services, replicas)
        self._waiting: dict[str, deque[Asked]] = {service: deque() for service in services}

    def submit(self, asked: Asked) -> None:
        self._waiting[asked.call.service].append(asked)
        self._start(asked.call.service)

    def _start(self, service: str) -> None:
        while self._free[service] and self._waiting[service]:
            asked, now = self._waiting[service].popleft(), self._timeline.now
            self._free[service] -= 1
            ends_s = now + asked.call.seconds_on(self._degree)
            self._timeline.at(ends_s, self._finish, Record(asked, now, 0.0, ends_s, self._degree))

    def _finish(self, record: Record) -> None:
        service = record.asked.call.service
        self._free[service] += 1
        self._start(service)
        self._report(record)


@dataclass(slots=True)
class _Group:
    service: str = ""
    busy_until_s: float = 0.0
    busy: bool = False
    used_s: float = -1.0


class LoadingGroups(Executor):
    """loading: how fast a model comes into a group's memory."""

    def __init__(
        self, timeline: Timeline, report: Report, groups: int, degree: int, loading: Restoring
    ) -> None:
        super().__init__(timeline, report)
        self._degree, self._loading = degree, loading
        self._groups = [_Group() for _ in range(groups)]
        self._waiting: deque[Asked] = deque()

    def submit(self, asked: Asked) -> None:
        self._waiting.append(asked)
        self._start()

    def _start(self) -> None:
        now = self._timeline.now
        left: deque[Asked] = deque()
        ahead_s: dict[str, float] = {}  # work that waits for a model already
        while self._waiting:
            idle = [group for group in self._groups if not group.busy]
            if not idle:
                break
            asked = self._waiting.popleft()
            service, took_s = asked.call.service, asked.call.seconds_on(self._degree)
            there = next((group for group in idle if group.service == service), None)
            if there is not None:
                self._run(there, asked, 0.0)
                continue
            holders = [
                group.busy_until_s - now for group in self._groups if group.service == service
            ]
            wait_s = (
                min(holders) + ahead_s.get(service, 0.0) / len(holders) if holders else float("inf")
            )
            if wait_s <= self._loading.seconds(self._degree):
                ahead_s[service] = ahead_s.get(service, 0.0) + took_s
                left.append(asked)
            else:
                self._run(
                    min(idle, key=lambda group: group.used_s),
                    asked,
                    self._loading.seconds(self._degree),
                )
        left.extend(self._waiting)
        self._waiting = left

    def _run(self, group: _Group, asked: Asked, overhead_s: float) -> None:
        now = self._timeline.now
        group.service, group.busy = asked.call.service, True
        group.busy_until_s = group.used_s = now + overhead_s + asked.call.seconds_on(self._degree)
        record = Record(asked, now, overhead_s, group.busy_until_s, self._degree)
        self._timeline.at(group.busy_until_s, self._finish, record, group)

    def _finish(self, record: Record, group: _Group) -> None:
        group.busy = False
        self._start()
        self._report(record)
