"""DPArrange for each operator against the trial of every allocation, and against the paper's
listing."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.elastic import (
    Choices,
    arrange_as_listed,
    chunks_exist,
    curves,
    least_chunked_s,
    least_flat_s,
    total_s,
)
from treadle_core.tools.action import Amdahl
from treadle_core.tools.arrangement import (
    LEVELS,
    Arrangement,
    chunk_table,
    flat_table,
    free_chunks,
    is_convex,
    marginal_gains,
)
from treadle_core.tools.pools import CpuNodes, GpuNodes

REL = 1e-9
seconds = st.one_of(st.sampled_from([0.0, 1.0, 2.0]), st.floats(0.0, 1_000.0))


@st.composite
def choices(draw: st.DrawFn, units: st.SearchStrategy[int]) -> Choices:
    allowed = sorted(draw(st.sets(units, min_size=1, max_size=4)))
    return [(unit, draw(seconds)) for unit in allowed]


@st.composite
def convex_choices(draw: st.DrawFn) -> Choices:
    least, count = draw(st.integers(1, 3)), draw(st.integers(1, 5))
    # From a nanosecond: parts of the smallest floats are rounded to multiples of them, which no
    # curve of Amdahl's is.
    single_s = draw(st.one_of(st.just(0.0), st.floats(1e-9, 1_000.0)))
    curve = Amdahl(draw(st.floats(0.0, 1.0)))
    return [(m, single_s / (m * curve.efficiency(m))) for m in range(least, least + count)]


any_choices = choices(st.integers(1, 9))
gpu_choices = choices(st.integers(1, 8))
gpu_nodes = st.lists(st.frozensets(st.integers(0, 7)), min_size=1, max_size=2)


def least_units(candidates: list[Choices]) -> int:
    return sum(each[0][0] for each in candidates)


def hold(found: Arrangement, candidates: list[Choices], prefix: int, best_s: float) -> list[int]:
    """The units of a prefix, which takes the least seconds there are."""
    picks = found(prefix).tolist()
    assert total_s(candidates[:prefix], picks) == pytest.approx(best_s, rel=REL)
    return [each[pick][0] for each, pick in zip(candidates[:prefix], picks, strict=True)]


@given(st.lists(any_choices, min_size=1, max_size=5), st.integers(0, 20))
def test_every_prefix_of_a_flat_pool_is_arranged_as_well_as_by_trying_all(
    candidates: list[Choices], more: int
) -> None:
    free = least_units(candidates) + more
    table = flat_table(curves(candidates), free)
    for prefix in range(len(candidates) + 1):
        best_s = least_flat_s(candidates[:prefix], free)
        assert sum(hold(table, candidates, prefix, best_s)) <= free
        assert arrange_as_listed(candidates[:prefix], free) == pytest.approx(best_s, rel=REL)


@given(st.lists(convex_choices(), min_size=1, max_size=5), st.integers(0, 20))
def test_marginal_gains_are_exact_where_durations_are_convex(
    candidates: list[Choices], more: int
) -> None:
    free = least_units(candidates) + more
    assert is_convex(*curves(candidates))
    gains = marginal_gains(curves(candidates), free)
    for prefix in range(len(candidates) + 1):
        assert sum(hold(gains, candidates, prefix, least_flat_s(candidates[:prefix], free))) <= free


@given(
    st.lists(st.one_of(any_choices, convex_choices()), min_size=1, max_size=4), st.integers(0, 12)
)
def test_cores_of_a_node_are_arranged_exactly_whatever_the_curves(
    candidates: list[Choices], more: int
) -> None:
    free, taken = least_units(candidates) + more, np.array([3, 2])
    pool = CpuNodes(("small", "large"), [(4, 0), (200, 0)], [(4, 0), (free + 5, 0)])
    share = pool.share(1, 0, taken)
    assert share.free == free
    hold(
        share.arrange(curves(candidates)),
        candidates,
        len(candidates),
        least_flat_s(candidates, free),
    )


@given(st.lists(gpu_choices, min_size=1, max_size=4), gpu_nodes)
def test_every_prefix_on_gpu_chunks_is_arranged_as_well_as_by_trying_all(
    candidates: list[Choices], free: list[frozenset[int]]
) -> None:
    share = GpuNodes({f"n{index}": gpus for index, gpus in enumerate(free)}).share(
        0, 0, np.empty(0, np.int64)
    )
    table = share.arrange(curves(candidates))
    assert share.free == sum(map(len, free))
    for prefix in range(len(candidates) + 1):
        best_s = least_chunked_s(candidates[:prefix], free)
        if np.isfinite(best_s):
            assert chunks_exist(hold(table, candidates, prefix, best_s), free)


@given(st.lists(st.integers(1, 8), min_size=1, max_size=6), gpu_nodes)
def test_gpus_are_assigned_as_long_as_any_placement_has_room(
    asked: list[int], free: list[frozenset[int]]
) -> None:
    nodes = GpuNodes({f"n{index}": gpus for index, gpus in enumerate(free)})
    assigned = nodes.assign(np.array(asked).reshape(-1, 1), np.full(len(asked), -1))
    most = max(count for count in range(len(asked) + 1) if chunks_exist(asked[:count], free))
    assert assigned.tolist() == [0] * most + [-1] * (len(asked) - most)
    given_out = [chunk for chunk in nodes.chunks(np.array(asked[:most])) if chunk is not None]
    used = [
        (chunk.node_id, gpu)
        for chunk in given_out
        for gpu in range(chunk.first, chunk.first + chunk.size)
    ]
    assert len(used) == len(set(used))
    assert all(gpu in free[int(node[1:])] for node, gpu in used)
    assert all(
        chunk.size >= units > chunk.size // 2
        for chunk, units in zip(given_out, asked, strict=False)
    )
    assert all(chunk.first % chunk.size == 0 for chunk in given_out)


def test_free_buddies_are_one_chunk_and_others_are_not() -> None:
    assert [chunk[1:] for chunk in free_chunks("n", {2, 3, 4, 5})] == [(2, 2), (4, 2)]
    assert [chunk[1:] for chunk in free_chunks("n", set(range(8)))] == [(0, 8)]
    assert [chunk[1:] for chunk in free_chunks("n", {0, 3, 4, 5, 6, 7})] == [(0, 1), (3, 1), (4, 4)]


def test_one_gpu_can_be_had_of_a_free_node_where_the_listing_of_algorithm_4_finds_none() -> None:
    counts = np.array([0, 0, 0, 1])
    assert len(counts) == LEVELS
    assert chunk_table(curves([[(1, 5.0)]]), counts)(1).tolist() == [0]


def test_units_that_save_nothing_stay_free() -> None:
    level = [(1, 4.0), (2, 4.0), (3, 4.0)]
    for pool in (flat_table(curves([level, level]), 6), marginal_gains(curves([level, level]), 6)):
        assert pool(2).tolist() == [0, 0]


@pytest.mark.parametrize(
    ("one", "convex"),
    [
        ([(1, 8.0), (2, 4.0), (4, 2.0)], False),
        ([(1, 8.0), (2, 4.0), (3, 8.0 / 3.0)], True),
        ([(1, 8.0), (2, 7.0), (3, 2.0)], False),
    ],
)
def test_a_set_of_units_is_left_to_the_table_and_a_convex_range_to_the_gains(
    one: Choices, convex: bool
) -> None:
    assert is_convex(*curves([one])) is convex
