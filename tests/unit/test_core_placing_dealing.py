"""Dealing gives each unit to the engine that then ends first, though it does not look at all."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from support.placements import draw_work, ends_s, path_rows
from treadle_core.compiled import Flags, Floats, Indexes
from treadle_core.placing import paths
from treadle_core.placing.dealing import deal
from treadle_core.placing.paths import Work


def deal_slowly(
    engines: Floats, work: Work, placement: Indexes, order: Indexes, allowed: Flags
) -> Indexes:
    """Deal one by one, each to the engine that ends first with it of all that are allowed."""
    result = placement.copy()
    result[order] = -1
    for index in order:
        end_of: dict[int, float] = {}
        for at in np.flatnonzero(allowed & (engines[:, paths.KV_TOKENS] >= work.contexts[index])):
            tried = result.copy()
            tried[index] = at
            end_of[int(at)] = float(ends_s(engines, work, tried)[at, 0])
        result[index] = min(end_of, key=lambda at: end_of[at]) if end_of else placement[index]
    return result


@given(
    st.integers(0, 10_000),
    st.integers(1, 25),
    st.sampled_from([(4,), (4, 4, 4), (1, 8, 64), (2, 2, 8, 8)]),
    st.integers(0, 3),
)
def test_it_ends_about_as_soon_as_looking_at_every_engine_for_each(
    seed: int, n: int, slots: tuple[int, ...], shut: int
) -> None:
    engines, work = path_rows(*slots), draw_work(seed, n)
    rng = np.random.default_rng(seed)
    placement = rng.integers(0, len(slots), n)
    free = np.flatnonzero(~work.started)
    order = free[np.argsort(-work.amounts[0][free, paths.TOKENS], kind="stable")]
    allowed = np.arange(len(slots)) != (shut if len(slots) > shut + 1 else -1)
    found = deal(engines, paths.number_kinds(slots), work, placement, order, np.arange(n), allowed)
    slowly = deal_slowly(engines, work, placement, order, allowed)
    assert (found[work.started] == placement[work.started]).all()
    assert allowed[found[order]].all()
    ratio = ends_s(engines, work, found).max() / ends_s(engines, work, slowly).max()
    assert ratio <= 1.25


def test_units_stay_together_and_what_fits_no_engine_stays() -> None:
    engines, zero = path_rows(4, 4, 4, kv_tokens=1_000), np.zeros(7)
    contexts = np.array([100.0] * 6 + [1_001.0])
    work = paths.work_of(zero + 50.0, contexts, zero, zero, zero > 0, zero > 0, np.arange(7) // 2)
    placement = np.array([0, 0, 0, 0, 0, 0, 2])
    kinds, allowed = np.zeros(3, np.int64), np.array([False, True, True])
    found = deal(engines, kinds, work, placement, np.arange(7), np.arange(7) // 2, allowed)
    assert found[6] == 2
    assert found[0] == found[1] and found[2] == found[3] and found[4] == found[5]
    assert set(found[:6].tolist()) == {1, 2}
