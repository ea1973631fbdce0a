"""The ledger of a trajectory at the controller: for what its requests wait, and whose account
counts once."""

import pytest
from support.control import Scenario, all_of, one
from treadle_core import actions as act
from treadle_core import events as ev
from treadle_core.model import ClientTimes, Ledger, Outcome, Policy, StepTimes
from treadle_core.refusals import NoEngine, NoEngineWithTags

TIMES = StepTimes(queue_s=1.0, prefill_s=2.0, decode_s=4.0, preempted_s=8.0, weights_s=16.0)


def ledger(scenario: Scenario, name: str = "t") -> Ledger:
    return scenario.controller.ledger(name, scenario.now)


def finish(scenario: Scenario, turn: int = 0) -> None:
    ticket = scenario.ticket("t")
    scenario.send(ev.StepFinished("t", ticket.ticket_id, turn, 100, 10, TIMES))


def test_a_step_is_accounted_for_once_however_often_and_late_its_engine_says_so() -> None:
    scenario = Scenario(engines=("e0",))
    scenario.open("t")
    scenario.step("t", 0)
    for _ in range(2):
        finish(scenario)
    late = scenario.step("t", 1)
    scenario.step("t", 2)
    for _ in range(2):
        scenario.send(ev.StepFinished("t", late.ticket_id, 1, 100, 10, TIMES))

    assert ledger(scenario) == Ledger(
        queue_s=2.0, prefill_s=4.0, decode_s=8.0, preempted_s=16.0, weights_s=32.0
    )


def test_of_a_step_that_is_replaced_only_what_its_client_saw_counts() -> None:
    """The stream broke before its end; whether the engine's account comes first, later or never is
    the same."""
    for comes_first in (True, False):
        scenario = Scenario(engines=("e0",))
        scenario.open("t")
        lost = scenario.step("t", 0)
        if comes_first:
            finish(scenario)
        seen = ClientTimes(control_s=0.5, lost=StepTimes(decode_s=3.0))
        scenario.step(
            "t", 0, replaces_ticket_id=lost.ticket_id, resumed_tokens=4, client_times=seen
        )
        scenario.send(ev.StepFinished("t", lost.ticket_id, 0, 100, 10, TIMES))

        assert ledger(scenario) == Ledger(decode_s=3.0, control_s=0.5)


def test_a_wait_counts_for_what_it_waits_for_until_now_and_is_named_on_the_ticket() -> None:
    """A first step waits for room, then while its engine loads weights, then for room again."""
    scenario = Scenario(Policy(reserve=True), engines=("e0",), slots=1)
    scenario.open("first", tokens=500.0)
    first = scenario.step("first", 0)
    scenario.open("t", tokens=400.0)
    scenario.ask("t", request_id="r")
    scenario.advance(1.0)
    assert ledger(scenario) == Ledger(held_s=1.0)
    scenario.send(ev.WeightsSet("v1", "/m/v1"))
    scenario.advance(0.0)
    scenario.now += 2.0
    assert ledger(scenario) == Ledger(held_s=1.0, weights_s=2.0)
    scenario.send(ev.WeightsUpdated("e0", "v1"))
    scenario.advance(0.0)
    scenario.now += 4.0
    ticket = one(
        scenario.send(ev.StepFinished("first", first.ticket_id, 0, 100, 10)), act.IssueTicket
    ).ticket

    assert ticket.waited_s == 7.0
    assert ledger(scenario) == Ledger(held_s=5.0, weights_s=2.0)
    scenario.now += 9.0
    assert scenario.step("t", 0, request_id="r") == ticket, "a repeat changes nothing"
    assert ledger(scenario) == Ledger(held_s=5.0, weights_s=2.0)


def test_a_step_that_is_refused_as_no_engine_is_there_waits_from_the_first_refusal_on() -> None:
    scenario = Scenario()
    scenario.open("t")
    for _ in range(3):
        with pytest.raises(NoEngine):
            scenario.ask("t")
        scenario.now += 1.0
    scenario.engine("e0")

    assert scenario.step("t", 0).waited_s == 3.0
    assert ledger(scenario) == Ledger(held_s=3.0)


def test_a_later_step_whose_engine_loads_waits_for_weights() -> None:
    scenario = Scenario(engines=("e0",))
    scenario.open("t")
    scenario.finish(scenario.step("t", 0))
    scenario.send(ev.WeightsSet("v1", "/m/v1"))
    with pytest.raises(NoEngine):
        scenario.ask("t", 1)
    scenario.now += 2.0
    scenario.send(ev.WeightsUpdated("e0", "v1"))

    assert scenario.step("t", 1).waited_s == 2.0
    assert ledger(scenario) == Ledger(weights_s=2.0)


def test_a_step_that_is_refused_for_good_does_not_wait_any_more() -> None:
    scenario = Scenario(engines=("e0",))
    scenario.open("t", hardware_tags=("h100",))
    with pytest.raises(NoEngine):
        scenario.ask("t")
    scenario.now += scenario.tuning.missing_tags_s
    assert ledger(scenario).held_s == scenario.tuning.missing_tags_s
    with pytest.raises(NoEngineWithTags):
        scenario.ask("t")

    assert ledger(scenario) == Ledger(), "its client counts what it waited"


def test_a_closing_ends_a_wait_and_counts_for_how_long_it_was_on_its_way() -> None:
    scenario = Scenario()
    scenario.open("t")
    with pytest.raises(NoEngine):
        scenario.ask("t")
    scenario.now += 5.0
    times = ClientTimes(tool_s=1.0, control_s=0.5, since_opening_s=4.5)
    closing = ev.TrajectoryClosed("c", "t", Outcome.CANCELLED, None, times)
    for _ in range(2):
        scenario.send(closing)

    assert ledger(scenario) == Ledger(held_s=5.0, tool_s=1.0, control_s=1.0)
    assert one(
        all_of(scenario.heard, act.AnnounceClosed), act.AnnounceClosed
    ).record.ledger == ledger(scenario)


def test_a_restart_keeps_what_was_accounted_for() -> None:
    scenario = Scenario(engines=("e0",))
    scenario.open("t")
    scenario.step("t", 0, client_times=ClientTimes(control_s=0.25))
    finish(scenario)
    before = ledger(scenario)
    scenario.restart()

    assert ledger(scenario) == before
    assert before.total_s == 31.25


def test_a_client_that_measures_nothing_has_its_tools_and_no_control() -> None:
    scenario = Scenario(engines=("e0",))
    scenario.open("t")
    for turn in range(3):
        scenario.step("t", turn, tool_s=1.5 if turn else 0.0)

    assert ledger(scenario) == Ledger(tool_s=3.0)
