"""Messages of clients to core values and back (of engines: `convert_engines`). Requests were checked before
(`checks.py`)."""

import hashlib

from google.protobuf.duration_pb2 import Duration
from google.protobuf.timestamp_pb2 import Timestamp
from treadle.common.v1.estimate_pb2 import Quantiles
from treadle.common.v1.ticket_pb2 import Ticket
from treadle.scheduler.v1 import scheduler_pb2 as pb
from treadle_core.events import (
    StepRequested,
    SwitchRequested,
    TrajectoryClosed,
    TrajectoryOpened,
)
from treadle_core.model import (
    Estimate,
    Objective,
    Ordering,
    Outcome,
    PlacementRule,
    Policy,
    Replanning,
    TicketRecord,
    TrajectoryRecord,
    TrajectoryState,
)

NANOSECONDS = 1e9

STATES = {
    TrajectoryState.IDLE: pb.TRAJECTORY_STATE_IDLE,
    TrajectoryState.STEPPING: pb.TRAJECTORY_STATE_STEPPING,
    TrajectoryState.FINISHED: pb.TRAJECTORY_STATE_FINISHED,
    TrajectoryState.FAILED: pb.TRAJECTORY_STATE_FAILED,
    TrajectoryState.CANCELLED: pb.TRAJECTORY_STATE_CANCELLED,
}
OUTCOMES = {
    pb.OUTCOME_FINISHED: Outcome.FINISHED,
    pb.OUTCOME_TRUNCATED: Outcome.TRUNCATED,
    pb.OUTCOME_FAILED: Outcome.FAILED,
    pb.OUTCOME_CANCELLED: Outcome.CANCELLED,
}
OUTCOME_NUMBERS = {outcome: number for number, outcome in OUTCOMES.items()}
ORDERINGS = {
    pb.ORDERING_PROGRESSIVE: Ordering.PROGRESSIVE,
    pb.ORDERING_FCFS: Ordering.FCFS,
    pb.ORDERING_ROUND_ROBIN: Ordering.ROUND_ROBIN,
    pb.ORDERING_SHORTEST_FIRST: Ordering.SHORTEST_FIRST,
    pb.ORDERING_LEAST_ATTAINED: Ordering.LEAST_ATTAINED,
}
ORDERING_NUMBERS = {ordering: number for number, ordering in ORDERINGS.items()}
OBJECTIVES = {
    pb.OBJECTIVE_UNSPECIFIED: Objective.MAKESPAN,
    pb.OBJECTIVE_MAKESPAN: Objective.MAKESPAN,
    pb.OBJECTIVE_MEAN: Objective.MEAN,
    pb.OBJECTIVE_DEADLINE: Objective.DEADLINE,
}
OBJECTIVE_NUMBERS = {objective: number for number, objective in OBJECTIVES.items()}
PLACEMENTS = {
    pb.PLACEMENT_RULE_PLANNED: PlacementRule.PLANNED,
    pb.PLACEMENT_RULE_PINNED: PlacementRule.PINNED,
    pb.PLACEMENT_RULE_LEAST_LOAD: PlacementRule.LEAST_LOAD,
    pb.PLACEMENT_RULE_CACHE_AWARE: PlacementRule.CACHE_AWARE,
}
PLACEMENT_NUMBERS = {rule: number for number, rule in PLACEMENTS.items()}
REPLANNINGS = {
    pb.REPLANNING_UNSPECIFIED: Replanning.RESOLVE,
    pb.REPLANNING_RESOLVE: Replanning.RESOLVE,
    pb.REPLANNING_RANK_SCALING: Replanning.RANK_SCALING,
}
REPLANNING_NUMBERS = {replanning: number for number, replanning in REPLANNINGS.items()}


def timestamp(seconds: float) -> Timestamp:
    """Unix seconds as a message."""
    message = Timestamp()
    message.FromNanoseconds(round(seconds * NANOSECONDS))
    return message


def duration(seconds: float) -> Duration:
    """Seconds as a message."""
    message = Duration()
    message.FromNanoseconds(round(seconds * NANOSECONDS))
    return message


def seconds(message: Timestamp | Duration) -> float:
    """A message as (Unix) seconds."""
    return message.seconds + message.nanos / NANOSECONDS


def quantiles(estimate: Estimate) -> Quantiles:
    """Percentiles as a message."""
    return Quantiles(p10=estimate.p10, p50=estimate.p50, p90=estimate.p90)


def minted_trajectory_id(request_id: str) -> str:
    """The id of a trajectory that its client left unnamed: the same for each repeat of the request."""
    return f"t-{hashlib.sha256(request_id.encode()).hexdigest()[:20]}"


def opened(request: pb.OpenTrajectoryRequest) -> TrajectoryOpened:
    """The event of a checked request."""
    return TrajectoryOpened(
        request_id=request.request_id,
        trajectory_id=request.trajectory_id or minted_trajectory_id(request.request_id),
        prompt_id=request.prompt_id,
        rollout_id=request.rollout_id,
        sample=request.sample,
        prompt_tokens=request.prompt_tokens,
        max_total_tokens=request.max_total_tokens,
        deadline_s=seconds(request.deadline) if request.HasField("deadline") else None,
        hardware_tags=tuple(request.hardware_tags),
        pinned_engine_id=request.pinned_engine_id,
    )


def step_requested(request: pb.ScheduleStepRequest) -> StepRequested:
    """The event of a checked request."""
    return StepRequested(
        request_id=request.request_id,
        trajectory_id=request.trajectory_id,
        turn=request.turn,
        context_tokens=request.context_tokens,
        max_new_tokens=request.max_new_tokens,
        replaces_ticket_id=request.replaces_ticket_id,
        resumed_tokens=request.resumed_tokens,
        tool_s=seconds(request.tool_time),
    )


def closed(request: pb.CloseTrajectoryRequest) -> TrajectoryClosed:
    """The event of a checked request."""
    reward = request.reward if request.HasField("reward") else None
    return TrajectoryClosed(request.request_id, request.trajectory_id, OUTCOMES[request.outcome], reward)


def switch_requested(request: pb.SwitchEngineRequest) -> SwitchRequested:
    """The event of a checked request."""
    return SwitchRequested(
        request.request_id, request.trajectory_id, request.expected_revision, request.target_engine_id
    )


def policy(message: pb.Policy) -> Policy:
    """A checked policy."""
    return Policy(
        ordering=ORDERINGS[message.ordering],
        objective=OBJECTIVES[message.objective],
        placement=PLACEMENTS[message.placement],
        migrate=message.migrate,
        preempt=message.preempt,
        replanning=REPLANNINGS[message.replanning],
        reserve=message.reserve,
    )


def policy_message(value: Policy) -> pb.Policy:
    """A policy as a message."""
    return pb.Policy(
        ordering=ORDERING_NUMBERS[value.ordering],
        objective=OBJECTIVE_NUMBERS[value.objective],
        placement=PLACEMENT_NUMBERS[value.placement],
        migrate=value.migrate,
        preempt=value.preempt,
        replanning=REPLANNING_NUMBERS[value.replanning],
        reserve=value.reserve,
    )


def ticket_message(ticket: TicketRecord) -> Ticket:
    """A ticket as a message. The cache salt is the weight version: KV of other weights is never hit."""
    return Ticket(
        ticket_id=ticket.ticket_id,
        trajectory_id=ticket.trajectory_id,
        turn=ticket.turn,
        engine_id=ticket.engine_id,
        engine_address=ticket.engine_address,
        priority=ticket.priority,
        cache_salt=ticket.weight_version,
        weight_version=ticket.weight_version,
        revision=ticket.revision,
        expires_at=timestamp(ticket.expires_s),
    )


def trajectory_message(record: TrajectoryRecord) -> pb.Trajectory:
    """A trajectory as a message."""
    message = pb.Trajectory(
        trajectory_id=record.trajectory_id,
        rollout_id=record.rollout_id,
        prompt_id=record.prompt_id,
        sample=record.sample,
        state=STATES[record.state],
        engine_id=record.engine_id,
        revision=record.revision,
        next_turn=record.next_turn,
        prompt_tokens=record.prompt_tokens,
        context_tokens=record.context_tokens,
        gen_tokens=record.gen_tokens,
        priority=record.priority,
        opened_at=timestamp(record.opened_s),
        migrations=record.migrations,
    )
    if record.prediction is not None:
        message.predicted_remaining_tokens.CopyFrom(quantiles(record.prediction.remaining_tokens))
        message.prediction_model_version = record.prediction.model_version
    if record.closed_s is not None:
        message.closed_at.CopyFrom(timestamp(record.closed_s))
    return message
