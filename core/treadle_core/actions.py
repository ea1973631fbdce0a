"""Actions: what the controller's driver does, in this order.

- `Save…`, `Remove…` and `Forget…` are stored before the request that caused them is answered.
- `IssueTicket` and `KeepWaiting` answer StepRequested.
- All others are done in the background as far as possible: a failure is logged, and becomes an
  event at most (PlanArrived without engines, MoveEnded). A driver without the service that an
  action needs drops it the same way.
- A `Note` is for the controller's own books (`state.Books`). No driver gets one.
"""

from dataclasses import dataclass

from treadle_core.model import (
    Cause,
    CostModel,
    EngineRecord,
    EngineSpec,
    JobRecord,
    Outcome,
    Policy,
    TicketRecord,
    TrajectoryRecord,
)
from treadle_core.placing.question import PlanEngine, PlanWork


class Action:
    """Base of all actions."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class SaveTrajectory(Action):
    """Store the record under its trajectory_id."""

    record: TrajectoryRecord


@dataclass(frozen=True, slots=True)
class ForgetTrajectory(Action):
    """Remove a trajectory that closed long ago."""

    trajectory_id: str


@dataclass(frozen=True, slots=True)
class SaveEngine(Action):
    """Store an engine and its lease."""

    record: EngineRecord


@dataclass(frozen=True, slots=True)
class RemoveEngine(Action):
    """Remove an engine that is gone."""

    engine_id: str


@dataclass(frozen=True, slots=True)
class SaveJob(Action):
    """Store the job of a client."""

    record: JobRecord


@dataclass(frozen=True, slots=True)
class RemoveJob(Action):
    """Remove a job that nobody will resume."""

    job_id: str


@dataclass(frozen=True, slots=True)
class SavePolicy(Action):
    """Store the policy of new trajectories."""

    policy: Policy


@dataclass(frozen=True, slots=True)
class SaveWeights(Action):
    """Store the desired weights."""


@dataclass(frozen=True, slots=True)
class SaveDrained(Action):
    """Store which engines are drained."""


@dataclass(frozen=True, slots=True)
class LoadWeights(Action):
    """Have an engine load weights; answer with WeightsUpdated or LoadFailed."""

    engine_id: str
    address: str
    weight_version: str
    model_path: str


@dataclass(frozen=True, slots=True)
class IssueTicket(Action):
    """Answer StepRequested with this ticket."""

    ticket: TicketRecord

    repeats: bool = False
    """Whether the same request has got this ticket before."""

    tool_s: float = 0.0
    """Seconds of the tool call before the step."""


@dataclass(frozen=True, slots=True)
class KeepWaiting(Action):
    """Answer StepRequested with a later IssueTicket, or let the client send the request again."""

    trajectory_id: str


@dataclass(frozen=True, slots=True)
class AskPrediction(Action):
    """Request a prediction of what is left; answer with PredictionArrived of the record's next turn
    and gen_tokens."""

    record: TrajectoryRecord


@dataclass(frozen=True, slots=True)
class AskPlan(Action):
    """Request a plan from the placement; answer with PlanArrived of the same plan_id. Only the
    newest question counts."""

    plan_id: int
    work: PlanWork
    engines: tuple[PlanEngine, ...]
    cost_model: CostModel


@dataclass(frozen=True, slots=True)
class Reprioritize(Action):
    """Send new priorities of steps, (ticket_id, priority), to an engine's queue."""

    engine_id: str
    address: str
    changes: tuple[tuple[str, float], ...]


@dataclass(frozen=True, slots=True)
class StartMigration(Action):
    """Request the move of a prefix from the migrator; answer with MoveAccepted or MoveEnded."""

    move_id: str
    trajectory_id: str
    source: EngineSpec
    target: EngineSpec
    expected_revision: int
    remaining_tokens: float
    cache_salt: str
    allow_prefill: bool
    give_up_after_s: float


@dataclass(frozen=True, slots=True)
class CancelMigration(Action):
    """Request from the migrator that it cancels a move, as the next step was requested first or the
    move is not wanted any more."""

    trajectory_id: str
    migration_id: str


@dataclass(frozen=True, slots=True)
class AbortStep(Action):
    """Stop a step that no client reads any more."""

    address: str
    ticket_id: str


@dataclass(frozen=True, slots=True)
class AskStep(Action):
    """Query the engine for the step of a ticket that has expired; answer with StepUnknown where the
    engine has none."""

    ticket: TicketRecord


@dataclass(frozen=True, slots=True)
class ReleasePrefix(Action):
    """Let an engine drop a trajectory's context."""

    address: str
    trajectory_id: str


@dataclass(frozen=True, slots=True)
class AnnounceOpened(Action):
    """Publish trajectory_opened."""

    record: TrajectoryRecord


@dataclass(frozen=True, slots=True)
class AnnounceClosed(Action):
    """Publish trajectory_closed; answer with ClosedAnnounced once it is stored, or the action comes
    again."""

    record: TrajectoryRecord
    outcome: Outcome


@dataclass(frozen=True, slots=True)
class AnnouncePredicted(Action):
    """Publish trajectory_predicted."""

    record: TrajectoryRecord

    first: bool = False
    """Whether the trajectory had no prediction before."""


@dataclass(frozen=True, slots=True)
class AnnounceEngineJoined(Action):
    """Publish engine_joined."""

    spec: EngineSpec


@dataclass(frozen=True, slots=True)
class AnnounceEngineLost(Action):
    """Publish engine_lost with the reason LEASE_EXPIRED, DEREGISTERED or REPLACED."""

    engine_id: str
    reason: str


class Note(Action):
    """Base of the notes that handlers leave for the books. They are not frozen, since one that is
    frozen takes three times as long to make."""

    __slots__ = ()


@dataclass(slots=True)
class Decided(Note):
    """Keep a decision about a trajectory, and its reason. The fields are those of
    `state.Decision`."""

    trajectory_id: str
    kind: str
    engine_id: str
    pattern: str
    values: tuple[object, ...] = ()

    again: bool = False
    """Whether each look at the trajectory makes the decision anew: then it is kept once, as long as
    no other decision follows."""


@dataclass(slots=True)
class StepCounted(Note):
    """Count a finished step, whose tokens are in the record of its trajectory by now."""

    record: TrajectoryRecord
    turn: int
    output_tokens: int


@dataclass(slots=True)
class TrajectoryEnded(Note):
    """Close the accounts of a trajectory that takes no more steps."""

    record: TrajectoryRecord


@dataclass(slots=True)
class EnginesChanged(Note):
    """Drop the plans in force, as engines came, went, changed their speed, or became usable or
    unusable."""


@dataclass(slots=True)
class StepWaits(Note):
    """Count the wait of a requested step for `cause` from now on. None: its client has given it
    up."""

    trajectory_id: str
    cause: Cause | None


@dataclass(slots=True)
class QueueSeen(Note):
    """Note that an engine's queue of first steps waits for weights from now on, where the engine
    `loads` them, or does so no more."""

    engine_id: str
    loads: bool
