"""The shared nouns of the control plane: trajectories, tickets, engines, estimates, policies.

Everything here is a frozen value: whoever changes one makes a new one with `dataclasses.replace` (or, for the two that
change at each event, `records.changed`) and hands it to the table that owns it (`trajectories.py`, `engines.py`). Times
are seconds of one clock that the caller chooses (the service: Unix time; a simulator: its own). Token counts are whole
tokens; predicted ones are floats.

Copies of frozen records with some fields changed.

Purpose: the controller makes a new record of some forty fields at each event; `dataclasses.replace` sets every field
through `__init__` again and takes 8 microseconds for it, copying the instance's dictionary less than one. Invariant:
the record that is copied is never touched, so whoever holds it may keep it. For the type checker it IS
`dataclasses.replace`, which knows the fields of each class; at run time nothing checks them again."""

import enum
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

# Decode speed assumed of an engine that declares none: seconds a token alone, and more for each further sequence in the
# batch. Only ratios matter where no engine of a mesh declares a curve; the values are those of a small model on one
# accelerator.
DEFAULT_BASE_S = 0.01
DEFAULT_PER_SEQUENCE_S = 0.0005
DEFAULT_PREFILL_TOKENS_PER_S = 2_000.0


class TrajectoryState(enum.Enum):
    """Where a trajectory stands. IDLE and STEPPING are open, the rest closed."""

    IDLE = "idle"
    STEPPING = "stepping"
    FINISHED = "finished"
    FAILED = "failed"
    CANCELLED = "cancelled"


class Outcome(enum.Enum):
    """How a trajectory ended. TRUNCATED is censored by a cap, not short."""

    FINISHED = "finished"
    TRUNCATED = "truncated"
    FAILED = "failed"
    CANCELLED = "cancelled"


class Ordering(enum.Enum):
    """Which step runs first on an engine (`scheduling.py`)."""

    PROGRESSIVE = "progressive"
    FCFS = "fcfs"
    ROUND_ROBIN = "round_robin"
    SHORTEST_FIRST = "shortest_first"
    LEAST_ATTAINED = "least_attained"


class Objective(enum.Enum):
    """What the progressive ordering serves."""

    MAKESPAN = "makespan"
    MEAN = "mean"
    DEADLINE = "deadline"


class PlacementRule(enum.Enum):
    """Which engine runs a trajectory (`siting.py`)."""

    PLANNED = "planned"
    PINNED = "pinned"
    LEAST_LOAD = "least_load"
    CACHE_AWARE = "cache_aware"


class Replanning(enum.Enum):
    """How the engine of a PLANNED trajectory is chosen again while it runs. RESOLVE (`resolving.py`): the partition is
    solved again on remaining work, judged, and followed behind a cost gate. RANK_SCALING (`rank_scaling.py`): Heddle
    5.3 as printed."""

    RESOLVE = "resolve"
    RANK_SCALING = "rank_scaling"


class KvTransfer(enum.Enum):
    """What a move of a prefix between engines costs: computing it again, or reading it from shared storage."""

    PREFILL = "prefill"
    STORAGE = "storage"


class TicketStatus(enum.Enum):
    """LIVE: may run or runs. LOST: its engine went away. DONE: its step ended."""

    LIVE = "live"
    LOST = "lost"
    DONE = "done"


@dataclass(frozen=True, slots=True)
class Policy:
    """How trajectories are ranked and placed. A trajectory keeps the policy it was opened under.

    reserve: an engine holds room for all the KV that a trajectory which has begun is expected to grow to.
    """

    ordering: Ordering = Ordering.PROGRESSIVE
    objective: Objective = Objective.MAKESPAN
    placement: PlacementRule = PlacementRule.PLANNED
    migrate: bool = True
    preempt: bool = True
    replanning: Replanning = Replanning.RESOLVE
    reserve: bool = False


# What a mesh starts with, and what every published figure of Treadle is measured with (ADR 0009).
TREADLE_POLICY = Policy(reserve=True)


@dataclass(frozen=True, slots=True)
class Estimate:
    """A prediction: 10th, 50th and 90th percentile. Raises ValueError unless 0 <= p10 <= p50 <= p90 < infinity."""

    p10: float
    p50: float
    p90: float

    def __post_init__(self) -> None:
        if not (0.0 <= self.p10 <= self.p50 <= self.p90 and math.isfinite(self.p90)):
            raise ValueError(f"not quantiles: p10={self.p10} p50={self.p50} p90={self.p90}")


@dataclass(frozen=True, slots=True)
class Prediction:
    """What the predictor said of a trajectory after `turn` steps and `gen_tokens` sampled tokens. learned: a learned
    model said it, not what counts siblings and history."""

    turn: int
    gen_tokens: int
    remaining_tokens: Estimate
    remaining_turns: Estimate | None = None
    model_version: str = ""
    learned: bool = False


@dataclass(frozen=True, slots=True)
class DecodeCurve:
    """Seconds a decode step = base_s + per_sequence_s * batch + per_kv_token_s * KV tokens in the batch."""

    base_s: float = DEFAULT_BASE_S
    per_sequence_s: float = DEFAULT_PER_SEQUENCE_S
    per_kv_token_s: float = 0.0
    prefill_tokens_per_s: float = DEFAULT_PREFILL_TOKENS_PER_S


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """What an engine is, as its sidecar declares it. `slot_limit` steps decode at once; 0 in a capacity means
    unknown."""

    engine_id: str
    address: str
    model: str = ""
    weight_version: str = ""
    slot_limit: int = 1
    kv_tokens_capacity: int = 0
    max_context_tokens: int = 0
    tensor_parallel: int = 1
    kv_transfer: KvTransfer = KvTransfer.PREFILL
    kv_bytes_per_token: int = 0
    hardware_tags: tuple[str, ...] = ()
    decode_curve: DecodeCurve = field(default_factory=DecodeCurve)


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """What an engine did last, as its sidecar measured it."""

    running_steps: int = 0
    waiting_steps: int = 0
    slot_limit: int = 0
    kv_tokens_used: int = 0
    kv_tokens_capacity: int = 0
    decode_tokens_per_s: float = 0.0
    paused: bool = False
    weight_version: str = ""
    oldest_wait_s: float = 0.0
    measured_s: float = 0.0
    engine_healthy: bool = True


@dataclass(frozen=True, slots=True)
class EngineRecord:
    """An engine and the lease that holds it. `suspect_s` is set while a client has lost a stream there and no renewal
    came since."""

    spec: EngineSpec
    lease_id: str
    lease_expires_s: float
    register_request_id: str
    load: EngineLoad | None = None
    suspect_s: float | None = None

    @property
    def usable(self) -> bool:
        """Whether new steps may go there."""
        return self.suspect_s is None and (self.load is None or self.load.engine_healthy)


@dataclass(frozen=True)  # without slots: see records.py
class TicketRecord:
    """The right to run one step once, and the request that made it (so that a repeat of the request gets the same
    ticket). preemptible: whether the engine's queue may evict the step while it runs."""

    ticket_id: str
    trajectory_id: str
    turn: int
    attempt: int
    engine_id: str
    engine_address: str
    priority: float
    weight_version: str
    revision: int
    issued_s: float
    expires_s: float
    request_id: str
    context_tokens: int
    max_new_tokens: int
    replaces_ticket_id: str = ""
    resumed_tokens: int = 0
    preemptible: bool = True
    kv_reserve_tokens: int = 0
    status: TicketStatus = TicketStatus.LIVE
    output_tokens: int = 0


@dataclass(frozen=True, slots=True)
class MoveRecord:
    """A migration in progress. `migration_id` is empty until the migrator has accepted it."""

    move_id: str
    source_engine_id: str
    target_engine_id: str
    asked_s: float
    give_up_s: float
    migration_id: str = ""


@dataclass(frozen=True)  # without slots: see records.py
class TrajectoryRecord:
    """A trajectory as the scheduler knows it; all that a restart needs.

    `ticket` is the last one issued, whatever became of it. `uncounted` holds tickets whose step the client has left
    behind before the engine's own account of it (`step_finished`) arrived. `tool_s` is a running mean of this
    trajectory's tool calls, 0 while unknown. `revision` moves by one at each change of `engine_id`. `announced`: the
    world has been told that it closed.
    """

    trajectory_id: str
    prompt_id: str
    policy: Policy
    opened_s: float
    open_request_id: str
    rollout_id: str = ""
    sample: int = 0
    prompt_tokens: int = 1
    max_total_tokens: int = 0
    deadline_s: float | None = None
    hardware_tags: tuple[str, ...] = ()
    pinned_engine_id: str = ""
    state: TrajectoryState = TrajectoryState.IDLE
    engine_id: str = ""
    revision: int = 0
    next_turn: int = 0
    context_tokens: int = 0
    gen_tokens: int = 0
    prediction: Prediction | None = None
    priority: float = 0.0
    ticket: TicketRecord | None = None
    uncounted: tuple[str, ...] = ()
    requested_s: float = 0.0
    finished_step_s: float | None = None
    tool_s: float = 0.0
    tool_expected_s: float = 0.0
    tool_over: bool = False
    move: MoveRecord | None = None
    moves_asked: int = 0
    migrations: int = 0
    moved_at_turn: int = -1
    switch_request: tuple[str, ...] = ()
    touched_s: float = 0.0
    closed_s: float | None = None
    close_request_id: str = ""
    outcome: Outcome | None = None
    reward: float | None = None
    announced: bool = False

    @property
    def is_open(self) -> bool:
        """Whether more steps may come."""
        return self.state is TrajectoryState.IDLE or self.state is TrajectoryState.STEPPING

    @property
    def live_ticket(self) -> TicketRecord | None:
        """The ticket that may be running now, if any."""
        return self.ticket if self.ticket is not None and self.ticket.status is TicketStatus.LIVE else None


if TYPE_CHECKING:
    from dataclasses import replace as changed
else:
    Record = TypeVar("Record")

    _new = object.__new__
    _set = object.__setattr__  # a frozen class refuses its own

    def changed(record: Record, **fields: Any) -> Record:
        """The record with these fields. Only for frozen dataclasses without slots and without `__post_init__`."""
        copy = _new(record.__class__)
        _set(copy, "__dict__", record.__dict__ | fields)
        return copy


__all__ = ["changed"]
