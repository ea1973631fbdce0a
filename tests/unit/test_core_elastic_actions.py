"""What an action may say of itself, the queue that keeps it as columns, and the orders it is read
in."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from support.elastic import elastic
from treadle_core.tools.action import (
    Action,
    Amdahl,
    Demand,
    Fixed,
    InvalidActionError,
    Measured,
    Range,
    UnitSet,
    check_action,
    seconds_at,
)
from treadle_core.tools.decision import ActionQueue

CAPACITIES = {"cpu_cores": 64, "memory_bytes": 1 << 30}
# As a caller without types may have them.
NO_NUMBER: Any = math.nan
NOT_WHOLE: Any = 1.5
GOOD = elastic(0, Range(1, 8), 10.0, Amdahl(0.1))


def test_durations_follow_equation_1() -> None:
    assert seconds_at(elastic(0, Range(1, 8), 12.0, Amdahl(0.0)), 4) == 3.0
    assert seconds_at(elastic(0, Range(1, 8), 12.0, Amdahl(1.0)), 4) == 12.0
    measured = Measured(((1, 1.0), (4, 0.5)))
    assert [measured.efficiency(units) for units in (1, 2, 4, 8)] == pytest.approx(
        [1.0, 5.0 / 6.0, 0.5, 0.5]
    )
    assert seconds_at(elastic(0, Range(1, 8), 12.0, measured), 4) == 6.0


def bad(**changes: Any) -> Action:
    return replace(GOOD, **changes)


@pytest.mark.parametrize(
    ("action", "field"),
    [
        (bad(cost={}), "cost"),
        (bad(cost={"cpu_cores": UnitSet(())}), "cost[cpu_cores].units"),
        (bad(cost={"cpu_cores": UnitSet((1, 4, 2))}), "cost[cpu_cores].units"),
        (bad(cost={"cpu_cores": UnitSet((1, -4))}), "cost[cpu_cores].units[1]"),
        (bad(cost={"cpu_cores": UnitSet(tuple(range(1, 2_000)))}), "cost[cpu_cores].units"),
        (bad(cost={"cpu_cores": Range(-1, 2)}), "cost[cpu_cores].least"),
        (bad(cost={"cpu_cores": Range(3, 2)}), "cost[cpu_cores].most"),
        (bad(cost={"cpu_cores": Range(0, 2)}), "cost[cpu_cores].least"),
        (bad(cost={**GOOD.cost, "memory_bytes": Fixed(0)}), "cost[memory_bytes].units"),
        (bad(cost={"cpu_cores": Range(1, 1 << 40)}), "cost[cpu_cores]"),
        (bad(cost={"gpus": Fixed(1)}), "cost[gpus]"),  # no pool has it
        (bad(cost={"cpu_cores": Fixed(NO_NUMBER)}), "cost[cpu_cores].units"),
        (bad(cost={"cpu_cores": Fixed(NOT_WHOLE)}), "cost[cpu_cores].units"),
        (bad(single_unit_s=math.nan), "single_unit_s"),
        (bad(single_unit_s=-1.0), "single_unit_s"),
        (bad(single_unit_s=math.inf), "single_unit_s"),
        (bad(key="memory_bytes"), "key"),
        (bad(key=None), "key"),
        (bad(elasticity=Measured(((1, 1.0), (8, 0.0)))), "elasticity"),
        (bad(elasticity=Measured(((1, math.nan),))), "elasticity"),
        (bad(elasticity=Amdahl(-0.5)), "elasticity"),
        (bad(elasticity=Measured(())), "elasticity.points"),
        (bad(elasticity=Measured(((2, 1.0), (1, 1.0)))), "elasticity.points"),
    ],
)
def test_a_bad_figure_is_refused_by_its_name(action: Action, field: str) -> None:
    with pytest.raises(InvalidActionError) as refused:
        check_action(action, CAPACITIES)
    assert refused.value.field == field


@pytest.mark.parametrize("demand", [Fixed(9), Range(9, 20), UnitSet((9, 10))])
def test_what_asks_for_more_than_there_is_at_least_never_fits(demand: Demand) -> None:
    with pytest.raises(
        InvalidActionError, match=r"cost\[cpu_cores\].*at least 9 asked for, 8 in all"
    ):
        check_action(bad(cost={"cpu_cores": demand}), {"cpu_cores": 8})
    check_action(bad(cost={"cpu_cores": Range(8, 20)}), {"cpu_cores": 8})


def test_rows_stay_with_their_actions_as_others_come_and_go() -> None:
    waiting = ActionQueue(CAPACITIES)
    actions = [
        elastic(index, Range(1, 1 + index % 40), 1.0 + index, Amdahl(0.1)) for index in range(200)
    ]
    for action in actions:
        waiting.add(action)
    for action in actions[::3]:
        assert waiting.remove(action.action_id) is action
    left = [action for index, action in enumerate(actions) if index % 3]
    rows = waiting.rows_by_arrival()
    assert [waiting.actions[row] for row in rows] == left
    assert waiting.least[rows].tolist() == [[1, -1]] * len(left)
    curves = waiting.curves(rows, 1.0)
    assert curves.counts.tolist() == [1 + action.arrival % 40 for action in left]
    assert curves.seconds[:, 0].tolist() == [action.single_unit_s for action in left]
    with pytest.raises(KeyError):
        waiting.remove("a0")


def test_what_cannot_be_scaled_has_one_choice_and_what_is_unknown_lasts_as_is_typical() -> None:
    waiting = ActionQueue(CAPACITIES)
    waiting.add(replace(GOOD, single_unit_s=None))
    waiting.add(replace(GOOD, action_id="rigid", elasticity=None))
    waiting.add(
        replace(GOOD, action_id="plain", key=None, elasticity=None, cost={"memory_bytes": Fixed(7)})
    )
    curves = waiting.curves(np.arange(3), 42.0)
    assert curves.counts.tolist() == [1, 1, 1]
    assert curves.units[:, 0].tolist() == [1, 1, 7]
    assert curves.seconds[:, 0].tolist() == [42.0, 10.0, 10.0]


def test_choices_that_are_no_faster_than_fewer_units_are_left_out() -> None:
    waiting = ActionQueue(CAPACITIES)
    waiting.add(
        elastic(0, UnitSet((1, 2, 4, 8)), 8.0, Measured(((1, 1.0), (2, 0.5), (4, 0.5), (8, 0.2))))
    )
    curves = waiting.curves(np.arange(1), 1.0)
    assert curves.units[0, : curves.counts[0]].tolist() == [1, 4]
    assert curves.seconds[0, : curves.counts[0]].tolist() == [8.0, 4.0]
