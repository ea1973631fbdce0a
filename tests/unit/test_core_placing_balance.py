"""Judging placements: a plan is never followed to somewhere worse, and a rebalance helps or leaves alone."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.control import CURVE, Scenario, answer
from treadle_core.compiled import Flags, Floats, Indexes
from treadle_core.model import DecodeCurve, EngineSpec, Estimate
from treadle_core.placing import balance
from treadle_core.placing.balance import EngineRows
from treadle_core.tuning import Tuning

MARGIN = 0.1
LENGTHS = st.lists(st.floats(1.0, 30_000.0), min_size=1, max_size=14)
PLACES = st.integers(0, 2**32 - 1)


def engines(*slots: int) -> EngineRows:
    """An engine for each number of slots."""
    return balance.engine_rows(
        [EngineSpec(f"e{i}", f"e{i}:1", slot_limit=limit, decode_curve=CURVE) for i, limit in enumerate(slots)]
    )


def works(lengths: list[float], tool_s: float = 0.0) -> Floats:
    count = len(lengths)
    return balance.work_rows(np.array(lengths), np.full(count, 100.0), np.full(count, tool_s))


def anywhere(seed: int, count: int, engine_count: int) -> Indexes:
    return np.random.default_rng(seed).integers(0, engine_count, count)


def all_may(count: int) -> Flags:
    return np.ones(count, np.bool_)


@given(LENGTHS, st.integers(2, 4), st.integers(1, 4), PLACES)
def test_a_rebalance_never_makes_the_last_engine_later(lengths: list[float], count: int, slots: int, seed: int) -> None:
    rows, jobs = engines(*[slots] * count).rows, works(lengths)
    present = anywhere(seed, len(lengths), count)
    before = balance.finish_times(rows, jobs, present)
    after = balance.finish_times(rows, jobs, balance.rebalance(rows, jobs, present, MARGIN, all_may(len(lengths))))
    assert after.max() <= before.max() * (1 + 1e-9)
    # Nor, where that one is bound, any engine after it.
    assert tuple(np.sort(after)[::-1]) <= tuple(np.sort(before)[::-1] * (1 + 1e-9))


@given(LENGTHS)
def test_what_may_not_move_stays(lengths: list[float]) -> None:
    rows, jobs = engines(1, 1).rows, works(lengths)
    movable = np.arange(len(lengths)) % 2 == 0
    result = balance.rebalance(rows, jobs, np.zeros(len(lengths), np.int64), MARGIN, movable)
    assert (result[~movable] == 0).all()


def test_a_heap_on_one_engine_is_spread() -> None:
    rows, jobs = engines(2, 2, 2, 2).rows, works([1_000.0] * 16)
    result = balance.rebalance(rows, jobs, np.zeros(16, np.int64), MARGIN, all_may(16))
    assert np.bincount(result, minlength=4).tolist() == [4, 4, 4, 4]


def test_one_trajectory_that_sets_the_bound_does_not_hide_the_imbalance_of_the_rest() -> None:
    """Degenerate minimax (reference point 5): the giant cannot be relieved; the other engines still are."""
    rows, jobs = engines(1, 1, 1).rows, works([1e6, *[1_000.0] * 6])
    present = np.array([0, *[1] * 6])
    result = balance.rebalance(rows, jobs, present, MARGIN, all_may(7))
    assert result[0] == 0
    assert np.bincount(result, minlength=3).tolist() == [1, 3, 3]


@pytest.mark.parametrize(("slots", "kept"), [((2, 2), [0, 0, 1, 1]), ((2, 8), [1, 1, 0, 0])])
def test_groups_of_equal_engines_alone_keep_the_names_that_leave_most_context_where_it_is(
    slots: tuple[int, int], kept: list[int]
) -> None:
    present, swapped = np.array([0, 0, 1, 1]), np.array([1, 1, 0, 0])
    found = balance.relabel(swapped, present, np.full(4, 100.0), all_may(4), engines(*slots).kinds)
    assert found.tolist() == kept


def test_an_engine_is_never_done_before_its_longest_trajectory_alone() -> None:
    rows = engines(4, 4).rows
    times = balance.finish_times(rows, works([10.0], tool_s=99.0), np.array([0]))
    assert times.tolist() == [pytest.approx(99.0 + 10 * CURVE.base_s), 0.0]


def test_an_engine_whose_kv_is_short_takes_longer_than_its_slots_would() -> None:
    """Four contexts of 1,000 tokens where the KV of two fits: two at a time."""
    curve = DecodeCurve(base_s=0.01, per_sequence_s=0.0, per_kv_token_s=0.0)
    jobs = balance.work_rows(np.full(4, 100.0), np.full(4, 950.0), np.zeros(4))
    times = [
        balance.finish_times(
            balance.engine_rows([EngineSpec("e", "e:1", slot_limit=4, kv_tokens_capacity=kv, decode_curve=curve)]).rows,
            jobs,
            np.zeros(4, np.int64),
        )[0]
        for kv in (0, 4_000, 2_000)
    ]
    assert times == pytest.approx([1.0, 1.0, 2.0])


@given(
    st.lists(st.tuples(st.floats(1.0, 9_000.0), st.floats(0.0, 60.0)), min_size=2, max_size=9),
    PLACES,
    st.lists(st.booleans(), min_size=9, max_size=9),
)
def test_the_move_that_is_chosen_is_the_best_of_all(
    jobs: list[tuple[float, float]], seed: int, may: list[bool]
) -> None:
    """Against trying each: one move from the engine that finishes last to the one that finishes first."""
    curves = [CURVE, DecodeCurve(base_s=0.02, per_sequence_s=0.0005, per_kv_token_s=1e-7)]
    rows = balance.engine_rows(
        [EngineSpec(f"e{i}", "e:1", slot_limit=2, decode_curve=c) for i, c in enumerate(curves)]
    ).rows
    count = len(jobs)
    work = balance.work_rows(np.array([j[0] for j in jobs]), np.full(count, 50.0), np.array([j[1] for j in jobs]))
    present, movable = anywhere(seed, count, 2), np.array(may[:count])
    before = balance.finish_times(rows, work, present)
    source, target = (0, 1) if before[0] > before[1] else (1, 0)
    tried = []
    for index in range(count):
        if present[index] == source and movable[index]:
            moved = present.copy()
            moved[index] = target
            tried.append(balance.finish_times(rows, work, moved).max())
    moving = balance.rebalance(rows, work, present, 0.0, movable)
    after = balance.finish_times(rows, work, moving).max()
    if tried and min(tried) < before.max() * (1 - 1e-9):
        assert after <= min(tried) * (1 + 1e-9)
    else:
        assert after == pytest.approx(before.max())


@given(st.lists(st.floats(50.0, 20_000.0), min_size=2, max_size=16), st.integers(1, 4), PLACES)
def test_following_plans_on_two_small_engines_is_never_worse_than_staying(
    lengths: list[float], slots: int, seed: int
) -> None:
    """Any plan, however bad: where the trajectories then run finishes no later, by the core's own cost, than where they
    were."""
    scenario = Scenario(None, Tuning(plan_every_events=1, plan_interval_s=0.0), engines=("e0", "e1"), slots=slots)
    names = [f"t{i:02}" for i in range(len(lengths))]
    for name, tokens in zip(names, lengths, strict=True):
        scenario.open(name)
        scenario.predict(name, tokens, remaining_tokens=Estimate(tokens, tokens, tokens))
    rows, jobs = engines(slots, slots).rows, works(lengths)
    present = np.array([int(scenario.controller.trajectory(name).engine_id[1:]) for name in names])
    scenario.now += scenario.tuning.plan_timeout_s  # whatever was asked before is void
    scenario.open("late")
    scenario.close("late")
    asked = scenario.plans[-1]
    groups: dict[str, list[str]] = {"e0": [], "e1": []}
    for name, place in zip(names, anywhere(seed, len(names), 2), strict=True):
        groups[f"e{place}"].append(name)
    scenario.send(answer(asked, groups))
    after = np.array([int(scenario.step(name, 0).engine_id[1:]) for name in names])  # a move is free: none has run yet
    assert balance.finish_times(rows, jobs, after).max() <= balance.finish_times(rows, jobs, present).max() * (1 + 1e-6)
