"""Tickets: turns in order, repeats, lost streams, what engines say late."""

from itertools import pairwise

import pytest
from support.control import Scenario, all_of, one
from treadle_core import actions as act
from treadle_core import events as ev
from treadle_core import refusals
from treadle_core.model import Outcome, TicketStatus, TrajectoryState
from treadle_core.steps.tickets import ticket_id, trajectory_of
from treadle_runtime.fields import owner_of


@pytest.fixture
def scenario() -> Scenario:
    return Scenario(engines=("e0", "e1"))


def test_a_step_gets_a_ticket_that_names_engine_turn_revision_and_weights(
    scenario: Scenario,
) -> None:
    scenario.open("t")
    ticket = scenario.step("t", 0)
    assert (ticket.trajectory_id, ticket.turn, ticket.engine_id, ticket.engine_address) == (
        "t",
        0,
        "e0",
        "e0:7410",
    )
    assert (ticket.weight_version, ticket.revision) == ("v0", 1)
    assert ticket.expires_s == scenario.now + scenario.tuning.ticket_ttl_s
    assert scenario.controller.trajectory("t").state is TrajectoryState.STEPPING


def test_a_repeated_request_gets_the_same_ticket_also_after_a_restart(scenario: Scenario) -> None:
    scenario.open("t")
    ticket = scenario.step("t", 0, request_id="r")
    assert scenario.step("t", 0, request_id="r") == ticket
    scenario.restart()
    assert scenario.step("t", 0, request_id="r") == ticket
    with pytest.raises(refusals.RequestIdReused, match="r has asked"):
        scenario.step("t", 0, request_id="r", max_new_tokens=1)


def test_turns_come_in_order(scenario: Scenario) -> None:
    scenario.open("t")
    for turn in range(3):
        for wrong in {0, 1, turn + 1} - {turn}:
            with pytest.raises(refusals.TurnOutOfOrder, match=f"turn {turn} does"):
                scenario.step("t", wrong)
        scenario.finish(scenario.step("t", turn))


def test_the_same_turn_again_must_name_the_lost_ticket(scenario: Scenario) -> None:
    scenario.open("t")
    lost = scenario.step("t", 0)
    with pytest.raises(refusals.StepInFlight) as refused:
        scenario.step("t", 0)
    assert refused.value.metadata["ticket_id"] == lost.ticket_id
    with pytest.raises(refusals.StepInFlight):
        scenario.step("t", 0, replaces_ticket_id="another")
    with pytest.raises(refusals.BadField, match="nothing is left"):
        scenario.step("t", 0, replaces_ticket_id=lost.ticket_id, resumed_tokens=64)
    with pytest.raises(refusals.BadField, match="only a step that replaces"):
        scenario.step("t", 0, resumed_tokens=3)
    again = scenario.step("t", 0, replaces_ticket_id=lost.ticket_id, resumed_tokens=3)
    assert (again.turn, again.attempt, again.resumed_tokens) == (0, 1, 3)
    assert again.ticket_id != lost.ticket_id


def test_a_lost_stream_is_resumed_at_another_engine_and_the_old_step_is_stopped(
    scenario: Scenario,
) -> None:
    """The sidecar may be dead before its lease runs out: the client's word counts until the next
    renewal.

    Result: the trajectory moves, the revision moves by one, and new trajectories avoid the engine
    until it renews.
    """
    scenario.open("t")
    lost = scenario.step("t", 0)
    again = scenario.step("t", 0, replaces_ticket_id=lost.ticket_id)
    assert (lost.engine_id, again.engine_id, again.revision) == ("e0", "e1", lost.revision + 1)
    assert one(scenario.heard, act.AbortStep).ticket_id == lost.ticket_id
    for number in range(4):
        assert scenario.open(f"new-{number}").engine_id == "e1"
    scenario.renew("e0")
    assert scenario.open("later").engine_id == "e0"


def test_an_engine_that_refuses_a_step_is_not_suspected(scenario: Scenario) -> None:
    scenario.open("t")
    refused = scenario.step("t", 0)
    again = scenario.step("t", 0, replaces_ticket_id=refused.ticket_id, engine_refused=True)
    assert (again.engine_id, again.attempt, again.revision) == (
        refused.engine_id,
        1,
        refused.revision,
    )
    assert not all_of(scenario.heard, act.AbortStep)
    assert {scenario.open(f"new-{number}").engine_id for number in range(4)} == {"e0", "e1"}


def test_a_lost_stream_on_the_only_engine_is_resumed_there_and_its_account_changes_nothing() -> (
    None
):
    scenario = Scenario(engines=("e0",))
    scenario.open("t")
    lost = scenario.step("t", 0)
    again = scenario.step("t", 0, replaces_ticket_id=lost.ticket_id)
    assert (again.engine_id, again.revision) == ("e0", lost.revision)
    assert scenario.finish(lost, 7) == []
    scenario.finish(again, 20)
    assert scenario.controller.trajectory("t").gen_tokens == 20


def test_the_next_turn_may_be_asked_for_before_the_engine_accounts_for_the_last(
    scenario: Scenario,
) -> None:
    """The client sees the end of a stream sooner than the bus tells the scheduler; no token is lost
    or counted twice."""
    scenario.open("t")
    first = scenario.step("t", 0)
    second = scenario.step("t", 1)
    assert scenario.controller.trajectory("t").gen_tokens == 0
    scenario.finish(first, 11)
    scenario.finish(first, 11)
    record = scenario.controller.trajectory("t")
    assert (record.gen_tokens, record.state, record.next_turn) == (11, TrajectoryState.STEPPING, 1)
    scenario.finish(second, 5)
    record = scenario.controller.trajectory("t")
    assert (record.gen_tokens, record.state, record.next_turn) == (16, TrajectoryState.IDLE, 2)


def test_a_finished_step_whose_end_never_reached_the_client_may_be_asked_for_again(
    scenario: Scenario,
) -> None:
    scenario.open("t")
    ticket = scenario.step("t", 0)
    scenario.finish(ticket, 30)
    again = scenario.step("t", 0, replaces_ticket_id=ticket.ticket_id, resumed_tokens=12)
    record = scenario.controller.trajectory("t")
    assert (again.attempt, record.gen_tokens, record.next_turn) == (1, 0, 0)
    scenario.finish(again, 31)
    assert scenario.controller.trajectory("t").gen_tokens == 31


def test_without_an_engine_a_step_is_refused_and_may_be_asked_for_again() -> None:
    scenario = Scenario()
    scenario.open("t")
    with pytest.raises(refusals.NoEngine):
        scenario.step("t", 0, request_id="r")
    scenario.engine("e0")
    assert scenario.step("t", 0, request_id="r").engine_id == "e0"


def test_a_context_that_no_engine_takes_is_refused() -> None:
    scenario = Scenario(engines=("small",), max_context_tokens=200)
    scenario.open("t")
    with pytest.raises(refusals.ContextTooLong, match="200"):
        scenario.step("t", 0, context_tokens=200)
    scenario.engine("large", max_context_tokens=400)
    assert scenario.step("t", 0, context_tokens=200).engine_id == "large"


def test_cancelling_a_trajectory_stops_its_step_and_lets_its_context_go(scenario: Scenario) -> None:
    scenario.open("t")
    ticket = scenario.step("t", 0)
    actions = scenario.close("t", Outcome.CANCELLED)
    assert one(actions, act.AbortStep).ticket_id == ticket.ticket_id
    assert one(actions, act.ReleasePrefix).address == ticket.engine_address
    assert scenario.controller.trajectory("t").ticket is not None
    assert scenario.controller.trajectory("t").live_ticket is None


def test_the_closing_is_announced_once_all_tokens_are_counted(scenario: Scenario) -> None:
    """Predictors learn from the closing fact: it waits for the last step's account, for a while."""
    scenario.open("t")
    ticket = scenario.step("t", 0)
    assert all_of(scenario.close("t"), act.AnnounceClosed) == []
    announced = one(scenario.finish(ticket, 40), act.AnnounceClosed)
    assert (announced.record.gen_tokens, announced.record.next_turn) == (40, 1)
    assert all_of(scenario.advance(1.0), act.AnnounceClosed) == []
    assert all_of(scenario.advance(scenario.tuning.announce_again_s), act.AnnounceClosed), (
        "never confirmed: once more"
    )
    scenario.send(ev.ClosedAnnounced("t"))
    assert all_of(scenario.advance(scenario.tuning.announce_again_s), act.AnnounceClosed) == []


def test_a_closing_whose_last_account_is_lost_is_announced_all_the_same_and_after_a_restart_again(
    scenario: Scenario,
) -> None:
    scenario.open("t")
    scenario.step("t", 0)
    scenario.close("t")
    assert (
        one(scenario.advance(scenario.tuning.close_settle_s), act.AnnounceClosed).record.gen_tokens
        == 0
    )
    scenario.restart()
    assert one(scenario.advance(0.0), act.AnnounceClosed).record.trajectory_id == "t"


def test_closed_trajectories_stay_readable_and_are_then_forgotten(scenario: Scenario) -> None:
    scenario.open("t")
    scenario.close("t")
    scenario.send(ev.ClosedAnnounced("t"))
    scenario.advance(scenario.tuning.keep_closed_s - 1)
    assert scenario.controller.trajectory("t").state is TrajectoryState.FINISHED
    assert one(scenario.advance(1.0), act.ForgetTrajectory).trajectory_id == "t"
    with pytest.raises(refusals.TrajectoryNotFound):
        scenario.controller.trajectory("t")


def test_a_trajectory_that_nobody_touches_any_more_is_closed_as_failed(scenario: Scenario) -> None:
    scenario.open("t")
    scenario.advance(scenario.tuning.abandon_after_s)
    assert scenario.controller.trajectory("t").state is TrajectoryState.FAILED


def test_opening_and_closing_answer_repeats_and_what_is_closed_or_unknown_takes_no_steps(
    scenario: Scenario,
) -> None:
    first = scenario.open("t", request_id="r")
    assert scenario.open("t", request_id="r") == first
    with pytest.raises(refusals.RequestIdReused):
        scenario.open("t", request_id="r", sample=5)
    with pytest.raises(refusals.TrajectoryExists):
        scenario.open("t", request_id="other")
    close = ev.TrajectoryClosed("c", "t", Outcome.FINISHED, 1.0)
    scenario.send(close)
    assert scenario.send(close) == []
    with pytest.raises(refusals.RequestIdReused):
        scenario.send(ev.TrajectoryClosed("c", "t", Outcome.FAILED, 1.0))
    with pytest.raises(refusals.TrajectoryIsClosed):
        scenario.close("t")
    with pytest.raises(refusals.TrajectoryIsClosed):
        scenario.step("t", 0)
    with pytest.raises(refusals.TrajectoryNotFound):
        scenario.step("unknown", 0)


def test_no_ticket_id_is_the_prefix_of_another() -> None:
    """The engine's abort matches request ids by prefix."""
    ids = {
        ticket_id(t, turn, attempt)
        for t in ("a", "a.1", "b::a")
        for turn in range(12)
        for attempt in range(12)
    }
    assert len(ids) == 3 * 12 * 12
    ordered = sorted(ids)
    assert not [x for x, y in pairwise(ordered) if y.startswith(x)]


def test_a_ticket_belongs_to_the_tenant_of_its_trajectory() -> None:
    for trajectory_id in ("acme::t.1", "acme::t", "t"):
        ticket = ticket_id(trajectory_id, 2, 1)
        assert (owner_of(ticket), trajectory_of(ticket)) == (owner_of(trajectory_id), trajectory_id)
    assert trajectory_of("acme::other") == ""


def test_a_lost_ticket_that_still_finishes_is_counted(scenario: Scenario) -> None:
    """A sidecar cut off from the scheduler, not from its client: the lease ran out, the stream did
    not break."""
    scenario.open("t")
    ticket = scenario.step("t", 0)
    scenario.send(ev.EngineDeregistered("lease-e0", "e0"))
    assert scenario.ticket("t").status is TicketStatus.LOST
    scenario.finish(ticket, 9)
    record = scenario.controller.trajectory("t")
    assert (record.gen_tokens, record.next_turn, record.state) == (9, 1, TrajectoryState.IDLE)
