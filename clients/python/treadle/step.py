"""Assemble one step from the events of its streams, and account for the time that its client has
measured.

`StepAssembly` makes the step: output, version spans and time spans. Invariants: offsets are
contiguous, every token has a logprob, the engine's final account (count, version spans) agrees with
what arrived; anything else raises StreamBroken. Time spans follow one another without overlap.

`TimeAccount` has the client's part of its trajectory's ledger (ADR 0040). The client's time is cut
at marks into calls and the gaps between them. The services account for the time that they took of a
call: the scheduler for the wait for a ticket (Ticket.waited), the sidecar for its step
(StepTiming). The rest of the call is `control`. Between two calls a tool runs, or the client works,
which is control too: where tools of the mesh ran, their time is `tool` and the rest control; where
none ran after a step, all of it is `tool`, as the caller runs its own. Sums only grow, so that a
report that is repeated or lost changes nothing.

Pure: the caller passes the time in.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from treadle.engine.v1 import engine_pb2
from treadle.errors import StreamBroken
from treadle.scheduler.v1 import scheduler_pb2 as pb
from treadle.types import (
    Chunk,
    FinishReason,
    Span,
    SpanKind,
    Step,
    VersionSpan,
    duration,
    unpack_ids,
    unpack_logprobs,
    words_of,
)

_REASONS: dict[int, FinishReason] = words_of(engine_pb2.FinishReason)
PARTS: tuple[SpanKind, ...] = ("queue", "prefill", "decode")


class StepAssembly:
    """A step that is still running. It owns its lists; no other code writes them."""

    def __init__(self, turn: int, now: float) -> None:
        self.turn = turn
        self.token_ids: list[int] = []
        self.logprobs: list[float] = []
        self.preemptions = 0
        self._spans: list[Span] = []
        self._versions: list[VersionSpan] = []
        self._engine_ids: list[str] = []
        self._engine_id = ""
        self._kind: SpanKind | None = "queue"
        self._since = now
        self._cached_tokens = 0
        self._resumed = 0  # tokens that came from engines before the present one
        self.calls = 0  # finished calls: a long step takes several
        self.called = 0  # tokens of these calls

    @property
    def waits(self) -> bool:
        """Return whether the step waits for its engine, and does not run."""
        return self._kind == "queue"

    @property
    def version_spans(self) -> list[VersionSpan]:
        """Return the version spans over the step's output so far."""
        return list(self._versions)

    def set_engine(self, engine_id: str) -> None:
        """Note that a ticket for engine_id was issued; its stream begins at the present count of
        tokens."""
        self._engine_id = engine_id
        self._resumed = len(self.token_ids)
        if not self._engine_ids or self._engine_ids[-1] != engine_id:
            self._engine_ids.append(engine_id)

    def add_chunk(self, message: engine_pb2.TokenChunk, now: float) -> Chunk:
        """Append the tokens of one message."""
        offset = message.offset + self.called
        if offset != len(self.token_ids):
            count = len(self.token_ids)
            kind = "gap" if offset > count else "repeat"
            raise StreamBroken(
                f"a {kind} in turn {self.turn}: offset {offset} after {count} tokens from "
                f"{self._engine_id}"
            )
        ids, logprobs = (
            unpack_ids(message.token_ids.int32_le),
            unpack_logprobs(message.logprobs.float32_le),
        )
        if len(ids) != len(logprobs):
            raise StreamBroken(
                f"{len(ids)} tokens with {len(logprobs)} logprobs at offset {offset} of turn "
                f"{self.turn}"
            )
        if ids and self._kind != "decode":
            self.enter("decode", now)
        self.token_ids += ids
        self.logprobs += logprobs
        _append(self._versions, message.weight_version, offset, offset + len(ids))
        return Chunk(offset, ids, logprobs, message.weight_version)

    def preempt(self, message: engine_pb2.StepPreempted, now: float) -> None:
        """Note that the engine put the step back into its queue."""
        arrived = len(self.token_ids) - self.called
        if message.output_tokens != arrived:
            raise StreamBroken(
                f"preempted after {message.output_tokens} tokens, of which {arrived} arrived"
            )
        self.preemptions += 1
        self.enter("queue", now)

    def end_call(self, now: float) -> None:
        """Note that all tokens of one call have arrived; the next call waits for its engine from
        now on."""
        self.calls += 1
        self.called = len(self.token_ids)
        self.enter("queue", now)

    def finish(self, message: engine_pb2.StepFinished, now: float) -> Step:
        """Return the step, checked against the engine's final account."""
        count = len(self.token_ids)
        if message.output_tokens + self.called != count:
            raise StreamBroken(
                f"the engine counts {message.output_tokens} output tokens in turn {self.turn}, "
                f"{count - self.called} arrived"
            )
        # The engine's own account of which weights sampled which tokens replaces the one of the
        # chunks, as far as it reaches.
        self._versions = _head(self._versions, self._resumed)
        covered = self._resumed
        for span in message.version_spans:
            start, end = span.start_token + self.called, span.end_token + self.called
            if start != covered or end <= covered:
                raise StreamBroken(
                    f"version spans of turn {self.turn} leave a gap or overlap at token {covered}"
                )
            covered = end
            _append(self._versions, span.weight_version, start, end)
        if covered != count:
            raise StreamBroken(
                f"version spans of turn {self.turn} cover {covered} of {count} tokens"
            )
        reason = _REASONS.get(message.reason)
        if reason is None:
            raise StreamBroken(f"finish reason {message.reason} of turn {self.turn} is unknown")
        if self.calls == 0:  # of a later call the step's own output is a part
            self._cached_tokens = message.cached_tokens
        return self.end(reason, now)

    def end(self, reason: FinishReason, now: float) -> Step:
        """Return the step made of what has arrived, without an engine's final account."""
        self.enter(None, now)
        spent = {
            kind: sum(s.end_s - s.start_s for s in self._spans if s.kind == kind)
            for kind in ("queue", "prefill", "decode")
        }
        return Step(
            turn=self.turn,
            token_ids=self.token_ids,
            logprobs=self.logprobs,
            version_spans=tuple(self._versions),
            finish_reason=reason,
            queue_s=spent["queue"],
            prefill_s=spent["prefill"],
            decode_s=spent["decode"],
            preemptions=self.preemptions,
            cached_tokens=self._cached_tokens,
            engine_ids=tuple(self._engine_ids),
            spans=tuple(self._spans),
        )

    def seen_since(self, start_s: float, now: float) -> dict[str, float]:
        """Return the seconds by kind that the step has spent since then."""
        seen: dict[str, float] = {}
        spans = [
            (span.kind, span.start_s, span.end_s) for span in self._spans if span.end_s > start_s
        ]
        for kind, began_s, ended_s in [
            *spans,
            *([(self._kind, self._since, now)] if self._kind is not None else []),
        ]:
            seen[kind] = seen.get(kind, 0.0) + max(0.0, ended_s - max(began_s, start_s))
        return seen

    def enter(self, kind: SpanKind | None, now: float) -> None:
        """Begin a span of another kind: "prefill" once admitted, "queue" once the stream broke,
        None at the end."""
        if kind == self._kind:
            return
        if self._kind is not None:
            self._spans.append(Span(self._kind, self._since, now, self._engine_id, self.turn))
        self._kind, self._since = kind, now


def shift_spans(spans: Iterable[VersionSpan], by_tokens: int) -> list[VersionSpan]:
    """Move the indexes of spans, from a step's output to the trajectory's tokens."""
    return [
        VersionSpan(s.weight_version, s.start_token + by_tokens, s.end_token + by_tokens)
        for s in spans
    ]


def _append(spans: list[VersionSpan], weight_version: str, start: int, end: int) -> None:
    """Add [start, end), joined to the last span where they touch under one version; an empty span
    adds nothing."""
    if start == end:
        return
    last = spans[-1] if spans else None
    if last and last.weight_version == weight_version and last.end_token == start:
        spans[-1] = VersionSpan(weight_version, last.start_token, end)
    else:
        spans.append(VersionSpan(weight_version, start, end))


def _head(spans: list[VersionSpan], end: int) -> list[VersionSpan]:
    return [
        VersionSpan(s.weight_version, s.start_token, min(s.end_token, end))
        for s in spans
        if s.start_token < end
    ]


class TimeAccount:
    """Sums of one trajectory, in seconds. opened_s: when the answer to its opening came;
    since_opening_s: how long it had been open then, by the scheduler."""

    def __init__(self, opened_s: float, since_opening_s: float) -> None:
        self._opened_s = opened_s - since_opening_s
        self._control_s = since_opening_s
        self._tool_s = 0.0
        self._lost_s: dict[str, float] = dict.fromkeys(PARTS, 0.0)
        self._marked_s = opened_s  # earlier time is in the sums, or in the accounts of the services
        self._ran_s = 0.0  # of tools of the mesh, since the mark
        self._stepped = False  # a step has ended since the opening
        self._streams = False
        # of the last step that ended without its engine's account
        self._seen_s: Mapping[str, float] = {}

    def add_tool(self, seconds: float) -> None:
        """Add the time that a tool of the mesh has run."""
        self._ran_s += seconds

    def ask(self, now: float, *, replaces: bool, goes_on: bool) -> None:
        """Note the request for a ticket. replaces: of a step that is lost. goes_on: no tool can
        have run since the mark."""
        if replaces:
            for kind, spent_s in self._seen_s.items():
                self._lost_s[kind] += spent_s
        self._seen_s = {}
        self._end_gap(now, goes_on=goes_on or replaces)

    def take_ticket(self, now: float, waited_s: float) -> None:
        """Note that the ticket has arrived; the scheduler has held the request for `waited_s`."""
        self._control_s += self._mark(now) - waited_s
        self._streams = True

    def end_stream(
        self, now: float, accounted_s: float | None, seen_s: Mapping[str, float]
    ) -> None:
        """Note that the step's stream has ended, or was left. accounted_s: by its engine; None: no
        account came, and `seen_s` is what the client saw of it, by kind. Does nothing where no
        stream is open."""
        if self._streams:
            self._streams, self._stepped = False, True
            self._seen_s = {} if accounted_s is not None else seen_s
            self._control_s += self._mark(now) - (
                sum(seen_s.values()) if accounted_s is None else accounted_s
            )

    def close(self, now: float, *, asks: bool) -> pb.ClientTimes:
        """Return the sums at the end. asks: whether a ticket has been requested since the mark, a
        wait that the scheduler counts."""
        if asks:
            self._mark(now)
        self._end_gap(now, goes_on=False)
        return self.report()

    def report(self) -> pb.ClientTimes:
        """Return the sums until the mark."""
        return pb.ClientTimes(
            tool=duration(self._tool_s),
            control=duration(max(self._control_s, 0.0)),
            lost_queue=duration(self._lost_s["queue"]),
            lost_prefill=duration(self._lost_s["prefill"]),
            lost_decode=duration(self._lost_s["decode"]),
            since_opening=duration(self._marked_s - self._opened_s),
        )

    def _end_gap(self, now: float, *, goes_on: bool) -> None:
        gap_s = self._mark(now)
        tool_s = (
            min(self._ran_s, gap_s)
            if self._ran_s
            else gap_s
            if self._stepped and not goes_on
            else 0.0
        )
        self._tool_s += tool_s
        self._control_s += gap_s - tool_s
        self._ran_s = 0.0

    def _mark(self, now: float) -> float:
        since_s, self._marked_s = self._marked_s, now
        return now - since_s
