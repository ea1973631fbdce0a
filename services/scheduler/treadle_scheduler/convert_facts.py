"""Facts to events and announcements to facts; the other half of `convert.py`."""

from treadle.engine.v1 import engine_pb2
from treadle.telemetry.v1 import facts_pb2
from treadle_core.actions import (
    AnnounceClosed,
    AnnounceEngineJoined,
    AnnounceEngineLost,
    AnnounceOpened,
    AnnouncePredicted,
)
from treadle_core.events import (
    Event,
    MoveEnded,
    StepFinished,
    StepPreempted,
    StepStarted,
    ToolFinished,
    ToolStarted,
    WeightsUpdated,
)
from treadle_runtime.bus import make_fact

from treadle_scheduler.convert import OUTCOME_NUMBERS, quantiles, seconds
from treadle_scheduler.convert_engines import engine_info

# The kinds that the scheduler listens to.
HEARD = (
    "step_started",
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
        case "step_started":
            step = fact.step_started.step
            return StepStarted(step.trajectory_id, step.ticket_id)
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
