"""Handlers of reports of engines, tools and the predictor about steps."""

from treadle_core import events as ev
from treadle_core.actions import (
    Action,
    AnnouncePredicted,
    AskPrediction,
    Decided,
    Reprioritize,
    SaveTrajectory,
    StepCounted,
)
from treadle_core.model import TicketStatus, copy_with
from treadle_core.steps import leases, lifecycle, moves, tickets
from treadle_core.steps.state import State


def finish_step(state: State, event: ev.StepFinished, now: float) -> list[Action]:
    """Count the tokens of a step, request a prediction, and see whether the trajectory should move
    meanwhile."""
    record = state.table.get(event.trajectory_id)
    record = tickets.count_step(record, event, now) if record is not None else None
    if record is None:
        return []
    state.table.put(record)
    actions: list[Action] = [
        SaveTrajectory(record),
        StepCounted(record, event.turn, event.output_tokens),
    ]
    if not record.is_open:
        return [*actions, *lifecycle.announce_if_counted(state, record, now)]
    actions += [AskPrediction(record), *moves.start_move(state, record, now)]
    return [*actions, *leases.leave_drained(state, state.table.require(record.trajectory_id))]


def note_preemption(state: State, event: ev.StepPreempted, _now: float) -> list[Action]:
    """Note which step took the slot; the step keeps its ticket and its priority."""
    record = state.table.get(event.trajectory_id)
    ticket = record.live_ticket if record is not None else None
    if ticket is None or ticket.ticket_id != event.ticket_id:
        return []
    pattern = "after {} tokens, by a pause of the engine"
    values: tuple[object, ...] = (event.output_tokens,)
    other = state.table.get(tickets.trajectory_of(event.by_ticket_id))
    if other is not None:
        pattern = "at priority {:.2f} after {} tokens, by {} at {:.2f}"
        values = (ticket.priority, event.output_tokens, other.trajectory_id, other.priority)
    return [Decided(event.trajectory_id, "preempted", ticket.engine_id, pattern, values)]


def lose_step(state: State, event: ev.StepUnknown, now: float) -> list[Action]:
    """Free the slot and the KV of an expired ticket that no step has used; the client may still
    replace it."""
    record = state.table.get(event.trajectory_id)
    ticket = record.live_ticket if record is not None else None
    if (
        record is None
        or ticket is None
        or ticket.ticket_id != event.ticket_id
        or now < ticket.expires_s
    ):
        return []
    record = copy_with(
        record, ticket=copy_with(ticket, status=TicketStatus.LOST, kv_reserve_tokens=0)
    )
    state.table.put(record)
    return [SaveTrajectory(record)]


def start_tool(state: State, event: ev.ToolStarted, _now: float) -> list[Action]:
    """Note how long the tool call is expected to take: a move should be over by then."""
    record = state.table.get(event.trajectory_id)
    if record is not None and record.is_open:
        state.table.put(copy_with(record, tool_over=False, tool_expected_s=event.expected_s))
    return []


def finish_tool(state: State, event: ev.ToolFinished, _now: float) -> list[Action]:
    """Start no move from now on, as the next step is about to be requested."""
    record = state.table.get(event.trajectory_id)
    if record is not None and record.is_open:
        state.table.put(copy_with(record, tool_over=True))
    return []


def take_prediction(state: State, event: ev.PredictionArrived, now: float) -> list[Action]:
    """Store a prediction unless a newer one is here; send an engine the new priority of a step, or
    start a move."""
    record = state.table.get(event.trajectory_id)
    if record is None or not record.is_open:
        return []
    known, new = record.prediction, event.prediction
    if known is not None and (new.turn, new.gen_tokens) < (known.turn, known.gen_tokens):
        return []
    record = copy_with(record, prediction=new)
    record = copy_with(record, priority=state.priority(record))
    state.table.put(record)
    state.planner.follow_prediction(record)
    actions: list[Action] = [SaveTrajectory(record), AnnouncePredicted(record, first=known is None)]
    ticket = record.live_ticket
    if ticket is None:
        return actions + moves.start_move(state, record, now)
    if state.priorities.must_report(record.policy, ticket.priority, record.priority):
        record = copy_with(record, ticket=copy_with(ticket, priority=record.priority))
        state.table.put(record)
        reprioritize = Reprioritize(
            ticket.engine_id, ticket.engine_address, ((ticket.ticket_id, record.priority),)
        )
        actions += [SaveTrajectory(record), reprioritize]
    return actions
