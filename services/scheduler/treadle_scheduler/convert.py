"""Messages of clients to core values and back (of engines: `convert_engines`). Requests were checked before
(`checks.py`).

What a request must be before the controller sees it. Each check raises InvalidArgument naming the field.

The condition of a ticket that cannot be had yet."""

import hashlib

from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.protobuf.timestamp_pb2 import Timestamp
from treadle.common.v1.estimate_pb2 import Quantiles
from treadle.common.v1.ticket_pb2 import Ticket
from treadle.engine.v1 import engine_pb2
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
from treadle_runtime.config import address
from treadle_runtime.errors import InvalidArgument, finite, identifier, non_empty, non_negative, positive, require

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
        preemptible=ticket.preemptible,
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


# A ticket id holds the trajectory id, the turn and the attempt, and must itself be an identifier of 128 characters.
LONGEST_TRAJECTORY_ID_CHARS = 96
LONGEST_PROMPT_ID_CHARS = 256
MOST_HARDWARE_TAGS = 32
LARGEST_PAGE = 1000
DEFAULT_PAGE = 100
# Of a Timestamp: the year 9999, the last that the message allows. Durations: 10,000 years.
LAST_TIMESTAMP_S = 253_402_300_799
LONGEST_DURATION_S = 315_576_000_000
NANOS_PER_S = 1_000_000_000


def trajectory_id(value: str) -> str:
    """An identifier that leaves room for the ticket's."""
    identifier("trajectory_id", value)
    require(
        len(value) <= LONGEST_TRAJECTORY_ID_CHARS,
        "trajectory_id",
        f"must be at most {LONGEST_TRAJECTORY_ID_CHARS} characters, is {len(value)}",
    )
    return value


def open_trajectory(request: pb.OpenTrajectoryRequest) -> None:
    """OpenTrajectory."""
    identifier("request_id", request.request_id)
    if request.trajectory_id:
        trajectory_id(request.trajectory_id)
    if request.rollout_id:
        identifier("rollout_id", request.rollout_id)
    non_empty("prompt_id", request.prompt_id)
    require(
        len(request.prompt_id) <= LONGEST_PROMPT_ID_CHARS,
        "prompt_id",
        f"must be at most {LONGEST_PROMPT_ID_CHARS} characters, is {len(request.prompt_id)}",
    )
    non_negative("sample", request.sample)
    positive("prompt_tokens", request.prompt_tokens)
    non_negative("max_total_tokens", request.max_total_tokens)
    if request.HasField("deadline"):
        _timestamp("deadline", request.deadline)
    _tags("hardware_tags", request.hardware_tags)
    if request.pinned_engine_id:
        identifier("pinned_engine_id", request.pinned_engine_id)


def schedule_step(request: pb.ScheduleStepRequest) -> None:
    """ScheduleStep."""
    identifier("request_id", request.request_id)
    trajectory_id(request.trajectory_id)
    non_negative("turn", request.turn)
    positive("context_tokens", request.context_tokens)
    positive("max_new_tokens", request.max_new_tokens)
    if request.replaces_ticket_id:
        identifier("replaces_ticket_id", request.replaces_ticket_id)
    non_negative("resumed_tokens", request.resumed_tokens)
    if request.HasField("tool_time"):
        _duration("tool_time", request.tool_time)


def close_trajectory(request: pb.CloseTrajectoryRequest) -> None:
    """CloseTrajectory."""
    identifier("request_id", request.request_id)
    trajectory_id(request.trajectory_id)
    _enum("outcome", request, request.outcome)
    if request.HasField("reward"):
        finite("reward", request.reward)


def list_trajectories(request: pb.ListTrajectoriesRequest) -> None:
    """ListTrajectories; the page token is checked where it is read."""
    if request.rollout_id:
        identifier("rollout_id", request.rollout_id)
    require(
        0 <= request.page_size <= LARGEST_PAGE,
        "page_size",
        f"must be 1..{LARGEST_PAGE}, or 0 for {DEFAULT_PAGE}, is {request.page_size}",
    )


def switch_engine(request: pb.SwitchEngineRequest) -> None:
    """SwitchEngine."""
    identifier("request_id", request.request_id)
    trajectory_id(request.trajectory_id)
    non_negative("expected_revision", request.expected_revision)
    identifier("target_engine_id", request.target_engine_id)


def register_engine(request: pb.RegisterEngineRequest) -> None:
    """RegisterEngine."""
    identifier("request_id", request.request_id)
    require(request.HasField("info"), "info", "must be set")
    info = request.info
    identifier("info.engine_id", info.engine_id)
    try:
        address(info.address)
    except ValueError as error:
        raise InvalidArgument("info.address", f"must be {error}, is {info.address!r}") from None
    positive("info.slot_limit", info.slot_limit)
    for name in ("kv_tokens_capacity", "max_context_tokens", "tensor_parallel", "kv_bytes_per_token"):
        non_negative(f"info.{name}", getattr(info, name))
    _tags("info.hardware_tags", info.hardware_tags)
    for name in ("base_s", "per_sequence_s", "per_kv_token_s", "prefill_tokens_per_s"):
        non_negative(f"info.decode_curve.{name}", getattr(info.decode_curve, name))


def renew_lease(request: pb.RenewEngineLeaseRequest) -> None:
    """RenewEngineLease."""
    identifier("lease_id", request.lease_id)
    identifier("engine_id", request.engine_id)
    if request.HasField("load"):
        _load(request.load)


def deregister_engine(request: pb.DeregisterEngineRequest) -> None:
    """DeregisterEngine."""
    identifier("request_id", request.request_id)
    identifier("lease_id", request.lease_id)
    identifier("engine_id", request.engine_id)


def set_policy(request: pb.SetPolicyRequest) -> None:
    """SetPolicy. Two may stay unspecified: the objective is makespan then, replanning resolves."""
    identifier("request_id", request.request_id)
    require(request.HasField("policy"), "policy", "must be set")
    _enum("policy.ordering", request.policy, request.policy.ordering)
    _enum("policy.placement", request.policy, request.policy.placement)
    if request.policy.objective:
        _enum("policy.objective", request.policy, request.policy.objective)
    if request.policy.replanning:
        _enum("policy.replanning", request.policy, request.policy.replanning)


def _load(load: engine_pb2.Load) -> None:
    counts = ("running_steps", "waiting_steps", "slot_limit", "kv_tokens_used", "kv_tokens_capacity")
    for name in (*counts, "decode_tokens_per_s", "oldest_wait_s"):
        non_negative(f"load.{name}", getattr(load, name))
    if load.HasField("measured_at"):
        _timestamp("load.measured_at", load.measured_at)


def _tags(field: str, tags: object) -> None:
    values = list(tags)  # type: ignore[call-overload]
    require(len(values) <= MOST_HARDWARE_TAGS, field, f"must be at most {MOST_HARDWARE_TAGS} tags, are {len(values)}")
    for index, tag in enumerate(values):
        identifier(f"{field}[{index}]", tag)


def _enum(field: str, message: Message, value: int) -> None:
    kind = message.DESCRIPTOR.fields_by_name[field.rpartition(".")[2]].enum_type
    assert kind is not None, f"{field} is no enum"
    names = [entry.name for entry in kind.values if entry.number]
    known = value != 0 and value in kind.values_by_number
    require(known, field, f"must be one of {', '.join(names)}, is {value}")


def _timestamp(field: str, value: Timestamp) -> None:
    right = 0 <= value.seconds <= LAST_TIMESTAMP_S and 0 <= value.nanos < NANOS_PER_S
    require(right, field, "must be a time between 1970 and 9999")


def _duration(field: str, value: Duration) -> None:
    right = 0 <= value.seconds <= LONGEST_DURATION_S and 0 <= value.nanos < NANOS_PER_S
    require(right, field, "must be a duration >= 0")


class StepHeld(Exception):  # noqa: N818 - a condition, not a fault
    """The trajectory waits for room on an engine, or for its KV; ask again."""

    def __init__(self, trajectory_id: str) -> None:
        super().__init__(f"{trajectory_id} waits for room on an engine; ask again")
        self.trajectory_id = trajectory_id
