"""The columns that plans are made from, when a plan is due, and what its answer may look like."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.control import Scenario, all_of
from treadle_core import actions as act
from treadle_core import events as ev
from treadle_core.model import Policy, TrajectoryRecord, copy_with
from treadle_core.planning import read_columns
from treadle_core.ranking.priorities import remaining_tokens
from treadle_core.state import Deadlines
from treadle_core.tables.trajectories import FIRST_ROWS, TrajectoryTable
from treadle_core.tuning import Tuning

EAGER = Tuning(plan_every_events=1, plan_interval_s=0.0)
NAMES = st.integers(0, 3 * FIRST_ROWS)


@given(
    st.lists(st.tuples(NAMES, st.integers(0, 9), st.booleans()), max_size=40),
    st.integers(0, 2 * FIRST_ROWS),
)
def test_the_live_columns_say_what_a_walk_over_the_open_records_would(
    changes: list[tuple[int, int, bool]], opened: int
) -> None:
    """Many open, some change, some leave and make room, some come back."""
    tuning = Tuning()
    table = TrajectoryTable(tuning)
    for number in range(opened):
        table.put(TrajectoryRecord(f"t{number}", "p", Policy(), 0.0, "r", prompt_tokens=1 + number))
    for number, tokens, leaves in changes:
        record = TrajectoryRecord(
            f"t{number}", "p", Policy(), 0.0, "r", context_tokens=tokens, engine_id=f"e{tokens % 3}"
        )
        table.put(record)
        if leaves:
            table.forget(f"t{number}")
    live, columns = read_columns(table.columns), table.columns
    walked = table.open_records()
    assert len(live) == len(columns) == len(walked)
    assert set(columns.ids[live.rows]) == {record.trajectory_id for record in walked}
    by_name = {record.trajectory_id: record for record in walked}
    engines = list(columns.engines)
    for at, name in enumerate(columns.ids[live.rows]):
        record = by_name[name]
        assert live.tokens[at] == remaining_tokens(record, tuning)
        assert live.context_tokens[at] == (record.context_tokens or record.prompt_tokens)
        assert engines[live.engine_number[at]] == record.engine_id
        assert columns.row(name) == live.rows[at]
    for engine_id in ("", "e0", "e1", "e2"):
        there = [record for record in walked if record.engine_id == engine_id]
        assert table.tally(engine_id).trajectories == len(there)
        assert table.tally(engine_id).tokens == pytest.approx(
            sum(remaining_tokens(each, tuning) for each in there)
        )


def test_a_changed_record_is_another_one() -> None:
    record = TrajectoryRecord("t", "p", Policy(), 0.0, "r")
    other = copy_with(record, gen_tokens=5)
    assert (record.gen_tokens, other.gen_tokens) == (0, 5)
    assert other == TrajectoryRecord("t", "p", Policy(), 0.0, "r", gen_tokens=5)
    assert copy_with(other, gen_tokens=0) == record
    with pytest.raises(AttributeError):
        other.gen_tokens = 6  # type: ignore[misc]


def test_what_is_due_comes_once_and_by_its_last_time() -> None:
    deadlines = Deadlines()
    deadlines.set("a", 5.0)
    deadlines.set("b", 3.0)
    deadlines.set("a", 4.0)
    assert deadlines.take_due(2.0) == []
    assert deadlines.take_due(9.0) == ["b", "a"]
    assert deadlines.take_due(9.0) == []


def heaped() -> Scenario:
    """Eight long trajectories on e0, none has run; then e1 comes, and a plan is asked for."""
    scenario = Scenario(None, EAGER, engines=("e0",))
    scenario.open_all({f"t{number}": 2_000.0 for number in range(8)})
    scenario.engine("e1")
    return scenario


def test_an_answer_that_does_not_fit_the_question_is_as_none() -> None:
    """Wrong length, engines that were not in the question: the present placement is rebalanced, as
    without a plan."""
    for indexes in ([0], [7] * 8, [-5] * 8):
        scenario = heaped()
        scenario.send(ev.PlanArrived(scenario.plans[-1].plan_id, np.array(indexes)))
        assert {scenario.step(f"t{number}", 0).engine_id for number in range(8)} == {"e0", "e1"}


def test_a_trajectory_that_left_since_the_question_is_passed_over() -> None:
    scenario = heaped()
    ask = scenario.plans[-1]
    scenario.close("t1")
    for number in range(3 * FIRST_ROWS):  # rows are numbered anew
        scenario.open(f"x{number}")
    scenario.send(ev.PlanArrived(ask.plan_id, np.array([0, 1] * 4)))
    assert {scenario.step(f"t{number}", 0).engine_id for number in (0, 2, 3)} <= {"e0", "e1"}


def test_first_predictions_make_a_plan_due_at_once_and_a_tick_asks_for_what_is_left() -> None:
    """A rollout opens and is predicted in one instant: the plan that counts is the one with all
    predictions."""
    tuning = Tuning(plan_timeout_s=5.0)
    scenario = Scenario(None, tuning, engines=("e0", "e1"))
    for number in range(40):
        scenario.open(f"t{number}")
    asked = scenario.plans
    assert len(asked[-1].work) < 40
    for number in range(40):
        scenario.predict(f"t{number}", 1_000.0 + number)
    assert scenario.plans == asked, "one question at a time"
    scenario.send(ev.Tick())
    last = scenario.plans[-1]
    assert last.work.remaining_tokens.tolist() == [1_000.0 + number for number in range(40)]
    assert scenario.send(ev.PlanArrived(asked[-1].plan_id)) == [], "the older question is void"
    for _ in range(5):
        assert all_of(scenario.send(ev.Tick()), act.AskPlan) == [], "nothing is new"


def test_nobody_is_asked_again_about_what_is_done_before_the_interval_is_over() -> None:
    scenario = Scenario(
        None,
        Tuning(plan_every_events=2, plan_interval_s=10.0, lease_ttl_s=1e6),
        engines=("e0", "e1"),
    )
    scenario.open_all({f"t{number}": 500.0 for number in range(4)})
    scenario.advance(20.0)
    scenario.send(ev.PlanArrived(scenario.plans[-1].plan_id))
    before = len(scenario.plans)
    for number in range(4):
        scenario.finish(scenario.step(f"t{number}", 0))
    assert len(scenario.plans) == before
    scenario.now += 10.0
    scenario.finish(scenario.step("t0", 1))
    assert len(scenario.plans) == before + 1


def test_a_context_is_unread_until_a_step_of_the_trajectory_has_ended() -> None:
    """A ticket is out, but the engine may still be at the prompts before: a plan must count the
    prefill."""
    scenario = Scenario(None, EAGER, engines=("e0", "e1"))
    scenario.open_all({"runs": 500.0, "waits": 500.0, "done": 500.0})
    scenario.finish(scenario.step("done", 0))
    scenario.step("runs", 0)
    scenario.advance(1.0)
    work = scenario.plans[-1].work
    at = {name: index for index, name in enumerate(work.trajectory_ids)}
    assert [bool(work.started[at[name]]) for name in ("waits", "runs", "done")] == [
        False,
        True,
        True,
    ]
    assert [bool(work.read[at[name]]) for name in ("waits", "runs", "done")] == [False, False, True]
