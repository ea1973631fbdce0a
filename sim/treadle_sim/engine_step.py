"""A step at a simulated engine, and who hears of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(slots=True)
class EngineStep:
    """A step at an engine. context_tokens: at its start.

    done: tokens sampled before its present admission. The *_s fields add up its time so far.
    """

    step_id: str
    index: int
    prompt_id: str
    prompt_tokens: int
    context_tokens: int
    gen_tokens: int
    since_s: float
    done: int = 0
    queue_s: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    prefilled_tokens: int = 0
    preemptions: int = 0
    started: bool = False
    end_at: float = 0.0  # on the count of its batch
    spans: list[tuple[str, float, float]] | None = None

    def passed(self, what: str, now: float) -> None:
        """Books the time since the last change as `what`: queue, prefill or decode."""
        spent_s = now - self.since_s
        if what == "queue":
            self.queue_s += spent_s
        elif what == "prefill":
            self.prefill_s += spent_s
        else:
            self.decode_s += spent_s
        if self.spans is not None and spent_s > 0.0:
            self.spans.append((what, self.since_s, now))
        self.since_s = now


class StepListener(Protocol):
    """Hears what happens to steps."""

    def step_started(self, step: EngineStep) -> None:
        """Admitted."""

    def step_preempted(self, step: EngineStep) -> None:
        """Back in the queue."""

    def step_finished(self, step: EngineStep) -> None:
        """All tokens sampled."""
