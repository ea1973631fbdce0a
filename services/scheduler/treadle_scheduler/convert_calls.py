"""The scheduler's own calls to other services: actions to requests, responses to events."""

from collections.abc import Iterable, Sequence

import numpy as np
from treadle.common.v1.estimate_pb2 import Quantiles
from treadle.engine.v1 import engine_pb2
from treadle.migrator.v1 import migrator_pb2
from treadle.placement.v1 import placement_pb2
from treadle.predictor.v1 import predictor_pb2
from treadle_core.actions import AbortStep, AskPlan, AskPrediction, ReleasePrefix, StartMigration
from treadle_core.costs import CostModel
from treadle_core.events import MoveAccepted, PlanArrived, PredictionArrived
from treadle_core.model import EngineSpec, Estimate

from treadle_scheduler.convert import duration
from treadle_scheduler.convert_engines import curve_message

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
