"""The controller where something dies: the states that docs/faults.md lists, and no other test
reaches."""

from typing import Any

import pytest
from support.control import Scenario, all_of, answer, one
from treadle_core import actions as act
from treadle_core import events as ev
from treadle_core.model import KvTransfer, Policy, TicketStatus, TrajectoryState
from treadle_core.refusals import NoEngine
from treadle_core.tuning import Tuning

RESERVE = Policy(reserve=True)
SPEC: dict[str, Any] = {"slots": 4, "kv_transfer": KvTransfer.STORAGE}
NAMES = ["t0", "t1", "t2", "t3"]


def in_tool_calls(state: str, job_lease_s: float = 1e9) -> tuple[Scenario, act.StartMigration]:
    """Four trajectories of job j in tool calls on e0, one of which moves to e1; its next step waits
    for the move.

    state: of the move: `asked`, `accepted` or `switched`, where nothing waits any more.
    """
    tuning = Tuning(
        plan_every_events=1, plan_interval_s=0.0, lease_ttl_s=1e9, job_lease_s=job_lease_s
    )
    scenario = Scenario(RESERVE, tuning, engines=["e0"], **SPEC)
    scenario.send(ev.JobOpened("open-j", "j"))
    for name in NAMES:
        scenario.open(name, job_id="j", tokens=2_000.0)
        scenario.ask(name)
    scenario.advance(1.0)
    for name in NAMES:
        scenario.finish(scenario.ticket(name))
        scenario.send(ev.ToolStarted(name, 10.0))
    scenario.engine("e1", **SPEC)
    plan = answer(scenario.plans[-1], {"e0": NAMES[:2], "e1": NAMES[2:]})
    move = all_of(scenario.send(plan), act.StartMigration)[0]
    if state != "asked":
        scenario.send(ev.MoveAccepted(move.trajectory_id, move.move_id, "m"))
    if state == "switched":
        scenario.send(ev.SwitchRequested("s", move.trajectory_id, move.expected_revision, "e1"))
    else:
        assert one(scenario.ask(move.trajectory_id, 1), act.KeepWaiting)
    return scenario, move


def leave(scenario: Scenario, engine_id: str) -> list[act.Action]:
    """The engine is removed; what waits is looked at with the next tick."""
    return [
        *scenario.send(ev.EngineDeregistered(f"lease-{engine_id}", engine_id)),
        *scenario.send(ev.Tick()),
    ]


def test_a_trajectory_in_a_tool_call_goes_on_elsewhere_when_its_engine_dies() -> None:
    """Nothing is lost and nothing is replaced: the next turn alone runs at the other engine."""
    scenario = Scenario(engines=["e0", "e1"])
    scenario.open("t")
    done = scenario.step("t", 0)
    scenario.finish(done)
    leave(scenario, done.engine_id)
    following = scenario.step("t", 1)
    assert following.engine_id != done.engine_id
    assert (following.revision, following.replaces_ticket_id) == (done.revision + 1, "")


def test_a_first_step_that_waits_starts_elsewhere_when_its_engine_dies() -> None:
    """Its client does not ask again."""
    scenario = Scenario(RESERVE, engines=["e0"], slots=1)
    for name in ("runs", "waits"):
        scenario.open(name, tokens=100.0)
    scenario.step("runs", 0)
    assert one(scenario.ask("waits"), act.KeepWaiting)
    scenario.engine("e1", slots=1)
    assert one(leave(scenario, "e0"), act.IssueTicket).ticket.engine_id == "e1"


@pytest.mark.parametrize("silent_s", [0.0, 30.0])
def test_a_first_step_that_waits_starts_when_its_only_engine_is_back(silent_s: float) -> None:
    """The sidecar restarts before or after its lease has run out, and no plan comes. Its client
    does not ask again."""
    scenario = Scenario(RESERVE, engines=["e0"], slots=1)
    for name in ("runs", "waits"):
        scenario.open(name, tokens=100.0)
    scenario.step("runs", 0)
    assert one(scenario.ask("waits"), act.KeepWaiting)
    if silent_s:
        scenario.advance(silent_s)
    assert one(scenario.engine("e0", slots=1), act.IssueTicket).ticket.trajectory_id == "waits"


@pytest.mark.parametrize("state", ["asked", "accepted"])
@pytest.mark.parametrize(("dies", "lives"), [("e0", "e1"), ("e1", "e0")])
def test_a_step_that_waits_for_a_move_starts_where_the_other_engine_lives(
    state: str, dies: str, lives: str
) -> None:
    scenario, _ = in_tool_calls(state)
    actions = leave(scenario, dies)
    assert one(actions, act.IssueTicket).ticket.engine_id == lives
    assert [cancel.migration_id for cancel in all_of(actions, act.CancelMigration)] == ["m"] * (
        state == "accepted"
    )


@pytest.mark.parametrize("state", ["asked", "accepted"])
def test_a_step_that_waited_for_a_move_waits_again_after_a_restart_and_starts_with_its_end(
    state: str,
) -> None:
    scenario, move = in_tool_calls(state)
    scenario.restart()
    assert one(scenario.ask(move.trajectory_id, 1), act.KeepWaiting)
    ended = scenario.send(ev.MoveEnded(move.trajectory_id, "m", move.move_id, reason="INTERRUPTED"))
    assert one(ended, act.IssueTicket).ticket.engine_id == "e0"


def test_a_move_that_the_migrator_never_accepts_holds_a_step_no_longer_than_it_saves_and_is_cancelled_late() -> (
    None
):
    scenario, move = in_tool_calls("asked")
    under_way = scenario.controller.trajectory(move.trajectory_id).move
    assert under_way is not None
    actions = scenario.advance(under_way.give_up_s - scenario.now)
    assert one(actions, act.IssueTicket).ticket.engine_id == "e0"
    late = scenario.send(ev.MoveAccepted(move.trajectory_id, move.move_id, "late"))
    assert one(late, act.CancelMigration).migration_id == "late"


@pytest.mark.parametrize("state", ["asked", "accepted", "switched"])
def test_a_client_that_dies_in_a_move_leaves_no_move_and_no_step(state: str) -> None:
    scenario, move = in_tool_calls(state, job_lease_s=1.5)
    closed = scenario.advance(1.5)  # the move is still worth waiting for
    assert not all_of(closed, act.IssueTicket)
    assert bool(all_of(closed, act.CancelMigration)) is (state != "asked")
    assert scenario.controller.trajectory(move.trajectory_id).move is None
    late = scenario.send(ev.MoveAccepted(move.trajectory_id, move.move_id, "late"))
    assert one(late, act.CancelMigration).migration_id == "late"
    assert scenario.send(ev.MoveEnded(move.trajectory_id, "m", move.move_id)) == []


def test_a_restart_places_trajectories_of_an_engine_whose_removal_alone_was_stored() -> None:
    scenario = Scenario(engines=["e0", "e1"])
    scenario.open("t")
    lost = scenario.step("t", 0)
    del scenario.engines[lost.engine_id]
    scenario.restart()
    assert scenario.ticket("t").status is TicketStatus.LOST
    assert scenario.step("t", 0, replaces_ticket_id=lost.ticket_id).engine_id != lost.engine_id


def test_an_engine_that_dies_while_it_loads_gives_its_trajectories_to_one_that_has_loaded() -> None:
    scenario = Scenario(engines=["e0", "e1"])
    scenario.open("t")
    done = scenario.step("t", 0)
    scenario.finish(done)
    scenario.send(ev.WeightsSet("v1", "/m/v1"))
    other = "e1" if done.engine_id == "e0" else "e0"
    scenario.send(ev.WeightsUpdated(other, "v1"))
    with pytest.raises(NoEngine, match="desired weights"):
        scenario.ask("t", 1)
    leave(scenario, done.engine_id)
    assert scenario.step("t", 1).engine_id == other


@pytest.mark.parametrize("dies", ["engine", "scheduler"])
def test_an_engine_that_could_not_load_is_asked_again_at_once_after_a_restart(dies: str) -> None:
    scenario = Scenario(engines=["e0"])
    scenario.send(ev.WeightsSet("v1", "/m/v1"))
    scenario.send(ev.LoadFailed("e0", "v1", refused=True, message="no such file"))
    heard = len(scenario.heard)
    if dies == "engine":
        scenario.engine("e0")
    else:
        scenario.restart()
    assert one(scenario.heard[heard:], act.LoadWeights).engine_id == "e0"
    engine = scenario.controller.engine("e0")
    assert engine is not None
    assert (engine.behind, engine.load_error) == (True, "")


def test_a_step_that_runs_where_a_load_fails_ends_there_and_the_next_turn_runs_elsewhere() -> None:
    scenario = Scenario(engines=["e0", "e1"])
    scenario.open("t")
    running = scenario.step("t", 0)
    scenario.send(ev.WeightsSet("v1", "/m/v1"))
    other = "e1" if running.engine_id == "e0" else "e0"
    scenario.send(ev.WeightsUpdated(other, "v1"))
    scenario.send(ev.LoadFailed(running.engine_id, "v1", refused=True, message="no such file"))
    assert scenario.ticket("t") == running
    scenario.finish(running)
    assert scenario.step("t", 1).engine_id == other


def test_a_forgotten_trajectory_whose_removal_was_not_stored_is_forgotten_again_after_a_restart() -> (
    None
):
    scenario = Scenario(engines=["e0"])
    scenario.open("t")
    scenario.close("t")
    scenario.send(ev.ClosedAnnounced("t"))
    stored = dict(scenario.trajectories)
    assert one(scenario.advance(scenario.tuning.keep_closed_s), act.ForgetTrajectory)
    scenario.trajectories = stored
    scenario.restart()
    assert one(scenario.send(ev.Tick()), act.ForgetTrajectory).trajectory_id == "t"


def test_without_a_predictor_a_first_step_waits_for_no_longer_than_a_tick() -> None:
    scenario = Scenario(RESERVE, engines=["e0"])
    scenario.open("t")
    assert one(scenario.ask("t"), act.KeepWaiting)
    assert one(scenario.advance(0.1), act.IssueTicket).ticket.engine_id == "e0"


@pytest.mark.parametrize("dies", ["client", "scheduler"])
def test_a_trajectory_that_was_opened_without_an_engine_is_closed_with_its_job_and_outlives_a_restart(
    dies: str,
) -> None:
    scenario = Scenario(RESERVE)
    scenario.send(ev.JobOpened("open-j", "j"))
    assert scenario.open("t", job_id="j").engine_id == ""
    if dies == "client":
        scenario.advance(scenario.tuning.job_lease_s)
        assert scenario.controller.trajectory("t").state is TrajectoryState.FAILED
    else:
        scenario.restart()
        scenario.engine("e0")
        assert scenario.step("t", 0).engine_id == "e0"
