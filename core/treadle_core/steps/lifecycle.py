"""Trajectories come and go: opening, closing, announcing, forgetting."""

from treadle_core.actions import (
    AbortStep,
    Action,
    AnnounceClosed,
    AnnounceOpened,
    AskPrediction,
    CancelMigration,
    ForgetTrajectory,
    ReleasePrefix,
    SaveTrajectory,
)
from treadle_core.events import ClosedAnnounced, TrajectoryClosed, TrajectoryOpened
from treadle_core.model import Outcome, TrajectoryRecord, TrajectoryState, changed
from treadle_core.refusals import EngineNotFound, RequestIdReused, TrajectoryExists, TrajectoryIsClosed
from treadle_core.steps import tickets
from treadle_core.steps.state import State

CLOSED_STATES = {
    Outcome.FINISHED: TrajectoryState.FINISHED,
    Outcome.TRUNCATED: TrajectoryState.FINISHED,
    Outcome.FAILED: TrajectoryState.FAILED,
    Outcome.CANCELLED: TrajectoryState.CANCELLED,
}

# close_request_id of a trajectory that the scheduler itself gave up.
ABANDONED = "abandoned"


def opened(state: State, event: TrajectoryOpened, now: float) -> list[Action]:
    """Admits a trajectory, placed where an engine is there. Raises TrajectoryExists, RequestIdReused,
    EngineNotFound."""
    known = state.table.get(event.trajectory_id)
    if known is not None:
        if known.open_request_id != event.request_id:
            raise TrajectoryExists(
                f"{event.trajectory_id} was opened by another request; leave trajectory_id empty to have one minted",
                trajectory_id=event.trajectory_id,
            )
        if _asked(known) != event:
            raise RequestIdReused(
                "request_id", f"{event.request_id} has opened {event.trajectory_id} with other values"
            )
        return []
    if event.pinned_engine_id and event.pinned_engine_id not in state.engines:
        raise EngineNotFound(
            f"pinned_engine_id: no engine {event.pinned_engine_id} holds a lease", engine_id=event.pinned_engine_id
        )
    record = TrajectoryRecord(
        trajectory_id=event.trajectory_id,
        prompt_id=event.prompt_id,
        policy=state.policy,
        opened_s=now,
        open_request_id=event.request_id,
        rollout_id=event.rollout_id,
        sample=event.sample,
        prompt_tokens=event.prompt_tokens,
        max_total_tokens=event.max_total_tokens,
        deadline_s=event.deadline_s,
        hardware_tags=event.hardware_tags,
        pinned_engine_id=event.pinned_engine_id,
        requested_s=now,
        touched_s=now,
    )
    engine = state.siting.choose(record)
    if engine is not None:
        record = changed(record, engine_id=engine.spec.engine_id, revision=1)
    record = changed(record, priority=state.priority(record))
    state.table.put(record)
    state.planner.opened(record)
    state.sweeps.set(record.trajectory_id, now + state.tuning.abandon_after_s)
    return [SaveTrajectory(record), AnnounceOpened(record), asked_prediction(record)]


def asked_prediction(record: TrajectoryRecord) -> AskPrediction:
    """The question how much is left of a trajectory as it is now."""
    return AskPrediction(
        trajectory_id=record.trajectory_id,
        prompt_id=record.prompt_id,
        sample=record.sample,
        turn=record.next_turn,
        gen_tokens=record.gen_tokens,
        context_tokens=record.context_tokens or record.prompt_tokens,
        prompt_tokens=record.prompt_tokens,
        max_total_tokens=record.max_total_tokens,
    )


def closed(state: State, event: TrajectoryClosed, now: float) -> list[Action]:
    """Ends a trajectory. Raises TrajectoryNotFound, TrajectoryIsClosed, RequestIdReused."""
    record = state.table.require(event.trajectory_id)
    if not record.is_open:
        if record.close_request_id != event.request_id:
            raise TrajectoryIsClosed(
                f"{event.trajectory_id} is {record.state.value} already", trajectory_id=event.trajectory_id
            )
        if (record.outcome, record.reward) != (event.outcome, event.reward):
            raise RequestIdReused(
                "request_id", f"{event.request_id} has closed {event.trajectory_id} with another outcome or reward"
            )
        return []
    return _close(state, record, event.request_id, event.outcome, event.reward, now)


def announced(state: State, event: ClosedAnnounced, _now: float) -> list[Action]:
    """The closing is published."""
    state.unannounced.pop(event.trajectory_id, None)
    record = state.table.get(event.trajectory_id)
    if record is None or record.announced:
        return []
    record = changed(record, announced=True)
    state.table.put(record)
    return [SaveTrajectory(record)]


def announce_if_settled(state: State, record: TrajectoryRecord, now: float) -> list[Action]:
    """Publishes a closing once all its tokens are counted."""
    if record.is_open or record.announced or record.uncounted:
        return []
    return _announce(state, record, now)


def announce_due(state: State, now: float) -> list[Action]:
    """Publishes closings that have waited long enough for the last tokens, or for a confirmation."""
    actions: list[Action] = []
    for trajectory_id in [trajectory_id for trajectory_id, due_s in state.unannounced.items() if due_s <= now]:
        record = state.table.get(trajectory_id)
        if record is None:
            del state.unannounced[trajectory_id]
        else:
            actions += _announce(state, record, now)
    return actions


def swept(state: State, now: float) -> list[Action]:
    """Closes what nobody touches any more, and forgets what closed long ago."""
    actions: list[Action] = []
    for trajectory_id in state.sweeps.due(now):
        record = state.table.get(trajectory_id)
        if record is None:
            continue
        due_s = sweep_s(state, record)
        if due_s > now:  # touched since
            state.sweeps.set(trajectory_id, due_s)
        elif record.is_open:
            actions += _close(state, record, ABANDONED, Outcome.FAILED, None, now)
        elif not record.announced:
            state.sweeps.set(trajectory_id, now + state.tuning.announce_again_s)
        else:
            state.table.forget(trajectory_id)
            actions.append(ForgetTrajectory(trajectory_id))
    return actions


def sweep_s(state: State, record: TrajectoryRecord) -> float:
    """When a trajectory is to be closed as abandoned, or, if it is closed, to be forgotten."""
    if record.closed_s is None:
        return record.touched_s + state.tuning.abandon_after_s
    return record.closed_s + state.tuning.keep_closed_s


def _close(
    state: State, record: TrajectoryRecord, request_id: str, outcome: Outcome, reward: float | None, now: float
) -> list[Action]:
    actions: list[Action] = []
    engine = state.engines.spec(record.engine_id)
    ticket, move = record.live_ticket, record.move
    if ticket is not None and engine is not None and outcome in (Outcome.CANCELLED, Outcome.FAILED):
        actions.append(AbortStep(engine.address, ticket.ticket_id))
    if move is not None and move.migration_id:
        actions.append(CancelMigration(record.trajectory_id, move.migration_id))
    if engine is not None and record.ticket is not None:
        actions.append(ReleasePrefix(engine.address, record.trajectory_id))
    record = changed(
        tickets.left_behind(record),
        state=CLOSED_STATES[outcome],
        outcome=outcome,
        reward=reward,
        closed_s=now,
        close_request_id=request_id,
        move=None,
        touched_s=now,
    )
    state.table.put(record)
    state.planner.closed(record)
    state.sweeps.set(record.trajectory_id, now + state.tuning.keep_closed_s)
    state.unannounced[record.trajectory_id] = now + state.tuning.close_settle_s
    return [SaveTrajectory(record), *actions, *announce_if_settled(state, record, now)]


def _announce(state: State, record: TrajectoryRecord, now: float) -> list[Action]:
    assert record.outcome is not None, "a closed trajectory has an outcome"
    state.unannounced[record.trajectory_id] = now + state.tuning.announce_again_s
    return [AnnounceClosed(record, record.outcome)]


def _asked(record: TrajectoryRecord) -> TrajectoryOpened:
    """The request that opened a trajectory."""
    return TrajectoryOpened(
        request_id=record.open_request_id,
        trajectory_id=record.trajectory_id,
        prompt_id=record.prompt_id,
        rollout_id=record.rollout_id,
        sample=record.sample,
        prompt_tokens=record.prompt_tokens,
        max_total_tokens=record.max_total_tokens,
        deadline_s=record.deadline_s,
        hardware_tags=record.hardware_tags,
        pinned_engine_id=record.pinned_engine_id,
    )
