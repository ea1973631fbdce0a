"""Engines come, stay and go, and what that means for the trajectories on them.

Invariant: when an engine is dropped no live ticket for it remains, and each of its open trajectories has been placed
again, or waits unplaced for an engine.
"""

from treadle_core.actions import (
    Action,
    AnnounceEngineJoined,
    AnnounceEngineLost,
    RemoveEngine,
    SaveEngine,
    SaveTrajectory,
)
from treadle_core.events import EngineDeregistered, EngineRegistered, LeaseRenewed, WeightsUpdated
from treadle_core.model import TicketStatus, TrajectoryRecord, changed
from treadle_core.steps import moves
from treadle_core.steps.state import State

# Reasons of engine_lost.
LEASE_EXPIRED = "LEASE_EXPIRED"
DEREGISTERED = "DEREGISTERED"
REPLACED = "REPLACED"


def registered(state: State, event: EngineRegistered, now: float) -> list[Action]:
    """Takes an engine in. One that was here under the same id is a process of the past: what ran there is lost.
    Raises RequestIdReused."""
    if state.engines.known(event) is not None:
        return []
    actions = dropped(state, event.spec.engine_id, REPLACED) if event.spec.engine_id in state.engines else []
    record = state.engines.register(event, now)
    state.planner.note_engines()
    return [*actions, SaveEngine(record), AnnounceEngineJoined(record.spec)]


def renewed(state: State, event: LeaseRenewed, now: float) -> list[Action]:
    """Extends a lease. Only new weights are stored: a restart gives every lease its whole length again. Raises
    LeaseNotFound."""
    before = state.engines.spec(event.engine_id)
    record = state.engines.renew(event, now)
    return [SaveEngine(record)] if record.spec != before else []


def deregistered(state: State, event: EngineDeregistered, _now: float) -> list[Action]:
    """Takes an engine away at its sidecar's wish. Raises LeaseNotFound."""
    record = state.engines.check_deregistration(event)
    return dropped(state, record.spec.engine_id, DEREGISTERED)


def weights_updated(state: State, event: WeightsUpdated, _now: float) -> list[Action]:
    """Later tickets carry the new version."""
    record = state.engines.set_weight_version(event.engine_id, event.weight_version)
    return [SaveEngine(record)] if record is not None else []


def expired(state: State, now: float) -> list[Action]:
    """Drops engines whose lease has run out."""
    actions: list[Action] = []
    for engine_id in state.engines.expired(now):
        actions += dropped(state, engine_id, LEASE_EXPIRED)
    return actions


def dropped(state: State, engine_id: str, reason: str) -> list[Action]:
    """Takes an engine away and places its open trajectories again."""
    state.engines.remove(engine_id)
    state.planner.note_engines()
    actions: list[Action] = [RemoveEngine(engine_id), AnnounceEngineLost(engine_id, reason)]
    for record in state.table.on(engine_id):
        actions += placed_again(state, record)
    for record in state.table.moving():
        if record.move is not None and record.move.target_engine_id == engine_id:
            actions += moves.called_off(state, record)
    return actions


def placed_again(state: State, record: TrajectoryRecord) -> list[Action]:
    """Gives a trajectory whose engine is gone another one, or none yet; its ticket is lost."""
    actions = moves.withdrawn(record)
    ticket = record.live_ticket
    record = changed(record, move=None, engine_id="")
    if ticket is not None:
        record = changed(record, ticket=changed(ticket, status=TicketStatus.LOST))
    state.table.put(record)  # before choosing, so that the choice does not count it where it was
    engine = state.siting.choose(record)
    record = changed(
        record, engine_id=engine.spec.engine_id if engine is not None else "", revision=record.revision + 1
    )
    state.table.put(record)
    return [*actions, SaveTrajectory(record)]
