"""From traces to groups: repeats, single samples, censored trajectories, caps."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.simulated import work
from treadle_core.ranking.evidence import count_totals, posterior
from treadle_sim.workloads.parametric import WITHIN_PROMPT, make
from treadle_sim.workloads.resample import Donors, apply_caps, continue_cut, resample
from treadle_sim.workloads.workload import Step, groups


def test_samples_of_a_prompt_with_repeats_are_its_own_trajectories() -> None:
    works = make("coding", 10, 4).trajectories
    own = {prompt: {each.steps for each in group} for prompt, group in groups(works).items()}
    batch = resample(works, 10, 16, seed=1)
    for prompt, group in groups(batch.trajectories).items():
        assert [each.sample for each in group] == list(range(16))
        assert {each.steps for each in group} <= own[prompt]
        assert len({each.steps for each in group}) > 1


def test_more_prompts_than_there_are_come_again_under_another_name() -> None:
    works = make("coding", 3, 2).trajectories
    names = list(groups(resample(works, 7, 2).trajectories))
    assert len(set(names)) == 7
    assert Counter(name.partition("~")[0] for name in names).most_common()[0][1] == 3
    assert {name for name in names if "~" not in name} == set(groups(works))


def test_the_same_seed_gives_the_same_batch_and_another_epoch_the_same_prompts() -> None:
    works = make("coding", 30, 4).trajectories
    batch = resample(works, 10, seed=4)
    assert resample(works, 10, seed=4) == batch
    later = resample(works, 10, seed=4, epoch=1)
    assert later != batch
    assert list(groups(later.trajectories)) == list(groups(batch.trajectories))


def test_single_samples_spread_within_the_prompt_by_the_stated_share_and_not_beyond() -> None:
    singles = make("coding", 3_000, 1, seed=2).trajectories
    batch = resample(singles, 1_000, 8)
    logs = np.array(
        [
            [np.log(each.gen_tokens) for each in group]
            for group in groups(batch.trajectories).values()
        ]
    )
    spread = np.log([each.gen_tokens for each in singles]).var()
    assert logs.var() == pytest.approx(spread, rel=0.1)
    assert logs.var(axis=1, ddof=1).mean() / logs.var() == pytest.approx(WITHIN_PROMPT, abs=0.05)
    steps = np.log([len(each.steps) for each in batch.trajectories])
    assert np.corrcoef(logs.ravel(), steps)[0, 1] > 0.5


def test_a_cut_trajectory_goes_on_as_one_that_went_further_of_its_prompt_if_there_is_one() -> None:
    cut = work("p", 0, 30, 20, censored=True)
    own = [cut, work("p", 1, 10), work("p", 2, 45, 25, 5)]
    steps, censored = continue_cut(
        cut, Donors(own), Donors([*own, work("q", 0, 900)]), np.random.default_rng(0)
    )
    # 50 of the other's 75 tokens lie behind it
    assert [step.gen_tokens for step in steps] == [30, 20, 20, 5]
    assert not censored
    # none of its prompt went further, another prompt's did
    other = Donors([cut, work("q", 0, 900)])
    steps, censored = continue_cut(
        cut, Donors([cut, work("p", 1, 10)]), other, np.random.default_rng(0)
    )
    assert [step.gen_tokens for step in steps] == [30, 20, 850]
    assert not censored


def test_a_cut_trajectory_that_went_furthest_stays_a_lower_bound() -> None:
    works = [work("p", 0, 50, censored=True), work("p", 1, 10)]
    batch = resample(works, 1, 64)
    assert {(each.gen_tokens, each.censored) for each in batch.trajectories} == {
        (50, True),
        (10, False),
    }


LIVES = st.lists(st.tuples(st.integers(1, 12), st.booleans()), min_size=1, max_size=7)


@given(LIVES)
def test_going_on_gives_kaplan_and_meiers_curve(lives: list[tuple[int, bool]]) -> None:
    """Drawing evenly among the longer ones, exactly: the chance of each final length, by
    recursion."""
    chances: Counter[int] = Counter()

    def spread(tokens: int, cut: bool, chance: float) -> None:
        longer = [each for each in lives if each[0] > tokens] if cut else []
        if not longer:
            chances[tokens] += chance  # type: ignore[assignment]
        for each in longer:
            spread(*each, chance / len(longer))

    for each in lives:
        spread(*each, 1.0 / len(lives))
    knots = np.arange(13.0)
    nothing = np.zeros(len(knots))  # no base curve: Kaplan-Meier
    seen = count_totals([t for t, cut in lives if not cut], [t for t, cut in lives if cut])
    last = max(t for t, _ in lives)
    curve = posterior(knots, nothing, 1e-12, seen)
    for knot in range(last):
        assert sum(c for tokens, c in chances.items() if tokens > knot) == pytest.approx(
            curve[knot], abs=1e-6
        )
    works = [work("p", at, tokens, censored=cut) for at, (tokens, cut) in enumerate(lives)]
    drawn = {
        sum(
            s.gen_tokens
            for s in continue_cut(each, Donors(works), Donors(works), np.random.default_rng(at))[0]
        )
        for at, each in enumerate(works)
    }
    assert drawn <= set(chances)


@given(
    st.lists(
        st.tuples(st.integers(1, 50), st.integers(0, 50)).map(lambda pair: Step(*pair, 0.0)),
        min_size=1,
        max_size=6,
    ).map(tuple),
    st.integers(1, 60),
    st.integers(0, 200),
    st.integers(0, 400),
)
def test_caps_hold_and_cut_only_what_exceeds_them(
    steps: tuple[Step, ...], prompt_tokens: int, max_gen: int, max_context: int
) -> None:
    kept, cut = apply_caps(steps, prompt_tokens, max_gen, max_context)
    gen = sum(step.gen_tokens for step in kept)
    assert kept and all(step.gen_tokens >= 1 for step in kept)
    assert cut == (gen < sum(step.gen_tokens for step in steps))
    if not cut:
        assert kept == steps
    if max_gen:
        assert gen <= max_gen
    context = prompt_tokens + gen + sum(step.obs_tokens for step in kept[:-1])
    if max_context and len(kept) > 1:
        assert context <= max_context
    assert all(one == other for one, other in zip(kept[:-1], steps, strict=False))


def test_what_is_cut_by_a_cap_is_marked() -> None:
    batch = resample(make("math", 20, 4).trajectories, 20, 4, max_gen_tokens=3_000)
    assert batch.max_total_tokens == 3_000
    assert any(each.censored for each in batch.trajectories)
    assert all(each.censored == (each.gen_tokens == 3_000) for each in batch.trajectories)


def test_nothing_to_draw_from_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one trajectory"):
        resample([], 1)
    with pytest.raises(ValueError, match="prompts must be >= 1"):
        resample([work("p", 0, 5)], 0)
    with pytest.raises(ValueError, match="samples must be >= 1"):
        resample([work("p", 0, 5)], 1, 0)
