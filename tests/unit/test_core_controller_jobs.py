"""The controller and the jobs of clients: what ends with a lease, what a resumed client finds,
unused tickets."""

import pytest
from support.control import Scenario, all_of, one
from treadle_core import actions as act
from treadle_core import events as ev
from treadle_core.model import (
    ASYNCHRONOUS_POLICY,
    TREADLE_POLICY,
    Ordering,
    PlacementRule,
    Policy,
    TicketStatus,
    TrajectoryState,
)
from treadle_core.refusals import (
    BadField,
    JobNotFound,
    JobTakenOver,
    RequestIdReused,
    TrajectoryIsClosed,
)
from treadle_core.steps import lifecycle
from treadle_core.tuning import Tuning

TUNING = Tuning(job_lease_s=45.0, job_resume_s=600.0, lease_ttl_s=1e9, plan_interval_s=1e9)
RESERVE = Policy(reserve=True)


@pytest.fixture
def scenario() -> Scenario:
    """One engine with one slot; a client holds job j and has opened t0, which steps, and t1, which
    waits."""
    made = Scenario(RESERVE, TUNING, engines=["e0"], slots=1)
    made.send(ev.JobOpened("open-j", "j"))
    for name in ("t0", "t1"):
        made.open(name, job_id="j", tokens=100.0)
    made.step("t0", 0)
    assert one(made.ask("t1"), act.KeepWaiting)
    return made


def resume(scenario: Scenario, job_id: str) -> list[act.Action]:
    return scenario.send(ev.JobOpened(f"open-{job_id}", job_id, "run-7", resume=True))


def state_of(scenario: Scenario, name: str) -> TrajectoryState:
    return scenario.controller.trajectory(name).state


def test_at_the_end_of_a_lease_its_step_is_aborted_and_its_prefix_released_and_a_waiting_client_starts(
    scenario: Scenario,
) -> None:
    scenario.send(ev.JobOpened("open-k", "k"))
    scenario.open("other", job_id="k", tokens=10.0)
    assert one(scenario.ask("other"), act.KeepWaiting)
    scenario.advance(44.0)
    scenario.send(ev.JobRenewed("k"))
    ended = scenario.advance(2.0)
    assert [state_of(scenario, name) for name in ("t0", "t1")] == [TrajectoryState.FAILED] * 2
    assert one(ended, act.AbortStep).ticket_id == scenario.ticket("t0").ticket_id
    assert one(ended, act.ReleasePrefix).trajectory_id == "t0"
    assert one(ended, act.RemoveJob).job_id == "j"
    assert one(ended, act.IssueTicket).ticket.trajectory_id == "other"
    announced = all_of([*ended, *scenario.advance(10.0)], act.AnnounceClosed)
    assert {each.record.trajectory_id for each in announced} == {"t0", "t1"}
    with pytest.raises(JobNotFound):
        scenario.open("late", job_id="j")


def test_any_request_about_a_trajectory_renews_the_lease(scenario: Scenario) -> None:
    ticket = scenario.ticket("t0")
    for _ in range(3):
        scenario.advance(40.0)
        scenario.ask("t1", request_id="the same")  # held, and it asks again
    scenario.finish(ticket)
    scenario.advance(40.0)
    scenario.step("t0", 1)
    scenario.advance(40.0)
    assert state_of(scenario, "t0") is TrajectoryState.STEPPING


def test_closing_a_job_closes_what_is_open_and_may_be_repeated(scenario: Scenario) -> None:
    assert len(all_of(scenario.send(ev.JobClosed("j")), act.SaveTrajectory)) == 2
    assert scenario.send(ev.JobClosed("j")) == []


def test_after_a_restart_a_lease_has_its_whole_length_again_and_then_ends(
    scenario: Scenario,
) -> None:
    scenario.now += 1000.0
    scenario.restart()
    scenario.advance(44.0)
    assert state_of(scenario, "t0") is TrajectoryState.STEPPING
    scenario.advance(2.0)
    assert [state_of(scenario, name) for name in ("t0", "t1")] == [TrajectoryState.FAILED] * 2


def test_a_restart_closes_trajectories_of_a_job_whose_end_alone_was_stored(
    scenario: Scenario,
) -> None:
    del scenario.jobs["j"]
    scenario.restart()
    assert [state_of(scenario, name) for name in ("t0", "t1")] == [TrajectoryState.FAILED] * 2


def test_a_client_that_resumes_takes_over_at_once_and_the_one_before_is_refused() -> None:
    """Result: the first client's trajectory is closed, its rollouts are named, and nothing that it
    sends is taken."""
    scenario = Scenario(tuning=TUNING, engines=["e0"])
    resume(scenario, "j0")
    scenario.send(ev.JobRenewed("j0", ("r0", "r1")))
    scenario.open("t0", job_id="j0")
    resume(scenario, "j1")
    assert state_of(scenario, "t0") is TrajectoryState.FAILED
    assert scenario.controller.job("j1").rollout_ids == ("r0", "r1")
    for late in (
        ev.JobRenewed("j0"),
        ev.TrajectoryOpened("o", "late", "p", job_id="j0"),
        ev.JobOpened("o", "j0"),
    ):
        with pytest.raises(JobTakenOver):
            scenario.send(late)
    scenario.send(ev.JobClosed("j0"))
    assert scenario.controller.job("j1").ended_s is None


@pytest.mark.parametrize("restarted", [False, True])
def test_a_job_to_be_resumed_is_kept_for_its_time_and_its_trajectories_are_not(
    restarted: bool,
) -> None:
    scenario = Scenario(tuning=TUNING, engines=["e0"])
    resume(scenario, "j0")
    scenario.send(ev.JobRenewed("j0", ("r0",)))
    scenario.open("t0", job_id="j0")
    scenario.advance(46.0)
    assert state_of(scenario, "t0") is TrajectoryState.FAILED
    if restarted:
        scenario.restart()
    scenario.advance(599.0)
    resume(scenario, "j1")
    assert scenario.controller.job("j1").rollout_ids == ("r0",)
    scenario.advance(46.0)
    scenario.advance(600.0)
    assert scenario.jobs == {}
    resume(scenario, "j2")
    assert scenario.controller.job("j2").rollout_ids == ()


def test_a_job_to_be_resumed_is_held_again_by_its_own_client_that_was_only_slow() -> None:
    scenario = Scenario(tuning=TUNING, engines=["e0"])
    resume(scenario, "j0")
    scenario.advance(46.0)
    assert one(scenario.send(ev.JobRenewed("j0")), act.SaveJob).record.ended_s is None
    scenario.advance(46.0)
    assert (
        one(
            scenario.send(ev.TrajectoryOpened("o", "t0", "p", job_id="j0")), act.SaveJob
        ).record.ended_s
        is None
    )


def test_rollouts_are_not_lost_where_the_scheduler_dies_between_the_two_writes_of_a_takeover() -> (
    None
):
    scenario = Scenario(tuning=TUNING)
    resume(scenario, "j0")
    scenario.send(ev.JobRenewed("j0", ("r0",)))
    resume(scenario, "j1")
    del scenario.jobs["j1"]
    scenario.restart()
    resume(scenario, "j1")
    assert scenario.controller.job("j1").rollout_ids == ("r0",)


def test_a_repeated_opening_is_the_same_job_and_other_values_are_refused() -> None:
    scenario = Scenario(tuning=TUNING)
    resume(scenario, "j0")
    assert resume(scenario, "j0") == []
    with pytest.raises(RequestIdReused):
        scenario.send(ev.JobOpened("open-j0", "j0", "run-8", resume=True))
    with pytest.raises(BadField, match="must not be empty"):
        scenario.send(ev.JobOpened("o", "j1", "", resume=True))


def test_without_a_job_asking_again_and_again_counts_as_life() -> None:
    """A trajectory waits for longer than ABANDON_AFTER_S. Result: it stays open while it asks, also
    after a restart, and is closed once it has been silent for so long."""
    tuning = Tuning(abandon_after_s=100.0, lease_ttl_s=1e9, ticket_ttl_s=1e9)
    scenario = Scenario(RESERVE, tuning, engines=["e0"], slots=1)
    scenario.send(ev.JobOpened("open-j", "j"))
    scenario.open("first", job_id="j", tokens=1000.0)
    scenario.step("first", 0)
    scenario.open("waiting", tokens=10.0)
    for _ in range(5):
        assert one(scenario.ask("waiting"), act.KeepWaiting)
        scenario.send(ev.JobRenewed("j"))
        scenario.advance(40.0)
    assert state_of(scenario, "waiting") is TrajectoryState.IDLE
    scenario.restart()
    scenario.advance(99.0)
    assert state_of(scenario, "waiting") is TrajectoryState.IDLE
    scenario.advance(2.0)
    assert state_of(scenario, "waiting") is TrajectoryState.FAILED


def test_an_expired_ticket_that_no_step_has_used_frees_its_slot_and_its_kv() -> None:
    """Also where the client has no job. Result: a waiting step starts; the client may replace the
    lost ticket."""
    scenario = Scenario(
        RESERVE, Tuning(lease_ttl_s=1e9), engines=["e0"], slots=1, kv_tokens_capacity=400
    )
    scenario.open("gone", tokens=100.0)
    unused = scenario.step("gone", 0)
    scenario.open("waiting", tokens=100.0)
    scenario.ask("waiting")
    early = scenario.send(ev.StepUnknown("gone", unused.ticket_id))
    assert early == []  # Generate may be on its way
    assert one(scenario.advance(600.0), act.AskStep).ticket == unused
    freed = scenario.send(ev.StepUnknown("gone", unused.ticket_id))
    assert one(freed, act.IssueTicket).ticket.trajectory_id == "waiting"
    assert scenario.ticket("gone").status is TicketStatus.LOST
    again = scenario.step("gone", 0, replaces_ticket_id=unused.ticket_id)
    assert again.attempt == 1


def test_a_step_that_runs_for_longer_than_its_ticket_is_asked_for_and_stays() -> None:
    scenario = Scenario(RESERVE, Tuning(lease_ttl_s=1e9), engines=["e0"])
    scenario.open("long", tokens=1e5)
    ticket = scenario.step("long", 0)
    for _ in range(3):
        assert one(scenario.advance(600.0), act.AskStep).ticket == ticket
    scenario.finish(ticket)
    assert not all_of(scenario.advance(600.0), act.AskStep)


FCFS = Policy(ordering=Ordering.FCFS, placement=PlacementRule.PINNED)


def test_a_job_has_its_weight_and_its_own_policy_and_its_tickets_carry_the_weight() -> None:
    scenario = Scenario(Policy(), TUNING, engines=["e0"])
    scenario.send(ev.JobOpened("o1", "j1", "run", weight=3.0, policy=FCFS))
    scenario.send(ev.JobOpened("o2", "j2", "run"))
    scenario.send(ev.JobOpened("o3", "j3"))
    for job_id, policy, job, weight in (
        ("j1", FCFS, "run", 3.0),
        ("j2", Policy(), "run", 3.0),
        ("j3", Policy(), "", 1.0),
    ):
        assert scenario.open(job_id, job_id=job_id).policy == policy
        ticket = scenario.step(job_id, 0)
        assert (ticket.job, ticket.weight) == (job, weight)


def test_trajectories_whose_trainer_does_not_wait_go_first_come_first_served() -> None:
    """Unless somebody has chosen a policy: the job, or an operator."""
    scenario = Scenario(TREADLE_POLICY, TUNING, engines=["e0"])
    scenario.send(ev.JobOpened("o1", "j1", "run", policy=FCFS))
    scenario.send(ev.JobOpened("o2", "j2"))
    assert scenario.open("t1", asynchronous=True).policy == ASYNCHRONOUS_POLICY
    assert scenario.open("t2", job_id="j2", asynchronous=True).policy == ASYNCHRONOUS_POLICY
    assert scenario.open("t3").policy == TREADLE_POLICY
    assert scenario.open("t4", job_id="j1", asynchronous=True).policy == FCFS
    scenario.send(ev.PolicySet(Policy()))
    assert scenario.open("t5", asynchronous=True).policy == Policy()


@pytest.mark.parametrize("restarted", [False, True])
def test_a_job_that_is_resumed_keeps_weight_and_policy_and_may_change_them(restarted: bool) -> None:
    scenario = Scenario(RESERVE, TUNING, engines=["e0"])
    scenario.send(ev.JobOpened("open-j0", "j0", "run-7", resume=True, weight=3.0, policy=FCFS))
    scenario.advance(46.0)
    if restarted:
        scenario.restart()
    resume(scenario, "j1")
    assert scenario.open("t1", job_id="j1").policy == FCFS
    assert scenario.step("t1", 0).weight == 3.0
    resume(scenario, "j1")  # the same request again
    scenario.send(ev.JobOpened("open-j2", "j2", "run-7", resume=True, weight=2.0))
    assert scenario.controller.job("j2").weight == 2.0
    with pytest.raises(RequestIdReused):
        scenario.send(ev.JobOpened("open-j2", "j2", "run-7", resume=True, weight=5.0))


def test_a_weight_needs_a_name() -> None:
    with pytest.raises(BadField, match="must not be empty with weight"):
        Scenario().send(ev.JobOpened("o", "j", weight=2.0))


def flooded(*engines: str, scale: float = 1.0, slots: int = 4) -> Scenario:
    """Job big, of three times the weight of small, has filled engines of 4,000 tokens; more
    wait."""
    scenario = Scenario(
        RESERVE, TUNING, engines=engines or ("e0", "e1"), kv_tokens_capacity=4_000, slot_limit=slots
    )
    scenario.send(ev.JobOpened("o-big", "big", "big", weight=3.0 * scale))
    scenario.send(ev.JobOpened("o-small", "small", "small", weight=scale))
    for number in range(20):
        scenario.open(f"big{number}", job_id="big", prompt_id=f"b{number}", tokens=1000.0)
        scenario.ask(f"big{number}")
        scenario.advance(1.0)
    return scenario


def held(scenario: Scenario) -> dict[str, int]:
    """Live tickets by job."""
    return {use.job: use.live_tickets for use in scenario.controller.jobs()}


def test_a_job_below_its_share_starts_within_it_although_another_has_filled_the_engines() -> None:
    """Result: one trajectory on each engine, for a quarter of its slots and of its KV; the next one
    waits."""
    scenario = flooded()
    assert held(scenario) == {"big": 8, "small": 0}
    for number in range(4):
        scenario.open(f"small{number}", job_id="small", prompt_id=f"s{number}", tokens=700.0)
        scenario.ask(f"small{number}")
    scenario.advance(1.0)
    assert held(scenario) == {"big": 8, "small": 2}
    assert {
        scenario.ticket(f"small{n}").engine_id
        for n in range(4)
        if scenario.trajectories[f"small{n}"].ticket
    } == {"e0", "e1"}
    scenario.advance(1.0)
    big, small = scenario.controller.jobs()
    assert (big.share, small.share) == (0.75, 0.25)
    assert (big.waiting_steps, small.waiting_steps, small.open_trajectories, small.clients) == (
        12,
        2,
        4,
        1,
    )
    assert big.kv_tokens > 6_000 > small.kv_tokens > 1_000


def test_a_step_of_a_job_below_its_share_comes_to_an_engine_with_room_from_where_it_waits() -> None:
    """Both jobs wait for the only engine when a second one registers; no plan arrives. Result: both
    start there."""
    scenario = flooded("e0")
    for name in ("small0", "small1"):
        scenario.open(name, job_id="small", prompt_id=name, tokens=700.0)
        scenario.ask(name)
    scenario.advance(1.0)
    assert held(scenario) == {"big": 4, "small": 1}
    scenario.engine("e1", kv_tokens_capacity=4_000)
    scenario.advance(1.0)
    assert held(scenario) == {"big": 7, "small": 2}
    assert scenario.ticket("small1").engine_id == "e1"


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e5], ids=["small weights", "", "large weights"])
def test_a_large_trajectory_of_a_small_share_is_not_passed_for_ever(scale: float) -> None:
    """It needs more than its job's share of any engine. Result: it starts once enough of the other
    job has ended."""
    scenario = flooded(scale=scale, slots=16)
    scenario.open("large", job_id="small", prompt_id="large", tokens=3000.0)
    scenario.ask("large")
    running = [f"big{number}" for number in range(20)]
    for _ in range(60):
        scenario.advance(2.0)
        if scenario.controller.trajectory("large").ticket is not None:
            break
        name = next(
            name for name in running if scenario.controller.trajectory(name).ticket is not None
        )
        running.remove(name)
        scenario.close(name)
    assert scenario.controller.trajectory("large").ticket is not None
    assert any(scenario.controller.trajectory(name).ticket is None for name in running), (
        "others still wait"
    )


def test_one_job_alone_decides_as_if_there_were_no_jobs() -> None:
    """The same events under a job of any weight. Result: the same tickets, on the same engines, at
    the same moments."""
    logs = []
    for job_id in ("", "j"):
        scenario = Scenario(RESERVE, TUNING, engines=["e0", "e1"], kv_tokens_capacity=4_000)
        if job_id:
            scenario.send(ev.JobOpened("o", "j", "run", weight=7.0))
        for number in range(20):
            scenario.open(
                f"t{number}", job_id=job_id, prompt_id=f"p{number}", tokens=100.0 * (number % 7 + 1)
            )
            scenario.ask(f"t{number}")
        for number in range(60):
            scenario.advance(1.0)
            live = [
                record
                for record in scenario.controller.trajectories()
                if record.is_open and record.live_ticket
            ]
            if live:
                scenario.finish(scenario.ticket(live[number % len(live)].trajectory_id))
                scenario.close(live[number % len(live)].trajectory_id)
        issued = all_of(scenario.heard, act.IssueTicket)
        logs.append(
            [
                (each.ticket.ticket_id, each.ticket.engine_id, each.ticket.issued_s)
                for each in issued
            ]
        )
    assert len(logs[0]) == 20
    assert logs[0] == logs[1]


def test_a_driver_that_handled_nothing_for_minutes_ends_no_lease() -> None:
    """The renewals of that time wait in front of it."""
    scenario = Scenario(RESERVE, Tuning(job_lease_s=45.0, lease_ttl_s=10.0), engines=["e0"])
    scenario.send(ev.JobOpened("open-j", "j"))
    scenario.open("t", job_id="j")
    scenario.now += 300.0
    late = scenario.send(ev.Tick(late_s=299.0))
    assert not all_of(late, act.RemoveEngine) and not all_of(late, act.RemoveJob)
    gone = scenario.advance(46.0)
    assert one(gone, act.RemoveEngine).engine_id == "e0" and one(gone, act.RemoveJob).job_id == "j"


def test_the_open_samples_of_a_settled_group_are_closed_and_no_others() -> None:
    """Of rollout r, prompt p: sample 0 steps, 1 waits for the slot, 2 was begun after the group had
    settled. Others: another prompt, another rollout.

    Result: 0 and 1 are cancelled, the step of 0 is aborted, and the next in line gets its slot.
    """
    scenario = Scenario(Policy(reserve=True), TUNING, engines=["e0"], slots=1)
    for name, prompt, sample, rollout in (
        ("t0", "p", 0, "r"),
        ("t1", "p", 1, "r"),
        ("t2", "p", 2, "r"),
        ("q", "q", 0, "r"),
        ("s", "p", 0, "s"),
    ):
        scenario.open(name, prompt_id=prompt, sample=sample, rollout_id=rollout, tokens=100.0)
    ticket = scenario.step("t0", 0)
    for name in ("t1", "t2"):
        assert one(scenario.ask(name), act.KeepWaiting)
    ended = scenario.send(ev.GroupSettled("r", "p", samples=2))
    assert [state_of(scenario, name) for name in ("t0", "t1")] == [TrajectoryState.CANCELLED] * 2
    assert all(
        state_of(scenario, name) not in lifecycle.CLOSED_STATES.values()
        for name in ("t2", "q", "s")
    )
    assert one(ended, act.AbortStep).ticket_id == ticket.ticket_id
    assert one(ended, act.IssueTicket).ticket.trajectory_id == "t2"
    assert scenario.send(ev.GroupSettled("r", "p", samples=2)) == [], "told again"
    with pytest.raises(TrajectoryIsClosed) as closed:
        scenario.ask("t1")
    assert closed.value.metadata["state"] == "cancelled"
