"""What is replayed: trajectories that alternate between generation and actions, and what became of each action.

A trace is the same whoever runs it: seconds are those on a single unit, and what more units make of them follows from
the call's elasticity (eq. 1 of ARL-Tangram). Times are seconds from the batch's start.

Plays traces on an executor under the virtual clock: who generates, who waits for an action, when it ends.

Invariants: an action is submitted once, when the generation before it is over; the next generation starts when the
action has ended, failed or not; a trajectory ends with its last action. A trajectory opens when it starts, before its
first generation, as its environment does.

How long a trajectory generates between its actions, on an engine of the project's fitted profiles."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from treadle_core.tools.action import Demand, Elasticity

from treadle_sim.engine_model import engine_model
from treadle_sim.timeline import Timeline


@dataclass(frozen=True, slots=True)
class Call:
    """One action, and the generation before it.

    cost: what it asks for while it runs. single_unit_s: how long it takes on one unit of `key`. profiled_s: what is
    known of that beforehand, None: nothing. elasticity None: more units do not help. service: the model it wants.
    """

    generation_s: float
    cost: Mapping[str, Demand]
    single_unit_s: float
    reward: bool = False
    key: str | None = None
    elasticity: Elasticity | None = None
    profiled_s: float | None = None
    service: str = ""


@dataclass(frozen=True, slots=True)
class Trace:
    """One trajectory. task: the RL task it belongs to. memory_bytes: of its environment, as long as it lives."""

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


def ran_s(asked: Asked, units: int) -> float:
    """How long a call takes with so many units."""
    call = asked.call
    if call.elasticity is None:
        return call.single_unit_s
    return call.single_unit_s / (call.elasticity.efficiency(units) * units)


@dataclass(frozen=True, slots=True)
class Record:
    """What became of an action: it arrived, waited until `started_s`, took `overhead_s` of the system's own (restoring
    a model, writing limits) and then ran. tries: how often it was sent. failed: nothing came of it."""

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
    """A batch that was played: one record an action, and when each trajectory ended, in the order of the batch."""

    traces: tuple[Trace, ...]
    records: tuple[Record, ...]
    ends_s: Mapping[str, float]
    decisions: Decisions


Report = Callable[[Record], None]


class Executor(Protocol):
    """Who runs actions. It reports each when it has ended."""

    decisions: Decisions

    def open(self, trace: Trace) -> None: ...

    def submit(self, asked: Asked) -> None: ...

    def close(self, trace: Trace) -> None: ...


Make = Callable[[Timeline, Report], Executor]


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


LLM, ACCELERATOR, GPUS = "Qwen3-32B", "H200", 4  # ARL-Tangram §6.1: Qwen3-32B on Hopper GPUs; the degree is a choice
IN_FLIGHT = 16  # sequences an engine: 1,280 trajectories on 48 nodes of 8 GPUs are 13


def generation_s(prompt_tokens: int, gen_tokens: Sequence[int], obs_tokens: Sequence[int]) -> list[float]:
    """Of each step: reading what came since the last one, then decoding."""
    curve = engine_model(LLM, ACCELERATOR, GPUS).curve
    found, context, new = [], 0, prompt_tokens
    for gen, obs in zip(gen_tokens, obs_tokens, strict=True):
        read_s = curve.prefill_s(new, context)
        context += new + gen
        token_s = curve.decode_s(IN_FLIGHT) + curve.per_kv_token_s * IN_FLIGHT * context
        found.append(read_s + gen * token_s)
        new = obs
    return found
