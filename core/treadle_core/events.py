"""Events that the controller's driver (the scheduler service or a simulator) reports.

Requests (JobOpened, JobRenewed, JobClosed, TrajectoryOpened, StepRequested, TrajectoryClosed,
SwitchRequested, EngineRegistered, LeaseRenewed, EngineDeregistered, DrainSet, PolicySet,
WeightsSet) may be refused with an exception of `refusals` and then change nothing. All others are
facts: they are never refused, and may arrive twice, late or out of order; a fact about something
that is gone is ignored.
"""

from dataclasses import dataclass

from treadle_core.compiled import Indexes
from treadle_core.model import (
    NO_TIMES,
    ClientTimes,
    DecodeCurve,
    EngineLoad,
    EngineSpec,
    Outcome,
    Policy,
    Prediction,
    StepTimes,
)


class Event:
    """Base of all events."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class JobOpened(Event):
    """A client announces its job. `resume`: it takes over from the client that held the job of this
    name before. weight: of the share of this name; 0 stands for 1, or for the weight of a job that
    it resumes. A policy of None likewise stands for that of the resumed job."""

    request_id: str
    job_id: str
    name: str = ""
    resume: bool = False
    weight: float = 0.0
    policy: Policy | None = None


@dataclass(frozen=True, slots=True)
class JobRenewed(Event):
    """A client renews the lease of its job. `rollout_ids`: its rollouts in progress; None: as
    before."""

    job_id: str
    rollout_ids: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True)
class JobClosed(Event):
    """A client ends its job, and with it the trajectories that are still open."""

    job_id: str


@dataclass(frozen=True, slots=True)
class TrajectoryOpened(Event):
    """A client requests to open a trajectory. The driver makes an id where the client gave none.
    asynchronous: its trainer does not wait for the last trajectory. group_keep: see
    TrajectoryRecord."""

    request_id: str
    trajectory_id: str
    prompt_id: str
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


@dataclass(frozen=True, slots=True)
class StepRequested(Event):
    """A client requests a ticket. `tool_s`: seconds of the tool call before this turn.
    engine_refused: the engine of the replaced ticket refused the step, and did not lose its stream.
    client_times: what the client has measured so far; None where it measures nothing."""

    request_id: str
    trajectory_id: str
    turn: int
    context_tokens: int
    max_new_tokens: int
    replaces_ticket_id: str = ""
    resumed_tokens: int = 0
    tool_s: float = 0.0
    engine_refused: bool = False
    client_times: ClientTimes | None = None


@dataclass(frozen=True, slots=True)
class TrajectoryClosed(Event):
    """A client ends a trajectory. client_times: as in StepRequested."""

    request_id: str
    trajectory_id: str
    outcome: Outcome
    reward: float | None = None
    client_times: ClientTimes | None = None


@dataclass(frozen=True, slots=True)
class GroupSettled(Event):
    """Enough samples of a prompt are in (rollout service): those numbered below `samples` are no
    longer wanted."""

    rollout_id: str
    prompt_id: str
    samples: int


@dataclass(frozen=True, slots=True)
class SwitchRequested(Event):
    """The migrator requests that `target_engine_id` becomes the owner, if the revision is still the
    expected one."""

    request_id: str
    trajectory_id: str
    expected_revision: int
    target_engine_id: str


@dataclass(frozen=True, slots=True)
class EngineRegistered(Event):
    """A sidecar registers its engine. `lease_id` comes from the driver and is used for a new
    registration."""

    request_id: str
    lease_id: str
    spec: EngineSpec


@dataclass(frozen=True, slots=True)
class LeaseRenewed(Event):
    """A sidecar renews its lease; `load` and `decode_curve` are None where it sent none."""

    lease_id: str
    engine_id: str
    load: EngineLoad | None = None
    decode_curve: DecodeCurve | None = None


@dataclass(frozen=True, slots=True)
class EngineDeregistered(Event):
    """A sidecar removes its engine."""

    lease_id: str
    engine_id: str


@dataclass(frozen=True, slots=True)
class DrainSet(Event):
    """An operator wants an engine empty, or, with draining False, in use again."""

    engine_id: str
    draining: bool


@dataclass(frozen=True, slots=True)
class PolicySet(Event):
    """An operator sets the policy of new trajectories."""

    policy: Policy


@dataclass(frozen=True, slots=True)
class StepPreempted(Event):
    """An engine evicted a step after `output_tokens`. It changes no record; as after every event,
    the controller requests a plan that is due. by_ticket_id: of the step that got the slot; empty
    where a pause did it."""

    trajectory_id: str
    ticket_id: str
    output_tokens: int
    by_ticket_id: str = ""


@dataclass(frozen=True, slots=True)
class StepFinished(Event):
    """An engine finished a step. `output_tokens` is the step's whole output, resumed tokens
    included. times: of the step there, by its own clock."""

    trajectory_id: str
    ticket_id: str
    turn: int
    context_tokens: int
    output_tokens: int
    times: StepTimes = NO_TIMES


@dataclass(frozen=True, slots=True)
class StepUnknown(Event):
    """The engine reports, for AskStep, that it has no such step."""

    trajectory_id: str
    ticket_id: str


@dataclass(frozen=True, slots=True)
class ToolStarted(Event):
    """A tool call began; `expected_s` is 0 where unknown."""

    trajectory_id: str
    expected_s: float = 0.0


@dataclass(frozen=True, slots=True)
class ToolFinished(Event):
    """A tool call ended; the next step is about to be requested."""

    trajectory_id: str


@dataclass(frozen=True, slots=True)
class PredictionArrived(Event):
    """The predictor answers AskPrediction."""

    trajectory_id: str
    prediction: Prediction


@dataclass(frozen=True, slots=True, eq=False)
class PlanArrived(Event):
    """The placement answers AskPlan `plan_id`. engine_of: for each trajectory of the question the
    index of its engine there, -1 for none. None: there is no plan."""

    plan_id: int
    engine_of: Indexes | None = None


@dataclass(frozen=True, slots=True)
class MoveAccepted(Event):
    """The migrator accepted StartMigration `move_id`."""

    trajectory_id: str
    move_id: str
    migration_id: str


@dataclass(frozen=True, slots=True)
class MoveEnded(Event):
    """A migration ended, or could not be started (then `migration_id` is empty and `move_id` is
    set). `took_s`: seconds from its start to its end where it moved or was given up; 0 where that
    time does not show the engines' speed."""

    trajectory_id: str
    migration_id: str = ""
    move_id: str = ""
    moved: bool = False
    reason: str = ""
    took_s: float = 0.0


@dataclass(frozen=True, slots=True)
class ClosedAnnounced(Event):
    """AnnounceClosed has been published."""

    trajectory_id: str


@dataclass(frozen=True, slots=True)
class WeightsSet(Event):
    """An operator or trainer sets the weights that all engines are to serve. model_path: empty
    where they are pushed."""

    weight_version: str
    model_path: str


@dataclass(frozen=True, slots=True)
class LoadFailed(Event):
    """LoadWeights has failed. refused: the engine cannot load them; otherwise another request may
    succeed."""

    engine_id: str
    weight_version: str
    refused: bool
    message: str


@dataclass(frozen=True, slots=True)
class WeightsUpdated(Event):
    """An engine serves other weights now."""

    engine_id: str
    weight_version: str


@dataclass(frozen=True, slots=True)
class Tick(Event):
    """Time passed. Drivers send one about every second. late_s: seconds for which the driver
    handled no event, and so no renewal either."""

    late_s: float = 0.0
