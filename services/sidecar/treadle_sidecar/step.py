"""The nouns of one step: what was asked (StepOrder), and what its caller hears (Started, Tokens, Preempted,
Finished).
"""

import enum
from array import array
from dataclasses import dataclass


class Reason(enum.Enum):
    """Why a step ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORTED = "aborted"


class PauseMode(enum.Enum):
    """What a pause does to the steps that are here."""

    ABORT = "abort"
    KEEP = "keep"


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
    """One step to run. `resumed` are output tokens that the caller has from an engine that was lost."""

    ticket_id: str
    trajectory_id: str
    turn: int
    priority: float
    prompt: "array[int]"
    resumed: "array[int]"
    sampling: Sampling


@dataclass(frozen=True)
class Started:
    """Admitted to the engine after `queue_s` in this wait."""

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
    """Gave up its slot with `output_tokens` sampled and sent; `by` took it, empty where a pause did."""

    output_tokens: int
    by: str


@dataclass(frozen=True)
class Span:
    """Output tokens [start, end) were sampled under `weight_version`."""

    weight_version: str
    start: int
    end: int


@dataclass(frozen=True)
class Timing:
    """Where the step's time went; the three add up to finished_at - accepted_at. Unix seconds for the two."""

    queue_s: float
    prefill_s: float
    decode_s: float
    accepted_at: float
    finished_at: float


@dataclass(frozen=True)
class Finished:
    """The end. Spans cover [len(resumed), output_tokens)."""

    reason: Reason
    output_tokens: int
    spans: tuple[Span, ...]
    timing: Timing
    cached_tokens: int
    preemptions: int
    resumed_prompt_tokens: int
    resumed_cached_tokens: int


@dataclass(frozen=True)
class Failed:
    """The step ends with an error; what was sampled has been sent."""

    error: Exception


StepEvent = Started | Tokens | Preempted | Finished | Failed
