"""What the controller wants done. A driver applies these in order.

The contract of a driver:
- `Save…`, `Remove…` and `Forget…` are state: they are stored before the request that caused them is answered.
- `IssueTicket` is the answer to StepRequested.
- All others are best effort and in the background: nothing waits for them, a failure is logged and at most becomes an
  event (PlanArrived without groups, MoveEnded). A driver without the service that an action needs drops it the same
  way.
"""

from __future__ import annotations

from dataclasses import dataclass

from treadle_core.model import CostModel, EngineRecord, EngineSpec, Outcome, Policy, TicketRecord, TrajectoryRecord
from treadle_core.placing.question import PlanEngine, PlanWork


@dataclass(frozen=True, slots=True)
class SaveTrajectory:
    """Store the record under its trajectory_id."""

    record: TrajectoryRecord


@dataclass(frozen=True, slots=True)
class ForgetTrajectory:
    """Remove a trajectory that closed long ago."""

    trajectory_id: str


@dataclass(frozen=True, slots=True)
class SaveEngine:
    """Store an engine and its lease."""

    record: EngineRecord


@dataclass(frozen=True, slots=True)
class RemoveEngine:
    """Remove an engine that is gone."""

    engine_id: str


@dataclass(frozen=True, slots=True)
class SavePolicy:
    """Store the policy of new trajectories."""

    policy: Policy


@dataclass(frozen=True, slots=True)
class IssueTicket:
    """Answer StepRequested with this ticket."""

    ticket: TicketRecord


@dataclass(frozen=True, slots=True)
class KeepWaiting:
    """Answer StepRequested with a later IssueTicket, or let the client ask again."""

    trajectory_id: str


@dataclass(frozen=True, slots=True)
class AskPrediction:
    """Ask the predictor; answer with PredictionArrived carrying the same turn and gen_tokens."""

    trajectory_id: str
    prompt_id: str
    sample: int
    turn: int
    gen_tokens: int
    context_tokens: int
    prompt_tokens: int
    max_total_tokens: int


@dataclass(frozen=True, slots=True)
class AskPlan:
    """Ask the placement; answer with PlanArrived carrying the same plan_id. A new question makes an older one void."""

    plan_id: int
    work: PlanWork
    engines: tuple[PlanEngine, ...]
    cost_model: CostModel


@dataclass(frozen=True, slots=True)
class Reprioritize:
    """Tell an engine's queue the new priorities of steps: (ticket_id, priority)."""

    engine_id: str
    address: str
    changes: tuple[tuple[str, float], ...]


@dataclass(frozen=True, slots=True)
class StartMigration:
    """Ask the migrator to move a prefix; answer with MoveAccepted or MoveEnded."""

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
class CancelMigration:
    """The step came back before the move was done."""

    trajectory_id: str
    migration_id: str


@dataclass(frozen=True, slots=True)
class AbortStep:
    """A step that nobody reads any more should stop."""

    address: str
    ticket_id: str


@dataclass(frozen=True, slots=True)
class ReleasePrefix:
    """An engine may forget a trajectory's context."""

    address: str
    trajectory_id: str


@dataclass(frozen=True, slots=True)
class AnnounceOpened:
    """Publish trajectory_opened."""

    record: TrajectoryRecord


@dataclass(frozen=True, slots=True)
class AnnounceClosed:
    """Publish trajectory_closed; answer with ClosedAnnounced once that is stored, or be asked again."""

    record: TrajectoryRecord
    outcome: Outcome


@dataclass(frozen=True, slots=True)
class AnnouncePredicted:
    """Publish trajectory_predicted."""

    record: TrajectoryRecord


@dataclass(frozen=True, slots=True)
class AnnounceEngineJoined:
    """Publish engine_joined."""

    spec: EngineSpec


@dataclass(frozen=True, slots=True)
class AnnounceEngineLost:
    """Publish engine_lost; reason LEASE_EXPIRED, DEREGISTERED or REPLACED."""

    engine_id: str
    reason: str


Action = (
    SaveTrajectory
    | ForgetTrajectory
    | SaveEngine
    | RemoveEngine
    | SavePolicy
    | IssueTicket
    | KeepWaiting
    | AskPrediction
    | AskPlan
    | Reprioritize
    | StartMigration
    | CancelMigration
    | AbortStep
    | ReleasePrefix
    | AnnounceOpened
    | AnnounceClosed
    | AnnouncePredicted
    | AnnounceEngineJoined
    | AnnounceEngineLost
)
