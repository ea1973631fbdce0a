"""Plans and migrations: what moves, what does not, and who owns a trajectory meanwhile."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from support.control import Scenario, all_of, answer, one
from treadle_core import actions as act
from treadle_core import events as ev
from treadle_core import refusals
from treadle_core.model import Estimate, KvTransfer, PlacementRule, Policy
from treadle_core.tuning import Tuning

# Plans after each change, so that a scenario says itself when one comes.
EAGER = Tuning(plan_every_events=1, plan_interval_s=0.0, move_rest_turns=2)

Groups = dict[str, list[str]]
SPLIT: Groups = {"e0": ["t0", "t1"], "e1": ["t2", "t3"]}


def plan(scenario: Scenario, groups: Groups) -> list[act.Action]:
    """Asks for a plan by letting something happen, and answers it."""
    scenario.now += scenario.tuning.plan_timeout_s  # whatever was asked before is void
    trigger = scenario.open(f"trigger-{scenario.requests}", prompt_id="trigger")
    asked = scenario.plans[-1]
    scenario.close(trigger.trajectory_id)
    return scenario.send(answer(asked, groups))


def moves(scenario: Scenario, groups: Groups = SPLIT) -> list[act.StartMigration]:
    """The moves that a plan starts."""
    return all_of(plan(scenario, groups), act.StartMigration)


def begin(scenario: Scenario, count: int, tokens: float) -> list[str]:
    """Trajectories in tool calls of 10 s, with so many tokens left."""
    names = [f"t{number}" for number in range(count)]
    for name in names:
        scenario.open(name)
        scenario.finish(scenario.step(name, 0))
        scenario.finish(scenario.step(name, 1, tool_s=10.0))
        scenario.predict(name, tokens)
    return names


def unbalanced(tuning: Tuning = EAGER, policy: Policy | None = None, **engine: Any) -> Scenario:
    """Four long trajectories on e0, in tool calls; then e1 comes. Nothing has moved."""
    scenario = Scenario(policy, tuning, engines=("e0",), **engine)
    begin(scenario, 4, 2_000.0)
    scenario.engine("e1", **engine)
    return scenario


def test_trajectories_in_a_tool_call_move_to_an_idle_engine() -> None:
    scenario = unbalanced()
    started = moves(scenario)
    assert started
    for move in started:
        assert (move.source.engine_id, move.target.engine_id, move.expected_revision) == (
            "e0",
            "e1",
            1,
        )
        assert move.give_up_after_s > 0
        assert move.cache_salt == "v0"
    assert moves(unbalanced(), {}), (
        "without a placement service the present placement is still rebalanced"
    )


def test_a_plan_that_is_no_better_than_what_we_have_moves_nothing() -> None:
    """Two small engines in balance: the plan only swaps names, or is worse."""
    scenario = Scenario(None, EAGER, engines=("e0", "e1"), slots=2)
    names = begin(scenario, 8, 500.0)
    there = {name: scenario.controller.trajectory(name).engine_id for name in names}
    swapped: Groups = {
        "e0": [n for n in names if there[n] == "e1"],
        "e1": [n for n in names if there[n] == "e0"],
    }
    lopsided: Groups = {"e0": names[:1], "e1": names[1:]}
    for groups in (swapped, lopsided, {}):
        assert moves(scenario, groups) == []


def test_an_unexpected_plan_is_ignored_and_a_trajectory_whose_step_is_out_moves_after_the_step() -> (
    None
):
    scenario = unbalanced()
    assert scenario.send(ev.PlanArrived(999, np.array([1, 1]))) == []
    tickets = [scenario.step(f"t{number}", 2, tool_s=10.0) for number in range(4)]
    assert moves(scenario) == []
    after = [
        move for ticket in tickets for move in all_of(scenario.finish(ticket), act.StartMigration)
    ]
    assert {move.target.engine_id for move in after} == {"e1"}


def test_a_drain_ends_moves_to_its_engine_and_lets_moves_away_go_on() -> None:
    """Result: moves to the drained engine are cancelled; a move away keeps its trajectory until it
    ends, and where it fails the next step leaves the engine all the same."""
    scenario = unbalanced()
    for move in (started := moves(scenario)):
        scenario.send(ev.MoveAccepted(move.trajectory_id, move.move_id, f"m-{move.trajectory_id}"))
    cancelled = all_of(scenario.send(ev.DrainSet("e1", True)), act.CancelMigration)
    assert {each.trajectory_id for each in cancelled} == {move.trajectory_id for move in started}
    assert scenario.controller.open_on("e1") == 0

    scenario = unbalanced()
    for move in (started := moves(scenario)):
        scenario.send(ev.MoveAccepted(move.trajectory_id, move.move_id, f"m-{move.trajectory_id}"))
    assert not all_of(scenario.send(ev.DrainSet("e0", True)), act.CancelMigration)
    assert scenario.controller.open_on("e0") == len(started)
    first, *others = (move.trajectory_id for move in started)
    scenario.send(ev.SwitchRequested("r", first, 1, "e1"))
    for name in others:
        scenario.send(ev.MoveEnded(name, f"m-{name}", reason="FAILED"))
        assert scenario.step(name, 2).engine_id == "e1"
    assert scenario.controller.open_on("e0") == 0


@pytest.mark.parametrize(
    ("engine", "pays"),
    [({}, False), ({"kv_transfer": KvTransfer.STORAGE, "kv_bytes_per_token": 1_000}, True)],
)
def test_a_move_that_costs_more_than_it_saves_does_not_start_but_by_shared_storage_it_costs_less(
    engine: dict[str, Any], pays: bool
) -> None:
    """A context of a million tokens, for two thousand tokens that are left: to be computed again,
    or to be read."""
    scenario = unbalanced(**engine)
    for number in range(4):
        scenario.finish(scenario.step(f"t{number}", 2, context_tokens=1_000_000, tool_s=10.0))
        scenario.predict(f"t{number}", 2_000.0)
    assert bool(moves(scenario)) is pays


@pytest.mark.parametrize(
    "policy",
    [
        Policy(migrate=False),
        Policy(placement=PlacementRule.PINNED),
        Policy(placement=PlacementRule.LEAST_LOAD),
    ],
)
def test_only_planned_trajectories_that_may_migrate_do(policy: Policy) -> None:
    scenario = unbalanced(policy=policy)
    scenario.now += 100
    scenario.open("t9")
    scenario.advance(1.0)
    assert all_of(scenario.heard, act.StartMigration) == []


def test_a_trajectory_that_has_not_run_yet_moves_for_nothing() -> None:
    scenario = Scenario(None, EAGER, engines=("e0",))
    for number in range(8):
        scenario.open(f"t{number}")
    scenario.engine("e1")
    plan(scenario, {})
    tickets = [scenario.step(f"t{number}", 0) for number in range(8)]
    assert {ticket.engine_id for ticket in tickets} == {"e0", "e1"}
    assert {ticket.revision for ticket in tickets if ticket.engine_id == "e1"} == {2}


def moving() -> tuple[Scenario, act.StartMigration]:
    """A scenario with a move under way, accepted as `m`."""
    scenario = unbalanced()
    move = moves(scenario)[0]
    scenario.send(ev.MoveAccepted(move.trajectory_id, move.move_id, "m"))
    return scenario, move


def test_the_switch_makes_the_target_the_owner_and_the_next_step_runs_there() -> None:
    scenario, move = moving()
    switch = ev.SwitchRequested("s", move.trajectory_id, move.expected_revision, "e1")
    scenario.send(switch)
    scenario.send(switch)  # a repeat
    scenario.send(ev.MoveEnded(move.trajectory_id, "m", moved=True))
    record = scenario.controller.trajectory(move.trajectory_id)
    assert (record.engine_id, record.revision, record.migrations, record.move) == ("e1", 2, 1, None)
    ticket = scenario.step(move.trajectory_id, 2)
    assert (ticket.engine_id, ticket.revision) == ("e1", 2)


def test_a_repeated_switch_gets_its_answer_also_after_the_trajectory_has_gone_on() -> None:
    scenario, move = moving()
    switch = ev.SwitchRequested("s", move.trajectory_id, move.expected_revision, "e1")
    scenario.send(switch)
    scenario.send(ev.EngineDeregistered("lease-e1", "e1"))
    assert scenario.send(switch) == []
    assert scenario.controller.trajectory(move.trajectory_id).revision == 3
    with pytest.raises(refusals.RequestIdReused):
        scenario.send(replace(switch, target_engine_id="e0"))


def test_when_the_tool_comes_back_first_the_source_stays_the_owner() -> None:
    """Result: the step runs at the source at once, the move is called off, a switch that comes late
    is refused."""
    scenario, move = moving()
    actions = scenario.ask(move.trajectory_id, 2)
    assert one(actions, act.IssueTicket).ticket.engine_id == "e0"
    assert one(actions, act.CancelMigration).migration_id == "m"
    with pytest.raises(refusals.StepInFlight):
        scenario.send(ev.SwitchRequested("s", move.trajectory_id, move.expected_revision, "e1"))
    assert scenario.controller.trajectory(move.trajectory_id).engine_id == "e0"


def test_a_move_accepted_too_late_is_called_off() -> None:
    scenario = unbalanced()
    move = moves(scenario)[0]
    scenario.step(move.trajectory_id, 2)
    late = scenario.send(ev.MoveAccepted(move.trajectory_id, move.move_id, "m"))
    assert one(late, act.CancelMigration).migration_id == "m"


def test_a_switch_with_an_old_revision_or_to_nowhere_is_refused() -> None:
    scenario, move = moving()
    name = move.trajectory_id
    for refusal, switch in (
        (refusals.RevisionMismatch, (name, 7, "e1")),
        (refusals.EngineNotFound, (name, 1, "e9")),
        (refusals.BadField, (name, 1, "e0")),  # it is there already
        (refusals.TrajectoryNotFound, ("unknown", 1, "e1")),
    ):
        with pytest.raises(refusal):
            scenario.send(ev.SwitchRequested("s", *switch))
    assert scenario.controller.trajectory(name).revision == 1


def test_one_move_at_a_time_and_a_rest_after_it() -> None:
    scenario, move = moving()
    name = move.trajectory_id
    assert name not in {started.trajectory_id for started in moves(scenario)}
    scenario.send(ev.SwitchRequested("s", name, 1, "e1"))
    scenario.send(ev.MoveEnded(name, "m", moved=True))
    scenario.finish(scenario.step(name, 2, tool_s=10.0))
    for other in (
        "t0",
        "t1",
        "t2",
        "t3",
    ):  # now e0 is the better place for it, but it has only just come
        if other != name and scenario.controller.trajectory(other).engine_id == "e0":
            scenario.close(other)
    assert name not in {started.trajectory_id for started in moves(scenario, {"e0": [name]})}


def test_a_failed_move_leaves_the_trajectory_where_it_is_until_the_next_plan() -> None:
    scenario, move = moving()
    scenario.send(ev.MoveEnded(move.trajectory_id, "m", moved=False, reason="PREFIX_NOT_STORED"))
    record = scenario.controller.trajectory(move.trajectory_id)
    assert (record.engine_id, record.move) == ("e0", None)
    scenario.step(move.trajectory_id, 2)


@pytest.mark.parametrize(("took_s", "again"), [(0.0, True), (0.06, True), (1e5, False)])
def test_moves_between_two_engines_that_were_slow_are_not_tried_again(
    took_s: float, again: bool
) -> None:
    """Result: a move that was given up counts with the time it took; one that never began says
    nothing."""
    scenario = unbalanced(kv_transfer=KvTransfer.STORAGE, kv_bytes_per_token=1_000)
    for move in moves(scenario):
        scenario.send(
            ev.MoveEnded(move.trajectory_id, move_id=move.move_id, reason="GAVE_UP", took_s=took_s)
        )
    assert bool(moves(scenario)) is again


def test_a_move_of_which_nothing_is_heard_is_forgotten() -> None:
    scenario, move = moving()
    for _ in range(30):
        for engine_id in ("e0", "e1"):
            scenario.renew(engine_id)
        scenario.advance(scenario.tuning.move_timeout_s / 30)
    assert scenario.controller.trajectory(move.trajectory_id).move is None
    assert act.CancelMigration(move.trajectory_id, "m") in scenario.heard


def test_a_move_to_an_engine_that_is_lost_is_called_off() -> None:
    scenario, move = moving()
    actions = scenario.send(ev.EngineDeregistered("lease-e1", "e1"))
    assert act.CancelMigration(move.trajectory_id, "m") in actions
    record = scenario.controller.trajectory(move.trajectory_id)
    assert (record.engine_id, record.move, record.revision) == ("e0", None, 1)


def test_no_move_starts_once_the_tool_is_done_and_no_prefix_moves_to_an_engine_with_other_weights() -> (
    None
):
    for events in (
        [ev.ToolFinished(f"t{number}") for number in range(4)],
        [ev.WeightsUpdated("e1", "v1")],
    ):
        scenario = unbalanced()
        for event in events:
            scenario.send(event)
        assert moves(scenario) == []


def test_a_long_tool_call_hides_a_move_that_a_short_one_would_not() -> None:
    """1.2 s of work to be saved against 1.05 s of moving by shared storage."""
    outcomes = []
    for expected_s in (0.1, 30.0):
        scenario = Scenario(None, EAGER)
        storage = {"kv_transfer": KvTransfer.STORAGE, "kv_bytes_per_token": 1_000_000}
        scenario.engine("e0", slots=1, **storage)
        for number in range(2):
            scenario.open(f"t{number}")
            scenario.finish(scenario.step(f"t{number}", 0, context_tokens=990))
            scenario.predict(f"t{number}", 110.0)
        scenario.engine("e1", slots=1, **storage)
        scenario.now += EAGER.plan_timeout_s
        for number in range(2):
            scenario.finish(scenario.step(f"t{number}", 1, context_tokens=990), 1)
            scenario.send(ev.ToolStarted(f"t{number}", expected_s))
        asked = scenario.plans[-1]
        outcomes.append(
            bool(all_of(scenario.send(ev.PlanArrived(asked.plan_id)), act.StartMigration))
        )
    assert outcomes == [False, True]


def test_pinned_trajectories_are_neither_planned_for_nor_switched() -> None:
    scenario = Scenario(None, EAGER, engines=("e0", "e1"))
    for number in range(6):
        scenario.open(f"t{number}", pinned_engine_id="e0")
    assert scenario.plans == []
    with pytest.raises(refusals.TrajectoryPinned):
        scenario.send(ev.SwitchRequested("s", "t0", 1, "e1"))


def test_plans_are_asked_for_every_so_many_events_and_one_at_a_time() -> None:
    tuning = replace(EAGER, plan_every_events=10, plan_interval_s=1.0, plan_timeout_s=5.0)
    scenario = Scenario(None, tuning, engines=("e0", "e1"))
    scenario.now += 1
    scenario.open("a0")
    assert len(scenario.plans) == 1, "of few trajectories each event changes much"
    for number in range(1, 10):
        scenario.open(f"a{number}")
    for number in range(30):
        scenario.open(f"b{number}")
    assert len(scenario.plans) == 1, "the first is not answered yet"
    scenario.now += 5.0
    scenario.predict("a0", 10)
    asked = scenario.plans
    assert len(asked) == 2, "the first will never be answered"
    assert len(asked[-1].work) == 40
    assert set(asked[-1].work.current.tolist()) == {0, 1}


def test_predictions_are_capped_in_what_placement_is_asked() -> None:
    scenario = Scenario(None, EAGER, engines=("e0", "e1"))
    scenario.open("capped", max_total_tokens=64)
    scenario.predict("capped", 1e6, remaining_turns=Estimate(1, 2, 3))
    scenario.now += EAGER.plan_timeout_s
    scenario.open("other")
    asked = scenario.plans[-1]
    capped = asked.work.trajectory_ids.index("capped")
    assert asked.work.remaining_tokens[capped] == asked.work.room_tokens[capped] == 64
