"""Shared nouns of the control plane: trajectories and their ledgers of time, tickets, engines,
estimates, policies.

All of them are frozen: a change makes a new value (`dataclasses.replace`, or `copy_with` for the
two large records), which goes to the table that owns it (`tables`). Times are seconds of one clock
that the caller chooses: Unix time in the service, virtual time in a simulation. Token counts are
whole, predicted ones are floats.
"""

import enum
import math
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, NamedTuple

TENANT_MARK = "::"  # a name that belongs to a tenant begins with the tenant's and this

# Decode speed assumed of an engine that declares none: seconds a token alone, and more for each
# further sequence in the batch. Only ratios matter where no engine of a mesh declares a curve; the
# values are those of a small model on one accelerator.
DEFAULT_BASE_S = 0.01
DEFAULT_PER_SEQUENCE_S = 0.0005
DEFAULT_PREFILL_TOKENS_PER_S = 2_000.0


class Cause(enum.Enum):
    """Cause for which a requested step without a ticket waits. HELD: room, a slot or an engine.
    MOVE: its trajectory's KV. WEIGHTS: an engine that loads. The value is the field of
    TrajectoryRecord that counts it."""

    HELD = "held_s"
    MOVE = "move_s"
    WEIGHTS = "weights_s"


class StepTimes(NamedTuple):  # which costs less than a dataclass, at each step
    """Seconds of steps at engines, each second in one part: waiting before it first ran, prefill,
    decode, waiting since an eviction, waiting while the engine was paused for other weights."""

    queue_s: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    preempted_s: float = 0.0
    weights_s: float = 0.0

    def plus(self, other: "StepTimes", times: float = 1.0) -> "StepTimes":
        """Return the sum of both, the other one `times` times."""
        if other is NO_TIMES:
            return self
        return StepTimes(
            self.queue_s + times * other.queue_s,
            self.prefill_s + times * other.prefill_s,
            self.decode_s + times * other.decode_s,
            self.preempted_s + times * other.preempted_s,
            self.weights_s + times * other.weights_s,
        )

    @property
    def total_s(self) -> float:
        return sum(self)


NO_TIMES = StepTimes()


class ClientTimes(NamedTuple):
    """Times of a trajectory that its client has measured by its own clock, from the opening until
    its last report.

    tool_s: between steps, while a tool ran. control_s: its calls without the services' time for
    them, and its own work between steps. lost: times of steps that it had to replace, as it saw
    them, since no engine accounts for these. since_opening_s: how long the trajectory had been open
    when these were measured; 0 where that is not known.
    """

    tool_s: float = 0.0
    control_s: float = 0.0
    lost: StepTimes = NO_TIMES
    since_opening_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Ledger:
    """Seconds of a trajectory by where they went, from its opening on; each second is in one part
    (ADR 0040).

    held_s: a requested step waited in the scheduler for room or for an engine. queue_s, prefill_s,
    decode_s, preempted_s: as in StepTimes. move_s: a step waited until its KV had moved. tool_s,
    control_s: as in ClientTimes. weights_s: a step waited while an engine loaded weights, in the
    scheduler or at the engine.
    """

    held_s: float = 0.0
    queue_s: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    preempted_s: float = 0.0
    move_s: float = 0.0
    tool_s: float = 0.0
    weights_s: float = 0.0
    control_s: float = 0.0

    @property
    def total_s(self) -> float:
        """Return the sum of all parts."""
        total_s: float = sum(getattr(self, name) for name in LEDGER_PARTS)
        return total_s


# in the order in which a step goes through them
LEDGER_PARTS = tuple(part.name for part in fields(Ledger))


class TrajectoryState(enum.Enum):
    """State of a trajectory: IDLE (no step is out) and STEPPING are open, the others closed."""

    IDLE = "idle"
    STEPPING = "stepping"
    FINISHED = "finished"
    FAILED = "failed"
    CANCELLED = "cancelled"


class Outcome(enum.Enum):
    """Way in which a trajectory ended. TRUNCATED: a cap cut it, and it would have been longer."""

    FINISHED = "finished"
    TRUNCATED = "truncated"
    FAILED = "failed"
    CANCELLED = "cancelled"


class Ordering(enum.Enum):
    """Rule for which step runs first on an engine (`ranking.priorities`)."""

    PROGRESSIVE = "progressive"
    FCFS = "fcfs"
    ROUND_ROBIN = "round_robin"
    SHORTEST_FIRST = "shortest_first"
    LEAST_ATTAINED = "least_attained"


class Objective(enum.Enum):
    """Quantity that the progressive ordering minimises."""

    MAKESPAN = "makespan"
    MEAN = "mean"
    DEADLINE = "deadline"


class PlacementRule(enum.Enum):
    """Rule for which engine runs a trajectory (`tables.engines`)."""

    PLANNED = "planned"
    PINNED = "pinned"
    LEAST_LOAD = "least_load"
    CACHE_AWARE = "cache_aware"
    STICKY = "sticky"


class CostModel(enum.IntEnum):
    """Model of the time that an engine takes for a group of trajectories: `placing.paths` for
    CRITICAL_PATH, else `placing.solver`."""

    GROUP_SIZE = 1
    LINEAR_INTEGRAL = 2
    CRITICAL_PATH = 3


class KvTransfer(enum.Enum):
    """Way in which the KV of a prefix gets to another engine: it is computed again, or read from
    shared storage."""

    PREFILL = "prefill"
    STORAGE = "storage"


class TicketStatus(enum.Enum):
    """Status of a ticket. LIVE: its step may run or runs. LOST: its engine went away. DONE: its
    step ended."""

    LIVE = "live"
    LOST = "lost"
    DONE = "done"


@dataclass(frozen=True, slots=True)
class Policy:
    """Rules by which trajectories are ranked and placed. A trajectory keeps the policy under which
    it was opened.

    reserve: engines reserve the KV that their started trajectories are expected to need.
    """

    ordering: Ordering = Ordering.PROGRESSIVE
    objective: Objective = Objective.MAKESPAN
    placement: PlacementRule = PlacementRule.PLANNED
    migrate: bool = True
    preempt: bool = True
    reserve: bool = False


# The policy that a mesh starts with and that all published figures of Treadle are measured with
# (ADR 0009).
TREADLE_POLICY = Policy(reserve=True)
# Where a trainer does not wait for the last trajectory, what is begun first should end first, and a
# move saves nothing that somebody waits for (ADR 0078).
ASYNCHRONOUS_POLICY = replace(
    TREADLE_POLICY, ordering=Ordering.FCFS, placement=PlacementRule.STICKY, migrate=False
)


@dataclass(frozen=True, slots=True)
class Estimate:
    """Predicted 10th, 50th and 90th percentile of an amount. Raises ValueError unless 0 <= p10 <=
    p50 <= p90 < infinity."""

    p10: float
    p50: float
    p90: float

    def __post_init__(self) -> None:
        if not (0.0 <= self.p10 <= self.p50 <= self.p90 and math.isfinite(self.p90)):
            raise ValueError(f"not quantiles: p10={self.p10} p50={self.p50} p90={self.p90}")


@dataclass(frozen=True, slots=True)
class Prediction:
    """Prediction for a trajectory after `turn` steps and `gen_tokens` sampled tokens.

    Still to come: tokens to sample, turns, seconds of tools, tokens of their answers; None for what
    is not predicted. learned: a learned model made it, not statistics over siblings and history."""

    turn: int
    gen_tokens: int
    remaining_tokens: Estimate
    remaining_turns: Estimate | None = None
    remaining_tool_s: Estimate | None = None
    remaining_observed_tokens: Estimate | None = None
    model_version: str = ""
    learned: bool = False


@dataclass(frozen=True, slots=True)
class DecodeCurve:
    """Speed of an engine. Seconds a decode step = base_s + per_sequence_s * batch + per_kv_token_s
    * KV tokens in the batch. A prefilled token takes 1 / prefill_tokens_per_s, and prefill_pair_s
    more for each token before it."""

    base_s: float = DEFAULT_BASE_S
    per_sequence_s: float = DEFAULT_PER_SEQUENCE_S
    per_kv_token_s: float = 0.0
    prefill_tokens_per_s: float = DEFAULT_PREFILL_TOKENS_PER_S
    prefill_pair_s: float = 0.0


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """Engine as its sidecar declares it. `slot_limit` steps decode at once; a capacity of 0 is
    unknown. url: its own HTTP server, for a gateway whose mesh is away."""

    engine_id: str
    address: str
    model: str = ""
    weight_version: str = ""
    slot_limit: int = 1
    kv_tokens_capacity: int = 0
    host_kv_tokens: int = 0
    max_context_tokens: int = 0
    tensor_parallel: int = 1
    kv_transfer: KvTransfer = KvTransfer.PREFILL
    kv_bytes_per_token: int = 0
    hardware_tags: tuple[str, ...] = ()
    decode_curve: DecodeCurve = field(default_factory=DecodeCurve)
    url: str = ""

    @property
    def kv_room_tokens(self) -> int:
        """Return how many KV tokens trajectories may hold; 0: unknown. A host's copies include what
        the engine's memory holds, so the larger of them counts."""
        return self.kv_tokens_capacity and max(self.kv_tokens_capacity, self.host_kv_tokens)


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """Load of an engine, as its sidecar measured it last."""

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
    clock_ahead_s: float = 0.0
    engine_healthy: bool = True


# How the version begins that an engine reports while it holds parts of the rest of the name only.
INCOMPLETE = "incomplete-"


@dataclass(frozen=True, slots=True)
class WeightsRecord:
    """Weights that all engines are to serve. model_path: a folder or file that each engine's
    machine can read; empty: a trainer pushes them."""

    weight_version: str
    model_path: str


@dataclass(frozen=True, slots=True)
class EngineRecord:
    """Engine and its lease. `suspect_s`: when a client lost a stream there; None again after a
    renewal, once it has rested. losses: in a row, while it is suspected. behind: it does not serve
    the desired weights, or has parts of weights only.
    load_error: why it could not load the desired ones, or that they were not pushed to it.
    draining: an operator wants it empty; it takes steps only where no other engine can."""

    spec: EngineSpec
    lease_id: str
    lease_expires_s: float
    register_request_id: str
    load: EngineLoad | None = None
    suspect_s: float | None = None
    losses: int = 0
    behind: bool = False
    load_error: str = ""
    draining: bool = False

    @property
    def usable(self) -> bool:
        """Return whether new steps may go to this engine."""
        return self.suspect_s is None and self.able and not self.draining

    @property
    def keeps(self) -> bool:
        """Return whether trajectories that are on this engine go on there."""
        return self.able and not self.draining and self.losses <= 1

    @property
    def able(self) -> bool:
        """Return whether steps can run on this engine at all."""
        return not self.behind and (self.load is None or self.load.engine_healthy)


@dataclass(frozen=True, slots=True)
class JobRecord:
    """Work of one client, which ends when its lease does.

    resume: after that, the job is kept for the next client that resumes the `name`. rollout_ids:
    its rollouts that are in progress. ended_s: when the lease ended or the client closed it; None:
    it is held. successor_id: the job that has resumed it. weight: of the share of its `name`.
    policy: of its trajectories; None: that of the mesh.
    """

    job_id: str
    open_request_id: str
    name: str = ""
    resume: bool = False
    rollout_ids: tuple[str, ...] = ()
    ended_s: float | None = None
    successor_id: str = ""
    weight: float = 1.0
    policy: Policy | None = None


@dataclass(frozen=True, slots=True)
class JobUse:
    """Use of the mesh by the clients of one job name now. share: the part of slots and KV that they
    are due; 0 where they use none and no first step of theirs waits. kv_tokens: reserved.
    waiting_steps: first steps without a ticket."""

    job: str
    weight: float
    clients: int
    share: float
    live_tickets: int
    kv_tokens: int
    open_trajectories: int
    waiting_steps: int


@dataclass(frozen=True)  # without slots, for `copy_with`
class TicketRecord:
    """Permission to run one step once, with the request that it answers: a repeat of it gets the
    same ticket.

    preemptible: whether the engine's queue may evict the step while it runs. job, weight: whose
    share of the engine's slots it takes. waited_s: how long its request waited in the scheduler.
    times: its engine's account of the step, once it has arrived.
    """

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
    job: str = ""
    weight: float = 1.0
    waited_s: float = 0.0
    times: StepTimes = NO_TIMES

    @property
    def cache_salt(self) -> str:
        """Return the salt of the KV cache: the weight version and the tenant, so that no other
        tenant's KV is used."""
        tenant, mark, _ = self.trajectory_id.partition(TENANT_MARK)
        return f"{tenant}{mark}{self.weight_version}" if tenant and mark else self.weight_version


@dataclass(frozen=True, slots=True)
class MoveRecord:
    """Migration in progress. `migration_id` is empty until the migrator has accepted it.
    `saving_s`: a step waits no longer for it."""

    move_id: str
    source_engine_id: str
    target_engine_id: str
    asked_s: float
    give_up_s: float
    migration_id: str = ""
    saving_s: float = 0.0

    def has_switched(self, engine_id: str) -> bool:
        """Return whether the target owns the trajectory, whose engine is `engine_id`. Then only the
        report of the end is due."""
        return self.target_engine_id == engine_id


@dataclass(frozen=True)  # without slots, for `copy_with`
class TrajectoryRecord:
    """Trajectory as the scheduler knows it; a restart needs nothing else.

    `ticket` is the last one issued, in whatever status. `uncounted`: tickets of steps that the
    client has reported as over and whose tokens are unknown, as `step_finished` has not arrived.
    `tool_s`: running mean of this trajectory's tool calls, 0 while unknown; `tools_s`: the sum of
    all of them. `revision` grows by one at each change of `engine_id`. `announced`: the fact that
    it closed has been published. `job`: the name of its job, whose share it takes. `held_s`,
    `move_s`, `weights_s`: its waits for tickets, by what they were for. `engine_times`: its
    engines' accounts of steps. `client_times`: its client's last report. `group_keep`: its group
    settles once so many of its samples have finished; 0: all are needed.
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
    job_id: str = ""
    asynchronous: bool = False
    group_keep: int = 0
    job: str = ""
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
    tools_s: float = 0.0
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
    held_s: float = 0.0
    move_s: float = 0.0
    weights_s: float = 0.0
    engine_times: StepTimes = NO_TIMES
    client_times: ClientTimes | None = None

    @property
    def ledger(self) -> Ledger:
        """Return where the trajectory's seconds went so far. A client that reports no times has
        measured no control; its tools are the seconds that it sent with its requests."""
        client = self.client_times or ClientTimes(tool_s=self.tools_s)
        steps = self.engine_times.plus(client.lost)
        return Ledger(
            held_s=self.held_s,
            queue_s=steps.queue_s,
            prefill_s=steps.prefill_s,
            decode_s=steps.decode_s,
            preempted_s=steps.preempted_s,
            move_s=self.move_s,
            tool_s=client.tool_s,
            weights_s=self.weights_s + steps.weights_s,
            control_s=client.control_s,
        )

    @property
    def is_open(self) -> bool:
        """Return whether the client may request more steps."""
        return self.state is TrajectoryState.IDLE or self.state is TrajectoryState.STEPPING

    @property
    def observed_tokens(self) -> int:
        """Return the tokens of tools' answers in the context so far."""
        return max(0, self.context_tokens - self.prompt_tokens - self.gen_tokens)

    @property
    def live_ticket(self) -> TicketRecord | None:
        """Return the ticket that may be running now, if any."""
        return (
            self.ticket
            if self.ticket is not None and self.ticket.status is TicketStatus.LIVE
            else None
        )


if TYPE_CHECKING:
    copy_with = replace
else:
    _new, _set = object.__new__, object.__setattr__

    def copy_with(record: Any, **fields: Any) -> Any:
        """Return a copy with changed fields: `dataclasses.replace` for TicketRecord and
        TrajectoryRecord.

        Each event copies them. This copies the instance's dictionary in 1 to 2 microseconds, where
        `dataclasses.replace` runs an `__init__` of 40 fields in 12 to 20, which would double what
        ScheduleStep takes. Needs a dataclass without slots and without `__post_init__`; the type
        checker checks the names of the fields, nothing does at run time.
        """
        copy = _new(record.__class__)
        _set(copy, "__dict__", record.__dict__ | fields)
        return copy
