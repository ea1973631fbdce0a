"""Whatever happens in whatever order, the controller's invariants hold (hypothesis, stateful)."""

from dataclasses import fields

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test
from support.control import CURVE, Scenario, all_of
from treadle_core import actions as act
from treadle_core import events as ev
from treadle_core.model import (
    EngineLoad,
    EngineSpec,
    Estimate,
    Objective,
    Ordering,
    Outcome,
    PlacementRule,
    Policy,
    Prediction,
    TicketRecord,
    TicketStatus,
    TrajectoryState,
)
from treadle_core.refusals import Refusal
from treadle_core.tuning import Tuning

TRAJECTORIES = st.sampled_from([f"t{number}" for number in range(5)])
ENGINES = st.sampled_from(["e0", "e1", "e2"])
JOBS = st.sampled_from([f"j{number}" for number in range(4)])
INDEX = st.integers(0, 10_000)
POLICIES = st.builds(
    Policy,
    st.sampled_from(list(Ordering)),
    st.sampled_from(list(Objective)),
    st.sampled_from(list(PlacementRule)),
    st.booleans(),
    st.booleans(),
    reserve=st.booleans(),
)
TUNING = Tuning(
    plan_every_events=2,
    plan_interval_s=0.0,
    plan_timeout_s=1.0,
    keep_closed_s=20.0,
    move_rest_turns=1,
    ticket_ttl_s=30.0,
    job_lease_s=5.0,
    job_resume_s=20.0,
)


class AnyEvents(RuleBasedStateMachine):
    """Clients, engines, the bus, the predictor, the placement and the migrator, all unreliable."""

    def __init__(self) -> None:
        super().__init__()
        self.scenario = Scenario(None, TUNING)
        self.issued: dict[str, TicketRecord] = {}
        self.leases: list[tuple[str, str]] = []
        self.plans: list[act.AskPlan] = []
        self.moves: list[act.StartMigration] = []
        self.engine_comes("e0", 1, False)
        for number in range(4):
            self.client_opens(f"t{number}", 0, "")
            for _ in range(2):  # so that tool times are known
                self.a_whole_turn(f"t{number}", 1e4)
        self.engine_comes("e1", 1, False)

    def hand(self, event: ev.Event) -> None:
        """One event; a refusal must have changed nothing."""
        controller = self.scenario.controller
        before = (
            controller.trajectories(),
            controller.engines(),
            controller.policy,
            controller.drained,
        )
        try:
            actions = self.scenario.send(event)
        except Refusal:
            assert (
                controller.trajectories(),
                controller.engines(),
                controller.policy,
                controller.drained,
            ) == before
            return
        for issued in all_of(actions, act.IssueTicket):
            engine = controller.engine(issued.ticket.engine_id)
            assert issued.ticket.ticket_id in self.issued or (
                engine is not None and not engine.behind
            )
            if (
                engine is not None
                and engine.draining
                and issued.ticket.ticket_id not in self.issued
            ):
                others = [each for each in controller.engines() if each.able and not each.draining]
                # then the engine that lost the stream is avoided
                lost = issued.ticket.replaces_ticket_id
                assert (
                    lost
                    or not others
                    or controller.trajectory(issued.ticket.trajectory_id).pinned_engine_id
                )
            known = self.issued.setdefault(issued.ticket.ticket_id, issued.ticket)
            assert known.request_id == issued.ticket.request_id, "one ticket id, one request"
        self.plans += all_of(actions, act.AskPlan)
        self.moves += all_of(actions, act.StartMigration)
        for move in all_of(actions, act.StartMigration):
            record = controller.trajectory(move.trajectory_id)
            assert record.state is TrajectoryState.IDLE
            assert record.policy.migrate
            assert not record.pinned_engine_id
            assert move.source.engine_id == record.engine_id != move.target.engine_id

    def pick(self, index: int, name: str = "") -> TicketRecord | None:
        """One of the tickets that were issued, of a trajectory if it is named."""
        found = [ticket for ticket in self.issued.values() if name in ("", ticket.trajectory_id)]
        return found[index % len(found)] if found else None

    @rule(seconds=st.sampled_from([0.1, 1.0, 4.0, 11.0]), silent=st.integers(0, 5))
    def time_passes(self, seconds: float, silent: int) -> None:
        """Engines renew, but for one now and then."""
        self.scenario.now += seconds
        for number, engine in enumerate(self.scenario.controller.engines()):
            if number != silent:
                self.hand(ev.LeaseRenewed(engine.lease_id, engine.spec.engine_id))
        self.hand(ev.Tick())

    @rule(name=TRAJECTORIES, tokens=st.floats(100, 1e5))
    def a_whole_turn(self, name: str, tokens: float) -> None:
        """Asked for, run, accounted for, predicted; the tool is slow."""
        self.client_asks(name, 0, 30.0)
        ticket = (
            self.scenario.controller.trajectory(name).live_ticket if name in self.known() else None
        )
        if ticket is not None:
            self.hand(ev.StepFinished(name, ticket.ticket_id, ticket.turn, 100, 20))
            record = self.scenario.controller.trajectory(name)
            estimate = Estimate(tokens / 2, tokens, tokens * 2)
            self.hand(
                ev.PredictionArrived(
                    name, Prediction(record.next_turn, record.gen_tokens, estimate)
                )
            )

    def known(self) -> set[str]:
        return {record.trajectory_id for record in self.scenario.controller.trajectories()}

    @rule(engine=ENGINES, slots=st.integers(1, 4), again=st.booleans())
    def engine_comes(self, engine: str, slots: int, again: bool) -> None:
        lease = f"lease-{len(self.leases)}"
        if self.scenario.controller.engine(engine) is not None and not again:
            return
        self.leases.append((lease, engine))
        spec = EngineSpec(
            *(engine, f"{engine}:7410"),
            slot_limit=slots,
            kv_tokens_capacity=2_000,
            weight_version="v0",
            decode_curve=CURVE,
        )
        self.hand(ev.EngineRegistered(lease, lease, spec))

    @rule(index=INDEX, healthy=st.booleans(), load=st.booleans())
    def engine_renews(self, index: int, healthy: bool, load: bool) -> None:
        if self.leases:
            lease, engine = self.leases[index % len(self.leases)]
            self.hand(
                ev.LeaseRenewed(lease, engine, EngineLoad(engine_healthy=healthy) if load else None)
            )

    @rule(index=INDEX)
    def engine_leaves(self, index: int) -> None:
        if self.leases and index % 4 == 0:
            self.hand(ev.EngineDeregistered(*self.leases[index % len(self.leases)]))

    @rule(engine=ENGINES, version=st.sampled_from(["v0", "v1"]), what=st.integers(0, 7))
    def weights_are_set_loaded_or_refused(self, engine: str, version: str, what: int) -> None:
        if what == 0:
            self.hand(ev.WeightsSet(version, f"/m/{version}"))
        elif what < 5:
            self.hand(ev.WeightsUpdated(engine, version))
        else:
            self.hand(ev.LoadFailed(engine, version, refused=what == 5, message="no"))

    @rule(engine=ENGINES, draining=st.booleans())
    def engine_is_drained(self, engine: str, draining: bool) -> None:
        self.hand(ev.DrainSet(engine, draining))

    @rule(policy=POLICIES, seldom=st.integers(0, 5))
    def policy_changes(self, policy: Policy, seldom: int) -> None:
        if seldom == 0:
            self.hand(ev.PolicySet(policy))

    @rule(job=JOBS, resume=st.booleans(), what=st.integers(0, 6))
    def client_opens_renews_or_closes_a_job(self, job: str, resume: bool, what: int) -> None:
        opened = ev.JobOpened(
            f"open-{job}", job, "run" if job < "j2" else job, resume, weight=1.0 + int(job[1:])
        )
        renewed = ev.JobRenewed(job, (f"rollout-{what}",) if resume else None)
        self.hand(ev.JobClosed(job) if what == 0 else opened if what < 4 else renewed)

    @rule(
        name=TRAJECTORIES,
        request=st.integers(0, 2),
        pin=st.sampled_from(["", "", "", "", "", "e0"]),
        job=st.one_of(st.just(""), JOBS),
        keep=st.sampled_from([0, 0, 1, 2]),
    )
    def client_opens(self, name: str, request: int, pin: str, job: str = "", keep: int = 0) -> None:
        self.hand(
            ev.TrajectoryOpened(
                f"open-{name}-{request}",
                name,
                "p",
                prompt_tokens=10,
                pinned_engine_id=pin,
                job_id=job,
                group_keep=keep,
            )
        )

    @rule(index=INDEX)
    def engine_knows_no_such_step(self, index: int) -> None:
        ticket = self.pick(index)
        if ticket is not None:
            self.hand(ev.StepUnknown(ticket.trajectory_id, ticket.ticket_id))

    @rule(
        name=TRAJECTORIES,
        ahead=st.sampled_from([0, 0, 0, 1, -1]),
        tool_s=st.sampled_from([0.0, 5.0]),
    )
    def client_asks(self, name: str, ahead: int, tool_s: float) -> None:
        next_turn = (
            self.scenario.controller.trajectory(name).next_turn if name in self.known() else 0
        )
        self.hand(
            ev.StepRequested(
                self.scenario.request_id(), name, max(0, next_turn + ahead), 100, 64, tool_s=tool_s
            )
        )

    @rule(name=TRAJECTORIES, index=INDEX, refused=st.booleans())
    def client_asks_again_after_a_lost_stream(
        self, name: str, index: int, refused: bool = False
    ) -> None:
        lost = self.pick(index, name)
        if lost is not None:
            asked = self.scenario.request_id(), name, lost.turn, 100, 64, lost.ticket_id, 3
            self.hand(ev.StepRequested(*asked, engine_refused=refused))

    @rule(index=INDEX)
    def client_repeats(self, index: int) -> None:
        ticket = self.pick(index)
        if ticket is not None:
            names = (
                field.name for field in fields(ev.StepRequested) if hasattr(ticket, field.name)
            )
            self.hand(ev.StepRequested(*(getattr(ticket, name) for name in names)))

    @rule(name=TRAJECTORIES, outcome=st.sampled_from(list(Outcome)), request=st.integers(0, 7))
    def client_closes(self, name: str, outcome: Outcome, request: int) -> None:
        if request < 2:
            self.hand(ev.TrajectoryClosed(f"close-{name}-{request}", name, outcome))

    @rule(index=INDEX, tokens=st.integers(0, 64), preempted=st.booleans())
    def bus_says_finished_or_preempted(self, index: int, tokens: int, preempted: bool) -> None:
        ticket = self.pick(index)
        if ticket is not None:
            name, ticket_id = ticket.trajectory_id, ticket.ticket_id
            finished = ev.StepFinished(name, ticket_id, ticket.turn, 100, tokens)
            self.hand(ev.StepPreempted(name, ticket_id, 1) if preempted else finished)

    @rule(name=TRAJECTORIES, started=st.booleans())
    def bus_says_tool(self, name: str, started: bool) -> None:
        self.hand(ev.ToolStarted(name, 20.0) if started else ev.ToolFinished(name))

    @rule(name=TRAJECTORIES, tokens=st.floats(0, 1e6), turn=st.integers(0, 5))
    def predictor_answers(self, name: str, tokens: float, turn: int) -> None:
        prediction = Prediction(
            turn, 10 * turn, Estimate(tokens, tokens, tokens), Estimate(1, 2, 3)
        )
        self.hand(ev.PredictionArrived(name, prediction))

    @rule(index=INDEX, random=st.randoms(use_true_random=False))
    def placement_answers(self, index: int, random: object) -> None:
        if self.plans:
            ask = self.plans[-1 - index % min(2, len(self.plans))]
            chosen = random.choices(range(len(ask.engines)), k=len(ask.work))  # type: ignore[attr-defined]
            self.hand(ev.PlanArrived(ask.plan_id, np.array(chosen)))

    @rule(index=INDEX, what=st.integers(0, 3))
    def migrator_answers(self, index: int, what: int) -> None:
        if self.moves:
            move = self.moves[-1 - index % min(3, len(self.moves))]
            name, migration = move.trajectory_id, f"m-{move.move_id}"
            answers: list[ev.Event] = [
                ev.MoveAccepted(name, move.move_id, migration),
                ev.SwitchRequested(
                    f"s-{move.move_id}", name, move.expected_revision, move.target.engine_id
                ),
                ev.MoveEnded(name, migration, moved=True),
                ev.MoveEnded(name, move_id=move.move_id),
            ]
            self.hand(answers[what])

    @rule()
    def scheduler_is_killed_and_comes_back(self) -> None:
        before = {
            record.trajectory_id: record for record in self.scenario.controller.trajectories()
        }
        self.scenario.restart()
        after = {record.trajectory_id: record for record in self.scenario.controller.trajectories()}
        assert before.keys() == after.keys()
        for name, record in before.items():
            assert after[name].ticket == record.ticket
            assert (after[name].state, after[name].next_turn) == (record.state, record.next_turn)
            assert (after[name].engine_id, after[name].revision) == (
                record.engine_id,
                record.revision,
            )

    @invariant()
    def a_live_ticket_is_its_trajectorys_own(self) -> None:
        controller = self.scenario.controller
        engines = {engine.spec.engine_id for engine in controller.engines()}
        for record in controller.trajectories():
            ticket = record.live_ticket
            assert min(record.gen_tokens, record.next_turn) >= 0
            assert (record.state is TrajectoryState.STEPPING) == (
                record.is_open
                and record.ticket is not None
                and record.ticket.status is not TicketStatus.DONE
            )
            if ticket is not None:
                assert record.is_open
                assert (ticket.revision, ticket.engine_id) == (record.revision, record.engine_id)
                assert ticket.engine_id in engines
                assert ticket.turn == record.next_turn
            if record.is_open and record.engine_id:
                assert record.engine_id in engines
            if record.pinned_engine_id:
                assert record.engine_id in ("", record.pinned_engine_id)
            if record.move is not None:
                switched = record.move.has_switched(record.engine_id)
                assert record.state is TrajectoryState.IDLE or (record.is_open and switched)

    @invariant()
    def an_open_trajectory_of_a_job_has_a_job_that_is_held(self) -> None:
        for record in self.scenario.controller.trajectories():
            if record.is_open and record.job_id:
                assert self.scenario.controller.job(record.job_id).ended_s is None
                assert self.scenario.jobs[record.job_id].ended_s is None, "a restart knows it too"

    @invariant()
    def sums_are_what_a_walk_would_give(self) -> None:
        controller = self.scenario.controller
        for engine in controller.engines():
            walked = [
                r
                for r in controller.trajectories()
                if r.is_open and r.engine_id == engine.spec.engine_id
            ]
            assert controller.open_on(engine.spec.engine_id) == len(walked)
        walked = [record for record in controller.trajectories() if record.is_open]
        for use in controller.jobs():
            mine = [record for record in walked if record.job == use.job]
            live = [r.ticket for r in mine if r.live_ticket is not None and r.engine_id]
            assert (use.open_trajectories, use.live_tickets) == (len(mine), len(live))
            reserving = [
                r
                for r in mine
                if r.engine_id and r.ticket is not None and r.ticket.kv_reserve_tokens
            ]
            own = sum(
                r.ticket.kv_reserve_tokens - r.prompt_tokens
                for r in reserving
                if r.ticket is not None
            )
            assert use.kv_tokens == own + 10 * len({r.engine_id for r in reserving}), (
                "all have the same prompt of 10"
            )


@pytest.mark.timeout(300)
def test_the_invariants_hold_whatever_happens() -> None:
    run_state_machine_as_test(
        AnyEvents, settings=settings(max_examples=150, stateful_step_count=80)
    )
