"""Tickets: the right to run one step once, on the engine that the placement rule chooses.

Invariants: at most one live ticket a trajectory; a live ticket's revision and engine are its trajectory's; no ticket
for an engine without a lease.
"""

from treadle_core import moves, remaining, steps
from treadle_core.actions import AbortStep, Action, IssueTicket, SaveTrajectory
from treadle_core.events import StepRequested
from treadle_core.model import EngineRecord, TicketRecord, TrajectoryRecord, TrajectoryState
from treadle_core.records import changed
from treadle_core.refusals import NoEngine
from treadle_core.state import State
from treadle_core.steps import StepKind


def granted(state: State, record: TrajectoryRecord, event: StepRequested, kind: StepKind, now: float) -> list[Action]:
    """The ticket that was asked for. Raises ContextTooLong, NoEngine."""
    actions: list[Action] = []
    lost_at = ""
    if kind is StepKind.AGAIN:
        lost_at = _lost_stream_at(record, now)
        again = steps.taken_back(record)
    else:
        again = steps.left_behind(record)
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
        ticket_id=steps.ticket_id(record.trajectory_id, event.turn, attempt),
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
