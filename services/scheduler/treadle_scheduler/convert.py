"""Convert trajectories and their steps: requests of clients to checked core events, core records to
responses, actions to facts and to queries of the predictor, answers and facts to events.

A function that takes a request raises InvalidArgument naming the first field that is wrong.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from treadle.common.v1.estimate_pb2 import Quantiles
from treadle.common.v1.ticket_pb2 import Ticket
from treadle.engine.v1 import engine_pb2
from treadle.predictor.v1 import predictor_pb2
from treadle.scheduler.v1 import scheduler_pb2 as pb
from treadle.telemetry.v1 import facts_pb2
from treadle_core import actions as act
from treadle_core import events as ev
from treadle_core.model import (
    LEDGER_PARTS,
    ClientTimes,
    DecodeCurve,
    EngineSpec,
    Estimate,
    Ledger,
    Outcome,
    Prediction,
    StepTimes,
    TicketRecord,
    TrajectoryRecord,
)
from treadle_core.state import Decision, Step
from treadle_runtime.facts import make_fact
from treadle_runtime.fields import (
    at_most,
    duration,
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
    seconds,
    timestamp,
    value_of,
)

# A ticket id holds the trajectory id, the turn and the attempt, and must itself be an identifier of
# 128 characters.
LONGEST_TRAJECTORY_ID_CHARS = 96
LONGEST_PROMPT_ID_CHARS = 256
MOST_HARDWARE_TAGS = 32
# Fields that a message and the core's dataclass have under the same name; the numbers of a request
# must be >= 0.
SIZES = (
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
CURVE = ("base_s", "per_sequence_s", "per_kv_token_s", "prefill_tokens_per_s", "prefill_pair_s")
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
Announcement = (
    act.AnnounceOpened
    | act.AnnounceClosed
    | act.AnnouncePredicted
    | act.AnnounceEngineJoined
    | act.AnnounceEngineLost
)


def trajectory_opened(request: pb.OpenTrajectoryRequest) -> ev.TrajectoryOpened:
    """Return the event that opens a trajectory. One that its client left unnamed gets the same id
    for each repeat of the request."""
    request_id = identifier("request_id", request.request_id)
    return ev.TrajectoryOpened(
        request_id=request_id,
        trajectory_id=trajectory_id_of(request.trajectory_id or minted("t", request_id)),
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
        hardware_tags=tags_of("hardware_tags", request.hardware_tags),
        pinned_engine_id=optional_identifier("pinned_engine_id", request.pinned_engine_id),
        job_id=optional_identifier("job_id", request.job_id),
        asynchronous=request.asynchronous,
        group_keep=non_negative("group_keep", request.group_keep),
    )


def step_requested(request: pb.ScheduleStepRequest) -> ev.StepRequested:
    return ev.StepRequested(
        request_id=identifier("request_id", request.request_id),
        trajectory_id=trajectory_id_of(request.trajectory_id),
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
        trajectory_id=trajectory_id_of(request.trajectory_id),
        outcome=value_of(Outcome, "outcome", pb.Outcome, request.outcome),
        reward=finite("reward", request.reward) if request.HasField("reward") else None,
        client_times=_client_times(request.times) if request.HasField("times") else None,
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


def engine_info(spec: EngineSpec) -> engine_pb2.EngineInfo:
    return engine_pb2.EngineInfo(
        **fields_of(spec, (*_DECLARED, *SIZES)),
        kv_transfer=number_of(spec.kv_transfer, engine_pb2.KvTransfer),
        decode_curve=curve_message(spec.decode_curve),
    )


def curve_message(curve: DecodeCurve) -> engine_pb2.DecodeCurve:
    return engine_pb2.DecodeCurve(**fields_of(curve, CURVE))


def quantiles(estimate: Estimate) -> Quantiles:
    return Quantiles(p10=estimate.p10, p50=estimate.p50, p90=estimate.p90)


def fields_of(source: Any, names: Iterable[str]) -> dict[str, Any]:
    return {name: getattr(source, name) for name in names}


def trajectory_id_of(value: str) -> str:
    return at_most("trajectory_id", identifier("trajectory_id", value), LONGEST_TRAJECTORY_ID_CHARS)


def tags_of(field: str, tags: Iterable[str]) -> tuple[str, ...]:
    return identifiers(field, tags, MOST_HARDWARE_TAGS)


def identifiers(field: str, given: Iterable[str], most: int) -> tuple[str, ...]:
    values = tuple(identifier(f"{field}[{index}]", value) for index, value in enumerate(given))
    require(len(values) <= most, field, f"must be at most {most}, are {len(values)}")
    return values


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
                outcome=number_of(outcome, pb.Outcome),
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


def _estimate(message: Quantiles) -> Estimate:
    return Estimate(message.p10, message.p50, message.p90)
