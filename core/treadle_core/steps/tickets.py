"""Tickets: the right to run one step once, on the engine that the placement rule chooses.

Invariants: at most one live ticket a trajectory; a live ticket's revision and engine are its trajectory's; no ticket
for an engine without a lease.

The rules of one trajectory's steps: which may be asked for, what a finished one changes. Pure functions over
records.

Turns count from 0 without gaps. At most one ticket of a trajectory is live. The client's word that a turn is over (it
asks for the next) is taken before the engine's own account arrives: the account's tokens are added when it does
(`uncounted`)."""

import enum
import hashlib

from treadle_core.actions import AbortStep, Action, IssueTicket, SaveTrajectory
from treadle_core.events import StepFinished, StepRequested
from treadle_core.model import EngineRecord, TicketRecord, TicketStatus, TrajectoryRecord, TrajectoryState, changed
from treadle_core.ranking import remaining
from treadle_core.refusals import BadField, NoEngine, RequestIdReused, StepInFlight, TrajectoryIsClosed, TurnOutOfOrder
from treadle_core.steps import moves
from treadle_core.steps.state import State

# 48 bits in front of every ticket id. The engine matches request ids by prefix when it aborts, so no ticket id may be a
# prefix of another: ids of other steps differ within these characters.
TICKET_DIGEST_CHARACTERS = 12

# Tickets left behind whose account is still awaited; more than a few only where accounts are lost for good.
UNCOUNTED_KEPT = 8


class StepKind(enum.Enum):
    """REPEAT: the request was answered before. NEXT: a new turn. AGAIN: the same turn, its stream having been lost."""

    REPEAT = "repeat"
    NEXT = "next"
    AGAIN = "again"


def ticket_id(trajectory_id: str, turn: int, attempt: int) -> str:
    """The id of a step's ticket; unique, and no prefix of another."""
    name = f"{trajectory_id}.{turn}.{attempt}"
    return f"{hashlib.sha256(name.encode()).hexdigest()[:TICKET_DIGEST_CHARACTERS]}.{name}"


def check(record: TrajectoryRecord, event: StepRequested) -> StepKind:
    """What the request is. Raises TrajectoryIsClosed, TurnOutOfOrder, StepInFlight, BadField, RequestIdReused."""
    if not record.is_open:
        raise TrajectoryIsClosed(f"{record.trajectory_id} is {record.state.value}", trajectory_id=record.trajectory_id)
    ticket = record.ticket
    if ticket is not None and ticket.request_id == event.request_id:
        if (
            ticket.turn,
            ticket.context_tokens,
            ticket.max_new_tokens,
            ticket.replaces_ticket_id,
            ticket.resumed_tokens,
        ) != (
            event.turn,
            event.context_tokens,
            event.max_new_tokens,
            event.replaces_ticket_id,
            event.resumed_tokens,
        ):
            raise RequestIdReused(
                "request_id", f"{event.request_id} has asked for turn {ticket.turn} with other values"
            )
        return StepKind.REPEAT
    if event.replaces_ticket_id:
        return _check_replacement(record, event)
    if event.resumed_tokens:
        raise BadField(
            "resumed_tokens", "only a step that replaces a lost ticket resumes: name it in replaces_ticket_id"
        )
    if ticket is not None and ticket.status is not TicketStatus.DONE and event.turn == ticket.turn:
        raise StepInFlight(
            f"turn {ticket.turn} of {record.trajectory_id} has ticket {ticket.ticket_id}; "
            "name it in replaces_ticket_id if its stream is lost",
            trajectory_id=record.trajectory_id,
            ticket_id=ticket.ticket_id,
        )
    expected = record.next_turn if ticket is None or ticket.status is TicketStatus.DONE else ticket.turn + 1
    if event.turn != expected:
        raise _out_of_order(record, event, expected)
    return StepKind.NEXT


def _check_replacement(record: TrajectoryRecord, event: StepRequested) -> StepKind:
    ticket = record.ticket
    if ticket is None:
        raise BadField("replaces_ticket_id", f"{record.trajectory_id} has had no ticket yet")
    if event.turn != ticket.turn:
        raise _out_of_order(record, event, ticket.turn)
    if event.replaces_ticket_id != ticket.ticket_id:
        raise StepInFlight(
            f"the ticket of turn {ticket.turn} is {ticket.ticket_id}, not {event.replaces_ticket_id}",
            trajectory_id=record.trajectory_id,
            ticket_id=ticket.ticket_id,
        )
    if event.resumed_tokens >= event.max_new_tokens:
        raise BadField(
            "resumed_tokens", f"{event.resumed_tokens} of {event.max_new_tokens} tokens: nothing is left to generate"
        )
    return StepKind.AGAIN


def _out_of_order(record: TrajectoryRecord, event: StepRequested, expected: int) -> TurnOutOfOrder:
    return TurnOutOfOrder(
        f"turn {event.turn} of {record.trajectory_id} does not come now: turn {expected} does",
        trajectory_id=record.trajectory_id,
        expected_turn=str(expected),
    )


def left_behind(record: TrajectoryRecord) -> TrajectoryRecord:
    """The record with its out ticket, if any, taken as done on the client's word, its tokens still to be counted."""
    ticket = record.ticket
    if ticket is None or ticket.status is TicketStatus.DONE:
        return record
    return changed(
        record,
        ticket=changed(ticket, status=TicketStatus.DONE),
        uncounted=(*record.uncounted, ticket.ticket_id)[-UNCOUNTED_KEPT:],
        next_turn=ticket.turn + 1,
        state=TrajectoryState.IDLE,
    )


def taken_back(record: TrajectoryRecord) -> TrajectoryRecord:
    """The record as if the last ticket's step had not finished: the client never got its end and asks for the turn
    again."""
    ticket = record.ticket
    if ticket is None or ticket.status is not TicketStatus.DONE:
        return record
    return changed(
        record,
        gen_tokens=record.gen_tokens - ticket.output_tokens,
        ticket=changed(ticket, output_tokens=0),
        uncounted=tuple(other for other in record.uncounted if other != ticket.ticket_id),
        next_turn=ticket.turn,
    )


def finished(record: TrajectoryRecord, event: StepFinished, now: float) -> TrajectoryRecord | None:
    """The record after an engine's account of a step, or None where it changes nothing (heard before, or of a replaced
    ticket)."""
    ticket = record.ticket
    if event.ticket_id in record.uncounted:
        counted = changed(
            record,
            gen_tokens=record.gen_tokens + event.output_tokens,
            uncounted=tuple(other for other in record.uncounted if other != event.ticket_id),
        )
        if ticket is not None and ticket.ticket_id == event.ticket_id:
            counted = changed(counted, ticket=changed(ticket, output_tokens=event.output_tokens))
        return counted
    if (
        not record.is_open
        or ticket is None
        or ticket.ticket_id != event.ticket_id
        or ticket.status is TicketStatus.DONE
    ):
        return None
    return changed(
        record,
        ticket=changed(ticket, status=TicketStatus.DONE, output_tokens=event.output_tokens),
        gen_tokens=record.gen_tokens + event.output_tokens,
        context_tokens=event.context_tokens + event.output_tokens,
        next_turn=ticket.turn + 1,
        state=TrajectoryState.IDLE,
        finished_step_s=now,
        tool_over=False,
        tool_expected_s=0.0,
        touched_s=now,
    )


def granted(state: State, record: TrajectoryRecord, event: StepRequested, kind: StepKind, now: float) -> list[Action]:
    """The ticket that was asked for. Raises ContextTooLong, NoEngine."""
    actions: list[Action] = []
    lost_at = ""
    if kind is StepKind.AGAIN:
        lost_at = _lost_stream_at(record, now)
        again = taken_back(record)
    else:
        again = left_behind(record)
    engine = state.siting.choose(
        again, target=state.planner.target(record), avoid=lost_at, context_tokens=event.context_tokens
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
    state.siting.ran(record)
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
    record = changed(
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
    _learn_observed(state, record)
    priority = state.priority(record)
    if moved:
        state.planner.settle(record)
    ticket = TicketRecord(
        ticket_id=ticket_id(record.trajectory_id, event.turn, attempt),
        trajectory_id=record.trajectory_id,
        turn=event.turn,
        attempt=attempt,
        engine_id=spec.engine_id,
        engine_address=spec.address,
        priority=priority,
        weight_version=spec.weight_version,
        revision=record.revision,
        issued_s=now,
        expires_s=now + state.tuning.ticket_ttl_s,
        request_id=event.request_id,
        context_tokens=event.context_tokens,
        max_new_tokens=event.max_new_tokens,
        replaces_ticket_id=event.replaces_ticket_id,
        resumed_tokens=event.resumed_tokens,
        preemptible=record.policy.preempt,
        kv_reserve_tokens=reserve_tokens(state, record) if record.policy.reserve else 0,
    )
    return changed(record, priority=priority, ticket=ticket)


def reserve_tokens(state: State, record: TrajectoryRecord) -> int:
    """KV tokens that an engine should hold room for when it takes the trajectory."""
    return remaining.reserve_tokens(record, state.mean_observed_tokens, state.tuning)


def _learn_observed(state: State, record: TrajectoryRecord) -> None:
    observed = record.context_tokens - record.prompt_tokens - record.gen_tokens
    if record.next_turn > 0 and observed >= 0:
        weight = state.tuning.observed_mean_weight
        state.mean_observed_tokens += weight * (observed / record.next_turn - state.mean_observed_tokens)


def _mean_tool_s(state: State, record: TrajectoryRecord, event: StepRequested) -> float:
    if event.tool_s <= 0.0:
        return record.tool_s
    weight = state.tuning.tool_mean_weight
    state.mean_tool_s = (
        event.tool_s if state.mean_tool_s == 0.0 else (1 - weight) * state.mean_tool_s + weight * event.tool_s
    )
    return event.tool_s if record.tool_s == 0.0 else (1 - weight) * record.tool_s + weight * event.tool_s
