"""The scheduler's own calls to other services: actions to requests, responses to events.

Facts to events and announcements to facts; the other half of `convert.py`.

Messages of sidecars to core values and back: engines, their curves, leases and loads. Requests were checked before
(`checks.py`)."""

from collections.abc import Iterable, Sequence

import numpy as np
from treadle.common.v1.estimate_pb2 import Quantiles
from treadle.engine.v1 import engine_pb2
from treadle.migrator.v1 import migrator_pb2
from treadle.placement.v1 import placement_pb2
from treadle.predictor.v1 import predictor_pb2
from treadle.scheduler.v1 import scheduler_pb2 as pb
from treadle.telemetry.v1 import facts_pb2
from treadle_core.actions import (
    AbortStep,
    AnnounceClosed,
    AnnounceEngineJoined,
    AnnounceEngineLost,
    AnnounceOpened,
    AnnouncePredicted,
    AskPlan,
    AskPrediction,
    ReleasePrefix,
    StartMigration,
)
from treadle_core.events import (
    EngineRegistered,
    Event,
    LeaseRenewed,
    MoveAccepted,
    MoveEnded,
    PlanArrived,
    PredictionArrived,
    StepFinished,
    StepPreempted,
    ToolFinished,
    ToolStarted,
    WeightsUpdated,
)
from treadle_core.model import (
    DEFAULT_PREFILL_TOKENS_PER_S,
    DecodeCurve,
    EngineLoad,
    EngineRecord,
    EngineSpec,
    Estimate,
    KvTransfer,
)
from treadle_core.placing.costs import CostModel
from treadle_runtime.facts import make_fact

from treadle_scheduler.convert import OUTCOME_NUMBERS, duration, quantiles, seconds, timestamp

KV_TRANSFERS = {KvTransfer.PREFILL: engine_pb2.KV_TRANSFER_PREFILL, KvTransfer.STORAGE: engine_pb2.KV_TRANSFER_STORAGE}


def engine_registered(request: pb.RegisterEngineRequest, lease_id: str) -> EngineRegistered:
    """The event of a checked request; the lease is the caller's to mint."""
    return EngineRegistered(request.request_id, lease_id, engine_spec(request.info))


def lease_renewed(request: pb.RenewEngineLeaseRequest) -> LeaseRenewed:
    """The event of a checked request."""
    load = engine_load(request.load) if request.HasField("load") else None
    return LeaseRenewed(request.lease_id, request.engine_id, load)


def engine_spec(info: engine_pb2.EngineInfo) -> EngineSpec:
    """What a sidecar declares. A curve without speeds takes the default ones."""
    curve = info.decode_curve
    declared = curve.base_s + curve.per_sequence_s > 0
    prefill = curve.prefill_tokens_per_s or DEFAULT_PREFILL_TOKENS_PER_S
    return EngineSpec(
        engine_id=info.engine_id,
        address=info.address,
        model=info.model,
        weight_version=info.weight_version,
        slot_limit=info.slot_limit,
        kv_tokens_capacity=info.kv_tokens_capacity,
        max_context_tokens=info.max_context_tokens,
        tensor_parallel=max(1, info.tensor_parallel),
        kv_transfer=KvTransfer.STORAGE if info.kv_transfer == engine_pb2.KV_TRANSFER_STORAGE else KvTransfer.PREFILL,
        kv_bytes_per_token=info.kv_bytes_per_token,
        hardware_tags=tuple(info.hardware_tags),
        decode_curve=DecodeCurve(curve.base_s, curve.per_sequence_s, curve.per_kv_token_s, prefill)
        if declared
        else DecodeCurve(prefill_tokens_per_s=prefill),
    )


def curve_message(curve: DecodeCurve) -> engine_pb2.DecodeCurve:
    """A curve as a message."""
    return engine_pb2.DecodeCurve(
        base_s=curve.base_s,
        per_sequence_s=curve.per_sequence_s,
        per_kv_token_s=curve.per_kv_token_s,
        prefill_tokens_per_s=curve.prefill_tokens_per_s,
    )


def engine_info(spec: EngineSpec) -> engine_pb2.EngineInfo:
    """What an engine is, as a message."""
    return engine_pb2.EngineInfo(
        engine_id=spec.engine_id,
        address=spec.address,
        model=spec.model,
        weight_version=spec.weight_version,
        slot_limit=spec.slot_limit,
        kv_tokens_capacity=spec.kv_tokens_capacity,
        max_context_tokens=spec.max_context_tokens,
        tensor_parallel=spec.tensor_parallel,
        kv_transfer=KV_TRANSFERS[spec.kv_transfer],
        kv_bytes_per_token=spec.kv_bytes_per_token,
        hardware_tags=spec.hardware_tags,
        decode_curve=curve_message(spec.decode_curve),
    )


def engine_load(load: engine_pb2.Load) -> EngineLoad:
    """What a sidecar measured."""
    return EngineLoad(
        running_steps=load.running_steps,
        waiting_steps=load.waiting_steps,
        slot_limit=load.slot_limit,
        kv_tokens_used=load.kv_tokens_used,
        kv_tokens_capacity=load.kv_tokens_capacity,
        decode_tokens_per_s=load.decode_tokens_per_s,
        paused=load.paused,
        weight_version=load.weight_version,
        oldest_wait_s=load.oldest_wait_s,
        measured_s=seconds(load.measured_at),
        engine_healthy=load.engine_healthy,
    )


def load_message(load: EngineLoad) -> engine_pb2.Load:
    """A load as a message."""
    return engine_pb2.Load(
        running_steps=load.running_steps,
        waiting_steps=load.waiting_steps,
        slot_limit=load.slot_limit,
        kv_tokens_used=load.kv_tokens_used,
        kv_tokens_capacity=load.kv_tokens_capacity,
        decode_tokens_per_s=load.decode_tokens_per_s,
        paused=load.paused,
        weight_version=load.weight_version,
        oldest_wait_s=load.oldest_wait_s,
        measured_at=timestamp(load.measured_s),
        engine_healthy=load.engine_healthy,
    )


def registered_engine(record: EngineRecord, trajectories: int) -> pb.RegisteredEngine:
    """An engine of the registry as a message; `trajectories` are the open ones on it."""
    message = pb.RegisteredEngine(
        info=engine_info(record.spec),
        lease_expires_at=timestamp(record.lease_expires_s),
        trajectories=trajectories,
    )
    if record.load is not None:
        message.load.CopyFrom(load_message(record.load))
    return message


COST_MODELS = {
    CostModel.GROUP_SIZE: placement_pb2.COST_MODEL_GROUP_SIZE,
    CostModel.LINEAR_INTEGRAL: placement_pb2.COST_MODEL_LINEAR_INTEGRAL,
}


def predictions_request(asks: Iterable[AskPrediction]) -> predictor_pb2.BatchPredictRemainingRequest:
    """Many questions at once."""
    return predictor_pb2.BatchPredictRemainingRequest(
        queries=[
            predictor_pb2.Query(
                trajectory_id=ask.trajectory_id,
                prompt_id=ask.prompt_id,
                sample=ask.sample,
                turn=ask.turn,
                gen_tokens=ask.gen_tokens,
                context_tokens=ask.context_tokens,
                prompt_tokens=ask.prompt_tokens,
                max_total_tokens=ask.max_total_tokens,
            )
            for ask in asks
        ]
    )


def predictions_arrived(
    asks: Sequence[AskPrediction], response: predictor_pb2.BatchPredictRemainingResponse
) -> list[PredictionArrived]:
    """The answers, in the order of the questions. Raises ValueError where they do not fit the questions or are no
    quantiles."""
    return [
        PredictionArrived(
            trajectory_id=ask.trajectory_id,
            turn=ask.turn,
            gen_tokens=ask.gen_tokens,
            remaining_tokens=_estimate(prediction.remaining_tokens),
            remaining_turns=_estimate(prediction.remaining_turns) if prediction.HasField("remaining_turns") else None,
            model_version=prediction.model_version,
            learned=prediction.estimator == predictor_pb2.ESTIMATOR_MODEL,
        )
        for ask, prediction in zip(asks, response.predictions, strict=True)
    ]


def plan_request(ask: AskPlan) -> placement_pb2.PlanPlacementRequest:
    """The question where everything should be, under the cost model that the core asks for."""
    engine_ids = [*(engine.engine_id for engine in ask.engines), ""]  # -1 is the last: on none of them
    work = ask.work
    room_tokens = np.where(np.isfinite(work.room_tokens), work.room_tokens, 0.0)
    columns = (
        work.remaining_tokens.tolist(),
        work.context_tokens.tolist(),
        work.current.tolist(),
        work.log_sigma.tolist(),
        room_tokens.tolist(),
    )
    return placement_pb2.PlanPlacementRequest(
        trajectories=[
            placement_pb2.PlacedTrajectory(
                trajectory_id=trajectory_id,
                remaining_tokens=remaining_tokens,
                context_tokens=int(context_tokens),
                current_engine_id=engine_ids[current],
                log_sigma=log_sigma,
                room_tokens=room,
            )
            for trajectory_id, remaining_tokens, context_tokens, current, log_sigma, room in zip(
                work.trajectory_ids, *columns, strict=True
            )
        ],
        engines=[
            placement_pb2.PlacementEngine(
                engine_id=engine.engine_id,
                slot_limit=engine.slot_limit,
                kv_tokens_capacity=engine.kv_tokens_capacity,
                tensor_parallel=engine.tensor_parallel,
                decode_curve=curve_message(engine.decode_curve),
            )
            for engine in ask.engines
        ],
        cost_model=COST_MODELS[ask.cost_model],
    )


def plan_arrived(ask: AskPlan, response: placement_pb2.PlanPlacementResponse) -> PlanArrived:
    """The answer."""
    return PlanArrived(ask.plan_id, tuple((group.engine_id, tuple(group.trajectory_ids)) for group in response.groups))


def migration_request(action: StartMigration) -> migrator_pb2.StartMigrationRequest:
    """The wish to move."""
    return migrator_pb2.StartMigrationRequest(
        request_id=action.move_id,
        trajectory_id=action.trajectory_id,
        source=_endpoint(action.source),
        target=_endpoint(action.target),
        expected_revision=action.expected_revision,
        remaining_tokens=action.remaining_tokens,
        cache_salt=action.cache_salt,
        allow_prefill=action.allow_prefill,
        give_up_after=duration(action.give_up_after_s),
    )


def move_accepted(action: StartMigration, response: migrator_pb2.StartMigrationResponse) -> MoveAccepted:
    """The migrator's answer."""
    return MoveAccepted(action.trajectory_id, action.move_id, response.migration.migration_id)


def cancel_request(migration_id: str) -> migrator_pb2.CancelMigrationRequest:
    """Calling a move off; the same request at each try."""
    return migrator_pb2.CancelMigrationRequest(request_id=f"cancel.{migration_id}", migration_id=migration_id)


def reprioritize_request(changes: Iterable[tuple[str, float]], request_id: str) -> engine_pb2.ReprioritizeRequest:
    """New priorities for a sidecar's queue."""
    return engine_pb2.ReprioritizeRequest(
        request_id=request_id,
        changes=[engine_pb2.PriorityChange(ticket_id=ticket_id, priority=priority) for ticket_id, priority in changes],
    )


def abort_request(action: AbortStep) -> engine_pb2.AbortRequest:
    """Stopping a step that nobody reads; the same request at each try."""
    return engine_pb2.AbortRequest(request_id=f"abort.{action.ticket_id}", ticket_id=action.ticket_id)


def release_request(action: ReleasePrefix, request_id: str) -> engine_pb2.ReleasePrefixRequest:
    """Letting a context go."""
    return engine_pb2.ReleasePrefixRequest(request_id=request_id, trajectory_id=action.trajectory_id)


def _endpoint(spec: EngineSpec) -> migrator_pb2.Endpoint:
    return migrator_pb2.Endpoint(engine_id=spec.engine_id, address=spec.address)


def _estimate(message: Quantiles) -> Estimate:
    return Estimate(message.p10, message.p50, message.p90)


# The kinds that the scheduler listens to.
HEARD = (
    "step_preempted",
    "step_finished",
    "tool_started",
    "tool_finished",
    "migration_ended",
    "weights_updated",
)

SOURCE = "scheduler"

Announcement = AnnounceOpened | AnnounceClosed | AnnouncePredicted | AnnounceEngineJoined | AnnounceEngineLost


def event_of(fact: facts_pb2.Fact) -> Event | None:
    """The event that a fact is, or None for a kind that is not listened to."""
    match fact.WhichOneof("fact"):
        case "step_preempted":
            step = fact.step_preempted.step
            return StepPreempted(step.trajectory_id, step.ticket_id, fact.step_preempted.output_tokens)
        case "step_finished":
            finished = fact.step_finished
            return StepFinished(
                trajectory_id=finished.step.trajectory_id,
                ticket_id=finished.step.ticket_id,
                turn=finished.step.turn,
                context_tokens=finished.context_tokens,
                output_tokens=max(0, finished.output_tokens),
                aborted=finished.reason == engine_pb2.FINISH_REASON_ABORTED,
            )
        case "tool_started":
            return ToolStarted(fact.tool_started.trajectory_id, max(0.0, seconds(fact.tool_started.expected_time)))
        case "tool_finished":
            return ToolFinished(fact.tool_finished.trajectory_id)
        case "migration_ended":
            ended = fact.migration_ended
            return MoveEnded(
                trajectory_id=ended.trajectory_id,
                migration_id=ended.migration_id,
                moved=ended.moved,
                reason=ended.failure_reason,
            )
        case "weights_updated":
            return WeightsUpdated(fact.weights_updated.engine_id, fact.weights_updated.weight_version)
        case _:
            return None


def fact_of(action: Announcement) -> facts_pb2.Fact:
    """The fact that announces."""
    match action:
        case AnnounceOpened(record):
            opened = facts_pb2.TrajectoryOpened(
                trajectory_id=record.trajectory_id,
                rollout_id=record.rollout_id,
                prompt_id=record.prompt_id,
                sample=record.sample,
                prompt_tokens=record.prompt_tokens,
            )
            return make_fact(SOURCE, trajectory_opened=opened)
        case AnnounceClosed(record, outcome):
            closed = facts_pb2.TrajectoryClosed(
                trajectory_id=record.trajectory_id,
                rollout_id=record.rollout_id,
                prompt_id=record.prompt_id,
                sample=record.sample,
                outcome=OUTCOME_NUMBERS[outcome],
                gen_tokens=record.gen_tokens,
                turns=record.next_turn,
                prompt_tokens=record.prompt_tokens,
            )
            fact = make_fact(SOURCE, trajectory_closed=closed)
            # The same at each try, so that consumers drop what they have heard already.
            fact.fact_id = f"closed.{record.trajectory_id}.{record.open_request_id}"
            return fact
        case AnnouncePredicted(record):
            predicted = facts_pb2.TrajectoryPredicted(trajectory_id=record.trajectory_id)
            if record.prediction is not None:
                predicted.turn = record.prediction.turn
                predicted.remaining_tokens.CopyFrom(quantiles(record.prediction.remaining_tokens))
                predicted.model_version = record.prediction.model_version
                predicted.learned = record.prediction.learned
            return make_fact(SOURCE, trajectory_predicted=predicted)
        case AnnounceEngineJoined(spec):
            return make_fact(SOURCE, engine_joined=facts_pb2.EngineJoined(info=engine_info(spec)))
        case AnnounceEngineLost(engine_id, reason):
            return make_fact(SOURCE, engine_lost=facts_pb2.EngineLost(engine_id=engine_id, reason=reason))
