"""Steps: issuing tickets, hearing what engines, tools and the predictor say of them.

Invariants: at most one live ticket a trajectory; a live ticket's revision and engine are its trajectory's; no ticket
for an engine without a lease.
"""

from dataclasses import replace

from treadle_core import lifecycle, moves, steps
from treadle_core.actions import AbortStep, Action, AnnouncePredicted, IssueTicket, Reprioritize, SaveTrajectory
from treadle_core.events import (
    PredictionArrived,
    StepFinished,
    StepPreempted,
    StepRequested,
    StepStarted,
    ToolFinished,
    ToolStarted,
)
from treadle_core.model import EngineRecord, Prediction, TicketRecord, TrajectoryRecord, TrajectoryState
from treadle_core.refusals import NoEngine
from treadle_core.scheduling import RUNNING_LIFT
from treadle_core.state import State
from treadle_core.steps import StepKind


def requested(state: State, event: StepRequested, now: float) -> list[Action]:
    """Answers with a ticket. Raises what `steps.check` raises, TrajectoryNotFound, ContextTooLong, NoEngine."""
    record = state.table.require(event.trajectory_id)
    kind = steps.check(record, event)
    if kind is StepKind.REPEAT:
        assert record.ticket is not None, "only a ticket's own request repeats"
        return [IssueTicket(record.ticket)]
    actions: list[Action] = []
    lost_at = ""
    if kind is StepKind.AGAIN:
        lost_at = _lost_stream_at(record, now)
        again = steps.taken_back(record)
    else:
        again = steps.left_behind(record)
    engine = state.siting.choose(
        again, target=state.planner.target(record.trajectory_id), avoid=lost_at, context_tokens=event.context_tokens
    )
    if engine is None:
        raise NoEngine(
            "no engine may run this step now: none is registered and healthy that it could go to",
            trajectory_id=record.trajectory_id,
        )
    if lost_at:
        actions += _give_up_stream(state, record, now)
    actions += moves.withdrawn(again)
    record = _ticketed(state, again, event, kind, engine, now)
    assert record.ticket is not None, "it was just made"
    state.table.put(record)
    return [SaveTrajectory(record), IssueTicket(record.ticket), *actions]


def _lost_stream_at(record: TrajectoryRecord, now: float) -> str:
    """The engine at which a live ticket's stream was lost; empty where the engine's own loss is known already, or the
    ticket was merely too old to be accepted.
    """
    ticket = record.live_ticket
    return ticket.engine_id if ticket is not None and now < ticket.expires_s else ""


def _give_up_stream(state: State, record: TrajectoryRecord, now: float) -> list[Action]:
    ticket = record.live_ticket
    assert ticket is not None, "only a live ticket's stream is given up"
    state.engines.suspect(ticket.engine_id, now)
    return [AbortStep(ticket.engine_address, ticket.ticket_id)]


def _ticketed(
    state: State, record: TrajectoryRecord, event: StepRequested, kind: StepKind, engine: EngineRecord, now: float
) -> TrajectoryRecord:
    spec = engine.spec
    moved = spec.engine_id != record.engine_id
    attempt = record.ticket.attempt + 1 if kind is StepKind.AGAIN and record.ticket is not None else 0
    tool_s = _mean_tool_s(state, record, event) if kind is StepKind.NEXT else record.tool_s
    record = replace(
        record,
        state=TrajectoryState.STEPPING,
        engine_id=spec.engine_id,
        revision=record.revision + (1 if moved else 0),
        context_tokens=event.context_tokens,
        requested_s=now if kind is StepKind.NEXT else record.requested_s,
        tool_s=tool_s,
        move=None,
        touched_s=now,
    )
    record = replace(record, priority=state.priority(record))
    if moved:
        state.planner.settle(record.trajectory_id)
    ticket = TicketRecord(
        ticket_id=steps.ticket_id(record.trajectory_id, event.turn, attempt),
        trajectory_id=record.trajectory_id,
        turn=event.turn,
        attempt=attempt,
        engine_id=spec.engine_id,
        engine_address=spec.address,
        priority=record.priority,
        weight_version=spec.weight_version,
        revision=record.revision,
        issued_s=now,
        expires_s=now + state.tuning.ticket_ttl_s,
        request_id=event.request_id,
        context_tokens=event.context_tokens,
        max_new_tokens=event.max_new_tokens,
        replaces_ticket_id=event.replaces_ticket_id,
        resumed_tokens=event.resumed_tokens,
    )
    return replace(record, ticket=ticket)


def _mean_tool_s(state: State, record: TrajectoryRecord, event: StepRequested) -> float:
    if event.tool_s <= 0.0:
        return record.tool_s
    weight = state.tuning.tool_mean_weight
    state.mean_tool_s = (
        event.tool_s if state.mean_tool_s == 0.0 else (1 - weight) * state.mean_tool_s + weight * event.tool_s
    )
    return event.tool_s if record.tool_s == 0.0 else (1 - weight) * record.tool_s + weight * event.tool_s


def started(state: State, event: StepStarted, _now: float) -> list[Action]:
    """A step runs. Where its policy does not preempt, nothing may push it out any more."""
    record = _with_live(state, event.trajectory_id, event.ticket_id)
    if record is None or not state.orderings.needs_lift(record.policy):
        return []
    return _reprioritized(state, record, RUNNING_LIFT + record.priority)


def preempted(state: State, event: StepPreempted, _now: float) -> list[Action]:
    """A step waits again, and ranks as it did."""
    record = _with_live(state, event.trajectory_id, event.ticket_id)
    if record is None or not state.orderings.needs_lift(record.policy):
        return []
    return _reprioritized(state, record, record.priority)


def finished(state: State, event: StepFinished, now: float) -> list[Action]:
    """An engine's account of a step: count it, ask how much is left, and see whether the trajectory should move
    meanwhile."""
    record = state.table.get(event.trajectory_id)
    changed = steps.finished(record, event, now) if record is not None else None
    if changed is None:
        return []
    state.table.put(changed)
    state.planner.note()
    if not changed.is_open:
        return [SaveTrajectory(changed), *lifecycle.announce_if_settled(state, changed, now)]
    return [
        SaveTrajectory(changed),
        lifecycle.asked_prediction(changed),
        *moves.considered(state, changed.trajectory_id, now),
    ]


def tool_started(state: State, event: ToolStarted, _now: float) -> list[Action]:
    """What a tool call is expected to take bounds what a move may take."""
    record = state.table.get(event.trajectory_id)
    if record is None or not record.is_open:
        return []
    state.table.put(replace(record, tool_over=False, tool_expected_s=event.expected_s))
    return []


def tool_finished(state: State, event: ToolFinished, _now: float) -> list[Action]:
    """The next step is about to be asked for: no move starts now."""
    record = state.table.get(event.trajectory_id)
    if record is None or not record.is_open:
        return []
    state.table.put(replace(record, tool_over=True))
    return []


def predicted(state: State, event: PredictionArrived, now: float) -> list[Action]:
    """Takes a prediction over unless a newer one is here, reorders a step that is out, and considers a move."""
    record = state.table.get(event.trajectory_id)
    if record is None or not record.is_open:
        return []
    if record.prediction is not None and (event.turn, event.gen_tokens) < (
        record.prediction.turn,
        record.prediction.gen_tokens,
    ):
        return []
    prediction = Prediction(
        event.turn, event.gen_tokens, event.remaining_tokens, event.remaining_turns, event.model_version
    )
    record = replace(record, prediction=prediction)
    record = replace(record, priority=state.priority(record))
    state.table.put(record)
    actions: list[Action] = [SaveTrajectory(record), AnnouncePredicted(record)]
    ticket = record.live_ticket
    if (
        ticket is not None
        and ticket.priority < RUNNING_LIFT / 2
        and state.orderings.changed(record.policy, ticket.priority, record.priority)
    ):
        actions += _reprioritized(state, record, record.priority)
    return actions + moves.considered(state, record.trajectory_id, now)


def _with_live(state: State, trajectory_id: str, ticket_id: str) -> TrajectoryRecord | None:
    record = state.table.get(trajectory_id)
    if record is None or record.live_ticket is None or record.live_ticket.ticket_id != ticket_id:
        return None
    return record


def _reprioritized(state: State, record: TrajectoryRecord, priority: float) -> list[Action]:
    ticket = record.live_ticket
    assert ticket is not None, "only a live ticket is reprioritized"
    if ticket.priority == priority:
        return []
    record = replace(record, ticket=replace(ticket, priority=priority))
    state.table.put(record)
    return [
        SaveTrajectory(record),
        Reprioritize(ticket.engine_id, ticket.engine_address, ((ticket.ticket_id, priority),)),
    ]
