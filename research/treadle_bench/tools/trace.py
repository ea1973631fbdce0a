"""Replay trajectories that alternate between generation and actions, and record what became of each
action.

Executors with this product's scheduler: `elastic_cores.ElasticCores`, `gpu_groups.ElasticGpus`,
`api_calls.ManagedCalls`. What it replaces: `pods.Pods`, `gpu_groups.StaticGroups`,
`gpu_groups.LoadingGroups`, `api_calls.UnmanagedCalls`.

A trace is the same for every executor: its seconds are those on a single unit, and what more units
make of them follows from the call's elasticity (eq. 1 of ARL-Tangram). Times are seconds from the
batch's start.

Invariants of `play`: an action is submitted once, when the generation before it is over; the next
generation starts when the action has ended, failed or not; a trajectory opens, as its environment
does, before its first generation, and ends with its last action.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from treadle_core.tools.action import Action, Demand, Elasticity
from treadle_core.tools.dispatcher import Dispatcher, Started
from treadle_core.tools.grants import NEVER_S
from treadle_sim.cluster import Timeline
from treadle_sim.engine_model import engine_model
from treadle_sim.workloads.workload import TrajectoryWork


@dataclass(frozen=True, slots=True)
class Call:
    """One action, and the generation before it.

    cost: what it asks for while it runs. single_unit_s: how long it takes on one unit of `key`.
    profiled_s: what is known of that beforehand, None: nothing. elasticity None: more units do not
    help. service: the model it wants.
    """

    generation_s: float
    cost: Mapping[str, Demand]
    single_unit_s: float
    reward: bool = False
    key: str | None = None
    elasticity: Elasticity | None = None
    profiled_s: float | None = None
    service: str = ""

    def seconds_on(self, units: int) -> float:
        """How long it takes with so many units."""
        return self.single_unit_s / (
            self.elasticity.efficiency(units) * units if self.elasticity else 1.0
        )


@dataclass(frozen=True, slots=True)
class Trace:
    """One trajectory. task: the RL task it belongs to. memory_bytes: of its environment, as long as
    it lives."""

    trajectory_id: str
    task: str
    calls: tuple[Call, ...]
    memory_bytes: int = 0
    starts_s: float = 0.0

    @property
    def generation_s(self) -> float:
        return sum(call.generation_s for call in self.calls)

    @property
    def single_unit_s(self) -> float:
        """Of all its actions, one after the other on one unit each."""
        return sum(call.single_unit_s for call in self.calls)


@dataclass(frozen=True, slots=True)
class Asked:
    """An action that was submitted: the at-th call of a trace."""

    trace: Trace
    at: int
    arrived_s: float

    @property
    def call(self) -> Call:
        return self.trace.calls[self.at]

    @property
    def action_id(self) -> str:
        return f"{self.trace.trajectory_id}/{self.at}"


@dataclass(frozen=True, slots=True)
class Record:
    """What became of an action: it arrived, waited until `started_s`, took `overhead_s` of the
    system's own (restoring a model, writing limits) and then ran. tries: how often it was sent.
    failed: nothing came of it."""

    asked: Asked
    started_s: float
    overhead_s: float
    finished_s: float
    units: int
    tries: int = 1
    failed: bool = False

    @property
    def completion_s(self) -> float:
        """ACT: from submission to the end."""
        return self.finished_s - self.asked.arrived_s

    @property
    def queue_s(self) -> float:
        return self.started_s - self.asked.arrived_s

    @property
    def execution_s(self) -> float:
        return self.finished_s - self.started_s - self.overhead_s


@dataclass(slots=True)
class Decisions:
    """Real seconds that decisions took. felt_s: of each action, the decision that it waited for."""

    took_s: list[float] = field(default_factory=list)
    felt_s: list[float] = field(default_factory=list)

    def add(self, took_s: float, actions: int) -> None:
        """Count a decision that so many actions waited for."""
        self.took_s.append(took_s)
        self.felt_s += [took_s] * actions


@dataclass(frozen=True, slots=True)
class Replay:
    """A batch that was played: one record an action, and when each trajectory ended, in the order
    of the batch."""

    traces: tuple[Trace, ...]
    records: tuple[Record, ...]
    ends_s: Mapping[str, float]
    decisions: Decisions


Report = Callable[[Record], None]


class Executor:
    """Runs actions, and reports each when it has ended."""

    def __init__(self, timeline: Timeline, report: Report) -> None:
        self._timeline, self._report = timeline, report
        self.decisions = Decisions()

    def open(self, trace: Trace) -> None:
        """The trajectory begins: take what it holds as long as it lives; nothing, unless a subclass
        says so."""

    def submit(self, asked: Asked) -> None:
        """Run the action, now or later."""
        raise NotImplementedError

    def close(self, trace: Trace) -> None:
        """The trajectory has ended: free what it held."""


Make = Callable[[Timeline, Report], Executor]


class Dispatched:
    """Drives the gateway's `Dispatcher` under the virtual clock: all that happens at one instant is
    decided on together.

    overhead_s: the system's own seconds before an action that starts runs.
    """

    def __init__(
        self,
        timeline: Timeline,
        report: Report,
        dispatcher: Dispatcher,
        decisions: Decisions,
        overhead_s: Callable[[Started], float],
    ) -> None:
        self.dispatcher = dispatcher
        self._timeline, self._report, self._decisions, self._overhead_s = (
            timeline,
            report,
            decisions,
            overhead_s,
        )
        self._asked: dict[str, Asked] = {}
        self._arrivals = 0
        self._deciding = False

    def submit(
        self,
        asked: Asked,
        cost: Mapping[str, Demand],
        single_unit_s: float | None = None,
        key: str | None = None,
        elasticity: Elasticity | None = None,
    ) -> None:
        """Start the action at once where the dispatcher does so, else have it wait for a
        decision."""
        self._arrivals += 1
        action = Action(
            asked.action_id,
            asked.trace.trajectory_id,
            self._arrivals,
            cost,
            single_unit_s,
            key,
            elasticity,
            service=asked.call.service or None,
        )
        began = time.perf_counter()
        self._asked[action.action_id] = asked
        started = self.dispatcher.start_at_once(action, self._timeline.now)
        if started is not None:
            self._decisions.add(time.perf_counter() - began, 1)
            self._start(started)
            return
        self.dispatcher.submit(action)
        self.wake()

    def wake(self) -> None:
        """Decide once for all that happens at this instant, if actions wait."""
        if len(self.dispatcher) and not self._deciding:
            self._deciding = True
            self._timeline.at(self._timeline.now, self._decide)

    def _decide(self) -> None:
        self._deciding = False
        began, now = time.perf_counter(), self._timeline.now
        starting = self.dispatcher.decide(now)
        self._decisions.add(time.perf_counter() - began, len(starting))
        for started in starting:
            self._start(started)
        changes_s = self.dispatcher.next_change_s(now)
        if changes_s < NEVER_S:
            self._timeline.at(changes_s, self.wake)

    def _start(self, started: Started) -> None:
        asked, now = self._asked.pop(started.action.action_id), self._timeline.now
        overhead_s = self._overhead_s(started)
        ends_s = now + overhead_s + asked.call.seconds_on(started.units)
        self._timeline.at(
            ends_s, self._finish, Record(asked, now, overhead_s, ends_s, started.units)
        )

    def _finish(self, record: Record) -> None:
        self.dispatcher.end(record.asked.action_id, self._timeline.now)
        self.wake()
        self._report(record)


class StuckError(RuntimeError):
    """An executor that left actions undone."""


def play(traces: Sequence[Trace], make: Make) -> Replay:
    """Raises StuckError where an executor runs out of events before all trajectories have ended."""
    timeline = Timeline()
    records: list[Record] = []
    ends_s: dict[str, float] = {}

    def generate(trace: Trace, at: int) -> None:
        if at == len(trace.calls):
            executor.close(trace)
            ends_s[trace.trajectory_id] = timeline.now
            return
        timeline.after(trace.calls[at].generation_s, submit, trace, at)

    def submit(trace: Trace, at: int) -> None:
        executor.submit(Asked(trace, at, timeline.now))

    def report(record: Record) -> None:
        records.append(record)
        generate(record.asked.trace, record.asked.at + 1)

    def begin(trace: Trace) -> None:
        executor.open(trace)
        generate(trace, 0)

    executor = make(timeline, report)
    for trace in traces:
        timeline.at(trace.starts_s, begin, trace)
    timeline.run(lambda: len(ends_s) < len(traces))
    if len(ends_s) < len(traces):
        raise StuckError(f"{len(traces) - len(ends_s)} of {len(traces)} trajectories never ended")
    return Replay(tuple(traces), tuple(records), ends_s, executor.decisions)


# ARL-Tangram §6.1: Qwen3-32B on Hopper GPUs; the degree is a choice
LLM, ACCELERATOR, GPUS = ("Qwen3-32B", "H200", 4)
IN_FLIGHT = 16  # sequences an engine: 1,280 trajectories on 48 nodes of 8 GPUs are 13


def generation_s(work: TrajectoryWork) -> list[float]:
    """Of each step: reading what came since the last one, then decoding."""
    curve = engine_model(LLM, ACCELERATOR, GPUS).curve
    found, context, new = [], 0, work.prompt_tokens
    for step in work.steps:
        read_s = curve.prefill_s(new, context)
        context += new + step.gen_tokens
        token_s = curve.decode_s(IN_FLIGHT) + curve.per_kv_token_s * IN_FLIGHT * context
        found.append(read_s + step.gen_tokens * token_s)
        new = step.obs_tokens
    return found
