"""Scenarios on the pure controller: a fake clock, short words for events, and a store as a driver
would keep it."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np
from treadle_core import actions as act
from treadle_core import events as ev
from treadle_core.controller import Controller
from treadle_core.model import (
    DecodeCurve,
    EngineLoad,
    EngineRecord,
    EngineSpec,
    Estimate,
    JobRecord,
    Outcome,
    Policy,
    Prediction,
    TicketRecord,
    TrajectoryRecord,
)
from treadle_core.planning import Planner
from treadle_core.tuning import Tuning

A = TypeVar("A")

CURVE = DecodeCurve(
    base_s=0.01, per_sequence_s=0.001, per_kv_token_s=0.0, prefill_tokens_per_s=10_000.0
)


class Scenario:
    """Drives a controller. `heard`: all actions, in order. fields: of the engines that are there
    from the start."""

    def __init__(
        self,
        policy: Policy | None = None,
        tuning: Tuning | None = None,
        *,
        engines: Sequence[str] = (),
        planner: type[Planner] = Planner,
        **fields: Any,
    ) -> None:
        self.policy = policy or Policy()
        self.tuning = tuning or Tuning()
        self.planner = planner
        self.controller = Controller(self.policy, self.tuning, epoch_s=0.0, planner=planner)
        self.now = 0.0
        self.requests = 0
        self.trajectories: dict[str, TrajectoryRecord] = {}
        self.engines: dict[str, EngineRecord] = {}
        self.jobs: dict[str, JobRecord] = {}
        self.heard: list[act.Action] = []
        for engine_id in engines:
            self.engine(engine_id, **fields)

    def send(self, event: ev.Event) -> list[act.Action]:
        """One event at the present time; its actions, stored as a driver does."""
        actions = self.controller.on_event(event, self.now)
        assert not any(isinstance(action, act.Note) for action in actions), (
            "notes stay in the controller"
        )
        for action in actions:
            match action:
                case act.SaveTrajectory(record):
                    self.trajectories[record.trajectory_id] = record
                case act.ForgetTrajectory(trajectory_id):
                    self.trajectories.pop(trajectory_id)
                case act.SaveEngine(engine):
                    self.engines[engine.spec.engine_id] = engine
                case act.RemoveEngine(engine_id):
                    self.engines.pop(engine_id, None)
                case act.SaveJob(job):
                    self.jobs[job.job_id] = job
                case act.RemoveJob(job_id):
                    self.jobs.pop(job_id, None)
        self.heard += actions
        return actions

    @property
    def plans(self) -> list[act.AskPlan]:
        """The questions for a plan, in order."""
        return all_of(self.heard, act.AskPlan)

    def restart(self) -> None:
        """A new controller with what is stored, as after a SIGKILL."""
        weights, drained = self.controller.desired_weights, self.controller.drained
        self.controller = Controller(self.policy, self.tuning, epoch_s=0.0, planner=self.planner)
        stored = self.trajectories.values(), self.engines.values()
        self.heard += self.controller.restore(
            *stored, self.now, self.jobs.values(), weights, drained
        )

    def advance(self, seconds: float) -> list[act.Action]:
        """Time passes; one tick."""
        self.now += seconds
        return self.send(ev.Tick())

    def request_id(self) -> str:
        """A fresh one."""
        self.requests += 1
        return f"request-{self.requests}"

    def engine(self, engine_id: str, *, slots: int = 4, **fields: Any) -> list[act.Action]:
        """Registers an engine; its lease is called `lease-<engine_id>`."""
        spec = EngineSpec(
            engine_id,
            f"{engine_id}:7410",
            slot_limit=slots,
            weight_version="v0",
            decode_curve=CURVE,
        )
        return self.send(
            ev.EngineRegistered(self.request_id(), f"lease-{engine_id}", replace(spec, **fields))
        )

    def renew(
        self, engine_id: str, load: EngineLoad | None = None, curve: DecodeCurve | None = None
    ) -> list[act.Action]:
        """Renews the lease of `engine`."""
        return self.send(ev.LeaseRenewed(f"lease-{engine_id}", engine_id, load, curve))

    def open(
        self, trajectory_id: str, *, tokens: float | None = None, **fields: Any
    ) -> TrajectoryRecord:
        """Opens a trajectory; `tokens`: of which so much is predicted."""
        event = ev.TrajectoryOpened(self.request_id(), trajectory_id, "p", prompt_tokens=100)
        self.send(replace(event, **fields))
        if tokens is not None:
            self.predict(trajectory_id, tokens)
        return self.controller.trajectory(trajectory_id)

    def open_all(self, lengths: Mapping[str, float]) -> None:
        """Opens trajectories of which so many tokens are predicted."""
        for trajectory_id, tokens in lengths.items():
            self.open(trajectory_id, tokens=tokens)

    def ask(self, trajectory_id: str, turn: int = 0, **fields: Any) -> list[act.Action]:
        """Asks for a ticket, which may be made to wait."""
        event = ev.StepRequested(
            self.request_id(), trajectory_id, turn, context_tokens=100, max_new_tokens=64
        )
        return self.send(replace(event, **fields))

    def step(self, trajectory_id: str, turn: int, **fields: Any) -> TicketRecord:
        """Asks for a ticket and gets it."""
        return one(self.ask(trajectory_id, turn, **fields), act.IssueTicket).ticket

    def ticket(self, trajectory_id: str) -> TicketRecord:
        """The last ticket of a trajectory."""
        ticket = self.controller.trajectory(trajectory_id).ticket
        assert ticket is not None
        return ticket

    def finish(self, ticket: TicketRecord, tokens: int = 10) -> list[act.Action]:
        """The engine's account of a step."""
        return self.send(
            ev.StepFinished(
                ticket.trajectory_id, ticket.ticket_id, ticket.turn, ticket.context_tokens, tokens
            )
        )

    def predict(self, trajectory_id: str, tokens: float, **fields: Any) -> list[act.Action]:
        """A prediction of what is left now."""
        record = self.controller.trajectory(trajectory_id)
        prediction = Prediction(
            record.next_turn, record.gen_tokens, Estimate(tokens / 2, tokens, tokens * 2)
        )
        return self.send(ev.PredictionArrived(trajectory_id, replace(prediction, **fields)))

    def close(self, trajectory_id: str, outcome: Outcome = Outcome.FINISHED) -> list[act.Action]:
        """Ends a trajectory."""
        return self.send(ev.TrajectoryClosed(self.request_id(), trajectory_id, outcome))


def answer(ask: act.AskPlan, groups: Mapping[str, Sequence[str]]) -> ev.PlanArrived:
    """The plan that gives each engine these trajectories."""
    engine_ids = [engine.engine_id for engine in ask.engines]
    place = {
        name: engine_ids.index(engine_id) for engine_id, names in groups.items() for name in names
    }
    return ev.PlanArrived(
        ask.plan_id, np.array([place.get(name, -1) for name in ask.work.trajectory_ids])
    )


def all_of(actions: Sequence[act.Action], kind: type[A]) -> list[A]:
    """The actions of a kind."""
    return [action for action in actions if isinstance(action, kind)]


def one(actions: Sequence[act.Action], kind: type[A]) -> A:
    """The only action of a kind."""
    (found,) = all_of(actions, kind)
    return found
