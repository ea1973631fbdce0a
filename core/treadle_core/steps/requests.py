"""Handlers of steps: requests for tickets, and what engines, tools and the predictor report."""

from treadle_core import events as ev
from treadle_core.actions import Action, AnnouncePredicted, AskPrediction, IssueTicket, Reprioritize, SaveTrajectory
from treadle_core.model import TicketStatus, copy_with
from treadle_core.steps import admission, leases, lifecycle, moves, tickets
from treadle_core.steps.state import State
from treadle_core.steps.tickets import StepKind


def request_step(state: State, event: ev.StepRequested, now: float) -> list[Action]:
    """Answer with a ticket, or let the step wait for one. Raises what `check_request` raises, TrajectoryNotFound,
    ContextTooLong, NoEngine."""
    record = state.table.require(event.trajectory_id)
    state.jobs.touch(record.job_id, now)
    kind = tickets.check_request(record, event)
    if kind is StepKind.REPEAT:
        assert record.ticket is not None, "only a ticket's own request repeats"
        state.table.put(copy_with(record, touched_s=now))
        return [IssueTicket(record.ticket)]
    if kind is StepKind.NEXT and admission.must_wait(state, record):
        return admission.let_wait(state, event, now)
    actions = tickets.issue_ticket(state, record, event, kind, now)
    admission.stop_waiting(state, event.trajectory_id)  # it may have waited at an engine that is gone
    return actions


def finish_step(state: State, event: ev.StepFinished, now: float) -> list[Action]:
    """Count the tokens of a step, ask how much is left, and see whether the trajectory should move meanwhile."""
    record = state.table.get(event.trajectory_id)
    record = tickets.count_step(record, event, now) if record is not None else None
    if record is None:
        return []
    state.table.put(record)
    state.histories.finish_step(record.trajectory_id, event.turn, event.output_tokens)
    state.planner.note_step()
    if not record.is_open:
        return [SaveTrajectory(record), *lifecycle.announce_if_counted(state, record, now)]
    actions = [SaveTrajectory(record), AskPrediction(record), *moves.start_move(state, record, now)]
    return [*actions, *leases.leave_drained(state, state.table.require(record.trajectory_id), now)]


def note_preemption(state: State, event: ev.StepPreempted, now: float) -> list[Action]:
    """Note which step took the slot; the step keeps its ticket and its priority."""
    record = state.table.get(event.trajectory_id)
    ticket = record.live_ticket if record is not None else None
    if ticket is None or ticket.ticket_id != event.ticket_id:
        return []
    note = (event.trajectory_id, now, "preempted", ticket.engine_id)
    other = state.table.get(tickets.trajectory_of(event.by_ticket_id))
    if other is None:
        state.histories.decide(*note, "after {} tokens, by a pause of the engine", event.output_tokens)
    else:
        pattern = "at priority {:.2f} after {} tokens, by {} at {:.2f}"
        values = (ticket.priority, event.output_tokens, other.trajectory_id, other.priority)
        state.histories.decide(*note, pattern, *values)
    return []


def lose_step(state: State, event: ev.StepUnknown, now: float) -> list[Action]:
    """Free the slot and the KV of an expired ticket that no step has used; the client may still replace it."""
    record = state.table.get(event.trajectory_id)
    ticket = record.live_ticket if record is not None else None
    if record is None or ticket is None or ticket.ticket_id != event.ticket_id or now < ticket.expires_s:
        return []
    record = copy_with(record, ticket=copy_with(ticket, status=TicketStatus.LOST, kv_reserve_tokens=0))
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
    """Store a prediction unless a newer one is here; send an engine the new priority of a step, or start a move."""
    record = state.table.get(event.trajectory_id)
    if record is None or not record.is_open:
        return []
    known, new = record.prediction, event.prediction
    if known is not None and (new.turn, new.gen_tokens) < (known.turn, known.gen_tokens):
        return []
    record = copy_with(record, prediction=new)
    record = copy_with(record, priority=state.priority(record))
    state.table.put(record)
    state.planner.note_prediction(record, first=known is None)
    actions: list[Action] = [SaveTrajectory(record), AnnouncePredicted(record)]
    ticket = record.live_ticket
    if ticket is None:
        return actions + moves.start_move(state, record, now)
    if state.priorities.must_report(record.policy, ticket.priority, record.priority):
        record = copy_with(record, ticket=copy_with(ticket, priority=record.priority))
        state.table.put(record)
        reprioritize = Reprioritize(ticket.engine_id, ticket.engine_address, ((ticket.ticket_id, record.priority),))
        actions += [SaveTrajectory(record), reprioritize]
    return actions
