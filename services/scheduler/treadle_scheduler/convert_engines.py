"""Convert engines, jobs, policies and weights; and the requests for plans, moves and other commands
that the scheduler sends to other services, with their answers.

A function that takes a request raises InvalidArgument naming the first field that is wrong.
"""

import enum
from collections.abc import Iterable
from typing import Any

import grpc.aio
import numpy as np
import numpy.typing as npt
from treadle.engine.v1 import engine_pb2
from treadle.migrator.v1 import migrator_pb2
from treadle.placement.v1 import placement_pb2
from treadle.scheduler.v1 import scheduler_pb2 as pb
from treadle.telemetry.v1 import facts_pb2
from treadle_core import actions as act
from treadle_core import events as ev
from treadle_core.model import (
    DEFAULT_PREFILL_TOKENS_PER_S,
    DecodeCurve,
    EngineLoad,
    EngineRecord,
    EngineSpec,
    JobUse,
    KvTransfer,
    Objective,
    Ordering,
    PlacementRule,
    Policy,
    WeightsRecord,
)
from treadle_runtime.facts import make_fact
from treadle_runtime.fields import (
    at_most,
    duration,
    endpoint,
    finite,
    identifier,
    like,
    minted,
    non_negative,
    number_of,
    optional_identifier,
    positive,
    require,
    require_timestamp,
    timestamp,
    value_of,
)

from treadle_scheduler.convert import (
    CURVE,
    SIZES,
    SOURCE,
    curve_message,
    engine_info,
    fields_of,
    identifiers,
    tags_of,
    trajectory_id_of,
)

LONGEST_URL_CHARS = 2048
LEAST_WEIGHT, LARGEST_WEIGHT = 1e-6, 1e6  # weight of a job; only ratios count
MOST_ROLLOUTS = 1000  # rollouts of a job in progress at once
_COUNTS = ("running_steps", "waiting_steps", "slot_limit", "kv_tokens_used", "kv_tokens_capacity")
_MEASURES = (*_COUNTS, "decode_tokens_per_s", "oldest_wait_s")
_LOAD = (*_MEASURES, "paused", "weight_version", "engine_healthy", "clock_ahead_s")
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
ENGINE = ("engine_id", "slot_limit", "kv_tokens_capacity", "tensor_parallel")


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
    rollout_ids = identifiers("rollouts.rollout_ids", request.rollouts.rollout_ids, MOST_ROLLOUTS)
    return ev.JobRenewed(
        identifier("job_id", request.job_id), rollout_ids if request.HasField("rollouts") else None
    )


def job_closed(request: pb.CloseJobRequest) -> ev.JobClosed:
    identifier("request_id", request.request_id)
    return ev.JobClosed(identifier("job_id", request.job_id))


def switch_requested(request: pb.SwitchEngineRequest) -> ev.SwitchRequested:
    return ev.SwitchRequested(
        request_id=identifier("request_id", request.request_id),
        trajectory_id=trajectory_id_of(request.trajectory_id),
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
    sizes = {name: non_negative(f"info.{name}", getattr(info, name)) for name in SIZES}
    spec = EngineSpec(
        engine_id=info.engine_id,
        address=endpoint("info.address", info.address),
        model=info.model,
        weight_version=info.weight_version,
        slot_limit=positive("info.slot_limit", info.slot_limit),
        kv_transfer=KvTransfer.STORAGE
        if info.kv_transfer == engine_pb2.KV_TRANSFER_STORAGE
        else KvTransfer.PREFILL,
        hardware_tags=tags_of("info.hardware_tags", info.hardware_tags),
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
    finite("load.clock_ahead_s", request.load.clock_ahead_s)
    measured_s = require_timestamp("load.measured_at", request.load.measured_at)
    load = EngineLoad(**fields_of(request.load, _LOAD), measured_s=measured_s)
    return ev.LeaseRenewed(lease_id, engine_id, load, curve)


def engine_deregistered(request: pb.DeregisterEngineRequest) -> ev.EngineDeregistered:
    return ev.EngineDeregistered(
        identifier("lease_id", request.lease_id), identifier("engine_id", request.engine_id)
    )


def job_use(use: JobUse) -> pb.JobUse:
    return pb.JobUse(**fields_of(use, _JOB_USE))


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


def _decode_curve(field: str, message: engine_pb2.DecodeCurve) -> DecodeCurve:
    """Return a checked decode curve, with default figures for those that are not known."""
    figures = {name: non_negative(f"{field}.{name}", getattr(message, name)) for name in CURVE}
    prefill = figures["prefill_tokens_per_s"] or DEFAULT_PREFILL_TOKENS_PER_S
    known = figures if message.base_s + message.per_sequence_s > 0 else {}
    return DecodeCurve(**{**known, "prefill_tokens_per_s": prefill})


def plan_request(ask: act.AskPlan) -> placement_pb2.PlanPlacementRequest:
    work = ask.work
    return placement_pb2.PlanPlacementRequest(
        columns=placement_pb2.PlacedColumns(
            remaining_tokens_float64=_packed(work.remaining_tokens, "<f8"),
            context_tokens_float64=_packed(work.context_tokens, "<f8"),
            current_engine_int32=_packed(work.current, "<i4"),
            log_sigma_float64=_packed(work.log_sigma, "<f8"),
            room_tokens_float64=_packed(
                np.where(np.isfinite(work.room_tokens), work.room_tokens, 0.0), "<f8"
            ),
            remaining_tool_s_float64=_packed(work.tool_s, "<f8"),
            remaining_observed_tokens_float64=_packed(work.observed_tokens, "<f8"),
            prompt_int32=_packed(work.prompts, "<i4"),
            started_uint8=_packed(work.started, "u1"),
            unread_uint8=_packed(work.started & ~work.read, "u1"),
        ),
        engines=[
            placement_pb2.PlacementEngine(
                **fields_of(engine, ENGINE), decode_curve=curve_message(engine.decode_curve)
            )
            for engine in ask.engines
        ],
        cost_model=number_of(ask.cost_model, placement_pb2.CostModel),
    )


def _packed(column: npt.NDArray[Any], dtype: str) -> bytes:
    return column.astype(dtype).tobytes()


def plan_arrived(ask: act.AskPlan, response: placement_pb2.PlanPlacementResponse) -> ev.PlanArrived:
    """Return the event of a plan. Raises ValueError for a plan of other trajectories or engines."""
    engine_of = np.frombuffer(response.engine_int32, "<i4").astype(np.int64)
    if len(engine_of) != len(ask.work) or not np.all(
        (engine_of >= 0) & (engine_of < len(ask.engines))
    ):
        raise ValueError(
            f"a plan of {len(engine_of)} trajectories for {len(ask.work)}, or of engines without "
            "a number"
        )
    return ev.PlanArrived(ask.plan_id, engine_of)


def plan_fact(response: placement_pb2.PlanPlacementResponse) -> facts_pb2.Fact:
    """Return the fact of a plan that `plan_arrived` has accepted."""
    wanted = np.bincount(
        np.frombuffer(response.engine_int32, "<i4"), minlength=len(response.groups)
    ).tolist()
    engines = [
        facts_pb2.PlanMade.Engine(
            engine_id=each.engine_id, trajectories=count, predicted_time=each.predicted_time
        )
        for each, count in zip(response.groups, wanted, strict=True)
    ]
    return make_fact(
        SOURCE,
        plan_made=facts_pb2.PlanMade(
            engines=engines,
            trajectories=sum(wanted),
            predicted_makespan=response.predicted_makespan,
            lower_bound=response.lower_bound,
            solve_time=response.solve_time,
        ),
    )


def migration_request(action: act.StartMigration) -> migrator_pb2.StartMigrationRequest:
    return migrator_pb2.StartMigrationRequest(
        request_id=action.move_id,
        trajectory_id=action.trajectory_id,
        source=_endpoint(action.source),
        target=_endpoint(action.target),
        expected_revision=action.expected_revision,
        remaining_tokens=action.remaining_tokens,
        cache_salt=like(action.trajectory_id, action.cache_salt),
        allow_prefill=action.allow_prefill,
        give_up_after=duration(action.give_up_after_s),
    )


def move_accepted(
    action: act.StartMigration, response: migrator_pb2.StartMigrationResponse
) -> ev.MoveAccepted:
    return ev.MoveAccepted(action.trajectory_id, action.move_id, response.migration.migration_id)


def cancel_request(migration_id: str) -> migrator_pb2.CancelMigrationRequest:
    """Return the request to cancel a migration, the same at each try."""
    return migrator_pb2.CancelMigrationRequest(
        request_id=f"cancel.{migration_id}", migration_id=migration_id
    )


def reprioritize_request(
    changes: Iterable[tuple[str, float]], request_id: str
) -> engine_pb2.ReprioritizeRequest:
    return engine_pb2.ReprioritizeRequest(
        request_id=request_id,
        changes=[
            engine_pb2.PriorityChange(ticket_id=ticket_id, priority=priority)
            for ticket_id, priority in changes
        ],
    )


def abort_request(action: act.AbortStep) -> engine_pb2.AbortRequest:
    """Return the request to abort a step, the same at each try."""
    return engine_pb2.AbortRequest(
        request_id=f"abort.{action.ticket_id}", ticket_id=action.ticket_id
    )


def release_request(action: act.ReleasePrefix, request_id: str) -> engine_pb2.ReleasePrefixRequest:
    return engine_pb2.ReleasePrefixRequest(
        request_id=request_id, trajectory_id=action.trajectory_id
    )


def update_request(action: act.LoadWeights, request_id: str) -> engine_pb2.UpdateWeightsRequest:
    return engine_pb2.UpdateWeightsRequest(
        request_id=request_id, weight_version=action.weight_version, model_path=action.model_path
    )


def load_failed(action: act.LoadWeights, error: grpc.aio.AioRpcError) -> ev.LoadFailed:
    """Return the event of a failed load. An engine that refuses the weights does so again; any
    other error may pass."""
    refused = error.code() is grpc.StatusCode.FAILED_PRECONDITION
    return ev.LoadFailed(
        action.engine_id, action.weight_version, refused, error.details() or error.code().name
    )


def _endpoint(spec: EngineSpec) -> migrator_pb2.Endpoint:
    return migrator_pb2.Endpoint(engine_id=spec.engine_id, address=spec.address)
