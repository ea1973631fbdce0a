"""Progress of each trajectory of a simulated rollout, where its time went, and the outcome of the
whole rollout."""

from dataclasses import dataclass, field

import numpy as np
from treadle_core.model import NO_TIMES, ClientTimes, Ledger, StepTimes

from treadle_sim.batch import EngineStep
from treadle_sim.workloads.workload import Step, TrajectoryWork


@dataclass(frozen=True, slots=True)
class Span:
    """Stretch of one trajectory's time, in seconds since the start. what: queue, prefill, decode,
    tool or move."""

    what: str
    start_s: float
    end_s: float
    engine: int


@dataclass(slots=True)
class Times:
    """Times of one trajectory. queue_s: waiting at an engine, or for the controller to admit its
    first step. move_s: waiting for a later ticket, mostly until the trajectory's KV has arrived.
    spans: empty unless recorded."""

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
    """Outcome of one simulated rollout. engine_busy_s: seconds that each engine computed. events:
    how many the controller handled. ledgers: of the trajectories, as the controller has them.

    `engine_spans` of an engine: (start_s, end_s, batch), batch -1 for a prefill; empty unless
    recorded.
    """

    times: tuple[Times, ...]
    engine_busy_s: tuple[float, ...]
    gpus: int
    events: int
    engine_spans: tuple[tuple[tuple[float, float, int], ...], ...] = ()
    ledgers: tuple[Ledger, ...] = ()

    @property
    def makespan_s(self) -> float:
        return max((times.finished_s for times in self.times), default=0.0)

    @property
    def tokens_per_s(self) -> float:
        """Return generated tokens over the makespan: Heddle's rollout throughput."""
        return (
            sum(times.gen_tokens for times in self.times) / self.makespan_s
            if self.makespan_s > 0.0
            else 0.0
        )

    @property
    def migrations(self) -> int:
        return sum(times.migrations for times in self.times)

    @property
    def preemptions(self) -> int:
        return sum(times.preemptions for times in self.times)

    def finish_quantile_s(self, fraction: float) -> float:
        """Return the seconds after which this fraction of the trajectories had ended."""
        return float(np.quantile([times.finished_s for times in self.times], fraction))


@dataclass(slots=True)
class Progress:
    """Progress of one trajectory. The driver owns it. turn and context_tokens: of its next step.
    engine: its last engine.

    tool_s: seconds of its last tool call. requests: tickets requested. calls: generations done,
    more than turns where a long turn takes several. part_tokens: sampled in earlier calls of the
    present turn. resumed_tokens: of the present call, sampled on an engine that failed.
    requested_s: when the present call's ticket was requested. tools_s: of tool calls that have
    ended. control_s, lost: as in ClientTimes; until marked_s all time is in a sum of this client,
    or is the scheduler's or an engine's to account for. asks: it waits for a ticket. ledger: once
    it is closed.
    """

    index: int
    work: TrajectoryWork
    context_tokens: int
    times: Times = field(default_factory=Times)
    turn: int = 0
    engine: int = -1
    tool_s: float = 0.0
    requests: int = 0
    calls: int = 0
    part_tokens: int = 0
    resumed_tokens: int = 0
    requested_s: float = 0.0
    tools_s: float = 0.0
    control_s: float = 0.0
    lost: StepTimes = NO_TIMES
    marked_s: float = 0.0
    asks: bool = False
    is_closed: bool = False
    ledger: Ledger | None = None

    @property
    def trajectory_id(self) -> str:
        return f"t{self.index}"

    @property
    def step(self) -> Step:
        """Return the next step of the trajectory."""
        return self.work.steps[self.turn]

    @property
    def is_over(self) -> bool:
        """Return whether all steps are sampled."""
        return self.turn == len(self.work.steps)

    def book_step(self, step: EngineStep) -> None:
        """Add the times of a step that ended, or that an engine lost when it failed."""
        times = self.times
        times.queue_s += step.queue_s
        times.prefill_s += step.prefill_s
        times.decode_s += step.decode_s
        times.prefilled_tokens += step.prefilled_tokens
        times.preemptions += step.preemptions
        for what, start_s, end_s in step.spans or ():
            times.spans.append(Span(what, start_s, end_s, self.engine))

    def book_wait(self, now: float, record: bool) -> None:
        """Add the time for which the controller held the request: for the trajectory's KV, or for a
        slot."""
        if now <= self.requested_s:
            return
        if self.calls:
            self.times.move_s += now - self.requested_s
        else:
            self.times.queue_s += now - self.requested_s
        if record:
            self.times.spans.append(
                Span("move" if self.calls else "queue", self.requested_s, now, self.engine)
            )

    @property
    def client_times(self) -> ClientTimes:
        """Return the times that this client reports."""
        return ClientTimes(self.tools_s, self.control_s, self.lost)

    def mark(self, now: float, accounted_s: float = 0.0) -> None:
        """Count the time since the last mark as control, but for what others account for."""
        self.control_s += now - self.marked_s - accounted_s
        self.marked_s = now

    def end_tool(self, now: float) -> None:
        """Note that the tool call of the last turn has ended."""
        self.tools_s += self.tool_s
        self.mark(now, self.tool_s)

    def next_call_tokens(self, most_tokens: int) -> int:
        """Return how many tokens the next call generates: the rest of the turn, but at most
        `most_tokens`; 0 is no limit."""
        left = self.step.gen_tokens - self.part_tokens
        return min(left, most_tokens) if most_tokens else left

    def finish_call(self, gen_tokens: int) -> bool:
        """Count a call that has sampled `gen_tokens`. Returns True if its turn ends with it."""
        step = self.step
        self.calls += 1
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
