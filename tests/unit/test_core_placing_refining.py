"""A placement is improved step by step: never later, moving only what is free, and mending what
dealing cannot see."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from support.placements import draw_work, path_rows
from treadle_core.compiled import Flags, Floats, Indexes
from treadle_core.placing import paths
from treadle_core.placing.candidates import judge
from treadle_core.placing.paths import Work
from treadle_core.placing.refining import refine


def improve(engines: Floats, work: Work, placement: Indexes, free: Flags) -> Indexes:
    return refine(engines, work, placement, free, paths.reading_order(engines, work))


@given(
    st.integers(0, 10_000),
    st.integers(1, 30),
    st.integers(1, 4),
    st.sampled_from([(4,), (4, 4, 4), (1, 8, 64)]),
)
def test_it_is_never_judged_worse_and_only_what_is_free_moves(
    seed: int, n: int, samples: int, slots: tuple[int, ...]
) -> None:
    work, engines = draw_work(seed, n, samples), path_rows(*slots)
    placement = np.random.default_rng(seed).integers(0, len(slots), n)
    found = improve(engines, work, placement, ~work.started)
    assert (found[work.started] == placement[work.started]).all()
    assert judge(engines, work, found).mean() <= judge(engines, work, placement).mean() * (
        1.0 + 1e-9
    )


def test_the_long_answer_goes_away_from_the_long_prompts() -> None:
    """Four prompts of 40,000 tokens, and a trajectory of 5,000 tokens that was put beside three of
    them."""
    contexts, tokens = np.array([40_000.0] * 4 + [100.0]), np.array([10.0] * 4 + [5_000.0])
    zero, nowhere = np.zeros(5), np.zeros(5, np.bool_)
    work = paths.work_of(tokens, contexts, zero, zero, nowhere, nowhere, np.arange(5))
    engines = path_rows(100, 100)
    placement = np.array([0, 0, 0, 1, 0])
    found = improve(engines, work, placement, ~nowhere)
    assert np.count_nonzero(found[:4] == found[4]) <= 1
    assert (
        paths.makespans_s(engines, work, found)[0]
        < 0.9 * paths.makespans_s(engines, work, placement)[0]
    )


def test_samples_of_a_prompt_move_together() -> None:
    """Moved one by one, each would have its prompt read twice. Result: both prompts stay whole, one
    on each engine."""
    zero, nowhere = np.zeros(8), np.zeros(8, np.bool_)
    prompts = np.repeat(np.arange(2), 4)
    work = paths.work_of(zero + 50.0, zero + 40_000.0, zero, zero, nowhere, nowhere, prompts)
    found = improve(path_rows(100, 100), work, np.zeros(8, np.int64), ~nowhere)
    assert len(set(found[:4].tolist())) == len(set(found[4:].tolist())) == 1
    assert found[0] != found[4]


def test_no_sample_leaves_its_prompt_while_some_wait_for_a_slot() -> None:
    """A later plan may still send it elsewhere. With a slot for each all start now, and half of
    them leave."""
    zero, nowhere = np.zeros(8), np.zeros(8, np.bool_)
    work = paths.work_of(
        zero + 2_000.0, zero + 40_000.0, zero, zero, nowhere, nowhere, np.zeros(8, np.int64)
    )
    alone, waiting = (
        improve(path_rows(slots, slots), work, np.zeros(8, np.int64), ~nowhere) for slots in (8, 2)
    )
    assert 0 < np.count_nonzero(alone) < 8
    assert not waiting.any()
