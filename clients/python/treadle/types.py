"""Define the values of the client's API as frozen dataclasses, and convert them to and from
messages.

Units: times in seconds (`*_s`), moments in seconds of Unix time on one clock, the client's; token
indexes from 0; logprobs are natural logarithms. Token lists are plain lists so that they go
straight into a tensor or JSON. In messages token ids and logprobs are packed little-endian int32
and float32 (see treadle/common/v1/tokens.proto).
"""

from __future__ import annotations

import math
import sys
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from google.protobuf.duration_pb2 import Duration

from treadle.errors import StreamBroken

FinishReason = Literal["stop", "length", "aborted"]
Outcome = Literal["finished", "truncated", "failed", "cancelled"]
SpanKind = Literal["queue", "prefill", "decode", "tool"]
SEEDS = 2**63  # seeds are int64, from 0
ToolStatus = Literal["ok", "tool_error", "timed_out", "out_of_memory", "crashed"]


@dataclass(frozen=True)
class Sampling:
    """Parameters with which one step is sampled; None takes the engine's default. Ranges:
    SamplingParams in tokens.proto."""

    max_new_tokens: int
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False

    def of_sample(self, sample: int) -> Sampling:
        """Return the parameters for one sample of a group: with one seed, all would be the same
        text."""
        if self.seed is None:
            return self
        return replace(self, seed=(self.seed + sample) % SEEDS)


@dataclass(frozen=True)
class Policy:
    """Rules by which a job's trajectories are ranked and placed: the names of Policy in
    scheduler.proto, in lower case. The default is that of a mesh for which no policy is set."""

    ordering: str = "progressive"
    objective: str = "makespan"
    placement: str = "planned"
    migrate: bool = True
    preempt: bool = True
    reserve: bool = True


@dataclass(frozen=True)
class LengthCap:
    """A cap on the sampled tokens of a trajectory that follows a percentile of successful ones,
    slowly.

    ceiling_tokens: of a rollout without a cap; some have none, to show how long successes would be.
    floor_tokens: the cap never falls below. cut_reward: of a trajectory that reaches the cap, or
    comes near: "soft" falls linearly to 0 from the soft percentile to the cap (DAPO), "zero" is 0
    once it is cut, "ignore" does not train it. most_cut_share: of successes; where the cap would
    cut more, it opens. least_successes: known before there is a cap.
    """

    ceiling_tokens: int
    floor_tokens: int
    percentile: float = 0.98
    soft_percentile: float = 0.95
    cut_reward: Literal["soft", "zero", "ignore"] = "soft"
    success_reward: float = 1.0
    most_cut_share: float = 0.05
    least_successes: int = 200


@dataclass(frozen=True)
class Shaping:
    """Choice of the samples of a rollout that are worth finishing and training. Each part is off
    unless it is set.

    rule: which samples of a group are kept:

    - "first": the first that are submitted.
    - "dual_end": the shortest, and `longest` of the longest, once all have finished (DARTS, section
      4.1). A prompt with `saturated_samples` or more has "shortest" instead.
    - "shortest": the first that no cap has cut; the others are ended.
    - "mixed": the first ones among which one has `success_reward` or more and one has not. A group
      that never has both is dropped, unless `keep_uniform`.

    samples: how many samples of each prompt are begun, in the order of prompts, where the numbers
    differ. budget: samples of all prompts together, over those that are kept; prompts whose lengths
    vary more get more of them, samples_per_prompt at most; 0 for as many of each prompt (DARTS,
    section 4.2). keep_groups: the rollout ends with so many groups (RollArt, section 5.3).

    batch_groups: groups that the trainer takes for each version of its weights, where it does not
    wait for the last trajectory. The rollout service then decides when groups begin and when a
    batch is given, so that few are too old under max_staleness (docs/training.md); those that are
    make room for other prompts. At a max_staleness of 1 or more trajectories go first come, first
    served, and do not move. max_open_groups: a bound on groups begun and not yet taken instead.
    replace_stale: run one more sample for each kept one that grows too old under max_staleness; the
    rollout lasts until all of its groups are taken.

    history: a name that the rollouts of a training run share, by which they learn from each other:
    of lengths for `budget`, of successes for length_cap, and for Client.shaping_report.
    """

    rule: Literal["first", "dual_end", "shortest", "mixed"] = "first"
    longest: int = 0
    saturated_samples: int = 0
    success_reward: float = 1.0
    keep_uniform: bool = False
    samples: tuple[int, ...] = ()
    keep_groups: int = 0
    max_open_groups: int = 0
    replace_stale: bool = False
    history: str = ""
    budget: float = 0.0
    length_cap: LengthCap | None = None
    batch_groups: int = 0


@dataclass(frozen=True)
class Distribution:
    """10th, 50th and 90th percentile of sampled and of trained trajectories; distance: of
    Kolmogorov and Smirnov, 0 alike, 1 apart."""

    sampled: tuple[float, ...]
    trained: tuple[float, ...]
    distance: float


@dataclass(frozen=True)
class ShapingReport:
    """Report on what shaping does to the distribution that is trained on.

    length: sampled tokens of a trajectory. success_rate: of its prompt. sampled, trained:
    trajectories; of those that were ended early, `sampled` has those that had begun. drops: number
    of samples for each reason why they were not trained. stale_tokens: trained tokens by weight
    versions behind, where versions are known. alarms: sentences, each of which names what is
    starved, by how much, and what to change. length_cap_tokens: of the next rollout of a history, 0
    for none.
    """

    length: Distribution
    reward: Distribution
    success_rate: Distribution
    sampled: int
    trained: int
    sampled_tokens: int
    trained_tokens: int
    kept_fraction: float
    kept_verdict: str
    drops: dict[str, int]
    stale_tokens: dict[int, int]
    alarms: tuple[str, ...]
    length_cap_tokens: int
    length_cap_report: str


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


@dataclass(frozen=True)
class RunningTokens:
    """Tokens of a trajectory that still runs.

    The first one has place `start_token` in the trajectory. Where that is before the end of the
    tokens received so far, forget those from this place on: these tokens replace them. tokens,
    loss_mask, logprobs: equally long. version_spans: over indexes of the trajectory's tokens.
    """

    trajectory_id: str
    prompt_id: str
    sample: int
    start_token: int
    tokens: list[int]
    loss_mask: list[int]
    logprobs: list[float]
    version_spans: tuple[VersionSpan, ...]


@dataclass(frozen=True)
class TrajectoryEnded:
    """Notice that no more tokens of this trajectory come before its batch.

    kept: it will be in a batch, unless it grows too old first. drop_reason: why it is not kept;
    empty where it is.
    """

    trajectory_id: str
    prompt_id: str
    sample: int
    kept: bool
    drop_reason: str


@dataclass(frozen=True, slots=True)
class Span:
    """Part of the wall time of a trajectory: one wait, prefill, stretch of decoding, or tool call.
    engine_id is empty for a tool."""

    kind: SpanKind
    start_s: float
    end_s: float
    engine_id: str
    turn: int


@dataclass(frozen=True)
class Step:
    """One finished generation.

    token_ids, logprobs: the step's output, equally long. version_spans: over the step's output.
    queue_s, prefill_s, decode_s: sums of the step's spans, that is, as the client saw them; waits
    after a preemption or for a new engine, and between the calls of a long step, count as queue.
    cached_tokens: prompt tokens served from KV. engine_ids: engines that ran it, in order.
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
    """The answer of a tool or environment. A tool that fails also answers: check `status`, as no
    exception is raised.

    output: what the agent reads (cut where output_truncated). reward: None where the tool gives
    none. done: the environment ended. data: the tool's machine-readable result, None where it has
    none.
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
        """Return whether the tool ran to its end without an error."""
        return self.status == "ok"


@dataclass(frozen=True)
class Prompt:
    """One prompt of a rollout.

    id: names the group of samples. data: anything the agent needs; it never leaves the process.
    """

    id: str
    tokens: list[int]
    data: Any = None


# Which engines may run a trajectory: those that carry all of these tags, for every sample or by
# (prompt, sample).
HardwareTags = Sequence[str] | Callable[[Prompt, int], Sequence[str]]


@dataclass(frozen=True)
class Limits:
    """Limits of one action of a tool or environment: cores, memory, seconds, bytes of output.

    0 is the tool's own limit, which is also the most that a caller may request (ListTools). Raises
    ValueError.
    """

    cpu_cores: int = 0
    memory_bytes: int = 0
    wall_s: float = 0.0
    output_bytes: int = 0

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not 0 <= value < math.inf:
                raise ValueError(
                    f"{name} must be a number >= 0, is {value}; 0 is the tool's own limit"
                )


@dataclass(frozen=True)
class TrajectoryResult:
    """One trajectory of a rollout. tokens, loss_mask and logprobs are equally long; loss_mask is 1
    where the policy sampled.

    trajectory_id: empty where it was never opened. version_spans: over indexes of `tokens`. kept:
    the rollout service took it for training. drop_reason: why not, e.g. "group_settled". error: one
    line where the outcome is "failed", else empty. submitted_before: a client that this one resumed
    has submitted it; its tokens are not here but at the rollout service (get_batch), and "finished"
    may be "truncated".
    """

    trajectory_id: str
    prompt_id: str
    sample: int
    tokens: list[int] = field(default_factory=list)
    loss_mask: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    version_spans: tuple[VersionSpan, ...] = ()
    steps: tuple[Step, ...] = ()
    spans: tuple[Span, ...] = ()
    reward: float | None = None
    outcome: Outcome = "finished"
    kept: bool = False
    drop_reason: str = ""
    error: str = ""
    elapsed_s: float = 0.0
    submitted_before: bool = False


@dataclass(frozen=True)
class RolloutResult:
    """All trajectories of a rollout, in the order of prompts and then samples."""

    rollout_id: str
    trajectories: tuple[TrajectoryResult, ...]
    elapsed_s: float


@dataclass(frozen=True)
class RolloutEvent:
    """Progress of a rollout for a display. kind: "opened", "step", "tool" or "closed" of one
    trajectory; "settled" of a group.

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
    """A trajectory as GetBatch returns it to a trainer; equally long lists as in TrajectoryResult.

    unshaped_reward: what the agent gave, where a length cap has changed `reward`; else None.
    """

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
    unshaped_reward: float | None = None


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


def duration(seconds: float) -> Duration:
    """Return a Duration of `seconds` >= 0, cut to nanoseconds."""
    whole = int(seconds)
    return Duration(seconds=whole, nanos=int((seconds - whole) * 1e9))


def seconds(message: Duration) -> float:
    return message.seconds + message.nanos / 1e9


def words_of(enum: Any) -> dict[int, Any]:
    """Return the values of a contract's enum as words, e.g. "stop" for FINISH_REASON_STOP; without
    …_UNSPECIFIED."""
    prefix = enum.Name(0).removesuffix("UNSPECIFIED")
    return {number: name.removeprefix(prefix).lower() for name, number in enum.items() if number}


def pack_ids(ids: Sequence[int]) -> bytes:
    """Pack token ids, 4 bytes each. Raises OverflowError for an id outside int32, TypeError for
    what is not an integer."""
    return _little_endian(array("i", ids)).tobytes()


def checked_ids(field: str, ids: Iterable[int]) -> list[int]:
    """Return token ids as a list. Raises ValueError naming the field for what no engine takes."""
    try:
        found = array("i", list(ids)).tolist()
    except (TypeError, OverflowError) as error:
        raise ValueError(f"{field} must be token ids from 0 to {2**31 - 1}: {error}") from None
    if min(found, default=0) < 0:
        raise ValueError(f"{field} must be token ids from 0 to {2**31 - 1}, has {min(found)}")
    return found


def pack_logprobs(logprobs: Sequence[float]) -> bytes:
    """Pack logprobs (natural log), 4 bytes each."""
    return _little_endian(array("f", logprobs)).tobytes()


def unpack_ids(packed: bytes) -> list[int]:
    """Unpack token ids. Raises StreamBroken when the length is not a multiple of 4."""
    return _unpack(array("i"), packed)


def unpack_logprobs(packed: bytes) -> list[float]:
    """Unpack logprobs (natural log). Raises StreamBroken when the length is not a multiple of 4."""
    return _unpack(array("f"), packed)


def _unpack(items: array[Any], packed: bytes) -> list[Any]:
    if len(packed) % items.itemsize:
        raise StreamBroken(
            f"{len(packed)} packed bytes are not a whole number of {items.itemsize}-byte items"
        )
    items.frombytes(packed)
    return _little_endian(items).tolist()


def _little_endian(items: array[Any]) -> array[Any]:
    """Swap the bytes in place on a big-endian machine; do nothing on others."""
    if sys.byteorder == "big":
        items.byteswap()
    return items
