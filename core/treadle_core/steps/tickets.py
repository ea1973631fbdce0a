"""Tickets: check a request for one, issue it on the engine that the placement rule chooses, count
what its step has done, and end it.

Turns count from 0 without gaps. A trajectory has at most one live ticket; its revision and engine
are the trajectory's, and the engine holds a lease. When the client requests the next turn before
the engine's account of the last one (`step_finished`) has arrived, the last ticket is done and
`uncounted` until then. The closing of a trajectory is published once all its tokens are counted.
"""

import enum
import hashlib
from operator import attrgetter

from treadle_core.actions import (
    AbortStep,
    Action,
    AnnounceClosed,
    AskPrediction,
    Decided,
    IssueTicket,
    SaveTrajectory,
    StepCounted,
    StepWaits,
)
from treadle_core.events import StepFinished, StepPreempted, StepRequested, StepUnknown
from treadle_core.model import (
    NO_TIMES,
    TENANT_MARK,
    Cause,
    EngineSpec,
    TicketRecord,
    TicketStatus,
    TrajectoryRecord,
    TrajectoryState,
    copy_with,
)
from treadle_core.ranking import priorities
from treadle_core.refusals import (
    BadField,
    NoEngine,
    NoEngineWithTags,
    RequestIdReused,
    StepInFlight,
    TrajectoryIsClosed,
    TurnOutOfOrder,
)
from treadle_core.state import State
from treadle_core.steps import moves

# 48 bits in front of every ticket id: the engine matches ids by prefix when it aborts, so no ticket
# id may be a prefix of another.
TICKET_DIGEST_CHARACTERS = 12

MOST_UNCOUNTED = 8  # tickets of a trajectory; more only where `step_finished` is lost for good

REQUEST_FIELDS = attrgetter(
    "turn", "context_tokens", "max_new_tokens", "replaces_ticket_id", "resumed_tokens"
)


class StepKind(enum.Enum):
    """Kind of a request. REPEAT: the request was answered before. NEXT: a new turn. AGAIN: the same
    turn, as its stream was lost."""

    REPEAT = "repeat"
    NEXT = "next"
    AGAIN = "again"


def ticket_id(trajectory_id: str, turn: int, attempt: int) -> str:
    """Return the id of a ticket: unique, no prefix of another, and with the trajectory's tenant."""
    tenant, mark, name = f"{trajectory_id}.{turn}.{attempt}".rpartition(TENANT_MARK)
    digest = hashlib.sha256(f"{tenant}{mark}{name}".encode()).hexdigest()[:TICKET_DIGEST_CHARACTERS]
    return f"{tenant}{mark}{digest}.{name}"


def trajectory_of(ticket_id: str) -> str:
    """Return the trajectory of a ticket; empty where the id names no ticket."""
    tenant, mark, named = ticket_id.rpartition(TENANT_MARK)
    name = named.partition(".")[2].rpartition(".")[0].rpartition(".")[0]
    return f"{tenant}{mark}{name}" if name else ""


def check_request(record: TrajectoryRecord, event: StepRequested) -> StepKind:
    """Return the kind of a request. Raises TrajectoryIsClosed, TurnOutOfOrder, StepInFlight,
    BadField, RequestIdReused."""
    if not record.is_open:
        raise TrajectoryIsClosed(record.trajectory_id, record.state.value)
    ticket = record.ticket
    if ticket is not None and ticket.request_id == event.request_id:
        if REQUEST_FIELDS(ticket) != REQUEST_FIELDS(event):
            raise RequestIdReused(
                "request_id",
                f"{event.request_id} has asked for turn {ticket.turn} with other values",
            )
        return StepKind.REPEAT
    if event.replaces_ticket_id:
        return _check_replacement(record, event)
    if event.resumed_tokens:
        raise BadField(
            "resumed_tokens",
            "only a step that replaces a lost ticket resumes: name it in replaces_ticket_id",
        )
    if ticket is not None and ticket.status is not TicketStatus.DONE and event.turn == ticket.turn:
        raise StepInFlight(
            f"turn {ticket.turn} of {record.trajectory_id} has ticket {ticket.ticket_id}; "
            "name it in replaces_ticket_id if its stream is lost",
            trajectory_id=record.trajectory_id,
            ticket_id=ticket.ticket_id,
        )
    expected = (
        record.next_turn
        if ticket is None or ticket.status is TicketStatus.DONE
        else ticket.turn + 1
    )
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
            f"the ticket of turn {ticket.turn} is {ticket.ticket_id}, not "
            f"{event.replaces_ticket_id}",
            trajectory_id=record.trajectory_id,
            ticket_id=ticket.ticket_id,
        )
    if event.resumed_tokens >= event.max_new_tokens:
        raise BadField(
            "resumed_tokens",
            f"{event.resumed_tokens} of {event.max_new_tokens} tokens: nothing is left to generate",
        )
    return StepKind.AGAIN


def _out_of_order(record: TrajectoryRecord, event: StepRequested, expected: int) -> TurnOutOfOrder:
    return TurnOutOfOrder(
        f"turn {event.turn} of {record.trajectory_id} does not come now: turn {expected} does",
        trajectory_id=record.trajectory_id,
        expected_turn=str(expected),
    )


def end_ticket(record: TrajectoryRecord) -> TrajectoryRecord:
    """Return the record with its ticket, if one is out, done and uncounted, since the client has
    reported the end of the step."""
    ticket = record.ticket
    if ticket is None or ticket.status is TicketStatus.DONE:
        return record
    return copy_with(
        record,
        ticket=copy_with(ticket, status=TicketStatus.DONE),
        uncounted=(*record.uncounted, ticket.ticket_id)[-MOST_UNCOUNTED:],
        next_turn=ticket.turn + 1,
        state=TrajectoryState.IDLE,
    )


def reopen_turn(record: TrajectoryRecord) -> TrajectoryRecord:
    """Return the record as if the last step had not finished: the client did not get its end and
    requests the turn again."""
    ticket = record.ticket
    if ticket is None or ticket.status is not TicketStatus.DONE:
        return record
    return copy_with(
        record,
        gen_tokens=record.gen_tokens - ticket.output_tokens,
        # the client counts what it saw of the step
        engine_times=record.engine_times.plus(ticket.times, -1.0),
        ticket=copy_with(ticket, output_tokens=0, times=NO_TIMES),
        uncounted=tuple(other for other in record.uncounted if other != ticket.ticket_id),
        next_turn=ticket.turn,
    )


def count_step(
    record: TrajectoryRecord, event: StepFinished, now: float
) -> TrajectoryRecord | None:
    """Return the record after `step_finished`; None where the ticket was replaced or the event
    arrived before."""
    ticket = record.ticket
    if event.ticket_id in record.uncounted:
        counted = copy_with(
            record,
            gen_tokens=record.gen_tokens + event.output_tokens,
            engine_times=record.engine_times.plus(event.times),
            uncounted=tuple(other for other in record.uncounted if other != event.ticket_id),
        )
        if ticket is not None and ticket.ticket_id == event.ticket_id:
            counted = copy_with(
                counted,
                ticket=copy_with(ticket, output_tokens=event.output_tokens, times=event.times),
            )
        return counted
    if (
        not record.is_open
        or ticket is None
        or ticket.ticket_id != event.ticket_id
        or ticket.status is TicketStatus.DONE
    ):
        return None
    return copy_with(
        record,
        ticket=copy_with(
            ticket, status=TicketStatus.DONE, output_tokens=event.output_tokens, times=event.times
        ),
        engine_times=record.engine_times.plus(event.times),
        gen_tokens=record.gen_tokens + event.output_tokens,
        context_tokens=event.context_tokens + event.output_tokens,
        next_turn=ticket.turn + 1,
        state=TrajectoryState.IDLE,
        finished_step_s=now,
        tool_over=False,
        tool_expected_s=0.0,
        touched_s=now,
    )


def issue_ticket(
    state: State, record: TrajectoryRecord, event: StepRequested, kind: StepKind, now: float
) -> list[Action]:
    """Answer a checked request with a ticket. Raises ContextTooLong, NoEngine."""
    out = record.live_ticket
    # A ticket too old to be accepted by its engine is no sign that the engine lost the stream.
    is_lost = (
        kind is StepKind.AGAIN
        and not event.engine_refused
        and out is not None
        and now < out.expires_s
    )
    lost = out if is_lost else None
    record = reopen_turn(record) if kind is StepKind.AGAIN else end_ticket(record)
    engine = state.siting.choose(
        record,
        target=state.planner.target(record),
        avoid=lost.engine_id if lost is not None else "",
        context_tokens=event.context_tokens,
    )
    if engine is None:
        raise state.siting.explain_lack(record, now)
    placed: list[Action] = []
    if engine.spec.engine_id != record.engine_id:
        state.planner.drop_target(record)
        placed = [Decided(record.trajectory_id, "placed", engine.spec.engine_id, *state.siting.why)]
    cancels: list[Action] = []
    if lost is not None:
        state.engines.note_loss(lost, now)
        cancels.append(AbortStep(lost.engine_address, lost.ticket_id))
    if record.move is not None:
        cancels += moves.cancel_migration(record)
    record, ticket = _add_ticket(state, record, event, kind, engine.spec, now)
    state.engines.note_ticket(ticket, now)
    state.table.put(record)
    state.siting.note_step(record)
    return [SaveTrajectory(record), *placed, IssueTicket(ticket, tool_s=event.tool_s), *cancels]


def note_lack(state: State, trajectory_id: str, lack: NoEngine) -> list[Action]:
    """Note that a request has found no engine: its step waits, unless the client must not repeat
    the request."""
    if isinstance(lack, NoEngineWithTags):  # the client counts itself what it has waited
        return [StepWaits(trajectory_id, None)]
    loads = any(engine.behind and not engine.load_error for engine in state.engines)
    engine_id = state.table.require(trajectory_id).engine_id
    return [
        StepWaits(trajectory_id, Cause.WEIGHTS if loads else Cause.HELD),
        Decided(trajectory_id, "held", engine_id, "{}", (lack.message,), again=True),
    ]


def _add_ticket(
    state: State,
    record: TrajectoryRecord,
    event: StepRequested,
    kind: StepKind,
    spec: EngineSpec,
    now: float,
) -> tuple[TrajectoryRecord, TicketRecord]:
    moved = spec.engine_id != record.engine_id
    move = (
        record.move
        if record.move is not None and not moved and record.move.has_switched(spec.engine_id)
        else None
    )
    attempt = (
        record.ticket.attempt + 1 if kind is StepKind.AGAIN and record.ticket is not None else 0
    )
    tool_s = _learn_tool_s(state, record, event) if kind is StepKind.NEXT else record.tool_s
    waits = state.books.waits
    waited_s = waits.waited_s(record.trajectory_id, now)
    record = copy_with(
        waits.count(record, now),
        state=TrajectoryState.STEPPING,
        engine_id=spec.engine_id,
        revision=record.revision + (1 if moved else 0),
        context_tokens=event.context_tokens,
        requested_s=now if kind is StepKind.NEXT else record.requested_s,
        tool_s=tool_s,
        tools_s=record.tools_s + (event.tool_s if kind is StepKind.NEXT else 0.0),
        move=move,  # the report of its end, which is still due, has its duration
        touched_s=now,
        client_times=event.client_times or record.client_times,
    )
    _learn_observed(state, record)
    state.note_work(record)
    priority = state.priority(record)
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
        job=record.job,
        weight=state.shares.ticket_weight(record.job),
        waited_s=waited_s,
    )
    return copy_with(record, priority=priority, ticket=ticket), ticket


def reserve_tokens(state: State, record: TrajectoryRecord) -> int:
    """Return the KV tokens that an engine reserves for a trajectory which it starts."""
    return priorities.reserve_tokens(record, state.mean_observed_tokens, state.tuning)


def _learn_observed(state: State, record: TrajectoryRecord) -> None:
    observed = record.context_tokens - record.prompt_tokens - record.gen_tokens
    if record.next_turn > 0 and observed >= 0:
        weight = state.tuning.observed_mean_weight
        state.mean_observed_tokens += weight * (
            observed / record.next_turn - state.mean_observed_tokens
        )


def _learn_tool_s(state: State, record: TrajectoryRecord, event: StepRequested) -> float:
    if event.tool_s <= 0.0:
        return record.tool_s
    weight = state.tuning.tool_mean_weight
    state.mean_tool_s = (
        event.tool_s
        if state.mean_tool_s == 0.0
        else (1 - weight) * state.mean_tool_s + weight * event.tool_s
    )
    return (
        event.tool_s
        if record.tool_s == 0.0
        else (1 - weight) * record.tool_s + weight * event.tool_s
    )


def finish_step(state: State, event: StepFinished, now: float) -> list[Action]:
    """Count the tokens of a step, request a prediction, and see whether the trajectory should move
    meanwhile."""
    record = state.table.get(event.trajectory_id)
    ticket = record.ticket if record is not None else None
    if ticket is not None and ticket.ticket_id == event.ticket_id and event.output_tokens:
        state.engines.note_end(ticket, now)
    record = count_step(record, event, now) if record is not None else None
    if record is None:
        return []
    state.table.put(record)
    actions: list[Action] = [
        SaveTrajectory(record),
        StepCounted(record, event.turn, event.output_tokens),
    ]
    if not record.is_open:
        return [*actions, *announce_if_counted(state, record, now)]
    actions += [AskPrediction(record), *moves.start_move(state, record, now)]
    return [*actions, *moves.leave_drained(state, state.table.require(record.trajectory_id))]


def announce_if_counted(state: State, record: TrajectoryRecord, now: float) -> list[Action]:
    """Publish a closing whose tokens are all counted."""
    if record.is_open or record.announced or record.uncounted:
        return []
    return announce(state, record, now)


def announce(state: State, record: TrajectoryRecord, now: float) -> list[Action]:
    """Publish a closing, now and again until it is confirmed."""
    assert record.outcome is not None, "a closed trajectory has an outcome"
    state.announcements[record.trajectory_id] = now + state.tuning.announce_again_s
    return [AnnounceClosed(record, record.outcome)]


def note_preemption(state: State, event: StepPreempted, _now: float) -> list[Action]:
    """Note which step took the slot; the step keeps its ticket and its priority."""
    record = state.table.get(event.trajectory_id)
    ticket = record.live_ticket if record is not None else None
    if ticket is None or ticket.ticket_id != event.ticket_id:
        return []
    pattern = "after {} tokens, by a pause of the engine"
    values: tuple[object, ...] = (event.output_tokens,)
    other = state.table.get(trajectory_of(event.by_ticket_id))
    if other is not None:
        pattern = "at priority {:.2f} after {} tokens, by {} at {:.2f}"
        values = (ticket.priority, event.output_tokens, other.trajectory_id, other.priority)
    return [Decided(event.trajectory_id, "preempted", ticket.engine_id, pattern, values)]


def lose_step(state: State, event: StepUnknown, now: float) -> list[Action]:
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
