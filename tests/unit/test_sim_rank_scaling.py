"""Heddle's rule of re-planning: ranks are exact, sizes scale, and nothing but one move at a time
holds a move back."""

from dataclasses import replace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from support.control import Scenario, all_of, one
from treadle_core import actions as act
from treadle_core import events as ev
from treadle_core.model import CostModel, Policy
from treadle_core.tuning import Tuning
from treadle_sim.systems import Ranks, RankScaling, ScaledGroups

HEDDLE = Policy()
LENGTHS = st.lists(st.tuples(st.integers(0, 7), st.floats(0, 100) | st.none()), max_size=60)


@given(LENGTHS)
def test_a_rank_is_the_place_in_the_sorted_order(changes: list[tuple[int, float | None]]) -> None:
    """Against sorting: longest first, equal ones in the order of their coming; None leaves."""
    ranks, lengths = Ranks(), dict[str, float]()
    for number, length in changes:
        name = f"t{number}"
        if length is None:
            ranks.drop(name)
            lengths.pop(name, None)
        else:
            ranks.put(name, length)
            lengths[name] = length
        # stable, as a dictionary keeps the coming
        in_order = sorted(lengths, key=lambda name: -lengths[name])
        assert [ranks.rank(name) for name in in_order] == list(range(len(ranks)))
    assert ranks.rank("nobody") == -1


@given(st.lists(st.integers(0, 9), min_size=1, max_size=6), st.integers(1, 60))
def test_sizes_scale_to_those_that_are_left(sizes: list[int], active: int) -> None:
    """Against the formula: worker i ends at S_i n* / n; all ranks have a worker, in the plan's
    order."""
    scaled = ScaledGroups([f"e{index}" for index in range(len(sizes))], sizes)
    n = sum(sizes)
    engines = [scaled.engine(rank, active) for rank in range(active)]
    if n == 0:
        assert set(engines) == {""}
        return
    ends = np.cumsum(sizes) * active
    for rank, engine in enumerate(engines):
        assert engine == f"e{next(index for index, end in enumerate(ends) if rank * n < end)}"


def test_a_rank_that_is_not_there_has_no_engine() -> None:
    scaled = ScaledGroups(["e0"], [3])
    assert [scaled.engine(rank, 3) for rank in (-1, 3)] == ["", ""]


def planned(
    policy: Policy = HEDDLE, tuning: Tuning | None = None, slots: int = 8
) -> tuple[Scenario, list[str]]:
    """Eight trajectories of 800, 700, ... tokens on two engines, planned 2 and 6; each is in a tool
    call."""
    scenario = Scenario(policy, tuning, engines=("e0", "e1"), planner=RankScaling, slots=slots)
    names = [f"t{number}" for number in range(8)]
    scenario.open_all({name: 800.0 - 100.0 * number for number, name in enumerate(names)})
    scenario.now += scenario.tuning.plan_timeout_s
    scenario.engine("e1", slots=slots)  # void whatever was asked before
    asked = scenario.plans[-1]
    assert asked.work.trajectory_ids == tuple(names)
    scenario.send(ev.PlanArrived(asked.plan_id, np.array([0, 0, 1, 1, 1, 1, 1, 1])))
    for name in names:
        scenario.finish(scenario.step(name, 0, context_tokens=50_000))
    return scenario, names


def test_the_plan_is_made_by_group_sizes_and_followed_as_it_is() -> None:
    scenario, names = planned()
    assert scenario.plans[-1].cost_model is CostModel.GROUP_SIZE
    assert [scenario.controller.trajectory(name).engine_id for name in names] == ["e0"] * 2 + [
        "e1"
    ] * 6


def test_a_new_rank_moves_a_trajectory_whatever_the_move_costs() -> None:
    """The prefix takes 5 s to compute again and 10 more tokens are not worth it: the rule asks for
    none of that."""
    scenario, _ = planned()
    assert all_of(scenario.predict("t7", 550.0), act.StartMigration) == [], (
        "its rank stays in its group"
    )
    (move,) = all_of(scenario.predict("t7", 750.0), act.StartMigration)
    assert (move.source.engine_id, move.target.engine_id) == ("e1", "e0")
    assert scenario.predict("t7", 760.0) and not all_of(
        scenario.predict("t7", 740.0), act.StartMigration
    ), "one move"


def test_a_step_waits_for_a_move_by_rank_little_longer_than_the_move_is_expected_to_take() -> None:
    """The migrator is gone, and nobody knows what the move saves. It may take longer while the tool
    hides it."""
    scenario, _ = planned(replace(HEDDLE, reserve=True), Tuning(lease_ttl_s=1e6), slots=16)
    (move,) = all_of(scenario.predict("t7", 750.0), act.StartMigration)
    assert move.give_up_after_s == scenario.tuning.move_timeout_s
    assert one(scenario.ask("t7", 1), act.KeepWaiting)
    assert not all_of(scenario.advance(6.0), act.IssueTicket), (
        "the prefix takes 5 s to compute again"
    )
    assert one(scenario.advance(2.0), act.IssueTicket).ticket.engine_id == "e1"


def test_the_groups_shrink_with_those_that_are_left() -> None:
    """Four of eight are left: the first engine has one rank instead of two."""
    scenario, names = planned()
    for name in names[4:]:
        scenario.close(name)
    (move,) = all_of(scenario.predict("t1", 690.0), act.StartMigration)
    assert (move.trajectory_id, move.target.engine_id) == ("t1", "e1")


def test_steps_and_closings_do_not_make_a_new_plan_due_but_new_trajectories_do() -> None:
    scenario, names = planned(tuning=Tuning(lease_ttl_s=1e6))
    count = len(scenario.plans)
    for name in names:
        scenario.now += 5.0
        scenario.finish(scenario.step(name, 1))
        scenario.advance(0.0)
    assert len(scenario.plans) == count
    for number in range(8):
        scenario.open(f"new{number}")
    assert len(scenario.plans) == count + 1


def test_without_leave_to_migrate_or_without_the_planned_engines_a_rank_changes_nothing() -> None:
    forbidden, _ = planned(replace(HEDDLE, migrate=False))
    bereft, _ = planned()
    bereft.send(ev.EngineDeregistered("lease-e0", "e0"))
    for scenario in (forbidden, bereft):
        assert all_of(scenario.predict("t7", 750.0), act.StartMigration) == []
