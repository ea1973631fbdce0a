"""Convert the scheduler's actions to requests of other services and facts, and their answers and
facts to events."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import grpc.aio
import numpy as np
import numpy.typing as npt
from treadle.common.v1.estimate_pb2 import Quantiles
from treadle.engine.v1 import engine_pb2
from treadle.migrator.v1 import migrator_pb2
from treadle.placement.v1 import placement_pb2
from treadle.predictor.v1 import predictor_pb2
from treadle.scheduler.v1 import scheduler_pb2
from treadle.telemetry.v1 import facts_pb2
from treadle_core import actions as act
from treadle_core import events as ev
from treadle_core.model import EngineSpec, Estimate, Prediction, StepTimes
from treadle_runtime.facts import make_fact
from treadle_runtime.fields import duration, like, number_of, seconds

from treadle_scheduler.convert import (
    IDENTITY,
    curve_message,
    engine_info,
    fields_of,
    ledger_message,
    quantiles,
)

SOURCE = "scheduler"

# Kinds of facts that become events.
SUBSCRIBED_KINDS = (
    "step_preempted",
    "step_finished",
    "tool_started",
    "tool_finished",
    "migration_ended",
    "weights_updated",
    "group_settled",
)

# Fields that a prediction request of the core and its message have under the same name.
QUERY = ("trajectory_id", "prompt_id", "sample", "gen_tokens", "prompt_tokens", "max_total_tokens")
ENGINE = ("engine_id", "slot_limit", "kv_tokens_capacity", "tensor_parallel")

Announcement = (
    act.AnnounceOpened
    | act.AnnounceClosed
    | act.AnnouncePredicted
    | act.AnnounceEngineJoined
    | act.AnnounceEngineLost
)


def predictions_request(
    asks: Iterable[act.AskPrediction], traceparent: Callable[[str], str]
) -> predictor_pb2.BatchPredictRemainingRequest:
    """Return the request for several predictions. traceparent: from a trajectory's id to its trace,
    or an empty text."""
    return predictor_pb2.BatchPredictRemainingRequest(
        queries=[
            predictor_pb2.Query(
                **fields_of(record, QUERY),
                turn=record.next_turn,
                context_tokens=record.context_tokens or record.prompt_tokens,
                tool_time=duration(record.tools_s),
                traceparent=traceparent(record.trajectory_id),
            )
            for record in (ask.record for ask in asks)
        ]
    )


def predictions_arrived(
    asks: Sequence[act.AskPrediction], response: predictor_pb2.BatchPredictRemainingResponse
) -> list[ev.PredictionArrived]:
    """Return the events of the answers, in the order of the requests. Raises ValueError where their
    numbers differ, or one is no quantiles."""
    return [
        ev.PredictionArrived(
            ask.record.trajectory_id,
            Prediction(
                turn=ask.record.next_turn,
                gen_tokens=ask.record.gen_tokens,
                remaining_tokens=_estimate(answer.remaining_tokens),
                remaining_turns=_estimate(answer.remaining_turns)
                if answer.HasField("remaining_turns")
                else None,
                remaining_tool_s=_estimate(answer.remaining_tool_s)
                if answer.HasField("remaining_tool_s")
                else None,
                remaining_observed_tokens=(
                    _estimate(answer.remaining_observed_tokens)
                    if answer.HasField("remaining_observed_tokens")
                    else None
                ),
                model_version=answer.model_version,
                learned=answer.estimator == predictor_pb2.ESTIMATOR_MODEL,
            ),
        )
        for ask, answer in zip(asks, response.predictions, strict=True)
    ]


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


def event_of(fact: facts_pb2.Fact) -> ev.Event | None:
    """Return the event that a fact becomes; None for a kind that is not subscribed to."""
    match fact.WhichOneof("fact"):
        case "step_preempted":
            preempted = fact.step_preempted
            step, by = preempted.step, preempted.by_ticket_id
            return ev.StepPreempted(step.trajectory_id, step.ticket_id, preempted.output_tokens, by)
        case "step_finished":
            finished = fact.step_finished
            return ev.StepFinished(
                trajectory_id=finished.step.trajectory_id,
                ticket_id=finished.step.ticket_id,
                turn=finished.step.turn,
                context_tokens=finished.context_tokens,
                output_tokens=max(0, finished.output_tokens),
                times=_step_times(finished.timing),
            )
        case "tool_started":
            return ev.ToolStarted(
                fact.tool_started.trajectory_id, max(0.0, seconds(fact.tool_started.expected_time))
            )
        case "tool_finished":
            return ev.ToolFinished(fact.tool_finished.trajectory_id)
        case "migration_ended":
            ended = fact.migration_ended
            # A move that was given up before it began had waited for its engines, which does not
            # show their speed.
            measured = ended.HasField("started_at") and (
                ended.moved or ended.failure_reason == "GAVE_UP"
            )
            return ev.MoveEnded(
                trajectory_id=ended.trajectory_id,
                migration_id=ended.migration_id,
                moved=ended.moved,
                reason=ended.failure_reason,
                took_s=max(0.0, seconds(ended.elapsed)) if measured else 0.0,
            )
        case "weights_updated":
            return ev.WeightsUpdated(
                fact.weights_updated.engine_id, fact.weights_updated.weight_version
            )
        case "group_settled":
            settled = fact.group_settled
            return ev.GroupSettled(settled.rollout_id, settled.prompt_id, settled.samples)
        case _:
            return None


def fact_of(action: Announcement) -> facts_pb2.Fact:
    """Return the fact to publish for an announcement."""
    match action:
        case act.AnnounceOpened(record):
            return make_fact(
                SOURCE, trajectory_opened=facts_pb2.TrajectoryOpened(**fields_of(record, IDENTITY))
            )
        case act.AnnounceClosed(record, outcome):
            closed = facts_pb2.TrajectoryClosed(
                **fields_of(record, IDENTITY),
                outcome=number_of(outcome, scheduler_pb2.Outcome),
                gen_tokens=record.gen_tokens,
                turns=record.next_turn,
                observed_tokens=record.observed_tokens,
                tool_time=duration(record.tools_s),
                ledger=ledger_message(record, record.ledger, record.touched_s),
            )
            fact = make_fact(SOURCE, trajectory_closed=closed)
            # The id is the same at each try, so that consumers drop a repeat.
            fact.fact_id = f"closed.{record.trajectory_id}.{record.open_request_id}"
            return fact
        case act.AnnouncePredicted(record):
            predicted = facts_pb2.TrajectoryPredicted(trajectory_id=record.trajectory_id)
            if record.prediction is not None:
                predicted.turn = record.prediction.turn
                predicted.remaining_tokens.CopyFrom(quantiles(record.prediction.remaining_tokens))
                predicted.model_version = record.prediction.model_version
                predicted.learned = record.prediction.learned
            return make_fact(SOURCE, trajectory_predicted=predicted)
        case act.AnnounceEngineJoined(spec):
            return make_fact(SOURCE, engine_joined=facts_pb2.EngineJoined(info=engine_info(spec)))
        case act.AnnounceEngineLost(engine_id, reason):
            return make_fact(
                SOURCE, engine_lost=facts_pb2.EngineLost(engine_id=engine_id, reason=reason)
            )


def _step_times(timing: engine_pb2.StepTiming) -> StepTimes:
    """Return the parts of a step's time, of which `queue` has all waits."""
    waits = seconds(timing.preempted) + seconds(timing.weights)
    return StepTimes(
        queue_s=max(0.0, seconds(timing.queue) - waits),
        prefill_s=seconds(timing.prefill),
        decode_s=seconds(timing.decode),
        preempted_s=seconds(timing.preempted),
        weights_s=seconds(timing.weights),
    )


def _endpoint(spec: EngineSpec) -> migrator_pb2.Endpoint:
    return migrator_pb2.Endpoint(engine_id=spec.engine_id, address=spec.address)


def _estimate(message: Quantiles) -> Estimate:
    return Estimate(message.p10, message.p50, message.p90)
