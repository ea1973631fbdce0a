"""Admission: which requested steps wait for their ticket, and when they get it.

Under a policy that reserves KV, a first step waits until its engine has a slot for it and room for
all the KV that the trajectory is expected to need, beside the reserves of the trajectories that
have started there. A slot is free, or taken by a live step of clearly lower priority: else
returning steps of short trajectories would keep a long one from its start. While it waits, a new
plan can send it to another engine at no cost; where its engine is gone, it goes to another one, or
to the first that registers. Waiting steps of one engine start in the order of their priority; none
overtakes one that does not fit. Without reserves, an engine would start more trajectories than its
KV can hold. It would evict the context of a trajectory whose tool runs, and prefill the same tokens
again after every tool call. (This rule is not in Heddle, which starts all trajectories and evicts.)

Where several jobs use the engines, the next job is chosen first (`tables.jobs`, ADR 0039), and then
its step of the highest priority. A job that uses less than its share may start a trajectory within
its share of an engine, although others have filled that engine. If none of its steps waits for an
engine with room, a step that waits for another engine moves there.

A later step waits until the trajectory's KV has moved to another engine, for no longer than the
move saves.
"""

from collections.abc import Sequence

from treadle_core import events as ev
from treadle_core.actions import (
    Action,
    Decided,
    IssueTicket,
    KeepWaiting,
    QueueSeen,
    SaveTrajectory,
    StepWaits,
)
from treadle_core.model import (
    Cause,
    EngineRecord,
    EngineSpec,
    PlacementRule,
    TrajectoryRecord,
    copy_with,
)
from treadle_core.refusals import ContextTooLong, NoEngine
from treadle_core.state import State
from treadle_core.steps import moves, tickets
from treadle_core.tables.engines import carries_tags, fits_context
from treadle_core.tables.trajectories import NOTHING
from treadle_core.tables.waiting import Place


def request_step(state: State, event: ev.StepRequested, now: float) -> list[Action]:
    """Answer a request with a ticket, or let the step wait for one. Raises what `check_request`
    raises, TrajectoryNotFound, ContextTooLong, NoEngine."""
    record = state.table.require(event.trajectory_id)
    state.jobs.touch(record.job_id, now)
    kind = tickets.check_request(record, event)
    if kind is tickets.StepKind.REPEAT:
        assert record.ticket is not None, "only a ticket's own request repeats"
        state.table.put(copy_with(record, touched_s=now))
        return [IssueTicket(record.ticket, repeats=True)]
    if kind is tickets.StepKind.NEXT and must_wait(state, record):
        return let_wait(state, event, now)
    actions = tickets.issue_ticket(state, record, event, kind, now)
    if event.trajectory_id in state.waiting.requests:  # at an engine that is gone
        stop_waiting(state, event.trajectory_id)
    return actions


def must_wait(state: State, record: TrajectoryRecord) -> bool:
    """Return whether the next step of a trajectory has to wait."""
    if not record.policy.reserve:
        return False
    if record.ticket is not None:
        return record.move is not None and not record.move.has_switched(record.engine_id)
    spec = state.engines.spec(record.engine_id)
    if (
        record.pinned_engine_id or spec is None
    ):  # without an engine the placement rule finds one, or refuses
        return False
    if record.prediction is None or state.waiting.requests:
        return True
    return not _needs_no_plan(state, record, spec)


def let_wait(state: State, event: ev.StepRequested, now: float) -> list[Action]:
    """Keep a request until its step may start. Raises ContextTooLong, since waiting would not
    help."""
    trajectory_id = event.trajectory_id
    record = state.table.require(trajectory_id)
    state.siting.require_fitting(record, event.context_tokens)
    record = copy_with(record, touched_s=now)  # a client that repeats its request has not left
    state.table.put(record)
    state.table.watch(trajectory_id)
    actions: list[Action] = [KeepWaiting(trajectory_id)]
    if state.waiting.add(event):
        if record.ticket is not None:
            actions.append(StepWaits(trajectory_id, Cause.MOVE))
        actions += _enqueue(state, trajectory_id)
        pattern, *values = _explain_wait(state, record)
        actions.append(Decided(trajectory_id, "held", record.engine_id, pattern, tuple(values)))
        actions += moves.limit_wait(state, record, now)
    return actions


def answer_waiting(state: State, event: ev.Event, now: float) -> list[Action]:
    """Issue tickets for the waiting steps that may start after this event."""
    match event:
        case ev.StepFinished() | ev.TrajectoryClosed() | ev.StepUnknown():
            record = state.table.get(event.trajectory_id)
            if record is None:
                return []
            return _start_first_steps(
                state, record.engine_id, now, state.shares.divide(state.waiting.jobs, now)
            )
        case ev.PredictionArrived():
            record = state.table.get(event.trajectory_id)
            spec = state.engines.spec(record.engine_id) if record is not None else None
            alone = len(state.waiting.requests) == 1 and event.trajectory_id in state.waiting
            if (
                record is None
                or spec is None
                or not alone
                or not _needs_no_plan(state, record, spec)
            ):
                return []
            return _start_first_steps(state, record.engine_id, now, shared=False)
        case ev.MoveEnded() | ev.SwitchRequested():
            return _start_after_move(state, event.trajectory_id, now)
        case (
            ev.PlanArrived() | ev.EngineRegistered() | ev.DrainSet() | ev.GroupSettled() | ev.Tick()
        ):
            actions: list[Action] = []
            for trajectory_id in state.waiting.by_arrival(state.table.take_changed()):
                actions += _enqueue(state, trajectory_id)
                actions += _start_after_move(state, trajectory_id, now)
            sent = [*_place_waiting(state), *_follow_plan(state)]
            actions += sent
            shared = state.shares.divide(state.waiting.jobs, now)
            # A step of a job below its share may wait elsewhere.
            for engine_id in (
                [each.spec.engine_id for each in state.engines]
                if shared
                else state.waiting.queued_engines()
            ):
                actions += _start_first_steps(state, engine_id, now, shared)
            # Trajectories that start now were saved with their tickets.
            moved = [each.trajectory_id for each in sent if isinstance(each, Decided)]
            return actions + [
                SaveTrajectory(state.table.require(each)) for each in moved if each in state.waiting
            ]
        case _:
            return []


def _needs_no_plan(state: State, record: TrajectoryRecord, spec: EngineSpec) -> bool:
    """Return whether a first step for which no other waits starts at once: its engine has room and
    is at most half full."""
    return 2 * state.table.tally(record.engine_id).started < spec.slot_limit and _fits(
        state, record, spec
    )


def _start_first_steps(state: State, engine_id: str, now: float, shared: bool) -> list[Action]:
    """Start trajectories on an engine while it has room, of one job highest priority first. shared:
    whether several jobs use the engines."""
    engine = state.engines.get(engine_id)
    loads = engine is not None and engine.behind
    actions = _see_queue(state, engine_id, loads)
    if engine is None or loads:
        return actions
    if shared:
        return actions + _start_by_share(state, engine, now)
    for job in list(state.waiting.jobs):
        queue, refused = state.waiting.jobs[job].get(engine_id, ()), 0
        while (record := _next_in_queue(state, queue, refused, engine_id)) and _fits(
            state, record, engine.spec
        ):
            actions += _issue(state, record, now)
            refused += record.trajectory_id in state.waiting
    return actions


def _start_by_share(state: State, engine: EngineRecord, now: float) -> list[Action]:
    """Start trajectories on an engine that several jobs use, of the job whose turn it is."""
    actions: list[Action] = []
    refused = dict.fromkeys(state.waiting.jobs, 0)
    blocked = ""  # a job whose next step does not fit
    while refused:
        job = state.shares.next(refused)
        queue = state.waiting.queue(engine.spec.engine_id, job)
        record = _next_in_queue(state, queue, refused[job], engine.spec.engine_id)
        here = record is not None
        record = record or (None if refused[job] else _next_elsewhere(state, engine, job))
        if record is None or not _fits_share(state, record, engine.spec, blocked):
            del refused[job]
            blocked = blocked or (job if here else "")
            continue
        if not here:
            actions += _send_to(state, record, engine)
            record = state.table.require(record.trajectory_id)
        actions += _issue(state, record, now)
        refused[job] += record.trajectory_id in state.waiting
        state.shares.note_start(state.table.require(record.trajectory_id))
    return actions


def _next_in_queue(
    state: State, queue: Sequence[Place], refused: int, engine_id: str
) -> TrajectoryRecord | None:
    """Return the first trajectory in a queue behind the `refused` ones."""
    while refused < len(queue):
        trajectory_id = queue[refused].trajectory_id
        record = state.table.get(trajectory_id)
        if record is not None and _waits_to_start(record) and record.engine_id == engine_id:
            return record
        state.waiting.dequeue(trajectory_id)  # it closed, started elsewhere, or goes elsewhere now
    return None


def _next_elsewhere(state: State, engine: EngineRecord, job: str) -> TrajectoryRecord | None:
    """Return a trajectory that waits for another engine and can run on this one, of a job that uses
    less than its share."""
    if not state.shares.is_below(job) or not engine.usable:
        return None
    for _, _, trajectory_id in sorted(queue[0] for queue in state.waiting.queues(job).values()):
        record = state.table.get(trajectory_id)
        if (
            record is not None
            and _waits_to_start(record)
            and record.policy.placement in (PlacementRule.PLANNED, PlacementRule.LEAST_LOAD)
            and not record.pinned_engine_id
            and carries_tags(engine, record)
            and fits_context(engine, state.waiting.request(trajectory_id).context_tokens)
        ):
            return record
    return None


def _fits_share(state: State, record: TrajectoryRecord, spec: EngineSpec, blocked: str) -> bool:
    """Return whether an engine has a slot and room for a trajectory, or the job's share of the
    engine has. blocked: a job whose next step does not fit, and which is not overtaken
    otherwise."""
    shares, tally = state.shares, state.table.tally(spec.engine_id)
    if blocked and not shares.may_pass(record.job, blocked):
        return False
    tokens, mine = tickets.reserve_tokens(state, record), tally.jobs.get(record.job, NOTHING)
    # The engine's queue gives each job its slots, of whatever tickets are there.
    has_slot = (not blocked and tally.live_tickets < spec.slot_limit) or _has_slot(
        state, record, mine.live, shares.owned_slots(record.job, spec)
    )
    has_room = not blocked and tally.has_room(record, tokens, spec)
    return has_slot and (has_room or shares.owns_room(record, tokens, spec, mine))


def _enqueue(state: State, trajectory_id: str) -> list[Action]:
    """Put a first step into the queue of its engine, by its present priority; any other step into
    none."""
    record = state.table.get(trajectory_id)
    if record is not None and _waits_to_start(record):
        state.waiting.enqueue(record.engine_id, trajectory_id, record.priority, record.job)
        engine = state.engines.get(record.engine_id)
        loads = engine is not None and engine.behind
        cause = Cause.WEIGHTS if loads else Cause.HELD
        return [*_see_queue(state, record.engine_id, loads), StepWaits(trajectory_id, cause)]
    state.waiting.dequeue(trajectory_id)
    return []


def _see_queue(state: State, engine_id: str, loads: bool) -> list[Action]:
    """Return a note that an engine's queue waits for weights, or does so no more, where that is
    new. Each look at a queue would make one, and a tick looks at all of them."""
    is_known = loads is state.books.waits.is_loading(engine_id)
    return [] if is_known else [QueueSeen(engine_id, loads)]


def _waits_to_start(record: TrajectoryRecord) -> bool:
    return record.is_open and record.ticket is None


def _fits(state: State, record: TrajectoryRecord, spec: EngineSpec) -> bool:
    tally = state.table.tally(spec.engine_id)
    return _has_slot(state, record, tally.live, spec.slot_limit) and tally.has_room(
        record, tickets.reserve_tokens(state, record), spec
    )


def _has_slot(state: State, record: TrajectoryRecord, live: Sequence[float], slots: int) -> bool:
    """Return whether one of the slots is free, or taken by a live step of clearly lower priority.
    live: as in Tally."""
    if len(live) < slots:
        return True
    last = live[-slots]  # of the steps that run first
    return record.priority > last and state.priorities.must_report(
        record.policy, last, record.priority
    )


def _explain_wait(state: State, record: TrajectoryRecord) -> tuple[str, object, object]:
    """Return why a step waits now: a pattern and its values."""
    engine, move = state.engines.get(record.engine_id), record.move
    if move is not None:
        return "its KV moves to {}; it waits {:.2f} s at most", move.target_engine_id, move.saving_s
    if engine is None or engine.behind:
        return "the engine is gone, or loads weights", "", ""
    tally, spec = state.table.tally(record.engine_id), engine.spec
    if not _has_slot(state, record, tally.live, spec.slot_limit):
        return "no slot: {} steps have tickets, for {} slots", tally.live_tickets, spec.slot_limit
    needs_tokens = tickets.reserve_tokens(state, record)
    if not tally.has_room(record, needs_tokens, spec):
        return (
            "no room: {} KV tokens are reserved, and it needs {}",
            tally.kv_reserve_tokens,
            needs_tokens,
        )
    return (
        "others wait, or a plan is due: {} wait, {} have begun",
        len(state.waiting.requests),
        tally.started,
    )


def _start_after_move(state: State, trajectory_id: str, now: float) -> list[Action]:
    """Issue the ticket of a later step that need not wait any more; forget the request of a closed
    trajectory."""
    record = state.table.get(trajectory_id)
    if record is None or not record.is_open:
        stop_waiting(state, trajectory_id)
    elif (
        trajectory_id in state.waiting
        and record.ticket is not None
        and not must_wait(state, record)
    ):
        return _issue(state, record, now)
    return []


def _follow_plan(state: State) -> list[Action]:
    """Send waiting first steps where the newest plan wants them, if that is another engine."""
    actions: list[Action] = []
    for trajectory_id in state.waiting.by_arrival(state.planner.targeted()):
        record = state.table.require(trajectory_id)
        if record.ticket is None and record.policy.placement is PlacementRule.PLANNED:
            target = state.engines.get(state.planner.target(record))
            if target is not None and target.usable and target.spec.engine_id != record.engine_id:
                actions += _send_to(state, record, target)
    return actions


def _place_waiting(state: State) -> list[Action]:
    """Send waiting first steps that lost their only engine to one that has registered since."""
    actions: list[Action] = []
    lost = [place for job in state.waiting.jobs for place in state.waiting.queue("", job)]
    for _, _, trajectory_id in sorted(lost):
        record = state.table.require(trajectory_id)
        engine = state.siting.choose(record)
        if engine is not None:
            actions += _send_to(state, record, engine)
    return actions


def _send_to(state: State, record: TrajectoryRecord, engine: EngineRecord) -> list[Action]:
    """Make an engine the owner of a trajectory whose first step waits, and queue the step there."""
    record = copy_with(record, engine_id=engine.spec.engine_id, revision=record.revision + 1)
    record = copy_with(record, priority=state.priority(record))
    state.table.put(record)
    state.planner.drop_target(record)
    planned = Decided(record.trajectory_id, "planned", record.engine_id, "before its first step")
    return [planned, *_enqueue(state, record.trajectory_id)]


def _issue(state: State, record: TrajectoryRecord, now: float) -> list[Action]:
    event = state.waiting.request(record.trajectory_id)
    try:
        actions = tickets.issue_ticket(state, record, event, tickets.StepKind.NEXT, now)
    except (
        NoEngine,
        ContextTooLong,
    ) as lack:  # the engines have changed; the client's next request is refused
        state.table.put(record)  # so that the next tick, at the latest, looks at it again
        return (
            tickets.note_lack(state, record.trajectory_id, lack)
            if isinstance(lack, NoEngine)
            else []
        )
    stop_waiting(state, record.trajectory_id)
    return actions


def stop_waiting(state: State, trajectory_id: str) -> None:
    """Forget the request of a trajectory, if one waits."""
    state.waiting.remove(trajectory_id)
    state.table.unwatch(trajectory_id)
