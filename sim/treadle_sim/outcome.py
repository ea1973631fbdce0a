"""What came of a simulated rollout.

Where one simulated trajectory stands. Owner: the driver."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from treadle_sim.batch import EngineStep
from treadle_sim.workloads.workload import Step, TrajectoryWork


@dataclass(frozen=True, slots=True)
class Span:
    """queue, prefill, decode, tool or move of one trajectory, in seconds since the start."""

    what: str
    start_s: float
    end_s: float
    engine: int


@dataclass(slots=True)
class Times:
    """Where one trajectory's time went. queue_s: at an engine, and held by the controller until one has room. move_s:
    waiting for its KV to arrive."""

    finished_s: float = 0.0
    queue_s: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    tool_s: float = 0.0
    move_s: float = 0.0
    gen_tokens: int = 0
    prefilled_tokens: int = 0
    preemptions: int = 0
    migrations: int = 0
    spans: list[Span] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Outcome:
    """One simulated rollout. engine_busy_s: seconds that each engine computed. events: that the controller took.

    `engine_spans` of an engine: (start_s, end_s, batch), batch -1 for a prefill; empty unless recorded.
    """

    times: tuple[Times, ...]
    engine_busy_s: tuple[float, ...]
    gpus: int
    events: int
    engine_spans: tuple[tuple[tuple[float, float, int], ...], ...] = ()

    @property
    def makespan_s(self) -> float:
        """When the last trajectory ended."""
        return max((times.finished_s for times in self.times), default=0.0)

    @property
    def tokens_per_s(self) -> float:
        """Generated tokens over the makespan: Heddle's rollout throughput."""
        return sum(times.gen_tokens for times in self.times) / self.makespan_s if self.makespan_s > 0.0 else 0.0

    @property
    def migrations(self) -> int:
        """Trajectories' moves."""
        return sum(times.migrations for times in self.times)

    @property
    def preemptions(self) -> int:
        """Evictions of running steps."""
        return sum(times.preemptions for times in self.times)

    def finish_quantile_s(self, fraction: float) -> float:
        """When this fraction of the trajectories had ended."""
        return float(np.quantile([times.finished_s for times in self.times], fraction))

    def active(self, at_s: float) -> int:
        """Trajectories that had not ended."""
        return sum(times.finished_s > at_s for times in self.times)


@dataclass(slots=True)
class Progress:
    """turn: of its next step; context_tokens: at its start. engine: where it was last. tool_s: of its last tool call.

    requests: tickets asked for; calls: generations done, more than turns where long ones are made in chunks.
    part_tokens: of the present turn, sampled in earlier chunks. resumed_tokens: of the present call, sampled on an
    engine that was lost. asked_s: when the present call's ticket was asked for.
    """

    work: TrajectoryWork
    trajectory_id: str
    times: Times
    turn: int = 0
    context_tokens: int = 0
    gen_tokens: int = 0
    engine: int = -1
    tool_s: float = 0.0
    requests: int = 0
    calls: int = 0
    part_tokens: int = 0
    resumed_tokens: int = 0
    asked_s: float = 0.0
    done: bool = False

    @property
    def step(self) -> Step:
        """The next one."""
        return self.work.steps[self.turn]

    def book(self, step: EngineStep) -> None:
        """Adds a step's times, whole or lost in the middle."""
        times = self.times
        times.queue_s += step.queue_s
        times.prefill_s += step.prefill_s
        times.decode_s += step.decode_s
        times.prefilled_tokens += step.prefilled_tokens
        times.preemptions += step.preemptions
        for what, start_s, end_s in step.spans or ():
            times.spans.append(Span(what, start_s, end_s, self.engine))

    def waited(self, now: float, record: bool) -> None:
        """Books what the controller held the request for: the trajectory's KV on its way, or room on an engine."""
        if now <= self.asked_s:
            return
        if self.calls:
            self.times.move_s += now - self.asked_s
        else:
            self.times.queue_s += now - self.asked_s
        if record:
            self.times.spans.append(Span("move" if self.calls else "queue", self.asked_s, now, self.engine))

    def next_call_tokens(self, most_tokens: int) -> int:
        """What the next call generates: the rest of the turn, or `most_tokens` of it; 0 for no limit."""
        left = self.step.gen_tokens - self.part_tokens
        return min(left, most_tokens) if most_tokens else left

    def called(self, gen_tokens: int) -> bool:
        """The present call is sampled: counts it, and says whether that ends the turn."""
        step = self.step
        self.calls += 1
        self.gen_tokens += gen_tokens
        self.times.gen_tokens += gen_tokens
        self.part_tokens += gen_tokens
        self.context_tokens += gen_tokens
        self.resumed_tokens = 0
        if self.part_tokens < step.gen_tokens:
            self.tool_s = 0.0
            return False
        self.times.tool_s += step.tool_s
        self.tool_s = step.tool_s
        self.context_tokens += step.obs_tokens
        self.part_tokens = 0
        self.turn += 1
        return True

    @property
    def over(self) -> bool:
        """All steps are sampled."""
        return self.turn == len(self.work.steps)
