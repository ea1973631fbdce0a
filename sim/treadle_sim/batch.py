"""The sequences that an engine decodes together: a fluid between events, exact at every whole step.

A counter holds the tokens that each of them has sampled since the engine began, so a sequence ends at a count that is
known when it joins. x whole steps of n sequences that hold K tokens of KV take, in seconds,
x * step(n) + k * (K x + n x (x - 1) / 2), and in between time runs along the same parabola. Sequences join at whole
counts only, so all ends are whole. Equations: docs/simulator.md. Owner: the engine, which says how time passes.

A step at a simulated engine, and who hears of it."""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass
from typing import Protocol

from treadle_sim.engine_model import EngineModel


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

    def step_preempted(self, step: EngineStep) -> None:
        """Back in the queue."""

    def step_finished(self, step: EngineStep) -> None:
        """All tokens sampled."""


TOKEN_ROUNDING = 1e-6  # tokens; a count this near a whole one is whole


class DecodeBatch:
    """See the module. Invariant: `kv_tokens` is the context of all steps plus what each has sampled."""

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
    def between_steps(self) -> bool:
        """No step is under way, so sequences may join and leave."""
        return abs(self.counter - round(self.counter)) <= TOKEN_ROUNDING or not self.steps

    @property
    def step_end(self) -> float:
        """The count at which the step under way ends."""
        return float(math.ceil(self.counter - TOKEN_ROUNDING))

    @property
    def next_end(self) -> float:
        """The count at which the next sequence ends; the batch is not empty."""
        return self._ends[0][0]

    def join(self, step: EngineStep) -> None:
        """A step comes from its prefill, which has sampled one token of it. Between steps only."""
        self.counter = float(round(self.counter))
        self.steps[step.step_id] = step
        step.end_at = self.counter + step.gen_tokens - step.done - 1
        self.kv_tokens += step.context_tokens + step.done + 1
        self._joined += 1
        heapq.heappush(self._ends, (step.end_at, self._joined, step))

    def leave(self, step: EngineStep) -> None:
        """A step stops before its end; `step.done` becomes the whole tokens that it has."""
        exact = self._exactly(step)
        del self.steps[step.step_id]
        step.done = int(exact + TOKEN_ROUNDING)
        self.kv_tokens = self.kv_tokens - step.context_tokens - exact if self.steps else 0.0
        self._ends = [entry for entry in self._ends if entry[2] is not step]
        heapq.heapify(self._ends)

    def take_ended(self) -> EngineStep | None:
        """Removes and returns a sequence that has all its tokens; None where there is none."""
        if not self._ends or self._ends[0][0] > self.counter + TOKEN_ROUNDING:
            return None
        step = heapq.heappop(self._ends)[2]
        del self.steps[step.step_id]
        step.done = step.gen_tokens
        self.kv_tokens = self.kv_tokens - step.context_tokens - step.gen_tokens if self.steps else 0.0
        return step

    def sampled(self, step: EngineStep) -> int:
        """Whole tokens of a step since its admission."""
        return int(self._exactly(step) + TOKEN_ROUNDING) - step.done

    def seconds_to(self, count: float) -> float:
        """How long the batch as it is takes to a count."""
        tokens = count - self.counter
        return tokens * self._linear() + 0.5 * self._kv_token_s * len(self.steps) * tokens * tokens

    def reach(self, count: float) -> None:
        """A count has come: exactly, whatever the rounding of times."""
        self.kv_tokens += len(self.steps) * (count - self.counter)
        self.counter = count

    def advance(self, elapsed_s: float) -> None:
        """Time has passed."""
        linear, quadratic = self._linear(), 0.5 * self._kv_token_s * len(self.steps)
        tokens = 2.0 * elapsed_s / (linear + math.sqrt(linear * linear + 4.0 * quadratic * elapsed_s))
        self.reach(self.counter + tokens)

    def _linear(self) -> float:
        """Seconds a token of the count, now. A step reads the KV that there is when it begins: n / 2 less than the
        mean of its beginning and end."""
        n = len(self.steps)
        return self._step_s[n] + self._kv_token_s * (self.kv_tokens - 0.5 * n)

    def _exactly(self, step: EngineStep) -> float:
        return step.gen_tokens - (step.end_at - self.counter)
