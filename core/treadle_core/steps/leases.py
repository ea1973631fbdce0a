"""Handlers of engines: registration, renewal of leases, removal.

When an engine is removed, no live ticket for it remains, and each of its open trajectories gets another engine, or none
until one registers.
"""

from treadle_core import actions as act
from treadle_core.events import EngineDeregistered, EngineRegistered, LeaseRenewed, WeightsUpdated
from treadle_core.model import TicketStatus, TrajectoryRecord, copy_with
from treadle_core.steps import moves
from treadle_core.steps.state import State


def register_engine(state: State, event: EngineRegistered, now: float) -> list[act.Action]:
    """Add an engine. An engine that was here under the same id has restarted: its steps are lost. Raises
    RequestIdReused."""
    if state.engines.find_repeat(event) is not None:
        return []
    actions = remove_engine(state, event.spec.engine_id, "REPLACED") if event.spec.engine_id in state.engines else []
    record = state.engines.register(event, now)
    state.siting.note_engine(record.spec)
    state.planner.note_engines()
    return [*actions, act.SaveEngine(record), act.AnnounceEngineJoined(record.spec)]


def renew_lease(state: State, event: LeaseRenewed, now: float) -> list[act.Action]:
    """Extend a lease. Only new weights and a new curve are saved, as a restart gives every lease its whole length
    again. Raises LeaseNotFound."""
    before = state.engines.require_lease(event.lease_id, event.engine_id).spec
    record = state.engines.renew(event, now)
    if record.spec.decode_curve != before.decode_curve:
        state.planner.note_engines()
    return [act.SaveEngine(record)] if record.spec != before else []


def deregister_engine(state: State, event: EngineDeregistered, _now: float) -> list[act.Action]:
    """Remove an engine as its sidecar asks. Raises LeaseNotFound."""
    record = state.engines.require_lease(event.lease_id, event.engine_id)
    return remove_engine(state, record.spec.engine_id, "DEREGISTERED")


def update_weights(state: State, event: WeightsUpdated, _now: float) -> list[act.Action]:
    """Note the new weight version, which later tickets carry."""
    record = state.engines.set_weight_version(event.engine_id, event.weight_version)
    return [act.SaveEngine(record)] if record is not None else []


def expire_leases(state: State, now: float) -> list[act.Action]:
    """Remove engines whose lease has run out."""
    actions: list[act.Action] = []
    for engine_id in state.engines.expired(now):
        actions += remove_engine(state, engine_id, "LEASE_EXPIRED")
    return actions


def remove_engine(state: State, engine_id: str, reason: str) -> list[act.Action]:
    """Remove an engine and place its open trajectories again. reason: as in AnnounceEngineLost."""
    state.engines.remove(engine_id)
    state.planner.note_engines()
    actions: list[act.Action] = [act.RemoveEngine(engine_id), act.AnnounceEngineLost(engine_id, reason)]
    for record in state.table.on(engine_id):
        actions += place_again(state, record)
    for record in state.table.moving():
        if record.move is not None and record.move.target_engine_id == engine_id:
            actions += moves.cancel_move(state, record)
    return actions


def place_again(state: State, record: TrajectoryRecord) -> list[act.Action]:
    """Give a trajectory whose engine is gone another one, or none yet; its ticket is lost."""
    actions = moves.cancel_migration(record)
    ticket = record.live_ticket
    record = copy_with(record, move=None, engine_id="")
    if ticket is not None:
        record = copy_with(record, ticket=copy_with(ticket, status=TicketStatus.LOST))
    state.table.put(record)  # before choosing, so that the choice does not count it where it was
    engine = state.siting.choose(record)
    record = copy_with(
        record, engine_id=engine.spec.engine_id if engine is not None else "", revision=record.revision + 1
    )
    state.table.put(record)
    return [*actions, act.SaveTrajectory(record)]
