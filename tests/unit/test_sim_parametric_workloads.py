"""Parametric workloads: reproducible, whole, and as the papers describe theirs."""

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from treadle_sim.workloads.parametric import (
    MAX_CONTEXT_TOKENS,
    MAX_GEN_TOKENS,
    MODELS,
    WITHIN_PROMPT,
    WORKLOADS,
    make,
    split,
)
from treadle_sim.workloads.workload import Workload, groups

NAMES = list(WORKLOADS)


@pytest.fixture(scope="module", params=NAMES)
def workload(request: pytest.FixtureRequest) -> Workload:
    return make(request.param, seed=3)


def test_the_default_is_of_the_papers_size(workload: Workload) -> None:
    by_prompt = groups(workload.trajectories)
    assert len(workload.trajectories) == 6_400
    assert {len(group) for group in by_prompt.values()} == {16}
    assert all([work.sample for work in group] == list(range(16)) for group in by_prompt.values())
    assert workload.max_total_tokens == MAX_GEN_TOKENS == 40_000


def test_every_step_generates_and_no_cap_is_exceeded(workload: Workload) -> None:
    for work in workload.trajectories:
        assert work.steps
        assert all(
            step.gen_tokens >= 1 and step.obs_tokens >= 0 and step.tool_s >= 0
            for step in work.steps
        )
        assert work.gen_tokens <= MAX_GEN_TOKENS
        before_last = sum(step.gen_tokens + step.obs_tokens for step in work.steps[:-1])
        assert work.prompt_tokens + before_last + work.steps[-1].gen_tokens <= MAX_CONTEXT_TOKENS
        assert work.censored or work.gen_tokens < MAX_GEN_TOKENS


def test_lengths_are_as_skewed_as_the_papers(workload: Workload) -> None:
    tokens = np.array([work.gen_tokens for work in workload.trajectories])
    kind = WORKLOADS[workload.name]
    assert tokens.max() > 4 * np.median(tokens)  # Heddle Figure 4
    assert tokens.max() > 15_000
    assert np.median(tokens) == pytest.approx(kind.tokens_median, rel=0.1)
    assert np.log(tokens).std() == pytest.approx(kind.tokens_sigma, rel=0.1)
    assert np.mean([work.censored for work in workload.trajectories]) < 0.005


def test_samples_of_a_prompt_differ_by_the_stated_share(workload: Workload) -> None:
    logs = np.array(
        [
            [math.log(work.gen_tokens) for work in group]
            for group in groups(workload.trajectories).values()
        ]
    )
    share = logs.var(axis=1, ddof=1).mean() / logs.var()
    assert share == pytest.approx(WITHIN_PROMPT, abs=0.06)


def test_longer_trajectories_take_more_steps(workload: Workload) -> None:
    tokens = np.log([work.gen_tokens for work in workload.trajectories])
    steps = np.log([len(work.steps) for work in workload.trajectories])
    assert np.corrcoef(tokens, steps)[0, 1] > 0.5


@pytest.mark.parametrize("llm", MODELS)
@pytest.mark.parametrize("name", NAMES)
def test_tools_take_the_mean_of_table_1_and_are_skewed(name: str, llm: str) -> None:
    seconds = np.array(
        [step.tool_s for work in make(name, llm=llm).trajectories for step in work.steps]
    )
    mean = WORKLOADS[name].tool_mean_s[llm]
    assert seconds.mean() == pytest.approx(mean, rel=0.05)
    assert np.median(seconds) < 0.85 * mean
    assert np.percentile(seconds, 99) > 3 * mean


def test_search_reads_more_than_it_writes_and_math_hardly_reads() -> None:
    def read(name: str) -> float:
        work = make(name, 100).trajectories
        return sum(step.obs_tokens for each in work for step in each.steps) / sum(
            each.gen_tokens for each in work
        )

    assert read("math") < 0.1 < read("coding") < 1.0 < read("search")


def test_the_same_arguments_give_the_same_workload_and_another_epoch_samples_its_prompts_again() -> (
    None
):
    now, later = make("coding", 300, 16, 5), make("coding", 300, 16, 5, epoch=1)
    assert make("coding", 300, 16, 5) == now != make("coding", 300, 16, 6)
    pairs = list(
        zip(groups(now.trajectories).items(), groups(later.trajectories).items(), strict=True)
    )
    assert all(one == other for (one, _), (other, _) in pairs)
    assert all(a[0].prompt_tokens == b[0].prompt_tokens for (_, a), (_, b) in pairs)
    tokens = np.array(
        [[[work.gen_tokens for work in group] for (_, group) in pair] for pair in pairs]
    )
    means = tokens.mean(axis=2)  # of a prompt, now and later
    own = tokens - means[:, :, None]
    assert np.corrcoef(means[:, 0], means[:, 1])[0, 1] > 0.85
    assert abs(np.corrcoef(own[:, 0].ravel(), own[:, 1].ravel())[0, 1]) < 0.1


def test_a_cap_cuts_and_marks_what_it_cut() -> None:
    free, capped = (
        make("math", 50, 8, 1, max_gen_tokens=0),
        make("math", 50, 8, 1, max_gen_tokens=4_000),
    )
    for whole, cut in zip(free.trajectories, capped.trajectories, strict=True):
        assert cut.gen_tokens == min(whole.gen_tokens, 4_000)
        assert cut.censored == (whole.gen_tokens >= 4_000)
    assert free.max_total_tokens == 0


def test_a_context_limit_below_the_prompt_leaves_a_step_of_one_token() -> None:
    for work in make("coding", 4, 2, max_context_tokens=1).trajectories:
        assert [step.gen_tokens for step in work.steps] == [1]
        assert work.censored


@given(
    st.lists(
        st.tuples(st.integers(1, 50_000), st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=40)),
        min_size=1,
        max_size=6,
    )
)
def test_splitting_keeps_every_token_gives_each_step_one_and_follows_the_weights(
    cases: list[tuple[int, list[float]]],
) -> None:
    tokens = np.array([max(total, len(weights)) for total, weights in cases])
    steps = np.array([len(weights) for _, weights in cases])
    parts = split(tokens, steps, np.array([each for _, weights in cases for each in weights]))
    assert parts.min() >= 1
    assert np.add.reduceat(parts, np.cumsum(steps) - steps).tolist() == tokens.tolist()

    weighted = split(np.array([1_003, 7]), np.array([3, 1]), np.array([1.0, 8.0, 1.0, 0.5]))
    assert weighted.tolist() == [101, 801, 101, 7]


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"name": "chess"}, "no workload 'chess', only coding, search, math"),
        ({"llm": "gpt"}, "gpt"),
        ({"prompts": 0}, "prompts must be >= 1"),
        ({"samples": 0}, "samples must be >= 1"),
    ],
)
def test_what_is_unknown_or_empty_is_refused(options: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        make(**{"name": "math", "prompts": 1, **options})
