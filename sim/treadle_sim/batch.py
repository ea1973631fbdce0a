"""Batch of sequences that a simulated engine decodes together, computed from event to event in
closed form.

Nothing happens token by token. A counter holds the decode steps since the engine began, as a
fraction while a step is under way, so the count at which a sequence ends is known when it joins. x
steps of n sequences that hold K tokens of KV take, in seconds, x * step(n) + k * (K x + n x (x - 1)
/ 2); inside a step, time runs along the same parabola. Sequences join at whole counts only, so
every end is at a whole count, and times there are exact. Equations: docs/simulator.md.

`SpeculativeBatch` is the batch of an engine that verifies drafts: a sequence samples its mean
accepted length in each decode step, however that falls in one step or another.
"""

import heapq
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from treadle_core.model import StepTimes

from treadle_sim.engine_model import EngineModel, Speculation

TOKEN_ROUNDING = 1e-6  # tokens; a count this near a whole one is whole


@dataclass(slots=True)
class EngineStep:
    """Step at an engine. index: of its trajectory. context_tokens: at its start. done: tokens
    sampled before its present admission. The *_s fields add up its time so far; since_s: up to
    when. queue_s: all waits; preempted_s, weights_s: those of them after an eviction, and in an
    update of the weights. end_at: on the count of its batch."""

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
    preempted_s: float = 0.0
    weights_s: float = 0.0
    prefilled_tokens: int = 0
    preemptions: int = 0
    paused: bool = False  # the engine is, while the step waits
    evicted_by: str = ""  # the step that gets the slot
    end_at: float = 0.0
    spans: list[tuple[str, float, float]] | None = None

    @property
    def reserved_tokens(self) -> int:
        """Return the KV tokens that the step needs until its end."""
        return self.context_tokens + self.gen_tokens

    @property
    def own_tokens(self) -> int:
        """Return those of the `reserved_tokens` that are beyond the prompt which samples share."""
        return self.context_tokens + self.gen_tokens - self.prompt_tokens

    @property
    def times(self) -> StepTimes:
        """Return the times of the step as its sidecar would report them."""
        waits_s = self.preempted_s + self.weights_s
        return StepTimes(
            self.queue_s - waits_s, self.prefill_s, self.decode_s, self.preempted_s, self.weights_s
        )

    def book(self, what: str, now: float) -> None:
        """Book the time since the last change as `what`: queue, prefill or decode."""
        spent_s = now - self.since_s
        if what == "queue":
            self.queue_s += spent_s
            if self.paused:
                self.weights_s += spent_s
            elif self.preemptions:
                self.preempted_s += spent_s
        elif what == "prefill":
            self.prefill_s += spent_s
        else:
            self.decode_s += spent_s
        if self.spans is not None and spent_s > 0.0:
            self.spans.append((what, self.since_s, now))
        self.since_s = now


class StepListener(Protocol):
    """Receiver of the steps' events: the submitter of the steps of an engine."""

    def step_preempted(self, step: EngineStep) -> None:
        """Note that the step is back in the queue."""

    def prefill_started(self, step: EngineStep) -> None:
        """Note that the engine reads the context of the step, for the first time or again."""

    def step_finished(self, step: EngineStep) -> None:
        """Note that all tokens of the step are sampled."""


class DecodeBatch:
    """Batch whose sequences sample one token in each decode step. Invariant: `kv_tokens` is the sum
    over the steps of their contexts and sampled tokens."""

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
        """Return whether no decode step is under way, so that sequences may join and leave."""
        return abs(self.counter - round(self.counter)) <= TOKEN_ROUNDING or not self.steps

    @property
    def step_end(self) -> float:
        """Return the count at which the decode step under way ends."""
        return float(math.ceil(self.counter - TOKEN_ROUNDING))

    @property
    def is_outdated(self) -> bool:
        """Return whether the batch must change at the end of the decode step under way, though its
        sequences stay."""
        return False

    @property
    def next_end(self) -> float:
        """Return the count at which the next sequence ends; the batch must not be empty."""
        return self._ends[0][0]

    def count_of(self, step: EngineStep, tokens: int) -> float:
        """Return the count at which the sequence has sampled `tokens` tokens of its step."""
        return step.end_at - step.gen_tokens + tokens

    def is_changed_by(self, prompt_id: str) -> bool:
        """Return whether the end of a sample of the prompt, here or anywhere, changes how this
        batch decodes."""
        return False

    def outdate(self) -> None:
        """Change how the batch decodes from the next decode step on; it must have been brought up
        to now."""

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
        self.kv_tokens = (
            self.kv_tokens - step.context_tokens - step.gen_tokens if self.steps else 0.0
        )
        return step

    def tokens_since_admission(self, step: EngineStep) -> int:
        """Return the whole tokens that the step has sampled since its admission."""
        return int(self._exact_tokens(step) + TOKEN_ROUNDING) - step.done

    def seconds_to(self, count: float) -> float:
        """Return the seconds that the present batch takes to reach a count."""
        tokens = count - self.counter
        return tokens * self._token_s() + 0.5 * self._kv_token_s * self._growth() * tokens * tokens

    def advance_to(self, count: float) -> None:
        """Set the count exactly, whatever the rounding of times."""
        self.kv_tokens += self._growth() * (count - self.counter)
        self.counter = count

    def advance(self, elapsed_s: float) -> None:
        """Let time pass: the inverse of `seconds_to`."""
        linear, quadratic = self._token_s(), 0.5 * self._kv_token_s * self._growth()
        tokens = (
            2.0 * elapsed_s / (linear + math.sqrt(linear * linear + 4.0 * quadratic * elapsed_s))
        )
        self.advance_to(self.counter + tokens)

    def _token_s(self) -> float:
        """Return the seconds of a decode step at the present count. The step reads the KV that is
        there when it begins: half its growth less than the mean of its beginning and end."""
        return self._compute_s() + self._kv_token_s * (self.kv_tokens - 0.5 * self._growth())

    def _compute_s(self) -> float:
        """Return the seconds of a decode step without its reading of KV."""
        return self._step_s[len(self.steps)]

    def _growth(self) -> float:
        """Return the tokens that a decode step samples."""
        return len(self.steps)

    def _exact_tokens(self, step: EngineStep) -> float:
        return step.gen_tokens - (step.end_at - self.counter)


@dataclass(slots=True)
class _Pace:
    """Pace of a sequence in a speculating batch: its tokens at a whole count, and its tokens in
    each step from then on."""

    tokens: float
    at: float
    per_step: float = 1.0


class SpeculativeBatch(DecodeBatch):
    """Batch in which each decode step verifies `drafts` tokens of each sequence, as many as give
    most tokens a second, 0 for none.

    finished: ended samples by prompt. Between decode steps only: sequences come and go, and drafts
    and paces change. A sequence whose tokens do not divide evenly samples fewer in its last step,
    which takes as long as the others.
    """

    def __init__(
        self, model: EngineModel, speculation: Speculation, finished: Mapping[str, int]
    ) -> None:
        super().__init__(model)
        self.drafts = 0
        self._model = model
        self._speculation = speculation
        self._finished = finished
        self._paces: dict[str, _Pace] = {}
        self._sampled = 0.0  # tokens a step, of all sequences
        self._verify_s: dict[tuple[int, int], float] = {}
        self._outdated = False

    @property
    def is_outdated(self) -> bool:
        return self._outdated

    @property
    def next_end(self) -> float:
        self._update()
        return super().next_end

    def count_of(self, step: EngineStep, tokens: int) -> float:
        self._update()
        pace = self._paces[step.step_id]
        return pace.at + _whole_steps(tokens - pace.tokens, pace.per_step)

    def is_changed_by(self, prompt_id: str) -> bool:
        return any(step.prompt_id == prompt_id for step in self.steps.values())

    def outdate(self) -> None:
        self._outdated = True

    def join(self, step: EngineStep) -> None:
        super().join(step)
        self._paces[step.step_id] = _Pace(step.done + 1.0, self.counter)
        self._outdated = True

    def leave(self, step: EngineStep) -> None:
        super().leave(step)
        # the last token comes with the end of its decode step
        step.done = min(step.done, step.gen_tokens - 1)
        self._forget(step)

    def pop_ended(self) -> EngineStep | None:
        step = super().pop_ended()
        if step is not None:
            beyond = self._exact_tokens(step) - step.gen_tokens  # counted, and not sampled
            self.kv_tokens = self.kv_tokens - beyond if self.steps else 0.0
            self._forget(step)
        return step

    def _forget(self, step: EngineStep) -> None:
        del self._paces[step.step_id]
        self._outdated = True

    def _exact_tokens(self, step: EngineStep) -> float:
        pace = self._paces[step.step_id]
        return pace.tokens + pace.per_step * (self.counter - pace.at)

    def _compute_s(self) -> float:
        self._update()
        return self._seconds_of(len(self.steps), self.drafts)

    def _growth(self) -> float:
        self._update()
        return self._sampled

    def _seconds_of(self, sequences: int, drafts: int) -> float:
        if not drafts:
            return self._step_s[sequences]
        rows = sequences * (drafts + 1)
        if (sequences, drafts) not in self._verify_s:
            self._verify_s[sequences, drafts] = self._model.curve.decode_s(rows)
        return self._verify_s[sequences, drafts]

    def _update(self) -> None:
        """Choose drafts and paces anew, if anything has changed and no decode step is under way."""
        if not self._outdated or not self.is_between_steps:
            return
        self._outdated = False
        n, read_s, of = len(self.steps), self._kv_token_s * self.kv_tokens, self._speculation
        siblings = {
            step.step_id: self._finished.get(step.prompt_id, 0) for step in self.steps.values()
        }
        counts = Counter(siblings.values())
        self.drafts, self._sampled, best = 0, float(n), n / (self._step_s[n] + read_s) if n else 0.0
        for drafts in of.draft_tokens:
            sampled = math.fsum(
                count * of.accepted(drafts, ended) for ended, count in counts.items()
            )
            rate = sampled / (self._seconds_of(n, drafts) + read_s) if n else 0.0
            if rate > best:
                self.drafts, self._sampled, best = drafts, sampled, rate
        at = float(round(self.counter))
        for step in self.steps.values():
            pace = self._paces[step.step_id]
            tokens = pace.tokens + pace.per_step * (at - pace.at)
            accepted = of.accepted(self.drafts, siblings[step.step_id])
            self._paces[step.step_id] = _Pace(tokens, at, accepted)
            step.end_at = at + _whole_steps(step.gen_tokens - tokens, accepted)
        self._ends = [
            (step.end_at, number, step) for number, step in enumerate(self.steps.values())
        ]
        self._joined = len(self._ends)
        heapq.heapify(self._ends)


def _whole_steps(tokens: float, per_step: float) -> float:
    return float(math.ceil(tokens / per_step - TOKEN_ROUNDING))
