"""Steps: issuing tickets, hearing what engines, tools and the predictor say of them.

Invariants: at most one live ticket a trajectory; a live ticket's revision and engine are its trajectory's; no ticket
for an engine without a lease.
"""

from treadle_core.actions import Action, AnnouncePredicted, IssueTicket, Reprioritize, SaveTrajectory
from treadle_core.events import (
    PredictionArrived,
    StepFinished,
    StepPreempted,
    StepRequested,
    ToolFinished,
    ToolStarted,
)
from treadle_core.model import Prediction, TrajectoryRecord, changed
from treadle_core.steps import admission, lifecycle, moves, tickets
from treadle_core.steps.state import State
from treadle_core.steps.tickets import StepKind


def requested(state: State, event: StepRequested, now: float) -> list[Action]:
    """Answers with a ticket. Raises what `steps.check` raises, TrajectoryNotFound, ContextTooLong, NoEngine."""
    record = state.table.require(event.trajectory_id)
    kind = tickets.check(record, event)
    if kind is StepKind.REPEAT:
        assert record.ticket is not None, "only a ticket's own request repeats"
        return [IssueTicket(record.ticket)]
    if kind is StepKind.NEXT and admission.must_wait(state, record):
        return admission.held(state, event)
    return tickets.granted(state, record, event, kind, now)


def preempted(_state: State, _event: StepPreempted, _now: float) -> list[Action]:
    """A step waits again, and ranks as it did: nothing is to be done."""
    return []


def finished(state: State, event: StepFinished, now: float) -> list[Action]:
    """An engine's account of a step: count it, ask how much is left, and see whether the trajectory should move
    meanwhile."""
    record = state.table.get(event.trajectory_id)
    record = tickets.finished(record, event, now) if record is not None else None
    if record is None:
        return []
    state.table.put(record)
    state.planner.stepped(record)
    if not record.is_open:
        return [SaveTrajectory(record), *lifecycle.announce_if_settled(state, record, now)]
    return [SaveTrajectory(record), lifecycle.asked_prediction(record), *moves.considered(state, record, now)]


def tool_started(state: State, event: ToolStarted, _now: float) -> list[Action]:
    """What a tool call is expected to take bounds what a move may take."""
    record = state.table.get(event.trajectory_id)
    if record is None or not record.is_open:
        return []
    state.table.put(changed(record, tool_over=False, tool_expected_s=event.expected_s))
    return []


def tool_finished(state: State, event: ToolFinished, _now: float) -> list[Action]:
    """The next step is about to be asked for: no move starts now."""
    record = state.table.get(event.trajectory_id)
    if record is None or not record.is_open:
        return []
    state.table.put(changed(record, tool_over=True))
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
        event.turn,
        event.gen_tokens,
        event.remaining_tokens,
        event.remaining_turns,
        event.model_version,
        event.learned,
    )
    first = record.prediction is None
    record = changed(record, prediction=prediction)
    record = changed(record, priority=state.priority(record))
    state.table.put(record)
    state.planner.predicted(record, first)
    actions: list[Action] = [SaveTrajectory(record), AnnouncePredicted(record)]
    ticket = record.live_ticket
    if ticket is not None and state.orderings.changed(record.policy, ticket.priority, record.priority):
        actions += _reprioritized(state, record, record.priority)
        return actions  # a ticket is out: nothing moves now
    return actions + moves.considered(state, record, now)


def _reprioritized(state: State, record: TrajectoryRecord, priority: float) -> list[Action]:
    ticket = record.live_ticket
    assert ticket is not None, "only a live ticket is reprioritized"
    if ticket.priority == priority:
        return []
    record = changed(record, ticket=changed(ticket, priority=priority))
    state.table.put(record)
    return [
        SaveTrajectory(record),
        Reprioritize(ticket.engine_id, ticket.engine_address, ((ticket.ticket_id, priority),)),
    ]
