"""Handlers of trajectories: opening, closing, announcing the closing, forgetting."""

from dataclasses import fields, replace

from treadle_core import actions as act
from treadle_core.events import ClosedAnnounced, GroupSettled, TrajectoryClosed, TrajectoryOpened
from treadle_core.model import (
    ASYNCHRONOUS_POLICY,
    TREADLE_POLICY,
    JobRecord,
    Outcome,
    Policy,
    TrajectoryRecord,
    TrajectoryState,
    copy_with,
)
from treadle_core.refusals import (
    EngineNotFound,
    RequestIdReused,
    TrajectoryExists,
    TrajectoryIsClosed,
)
from treadle_core.state import State
from treadle_core.steps import moves, tickets
from treadle_core.tuning import Tuning

CLOSED_STATES = {
    Outcome.FINISHED: TrajectoryState.FINISHED,
    Outcome.TRUNCATED: TrajectoryState.FINISHED,
    Outcome.FAILED: TrajectoryState.FAILED,
    Outcome.CANCELLED: TrajectoryState.CANCELLED,
}

# close_request_id of a trajectory that the scheduler closed itself
ABANDONED, SETTLED = "abandoned", "settled"

# Fields that the request and the record of an opening have in common.
OPENING_FIELDS = [field.name for field in fields(TrajectoryOpened) if field.name != "request_id"]


def open_trajectory(state: State, event: TrajectoryOpened, now: float) -> list[act.Action]:
    """Admit a trajectory, and place it where there is an engine. Raises TrajectoryExists,
    RequestIdReused, EngineNotFound, JobNotFound, JobTakenOver."""
    values = {name: getattr(event, name) for name in OPENING_FIELDS}
    known = state.table.get(event.trajectory_id)
    if known is not None:
        if known.open_request_id != event.request_id:
            raise TrajectoryExists(
                f"{event.trajectory_id} was opened by another request; leave trajectory_id empty "
                "to have one minted",
                trajectory_id=event.trajectory_id,
            )
        if any(getattr(known, name) != value for name, value in values.items()):
            raise RequestIdReused(
                "request_id",
                f"{event.request_id} has opened {event.trajectory_id} with other values",
            )
        return []
    job = state.jobs.require(event.job_id) if event.job_id else None
    if event.pinned_engine_id and event.pinned_engine_id not in state.engines:
        raise EngineNotFound(
            f"pinned_engine_id: no engine {event.pinned_engine_id} holds a lease",
            engine_id=event.pinned_engine_id,
        )
    record = TrajectoryRecord(
        **values,
        policy=_policy_of(state, job, event),
        job=job.name if job is not None else "",
        opened_s=now,
        open_request_id=event.request_id,
        requested_s=now,
        touched_s=now,
    )
    engine, placed = state.siting.choose(record), list[act.Action]()
    if engine is not None:
        record = copy_with(record, engine_id=engine.spec.engine_id, revision=1)
        placed.append(
            act.Decided(record.trajectory_id, "placed", engine.spec.engine_id, *state.siting.why)
        )
    state.note_work(record)
    record = copy_with(record, priority=state.priority(record))
    state.table.put(record)
    state.sweeps.set(record.trajectory_id, sweep_s(state, record, now))
    actions = [
        *placed,
        act.SaveTrajectory(record),
        act.AnnounceOpened(record),
        act.AskPrediction(record),
    ]
    if (
        job is not None and (held := state.jobs.hold(job, now)) != job
    ):  # it had ended, and is held again
        actions.append(act.SaveJob(held))
    return actions


def _policy_of(state: State, job: JobRecord | None, event: TrajectoryOpened) -> Policy:
    """Return the job's policy, else the mesh's. In place of the one that a mesh starts with, a
    trajectory whose trainer does not wait has ASYNCHRONOUS_POLICY."""
    if job is not None and job.policy is not None:
        return job.policy
    if event.asynchronous and state.policy == TREADLE_POLICY:
        return ASYNCHRONOUS_POLICY
    return state.policy


def close_trajectory(state: State, event: TrajectoryClosed, now: float) -> list[act.Action]:
    """End a trajectory. Raises TrajectoryNotFound, TrajectoryIsClosed, RequestIdReused."""
    record = state.table.require(event.trajectory_id)
    state.jobs.touch(record.job_id, now)
    if not record.is_open:
        if record.close_request_id != event.request_id:
            raise TrajectoryIsClosed(record.trajectory_id, record.state.value)
        if (record.outcome, record.reward) != (event.outcome, event.reward):
            raise RequestIdReused(
                "request_id",
                f"{event.request_id} has closed {event.trajectory_id} with another outcome or "
                "reward",
            )
        return []
    times = event.client_times
    if times is not None:
        late_s = now - record.opened_s - times.since_opening_s if times.since_opening_s else 0.0
        # the request was on its way for so long
        times = times._replace(control_s=times.control_s + max(late_s, 0.0))
    record = copy_with(record, client_times=times or record.client_times)
    return _close(state, record, event.request_id, event.outcome, event.reward, now)


def end_group(state: State, event: GroupSettled, now: float) -> list[act.Action]:
    """Close the samples of a settled group that are still open, whatever their clients are
    doing."""
    unwanted = [
        record
        for record in state.table.open_records()
        if (record.rollout_id, record.prompt_id) == (event.rollout_id, event.prompt_id)
        and record.sample < event.samples
    ]
    return [
        action
        for record in unwanted
        for action in _close(state, record, SETTLED, Outcome.CANCELLED, None, now)
    ]


def confirm_announcement(state: State, event: ClosedAnnounced, _now: float) -> list[act.Action]:
    """Note that a closing has been published."""
    state.announcements.pop(event.trajectory_id, None)
    record = state.table.get(event.trajectory_id)
    if record is None or record.announced:
        return []
    record = copy_with(record, announced=True)
    state.table.put(record)
    return [act.SaveTrajectory(record)]


def announce_due(state: State, now: float) -> list[act.Action]:
    """Publish closings that have waited long enough for their last tokens, or for a
    confirmation."""
    actions: list[act.Action] = []
    for trajectory_id in [
        trajectory_id for trajectory_id, due_s in state.announcements.items() if due_s <= now
    ]:
        record = state.table.get(trajectory_id)
        if record is None:
            del state.announcements[trajectory_id]
        else:
            actions += tickets.announce(state, record, now)
    return actions


def bring_back(record: TrajectoryRecord, now: float, tuning: Tuning) -> TrajectoryRecord:
    """Return a stored record without times that are still to come: the scheduler before had a clock
    that was ahead. What waits for those times would wait for as long as the clocks differ."""
    ticket, move = record.ticket, record.move
    if ticket is not None:
        expires_s = min(ticket.expires_s, now + tuning.ticket_ttl_s)
        ticket = copy_with(ticket, issued_s=min(ticket.issued_s, now), expires_s=expires_s)
    if move is not None:
        give_up_s = min(move.give_up_s, now + tuning.move_timeout_s)
        move = replace(move, asked_s=min(move.asked_s, now), give_up_s=give_up_s)
    return copy_with(
        record,
        ticket=ticket,
        move=move,
        opened_s=min(record.opened_s, now),
        requested_s=min(record.requested_s, now),
        touched_s=min(record.touched_s, now),
        finished_step_s=_not_after(record.finished_step_s, now),
        closed_s=_not_after(record.closed_s, now),
    )


def _not_after(time_s: float | None, now: float) -> float | None:
    return None if time_s is None else min(time_s, now)


def sweep(state: State, now: float) -> list[act.Action]:
    """Close trajectories that no client uses any more, forget those that closed long ago, and query
    steps whose tickets have expired."""
    actions: list[act.Action] = []
    for trajectory_id in state.sweeps.take_due(now):
        record = state.table.get(trajectory_id)
        if record is None:
            continue
        due_s = sweep_s(state, record, now)
        if due_s > now:
            state.sweeps.set(trajectory_id, due_s)
            ticket = record.live_ticket
            if (
                ticket is not None and ticket.expires_s <= now
            ):  # its step may run for longer, or was never begun
                actions.append(act.AskStep(ticket))
        elif record.is_open:
            actions += close_abandoned(state, record, now)
        elif not record.announced:
            state.sweeps.set(trajectory_id, now + state.tuning.announce_again_s)
        else:
            state.table.forget(trajectory_id)
            actions.append(act.ForgetTrajectory(trajectory_id))
    return actions


def sweep_s(state: State, record: TrajectoryRecord, now: float) -> float:
    """Return when to look at a trajectory next: an open one since its ticket may have expired or,
    without a job, its client may have left it; a closed one to forget it."""
    if record.closed_s is not None:
        return record.closed_s + state.tuning.keep_closed_s
    ticket = record.live_ticket
    look_s = (
        ticket.expires_s
        if ticket is not None and ticket.expires_s > now
        else now + state.tuning.ticket_ttl_s
    )
    if record.job_id:
        return look_s
    return min(look_s, max(record.touched_s, state.restored_s) + state.tuning.abandon_after_s)


def close_abandoned(state: State, record: TrajectoryRecord, now: float) -> list[act.Action]:
    """Close an open trajectory that has lost its client."""
    return _close(state, record, ABANDONED, Outcome.FAILED, None, now)


def _close(
    state: State,
    record: TrajectoryRecord,
    request_id: str,
    outcome: Outcome,
    reward: float | None,
    now: float,
) -> list[act.Action]:
    actions: list[act.Action] = []
    engine = state.engines.spec(record.engine_id)
    ticket, move = record.live_ticket, record.move
    if ticket is not None and engine is not None and outcome in (Outcome.CANCELLED, Outcome.FAILED):
        actions.append(act.AbortStep(engine.address, ticket.ticket_id))
    if move is not None and move.migration_id:
        actions.append(act.CancelMigration(record.trajectory_id, move.migration_id))
    if engine is not None and record.ticket is not None:
        actions.append(act.ReleasePrefix(engine.address, record.trajectory_id))
    record = copy_with(
        tickets.end_ticket(state.books.waits.count(record, now)),
        state=CLOSED_STATES[outcome],
        outcome=outcome,
        reward=reward,
        closed_s=now,
        close_request_id=request_id,
        move=None,
        touched_s=now,
    )
    state.table.put(record)
    state.sweeps.set(record.trajectory_id, now + state.tuning.keep_closed_s)
    state.announcements[record.trajectory_id] = now + state.tuning.close_settle_s
    siblings = moves.siblings_of(state, record)
    state.needs.note_end(record, finished=outcome is Outcome.FINISHED)
    saved = [act.SaveTrajectory(record), act.TrajectoryEnded(record)]
    actions += moves.rank_again(state, siblings)
    return [*saved, *actions, *tickets.announce_if_counted(state, record, now)]
