"""Moves of trajectories to other engines while their tools run: the tools, predictions and plans
that decide on them, and the switch that makes the target the owner (Heddle 5.3).

A trajectory has one move at a time. Only `switch_engine`, a compare-and-swap on the revision,
changes its owner, and never while a ticket is out; whatever fails, the source stays the owner.
"""

from collections.abc import Iterable
from dataclasses import replace

from treadle_core.actions import (
    Action,
    AnnouncePredicted,
    CancelMigration,
    Decided,
    Reprioritize,
    SaveTrajectory,
    StartMigration,
)
from treadle_core.events import (
    MoveAccepted,
    MoveEnded,
    PlanArrived,
    PredictionArrived,
    SwitchRequested,
    ToolFinished,
    ToolStarted,
)
from treadle_core.model import MoveRecord, PlacementRule, TicketStatus, TrajectoryRecord, copy_with
from treadle_core.ranking.priorities import remaining_tokens
from treadle_core.refusals import (
    BadField,
    EngineNotFound,
    RequestIdReused,
    RevisionMismatch,
    StepInFlight,
    TrajectoryIsClosed,
    TrajectoryPinned,
)
from treadle_core.state import State
from treadle_core.transfers import longest_useful_move_s, move_cost_s


def start_tool(state: State, event: ToolStarted, _now: float) -> list[Action]:
    """Note how long the tool call is expected to take: a move should be over by then."""
    record = state.table.get(event.trajectory_id)
    if record is not None and record.is_open:
        state.table.put(copy_with(record, tool_over=False, tool_expected_s=event.expected_s))
    return []


def finish_tool(state: State, event: ToolFinished, _now: float) -> list[Action]:
    """Start no move from now on, as the next step is about to be requested."""
    record = state.table.get(event.trajectory_id)
    if record is not None and record.is_open:
        state.table.put(copy_with(record, tool_over=True))
    return []


def take_prediction(state: State, event: PredictionArrived, now: float) -> list[Action]:
    """Store a prediction unless a newer one is here; send an engine the new priority of a step, or
    start a move."""
    record = state.table.get(event.trajectory_id)
    if record is None or not record.is_open:
        return []
    known, new = record.prediction, event.prediction
    if known is not None and (new.turn, new.gen_tokens) < (known.turn, known.gen_tokens):
        return []
    record = copy_with(record, prediction=new)
    state.note_work(record)
    record = copy_with(record, priority=state.priority(record))
    state.table.put(record)
    state.planner.follow_prediction(record)
    actions: list[Action] = [SaveTrajectory(record), AnnouncePredicted(record, first=known is None)]
    actions += rank_again(state, siblings_of(state, record))
    ticket = record.live_ticket
    if ticket is None:
        return actions + start_move(state, record, now)
    if state.priorities.must_report(record.policy, ticket.priority, record.priority):
        record = copy_with(record, ticket=copy_with(ticket, priority=record.priority))
        state.table.put(record)
        reprioritize = Reprioritize(
            ticket.engine_id, ticket.engine_address, ((ticket.ticket_id, record.priority),)
        )
        actions += [SaveTrajectory(record), reprioritize]
    return actions


def rank_again(state: State, records: Iterable[TrajectoryRecord]) -> list[Action]:
    """Give trajectories their present priority, where it has changed by enough, and send that of
    running steps to their engines."""
    actions: list[Action] = []
    for record in records:
        priority, ticket = state.priority(record), record.live_ticket
        if not state.priorities.must_report(record.policy, record.priority, priority):
            continue
        record = copy_with(record, priority=priority)
        if ticket is not None:
            record = copy_with(record, ticket=copy_with(ticket, priority=priority))
            change = (ticket.ticket_id, priority)
            actions.append(Reprioritize(ticket.engine_id, ticket.engine_address, (change,)))
        state.table.put(record)
        actions.append(SaveTrajectory(record))
    return actions


def siblings_of(state: State, record: TrajectoryRecord) -> list[TrajectoryRecord]:
    """Return the other open samples of a group that does not need all of them."""
    return [state.table.require(name) for name in state.needs.siblings(record)]


def take_plan(state: State, event: PlanArrived, now: float) -> list[Action]:
    """Follow a plan that is better than the present placement: trajectories in a tool call move
    now, others after their step."""
    actions: list[Action] = []
    for trajectory_id in state.planner.take_plan(event):
        record = state.table.require(trajectory_id)
        why = ("a plan that saves {:.2f} s", (state.planner.saving_s(record),))
        actions.append(
            Decided(trajectory_id, "planned", state.planner.target(record), *why, again=True)
        )
        actions += start_move(state, record, now)
    return actions


def start_move(state: State, record: TrajectoryRecord, now: float) -> list[Action]:
    """Start the move that the plan wants of a trajectory in a tool call, if it is worth its
    cost."""
    wanted = state.planner.target(record)
    if not wanted or wanted == record.engine_id or not _may_move(state, record):
        return []
    source, target = state.engines.get(record.engine_id), state.engines.get(wanted)
    if (
        source is None
        or target is None
        or not target.usable
        or source.spec.weight_version != target.spec.weight_version
    ):
        return []  # KV of other weights is useless
    reserve = record.ticket.kv_reserve_tokens if record.ticket is not None else 0
    if record.policy.reserve and not state.table.tally(wanted).has_room(
        record, reserve, target.spec
    ):
        why = ("{} has no room for its {} KV tokens", (wanted, reserve))
        return [Decided(record.trajectory_id, "stays", record.engine_id, *why, again=True)]
    cost_s = move_cost_s(record.context_tokens, source.spec, target.spec, state.tuning)
    cost_s *= state.measured_moves.slowness(source.spec.engine_id, target.spec.engine_id)
    # What a move by rank saves is not known. A step waits for as long as a move that is worth its
    # cost would save.
    give_up_after_s, worth_waiting_s = (
        state.tuning.move_timeout_s,
        state.tuning.move_gain_factor * cost_s,
    )
    tool_left_s = _tool_left_s(state, record, now)
    gate = "to {}: saves {:.2f} s, takes {:.2f} s, the tool {:.2f} s more"
    if state.planner.must_gain:
        worth_waiting_s = state.planner.saving_s(record)
        longest_s = longest_useful_move_s(
            cost_s=cost_s,
            tool_left_s=tool_left_s,
            saving_s=worth_waiting_s,
            source=source.spec,
            target=target.spec,
            tuning=state.tuning,
        )
        if longest_s is None:
            figures = (wanted, worth_waiting_s, cost_s, tool_left_s)
            return [
                Decided(record.trajectory_id, "stays", record.engine_id, gate, figures, again=True)
            ]
        give_up_after_s = max(longest_s, state.tuning.move_fixed_s)
    move = MoveRecord(
        move_id=f"{record.trajectory_id}.move.{record.moves_asked}",
        source_engine_id=record.engine_id,
        target_engine_id=target.spec.engine_id,
        asked_s=now,
        give_up_s=now + min(give_up_after_s, state.tuning.move_timeout_s),
        saving_s=worth_waiting_s,
    )
    record = copy_with(record, move=move, moves_asked=record.moves_asked + 1)
    state.table.put(record)
    figures = (wanted, state.planner.saving_s(record), cost_s, tool_left_s)
    start = StartMigration(
        move_id=move.move_id,
        trajectory_id=record.trajectory_id,
        source=source.spec,
        target=target.spec,
        expected_revision=record.revision,
        remaining_tokens=remaining_tokens(record, state.tuning),
        cache_salt=target.spec.weight_version,
        allow_prefill=True,
        give_up_after_s=move.give_up_s - now,
    )
    return [
        SaveTrajectory(record),
        Decided(record.trajectory_id, "moves", record.engine_id, gate, figures),
        start,
    ]


def _may_move(state: State, record: TrajectoryRecord) -> bool:
    ticket = record.ticket
    return (
        record.is_open
        and record.policy.migrate
        and record.policy.placement is PlacementRule.PLANNED
        and not record.pinned_engine_id
        and ticket is not None
        and ticket.status is TicketStatus.DONE
        and record.finished_step_s is not None
        and not record.tool_over
        and record.trajectory_id
        not in state.waiting  # its next step is due, so that no tool call hides the move
        and record.move is None
        and (
            record.moved_at_turn < 0
            or record.next_turn - record.moved_at_turn >= state.tuning.move_rest_turns
            or not state.planner.must_gain
        )
    )


def _tool_left_s(state: State, record: TrajectoryRecord, now: float) -> float:
    expected_s = (
        record.tool_expected_s or record.tool_s or state.mean_tool_s or state.tuning.unknown_tool_s
    )
    since = record.finished_step_s if record.finished_step_s is not None else now
    return max(0.0, expected_s - (now - since))


def cancel_migration(record: TrajectoryRecord) -> list[Action]:
    """Request from the migrator that it cancels the trajectory's move, if there is one that has not
    switched yet."""
    move = record.move
    if move is None or not move.migration_id or move.has_switched(record.engine_id):
        return []
    return [CancelMigration(record.trajectory_id, move.migration_id)]


def accept_move(state: State, event: MoveAccepted, _now: float) -> list[Action]:
    """Note the migrator's id of a move, or cancel a move that is not wanted any more."""
    record = state.table.get(event.trajectory_id)
    if record is None or record.move is None or record.move.move_id != event.move_id:
        return [CancelMigration(event.trajectory_id, event.migration_id)]
    record = copy_with(record, move=replace(record.move, migration_id=event.migration_id))
    state.table.put(record)
    return [SaveTrajectory(record)]


def end_move(state: State, event: MoveEnded, _now: float) -> list[Action]:
    """Forget a move that is over. After a failed one the trajectory stays until the next plan."""
    record = state.table.get(event.trajectory_id)
    if record is None or record.move is None:
        return []
    move = record.move
    # The end may arrive before the acceptance; then the move has no migration_id yet, and it is
    # this one.
    if event.move_id != move.move_id and (
        not event.migration_id or move.migration_id not in ("", event.migration_id)
    ):
        return []
    source, target = (
        state.engines.spec(move.source_engine_id),
        state.engines.spec(move.target_engine_id),
    )
    if event.took_s and source is not None and target is not None:
        expected_s = move_cost_s(record.context_tokens, source, target, state.tuning)
        state.measured_moves.note_end(
            source.engine_id, target.engine_id, expected_s, event.took_s, moved=event.moved
        )
    record = copy_with(record, move=None)
    state.table.put(record)
    if event.moved:
        return [SaveTrajectory(record)]
    state.planner.drop_target(record)
    why = ("the move to {} ended: {}", (move.target_engine_id, event.reason))
    return [SaveTrajectory(record), Decided(record.trajectory_id, "stays", record.engine_id, *why)]


def expire_moves(state: State, now: float) -> list[Action]:
    """Cancel moves whose end was not reported while they were worth it: the migrator or NATS may be
    gone."""
    actions: list[Action] = []
    for record in state.table.moving():
        if record.move is not None and now >= record.move.give_up_s:
            actions += cancel_move(state, record)
    return actions


def limit_wait(state: State, record: TrajectoryRecord, now: float) -> list[Action]:
    """Let the step, which begins to wait for the trajectory's move now, wait no longer than the
    move saves."""
    move = record.move
    if move is None or now + move.saving_s >= move.give_up_s:
        return []
    record = copy_with(record, move=replace(move, give_up_s=now + move.saving_s))
    state.table.put(record)
    return [SaveTrajectory(record)]


def cancel_move(state: State, record: TrajectoryRecord) -> list[Action]:
    """Cancel a move; the source stays the owner."""
    actions = cancel_migration(record)
    record = copy_with(record, move=None)
    state.table.put(record)
    return [*actions, SaveTrajectory(record)]


def leave_drained(state: State, record: TrajectoryRecord) -> list[Action]:
    """Give a trajectory another engine where its own is drained and another can run it, unless its
    step is out or its KV is on the way to another engine."""
    own, move = state.engines.get(record.engine_id), record.move
    leaves = move is not None and not move.has_switched(record.engine_id)
    if own is None or not own.draining or record.live_ticket is not None or leaves:
        return []
    engine = state.siting.choose(record)
    if engine is None or engine.spec.engine_id == record.engine_id:
        return []
    record = copy_with(
        record, engine_id=engine.spec.engine_id, revision=record.revision + 1, move=None
    )
    state.table.put(record)
    state.planner.drop_target(record)
    why = ("{} is drained", (own.spec.engine_id,))
    return [SaveTrajectory(record), Decided(record.trajectory_id, "placed", record.engine_id, *why)]


def switch_engine(state: State, event: SwitchRequested, now: float) -> list[Action]:
    """Make the target the owner. Raises TrajectoryNotFound, TrajectoryIsClosed, TrajectoryPinned,
    StepInFlight, RevisionMismatch, EngineNotFound, BadField, RequestIdReused."""
    record = state.table.require(event.trajectory_id)
    request = (event.request_id, str(event.expected_revision), event.target_engine_id)
    if record.switch_request[:1] == request[:1]:
        if record.switch_request != request:
            raise RequestIdReused(
                "request_id", f"{event.request_id} has switched {event.trajectory_id} elsewhere"
            )
        return []
    if not record.is_open:
        raise TrajectoryIsClosed(record.trajectory_id, record.state.value)
    if record.pinned_engine_id or record.policy.placement is PlacementRule.PINNED:
        raise TrajectoryPinned(
            f"{event.trajectory_id} is pinned to {record.engine_id}",
            trajectory_id=event.trajectory_id,
        )
    if record.revision != event.expected_revision:
        raise RevisionMismatch(
            f"{event.trajectory_id} is at revision {record.revision}, not "
            f"{event.expected_revision}",
            trajectory_id=event.trajectory_id,
            revision=str(record.revision),
        )
    ticket = record.ticket
    if ticket is not None and ticket.status is not TicketStatus.DONE:
        raise StepInFlight(
            f"turn {ticket.turn} of {event.trajectory_id} is out",
            trajectory_id=event.trajectory_id,
            ticket_id=ticket.ticket_id,
        )
    if event.target_engine_id not in state.engines:
        raise EngineNotFound(
            f"no engine {event.target_engine_id} holds a lease", engine_id=event.target_engine_id
        )
    if event.target_engine_id == record.engine_id:
        raise BadField(
            "target_engine_id", f"{event.trajectory_id} is on {record.engine_id} already"
        )
    record = copy_with(
        record,
        engine_id=event.target_engine_id,
        revision=record.revision + 1,
        migrations=record.migrations + 1,
        moved_at_turn=record.next_turn,
        switch_request=request,
        touched_s=now,
    )
    record = copy_with(record, priority=state.priority(record))
    state.table.put(record)
    state.planner.drop_target(record)
    return [
        SaveTrajectory(record),
        Decided(record.trajectory_id, "moved", record.engine_id, "its KV is there"),
    ]
