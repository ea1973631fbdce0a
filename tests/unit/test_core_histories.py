"""What the controller keeps of its decisions and of steps, in words and within bounds."""

import pytest
from support.control import Scenario
from treadle_core import events as ev
from treadle_core.model import Policy
from treadle_core.refusals import NoEngine
from treadle_core.state import MOST_DECISIONS, MOST_HISTORIES, Histories


def told(scenario: Scenario, name: str = "t") -> list[tuple[str, str, str]]:
    decisions, _ = scenario.controller.history(name)
    return [(each.kind, each.engine_id, each.reason) for each in decisions]


def test_decisions_say_what_was_decided_and_by_which_numbers() -> None:
    """Two trajectories share a slot: one is placed, held for the slot, gets its ticket, and is
    preempted."""
    scenario = Scenario(Policy(reserve=True), engines=("e0",), slots=1)
    scenario.open("long", tokens=400.0)
    first = scenario.step("long", 0)
    scenario.open("t", tokens=390.0)
    scenario.ask("t")
    scenario.now += 2.0
    scenario.finish(first)
    ticket = scenario.ticket("t")
    again = scenario.step("long", 1)
    scenario.send(ev.StepPreempted("t", ticket.ticket_id, 20, again.ticket_id))

    placed, held, got, preempted = told(scenario)
    assert placed == ("placed", "e0", "the only engine")
    assert held == ("held", "e0", "no slot: 1 steps have tickets, for 1 slots")
    assert got == ("ticket", "e0", f"turn 0 at priority {ticket.priority:.2f}, after 2.00 s")
    priorities = (
        f"at priority {ticket.priority:.2f} after 20 tokens, by long at {again.priority:.2f}"
    )
    assert preempted == ("preempted", "e0", priorities)


def test_steps_are_kept_in_order_with_their_tools_also_where_an_account_comes_late() -> None:
    scenario = Scenario(engines=("e0",))
    scenario.open("t")
    first = scenario.step("t", 0)
    second = scenario.step("t", 1, context_tokens=150, tool_s=1.5)
    scenario.finish(first, 20)
    again = scenario.step("t", 1, context_tokens=150, replaces_ticket_id=second.ticket_id)
    scenario.finish(again, 30)

    assert scenario.controller.history("t")[1] == [(0, 100, 20, 0.0), (1, 150, 30, 1.5)]


def test_a_history_is_bounded_and_goes_with_its_trajectory() -> None:
    histories = Histories()
    for number in range(MOST_DECISIONS + 5):
        histories.decide("t", float(number), "ticket", "e0", "turn {}", number)
    assert [each.now_s for each in histories.decisions("t")] == [
        float(5 + n) for n in range(MOST_DECISIONS)
    ]
    for number in range(MOST_HISTORIES):
        histories.decide(f"t{number}", 0.0, "ticket", "e0", "")
    assert not histories.decisions("t") and histories.decisions("t0")
    histories.forget("t0")
    assert not histories.decisions("t0")


def test_a_refused_request_is_held_once_until_an_engine_comes() -> None:
    """No engine is there while a step is requested twice; then one registers.

    Result: the history says once why the step was held, and the ticket says how long.
    """
    scenario = Scenario(engines=())
    scenario.open("t")
    for _ in range(2):
        with pytest.raises(NoEngine):
            scenario.step("t", 0)
        scenario.now += 1.0
    scenario.engine("e0")
    scenario.step("t", 0)

    held, placed, got = told(scenario)
    assert held == ("held", "", "no engine is registered")
    assert placed[0] == "placed" and got[2].endswith("after 2.00 s")
