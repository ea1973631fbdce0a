"""Handlers of engines, which sidecars hold by leases, and of jobs, by which clients hold their
trajectories (ADR 0034).

When an engine is removed, no live ticket for it remains, and each of its open trajectories gets
another engine, or none until one registers.

An engine that is drained keeps its lease and the steps that run there. Its other trajectories get
another engine at once, and each of those when its step has ended, so that it is empty soon. What no
other engine can run stays.

When a job ends (its lease runs out, its client closes it, or another client resumes it) its open
trajectories are closed as failed, by the same path as any other closing: running steps are aborted,
KV and slots are free, waiting steps stop waiting, and the fact of the closing ends sessions. An
open trajectory of a job always has a job that is held.
"""

from dataclasses import replace

from treadle_core import actions as act
from treadle_core.events import (
    DrainSet,
    EngineDeregistered,
    EngineRegistered,
    JobClosed,
    JobOpened,
    JobRenewed,
    LeaseRenewed,
)
from treadle_core.model import JobRecord, TicketStatus, TrajectoryRecord, copy_with
from treadle_core.refusals import BadField, EngineNotFound, LastEngine, RequestIdReused
from treadle_core.state import State
from treadle_core.steps import lifecycle, moves


def register_engine(state: State, event: EngineRegistered, now: float) -> list[act.Action]:
    """Add an engine. An engine that was here under the same id has restarted: its steps are lost.
    Raises RequestIdReused."""
    if state.engines.find_repeat(event) is not None:
        return []
    actions: list[act.Action] = []
    if event.spec.engine_id in state.engines:
        actions = remove_engine(state, event.spec.engine_id, "REPLACED", now)
    record = state.engines.register(event, now)
    state.siting.note_engine(record.spec)
    return [
        *actions,
        act.EnginesChanged(),
        act.SaveEngine(record),
        act.AnnounceEngineJoined(record.spec),
    ]


def renew_lease(state: State, event: LeaseRenewed, now: float) -> list[act.Action]:
    """Extend a lease. Only new weights and a new curve are saved, as a restart gives every lease
    its whole length again. Raises LeaseNotFound."""
    before = state.engines.require_lease(event.lease_id, event.engine_id)
    record = state.engines.renew(event, now)
    actions: list[act.Action] = [act.SaveEngine(record)] if record.spec != before.spec else []
    if (record.spec.decode_curve, record.behind) != (before.spec.decode_curve, before.behind):
        actions.append(act.EnginesChanged())
    return actions


def deregister_engine(state: State, event: EngineDeregistered, now: float) -> list[act.Action]:
    """Remove an engine at its sidecar's request. Raises LeaseNotFound."""
    record = state.engines.require_lease(event.lease_id, event.engine_id)
    return remove_engine(state, record.spec.engine_id, "DEREGISTERED", now)


def expire_engines(state: State, now: float) -> list[act.Action]:
    """Remove engines whose lease has run out."""
    actions: list[act.Action] = []
    for engine_id in state.engines.expired(now):
        actions += remove_engine(state, engine_id, "LEASE_EXPIRED", now)
    return actions


def remove_engine(state: State, engine_id: str, reason: str, now: float) -> list[act.Action]:
    """Remove an engine and place its open trajectories again. reason: as in AnnounceEngineLost."""
    state.engines.remove(engine_id)
    actions: list[act.Action] = [act.EnginesChanged(), act.RemoveEngine(engine_id)]
    actions.append(act.AnnounceEngineLost(engine_id, reason))
    for record in state.table.on(engine_id):
        ticket = record.live_ticket
        if ticket is not None and ticket.engine_id == engine_id:
            state.engines.note_loss(ticket, now)
        actions += place_again(state, record)
    return [*actions, *_cancel_moves_to(state, engine_id)]


def set_drain(state: State, event: DrainSet, now: float) -> list[act.Action]:
    """Empty an engine, or use it again. Raises EngineNotFound; LastEngine where no other engine
    takes steps."""
    engine_id, drained = event.engine_id, set(state.engines.drained)
    if engine_id not in state.engines and (event.draining or engine_id not in drained):
        raise EngineNotFound(f"no engine {engine_id} holds a lease", engine_id=engine_id)
    if event.draining == (engine_id in drained):
        return []
    others = (each for each in state.engines if each.spec.engine_id != engine_id)
    if event.draining and not any(each.able and not each.draining for each in others):
        raise LastEngine(
            f"no engine but {engine_id} takes steps now: start one, or end the drain of another, "
            "first",
            engine_id=engine_id,
        )
    state.engines.drain(drained | {engine_id} if event.draining else drained - {engine_id})
    actions: list[act.Action] = [act.EnginesChanged(), act.SaveDrained()]
    if event.draining:
        actions += _cancel_moves_to(state, engine_id)
    for record in state.table.on(engine_id):
        actions += moves.leave_drained(state, record)
    return actions


def _cancel_moves_to(state: State, engine_id: str) -> list[act.Action]:
    actions: list[act.Action] = []
    for record in state.table.moving():
        move = record.move
        if (
            move is not None
            and move.target_engine_id == engine_id
            and not move.has_switched(record.engine_id)
        ):
            actions += moves.cancel_move(state, record)
    return actions


def place_again(state: State, record: TrajectoryRecord) -> list[act.Action]:
    """Give a trajectory whose engine is gone another one, or none yet; its ticket becomes lost."""
    gone = record.engine_id
    actions = moves.cancel_migration(record)
    ticket = record.live_ticket
    record = copy_with(record, move=None, engine_id="")
    if ticket is not None:
        record = copy_with(record, ticket=copy_with(ticket, status=TicketStatus.LOST))
    state.table.put(record)  # before choosing, so that the choice does not count it where it was
    engine = state.siting.choose(record)
    record = copy_with(
        record,
        engine_id=engine.spec.engine_id if engine is not None else "",
        revision=record.revision + 1,
    )
    state.table.put(record)
    why = ("{} cannot serve it any more", (gone,))
    placed = act.Decided(record.trajectory_id, "placed", record.engine_id, *why)
    return [*actions, act.SaveTrajectory(record), placed]


def open_job(state: State, event: JobOpened, now: float) -> list[act.Action]:
    """Let a client hold a job. With `resume` it takes over the rollouts of the clients before it,
    whose trajectories are closed. Raises BadField, RequestIdReused, JobTakenOver."""
    if event.resume and not event.name:
        raise BadField(
            "job", "must not be empty with resume: the next client finds the job by its name"
        )
    if event.weight and not event.name:
        raise BadField(
            "job",
            "must not be empty with weight: clients without a name have one share of weight 1 "
            "together",
        )
    if state.jobs.get(event.job_id) is not None:
        record = state.jobs.require(event.job_id)
        given = (
            event.name,
            event.resume,
            event.weight or record.weight,
            event.policy or record.policy,
        )
        if (record.name, record.resume, record.weight, record.policy) != given:
            raise RequestIdReused(
                "request_id", f"{event.request_id} has opened {event.job_id} with other values"
            )
        return renew_job(state, JobRenewed(event.job_id), now)
    before = state.jobs.resumable(event.name) if event.resume else []
    rollout_ids = tuple(
        dict.fromkeys(rollout_id for record in before for rollout_id in record.rollout_ids)
    )
    weight = event.weight or max((record.weight for record in before), default=1.0)
    policy = event.policy or next((record.policy for record in before if record.policy), None)
    opened = JobRecord(
        event.job_id,
        event.request_id,
        event.name,
        event.resume,
        rollout_ids,
        weight=weight,
        policy=policy,
    )
    actions: list[act.Action] = [act.SaveJob(state.jobs.hold(opened, now))]
    for record in before:
        actions += _end_job(state, record, now, event.job_id)
    return actions


def renew_job(state: State, event: JobRenewed, now: float) -> list[act.Action]:
    """Extend the lease, which is saved only where the job had ended or its rollouts change. Raises
    JobNotFound, JobTakenOver."""
    before = state.jobs.require(event.job_id)
    changed = (
        before if event.rollout_ids is None else replace(before, rollout_ids=event.rollout_ids)
    )
    record = state.jobs.hold(changed, now)
    return [act.SaveJob(record)] if record != before else []


def close_job(state: State, event: JobClosed, now: float) -> list[act.Action]:
    """End a job at its client's request; no change for a job that is gone or was taken over."""
    record = state.jobs.get(event.job_id)
    return (
        _end_job(state, record, now)
        if record is not None and state.jobs.is_held(event.job_id)
        else []
    )


def expire_jobs(state: State, now: float) -> list[act.Action]:
    """End jobs whose lease has run out, and forget those that nobody has resumed."""
    actions: list[act.Action] = []
    for record in state.jobs.run_out(now):
        actions += _end_job(state, record, now)
    for job_id in state.jobs.forgettable(now):
        state.jobs.remove(job_id)
        actions.append(act.RemoveJob(job_id))
    return actions


def close_without_job(state: State, now: float) -> list[act.Action]:
    """Close open trajectories whose job has ended: after a restart, when the job's end was stored
    and theirs was not."""
    actions: list[act.Action] = []
    for record in state.table.open_records():
        if record.job_id and not state.jobs.is_held(record.job_id):
            actions += lifecycle.close_abandoned(state, record, now)
    return actions


def _end_job(
    state: State, record: JobRecord, now: float, successor_id: str = ""
) -> list[act.Action]:
    kept = state.jobs.end(record, now, successor_id)
    return [
        act.SaveJob(kept) if kept is not None else act.RemoveJob(record.job_id),
        *close_without_job(state, now),
    ]
