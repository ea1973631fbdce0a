"""Convert requests of clients and sidecars to checked core events, and core records to responses.

A function that takes a request raises InvalidArgument naming the first field that is wrong.
"""

import enum
from collections.abc import Iterable
from typing import Any

from treadle.common.v1.estimate_pb2 import Quantiles
from treadle.common.v1.ticket_pb2 import Ticket
from treadle.engine.v1 import engine_pb2
from treadle.scheduler.v1 import scheduler_pb2 as pb
from treadle_core import events as ev
from treadle_core.model import (
    DEFAULT_PREFILL_TOKENS_PER_S,
    LEDGER_PARTS,
    ClientTimes,
    DecodeCurve,
    EngineLoad,
    EngineRecord,
    EngineSpec,
    Estimate,
    JobUse,
    KvTransfer,
    Ledger,
    Objective,
    Ordering,
    Outcome,
    PlacementRule,
    Policy,
    StepTimes,
    TicketRecord,
    TrajectoryRecord,
    WeightsRecord,
)
from treadle_core.state import Decision, Step
from treadle_runtime.fields import (
    at_most,
    duration,
    endpoint,
    finite,
    identifier,
    minted,
    non_empty,
    non_negative,
    number_of,
    optional_identifier,
    positive,
    require,
    require_duration,
    require_timestamp,
    timestamp,
    value_of,
)

# A ticket id holds the trajectory id, the turn and the attempt, and must itself be an identifier of
# 128 characters.
LONGEST_TRAJECTORY_ID_CHARS = 96
LONGEST_PROMPT_ID_CHARS = 256
MOST_HARDWARE_TAGS = 32
LONGEST_URL_CHARS = 2048
LEAST_WEIGHT, LARGEST_WEIGHT = 1e-6, 1e6  # weight of a job; only ratios count
MOST_ROLLOUTS = 1000  # rollouts of a job in progress at once


# Fields that a message and the core's dataclass have under the same name; the numbers of a request
# must be >= 0.
_SIZES = (
    "kv_tokens_capacity",
    "host_kv_tokens",
    "max_context_tokens",
    "tensor_parallel",
    "kv_bytes_per_token",
)
_DECLARED = (
    "engine_id",
    "address",
    "model",
    "weight_version",
    "slot_limit",
    "hardware_tags",
    "url",
)
_CURVE = ("base_s", "per_sequence_s", "per_kv_token_s", "prefill_tokens_per_s", "prefill_pair_s")
_COUNTS = ("running_steps", "waiting_steps", "slot_limit", "kv_tokens_used", "kv_tokens_capacity")
_MEASURES = (*_COUNTS, "decode_tokens_per_s", "oldest_wait_s")
# of a trajectory
IDENTITY = ("trajectory_id", "rollout_id", "prompt_id", "sample", "prompt_tokens")
_PROGRESS = (
    "engine_id",
    "revision",
    "next_turn",
    "context_tokens",
    "gen_tokens",
    "priority",
    "migrations",
)
_LOAD = (*_MEASURES, "paused", "weight_version", "engine_healthy")
_JOB_USE = (
    "job",
    "weight",
    "clients",
    "share",
    "live_tickets",
    "kv_tokens",
    "open_trajectories",
    "waiting_steps",
)
_SWITCHES = ("migrate", "preempt", "reserve")  # fields of a policy
# enums of a policy: the core's and the message's
_CHOICES: dict[str, tuple[type[enum.Enum], Any]] = {
    "ordering": (Ordering, pb.Ordering),
    "objective": (Objective, pb.Objective),
    "placement": (PlacementRule, pb.PlacementRule),
}


def job_opened(request: pb.OpenJobRequest) -> ev.JobOpened:
    """Return the event that opens a job. Each repeat of the request has the same job_id."""
    request_id = identifier("request_id", request.request_id)
    return ev.JobOpened(
        request_id=request_id,
        job_id=minted("j", request_id),
        name=optional_identifier("job", request.job),
        resume=request.resume,
        weight=_weight(request.weight),
        policy=_policy(request.policy) if request.HasField("policy") else None,
    )


def job_renewed(request: pb.RenewJobRequest) -> ev.JobRenewed:
    rollout_ids = _identifiers("rollouts.rollout_ids", request.rollouts.rollout_ids, MOST_ROLLOUTS)
    return ev.JobRenewed(
        identifier("job_id", request.job_id), rollout_ids if request.HasField("rollouts") else None
    )


def job_closed(request: pb.CloseJobRequest) -> ev.JobClosed:
    identifier("request_id", request.request_id)
    return ev.JobClosed(identifier("job_id", request.job_id))


def trajectory_opened(request: pb.OpenTrajectoryRequest) -> ev.TrajectoryOpened:
    """Return the event that opens a trajectory. One that its client left unnamed gets the same id
    for each repeat of the request."""
    request_id = identifier("request_id", request.request_id)
    return ev.TrajectoryOpened(
        request_id=request_id,
        trajectory_id=_trajectory_id(request.trajectory_id or minted("t", request_id)),
        prompt_id=at_most(
            "prompt_id", non_empty("prompt_id", request.prompt_id), LONGEST_PROMPT_ID_CHARS
        ),
        rollout_id=optional_identifier("rollout_id", request.rollout_id),
        sample=non_negative("sample", request.sample),
        prompt_tokens=positive("prompt_tokens", request.prompt_tokens),
        max_total_tokens=non_negative("max_total_tokens", request.max_total_tokens),
        deadline_s=require_timestamp("deadline", request.deadline)
        if request.HasField("deadline")
        else None,
        hardware_tags=_tags("hardware_tags", request.hardware_tags),
        pinned_engine_id=optional_identifier("pinned_engine_id", request.pinned_engine_id),
        job_id=optional_identifier("job_id", request.job_id),
    )


def step_requested(request: pb.ScheduleStepRequest) -> ev.StepRequested:
    return ev.StepRequested(
        request_id=identifier("request_id", request.request_id),
        trajectory_id=_trajectory_id(request.trajectory_id),
        turn=non_negative("turn", request.turn),
        context_tokens=positive("context_tokens", request.context_tokens),
        max_new_tokens=positive("max_new_tokens", request.max_new_tokens),
        replaces_ticket_id=optional_identifier("replaces_ticket_id", request.replaces_ticket_id),
        resumed_tokens=non_negative("resumed_tokens", request.resumed_tokens),
        tool_s=require_duration("tool_time", request.tool_time),
        engine_refused=request.engine_refused,
        client_times=_client_times(request.times) if request.HasField("times") else None,
    )


def _client_times(message: pb.ClientTimes) -> ClientTimes:
    names = ("tool", "control", "since_opening", "lost_queue", "lost_prefill", "lost_decode")
    tool_s, control_s, since_opening_s, *lost_s = (
        require_duration(f"times.{name}", getattr(message, name)) for name in names
    )
    return ClientTimes(tool_s, control_s, StepTimes(*lost_s), since_opening_s)


def trajectory_closed(request: pb.CloseTrajectoryRequest) -> ev.TrajectoryClosed:
    return ev.TrajectoryClosed(
        request_id=identifier("request_id", request.request_id),
        trajectory_id=_trajectory_id(request.trajectory_id),
        outcome=value_of(Outcome, "outcome", pb.Outcome, request.outcome),
        reward=finite("reward", request.reward) if request.HasField("reward") else None,
        client_times=_client_times(request.times) if request.HasField("times") else None,
    )


def switch_requested(request: pb.SwitchEngineRequest) -> ev.SwitchRequested:
    return ev.SwitchRequested(
        request_id=identifier("request_id", request.request_id),
        trajectory_id=_trajectory_id(request.trajectory_id),
        expected_revision=non_negative("expected_revision", request.expected_revision),
        target_engine_id=identifier("target_engine_id", request.target_engine_id),
    )


def drain_set(request: pb.DrainEngineRequest) -> ev.DrainSet:
    return ev.DrainSet(identifier("engine_id", request.engine_id), not request.undo)


def policy_set(request: pb.SetPolicyRequest) -> ev.PolicySet:
    require(request.HasField("policy"), "policy", "must be set")
    return ev.PolicySet(_policy(request.policy))


def _weight(weight: float) -> float:
    """Return a checked weight of a job, or 0 for none."""
    in_range = weight == 0.0 or LEAST_WEIGHT <= weight <= LARGEST_WEIGHT
    require(
        in_range,
        "weight",
        f"must be from {LEAST_WEIGHT:g} to {LARGEST_WEIGHT:g}, or 0 for 1, is {weight:g}",
    )
    return weight


def _policy(message: pb.Policy) -> Policy:
    """Return the core's policy. The objective may stay unspecified: it is makespan then."""
    served = message.replanning in (pb.REPLANNING_UNSPECIFIED, pb.REPLANNING_RESOLVE)
    require(served, "policy.replanning", "must be REPLANNING_RESOLVE: a mesh serves no other rule")
    usual: dict[str, int] = {"objective": pb.OBJECTIVE_MAKESPAN}
    choices: dict[str, Any] = {
        name: value_of(
            kind, f"policy.{name}", message_enum, getattr(message, name) or usual.get(name, 0)
        )
        for name, (kind, message_enum) in _CHOICES.items()
    }
    return Policy(**choices, **fields_of(message, _SWITCHES))


def weights_set(request: pb.SetWeightsRequest) -> ev.WeightsSet:
    """Return the event that sets the weights that every engine is to serve."""
    return ev.WeightsSet(identifier("weight_version", request.weight_version), request.model_path)


def weights_message(desired: WeightsRecord | None, engines: Iterable[EngineRecord]) -> pb.Weights:
    """Return the desired weights, and how far each engine is."""

    def state(engine: EngineRecord) -> pb.WeightsState.ValueType:
        if not engine.behind:
            return pb.WEIGHTS_STATE_CURRENT
        return pb.WEIGHTS_STATE_FAILED if engine.load_error else pb.WEIGHTS_STATE_BEHIND

    return pb.Weights(
        weight_version=desired.weight_version if desired is not None else "",
        model_path=desired.model_path if desired is not None else "",
        engines=[
            pb.EngineWeights(
                engine_id=engine.spec.engine_id,
                weight_version=engine.spec.weight_version,
                state=state(engine),
                error=engine.load_error,
            )
            for engine in engines
        ],
    )


def engine_registered(request: pb.RegisterEngineRequest, lease_id: str) -> ev.EngineRegistered:
    """Return the event that registers an engine. Without a decode curve the engine has the default
    one."""
    request_id = identifier("request_id", request.request_id)
    require(request.HasField("info"), "info", "must be set")
    info = request.info
    identifier("info.engine_id", info.engine_id)
    sizes = {name: non_negative(f"info.{name}", getattr(info, name)) for name in _SIZES}
    spec = EngineSpec(
        engine_id=info.engine_id,
        address=endpoint("info.address", info.address),
        model=info.model,
        weight_version=info.weight_version,
        slot_limit=positive("info.slot_limit", info.slot_limit),
        kv_transfer=KvTransfer.STORAGE
        if info.kv_transfer == engine_pb2.KV_TRANSFER_STORAGE
        else KvTransfer.PREFILL,
        hardware_tags=_tags("info.hardware_tags", info.hardware_tags),
        decode_curve=_decode_curve("info.decode_curve", info.decode_curve),
        url=_http_url("info.url", info.url),
        **{**sizes, "tensor_parallel": max(1, info.tensor_parallel)},
    )
    return ev.EngineRegistered(request_id, lease_id, spec)


def _http_url(name: str, url: str) -> str:
    """Return a checked HTTP URL, which may be empty."""
    require(
        not url or url.startswith(("http://", "https://")),
        name,
        "must begin with http:// or https://",
    )
    return at_most(name, url, LONGEST_URL_CHARS)


def lease_renewed(request: pb.RenewEngineLeaseRequest) -> ev.LeaseRenewed:
    lease_id, engine_id = (
        identifier("lease_id", request.lease_id),
        identifier("engine_id", request.engine_id),
    )
    given = request.HasField("decode_curve")
    curve = _decode_curve("decode_curve", request.decode_curve) if given else None
    if not request.HasField("load"):
        return ev.LeaseRenewed(lease_id, engine_id, decode_curve=curve)
    for name in _MEASURES:
        non_negative(f"load.{name}", getattr(request.load, name))
    measured_s = require_timestamp("load.measured_at", request.load.measured_at)
    load = EngineLoad(**fields_of(request.load, _LOAD), measured_s=measured_s)
    return ev.LeaseRenewed(lease_id, engine_id, load, curve)


def engine_deregistered(request: pb.DeregisterEngineRequest) -> ev.EngineDeregistered:
    return ev.EngineDeregistered(
        identifier("lease_id", request.lease_id), identifier("engine_id", request.engine_id)
    )


def ticket_message(ticket: TicketRecord) -> Ticket:
    return Ticket(
        ticket_id=ticket.ticket_id,
        trajectory_id=ticket.trajectory_id,
        turn=ticket.turn,
        engine_id=ticket.engine_id,
        engine_address=ticket.engine_address,
        priority=ticket.priority,
        cache_salt=ticket.cache_salt,
        weight_version=ticket.weight_version,
        revision=ticket.revision,
        expires_at=timestamp(ticket.expires_s),
        preemptible=ticket.preemptible,
        job=ticket.job,
        job_weight=ticket.weight,
        waited=duration(ticket.waited_s),
    )


def job_use(use: JobUse) -> pb.JobUse:
    return pb.JobUse(**fields_of(use, _JOB_USE))


def trajectory_message(record: TrajectoryRecord) -> pb.Trajectory:
    """Return a trajectory without its ledger."""
    message = pb.Trajectory(
        **fields_of(record, (*IDENTITY, "job_id", *_PROGRESS)),
        state=number_of(record.state, pb.TrajectoryState),
        opened_at=timestamp(record.opened_s),
    )
    if record.prediction is not None:
        message.predicted_remaining_tokens.CopyFrom(quantiles(record.prediction.remaining_tokens))
        message.prediction_model_version = record.prediction.model_version
    if record.closed_s is not None:
        message.closed_at.CopyFrom(timestamp(record.closed_s))
    return message


def ledger_message(record: TrajectoryRecord, ledger: Ledger, now: float) -> pb.Ledger:
    """Return the ledger of a trajectory, which may be open, at `now`."""
    parts = {name.removesuffix("_s"): duration(getattr(ledger, name)) for name in LEDGER_PARTS}
    ended_s = record.closed_s if record.closed_s is not None else now
    return pb.Ledger(**parts, wall=duration(ended_s - record.opened_s))


def history_message(
    record: TrajectoryRecord, history: tuple[Iterable[Decision], Iterable[Step]]
) -> dict[str, Any]:
    """Return the fields of GetTrajectoryResponse that report decisions and steps."""
    decisions, steps = history
    return {
        "decisions": [
            pb.Decision(
                **fields_of(each, ("kind", "engine_id", "reason")),
                since_opening=duration(each.now_s - record.opened_s),
            )
            for each in decisions
        ],
        "steps": [
            pb.StepHistory(
                **fields_of(each, ("turn", "context_tokens", "output_tokens")),
                tool_time=duration(each.tool_s),
            )
            for each in steps
        ],
    }


def policy_message(policy: Policy) -> pb.Policy:
    choices = {
        name: number_of(getattr(policy, name), message_enum)
        for name, (_, message_enum) in _CHOICES.items()
    }
    return pb.Policy(**choices, **fields_of(policy, _SWITCHES))


def registered_engine(record: EngineRecord, trajectories: int) -> pb.RegisteredEngine:
    """Return an engine with its registration. trajectories: the number of open ones on the
    engine."""
    load = record.load
    return pb.RegisteredEngine(
        info=engine_info(record.spec),
        lease_expires_at=timestamp(record.lease_expires_s),
        trajectories=trajectories,
        draining=record.draining,
        load=engine_pb2.Load(**fields_of(load, _LOAD), measured_at=timestamp(load.measured_s))
        if load
        else None,
    )


def engine_info(spec: EngineSpec) -> engine_pb2.EngineInfo:
    return engine_pb2.EngineInfo(
        **fields_of(spec, (*_DECLARED, *_SIZES)),
        kv_transfer=number_of(spec.kv_transfer, engine_pb2.KvTransfer),
        decode_curve=curve_message(spec.decode_curve),
    )


def curve_message(curve: DecodeCurve) -> engine_pb2.DecodeCurve:
    return engine_pb2.DecodeCurve(**fields_of(curve, _CURVE))


def quantiles(estimate: Estimate) -> Quantiles:
    return Quantiles(p10=estimate.p10, p50=estimate.p50, p90=estimate.p90)


def fields_of(source: Any, names: Iterable[str]) -> dict[str, Any]:
    return {name: getattr(source, name) for name in names}


def _decode_curve(field: str, message: engine_pb2.DecodeCurve) -> DecodeCurve:
    """Return a checked decode curve, with default figures for those that are not known."""
    figures = {name: non_negative(f"{field}.{name}", getattr(message, name)) for name in _CURVE}
    prefill = figures["prefill_tokens_per_s"] or DEFAULT_PREFILL_TOKENS_PER_S
    known = figures if message.base_s + message.per_sequence_s > 0 else {}
    return DecodeCurve(**{**known, "prefill_tokens_per_s": prefill})


def _trajectory_id(value: str) -> str:
    return at_most("trajectory_id", identifier("trajectory_id", value), LONGEST_TRAJECTORY_ID_CHARS)


def _tags(field: str, tags: Iterable[str]) -> tuple[str, ...]:
    return _identifiers(field, tags, MOST_HARDWARE_TAGS)


def _identifiers(field: str, given: Iterable[str], most: int) -> tuple[str, ...]:
    values = tuple(identifier(f"{field}[{index}]", value) for index, value in enumerate(given))
    require(len(values) <= most, field, f"must be at most {most}, are {len(values)}")
    return values
