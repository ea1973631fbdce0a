"""Predictors of the simulator: what each knows, and that it says no more than it may."""

from dataclasses import replace

import numpy as np
import pytest
from support.simulated import work
from treadle_core.model import Estimate
from treadle_core.tuning import Tuning
from treadle_sim.predictors import (
    DECAY,
    FRESH_SIGMA,
    NAMES,
    SHARED,
    SIGMA0,
    Answer,
    Blind,
    Noisy,
    Oracle,
    PromptMean,
    Siblings,
    make_predictor,
    measure_accuracy,
)
from treadle_sim.workloads.parametric import make
from treadle_sim.workloads.workload import Workload

CODING = make("coding", 100, 16, seed=1)
BEFORE = make("coding", 100, 16, seed=1, epoch=1).trajectories


SMALL = Workload("small", (work("p", 0, 100, 200), work("p", 1, 50), work("q", 0, 900)), 1_000)


@pytest.mark.parametrize("name", NAMES)
def test_answers_lie_between_nothing_and_what_the_cap_leaves(name: str) -> None:
    workload = make("math", 6, 8, seed=2, max_gen_tokens=6_000)
    predictor = make_predictor(name, workload, 3, make("math", 6, 8, seed=2, epoch=1).trajectories)
    for index, each in enumerate(workload.trajectories):
        done = 0
        for turn, step in enumerate(each.steps):
            left = predictor.predict(index, turn, done)
            assert left.tokens.p90 <= 6_000 - done
            assert (left.turns is None) == (left.tool_s is None) == (left.observed_tokens is None)
            done += step.gen_tokens
        predictor.finish(index)


def test_the_oracle_knows_what_is_left() -> None:
    oracle = Oracle(SMALL)
    steps = SMALL.trajectories[0].steps
    tools_s, observed = sum(step.tool_s for step in steps), steps[0].obs_tokens
    for turn, sampled, left in (
        (0, 0, (300.0, 2.0, tools_s, observed)),
        (1, 100, (200.0, 1.0, steps[1].tool_s, 0)),
    ):
        assert oracle.predict(0, turn, sampled) == tuple(
            Estimate(each, each, each) for each in left
        )
    assert oracle.predict(0, 1, 130)[0].p50 == 170.0  # in the middle of a step


@pytest.mark.parametrize("asked", range(3))
def test_noise_answers_the_same_question_the_same_whenever_it_is_asked(asked: int) -> None:
    one, other = Noisy(SMALL, 5), Noisy(SMALL, 5)
    other.predict((asked + 1) % 3, 0, 0)
    other.finish((asked + 1) % 3)
    assert one.predict(asked, 0, 0) == other.predict(asked, 0, 0)


def spread_out(prompts: int, samples: int, turns: int, sigma: float = 1.0) -> Workload:
    """Trajectories of as many equal turns each, whose ln length is normal about ln 2,000."""
    lengths = np.random.default_rng(3).lognormal(np.log(2_000.0), sigma, (prompts, samples))
    works = (
        work(f"p{prompt}", sample, *[max(1, round(length / turns))] * turns)
        for (prompt, sample), length in np.ndenumerate(lengths)
    )
    return Workload("spread", tuple(works))


def test_quantiles_are_calibrated_at_every_turn_and_the_error_shrinks_as_stated() -> None:
    workload = spread_out(3_000, 1, 4)
    noisy = Noisy(workload)
    for turn in range(4):
        left = np.array([each.gen_tokens * (4 - turn) / 4 for each in workload.trajectories])
        said = [
            noisy.predict(at, turn, round(each.gen_tokens * turn / 4))[0]
            for at, each in enumerate(workload.trajectories)
        ]
        median = np.log([each.p50 for each in said])
        error_sigma = np.hypot(SIGMA0 * DECAY**turn, FRESH_SIGMA)
        # of a normal truth of deviation 1 seen through it
        expected_sigma = error_sigma / np.hypot(1.0, error_sigma)
        assert (np.log(left) - median).std() == pytest.approx(expected_sigma, rel=0.06)
        # It does not believe its outliers: the truth goes as far as it says, no less far.
        assert np.polyfit(median, np.log(left), 1)[0] == pytest.approx(1.0, abs=0.05)
        quantiles = np.array([(each.p10, each.p50, each.p90) for each in said])
        assert (left[:, None] < quantiles).mean(axis=0) == pytest.approx([0.1, 0.5, 0.9], abs=0.03)


def test_samples_of_a_prompt_share_the_stated_part_of_the_error() -> None:
    workload = spread_out(3_000, 2, 1)
    noisy = Noisy(workload)
    truth = np.log([float(each.gen_tokens) for each in workload.trajectories])
    median = np.log([noisy.predict(index, 0, 0)[0].p50 for index in range(6_000)])
    error_sigma = np.hypot(SIGMA0, FRESH_SIGMA)
    trust = truth.var() / (truth.var() + error_sigma**2)
    seen = truth.mean() + (median - truth.mean()) / trust
    errors = (seen - truth).reshape(-1, 2)
    assert errors.std() == pytest.approx(error_sigma, rel=0.03)
    shared = SHARED * SIGMA0**2 / error_sigma**2
    assert np.corrcoef(errors[:, 0], errors[:, 1])[0, 1] == pytest.approx(shared, abs=0.05)


def test_noise_finds_the_longest_better_with_each_step_and_starts_no_better_than_history() -> None:
    history = measure_accuracy(CODING, PromptMean(CODING, BEFORE))
    noisy = measure_accuracy(CODING, Noisy(CODING, 1))
    assert noisy[0].recall < noisy[1].recall < noisy[2].recall
    assert noisy[0].pearson < noisy[1].pearson < noisy[2].pearson
    assert noisy[0].recall == pytest.approx(history[0].recall, abs=0.12)
    assert noisy[0].pearson_log == pytest.approx(history[0].pearson_log, abs=0.1)


def test_history_knows_each_prompts_mean_and_nothing_of_the_sample() -> None:
    earlier = [work("p", 0, 100), work("p", 1, 200, 300), work("r", 0, 900)]
    history = PromptMean(SMALL, earlier)
    assert history.predict(0, 0, 0)[0].p50 == history.predict(1, 0, 0)[0].p50 == 300.0
    assert history.predict(0, 1, 100)[0].p50 == 200.0
    assert history.predict(2, 0, 0)[0].p50 == 500.0  # a prompt never seen: the mean over all
    # outlived: a quarter of what it did, within the cap
    assert history.predict(2, 1, 800)[0].p50 == 200.0
    history.finish(0)
    assert history.predict(1, 0, 0)[0].p50 == 300.0
    with pytest.raises(ValueError, match="earlier"):
        PromptMean(SMALL, [])


def test_blind_says_what_the_controller_assumes_anyway() -> None:
    blind = Blind(SMALL)
    assert (
        blind.predict(0, 0, 0)[0].p50
        == blind.predict(2, 0, 0)[0].p50
        == Tuning().default_remaining_tokens
    )
    assert blind.predict(2, 1, 700) == Answer(Estimate(300.0, 300.0, 300.0))


def test_siblings_learn_from_what_ended_and_nothing_before() -> None:
    workload = Workload("w", tuple(work("p", sample, 4_000, 4_000) for sample in range(8)))
    siblings = Siblings(workload)
    first = siblings.predict(0, 0, 0)[0].p50
    assert first == Siblings(replace(workload, name="other")).predict(0, 0, 0)[0].p50
    for index in range(1, 8):
        siblings.predict(index, 0, 0)
        siblings.predict(index, 1, 4_000)
        siblings.finish(index)
    later = siblings.predict(0, 0, 0)[0].p50
    assert abs(later - 8_000) < abs(first - 8_000)
    assert later == pytest.approx(8_000, rel=0.1)
    assert siblings.predict(0, 1, 4_000)[1] == siblings.predict(0, 1, 4_000)[1]


def test_a_sibling_that_was_cut_counts_as_longer_than_it_was() -> None:
    def after(censored: bool) -> float:
        workload = Workload(
            "w", tuple(work("p", at, 500, censored=censored and at > 0) for at in range(6))
        )
        siblings = Siblings(workload)
        for index in range(6):
            siblings.predict(index, 0, 0)
        for index in range(1, 6):
            siblings.finish(index)
        return siblings.predict(0, 0, 0)[0].p50

    assert after(censored=True) > 1.5 * after(censored=False)


def test_an_earlier_epoch_makes_siblings_better_from_the_start() -> None:
    workload, earlier = (
        make("coding", 30, 16, seed=1),
        make("coding", 30, 16, seed=1, epoch=1).trajectories,
    )
    without, with_it = (
        measure_accuracy(workload, Siblings(workload, known)) for known in ((), earlier)
    )
    assert with_it[0].pearson_log > without[0].pearson_log + 0.3
    assert with_it[2].pearson_log > without[2].pearson_log


def test_the_oracle_finds_all_and_the_blind_what_chance_finds() -> None:
    assert [each.recall for each in measure_accuracy(CODING, Oracle(CODING))] == [1.0, 1.0, 1.0]
    assert measure_accuracy(CODING, Oracle(CODING))[0].pearson == pytest.approx(1.0)
    assert measure_accuracy(CODING, Blind(CODING))[0].recall == pytest.approx(0.1, abs=0.01)


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match="no predictor 'crystal-ball', only oracle"):
        make_predictor("crystal-ball", SMALL)
    with pytest.raises(ValueError, match="more than 2 steps"):
        measure_accuracy(SMALL, Oracle(SMALL))
