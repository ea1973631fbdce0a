"""The batch of sequences that a simulated engine decodes together, computed from event to event in closed form.

Nothing happens token by token. A counter holds the decode steps since the engine began, as a fraction while a step is
under way, so the count at which a sequence ends is known when it joins. x steps of n sequences that hold K tokens of KV
take, in seconds, x * step(n) + k * (K x + n x (x - 1) / 2); inside a step, time runs along the same parabola. Sequences
join at whole counts only, so every end is at a whole count, and times there are exact. Equations: docs/simulator.md.
"""

import heapq
import math
from dataclasses import dataclass
from typing import Protocol

from treadle_sim.engine_model import EngineModel

TOKEN_ROUNDING = 1e-6  # tokens; a count this near a whole one is whole


@dataclass(slots=True)
class EngineStep:
    """A step at an engine. index: of its trajectory. context_tokens: at its start. done: tokens sampled before its
    present admission. The *_s fields add up its time so far; since_s: up to when. end_at: on the count of its batch."""

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
    end_at: float = 0.0
    spans: list[tuple[str, float, float]] | None = None

    @property
    def reserved_tokens(self) -> int:
        """KV tokens that the step needs until its end."""
        return self.context_tokens + self.gen_tokens

    @property
    def own_tokens(self) -> int:
        """Of `reserved_tokens`, those beyond the prompt that samples share."""
        return self.context_tokens + self.gen_tokens - self.prompt_tokens

    def book(self, what: str, now: float) -> None:
        """Book the time since the last change as `what`: queue, prefill or decode."""
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
    """Whoever submits steps to an engine."""

    def step_preempted(self, step: EngineStep) -> None:
        """The step is back in the queue."""

    def step_finished(self, step: EngineStep) -> None:
        """All its tokens are sampled."""


class DecodeBatch:
    """Invariant: `kv_tokens` is the sum over the steps of their contexts and of what each has sampled."""

    def __init__(self, model: EngineModel) -> None:
        self.steps: dict[str, EngineStep] = {}
        self.counter = 0.0
        self.kv_tokens = 0.0
        self._step_s = [0.0, *(model.curve.decode_s(n) for n in range(1, model.slots + 1))]
        self._kv_token_s = model.curve.per_kv_token_s
        self._ends: list[tuple[float, int, EngineStep]] = []
        self._joined = 0

    def __len__(self) -> int:
        return len(self.steps)

    @property
    def is_between_steps(self) -> bool:
        """Whether no decode step is under way, so that sequences may join and leave."""
        return abs(self.counter - round(self.counter)) <= TOKEN_ROUNDING or not self.steps

    @property
    def step_end(self) -> float:
        """The count at which the decode step under way ends."""
        return float(math.ceil(self.counter - TOKEN_ROUNDING))

    @property
    def next_end(self) -> float:
        """The count at which the next sequence ends; the batch is not empty."""
        return self._ends[0][0]

    def join(self, step: EngineStep) -> None:
        """Add a step after its prefill, which has sampled one token. Between decode steps only."""
        self.counter = float(round(self.counter))
        self.steps[step.step_id] = step
        step.end_at = self.counter + step.gen_tokens - step.done - 1
        self.kv_tokens += step.context_tokens + step.done + 1
        self._joined += 1
        heapq.heappush(self._ends, (step.end_at, self._joined, step))

    def leave(self, step: EngineStep) -> None:
        """Remove a step before its end; `step.done` becomes the whole tokens that it has."""
        exact = self._exact_tokens(step)
        del self.steps[step.step_id]
        step.done = int(exact + TOKEN_ROUNDING)
        self.kv_tokens = self.kv_tokens - step.context_tokens - exact if self.steps else 0.0
        self._ends = [entry for entry in self._ends if entry[2] is not step]
        heapq.heapify(self._ends)

    def pop_ended(self) -> EngineStep | None:
        """Remove and return a sequence that has all its tokens; None if there is none."""
        if not self._ends or self._ends[0][0] > self.counter + TOKEN_ROUNDING:
            return None
        step = heapq.heappop(self._ends)[2]
        del self.steps[step.step_id]
        step.done = step.gen_tokens
        self.kv_tokens = self.kv_tokens - step.context_tokens - step.gen_tokens if self.steps else 0.0
        return step

    def tokens_since_admission(self, step: EngineStep) -> int:
        """Whole tokens."""
        return int(self._exact_tokens(step) + TOKEN_ROUNDING) - step.done

    def seconds_to(self, count: float) -> float:
        """Seconds that the batch as it is takes to a count."""
        tokens = count - self.counter
        return tokens * self._token_s() + 0.5 * self._kv_token_s * len(self.steps) * tokens * tokens

    def advance_to(self, count: float) -> None:
        """Set the count exactly, whatever the rounding of times."""
        self.kv_tokens += len(self.steps) * (count - self.counter)
        self.counter = count

    def advance(self, elapsed_s: float) -> None:
        """Let time pass: the inverse of `seconds_to`."""
        linear, quadratic = self._token_s(), 0.5 * self._kv_token_s * len(self.steps)
        tokens = 2.0 * elapsed_s / (linear + math.sqrt(linear * linear + 4.0 * quadratic * elapsed_s))
        self.advance_to(self.counter + tokens)

    def _token_s(self) -> float:
        """Seconds a token at the present count. A step reads the KV that there is when it begins: n / 2 less than the
        mean of its beginning and end."""
        n = len(self.steps)
        return self._step_s[n] + self._kv_token_s * (self.kv_tokens - 0.5 * n)

    def _exact_tokens(self, step: EngineStep) -> float:
        return step.gen_tokens - (step.end_at - self.counter)
