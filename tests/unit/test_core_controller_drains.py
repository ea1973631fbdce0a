"""Engines that an operator drains: what leaves them, what stays, and what is refused."""

from dataclasses import replace

import pytest
from support.control import Scenario, all_of, answer, one
from treadle_core import actions as act
from treadle_core import events as ev
from treadle_core import refusals
from treadle_core.model import TREADLE_POLICY, EngineLoad, PlacementRule, Policy

RULES = [Policy(placement=rule) for rule in PlacementRule]


def drain(scenario: Scenario, engine_id: str, draining: bool = True) -> list[act.Action]:
    return scenario.send(ev.DrainSet(engine_id, draining))


def engine_of(scenario: Scenario, name: str) -> str:
    return scenario.controller.trajectory(name).engine_id


@pytest.mark.parametrize("policy", RULES, ids=lambda policy: str(policy.placement.value))
def test_a_drained_engine_gets_empty_and_nothing_is_lost(policy: Policy) -> None:
    """GIVEN   two engines with trajectories between steps, with steps that run, and one that has not
    begun
    WHEN    one engine is drained
    Result: what does not run there leaves at once, what runs ends there and leaves then, no new
    ticket goes there, and
            each turn comes once; after the drain has ended, tickets go there again"""
    scenario = Scenario(policy, engines=("e0", "e1"), slots=8)
    for number in range(8):
        scenario.open(f"t{number}", prompt_id=f"p{number}")
        scenario.step(f"t{number}", 0)
    for number in range(4):
        scenario.finish(scenario.ticket(f"t{number}"))
    there = [name for name in scenario.trajectories if engine_of(scenario, name) == "e0"]
    running = [
        name for name in there if scenario.controller.trajectory(name).live_ticket is not None
    ]
    assert running and len(running) < len(there)
    actions = drain(scenario, "e0")
    one(actions, act.SaveDrained)
    assert not all_of(actions, act.AbortStep)
    assert scenario.controller.open_on("e0") == len(running)
    for name in set(there) - set(running):
        assert "e0 is drained" in scenario.controller.history(name)[0][-1].reason
    scenario.finish(scenario.ticket(running[0]))
    assert engine_of(scenario, running[0]) == "e1"
    for name in running[1:]:  # the client is faster than the engine's account
        scenario.step(name, 1)
    assert scenario.controller.open_on("e0") == 0
    for number in range(8, 12):
        scenario.open(f"t{number}", prompt_id=f"p{number}")
        assert scenario.step(f"t{number}", 0).engine_id == "e1"
    for number in range(4):
        assert scenario.step(f"t{number}", 1).engine_id == "e1"
    drain(scenario, "e0", draining=False)
    for number in range(12, 24):
        scenario.open(f"t{number}", prompt_id=f"p{number}")
        scenario.step(f"t{number}", 0)
    assert scenario.controller.open_on("e0") > 0


def test_a_step_that_waits_to_begin_begins_elsewhere() -> None:
    """Under a policy that reserves KV, with all slots taken. Result: what waited at the drained
    engine starts at the other one as soon as there is a slot."""
    scenario = Scenario(TREADLE_POLICY, engines=("e0", "e1"), slots=1, kv_tokens_capacity=100_000)
    for number in range(3):
        scenario.open(f"t{number}", tokens=100.0)
        scenario.ask(f"t{number}")
    scenario.advance(1.0)
    running = {
        record.engine_id: record
        for record in scenario.trajectories.values()
        if record.ticket is not None
    }
    assert running.keys() == {"e0", "e1"} and engine_of(scenario, "t2") == "e0"
    drain(scenario, "e0")
    assert engine_of(scenario, "t2") == "e1"
    issued = one(scenario.finish(scenario.ticket(running["e1"].trajectory_id)), act.IssueTicket)
    assert (issued.ticket.trajectory_id, issued.ticket.engine_id) == ("t2", "e1")


def test_the_last_engine_that_takes_steps_is_not_drained() -> None:
    """Result: refused, also where the others are drained or unhealthy, and nothing has changed."""
    scenario = Scenario(engines=("e0", "e1"))
    drain(scenario, "e0")
    assert drain(scenario, "e0") == [], "a repeat changes nothing"
    with pytest.raises(refusals.LastEngine, match="no engine but e1"):
        drain(scenario, "e1")
    assert scenario.controller.drained == ("e0",)
    drain(scenario, "e0", draining=False)
    scenario.renew("e0", EngineLoad(engine_healthy=False))
    with pytest.raises(refusals.LastEngine):
        drain(scenario, "e1")
    for draining in (True, False):
        with pytest.raises(refusals.EngineNotFound):
            drain(scenario, "e9", draining)


def test_what_no_other_engine_can_run_goes_on_at_a_drained_engine() -> None:
    """A trajectory that is pinned there, one with tags of it alone, and, once the other engine is
    lost, all."""
    scenario = Scenario(engines=("e1",))
    scenario.engine("e0", hardware_tags=("h200",))
    scenario.open("pinned", pinned_engine_id="e0")
    scenario.open("tagged", hardware_tags=("h200",))
    scenario.open("free")
    drain(scenario, "e0")
    revisions = {
        name: scenario.controller.trajectory(name).revision for name in ("pinned", "tagged")
    }
    for name, expected in (("pinned", "e0"), ("tagged", "e0"), ("free", "e1")):
        ticket = scenario.step(name, 0)
        scenario.finish(ticket)
        assert (ticket.engine_id, engine_of(scenario, name)) == (expected, expected)
    assert revisions == {name: scenario.controller.trajectory(name).revision for name in revisions}
    scenario.send(ev.EngineDeregistered("lease-e1", "e1"))
    assert scenario.step("free", 1).engine_id == "e0"
    scenario.engine("e1")
    scenario.finish(scenario.ticket("free"))
    assert engine_of(scenario, "free") == "e1"


def test_an_engine_that_has_lost_a_stream_is_preferred_to_a_drained_one() -> None:
    scenario = Scenario(Policy(placement=PlacementRule.LEAST_LOAD), engines=("e0", "e1"))
    scenario.open("t", pinned_engine_id="e1")
    lost = scenario.step("t", 0)
    drain(scenario, "e0")
    scenario.step("t", 0, replaces_ticket_id=lost.ticket_id)
    scenario.open("other")
    assert scenario.step("other", 0).engine_id == "e1"


def test_a_drain_outlives_the_engine_and_the_scheduler() -> None:
    scenario = Scenario(engines=("e0", "e1"))
    drain(scenario, "e0")
    scenario.restart()
    scenario.open("t0")
    assert scenario.step("t0", 0).engine_id == "e1"
    scenario.send(ev.EngineDeregistered("lease-e0", "e0"))
    scenario.engine("e0")
    scenario.open("t1")
    assert scenario.step("t1", 0).engine_id == "e1"
    scenario.send(ev.EngineDeregistered("lease-e0", "e0"))
    drain(scenario, "e0", draining=False)
    scenario.engine("e0")
    assert not any(engine.draining for engine in scenario.controller.engines())


def test_plans_leave_a_drained_engine_out() -> None:
    """Result: a plan is asked of the others, and one from before the drain moves nothing there."""
    scenario = Scenario(replace(TREADLE_POLICY, reserve=False), engines=("e0", "e1", "e2"), slots=1)
    lengths = {f"t{number}": 2_000.0 + number for number in range(6)}
    scenario.open_all(lengths)
    for name in lengths:
        scenario.finish(scenario.step(name, 0))
    scenario.advance(2.0)
    asked = scenario.plans[-1]
    assert [engine.engine_id for engine in asked.engines] == ["e0", "e1", "e2"]
    drain(scenario, "e0")
    scenario.send(answer(asked, {"e0": list(lengths)}))
    scenario.advance(2.0)
    assert [engine.engine_id for engine in scenario.plans[-1].engines] == ["e1", "e2"]
    for name in lengths:
        assert scenario.step(name, 1).engine_id != "e0"
