"""What came of a simulated rollout."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np


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
