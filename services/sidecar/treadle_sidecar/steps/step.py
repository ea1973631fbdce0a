"""The nouns of one step: what was asked (StepOrder), and what its caller hears (Started, Tokens, Preempted,
Finished).

Tickets: for this engine, in time, once. Times are Unix seconds and passed in."""

import enum
import heapq
from array import array
from dataclasses import dataclass

from treadle_runtime.errors import FailedPrecondition


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
    """One step to run. `resumed` are output tokens that the caller has from an engine that was lost; `preemptible`:
    whether a waiting step may evict it while it runs."""

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


class TicketBook:
    """Remembers used tickets until they have expired; after that their date refuses them."""

    def __init__(self, engine_id: str) -> None:
        self._engine_id = engine_id
        self._used: set[str] = set()
        self._expiries: list[tuple[float, str]] = []

    def check(self, ticket_id: str, engine_id: str, expires_at: float, now: float) -> None:
        """Raises FailedPrecondition TICKET_WRONG_ENGINE, TICKET_EXPIRED, TICKET_USED."""
        if engine_id != self._engine_id:
            raise FailedPrecondition(
                "TICKET_WRONG_ENGINE",
                f"the ticket is for engine {engine_id!r}, this is {self._engine_id!r}",
                ticket_id=ticket_id,
            )
        if expires_at <= now:
            raise FailedPrecondition(
                "TICKET_EXPIRED",
                f"the ticket expired {now - expires_at:.1f} s ago; schedule the step again",
                ticket_id=ticket_id,
            )
        if ticket_id in self._used:
            raise FailedPrecondition(
                "TICKET_USED", "the ticket was presented before; schedule the step again", ticket_id=ticket_id
            )

    def use(self, ticket_id: str, expires_at: float, now: float) -> None:
        """The ticket's one use. Forgets those that have expired."""
        self._used.add(ticket_id)
        heapq.heappush(self._expiries, (expires_at, ticket_id))
        while self._expiries[0][0] <= now:
            self._used.discard(heapq.heappop(self._expiries)[1])
