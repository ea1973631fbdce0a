"""Policy.reserve: who may begin where, in which order, and what a step waits for."""

from typing import Any

import pytest
from support.control import Scenario, all_of, answer, one
from treadle_core import actions as act
from treadle_core import events as ev
from treadle_core.model import EngineLoad, KvTransfer, Policy
from treadle_core.refusals import ContextTooLong, NoEngine
from treadle_core.tuning import Tuning

RESERVE = Policy(reserve=True)
WHOLE = Tuning(reserve_share=1.0)  # so that the figures in the scenarios are round
EAGER = Tuning(plan_every_events=1, plan_interval_s=0.0)


def waiting(scenario: Scenario, lengths: dict[str, float]) -> list[act.Action]:
    """Opens them, asks for their first tickets, all of which are held, and predicts; what follows
    from predictions."""
    held: list[str] = []
    for name in lengths:
        scenario.open(name)
        held += [action.trajectory_id for action in all_of(scenario.ask(name), act.KeepWaiting)]
    assert held == list(lengths)
    return [action for name, tokens in lengths.items() for action in scenario.predict(name, tokens)]


def tickets(actions: list[act.Action]) -> list[str]:
    return [action.ticket.trajectory_id for action in all_of(actions, act.IssueTicket)]


@pytest.mark.parametrize(
    ("engine", "lengths", "begun"),
    [
        # The middle one does not fit beside the long one, and the short one does not overtake it.
        (
            {"slots": 2, "kv_tokens_capacity": 2_000},
            {"short": 200.0, "long": 1_500.0, "middle": 600.0},
            ["long"],
        ),
        ({"slots": 2}, {"a": 400.0, "b": 300.0, "c": 200.0}, ["a", "b"]),  # the KV is unknown
        # an empty engine takes even what does not fit
        ({"kv_tokens_capacity": 500}, {"huge": 50_000.0}, ["huge"]),
        # The host's memory has copies of what the engine holds too, so the larger of them counts,
        # not their sum.
        (
            {"kv_tokens_capacity": 2_000, "host_kv_tokens": 2_200},
            {"long": 1_500.0, "middle": 600.0},
            ["long", "middle"],
        ),
        (
            {"kv_tokens_capacity": 2_000, "host_kv_tokens": 2_199},
            {"long": 1_500.0, "middle": 600.0},
            ["long"],
        ),
    ],
)
def test_an_engine_lets_begin_what_its_slots_and_its_kv_hold_longest_first(
    engine: dict[str, Any], lengths: dict[str, float], begun: list[str]
) -> None:
    scenario = Scenario(RESERVE, WHOLE, engines=("e0",), **engine)

    assert tickets(waiting(scenario, lengths) + scenario.advance(1.0)) == begun


def test_a_long_one_does_not_wait_for_steps_of_clearly_shorter_ones() -> None:
    scenario = Scenario(RESERVE, WHOLE, engines=("e0",), slots=1)
    assert tickets(waiting(scenario, {"short": 100.0})) == ["short"]

    waiting(scenario, {"as long": 110.0})
    assert tickets(scenario.advance(1.0)) == []
    waiting(scenario, {"long": 1_000.0})
    assert tickets(scenario.advance(1.0)) == ["long"], (
        "the engine's queue lets it overtake the short one"
    )


@pytest.mark.parametrize(("slots", "others", "begun"), [(4, 1, True), (4, 2, False), (1, 0, True)])
def test_one_that_waits_alone_begins_with_its_prediction_where_the_engine_is_less_than_half_full(
    slots: int, others: int, begun: bool
) -> None:
    scenario = Scenario(RESERVE, WHOLE, engines=("e0",), slots=slots)
    for number in range(others):
        waiting(scenario, {f"other {number}": 100.0})
        scenario.advance(1.0)

    assert tickets(waiting(scenario, {"t": 100.0})) == ["t"] * begun
    assert tickets(scenario.advance(1.0)) == ["t"] * (not begun)


def test_of_equally_long_ones_the_one_that_asked_first_begins_first() -> None:
    scenario = Scenario(RESERVE, WHOLE, engines=("e0",), slots=1, kv_tokens_capacity=2_000)
    for name in ("opened first", "asked first"):
        scenario.open(name)
    for name in ("asked first", "opened first"):
        scenario.ask(name)
    for name in ("opened first", "asked first"):
        scenario.predict(name, 500.0)

    assert tickets(scenario.advance(1.0)) == ["asked first"]


def test_a_context_that_no_engine_takes_is_refused_and_not_held() -> None:
    scenario = Scenario(RESERVE, WHOLE, engines=("e0",), max_context_tokens=100)
    scenario.open("t")

    with pytest.raises(ContextTooLong, match="100 tokens leave no room"):
        scenario.ask("t")

    assert tickets(scenario.advance(1.0)) == []


def test_a_ticket_carries_what_the_context_is_expected_to_grow_to() -> None:
    scenario = Scenario(RESERVE, WHOLE, engines=("e0",), kv_tokens_capacity=10_000)
    scenario.open_all({"t": 700.0})

    ticket = one(scenario.ask("t") + scenario.advance(1.0), act.IssueTicket).ticket

    assert ticket.kv_reserve_tokens == 100 + 700


def test_the_next_one_begins_when_a_trajectory_closes_and_frees_its_room() -> None:
    scenario = Scenario(RESERVE, WHOLE, engines=("e0",), kv_tokens_capacity=2_000)
    waiting(scenario, {"first": 1_500.0, "second": 1_400.0})
    assert tickets(scenario.advance(1.0)) == ["first"]

    assert tickets(scenario.close("first")) == ["second"]


@pytest.mark.parametrize(
    ("capacity", "begun"), [(2_000, ["t0", "t1", "t2"]), (1_999, ["t0", "t1"])]
)
def test_a_prompt_is_reserved_once_for_all_its_samples(capacity: int, begun: list[str]) -> None:
    scenario = Scenario(RESERVE, WHOLE, engines=("e0",), kv_tokens_capacity=capacity)
    names = ("t0", "t1", "t2")
    for name in names:
        scenario.open(name, prompt_tokens=500)
        scenario.ask(name, context_tokens=500)
    predicted = [action for name in names for action in scenario.predict(name, 500.0)]

    assert tickets(predicted + scenario.advance(1.0)) == begun
    later = tickets(scenario.close("t0"))

    assert begun + later == ["t0", "t1", "t2"]
    scenario.open("other", prompt_id="q", prompt_tokens=100)
    scenario.ask("other")
    predicted = scenario.predict("other", capacity - 1_500.0 - 100.0)
    assert tickets(predicted + scenario.advance(1.0)) == ["other"], (
        "the prompt and two samples are still reserved for"
    )


def test_the_next_one_begins_when_a_step_ends_and_frees_its_slot() -> None:
    scenario = Scenario(RESERVE, WHOLE, engines=("e0",), slots=1)
    waiting(scenario, {"first": 400.0, "second": 300.0})
    scenario.advance(1.0)

    assert tickets(scenario.finish(scenario.ticket("first"))) == ["second"]


def test_a_later_step_never_waits_for_room() -> None:
    scenario = Scenario(RESERVE, WHOLE, engines=("e0",), kv_tokens_capacity=500)
    scenario.finish(one(waiting(scenario, {"t": 5_000.0}), act.IssueTicket).ticket)

    assert tickets(scenario.ask("t", 1)) == ["t"]


def test_a_repeated_request_gets_the_ticket_that_was_issued_meanwhile() -> None:
    scenario = Scenario(RESERVE, WHOLE, engines=("e0",))
    scenario.open_all({"t": 500.0})
    request = ev.StepRequested("the-request", "t", 0, context_tokens=100, max_new_tokens=64)
    scenario.open("other")  # unpredicted, so that the mesh is not taken for idle
    scenario.ask("other")
    assert one(scenario.send(request), act.KeepWaiting)
    issued = [action.ticket for action in all_of(scenario.advance(1.0), act.IssueTicket)]

    again = one(scenario.send(request), act.IssueTicket).ticket

    assert again in issued


def test_after_a_restart_those_that_waited_ask_again_and_begin() -> None:
    scenario = Scenario(RESERVE, WHOLE, engines=("e0",), kv_tokens_capacity=2_000)
    waiting(scenario, {"first": 1_500.0, "second": 1_400.0})
    scenario.advance(1.0)
    scenario.restart()
    assert one(scenario.ask("second"), act.KeepWaiting)

    assert tickets(scenario.close("first")) == ["second"]


def test_a_step_that_waited_at_an_engine_that_left_gets_one_ticket() -> None:
    """Its client asks again until another engine is there. Result: the request that waited is over
    with that ticket."""
    scenario = Scenario(RESERVE, WHOLE, engines=("e0",), slots=1)
    waiting(scenario, {"first": 400.0, "second": 300.0})
    scenario.advance(1.0)
    scenario.send(ev.EngineDeregistered("lease-e0", "e0"))
    with pytest.raises(NoEngine):
        scenario.ask("second")

    ticket = one(scenario.engine("e1"), act.IssueTicket).ticket

    assert scenario.step("second", 0, request_id=ticket.request_id) == ticket
    assert tickets(scenario.advance(1.0)) == []
    scenario.finish(ticket)
    scenario.step("second", 1)
    assert tickets(scenario.advance(1.0)) == []
    assert scenario.ticket("second").turn == 1


def waiting_for_a_move(*, asks: bool = True) -> tuple[Scenario, act.StartMigration]:
    """A trajectory that moves from e0 to e1, and whose next step waits for that."""
    scenario = Scenario(RESERVE, EAGER, engines=("e0",), kv_transfer=KvTransfer.STORAGE)
    names = [f"t{number}" for number in range(4)]
    scenario.open_all(dict.fromkeys(names, 2_000.0))
    for name in names:
        scenario.ask(name)
    scenario.advance(1.0)
    for name in names:
        scenario.finish(scenario.ticket(name))
    scenario.engine("e1", kv_transfer=KvTransfer.STORAGE)
    plan = scenario.plans[-1]
    for name in names:
        scenario.send(ev.ToolStarted(name, 10.0))
    move = all_of(
        scenario.send(answer(plan, {"e0": names[:2], "e1": names[2:]})), act.StartMigration
    )[0]
    scenario.send(ev.MoveAccepted(move.trajectory_id, move.move_id, "m"))
    assert not asks or one(scenario.ask(move.trajectory_id, 1), act.KeepWaiting)
    return scenario, move


def test_a_step_waits_for_its_kv_and_runs_at_the_source_where_the_move_fails() -> None:
    scenario, move = waiting_for_a_move()

    scenario.now += 0.5
    ended = scenario.send(ev.MoveEnded(move.trajectory_id, "m", move.move_id))

    assert one(ended, act.IssueTicket).ticket.engine_id == "e0"
    assert scenario.controller.ledger(move.trajectory_id, scenario.now).move_s == 0.5


def test_a_step_runs_at_the_target_from_the_switch_on_whoever_dies_then() -> None:
    """Result: the step starts with the switch, and no other move starts before the end of this one
    is reported."""
    scenario, move = waiting_for_a_move()

    switched = scenario.send(
        ev.SwitchRequested("s", move.trajectory_id, move.expected_revision, "e1")
    )

    assert one(switched, act.IssueTicket).ticket.engine_id == "e1"
    assert not all_of(scenario.heard, act.CancelMigration)
    assert scenario.controller.trajectory(move.trajectory_id).move is not None
    scenario.send(ev.MoveEnded(move.trajectory_id, "m", move.move_id, moved=True))
    assert scenario.controller.trajectory(move.trajectory_id).move is None


def test_a_step_that_is_asked_for_after_the_switch_waits_for_nothing() -> None:
    scenario, move = waiting_for_a_move(asks=False)
    scenario.send(ev.SwitchRequested("s", move.trajectory_id, move.expected_revision, "e1"))

    assert one(scenario.ask(move.trajectory_id, 1), act.IssueTicket).ticket.engine_id == "e1"


def test_no_move_starts_under_a_step_that_waits() -> None:
    """A step waits though its move is over, as no engine is healthy; then one is again, and a plan
    comes."""
    scenario, move = waiting_for_a_move()
    for engine_id in ("e0", "e1"):
        scenario.renew(engine_id, EngineLoad(engine_healthy=False))
    assert not all_of(
        scenario.send(ev.MoveEnded(move.trajectory_id, "m", move.move_id)), act.IssueTicket
    )
    for engine_id in ("e0", "e1"):
        scenario.renew(engine_id, EngineLoad(engine_healthy=True))
    scenario.open("news")
    there = [name for name in scenario.plans[-1].work.trajectory_ids if name != move.trajectory_id]

    actions = scenario.send(answer(scenario.plans[-1], {"e0": there, "e1": [move.trajectory_id]}))

    assert move.trajectory_id not in [
        start.trajectory_id for start in all_of(actions, act.StartMigration)
    ]
    assert move.trajectory_id in tickets(actions)


def test_a_step_waits_no_longer_than_its_move_saves_where_nobody_reports_the_end() -> None:
    """The migrator or NATS is gone, and the tool came back sooner than expected."""
    scenario, move = waiting_for_a_move()
    under_way = scenario.controller.trajectory(move.trajectory_id).move
    assert under_way is not None and 0.0 < under_way.saving_s < move.give_up_after_s
    assert under_way.give_up_s == scenario.now + under_way.saving_s

    for engine_id in ("e0", "e1"):
        scenario.renew(engine_id)
    assert not all_of(scenario.advance(0.9 * under_way.saving_s), act.IssueTicket)
    for engine_id in ("e0", "e1"):
        scenario.renew(engine_id)
    actions = scenario.advance(0.2 * under_way.saving_s)

    assert one(actions, act.IssueTicket).ticket.engine_id == "e0"
    assert one(actions, act.CancelMigration).migration_id == "m"


def test_without_the_policy_nothing_is_held_and_nothing_reserved() -> None:
    scenario = Scenario(engines=("e0",), kv_tokens_capacity=500)
    scenario.open_all({"a": 5_000.0, "b": 5_000.0})

    issued = [one(scenario.ask(name), act.IssueTicket).ticket for name in "ab"]

    assert [ticket.kv_reserve_tokens for ticket in issued] == [0, 0]
