"""Dealing those that have not begun over the engines that are not bound by their longest."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from treadle_core.compiled import Indexes
from treadle_core.placing import balance
from treadle_core.planning import snapshot

ENGINES = np.tile(np.array([0.01, 0.001, 0.0, 100.0, np.inf]), (3, 1))


def dealt(lengths: list[float], placement: list[int], free: list[bool], slack: float = 2.0) -> Indexes:
    nothing = np.zeros(len(lengths))
    rows, at = balance.work_rows(np.array(lengths), nothing, nothing), np.array(placement, np.int64)
    makespan_s = float(balance.finish_times(ENGINES, rows, at).max())
    order = np.argsort(-np.array(lengths), kind="stable")
    order = order[np.array(free)[order]]
    return snapshot.deal(
        ENGINES, rows, at, np.array(free), order, snapshot.find_pool(ENGINES, rows, at, makespan_s, slack)
    )


def test_the_engine_of_the_longest_is_left_alone_and_the_rest_is_spread() -> None:
    lengths = [10_000.0, *[1_000.0] * 10]
    result = dealt(lengths, [0] + [1] * 10, [True] * 11)

    assert result[0] == 0
    assert sorted(np.bincount(result[1:], minlength=3).tolist()) == [0, 5, 5]


def test_those_that_have_begun_stay() -> None:
    result = dealt([10_000.0, *[1_000.0] * 6], [0] + [1] * 6, [False, *[False] * 4, True, True])

    assert result.tolist() == [0, 1, 1, 1, 1, 2, 2]


def test_with_fewer_than_two_engines_in_the_pool_nothing_changes() -> None:
    placement = [0, 1, 2, 2]
    assert dealt([9_000.0, 9_000.0, 100.0, 100.0], placement, [True] * 4).tolist() == placement


@given(st.lists(st.floats(1.0, 10_000.0), min_size=1, max_size=30), st.integers(0, 100))
def test_nobody_is_lost_and_nobody_who_has_begun_moves(lengths: list[float], seed: int) -> None:
    rng = np.random.default_rng(seed)
    placement = rng.integers(-1, 3, len(lengths)).tolist()
    free = rng.random(len(lengths)) < 0.5
    result = dealt(lengths, placement, free.tolist())

    before = np.array(placement)
    assert ((result >= 0) == (before >= 0)).all()
    assert (result[~free] == before[~free]).all()
