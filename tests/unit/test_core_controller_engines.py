"""Engines and leases: what happens to trajectories when engines come, fall silent and go."""

from dataclasses import replace

import pytest
from support.control import CURVE, Scenario, all_of, answer, one
from treadle_core import actions as act
from treadle_core import events as ev
from treadle_core import refusals
from treadle_core.model import (
    DecodeCurve,
    EngineLoad,
    EngineSpec,
    PlacementRule,
    Policy,
    TicketStatus,
)
from treadle_core.tuning import Tuning

PINNED = Policy(placement=PlacementRule.PINNED, migrate=False)


def test_a_lease_that_is_renewed_holds_and_one_that_is_not_runs_out() -> None:
    scenario = Scenario(engines=("held", "silent"))
    for _ in range(3):
        scenario.now += scenario.tuning.lease_ttl_s / 3
        scenario.renew("held")
    actions = scenario.send(ev.Tick())
    assert one(actions, act.AnnounceEngineLost) == act.AnnounceEngineLost("silent", "LEASE_EXPIRED")
    assert [engine.spec.engine_id for engine in scenario.controller.engines()] == ["held"]
    with pytest.raises(refusals.LeaseNotFound):
        scenario.renew("silent")


@pytest.mark.parametrize("rule", list(PlacementRule))
def test_the_trajectories_of_a_lost_engine_go_on_elsewhere(rule: PlacementRule) -> None:
    """Result: revision moves by one, the ticket is lost, and the same turn is ticketed anew at the
    other engine."""
    scenario = Scenario(replace(PINNED, placement=rule), engines=("e0", "e1"))
    for number in range(4):
        scenario.open(f"t{number}")
    tickets = [scenario.step(f"t{number}", 0) for number in range(4)]
    lost = {ticket.trajectory_id: ticket for ticket in tickets if ticket.engine_id == "e0"}
    assert lost, "both engines have work"
    scenario.send(ev.EngineDeregistered("lease-e0", "e0"))
    for name, ticket in lost.items():
        record = scenario.controller.trajectory(name)
        assert (record.engine_id, record.revision) == ("e1", ticket.revision + 1)
        assert scenario.ticket(name).status is TicketStatus.LOST
        with pytest.raises(refusals.StepInFlight):
            scenario.step(name, 0)
        again = scenario.step(name, 0, replaces_ticket_id=ticket.ticket_id, resumed_tokens=2)
        assert (again.engine_id, again.revision) == ("e1", record.revision)
    assert scenario.controller.open_on("e0") == 0
    assert scenario.controller.open_on("e1") == 4


def test_when_the_last_engine_is_lost_trajectories_wait_for_the_next() -> None:
    scenario = Scenario(engines=("e0",))
    scenario.open("t")
    ticket = scenario.step("t", 0)
    scenario.advance(scenario.tuning.lease_ttl_s)
    assert scenario.controller.trajectory("t").engine_id == ""
    with pytest.raises(refusals.NoEngine):
        scenario.step("t", 0, replaces_ticket_id=ticket.ticket_id)
    scenario.engine("e1")
    assert scenario.step("t", 0, replaces_ticket_id=ticket.ticket_id).engine_id == "e1"


def test_a_pinned_engine_always_wins_and_is_waited_for() -> None:
    scenario = Scenario(Policy(placement=PlacementRule.LEAST_LOAD), engines=("e0", "e1"))
    for number in range(3):
        scenario.open(f"t{number}", pinned_engine_id="e1")
        assert scenario.step(f"t{number}", 0).engine_id == "e1"
    ticket = scenario.ticket("t0")
    scenario.send(ev.EngineDeregistered("lease-e1", "e1"))
    with pytest.raises(refusals.NoEngine):
        scenario.step("t0", 0, replaces_ticket_id=ticket.ticket_id)
    scenario.engine("e1")
    assert scenario.step("t0", 0, replaces_ticket_id=ticket.ticket_id).engine_id == "e1"
    with pytest.raises(refusals.EngineNotFound):
        scenario.open("t9", pinned_engine_id="e9")


def test_only_engines_with_the_asked_hardware_are_chosen() -> None:
    scenario = Scenario(engines=("plain",))
    scenario.engine("fast", hardware_tags=("h200", "bandwidth-bound"))
    for number in range(3):
        assert scenario.open(f"t{number}", hardware_tags=("h200",)).engine_id == "fast"
    assert scenario.open("nowhere", hardware_tags=("b300",)).engine_id == ""
    with pytest.raises(refusals.NoEngine):
        scenario.step("nowhere", 0)


def test_tags_that_no_engine_carries_are_refused_for_good_after_a_while() -> None:
    """Result: the time is counted from the first request, and anew once an engine with the tags has
    been there."""
    scenario = Scenario(tuning=Tuning(missing_tags_s=5.0, lease_ttl_s=3600.0), engines=("plain",))
    scenario.engine("old", hardware_tags=("a100",))
    scenario.open("t", hardware_tags=("b300",))

    def lack() -> refusals.NoEngine:
        with pytest.raises(
            refusals.NoEngine, match="none of the 2 engines carries the hardware tags b300"
        ) as raised:
            scenario.ask("t")
        assert "engines have the tags a100" in raised.value.message
        return raised.value

    assert lack().reason == "NO_ENGINE"
    scenario.advance(5.0)
    assert lack().reason == "NO_ENGINE_WITH_TAGS"
    scenario.engine("new", hardware_tags=("b300",))
    scenario.send(ev.EngineDeregistered("lease-new", "new"))
    assert lack().reason == "NO_ENGINE"


def test_an_unhealthy_engine_gets_no_steps_and_its_trajectories_leave_it() -> None:
    scenario = Scenario(engines=("e0", "e1"))
    assert scenario.open("t").engine_id == "e0"
    scenario.renew("e0", EngineLoad(engine_healthy=False))
    assert scenario.step("t", 0).engine_id == "e1"
    scenario.renew("e1", EngineLoad(engine_healthy=False))
    scenario.open("u")
    with pytest.raises(refusals.NoEngine):
        scenario.step("u", 0)


def test_registering_again_with_the_same_request_changes_nothing() -> None:
    scenario = Scenario()
    spec = EngineSpec("e0", "e0:1")
    first = scenario.send(ev.EngineRegistered("r", "lease-1", spec))
    assert one(first, act.SaveEngine).record.lease_id == "lease-1"
    assert scenario.send(ev.EngineRegistered("r", "lease-2", spec)) == []
    record = scenario.controller.engine("e0")
    assert record is not None
    assert record.lease_id == "lease-1"
    with pytest.raises(refusals.RequestIdReused):
        scenario.send(ev.EngineRegistered("r", "lease-3", replace(spec, slot_limit=9)))


def test_a_measured_curve_takes_the_place_of_the_old_one_and_a_plan_is_due() -> None:
    """Result: saved and planned with once, however often it is renewed with; a repeated
    registration changes nothing."""
    scenario = Scenario(tuning=Tuning(lease_ttl_s=3600.0), engines=("e0", "e1"))
    for number in range(4):
        scenario.open(f"t{number}", tokens=500.0)
    scenario.advance(scenario.tuning.plan_timeout_s)
    scenario.send(answer(scenario.plans[-1], {}))
    scenario.advance(scenario.tuning.plan_timeout_s)
    asked = len(scenario.plans)
    slow = DecodeCurve(0.2, 0.05, 1e-6, 300.0, 1e-7)
    saved = one(scenario.renew("e1", curve=slow), act.SaveEngine).record
    assert saved.spec.decode_curve == slow
    plan_due = scenario.plans[asked:]
    assert {engine.engine_id: engine.decode_curve for engine in plan_due[-1].engines} == {
        "e0": CURVE,
        "e1": slow,
    }
    scenario.send(answer(scenario.plans[-1], {}))
    asked = len(scenario.plans)
    for _ in range(3):
        scenario.now += scenario.tuning.plan_timeout_s
        assert not all_of(scenario.renew("e1", curve=slow), act.SaveEngine)
    assert len(scenario.plans) == asked
    first = EngineSpec("e1", "e1:7410", slot_limit=4, weight_version="v0", decode_curve=CURVE)
    assert scenario.send(ev.EngineRegistered(saved.register_request_id, "lease-2", first)) == []
    record = scenario.controller.engine("e1")
    assert record is not None
    assert record.spec.decode_curve == slow


def test_an_engine_that_is_not_measured_yet_plans_as_the_slowest_of_the_others() -> None:
    scenario = Scenario(engines=("e0",))
    slow = DecodeCurve(0.2, 0.0001, 1e-6, 300.0, 1e-7)
    scenario.engine("e1", decode_curve=slow)
    scenario.engine("e2", decode_curve=DecodeCurve())
    for number in range(4):
        scenario.open(f"t{number}", tokens=500.0)
    curves = {engine.engine_id: engine.decode_curve for engine in scenario.plans[-1].engines}
    assert curves == {
        "e0": CURVE,
        "e1": slow,
        "e2": replace(slow, per_sequence_s=CURVE.per_sequence_s),
    }


def test_a_restarted_sidecar_takes_its_engine_over_and_what_ran_there_is_lost() -> None:
    scenario = Scenario(engines=("e0",))
    scenario.open("t")
    ticket = scenario.step("t", 0)
    actions = scenario.send(ev.EngineRegistered("again", "new-lease", EngineSpec("e0", "e0:2")))
    assert one(actions, act.AnnounceEngineLost).reason == "REPLACED"
    assert one(actions, act.AnnounceEngineJoined).spec.address == "e0:2"
    with pytest.raises(refusals.LeaseNotFound):
        scenario.renew("e0")
    again = scenario.step("t", 0, replaces_ticket_id=ticket.ticket_id)
    assert again.engine_address == "e0:2"


def test_a_restarted_scheduler_gives_every_engine_time_to_renew() -> None:
    """Nobody could renew while it was away; stored tickets stay live."""
    scenario = Scenario(engines=("e0",))
    scenario.open("t")
    scenario.step("t", 0)
    scenario.now += 10 * scenario.tuning.lease_ttl_s
    scenario.restart()
    assert all_of(scenario.advance(0.0), act.AnnounceEngineLost) == []
    assert scenario.controller.trajectory("t").live_ticket is not None
    assert all_of(scenario.advance(scenario.tuning.lease_ttl_s), act.AnnounceEngineLost)


def test_tickets_carry_the_weights_that_the_engine_serves_now() -> None:
    scenario = Scenario(engines=("e0",))
    scenario.open("t")
    scenario.finish(scenario.step("t", 0))
    scenario.send(ev.WeightsUpdated("e0", "v1"))
    ticket = scenario.step("t", 1)
    assert ticket.weight_version == "v1"
    scenario.finish(ticket)
    scenario.renew("e0", EngineLoad(weight_version="v2"))
    assert scenario.step("t", 2).weight_version == "v2"


def test_pinned_placement_takes_engines_in_turn_and_never_moves() -> None:
    scenario = Scenario(PINNED, engines=("e0", "e1"))
    assert [scenario.open(f"t{number}").engine_id for number in range(4)] == [
        "e0",
        "e1",
        "e0",
        "e1",
    ]
    for turn in range(3):
        for number in range(4):
            ticket = scenario.step(f"t{number}", turn)
            assert ticket.engine_id == f"e{number % 2}"
            assert ticket.revision == 1
            scenario.finish(ticket)
    with pytest.raises(refusals.TrajectoryPinned):
        scenario.send(ev.SwitchRequested("s", "t0", 1, "e1"))


def test_least_load_chooses_afresh_at_each_step_and_planned_placement_opens_where_least_predicted_work_is() -> (
    None
):
    scenario = Scenario(Policy(placement=PlacementRule.LEAST_LOAD), engines=("e0",), slots=1)
    scenario.engine("e1", slots=4)
    for number in range(5):
        scenario.open(f"t{number}")
    assert sorted(scenario.step(f"t{number}", 0).engine_id for number in range(5)) == [
        "e0",
        *["e1"] * 4,
    ]
    planned = Scenario(engines=("e0", "e1"))
    planned.open("long", tokens=5_000)
    assert [planned.open(f"t{number}").engine_id for number in range(5)] == ["e1"] * 5


def test_a_policy_holds_for_trajectories_opened_under_it() -> None:
    scenario = Scenario(PINNED, engines=("e0",))
    scenario.open("before")
    scenario.send(ev.PolicySet(Policy(placement=PlacementRule.LEAST_LOAD)))
    scenario.open("after")
    assert scenario.controller.trajectory("before").policy.placement is PlacementRule.PINNED
    assert scenario.controller.trajectory("after").policy.placement is PlacementRule.LEAST_LOAD


def lose(scenario: Scenario, name: str, turn: int = 0) -> str:
    """A stream of a trajectory is lost; the engine that lost it."""
    lost = scenario.ticket(name)
    scenario.now += 0.01
    scenario.step(name, turn, replaces_ticket_id=lost.ticket_id)
    return lost.engine_id


def rest_s(scenario: Scenario, engine_id: str, other: str) -> float:
    """How long an engine gets no trajectory, in whole renewals of 2 s, of which the last one is not
    counted."""
    began_s = scenario.now
    while True:
        scenario.now += 2.0
        scenario.renew(other)
        scenario.renew(engine_id)
        engine = scenario.controller.engine(engine_id)
        assert engine is not None
        if engine.usable:
            return scenario.now - began_s - 2.0


# No rest is a whole number of the renewals of `rest_s`.
BUSY = Tuning(loss_rest_s=4.7, longest_rest_s=31.0, loss_memory_s=1000.0)


def test_an_engine_that_loses_streams_again_rests_twice_as_long_each_time() -> None:
    """Result: each time it gets no new step for longer, up to a limit; after a long time without a
    loss, the first rest is short again."""
    scenario = Scenario(tuning=BUSY, engines=("bad", "good"))
    rests = []
    for name in ("a", "b", "c", "d", "e"):
        scenario.open(name)
        assert scenario.step(name, 0).engine_id == "bad"
        assert lose(scenario, name) == "bad"
        scenario.close(name)
        rests.append(rest_s(scenario, "bad", "good"))
    assert rests == pytest.approx([0.0, 4.0, 8.0, 18.0, 30.0])
    for _ in range(300):
        scenario.now += 4.0
        for engine_id in ("bad", "good"):
            scenario.renew(engine_id)
        scenario.send(ev.Tick())
    scenario.open("late")
    scenario.step("late", 0)
    assert lose(scenario, "late") == "bad"
    assert rest_s(scenario, "bad", "good") == 0.0


def test_streams_that_are_lost_together_are_one_loss() -> None:
    scenario = Scenario(tuning=BUSY, engines=("bad",))
    for number in range(4):
        scenario.open(f"t{number}")
        scenario.step(f"t{number}", 0)
    scenario.engine("good")
    assert {lose(scenario, f"t{number}") for number in range(4)} == {"bad"}
    assert rest_s(scenario, "bad", "good") == 0.0


def test_an_engine_that_leaves_with_its_streams_rests_when_it_is_back() -> None:
    """Its sidecar gave it up twice before any client could report. Result: what was remembered of
    it holds for its next lease."""
    scenario = Scenario(tuning=BUSY, engines=("bad", "good"))
    for name in ("a", "b"):
        scenario.open(name)
        assert scenario.step(name, 0).engine_id == "bad"
        scenario.send(ev.EngineDeregistered("lease-bad", "bad"))
        assert scenario.step(name, 0, replaces_ticket_id=scenario.ticket(name).ticket_id)
        scenario.close(name)
        scenario.now += 3.0
        scenario.renew("good")
        scenario.engine("bad")
    assert [scenario.open(f"new-{number}").engine_id for number in range(3)] == ["good"] * 3
    scenario.advance(2.0)
    assert scenario.open("later").engine_id == "bad"


def test_a_request_that_no_engine_survives_makes_none_of_them_rest() -> None:
    scenario = Scenario(tuning=BUSY, engines=("e0", "e1"))
    scenario.open("poison")
    scenario.step("poison", 0)
    assert [lose(scenario, "poison") for _ in range(6)] == ["e0", "e1"] * 3
    for engine_id, other in (("e0", "e1"), ("e1", "e0")):
        assert rest_s(scenario, engine_id, other) == pytest.approx(0.0)


def test_after_repeated_losses_an_engine_gets_one_step_until_one_has_ended() -> None:
    scenario = Scenario(tuning=BUSY, engines=("bad", "good"))
    for name in ("a", "b"):
        scenario.open(name)
        scenario.step(name, 0)
        assert lose(scenario, name) == "bad"
        scenario.close(name)
        rest_s(scenario, "bad", "good")
    scenario.open("trial")
    trial = scenario.step("trial", 0)
    assert trial.engine_id == "bad"
    assert [scenario.open(f"new-{number}").engine_id for number in range(4)] == ["good"] * 4
    scenario.now += 1.0
    scenario.finish(trial)
    assert scenario.open("next").engine_id == "bad"
    assert scenario.step("trial", 1).engine_id == "bad", "it goes on where it was"


@pytest.mark.parametrize("rule", list(PlacementRule))
def test_trajectories_leave_an_engine_that_rests_after_repeated_losses(rule: PlacementRule) -> None:
    """One of them is in a tool call meanwhile."""
    scenario = Scenario(replace(PINNED, placement=rule), BUSY, engines=("bad", "good"))
    for name in ("waits", "a", "b"):
        scenario.open(name, prompt_id=name)
        while scenario.step(name, 0).engine_id != "bad":
            name = f"{name}-again"
            scenario.open(name, prompt_id=name)
        if name.startswith("waits"):
            waits = name
            scenario.finish(scenario.ticket(name))
        else:
            assert lose(scenario, name) == "bad"
            if name.startswith("a"):
                rest_s(scenario, "bad", "good")
    assert scenario.step(waits, 1).engine_id == "good"


def test_an_engine_does_not_rest_where_no_other_one_can_take_its_steps() -> None:
    scenario = Scenario(tuning=BUSY, engines=("only",))
    for name in ("a", "b", "c"):
        scenario.open(name)
        scenario.step(name, 0)
        assert lose(scenario, name) == "only"
        scenario.renew("only")
        only = scenario.controller.engine("only")
        assert only is not None and only.usable


def test_a_scheduler_whose_clock_is_behind_waits_for_no_time_of_the_one_before() -> None:
    """It takes over with a clock an hour behind. Result: a ticket that no step has used gives up
    its slot after its life, and a closed trajectory is forgotten in its time."""
    scenario = Scenario(engines=("e0",))
    scenario.now = 3600.0
    scenario.renew("e0")
    scenario.open("t")
    scenario.step("t", 0)
    scenario.open("closed")
    scenario.close("closed")
    scenario.now = 0.0
    scenario.restart()
    scenario.send(ev.ClosedAnnounced("closed"))
    for _ in range(200):
        scenario.renew("e0")
        asked = scenario.advance(4.0)
        if all_of(asked, act.AskStep):
            break
    assert scenario.now <= scenario.tuning.ticket_ttl_s + 4.0
    scenario.send(ev.StepUnknown("t", scenario.ticket("t").ticket_id))
    assert scenario.ticket("t").status is TicketStatus.LOST
    assert scenario.controller.ledger("t", scenario.now) is not None
    while scenario.now < scenario.tuning.keep_closed_s + 4.0:
        scenario.renew("e0")
        scenario.advance(4.0)
    with pytest.raises(refusals.TrajectoryNotFound):
        scenario.controller.trajectory("closed")
