"""One step on this engine: its order, what it has produced so far, and the events on their way to the caller.

Pure but for the events: times are passed in. Invariants: each sampled token is recorded once, with its logprob; version
spans are contiguous, without gap or overlap, from the resumed tokens on; the phases queue, prefill and decode follow
each other without a gap, so that they add up to the step's time.

A step is sent to the engine in one or more attempts: a preempted one is resumed by another attempt, whose input is the
prompt and all output so far.
"""

import asyncio
import enum
import hashlib
import uuid
from array import array
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

from treadle_runtime.errors import TreadleError, require

from treadle_sidecar.engine.client import EngineChunk, EngineClient, EngineRequest
from treadle_sidecar.engine.watch import EngineProfile

SEED_BYTES = 7  # below SGLang's limit of 63 bits
TAIL_TOKENS = 64  # of an output resumed from elsewhere, enough for the text in which a stop string may have begun


class Reason(enum.Enum):
    """Why a step ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORTED = "aborted"


@dataclass(frozen=True)
class Sampling:
    """None: the engine's default."""

    max_new_tokens: int
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False


@dataclass(frozen=True)
class StepOrder:
    """One step to run. `resumed` are output tokens that the caller has from an engine that was lost; preemptible:
    whether a waiting step may evict this one while it runs."""

    ticket_id: str
    trajectory_id: str
    turn: int
    priority: float
    prompt: "array[int]"
    resumed: "array[int]"
    sampling: Sampling
    preemptible: bool = True


@dataclass(frozen=True)
class Started:
    """The engine got the step after `queue_s` in this wait."""

    queue_s: float
    attempt: int


@dataclass(frozen=True)
class Tokens:
    """`offset` is the first token's index in the step's output; as many logprobs as tokens."""

    offset: int
    token_ids: "array[int]"
    logprobs: "array[float]"
    weight_version: str


@dataclass(frozen=True)
class Preempted:
    """The step lost its slot with `output_tokens` sampled and sent; step `by` got it, empty where a pause took it."""

    output_tokens: int
    by: str


@dataclass(frozen=True)
class Span:
    """Output tokens [start, end) were sampled under `weight_version`."""

    weight_version: str
    start: int
    end: int


@dataclass(frozen=True)
class Finished:
    """The end. Spans cover [len(resumed), output_tokens). queue_s, prefill_s and decode_s add up to finished_at -
    accepted_at, which are Unix seconds."""

    reason: Reason
    output_tokens: int
    spans: tuple[Span, ...]
    queue_s: float
    prefill_s: float
    decode_s: float
    accepted_at: float
    finished_at: float
    cached_tokens: int
    preemptions: int
    resumed_prompt_tokens: int
    resumed_cached_tokens: int


StepEvent = Started | Tokens | Preempted | Finished


class _Phase(enum.Enum):
    QUEUE = "queue"
    PREFILL = "prefill"
    DECODE = "decode"


class StepRecord:
    """What a step has gathered. `now` is a monotonic clock's seconds, `wall` the Unix time of acceptance."""

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
        """Prompt and output: the input of the next attempt."""
        return self.order.prompt + self.output

    @property
    def attempt_tokens(self) -> int:
        """Tokens sampled in the present attempt."""
        return len(self.output) - self._attempt_start

    def start_attempt(self, now: float) -> Started:
        waited = now - self._phase_began
        self._enter(_Phase.PREFILL, now)
        started = Started(waited, self.attempts)
        self.attempts += 1
        self._attempt_start = len(self.output)
        self._first_chunk_due = True
        return started

    def add_tokens(self, chunk: EngineChunk, now: float) -> Tokens:
        if self._first_chunk_due:
            self._first_chunk_due = False
            if self.attempts == 1:
                self.cached_tokens = chunk.cached_tokens
            else:
                self._resent += len(self.order.prompt) + len(self.output)
                self._resent_cached += chunk.cached_tokens
            self._enter(_Phase.DECODE, now)
        offset = len(self.output)
        self.output.extend(chunk.token_ids)
        self._cover(chunk.weight_version, offset, len(self.output))
        return Tokens(offset, array("i", chunk.token_ids), array("f", chunk.logprobs), chunk.weight_version)

    def correct_spans(self, engine_spans: Sequence[tuple[str, int, int]]) -> None:
        """Replace the spans of the chunks by the engine's final account, where that covers the attempt."""
        if not engine_spans or engine_spans[-1][2] != self.attempt_tokens:
            return
        kept = [span for span in self._spans if span.start < self._attempt_start]
        if kept and kept[-1].end > self._attempt_start:
            kept[-1] = Span(kept[-1].weight_version, kept[-1].start, self._attempt_start)
        self._spans = kept
        for version, start, end in engine_spans:
            self._cover(version, self._attempt_start + start, self._attempt_start + end)

    def preempt(self, by: str, now: float) -> Preempted:
        self.preemptions += 1
        self._enter(_Phase.QUEUE, now)
        return Preempted(len(self.output), by)

    def finish(self, reason: Reason, now: float) -> Finished:
        self._enter(self._phase, now)
        return Finished(
            reason=reason,
            output_tokens=len(self.output),
            spans=tuple(self._spans),
            queue_s=self._phase_s[_Phase.QUEUE],
            prefill_s=self._phase_s[_Phase.PREFILL],
            decode_s=self._phase_s[_Phase.DECODE],
            accepted_at=self._wall,
            finished_at=self._wall + (now - self._accepted),
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


class SplitStops:
    """Finds stop strings that begin in one attempt and end in a later one.

    The engine looks for stop strings in what the present attempt sampled, so it cannot see one that began before a
    preemption (or on a lost engine). This looks at the text around each cut between attempts, and only there. A match
    is seen after the chunk that completes it, so tokens that share its chunk stay, as they do when the engine finds one
    itself in a multi-token step.
    """

    def __init__(self, stops: Sequence[str], tail: str = "") -> None:
        """`tail` is the text before the first attempt, of which only the end matters."""
        self._stops = tuple(stops)
        self._reach = max((len(stop) for stop in self._stops), default=0) - 1
        self._tail = self._end_of(tail)
        self._before = len(self._tail)  # characters of the tail that were there at the cut

    def cut(self) -> None:
        """The attempt ended; the text that follows is another's."""
        self._before = len(self._tail)

    def completes(self, text: str) -> bool:
        """Add new text; True where it completes a stop string that began before the cut."""
        if self._reach < 1:
            return False
        joined = self._tail + text
        found = any(0 <= joined.find(stop) < self._before for stop in self._stops) if self._before else False
        self._tail = self._end_of(joined)
        dropped = len(joined) - len(self._tail)
        self._before = max(self._before - dropped, 0)
        return found

    def _end_of(self, text: str) -> str:
        return text[-self._reach :] if self._reach > 0 else ""


class RunningStep:
    """A step from its acceptance to its end; only StepRunner changes it. `over` is set once it has left the queue."""

    def __init__(self, order: StepOrder, profile: EngineProfile, now: float, wall: float) -> None:
        """Raises InvalidArgument for what the engine cannot take, above all for token ids that would kill it."""
        sampling, room = order.sampling, profile.max_sequence_tokens - len(order.prompt)
        limit = f"the engine takes {profile.max_sequence_tokens} with the output"
        require(room > 0, "prompt", f"has {len(order.prompt)} tokens; {limit}")
        profile.require_known("prompt", order.prompt)
        profile.require_known("resumed_output", order.resumed)
        seeded = profile.deterministic and sampling.min_p
        require(not seeded, "sampling.min_p", "must be 0 on an engine with deterministic inference")
        self._end_token_ids = profile.end_token_ids | frozenset(sampling.stop_token_ids)
        self._output_limit = min(sampling.max_new_tokens, room)
        self.order = order
        self.record = StepRecord(order, now, wall)
        self.stops = SplitStops(sampling.stop)
        self.over = asyncio.Event()
        self.rid = ""
        self.admitted = False
        self.aborting = False  # the engine is being asked to abort the present attempt
        self.evicted_by = ""
        self.stopped = False  # by the caller, a pause or an error: no further attempt
        self.stop_found = False  # a stop string across a cut: what the engine samples beyond it is dropped
        self.waiting_since = now
        self._error: TreadleError | None = None
        self._wake = asyncio.Event()
        self._attempt_ended = asyncio.Event()
        self._events: asyncio.Queue[StepEvent | TreadleError] = asyncio.Queue()
        self._tail_known = not (order.resumed and sampling.stop)

    def emit(self, event: StepEvent | TreadleError) -> None:
        """Send an event to the caller; Finished or an error is the last."""
        self._events.put_nowait(event)

    async def events(self) -> AsyncIterator[StepEvent]:
        """Until Finished. Chunks that wait for a slow caller are joined. Raises the error that ended the step."""
        while True:
            event = await self._events.get()
            while isinstance(event, Tokens) and not self._events.empty():
                following = self._events.get_nowait()
                if isinstance(following, Tokens) and following.weight_version == event.weight_version:
                    token_ids = event.token_ids + following.token_ids
                    logprobs = event.logprobs + following.logprobs
                    event = Tokens(event.offset, token_ids, logprobs, event.weight_version)
                else:
                    yield event
                    event = following
            if isinstance(event, TreadleError):
                raise event
            yield event
            if isinstance(event, Finished):
                return

    def admit(self) -> None:
        """Give the step a slot."""
        self.admitted = True
        self._wake.set()

    def stop(self, error: TreadleError | None) -> None:
        """Allow no further attempt: the step ends as aborted, or with `error`."""
        if not self.stopped:
            self.stopped, self._error = True, error
            self._wake.set()

    def raise_error(self) -> None:
        """Raise the error that the step was stopped with, if any."""
        if self._error is not None:
            raise self._error

    async def wait_for_slot(self) -> bool:
        """False where the step is stopped first. Raises the error that it was stopped with."""
        while not self.admitted and not self.stopped:
            await self._wake.wait()
            self._wake.clear()
        self.raise_error()
        self._attempt_ended.clear()
        return not self.stopped

    def end_attempt(self) -> None:
        """The engine has ended the attempt."""
        self.rid = ""
        self.admitted = False
        self.aborting = False
        self._attempt_ended.set()

    async def wait_for_end_of_attempt(self, timeout_s: float) -> None:
        """Return at the attempt's end or after `timeout_s`."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._attempt_ended.wait()
        except TimeoutError:
            return

    async def learn_tail(self, engine: EngineClient) -> None:
        """Ask for the text of an output that came from another engine. Raises EngineLost, EngineRefused."""
        if not self._tail_known:
            self._tail_known = True
            self.stops = SplitStops(self.order.sampling.stop, await engine.text_of(self.order.resumed[-TAIL_TOKENS:]))

    def reason_to_end(self) -> Reason | None:
        """Why a step that was cut here needs no further attempt; None where it does.

        An abort can overtake the engine's own end, so the output is looked at.
        """
        output = self.record.output
        if output and not self.order.sampling.ignore_eos and output[-1] in self._end_token_ids:
            return Reason.STOP
        return Reason.LENGTH if len(output) >= self._output_limit else None

    def attempt_request(self, weight_version: str) -> EngineRequest:
        """The input and the tokens that are left. The salt is the engine's weight version, whatever the ticket says."""
        sampling = self.order.sampling
        params: dict[str, object] = {
            "max_new_tokens": self._output_limit - len(self.record.output),
            "ignore_eos": sampling.ignore_eos,
            "sampling_seed": self._default_seed() if sampling.seed is None else sampling.seed,
            "skip_special_tokens": False,
        }
        for name in ("temperature", "top_p", "top_k", "min_p"):
            value = getattr(sampling, name)
            if value is not None:
                params[name] = value
        if sampling.stop:
            params["stop"] = list(sampling.stop)
        if sampling.stop_token_ids:
            params["stop_token_ids"] = list(sampling.stop_token_ids)
        # The random part comes first and has a fixed length, so that no rid is the beginning of another.
        rid = f"{uuid.uuid4().hex}-{self.order.ticket_id}"
        return EngineRequest(rid, self.record.context.tolist(), params, weight_version)

    def _default_seed(self) -> int:
        # An engine that honours seeds gives all requests without one the same seed; the samples of a prompt would be
        # equal.
        digest = hashlib.sha256(f"{self.order.trajectory_id}/{self.order.turn}".encode()).digest()
        return int.from_bytes(digest[:SEED_BYTES], "big")
