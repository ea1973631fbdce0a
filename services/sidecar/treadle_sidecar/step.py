"""Hold one step on this engine: its order, its output so far, and the events for its caller.

This module is pure but for the events: callers pass times in. Invariants: each sampled token is
recorded once, with its logprob; version spans are contiguous, without gap or overlap, from the
resumed tokens on; the phases follow each other without a gap, so that they add up to the step's
time.

A step is sent to the engine in one or more attempts: a preempted one is resumed by another attempt,
whose input is the prompt and all output so far.
"""

import asyncio
import hashlib
import uuid
from array import array
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from treadle.common.v1.tokens_pb2 import Logprobs, SamplingParams, TokenIds, VersionSpan
from treadle.engine.v1 import engine_pb2 as pb
from treadle_runtime.errors import TreadleError
from treadle_runtime.fields import duration, like, owner_of, require, timestamp
from treadle_runtime.http.sglang import EngineChunk, EngineClient, EngineRequest, sglang_sampling

from treadle_sidecar.engine.watch import EngineProfile

SEED_BYTES = 7  # below SGLang's limit of 63 bits
# An attempt's start is sent and published this much later. To send it at once delays the request
# to the engine by 0.4 ms, and an engine's first token takes longer than this.
START_SENT_AFTER_S = 0.003
# of an output resumed from another engine: enough text for the beginning of a stop string
TAIL_TOKENS = 64

Reason: TypeAlias = pb.FinishReason.ValueType
Finished: TypeAlias = pb.StepFinished
Started: TypeAlias = pb.StepStarted
STOP, LENGTH, ABORTED = pb.FINISH_REASON_STOP, pb.FINISH_REASON_LENGTH, pb.FINISH_REASON_ABORTED

StepEvent: TypeAlias = pb.StepStarted | pb.TokenChunk | pb.StepPreempted | pb.StepFinished
_FIELDS: dict[type, str] = {  # of GenerateResponse
    pb.StepStarted: "started",
    pb.TokenChunk: "tokens",
    pb.StepPreempted: "preempted",
    pb.StepFinished: "finished",
}
_Phase = Literal["queue", "preempted", "weights", "prefill", "decode"]
# before it first ran, after that, in a pause
_WAITS: tuple[_Phase, ...] = ("queue", "preempted", "weights")


@dataclass(frozen=True)
class StepOrder:
    """Order to run one step.

    resumed: output tokens that the caller has from an engine that was lost. preemptible: whether a
    waiting step may evict this one while it runs. token_interval_s: seconds for which tokens are
    gathered. job, job_weight: whose share of the slots the step takes.
    """

    ticket_id: str
    trajectory_id: str
    turn: int
    priority: float
    prompt: "array[int]"
    resumed: "array[int]"
    sampling: SamplingParams
    preemptible: bool = True
    token_interval_s: float = 0.0
    job: str = ""
    job_weight: float = 1.0


class StepRecord:
    """Record of a step's output, spans and phases. `now` is a monotonic clock's seconds, `wall` the
    Unix time of acceptance."""

    def __init__(self, order: StepOrder, now: float, wall: float) -> None:
        self.order = order
        self.output: array[int] = array("i", order.resumed)
        self.attempts = 0
        self.preemptions = 0
        self._wall = wall
        self._accepted = now
        self._phase: _Phase = "queue"
        self._phase_began = now
        self._phase_s: dict[_Phase, float] = dict.fromkeys((*_WAITS, "prefill", "decode"), 0.0)
        self._waits_since = now
        self._spans: list[VersionSpan] = []
        self._attempt_start = len(self.output)
        self._first_chunk_due = False
        self._cached_tokens = 0
        self._resent = 0
        self._resent_cached = 0

    @property
    def context(self) -> "array[int]":
        """Return prompt and output, which are the input of the next attempt."""
        return self.order.prompt + self.output

    @property
    def attempt_tokens(self) -> int:
        """Return the number of tokens sampled in the present attempt."""
        return len(self.output) - self._attempt_start

    def start_attempt(self, now: float) -> pb.StepStarted:
        started = pb.StepStarted(
            queue_time=duration(now - self._waits_since), attempt=self.attempts
        )
        self._enter("prefill", now)
        self.attempts += 1
        self._attempt_start = len(self.output)
        self._first_chunk_due = True
        return started

    def add_tokens(self, chunk: EngineChunk, now: float) -> pb.TokenChunk:
        if self._first_chunk_due:
            self._first_chunk_due = False
            if self.attempts == 1:
                self._cached_tokens = chunk.cached_tokens
            else:
                self._resent += len(self.order.prompt) + len(self.output)
                self._resent_cached += chunk.cached_tokens
            self._enter("decode", now)
        offset = len(self.output)
        self.output.extend(chunk.token_ids)
        self._cover(chunk.weight_version, offset, len(self.output))
        return pb.TokenChunk(
            offset=offset,
            token_ids=TokenIds(int32_le=array("i", chunk.token_ids).tobytes()),
            logprobs=Logprobs(float32_le=array("f", chunk.logprobs).tobytes()),
            weight_version=chunk.weight_version,
        )

    def correct_spans(self, engine_spans: Sequence[tuple[str, int, int]]) -> None:
        """Replace the chunks' spans by the engine's final spans, where those cover the attempt."""
        bounds = [0, *(end for _, _, end in engine_spans)]
        starts = [start for _, start, _ in engine_spans]
        if (
            not starts
            or starts != bounds[:-1]
            or bounds != sorted(bounds)
            or bounds[-1] != self.attempt_tokens
        ):
            return
        self._spans = [span for span in self._spans if span.start_token < self._attempt_start]
        if self._spans:
            self._spans[-1].end_token = self._attempt_start
        for version, start, end in engine_spans:
            self._cover(version, self._attempt_start + start, self._attempt_start + end)

    def preempt(self, by: str, now: float) -> pb.StepPreempted:
        self.preemptions += 1
        self._enter("preempted", now)
        self._waits_since = now
        # nothing of another tenant's
        told = by if owner_of(by) == owner_of(self.order.ticket_id) else ""
        return pb.StepPreempted(output_tokens=len(self.output), by_ticket_id=told)

    def wait(self, now: float, *, paused: bool) -> None:
        """Record that the step waits from now on for the end of a pause, or for a slot. A running
        step stays as it is."""
        if self._phase in _WAITS:
            self._enter("weights" if paused else "preempted" if self.attempts else "queue", now)

    def finish(self, reason: Reason, now: float) -> pb.StepFinished:
        self._enter(self._phase, now)
        spent = {phase: duration(spent_s) for phase, spent_s in self._phase_s.items()}
        return pb.StepFinished(
            reason=reason,
            output_tokens=len(self.output),
            version_spans=self._spans,
            timing=pb.StepTiming(
                **{**spent, "queue": duration(sum(self._phase_s[wait] for wait in _WAITS))},
                accepted_at=timestamp(self._wall),
                finished_at=timestamp(self._wall + (now - self._accepted)),
            ),
            cached_tokens=self._cached_tokens,
            preemptions=self.preemptions,
            resumed_prompt_tokens=self._resent,
            resumed_cached_tokens=self._resent_cached,
        )

    def _enter(self, phase: _Phase, now: float) -> None:
        self._phase_s[self._phase] += now - self._phase_began
        self._phase, self._phase_began = phase, now

    def _cover(self, version: str, start: int, end: int) -> None:
        """Add the span [start, end), which follows the last one."""
        if self._spans and self._spans[-1].weight_version == version:
            self._spans[-1].end_token = end
        elif start < end:
            self._spans.append(
                VersionSpan(weight_version=version, start_token=start, end_token=end)
            )


class SplitStops:
    """Finds stop strings that begin in one attempt and end in a later one.

    The engine looks for stop strings in what the present attempt sampled, so it cannot see one that
    began before a preemption (or on a lost engine). This class looks at the text around each cut
    between attempts, and only there. A match is seen after the chunk that completes it, so tokens
    that share its chunk stay, as they do when the engine finds one itself in a multi-token step.
    """

    def __init__(self, stops: Sequence[str], tail: str = "") -> None:
        """Begin with `tail`, the text before the first attempt, of which only the end matters."""
        self._stops = tuple(stops)
        self._reach = max((len(stop) for stop in self._stops), default=1) - 1
        self._text = tail  # the last `reach` characters
        self._cut = len(tail)  # characters of it that were there at the cut
        self._drop_beginning()

    def cut(self) -> None:
        """Note that the attempt has ended; the text that follows is of another attempt."""
        self._cut = len(self._text)

    def completes(self, text: str) -> bool:
        """Add new text; return whether it completes a stop string that began before the cut."""
        if not self._reach:
            return False
        self._text += text
        found = self._cut > 0 and any(
            0 <= self._text.find(stop) < self._cut for stop in self._stops
        )
        self._drop_beginning()
        return found

    def _drop_beginning(self) -> None:
        dropped = max(len(self._text) - self._reach, 0)
        self._text = self._text[dropped:]
        self._cut = max(self._cut - dropped, 0)


class RunningStep:
    """Step from its acceptance to its end; only StepRunner changes it. `over` is set once the step
    has left the queue."""

    def __init__(self, order: StepOrder, profile: EngineProfile, now: float, wall: float) -> None:
        """Raise InvalidArgument for what the engine cannot take, above all for token ids that would
        kill it."""
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
        self.aborting = False  # the engine is to abort the present attempt
        self.evicted_by = ""
        self.stopped = False  # by the caller, a pause or an error: no further attempt
        self.stop_found = (
            False  # a stop string across a cut: what the engine samples beyond it is dropped
        )
        self.waiting_since = now
        # of the context of the next attempt, as `runner.hash_blocks` has them
        self.blocks: list[int] = []
        self._error: TreadleError | None = None
        self._wake = asyncio.Event()
        self._attempt_ended = asyncio.Event()
        self._events: asyncio.Queue[StepEvent | TreadleError] = asyncio.Queue()
        self._started: pb.StepStarted | None = None  # not sent yet
        self._gathered: pb.TokenChunk | None = None  # tokens that are not sent yet
        self._gather_until_s = 0.0  # by the loop's clock
        self._send_later: asyncio.TimerHandle | None = None
        self._tail_known = not (order.resumed and sampling.stop)

    def emit(self, event: StepEvent | TreadleError) -> None:
        """Send an event to the caller; StepFinished or an error is the last.

        Tokens wait for further tokens, at most as long as the order allows, and are sent before any
        other event; a start waits START_SENT_AFTER_S, or until the next event.
        """
        if isinstance(event, pb.TokenChunk):
            self._gather(event)
        elif isinstance(event, pb.StepStarted):
            self._send_gathered()
            self._started = event
            self._send_later = asyncio.get_running_loop().call_later(
                START_SENT_AFTER_S, self._send_gathered
            )
        else:
            self._send_gathered()
            self._events.put_nowait(event)

    def _gather(self, chunk: pb.TokenChunk) -> None:
        if self._gathered is not None:
            if _join(self._gathered, chunk):
                return
            self._send_gathered()
        self._gathered, loop = chunk, asyncio.get_running_loop()
        if self._started is not None or loop.time() >= self._gather_until_s:
            self._send_gathered()
        else:
            self._send_later = loop.call_at(self._gather_until_s, self._send_gathered)

    def _send_gathered(self) -> None:
        if self._send_later is not None:
            self._send_later.cancel()
            self._send_later = None
        if self._started is not None:
            self._events.put_nowait(self._started)
            self._started = None
        if self._gathered is not None:
            self._events.put_nowait(self._gathered)
            self._gathered = None
            self._gather_until_s = asyncio.get_running_loop().time() + self.order.token_interval_s

    async def events(self) -> AsyncIterator[pb.GenerateResponse]:
        """Yield the step's events until StepFinished. Chunks that wait for a slow caller are
        joined. Raises the error that ended the step."""
        event: StepEvent | TreadleError | None = None
        while not isinstance(event, pb.StepFinished):
            event = await self._events.get()
            while isinstance(event, pb.TokenChunk) and not self._events.empty():
                following = self._events.get_nowait()
                if not (isinstance(following, pb.TokenChunk) and _join(event, following)):
                    yield pb.GenerateResponse(tokens=event)
                    event = following
            if isinstance(event, TreadleError):
                raise event
            answer: dict[str, Any] = {_FIELDS[type(event)]: event}
            yield pb.GenerateResponse(**answer)

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
        """Raise the error with which the step was stopped, if any."""
        if self._error is not None:
            raise self._error

    async def wait_for_slot(self) -> bool:
        """Wait for a slot; return False where the step is stopped first. Raises the error with
        which it was stopped."""
        while not self.admitted and not self.stopped:
            await self._wake.wait()
            self._wake.clear()
        self.raise_error()
        self._attempt_ended.clear()
        return not self.stopped

    def end_attempt(self) -> None:
        """Note that the engine has ended the attempt."""
        self.rid = ""
        self.admitted = False
        self.aborting = False
        self._attempt_ended.set()

    async def wait_for_end_of_attempt(self, timeout_s: float) -> None:
        """Return at the attempt's end or after `timeout_s`."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._attempt_ended.wait()

    async def learn_tail(self, engine: EngineClient) -> None:
        """Get the text of an output that came from another engine. Raises EngineLost,
        EngineRefused."""
        if not self._tail_known:
            self._tail_known = True
            self.stops = SplitStops(
                self.order.sampling.stop, await engine.text_of(self.order.resumed[-TAIL_TOKENS:])
            )

    def reason_to_end(self) -> Reason | None:
        """Return why a step that was cut here needs no further attempt; None where it needs one.

        An abort can overtake the engine's own end, so this looks at the output.
        """
        output = self.record.output
        if output and not self.order.sampling.ignore_eos and output[-1] in self._end_token_ids:
            return STOP
        return LENGTH if len(output) >= self._output_limit else None

    def attempt_request(self, weight_version: str) -> EngineRequest:
        """Return the request for the tokens that are left. Its salt is of the engine's weight
        version, whatever the ticket names, and the trajectory's tenant."""
        sampling = self.order.sampling
        params = sglang_sampling((field.name, value) for field, value in sampling.ListFields())
        params["max_new_tokens"] = self._output_limit - len(self.record.output)
        if not sampling.HasField("seed"):
            params["sampling_seed"] = self._default_seed()
        # The random part comes first and has a fixed length, so that no rid is the beginning of
        # another.
        rid = f"{uuid.uuid4().hex}-{self.order.ticket_id}"
        return EngineRequest(
            rid,
            self.record.context.tolist(),
            params,
            like(self.order.trajectory_id, weight_version),
        )

    def _default_seed(self) -> int:
        # An engine that honours seeds gives all requests without one the same seed; the samples of
        # a prompt would be equal.
        digest = hashlib.sha256(f"{self.order.trajectory_id}/{self.order.turn}".encode()).digest()
        return int.from_bytes(digest[:SEED_BYTES], "big")


def _join(chunk: pb.TokenChunk, following: pb.TokenChunk) -> bool:
    """Add the tokens that follow a chunk to it; return False where other weights sampled them."""
    if following.weight_version != chunk.weight_version:
        return False
    chunk.token_ids.int32_le += following.token_ids.int32_le
    chunk.logprobs.float32_le += following.logprobs.float32_le
    return True
