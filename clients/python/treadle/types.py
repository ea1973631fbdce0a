"""The nouns of the client's API, as frozen dataclasses.

Units: times in seconds (`*_s`), moments in seconds of unix time on ONE clock, the client's; token indexes from 0;
logprobs are natural logarithms. Token lists are plain lists so that they go straight into a tensor or JSON.

The client's one clock: unix time that never steps back.

Invariant: read once from the wall clock, then carried on by the monotonic one, so that spans of one client are
comparable.

Seconds and google.protobuf.Duration, both ways."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any, Literal

from google.protobuf.duration_pb2 import Duration

FinishReason = Literal["stop", "length", "aborted"]
Outcome = Literal["finished", "truncated", "failed", "cancelled"]
SpanKind = Literal["queue", "prefill", "decode", "tool"]
ToolStatus = Literal["ok", "tool_error", "timed_out", "out_of_memory", "crashed"]


@dataclass(frozen=True)
class Sampling:
    """How to sample one step; None takes the engine's default.

    See SamplingParams in treadle/common/v1/tokens.proto for ranges.
    """

    max_new_tokens: int
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False


@dataclass(frozen=True, slots=True)
class Chunk:
    """New tokens of a running step. offset: index of the first one within the step's output."""

    offset: int
    token_ids: list[int]
    logprobs: list[float]
    weight_version: str


@dataclass(frozen=True, slots=True)
class VersionSpan:
    """Tokens [start_token, end_token) were sampled under weight_version."""

    weight_version: str
    start_token: int
    end_token: int


@dataclass(frozen=True, slots=True)
class Span:
    """Where wall time went: one wait, prefill, stretch of decoding, or tool call. engine_id is empty for a tool."""

    kind: SpanKind
    start_s: float
    end_s: float
    engine_id: str
    turn: int


@dataclass(frozen=True)
class Step:
    """One finished generation.

    token_ids, logprobs: the step's output, equally long. version_spans: over the step's output.
    queue_s, prefill_s, decode_s: sums of the step's spans, that is, as the client saw them; waits after a preemption
    or for a new engine, and between the calls of a long step, count as queue. cached_tokens: prompt tokens served from
    KV. engine_ids: engines that ran it, in order.
    """

    turn: int
    token_ids: list[int]
    logprobs: list[float]
    version_spans: tuple[VersionSpan, ...]
    finish_reason: FinishReason
    queue_s: float
    prefill_s: float
    decode_s: float
    preemptions: int
    cached_tokens: int
    engine_ids: tuple[str, ...]
    spans: tuple[Span, ...]


@dataclass(frozen=True)
class ToolResult:
    """What a tool or environment answered. A tool that fails is an answer: look at `status`, no exception is raised.

    output: what the agent reads (cut where output_truncated). reward: None where the tool gives none. done: the
    environment ended. data: the tool's machine-readable result, None where it has none.
    """

    status: ToolStatus
    output: str
    error: str
    reward: float | None
    done: bool
    data: Any
    queue_s: float
    overhead_s: float
    execution_s: float
    output_truncated: bool = False

    @property
    def ok(self) -> bool:
        """Whether the tool ran to its end without an error."""
        return self.status == "ok"


@dataclass(frozen=True)
class Prompt:
    """One prompt of a rollout.

    id: names the group of samples. data: anything the agent needs; it never leaves the process.
    """

    id: str
    tokens: list[int]
    data: Any = None


@dataclass(frozen=True)
class TrajectoryResult:
    """One trajectory of a rollout. tokens, loss_mask and logprobs are equally long; loss_mask is 1 where the policy
    sampled.

    version_spans: over indexes of `tokens`. kept: the rollout service took it for training. drop_reason: why not, e.g.
    "group_settled". error: one line where the outcome is "failed", else empty.
    """

    trajectory_id: str
    prompt_id: str
    sample: int
    tokens: list[int]
    loss_mask: list[int]
    logprobs: list[float]
    version_spans: tuple[VersionSpan, ...]
    steps: tuple[Step, ...]
    spans: tuple[Span, ...]
    reward: float | None
    outcome: Outcome
    kept: bool
    drop_reason: str
    error: str
    elapsed_s: float


@dataclass(frozen=True)
class RolloutResult:
    """All trajectories of a rollout, in the order of prompts and then samples."""

    rollout_id: str
    trajectories: tuple[TrajectoryResult, ...]
    elapsed_s: float


@dataclass(frozen=True)
class RolloutEvent:
    """Progress for a display. kind: "opened", "step", "tool" or "closed" of one trajectory; "settled" of a group.

    gen_tokens: sampled so far. outcome: set on "closed". time_s: unix time.
    """

    kind: Literal["opened", "step", "tool", "closed", "settled"]
    time_s: float
    prompt_id: str
    sample: int = -1
    trajectory_id: str = ""
    gen_tokens: int = 0
    turns: int = 0
    outcome: Outcome | None = None


@dataclass(frozen=True)
class TrainingTrajectory:
    """A trajectory as GetBatch gives it to a trainer; equally long lists as in TrajectoryResult."""

    trajectory_id: str
    prompt_id: str
    sample: int
    tokens: list[int]
    loss_mask: list[int]
    logprobs: list[float]
    version_spans: tuple[VersionSpan, ...]
    reward: float
    truncated: bool
    failed: bool
    turns: int
    elapsed_s: float


@dataclass(frozen=True)
class Group:
    """The kept samples of one prompt."""

    prompt_id: str
    trajectories: tuple[TrainingTrajectory, ...]


@dataclass(frozen=True)
class Batch:
    """Whole groups, oldest first. exhausted: the rollout is over and nothing is left."""

    groups: tuple[Group, ...]
    exhausted: bool


class Clock:
    """Calling it gives seconds of unix time."""

    def __init__(self) -> None:
        self._offset_s = time.time() - time.monotonic()

    def __call__(self) -> float:
        return time.monotonic() + self._offset_s


def duration(seconds: float) -> Duration:
    """A Duration of `seconds` >= 0, cut to nanoseconds."""
    whole = int(seconds)
    return Duration(seconds=whole, nanos=int((seconds - whole) * 1e9))


def seconds(message: Duration) -> float:
    """Seconds as a float."""
    return message.seconds + message.nanos / 1e9
