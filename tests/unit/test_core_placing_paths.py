"""When engines end a placement: the larger of their work and of a path, whose tools the others'
work goes on beside."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.placements import draw_work, ends_s, path_rows
from treadle_core.compiled import Floats, Indexes
from treadle_core.placing import paths
from treadle_core.placing.paths import Work

SECONDS = st.floats(0.0, 500.0)


def end_by_hand(
    engines: Floats, at_engine: int, work: Work, members: Indexes, sample: int = 0
) -> float:
    """The docstring of `paths`, with the quadratic solved by numpy."""
    a, b, k, slots, kv_tokens, p, h = engines[at_engine]
    d, q, o, r, s = work.amounts[sample][members].T
    w = b * d + k * q + p * o + h * r

    def prompt_s(index: int) -> float:
        return float(p * work.contexts[index] + h * work.contexts[index] ** 2 / 2)

    there = {work.prompts[index] for index in members if work.read[index]}
    waits_s, prompts_s = dict.fromkeys(members.tolist(), 0.0), 0.0
    for index in paths.reading_order(engines, work).tolist():
        if index in waits_s and not work.read[index]:
            prompts_s += 0.0 if work.prompts[index] in there else prompt_s(index)
            there.add(work.prompts[index])
            waits_s[index] = prompts_s
    ends = (
        [a * max(d.sum() / slots, q.sum() / kv_tokens) + w.sum() + prompts_s]
        if len(members)
        else [0.0]
    )
    for at, index in enumerate(members):
        waits = waits_s[int(index)]
        own, others = a * d[at] + w[at], w.sum() - w[at] + prompts_s - waits
        x = max(np.roots([1.0, s[at] - own - others, -own * s[at]]).real)
        ends.append(s[at] + x + waits)
    return float(max(ends))


@given(st.integers(0, 10_000), st.integers(1, 20), st.integers(1, 3))
def test_an_engine_ends_with_its_work_or_its_longest_path_in_each_sample(
    seed: int, n: int, samples: int
) -> None:
    engines, work = path_rows(1, 4, 100), draw_work(seed, n, samples)
    placement = np.random.default_rng(seed).integers(-1, 3, n)
    times = ends_s(engines, work, placement)
    for at, sample in itertools.product(range(3), range(samples)):
        by_hand = end_by_hand(engines, at, work, np.flatnonzero(placement == at), sample)
        assert times[at, sample] == pytest.approx(by_hand, rel=1e-6)
    assert paths.makespans_s(engines, work, placement).tolist() == times.max(axis=0).tolist()


@given(st.floats(0.1, 100.0), SECONDS, SECONDS)
def test_a_path_waits_for_others_less_the_longer_its_tools_take(
    own_s: float, tool_s: float, others_s: float
) -> None:
    path_s = paths.path_s(own_s, tool_s, others_s)
    assert path_s >= own_s + tool_s - 1e-6
    assert path_s <= own_s + tool_s + others_s + 1e-6
    assert paths.path_s(own_s, 0.0, others_s) == pytest.approx(own_s + others_s)
    assert paths.path_s(own_s, 1e7, others_s) == pytest.approx(own_s + 1e7, abs=1e-2)
    assert paths.path_s(own_s, tool_s, others_s + 1.0) >= path_s


def test_a_prompt_is_prefilled_once_for_all_its_samples_and_not_where_one_is_read() -> None:
    engines, nothing = path_rows(100, 100), np.zeros(4)
    contexts = np.full(4, 8_000.0)

    def end_s(read: list[bool], prompts: list[int], placement: list[int]) -> Floats:
        started = np.ones(4, np.bool_)  # which changes nothing: a step may wait for its prefill
        work = paths.work_of(
            nothing, contexts, nothing, nothing, started, np.array(read), np.array(prompts)
        )
        return ends_s(engines, work, np.array(placement))[:, 0]

    once_s = 8_000 / 5_000 + 1e-9 * 8_000**2 / 2
    assert end_s([False] * 4, [0] * 4, [0] * 4) == pytest.approx([once_s, 0.0])
    assert end_s([False] * 4, [0, 0, 1, 1], [0] * 4) == pytest.approx([2 * once_s, 0.0])
    assert end_s([False] * 4, [0] * 4, [0, 0, 1, 1]) == pytest.approx([once_s, once_s])
    assert end_s([True, False, False, False], [0] * 4, [0, 0, 0, 1]) == pytest.approx([0.0, once_s])


def test_a_placement_where_a_context_does_not_fit_never_ends() -> None:
    one = np.ones(1)
    work = paths.work_of(one, 60_001.0 * one, one, one, one > 0, one > 0, np.zeros(1, np.int64))
    assert ends_s(path_rows(1), work, np.zeros(1, np.int64)).tolist() == [[math.inf]]
    unknown = path_rows(1, kv_tokens=0)
    assert np.isfinite(paths.makespans_s(unknown, work, np.zeros(1, np.int64))).all()


@given(st.integers(0, 10_000), st.integers(2, 12))
def test_what_a_move_saves_is_the_difference_of_the_ends_of_its_two_engines(
    seed: int, n: int
) -> None:
    everywhere = np.ones(n, np.bool_)
    engines, work = (
        path_rows(2, 8, 3),
        draw_work(seed, n)._replace(started=everywhere, read=everywhere),
    )
    placement = np.random.default_rng(seed).integers(0, 3, n)
    moving, targets = np.arange(n), (placement + 1 + seed % 2) % 3
    saved = paths.savings_s(engines, work, placement, moving, targets)
    for index, target in enumerate(targets):
        pair, after = [placement[index], target], placement.copy()
        after[index] = target
        before_s = ends_s(engines, work, placement)[pair].max()
        assert saved[index] == pytest.approx(
            before_s - ends_s(engines, work, after)[pair].max(), abs=1e-6
        )


@given(st.integers(0, 10_000), st.integers(1, 5))
def test_no_placement_ends_before_the_bound(seed: int, n: int) -> None:
    engines, work = path_rows(1, 4, 100), draw_work(seed, n)
    bound_s = paths.least_s(engines, np.arange(3), work)
    for placement in itertools.product(range(3), repeat=n):
        assert paths.makespans_s(engines, work, np.array(placement))[0] >= bound_s * (1.0 - 1e-9)


def test_a_gain_that_chance_alone_makes_of_a_few_samples_is_none() -> None:
    before_s = np.array([100.0, 110.0, 90.0, 100.0])
    noise_s = np.array([20.0, -10.0, 15.0, -9.0])
    assert not paths.is_better(before_s - noise_s, before_s, 0.02), (
        "4% on average, 14 of standard deviation"
    )
    assert not paths.is_better(before_s - noise_s, before_s, 0.0)
    assert paths.is_better(before_s - 4.0, before_s, 0.02)
    assert not paths.is_better(before_s - 1.0, before_s, 0.02)
    never = np.full(4, np.inf)
    assert paths.is_better(before_s, never, 0.02)
    assert not paths.is_better(never, before_s, 0.02)
    assert not paths.is_better(never, never, 0.0)


def test_the_same_rows_are_sampled_alike_and_never_beyond_the_cap() -> None:
    n = 500
    rng = np.random.default_rng(1)
    tokens, sigmas, room = rng.lognormal(6.0, 1.0, n), rng.uniform(0.1, 1.0, n), np.full(n, 2_000.0)
    factors = paths.sample_factors(np.arange(n), sigmas, tokens, room)
    some = np.arange(0, n, 7)
    again = paths.sample_factors(some, sigmas[some], tokens[some], room[some])
    assert again[: len(factors)].tolist() == factors[:, some][: len(again)].tolist()
    assert (factors * tokens <= np.maximum(room, tokens * 0) + 1e-6).all()
    free = paths.sample_factors(
        np.arange(n), np.full(n, 0.5 / paths.RECOURSE), np.ones(n), np.full(n, np.inf)
    )
    assert np.log(free).std() == pytest.approx(0.5, rel=0.03)
    assert np.median(free) == pytest.approx(1.0, rel=0.03)
    certain = paths.sample_factors(
        np.arange(3), np.zeros(3), np.full(3, 100.0), np.array([50.0, 100.0, np.inf])
    )
    assert (certain <= [0.5, 1.0, np.inf]).all()
    assert np.log(certain[:, 2]).std() == pytest.approx(paths.LEAST_SIGMA, rel=0.2), (
        "the cost model errs too"
    )
