"""State machine of the control plane: `Controller.on_event(event, now)` returns the driver's
actions.

It owns no task, client, clock or random numbers: the time comes with each event, ids come with the
event or follow from known ones. The scheduler service and the simulator drive the same controller,
and the same events at the same times give the same actions. A request that cannot be granted is
refused with an exception of `refusals` and changes nothing.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from treadle_core import events as ev
from treadle_core.actions import Action, SavePolicy
from treadle_core.model import (
    EngineRecord,
    JobRecord,
    JobUse,
    Ledger,
    Outcome,
    Policy,
    TrajectoryRecord,
    WeightsRecord,
)
from treadle_core.planning import Planner
from treadle_core.refusals import NoEngine
from treadle_core.state import Decision, State, Step
from treadle_core.steps import admission, leases, lifecycle, moves, tickets, weights
from treadle_core.tuning import Tuning


def _set_policy(state: State, event: ev.PolicySet, _now: float) -> list[Action]:
    state.policy = event.policy
    return [SavePolicy(event.policy)]


def _register_engine(state: State, event: ev.EngineRegistered, now: float) -> list[Action]:
    return [
        *leases.register_engine(state, event, now),
        *weights.ask_engine(state, event.spec.engine_id, now),
    ]


def _tick(state: State, event: ev.Tick, now: float) -> list[Action]:
    if event.late_s:
        state.engines.extend_leases(event.late_s)
        state.jobs.extend_leases(event.late_s)
    state.engines.end_rests(now)
    return [
        *leases.expire_engines(state, now),
        *leases.expire_jobs(state, now),
        *weights.ask_again(state, now),
        *moves.expire_moves(state, now),
        *lifecycle.announce_due(state, now),
        *lifecycle.sweep(state, now),
    ]


HANDLERS: Mapping[type[ev.Event], Callable[[State, Any, float], list[Action]]] = {
    ev.JobOpened: leases.open_job,
    ev.JobRenewed: leases.renew_job,
    ev.JobClosed: leases.close_job,
    ev.TrajectoryOpened: lifecycle.open_trajectory,
    ev.TrajectoryClosed: lifecycle.close_trajectory,
    ev.ClosedAnnounced: lifecycle.confirm_announcement,
    ev.GroupSettled: lifecycle.end_group,
    ev.StepRequested: admission.request_step,
    ev.StepPreempted: tickets.note_preemption,
    ev.StepFinished: tickets.finish_step,
    ev.StepUnknown: tickets.lose_step,
    ev.ToolStarted: moves.start_tool,
    ev.ToolFinished: moves.finish_tool,
    ev.PredictionArrived: moves.take_prediction,
    ev.PlanArrived: moves.take_plan,
    ev.MoveAccepted: moves.accept_move,
    ev.MoveEnded: moves.end_move,
    ev.SwitchRequested: moves.switch_engine,
    ev.EngineRegistered: _register_engine,
    ev.LeaseRenewed: weights.renew_lease,
    ev.EngineDeregistered: leases.deregister_engine,
    ev.DrainSet: leases.set_drain,
    ev.WeightsSet: weights.set_weights,
    ev.WeightsUpdated: weights.update_weights,
    ev.LoadFailed: weights.fail_load,
    ev.PolicySet: _set_policy,
    ev.Tick: _tick,
}


class Controller:
    """State machine of the control plane. `epoch_s` is when this control plane first started;
    priorities count time from it.

    planner: another way to plan again than a mesh has, for comparisons.
    """

    def __init__(
        self,
        policy: Policy | None = None,
        tuning: Tuning | None = None,
        epoch_s: float = 0.0,
        planner: type[Planner] = Planner,
    ) -> None:
        self._state = State.new(policy or Policy(), tuning or Tuning(), epoch_s, planner)

    def restore(
        self,
        trajectories: Iterable[TrajectoryRecord],
        engines: Iterable[EngineRecord],
        now: float,
        job_records: Iterable[JobRecord] = (),
        desired_weights: WeightsRecord | None = None,
        drained: Iterable[str] = (),
    ) -> list[Action]:
        """Take over what an earlier run stored; call it once, before the first event."""
        state = self._state
        state.engines.desire(desired_weights)
        state.engines.drain(drained)
        state.restored_s = now
        state.jobs.restore(job_records, now)
        state.engines.restore(engines, now)
        actions: list[Action] = []
        for record in sorted(
            trajectories, key=lambda record: (record.opened_s, record.trajectory_id)
        ):
            record = lifecycle.bring_back(record, now, state.tuning)
            state.table.put(record)
            if not record.is_open and not record.announced:
                state.announcements[record.trajectory_id] = now
            state.sweeps.set(record.trajectory_id, lifecycle.sweep_s(state, record, now))
        for record in state.table:
            state.note_work(record)
        for record in state.table:
            if not record.is_open:
                state.needs.note_end(record, finished=record.outcome is Outcome.FINISHED)
        state.planner.restore(state.table.open_records())
        for record in state.table.open_records():
            if record.engine_id and record.engine_id not in state.engines:
                actions += leases.place_again(state, record)
        state.siting.restore()
        state.planner.note_engines()
        actions += leases.close_without_job(state, now)
        return state.books.enter([*actions, *weights.ask_engines(state, now)], now)

    def on_event(self, event: ev.Event, now: float) -> list[Action]:
        """Handle one event at `now` (seconds, never going back), and return the actions to do, in
        order. Raises Refusal for a request that cannot be granted."""
        state = self._state
        kind, enter = type(event), state.books.enter
        try:
            actions = enter(HANDLERS[kind](state, event, now), now)
        except NoEngine as lack:
            assert isinstance(event, ev.StepRequested), (
                "nothing else is refused for want of an engine"
            )
            enter(tickets.note_lack(state, event.trajectory_id, lack), now)
            raise
        if state.waiting.requests:
            actions += enter(admission.answer_waiting(state, event, now), now)
        ask = state.planner.ask(now, ticked=kind is ev.Tick)
        return [*actions, ask] if ask is not None else actions

    def job(self, job_id: str) -> JobRecord:
        """Return a job that is held. Raises JobNotFound, JobTakenOver."""
        return self._state.jobs.require(job_id)

    def jobs(self) -> list[JobUse]:
        """Return what each job uses of the mesh, by name: jobs that a client holds or that have
        open trajectories."""
        state = self._state
        open_of_job, queued = state.table.open_of_job, state.waiting
        clients = Counter(record.name for record in state.jobs if state.jobs.is_held(record.job_id))
        parts = {part.job: part for part in state.shares.parts(queued.jobs)}
        return [
            JobUse(
                *(job, state.jobs.weight(job), clients[job]),
                *(
                    (part.share, part.live_tickets, part.kv_tokens)
                    if (part := parts.get(job))
                    else (0.0, 0, 0)
                ),
                *(open_of_job[job], sum(map(len, queued.queues(job).values()))),
            )
            for job in sorted({*clients, *open_of_job})
        ]

    @property
    def desired_weights(self) -> WeightsRecord | None:
        """Return the weights that all engines are to serve; None where each serves what it has."""
        return self._state.engines.desired

    @property
    def drained(self) -> tuple[str, ...]:
        """Return the ids of the engines that an operator wants empty, in order; they may hold no
        lease."""
        return self._state.engines.drained

    @property
    def policy(self) -> Policy:
        """Return the policy of new trajectories."""
        return self._state.policy

    def trajectory(self, trajectory_id: str) -> TrajectoryRecord:
        """Return one trajectory. Raises TrajectoryNotFound."""
        return self._state.table.require(trajectory_id)

    def ledger(self, trajectory_id: str, now: float) -> Ledger:
        """Return where the seconds of a trajectory went so far, with its present wait for a ticket.
        Raises TrajectoryNotFound."""
        return self._state.books.waits.count(self.trajectory(trajectory_id), now).ledger

    def history(self, trajectory_id: str) -> tuple[list[Decision], list[Step]]:
        """Return the decisions about a trajectory and its finished steps that are still kept,
        oldest first."""
        histories = self._state.books.histories
        return histories.decisions(trajectory_id), histories.get(trajectory_id).steps

    def trajectories(self) -> list[TrajectoryRecord]:
        """Return all trajectories that are not forgotten, in the order of opening."""
        return list(self._state.table)

    def engines(self) -> list[EngineRecord]:
        """Return all engines that hold a lease, by id."""
        return list(self._state.engines)

    def engine(self, engine_id: str) -> EngineRecord | None:
        """Return one engine; None where it holds no lease."""
        return self._state.engines.get(engine_id)

    def open_on(self, engine_id: str) -> int:
        """Return the number of open trajectories of an engine."""
        return self._state.table.tally(engine_id).trajectories
