"""What one step has gathered: output, version spans, phases of time. Pure bookkeeping: the time is passed in.

Invariants: each sampled token is taken once, with its logprob; spans are contiguous, without gap or overlap, from the
resumed tokens on; the phases (queue, prefill, decode) follow each other without a gap, so that they add up to the
step's time.
"""

import enum
from array import array
from collections.abc import Sequence

from treadle_sidecar.steps.step import Finished, Preempted, Reason, Span, Started, StepOrder, Timing, Tokens


class _Phase(enum.Enum):
    QUEUE = "queue"
    PREFILL = "prefill"
    DECODE = "decode"


class StepRecord:
    """`now` is a monotonic clock's seconds, `wall` the Unix time of acceptance."""

    def __init__(self, order: StepOrder, now: float, wall: float) -> None:
        self.order = order
        self.output: array[int] = array("i", order.resumed)
        self.attempts = 0
        self.preemptions = 0
        self.cached_tokens = 0
        self._wall = wall
        self._accepted = now
        self._phase = _Phase.QUEUE
        self._phase_began = now
        self._phase_s = dict.fromkeys(_Phase, 0.0)
        self._spans: list[Span] = []
        self._attempt_start = len(self.output)
        self._first_chunk_due = False
        self._resent = 0
        self._resent_cached = 0

    @property
    def context(self) -> "array[int]":
        """Prompt and output: what the engine has to know to go on."""
        return self.order.prompt + self.output

    @property
    def attempt_tokens(self) -> int:
        """Sampled since the last admission."""
        return len(self.output) - self._attempt_start

    def admitted(self, now: float) -> Started:
        """The step got a slot."""
        waited = now - self._phase_began
        self._enter(_Phase.PREFILL, now)
        started = Started(waited, self.attempts)
        self.attempts += 1
        self._attempt_start = len(self.output)
        self._first_chunk_due = True
        return started

    def sampled(
        self, token_ids: Sequence[int], logprobs: Sequence[float], weight_version: str, cached: int, now: float
    ) -> Tokens:
        """New tokens of this attempt; `cached`: of its prompt, how much was in KV."""
        if self._first_chunk_due:
            self._first_chunk_due = False
            if self.attempts == 1:
                self.cached_tokens = cached
            else:
                self._resent += len(self.order.prompt) + len(self.output)
                self._resent_cached += cached
            self._enter(_Phase.DECODE, now)
        offset = len(self.output)
        self.output.extend(token_ids)
        self._cover(weight_version, offset, len(self.output))
        return Tokens(offset, array("i", token_ids), array("f", logprobs), weight_version)

    def attempt_over(self, engine_spans: Sequence[tuple[str, int, int]]) -> None:
        """The engine's own account of the attempt replaces what the chunks said, where it covers the attempt."""
        if not engine_spans or engine_spans[-1][2] != self.attempt_tokens:
            return
        kept = [span for span in self._spans if span.start < self._attempt_start]
        if kept and kept[-1].end > self._attempt_start:
            kept[-1] = Span(kept[-1].weight_version, kept[-1].start, self._attempt_start)
        self._spans = kept
        for version, start, end in engine_spans:
            self._cover(version, self._attempt_start + start, self._attempt_start + end)

    def preempted(self, by: str, now: float) -> Preempted:
        """The step lost its slot and waits again."""
        self.preemptions += 1
        self._enter(_Phase.QUEUE, now)
        return Preempted(len(self.output), by)

    def finished(self, reason: Reason, now: float) -> Finished:
        """The step is over."""
        self._enter(self._phase, now)
        return Finished(
            reason=reason,
            output_tokens=len(self.output),
            spans=tuple(self._spans),
            timing=Timing(
                queue_s=self._phase_s[_Phase.QUEUE],
                prefill_s=self._phase_s[_Phase.PREFILL],
                decode_s=self._phase_s[_Phase.DECODE],
                accepted_at=self._wall,
                finished_at=self._wall + (now - self._accepted),
            ),
            cached_tokens=self.cached_tokens,
            preemptions=self.preemptions,
            resumed_prompt_tokens=self._resent,
            resumed_cached_tokens=self._resent_cached,
        )

    def _enter(self, phase: _Phase, now: float) -> None:
        self._phase_s[self._phase] += now - self._phase_began
        self._phase, self._phase_began = phase, now

    def _cover(self, version: str, start: int, end: int) -> None:
        if start == end:
            return
        if self._spans and self._spans[-1].weight_version == version:
            start = self._spans.pop().start
        self._spans.append(Span(version, start, end))
