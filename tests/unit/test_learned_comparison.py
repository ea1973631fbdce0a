"""Estimators side by side on the same questions."""

import numpy as np
import pytest
from treadle_learned.comparison import Asked, forecasts, rows, together, truth
from treadle_learned.history import PromptAverage
from treadle_learned.moments import replay
from treadle_learned.transcript import Transcript, Turn


def epoch(rollout: str, seed: int, prompts: int = 30, samples: int = 4) -> list[Transcript]:
    """Prompts differ by far more than their samples do."""
    sizes = np.exp(np.random.default_rng(0).normal(5, 1, prompts))
    rng = np.random.default_rng(seed)
    made = []
    for prompt in range(prompts):
        for sample in range(samples):
            steps = int(rng.integers(1, 7))
            tokens = rng.multinomial(int(sizes[prompt] * np.exp(rng.normal(0, 0.2))) + 10, np.ones(steps) / steps)
            turns = tuple(Turn(max(1, int(each)), 5) for each in tokens)
            made.append(Transcript(f"{rollout}/{prompt}#{sample}", rollout, f"p{prompt}", 40, turns))
    return made


def test_each_step_is_asked_of_every_estimator_and_the_oracle_is_right() -> None:
    before, now = epoch("before", 1), epoch("now", 2)
    moments = replay(now, before)
    average = PromptAverage(before).predict(moments, now)
    found = rows(
        "made", Asked(moments, now, {"history": average, "siblings": forecasts(moments), "oracle": truth(moments)})
    )
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
    """
    WHEN    what is said before the first step is the median of all, a quarter of whom end within two steps
    Result: half of all truths are at or below it, though fewer of those that take more steps are
    """
    turns = [1, 2, 3, 4, 5, 6, 7, 8]
    now = [
        Transcript(f"t{count}", "now", f"p{count}", 9, tuple(Turn(100 + count) for _ in range(count)))
        for count in turns
    ]
    moments = replay(now, asked=lambda turn: turn == 0)
    said = np.full((len(moments), 3), np.median([moment.remaining_tokens for moment in moments]))
    (row,) = rows("made", Asked(moments, now, {"median": said}), intervals=False)
    assert (row["trajectories"], row["below_p50"]) == (6, 0.5)


def test_deals_count_alike_and_a_trajectory_counts_once() -> None:
    now = epoch("now", 2)
    moments = replay(now)
    half = np.arange(len(moments)) % 2
    told = truth(moments)
    deals = [Asked(moments, now, {"who": said}, half) for said in (told + 1.0, told - 1.0)]
    both = together(deals)
    assert both.parts is not None and np.unique(both.parts).tolist() == [0, 1, 2, 3]
    above, below, each = (rows("made", asked, intervals=False) for asked in (*deals, both))
    for over, under, row in zip(above, below, each, strict=True):
        assert row["trajectories"] == over["trajectories"]
        assert (over["below_p50"], under["below_p50"], row["below_p50"]) == (1.0, 0.0, 0.5)
        assert row["pinball"] == pytest.approx((over["pinball"] + under["pinball"]) / 2)


def test_history_knows_its_prompts_and_says_the_average_of_others() -> None:
    earlier = [
        Transcript(f"t{n}", "r", "long" if n % 2 else "short", 9, (Turn(10_000 if n % 2 else 10),)) for n in range(8)
    ]
    asked = [Transcript(f"a-{name}", "now", name, 9, (Turn(50), Turn(50))) for name in ("long", "short", "new")]
    moments = replay(asked)
    said = {
        (asked[moment.index].prompt_id, moment.turn): row
        for moment, row in zip(moments, PromptAverage(earlier).predict(moments, asked), strict=True)
    }
    assert said["long", 0][1] == pytest.approx(10_000)
    assert said["short", 0][1] == pytest.approx(10)
    assert 10 < said["new", 0][1] < 10_000
    assert said["long", 1][1] == pytest.approx(9_950)
    assert said["short", 1][1] == pytest.approx(0.25 * 50)  # it has outlived its average
    assert all((np.diff(row) >= 0).all() for row in said.values())
