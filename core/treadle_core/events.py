"""What the controller hears. A driver (the scheduler service, a simulator) makes these and hands them to
`Controller.on_event`.

Requests (TrajectoryOpened, StepRequested, TrajectoryClosed, SwitchRequested, EngineRegistered, LeaseRenewed,
EngineDeregistered, PolicySet) may be refused with an exception of `refusals.py` and then change nothing. All others are
facts: they are never refused, may come twice, late or out of order, and what they no longer concern is ignored.
"""

from dataclasses import dataclass

from treadle_core.model import EngineLoad, EngineSpec, Estimate, Outcome, Policy
from treadle_core.placing.question import EngineOf


@dataclass(frozen=True, slots=True)
class TrajectoryOpened:
    """A client asks to admit a trajectory. The driver mints `trajectory_id` where the client gave none."""

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


@dataclass(frozen=True, slots=True)
class StepRequested:
    """A client asks for a ticket. `tool_s` is what the tool call before this turn took."""

    request_id: str
    trajectory_id: str
    turn: int
    context_tokens: int
    max_new_tokens: int
    replaces_ticket_id: str = ""
    resumed_tokens: int = 0
    tool_s: float = 0.0


@dataclass(frozen=True, slots=True)
class TrajectoryClosed:
    """A client ends a trajectory."""

    request_id: str
    trajectory_id: str
    outcome: Outcome
    reward: float | None = None


@dataclass(frozen=True, slots=True)
class SwitchRequested:
    """The migrator asks to make `target_engine_id` the owner, provided that the revision has not moved."""

    request_id: str
    trajectory_id: str
    expected_revision: int
    target_engine_id: str


@dataclass(frozen=True, slots=True)
class EngineRegistered:
    """A sidecar announces its engine. `lease_id` is minted by the driver and used where this is a new registration."""

    request_id: str
    lease_id: str
    spec: EngineSpec


@dataclass(frozen=True, slots=True)
class LeaseRenewed:
    """A sidecar holds its engine; `load` is None where it sent none."""

    lease_id: str
    engine_id: str
    load: EngineLoad | None = None


@dataclass(frozen=True, slots=True)
class EngineDeregistered:
    """A sidecar takes its engine away."""

    lease_id: str
    engine_id: str


@dataclass(frozen=True, slots=True)
class PolicySet:
    """The policy of trajectories opened from now on."""

    policy: Policy


@dataclass(frozen=True, slots=True)
class StepPreempted:
    """An engine put a step back into its queue; `output_tokens` of it are sampled. It changes nothing; as with every
    event, the controller asks for a plan where one is due."""

    trajectory_id: str
    ticket_id: str
    output_tokens: int


@dataclass(frozen=True, slots=True)
class StepFinished:
    """An engine finished a step. `output_tokens` is the step's whole output, resumed tokens included."""

    trajectory_id: str
    ticket_id: str
    turn: int
    context_tokens: int
    output_tokens: int
    aborted: bool = False


@dataclass(frozen=True, slots=True)
class ToolStarted:
    """A tool call began; `expected_s` is 0 where unknown."""

    trajectory_id: str
    expected_s: float = 0.0


@dataclass(frozen=True, slots=True)
class ToolFinished:
    """A tool call ended: the next step is about to be asked for."""

    trajectory_id: str


@dataclass(frozen=True, slots=True)
class PredictionArrived:
    """The predictor's answer to an AskPrediction made after `turn` steps and `gen_tokens` tokens; see
    `model.Prediction`."""

    trajectory_id: str
    turn: int
    gen_tokens: int
    remaining_tokens: Estimate
    remaining_turns: Estimate | None = None
    model_version: str = ""
    learned: bool = False


@dataclass(frozen=True, slots=True)
class PlanArrived:
    """The placement's answer to AskPlan `plan_id`: the trajectories of each engine, or, shorter to say and to read, the
    engine of each trajectory. Neither means that none could be had."""

    plan_id: int
    groups: tuple[tuple[str, tuple[str, ...]], ...] = ()
    engine_of: EngineOf | None = None


@dataclass(frozen=True, slots=True)
class MoveAccepted:
    """The migrator took StartMigration `move_id`."""

    trajectory_id: str
    move_id: str
    migration_id: str


@dataclass(frozen=True, slots=True)
class MoveEnded:
    """A migration ended, or could not be started (then `migration_id` is empty and `move_id` is set)."""

    trajectory_id: str
    migration_id: str = ""
    move_id: str = ""
    moved: bool = False
    reason: str = ""


@dataclass(frozen=True, slots=True)
class ClosedAnnounced:
    """AnnounceClosed has been published."""

    trajectory_id: str


@dataclass(frozen=True, slots=True)
class WeightsUpdated:
    """An engine serves other weights now."""

    engine_id: str
    weight_version: str


@dataclass(frozen=True, slots=True)
class Tick:
    """Time passed: leases may have run out, closed trajectories may be forgotten. Drivers send one about each
    second."""


Event = (
    TrajectoryOpened
    | StepRequested
    | TrajectoryClosed
    | SwitchRequested
    | EngineRegistered
    | LeaseRenewed
    | EngineDeregistered
    | PolicySet
    | StepPreempted
    | StepFinished
    | ToolStarted
    | ToolFinished
    | PredictionArrived
    | PlanArrived
    | MoveAccepted
    | MoveEnded
    | ClosedAnnounced
    | WeightsUpdated
    | Tick
)
