"""The best of the placements that are tried: never later than staying, and what moves KV must be
worth it."""

import itertools

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from support.placements import draw_work, path_rows
from treadle_core.compiled import Indexes
from treadle_core.placing import candidates, paths
from treadle_core.placing.candidates import best_placement, judge
from treadle_core.placing.paths import Work


def placed(work: Work, current: Indexes, *slots: int) -> Indexes:
    medians = work._replace(amounts=work.amounts[:1])
    return best_placement(path_rows(*slots), paths.number_kinds(slots), work, medians, current)


@example(268, 26, (1, 8, 64))  # where samples and medians are read in other orders
@given(st.integers(0, 10_000), st.integers(1, 30), st.sampled_from([(4,), (4, 4, 4), (1, 8, 64)]))
def test_all_have_an_engine_and_none_is_judged_worse_than_where_they_are(
    seed: int, n: int, slots: tuple[int, ...]
) -> None:
    work, engines = draw_work(seed, n, 4), path_rows(*slots)
    current = np.random.default_rng(seed).integers(0, len(slots), n)
    found = placed(work, current, *slots)
    assert ((found >= 0) & (found < len(slots))).all()
    staying_s, found_s = (judge(engines, work, each).mean() for each in (current, found))
    assert found_s <= staying_s
    if (found != current)[work.started].any():
        assert found_s < 0.98 * staying_s, "a move of KV is worth 2%"
    nowhere = placed(work, np.full(n, -1), *slots)
    assert ((nowhere >= 0) & (nowhere < len(slots))).all()


@given(st.integers(0, 10_000), st.integers(1, 6))
def test_a_few_trajectories_end_about_as_soon_as_in_the_best_of_all_placements(
    seed: int, n: int
) -> None:
    nowhere = np.zeros(n, np.bool_)
    work = draw_work(seed, n)._replace(started=nowhere, read=nowhere, prompts=np.arange(n))
    engines = path_rows(2, 2, 2)
    every = (
        paths.makespans_s(engines, work, np.array(each)).mean()
        for each in itertools.product(range(3), repeat=n)
    )
    found_s = paths.makespans_s(engines, work, placed(work, np.full(n, -1), 2, 2, 2)).mean()
    assert found_s <= 1.2 * min(every), "4/3 is what longest-first dealing can lose in theory"


def test_the_longest_is_nearly_alone_and_the_rest_is_spread() -> None:
    n, tokens = 31, np.array([30_000.0, *[1_000.0] * 30])
    zero = np.zeros(n)
    work = paths.work_of(tokens, zero + 100.0, zero, zero, zero > 0, zero > 0, np.arange(n))
    found = placed(work, np.full(n, -1), 100, 100, 100)
    sizes = np.bincount(found, minlength=3)
    assert sizes[found[0]] <= 2
    assert np.ptp(np.delete(sizes, found[0])) <= 1


def test_long_tools_are_a_long_path_though_they_take_no_engines_time() -> None:
    """One trajectory of few tokens and much tool time, thirty of many tokens: nothing is gained by
    keeping it apart."""
    n = 31
    tokens, tool_s, zero = (
        np.array([200.0, *[3_000.0] * 30]),
        np.array([25.0, *[0.0] * 30]),
        np.zeros(31),
    )
    work = paths.work_of(tokens, zero + 100.0, zero, tool_s, zero > 0, zero > 0, np.arange(n))
    sizes = np.bincount(placed(work, np.full(n, -1), 100, 100, 100), minlength=3)
    assert sizes.min() >= 10


def test_samples_of_a_long_prompt_come_together() -> None:
    """Twelve samples of four prompts that take longer to prefill than to answer."""
    zero = np.zeros(12)
    work = paths.work_of(
        zero + 50.0, zero + 40_000.0, zero, zero, zero > 0, zero > 0, np.repeat(np.arange(4), 3)
    )
    found = placed(work, np.full(12, -1), 100, 100)
    for prompt in range(4):
        assert len(set(found[3 * prompt : 3 * prompt + 3].tolist())) == 1


def test_a_context_goes_where_it_fits() -> None:
    engines = path_rows(4, 4)
    engines[1, paths.KV_TOKENS] = 900.0
    zero = np.zeros(6)
    contexts = np.array([1_000.0, 1_000.0, 500.0, 500.0, 500.0, 500.0])
    work = paths.work_of(zero + 100.0, contexts, zero, zero, zero > 0, zero > 0, np.arange(6))
    found = best_placement(engines, np.array([0, 1]), work, work, np.full(6, -1))
    assert found[:2].tolist() == [0, 0]
    assert 1 in found


@pytest.mark.parametrize(("kinds", "kept"), [([0, 0], [0, 0, 1, 1]), ([0, 1], [1, 1, 0, 0])])
def test_groups_of_equal_engines_alone_keep_the_names_that_leave_most_context_where_it_is(
    kinds: list[int], kept: list[int]
) -> None:
    present, swapped = np.array([0, 0, 1, 1]), np.array([1, 1, 0, 0])
    found = candidates.relabel(
        swapped, present, np.full(4, 100.0), np.ones(4, np.bool_), np.array(kinds)
    )
    assert found.tolist() == kept
