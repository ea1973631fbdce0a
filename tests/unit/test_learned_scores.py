"""Scores of predictions, and estimators side by side on the same questions."""

from dataclasses import replace

import numpy as np
import pytest
from treadle_learned import scores
from treadle_learned.moments import replay
from treadle_learned.scores import Answers, Asked, PromptAverage, forecasts, rows, truth
from treadle_learned.transcript import Transcript, Turn


def answers(
    remaining: list[float], medians: list[float], *, censored: list[bool] | None = None
) -> Answers:
    middle = np.array(medians)
    return Answers(
        np.zeros(len(middle)),
        np.array(remaining),
        np.array(censored or [False] * len(middle)),
        np.column_stack([middle / 2, middle, middle * 2]),
        np.arange(len(middle)),
        np.zeros(len(middle), np.int64),
    )


def test_who_knows_the_truth_scores_full_marks() -> None:
    truth = np.exp(np.random.default_rng(0).normal(6, 1, 200)).tolist()
    told = answers(truth, truth)
    assert scores.recall(told) == 1.0
    assert scores.pearson(told) == pytest.approx(1.0)
    assert scores.coverage_80(told) == 1.0
    low, high = scores.intervals(told, {"recall": scores.recall})["recall"]
    assert 0.9 < low <= high == 1.0  # the same trajectory drawn twice ties with itself


def test_one_answer_for_all_finds_a_tenth_of_the_longest() -> None:
    told = answers([float(number) for number in range(1, 101)], [50.0] * 100)
    assert scores.recall(told) == pytest.approx(0.1)
    assert scores.pearson(told) == 0.0


def test_who_says_the_mean_of_the_other_folds_ranks_nothing() -> None:
    """Two folds, the one of short prompts, the other of long ones; each is told the other's mean.
    Result: pooled, that is anticorrelated; within each fold it knows nothing."""
    truth = np.concatenate([np.linspace(10, 20, 50), np.linspace(100, 200, 50)])
    pooled = answers(truth.tolist(), [150.0] * 50 + [15.0] * 50)
    apart = replace(pooled, parts=np.repeat([0, 1], 50))
    assert scores.pearson(pooled) < -0.8
    assert scores.pearson(apart) == scores.pearson_log(apart) == 0.0
    assert scores.recall(pooled) == 0.0
    assert scores.recall(apart) == pytest.approx(0.1)


def test_parts_are_averaged_by_their_size_and_stay_whole_in_the_bootstrap() -> None:
    """A part of 90 in the right order, one of 30 in the reverse order."""
    truth = np.arange(1.0, 121.0)
    told = replace(
        answers(truth.tolist(), [*range(1, 91), *range(30, 0, -1)]),
        parts=np.repeat([0, 1], [90, 30]),
    )
    assert scores.pearson(told) == pytest.approx(0.75 - 0.25)
    low, high = scores.intervals(told, {"pearson": scores.pearson})["pearson"]
    assert low == pytest.approx(0.5) == high


def test_shares_below_each_quantile_leave_out_what_was_cut() -> None:
    told = answers([10.0, 100.0, 1_000.0, 1.0], [100.0] * 4, censored=[False, False, False, True])
    assert [scores.below(told, level) for level in range(3)] == pytest.approx([1 / 3, 2 / 3, 2 / 3])
    assert scores.coverage_80(told) == pytest.approx(1 / 3)


def test_the_right_quantiles_cost_less_than_any_others() -> None:
    truth = np.exp(np.random.default_rng(1).normal(5, 1, 4_000)).tolist()
    told, spread = answers(truth, truth), np.exp(1.2816)
    cost = {
        factor: scores.pinball(
            replace(
                told, quantiles=np.tile(np.exp(5) * np.array([1 / factor, 1.0, factor]), (4_000, 1))
            )
        )
        for factor in (1.5, spread, 8.0)
    }
    assert min(cost, key=cost.__getitem__) == spread


def test_what_was_cut_costs_only_where_less_was_predicted() -> None:
    cut = answers([100.0, 100.0], [1_000.0, 10.0], censored=[True, True])
    generous, short = scores.pinball_each(cut.quantiles, cut.remaining, cut.censored)
    assert generous == 0.0 < short


def epoch(rollout: str, seed: int, prompts: int = 30, samples: int = 4) -> list[Transcript]:
    """Prompts differ by far more than their samples do."""
    sizes = np.exp(np.random.default_rng(0).normal(5, 1, prompts))
    rng = np.random.default_rng(seed)
    made = []
    for prompt in range(prompts):
        for sample in range(samples):
            steps = int(rng.integers(1, 7))
            tokens = rng.multinomial(
                int(sizes[prompt] * np.exp(rng.normal(0, 0.2))) + 10, np.ones(steps) / steps
            )
            turns = tuple(Turn(max(1, int(each)), 5) for each in tokens)
            made.append(
                Transcript(f"{rollout}/{prompt}#{sample}", rollout, f"p{prompt}", 40, turns)
            )
    return made


def test_each_step_is_asked_of_every_estimator_and_the_oracle_is_right() -> None:
    before, now = epoch("before", 1), epoch("now", 2)
    moments = replay(now, before)
    average = PromptAverage(before).predict(moments)
    said = {"history": average, "siblings": forecasts(moments), "oracle": truth(moments)}
    found = rows("made", Asked(moments, now, said, np.zeros(len(moments), np.int64)))
    assert [(row["step"], row["estimator"]) for row in found] == [
        (step, name) for step in (0, 1, 2, 4) for name in ("history", "siblings", "oracle")
    ]
    same = {row["trajectories"] for row in found if row["step"] <= 2}
    assert same == {sum(len(transcript.turns) > 2 for transcript in now)}
    for row in found:
        low, high = row["pinball_interval"]
        assert low <= row["pinball"] <= high
        if row["estimator"] == "oracle":
            assert (row["recall_top10"], row["pinball"]) == (1.0, 0.0)
            assert row["pearson"] == pytest.approx(1.0)


def test_shares_within_quantiles_are_of_all_that_were_asked() -> None:
    """WHEN    what is said before the first step is the median of all, a quarter of whom end within
    two steps Result: half of all truths are at or below it, though fewer of those that take more
    steps are"""
    now = [
        Transcript(f"t{count}", "now", f"p{count}", 9, (Turn(100 + count),) * count)
        for count in range(1, 9)
    ]
    moments = replay(now, asked=lambda turn: turn == 0)
    said = np.full((len(moments), 3), np.median([moment.remaining_tokens for moment in moments]))
    (row,) = rows(
        "made", Asked(moments, now, {"median": said}, np.zeros(8, np.int64)), with_intervals=False
    )
    assert (row["trajectories"], row["below_p50"]) == (6, 0.5)


def test_history_knows_its_prompts_and_says_the_average_of_others() -> None:
    earlier = [
        Transcript(f"t{n}", "r", "long" if n % 2 else "short", 9, (Turn(10_000 if n % 2 else 10),))
        for n in range(8)
    ]
    asked = [
        Transcript(f"a-{name}", "now", name, 9, (Turn(50), Turn(50)))
        for name in ("long", "short", "new")
    ]
    moments = replay(asked)
    said = {
        (asked[moment.index].prompt_id, moment.turn): row
        for moment, row in zip(moments, PromptAverage(earlier).predict(moments), strict=True)
    }
    assert said["long", 0][1] == pytest.approx(10_000)
    assert said["short", 0][1] == pytest.approx(10)
    assert 10 < said["new", 0][1] < 10_000
    assert said["long", 1][1] == pytest.approx(9_950)
    assert said["short", 1][1] == pytest.approx(0.25 * 50)  # it has outlived its average
    assert all((np.diff(row) >= 0).all() for row in said.values())
