"""A search around an arrangement: never worse, never more than there is, never without the head."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.elastic import Choices, curves
from treadle_core.tools.chunks import LEVELS, level_of, take
from treadle_core.tools.search import Queue, best_near, value

NO_CHUNKS = np.zeros(0, np.int64)


def queue_of(choices: list[Choices], free: int, chunks: np.ndarray = NO_CHUNKS) -> Queue:
    """All of them candidates, with one that runs for ten seconds on four units."""
    every = curves(choices)
    return Queue(*every, np.arange(len(choices)), np.array([10.0]), np.array([4]), free, 2, chunks, 0.0)


@given(st.lists(st.floats(1.0, 100.0), min_size=1, max_size=6), st.integers(6, 20))
def test_what_is_found_fits_and_is_no_worse_than_any_start(seconds: list[float], free: int) -> None:
    queue = queue_of([[(m, each * (0.1 + 0.9 / m)) for m in (1, 2, 4, 8)] for each in seconds], free)
    starts = [np.zeros(size, np.int64) for size in range(1, len(seconds) + 1)]
    chosen, found_s = best_near(queue, starts)
    assert 1 <= len(chosen) <= len(seconds)
    assert queue.units[np.arange(len(chosen)), chosen].sum() <= free
    assert found_s == value(queue, chosen, np.inf) <= min(value(queue, start, np.inf) for start in starts)


def test_what_one_gives_up_another_can_have() -> None:
    """Two moves at once, where either alone is none: all units are dealt, to the one that uses them worse."""
    wasteful, useful = [(1, 10.0), (2, 9.9)], [(1, 100.0), (2, 50.0)]
    chosen, found_s = best_near(queue_of([wasteful, useful], free=3), [np.array([1, 0])])
    assert (chosen.tolist(), found_s) == ([0, 1], 60.0)


def test_gpus_are_chunks() -> None:
    """Four single GPUs are no chunk of two."""
    choices: list[Choices] = [[(1, 10.0), (2, 5.0), (4, 2.5)] for _ in range(3)]
    apart, together = np.array([4, 0, 0, 0]), np.array([0, 0, 1, 0])
    assert len(apart) == LEVELS
    assert best_near(queue_of(choices, 4, apart), [np.zeros(3, np.int64)])[0].tolist() == [0, 0, 0]
    chosen, _ = best_near(queue_of(choices, 4, together), [np.zeros(3, np.int64)])
    left = together.copy()
    assert all(take(left, level_of(int(units))) for units in np.array([1, 2, 4])[chosen])
    assert chosen.max() > 0


@pytest.mark.parametrize("size", [1, 2])
def test_of_equals_as_many_start_as_can(size: int) -> None:
    queue = queue_of([[(1, 10.0)], [(1, 10.0)]], free=2)
    starts = [np.zeros(at, np.int64) for at in (2, 1)]
    assert value(queue, starts[size - 1], np.inf) >= 20.0
    assert len(best_near(queue, starts)[0]) == 2
