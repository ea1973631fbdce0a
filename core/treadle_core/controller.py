"""The control plane's state machine: `on_event(event, now) -> actions`.

It owns no task, client, clock or random source: time comes with each event, ids with the event or from what is known.
The scheduler service and the simulator drive the same controller. An event either changes state and says what is to be
done, or, a request, is refused with an exception of `refusals.py` and changes nothing. The same events at the same
times give the same actions.

The handlers stand by noun: `lifecycle.py` (trajectories), `stepping.py` (steps, tools, predictions), `moves.py` (plans,
migrations), `leases.py` (engines). What they share is `state.py`.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from treadle_core.actions import Action, SavePolicy
from treadle_core.events import (
    ClosedAnnounced,
    EngineDeregistered,
    EngineRegistered,
    Event,
    LeaseRenewed,
    MoveAccepted,
    MoveEnded,
    PlanArrived,
    PolicySet,
    PredictionArrived,
    StepFinished,
    StepPreempted,
    StepRequested,
    SwitchRequested,
    Tick,
    ToolFinished,
    ToolStarted,
    TrajectoryClosed,
    TrajectoryOpened,
    WeightsUpdated,
)
from treadle_core.model import EngineRecord, Policy, TrajectoryRecord
from treadle_core.steps import admission, leases, lifecycle, moves, requests
from treadle_core.steps.state import State
from treadle_core.tuning import Tuning

Handler = Callable[[State, Any, float], list[Action]]


def _policy_set(state: State, event: PolicySet, _now: float) -> list[Action]:
    state.policy = event.policy
    return [SavePolicy(event.policy)]


def _ticked(state: State, _event: Tick, now: float) -> list[Action]:
    return [
        *leases.expired(state, now),
        *moves.timed_out(state, now),
        *lifecycle.announce_due(state, now),
        *lifecycle.swept(state, now),
    ]


HANDLERS: Mapping[type, Handler] = {
    TrajectoryOpened: lifecycle.opened,
    TrajectoryClosed: lifecycle.closed,
    ClosedAnnounced: lifecycle.announced,
    StepRequested: requests.requested,
    StepPreempted: requests.preempted,
    StepFinished: requests.finished,
    ToolStarted: requests.tool_started,
    ToolFinished: requests.tool_finished,
    PredictionArrived: requests.predicted,
    PlanArrived: moves.plan_arrived,
    MoveAccepted: moves.accepted,
    MoveEnded: moves.ended,
    SwitchRequested: moves.switched,
    EngineRegistered: leases.registered,
    LeaseRenewed: leases.renewed,
    EngineDeregistered: leases.deregistered,
    WeightsUpdated: leases.weights_updated,
    PolicySet: _policy_set,
    Tick: _ticked,
}


class Controller:
    """See the module. `epoch_s` is when this control plane first started; priorities count time from it."""

    def __init__(self, policy: Policy | None = None, tuning: Tuning | None = None, epoch_s: float = 0.0) -> None:
        self._state = State.new(policy or Policy(), tuning or Tuning(), epoch_s)

    def restore(
        self, trajectories: Iterable[TrajectoryRecord], engines: Iterable[EngineRecord], now: float
    ) -> list[Action]:
        """Takes over what an earlier run stored; call it once, before the first event."""
        state = self._state
        state.engines.restore(engines, now)
        actions: list[Action] = []
        for record in sorted(trajectories, key=lambda record: (record.opened_s, record.trajectory_id)):
            state.table.put(record)
            if not record.is_open and not record.announced:
                state.unannounced[record.trajectory_id] = now
            state.sweeps.set(record.trajectory_id, lifecycle.sweep_s(state, record))
        state.planner.restore(state.table.open_records())
        for record in state.table.open_records():
            if record.engine_id and record.engine_id not in state.engines:
                actions += leases.placed_again(state, record)
        state.siting.restore()
        state.planner.note_engines()
        return actions

    def on_event(self, event: Event, now: float) -> list[Action]:
        """Takes one event at `now` (seconds, never going back) and says what is to be done, in order. Raises Refusal
        for a request that cannot be granted, which then has changed nothing."""
        state = self._state
        kind = type(event)
        actions = HANDLERS[kind](state, event, now)
        if state.held:
            actions = [*actions, *admission.answered(state, event, now)]
        ask = state.planner.ask(now, ticked=kind is Tick)
        return [*actions, ask] if ask is not None else actions

    @property
    def policy(self) -> Policy:
        """The policy of trajectories opened from now on."""
        return self._state.policy

    def trajectory(self, trajectory_id: str) -> TrajectoryRecord:
        """One trajectory. Raises TrajectoryNotFound."""
        return self._state.table.require(trajectory_id)

    def trajectories(self) -> list[TrajectoryRecord]:
        """All that are not forgotten, in the order of opening."""
        return list(self._state.table)

    def engines(self) -> list[EngineRecord]:
        """All that hold a lease, by id."""
        return list(self._state.engines)

    def engine(self, engine_id: str) -> EngineRecord | None:
        """One engine, or None where it holds no lease."""
        return self._state.engines.get(engine_id)

    def open_on(self, engine_id: str) -> int:
        """Open trajectories whose engine this is."""
        return self._state.table.tally(engine_id).trajectories
