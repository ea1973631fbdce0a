"""Migrations: which trajectory moves while its tool runs, and the compare-and-swap that makes the target its owner
(Heddle 5.3).

Invariants: one move at a time for each trajectory; the owner changes by `switched` alone, never under a ticket;
whatever fails, the source stays the owner.

Is a move worth it? Nothing waits on a migration for longer than the migration saves (Heddle 5.3).

A prefix moves while the trajectory's tool runs; what the tool does not hide is exposed and delays the next step. Where
KV has no shared storage the target computes it again, which takes the target's time from
others even when it is hidden."""

from dataclasses import dataclass, replace

from treadle_core.actions import Action, CancelMigration, SaveTrajectory, StartMigration
from treadle_core.events import MoveAccepted, MoveEnded, PlanArrived, SwitchRequested
from treadle_core.model import (
    DEFAULT_PREFILL_TOKENS_PER_S,
    EngineSpec,
    KvTransfer,
    MoveRecord,
    PlacementRule,
    TicketStatus,
    TrajectoryRecord,
    changed,
)
from treadle_core.planning.plans import gated
from treadle_core.ranking.remaining import remaining_tokens
from treadle_core.refusals import (
    BadField,
    EngineNotFound,
    RequestIdReused,
    RevisionMismatch,
    StepInFlight,
    TrajectoryIsClosed,
    TrajectoryPinned,
)
from treadle_core.steps.state import State
from treadle_core.tuning import Tuning


@dataclass(frozen=True, slots=True)
class Verdict:
    """`give_up_after_s`: the longest that the move may take before it costs more than it saves."""

    passes: bool
    reason: str
    cost_s: float
    exposed_s: float
    give_up_after_s: float


def move_cost_s(context_tokens: int, source: EngineSpec, target: EngineSpec, tuning: Tuning) -> float:
    """Seconds from asking for a move to the switch, in tokens of prefix over the rate of the way it takes."""
    if moves_by_storage(source, target):
        return tuning.move_fixed_s + context_tokens * source.kv_bytes_per_token / tuning.storage_bytes_per_s
    rate = target.decode_curve.prefill_tokens_per_s or DEFAULT_PREFILL_TOKENS_PER_S
    return tuning.move_fixed_s + context_tokens / rate


def moves_by_storage(source: EngineSpec, target: EngineSpec) -> bool:
    """Whether both ends read the same store of KV."""
    return source.kv_transfer is KvTransfer.STORAGE and target.kv_transfer is KvTransfer.STORAGE


def judge(
    *, context_tokens: int, tool_left_s: float, saving_s: float, source: EngineSpec, target: EngineSpec, tuning: Tuning
) -> Verdict:
    """Weighs a move of `context_tokens` during a tool call that is expected to last `tool_left_s` more seconds."""
    cost_s = move_cost_s(context_tokens, source, target, tuning)
    exposed_s = max(0.0, cost_s - tool_left_s)
    # Hidden transfers cost nobody; a hidden prefill costs the target's other trajectories.
    price_s = exposed_s if moves_by_storage(source, target) else cost_s
    price_s = max(price_s, tuning.move_fixed_s)
    if saving_s < tuning.move_gain_factor * price_s:
        return Verdict(False, "saves too little", cost_s, exposed_s, 0.0)
    return Verdict(True, "worth it", cost_s, exposed_s, tool_left_s + saving_s)


def plan_arrived(state: State, event: PlanArrived, now: float) -> list[Action]:
    """Follows a plan where it is better than what we have: trajectories in a tool call move now, others after their
    step."""
    actions: list[Action] = []
    for trajectory_id in state.planner.arrived(event):
        actions += considered(state, state.table.require(trajectory_id), now)
    return actions


def considered(state: State, record: TrajectoryRecord, now: float) -> list[Action]:
    """Starts the move that the plan wants of a trajectory in a tool call, if the gate passes."""
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
        return []  # KV of other weights is of no use there
    if record.policy.reserve and not _has_room(state, record, target.spec):
        return []
    give_up_after_s = state.tuning.move_timeout_s
    if gated(record):
        verdict = judge(
            context_tokens=record.context_tokens,
            tool_left_s=_tool_left_s(state, record, now),
            saving_s=state.planner.saving_s(record),
            source=source.spec,
            target=target.spec,
            tuning=state.tuning,
        )
        if not verdict.passes:
            return []
        give_up_after_s = max(verdict.give_up_after_s, state.tuning.move_fixed_s)
    move = MoveRecord(
        move_id=f"{record.trajectory_id}.move.{record.moves_asked}",
        source_engine_id=record.engine_id,
        target_engine_id=target.spec.engine_id,
        asked_s=now,
        give_up_s=now + give_up_after_s,
    )
    record = changed(record, move=move, moves_asked=record.moves_asked + 1)
    state.table.put(record)
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
    return [SaveTrajectory(record), start]


def _has_room(state: State, record: TrajectoryRecord, target: EngineSpec) -> bool:
    """Whether the target can hold all that the trajectory may grow to, beside what has begun there."""
    tally = state.table.tally(target.engine_id)
    reserve = record.ticket.kv_reserve_tokens if record.ticket is not None else 0
    return (
        not target.kv_tokens_capacity
        or not tally.begun
        or tally.kv_reserve_tokens + reserve <= target.kv_tokens_capacity
    )


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
        and record.move is None
        and (
            record.moved_at_turn < 0
            or record.next_turn - record.moved_at_turn >= state.tuning.move_rest_turns
            or not gated(record)
        )
    )


def _tool_left_s(state: State, record: TrajectoryRecord, now: float) -> float:
    expected_s = record.tool_expected_s or record.tool_s or state.mean_tool_s or state.tuning.unknown_tool_s
    since = record.finished_step_s if record.finished_step_s is not None else now
    return max(0.0, expected_s - (now - since))


def withdrawn(record: TrajectoryRecord) -> list[Action]:
    """The tool came back first: a move that has not switched yet is called off."""
    move = record.move
    if move is None or not move.migration_id or move.target_engine_id == record.engine_id:
        return []
    return [CancelMigration(record.trajectory_id, move.migration_id)]


def accepted(state: State, event: MoveAccepted, _now: float) -> list[Action]:
    """The migrator has the move; if it is not wanted any more, call it off."""
    record = state.table.get(event.trajectory_id)
    if record is None or record.move is None or record.move.move_id != event.move_id:
        return [CancelMigration(event.trajectory_id, event.migration_id)]
    record = changed(record, move=replace(record.move, migration_id=event.migration_id))
    state.table.put(record)
    return [SaveTrajectory(record)]


def ended(state: State, event: MoveEnded, _now: float) -> list[Action]:
    """A move is over, one way or the other. One that failed leaves the plan's wish void until the next plan."""
    record = state.table.get(event.trajectory_id)
    if record is None or record.move is None:
        return []
    move = record.move
    # The end may be heard before the acceptance: then the move has no migration_id yet, and it is this one.
    if event.move_id != move.move_id and (not event.migration_id or move.migration_id not in ("", event.migration_id)):
        return []
    if not event.moved:
        state.planner.settle(record)
    record = changed(record, move=None)
    state.table.put(record)
    return [SaveTrajectory(record)]


def timed_out(state: State, now: float) -> list[Action]:
    """Forgets moves of which nothing was heard."""
    actions: list[Action] = []
    for record in state.table.moving():
        if record.move is not None and now - record.move.asked_s >= state.tuning.move_timeout_s:
            actions += called_off(state, record)
    return actions


def called_off(state: State, record: TrajectoryRecord) -> list[Action]:
    """Takes a move back; the source stays the owner."""
    actions = withdrawn(record)
    record = changed(record, move=None)
    state.table.put(record)
    return [*actions, SaveTrajectory(record)]


def switched(state: State, event: SwitchRequested, now: float) -> list[Action]:
    """Makes the target the owner. Raises TrajectoryNotFound, TrajectoryIsClosed, TrajectoryPinned, StepInFlight,
    RevisionMismatch, EngineNotFound, BadField, RequestIdReused; the source stays the owner then."""
    record = state.table.require(event.trajectory_id)
    request = (event.request_id, str(event.expected_revision), event.target_engine_id)
    if record.switch_request[:1] == request[:1]:
        if record.switch_request != request:
            raise RequestIdReused("request_id", f"{event.request_id} has switched {event.trajectory_id} elsewhere")
        return []
    if not record.is_open:
        raise TrajectoryIsClosed(f"{event.trajectory_id} is {record.state.value}", trajectory_id=event.trajectory_id)
    if record.pinned_engine_id or record.policy.placement is PlacementRule.PINNED:
        raise TrajectoryPinned(
            f"{event.trajectory_id} is pinned to {record.engine_id}", trajectory_id=event.trajectory_id
        )
    if record.revision != event.expected_revision:
        raise RevisionMismatch(
            f"{event.trajectory_id} is at revision {record.revision}, not {event.expected_revision}",
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
        raise EngineNotFound(f"no engine {event.target_engine_id} holds a lease", engine_id=event.target_engine_id)
    if event.target_engine_id == record.engine_id:
        raise BadField("target_engine_id", f"{event.trajectory_id} is on {record.engine_id} already")
    record = changed(
        record,
        engine_id=event.target_engine_id,
        revision=record.revision + 1,
        migrations=record.migrations + 1,
        moved_at_turn=record.next_turn,
        switch_request=request,
        touched_s=now,
    )
    record = changed(record, priority=state.priority(record))
    state.table.put(record)
    state.planner.settle(record)
    return [SaveTrajectory(record)]
