"""Requests for tickets that are not answered at once (beyond Heddle, which starts all trajectories and evicts).

A first step waits until its engine has room for all the KV that the trajectory is expected to grow to, beside what
those that have begun there may grow to, and a slot; so a trajectory is bound to an engine when it begins and not when
it opens, and until then goes where the newest plan wants it, at no cost. Those that wait for one engine begin in the
order of their priority, and none overtakes one that does not fit. Without this, an engine with more trajectories than
its KV holds lets all begin, each returns from its tool to find its context evicted, and the engine prefills the same
tokens over and over.

A later step waits while the trajectory's KV is on its way to another engine, for as long as the move is worth.

Owner of `State.held`. Nothing of it is stored: after a restart the clients ask again.
"""

from collections.abc import Iterable

from treadle_core.actions import Action, HoldStep, SaveTrajectory
from treadle_core.events import (
    EngineRegistered,
    Event,
    MoveEnded,
    PlanArrived,
    StepFinished,
    StepRequested,
    Tick,
    TrajectoryClosed,
)
from treadle_core.model import EngineSpec, PlacementRule, TrajectoryRecord, changed
from treadle_core.refusals import ContextTooLong, NoEngine
from treadle_core.steps import tickets
from treadle_core.steps.state import Held, State, Waiter
from treadle_core.steps.tickets import StepKind, left_behind


def must_wait(state: State, record: TrajectoryRecord) -> bool:
    """Whether a trajectory's next step is held: for its KV, or, the first, until the engines have been looked over."""
    if record.ticket is not None:
        return record.policy.reserve and record.move is not None
    if not record.policy.reserve or record.pinned_engine_id:
        return False
    spec = state.engines.spec(record.engine_id)
    if spec is None:
        return False  # the placement rule finds another engine, or refuses
    if record.prediction is None or state.held:
        return True
    # Alone, and known: it begins where there is plenty of room, without a word of the plan.
    return 2 * state.table.tally(record.engine_id).begun >= spec.slot_limit or not _fits(state, record, spec)


def held(state: State, event: StepRequested) -> list[Action]:
    """Keeps the request; a repeat takes its place. Raises ContextTooLong: no wait would help it."""
    trajectory_id = event.trajectory_id
    before, record = state.held.get(trajectory_id), state.table.require(trajectory_id)
    state.siting.require_fitting(record, event.context_tokens)
    state.held_count += before is None
    state.held[trajectory_id] = Held(event, before.place if before else state.held_count)
    state.table.watch(trajectory_id)
    if before is None:
        _line_up(state, trajectory_id)
    return [HoldStep(trajectory_id)]


def answered(state: State, event: Event, now: float) -> list[Action]:
    """Tickets for those that this event lets go on."""
    match event:
        case StepFinished() | TrajectoryClosed():
            record = state.table.get(event.trajectory_id)
            return begun(state, record.engine_id, now) if record is not None else []
        case MoveEnded():
            return _moved(state, event.trajectory_id, now)
        case PlanArrived() | EngineRegistered() | Tick():
            actions: list[Action] = []
            for trajectory_id in _in_turn(state, state.table.news()):
                _line_up(state, trajectory_id)
                actions += _moved(state, trajectory_id, now)
            followed = _follow_plan(state)
            for engine_id in state.lines.engine_ids():
                actions += begun(state, engine_id, now)
            # Those that begin now were saved with their tickets.
            return actions + [SaveTrajectory(state.table.require(each)) for each in followed if each in state.held]
        case _:
            return []


def begun(state: State, engine_id: str, now: float) -> list[Action]:
    """Lets trajectories begin on an engine while it has room, best ranked first."""
    spec = state.engines.spec(engine_id)
    if spec is None:
        return []
    actions: list[Action] = []
    line, refused = state.lines.line(engine_id), 0
    while refused < len(line) and state.table.tally(engine_id).live_tickets < spec.slot_limit:
        record = state.table.get(line[refused].trajectory_id)
        if record is None or not _waits_for(state, record, engine_id):
            state.lines.drop(line[refused].trajectory_id)  # it closed, began elsewhere, or belongs elsewhere now
            continue
        if not _fits(state, record, spec):
            break
        granted = _granted(state, record, now)
        actions += granted
        refused += not granted
    return actions


def _in_turn(state: State, trajectory_ids: Iterable[str]) -> list[str]:
    """Those of them that are held, first come first."""
    return sorted(state.held.keys() & trajectory_ids, key=lambda trajectory_id: state.held[trajectory_id].place)


def _line_up(state: State, trajectory_id: str) -> None:
    """Its place among those that wait to begin on its engine, if it is one of them, by its priority as it is now."""
    record = state.table.get(trajectory_id)
    if record is not None and record.is_open and record.ticket is None:
        waiter = Waiter(-record.priority, state.held[trajectory_id].place, trajectory_id)
        state.lines.put(record.engine_id, waiter)
    else:
        state.lines.drop(trajectory_id)


def _waits_for(state: State, record: TrajectoryRecord, engine_id: str) -> bool:
    waits = record.trajectory_id in state.held and record.is_open and record.ticket is None
    return waits and record.engine_id == engine_id


def _fits(state: State, record: TrajectoryRecord, spec: EngineSpec) -> bool:
    tally = state.table.tally(spec.engine_id)
    if tally.live_tickets >= spec.slot_limit:
        return False
    if not spec.kv_tokens_capacity or tally.begun == 0:
        return True
    return tally.kv_reserve_tokens + tickets.reserve_tokens(state, record) <= spec.kv_tokens_capacity


def _moved(state: State, trajectory_id: str, now: float) -> list[Action]:
    """The ticket of one whose KV is where it should be, or stays where it is; who is closed is let go."""
    record = state.table.get(trajectory_id)
    if record is None or not record.is_open:
        _let_go(state, trajectory_id)
    elif trajectory_id in state.held and record.ticket is not None and record.move is None:
        return _granted(state, record, now)
    return []


def _follow_plan(state: State) -> list[str]:
    """Those that wait to begin stand where the newest plan wants them; names those for which that is elsewhere."""
    followed: list[str] = []
    for trajectory_id in _in_turn(state, state.planner.wishes()):
        record = state.table.require(trajectory_id)
        if record.ticket is None and record.policy.placement is PlacementRule.PLANNED:
            target = state.engines.get(state.planner.target(record))
            if target is not None and target.usable and target.spec.engine_id != record.engine_id:
                record = changed(record, engine_id=target.spec.engine_id, revision=record.revision + 1)
                record = changed(record, priority=state.priority(record))
                state.table.put(record)
                state.planner.settle(record)
                _line_up(state, trajectory_id)
                followed.append(trajectory_id)
    return followed


def _granted(state: State, record: TrajectoryRecord, now: float) -> list[Action]:
    event = state.held[record.trajectory_id].event
    try:
        actions = tickets.granted(state, left_behind(record), event, StepKind.NEXT, now)
    except (NoEngine, ContextTooLong):  # the engines changed: it is asked for again, and refused to the client's face
        state.table.put(record)  # so that it is looked at again, at the latest with the next tick
        return []
    _let_go(state, record.trajectory_id)
    return actions


def _let_go(state: State, trajectory_id: str) -> None:
    """Nobody waits for it any more."""
    state.held.pop(trajectory_id, None)
    state.lines.drop(trajectory_id)
    state.table.unwatch(trajectory_id)
