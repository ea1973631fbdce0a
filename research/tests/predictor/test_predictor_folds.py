"""Cross-validation by prompt, with a real small backbone."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from support.tiny_backbone import HIDDEN, tiny_backbone
from support.transcripts import told_by_the_plan
from treadle_learned.backbone import Backbone
from treadle_learned.examples import States
from treadle_learned.moments import replay
from treadle_learned.reading import Bounds
from treadle_learned.scores import Asked, rows, truth
from treadle_learned.training import Fitting
from treadle_learned.transcript import Transcript, Turn

from treadle_bench.predictor.held_out import Boosted, ask_estimators, deal, pool


def test_no_prompt_is_asked_about_by_who_has_seen_it() -> None:
    transcripts = told_by_the_plan(40)
    dealt = deal(transcripts)
    asked = sorted(moment.index for fold in dealt for moment in fold.test)
    assert asked == sorted(list(range(40)) * 4)
    for fold in dealt:
        train, test = ({moment.index for moment in part} for part in (fold.train, fold.test))
        assert not train & test and train | test == set(range(40))
        assert {transcript.trajectory_id for transcript in fold.before} == {
            f"t{index}" for index in train
        }
        of = {(moment.index, apart) for moment, apart in zip(fold.train, fold.apart, strict=True)}
        assert len(of) == len(train) and {apart for _, apart in of} == {0, 1, 2, 3}


def test_folds_are_even_and_another_seed_deals_otherwise() -> None:
    transcripts = told_by_the_plan(42)
    first, other = (
        [{moment.index for moment in fold.test} for fold in deal(transcripts, seed=s)]
        for s in (0, 1)
    )
    assert sorted(map(len, first)) == [8, 8, 8, 9, 9]
    assert first != other and first == [
        {moment.index for moment in fold.test} for fold in deal(transcripts)
    ]


def test_prompts_of_one_task_are_in_one_fold() -> None:
    transcripts = [
        replace(each, trajectory_id=f"{policy}-{number}", prompt_id=f"{policy}/task-{number}")
        for policy in ("small", "large")
        for number, each in enumerate(told_by_the_plan(40))
    ]
    by_name, by_task = (
        [
            {transcripts[moment.index].prompt_id.partition("/")[2] for moment in fold.test}
            for fold in deal(transcripts, task_of=task_of)
        ]
        for task_of in (str, lambda prompt_id: prompt_id.partition("/")[2])
    )
    assert sum(map(len, by_name)) > 40  # some task is in two folds
    assert sum(map(len, by_task)) == 40


def test_what_only_the_plan_tells_is_known_after_it_to_who_reads_it(tmp_path: Path) -> None:
    transcripts = told_by_the_plan(120)
    backbone = Backbone.load(str(tiny_backbone(tmp_path)), device="cpu", dtype=torch.float32)
    states = States(backbone, transcripts, Bounds())
    how = Fitting(epochs=80, patience=15, learning_rate=5e-3)
    asked = ask_estimators(transcripts, deal(transcripts, 4), states, hidden_size=HIDDEN, how=how)
    pinball = {
        (row["step"], row["estimator"]): row["pinball"]
        for row in rows("made", asked, with_intervals=False)
    }
    assert set(asked.answers) == {
        *("history", "siblings", "boosted", "numbers", "oracle", "prompt-only", "learned", "chosen")
    }
    assert pinball[1, "learned"] < 0.5 * pinball[0, "learned"]
    assert pinball[1, "learned"] < 0.5 * min(
        pinball[1, other] for other in ("siblings", "numbers", "prompt-only")
    )
    assert np.array_equal(asked.answers["chosen"], asked.answers["learned"])
    for part in range(4):
        own = {
            transcripts[asked.moments[at].index].prompt_id
            for at in np.flatnonzero(asked.parts == part).tolist()
        }
        others = {
            transcripts[asked.moments[at].index].prompt_id
            for at in np.flatnonzero(asked.parts != part).tolist()
        }
        assert own and not own & others


def test_fewer_than_three_folds_and_no_moments_are_refused() -> None:
    with pytest.raises(ValueError, match="folds must be >= 3"):
        deal(told_by_the_plan(4), 2)
    with pytest.raises(ValueError, match="at least one"):
        Boosted([])


def rollout(censor_at: int | None = None) -> list[Transcript]:
    """Long prompts make long trajectories."""
    rng = np.random.default_rng(2)
    transcripts = []
    for number in range(160):
        size = int(rng.integers(50, 2_000))
        tokens = min(2 * size, censor_at or 2 * size)
        turns = (Turn(tokens // 2), Turn(tokens - tokens // 2))
        transcripts.append(
            Transcript(f"t{number}", "r", f"p{number}", size, turns, tokens < 2 * size)
        )
    return transcripts


def test_trees_learn_what_numbers_say_of_the_length() -> None:
    train, test = replay(rollout()), [moment for moment in replay(rollout()) if moment.turn == 0]
    predicted = Boosted(train).predict(test)
    assert (np.diff(predicted, axis=1) >= 0).all()
    assert np.corrcoef(predicted[:, 1], [moment.remaining_tokens for moment in test])[0, 1] > 0.9


def test_trees_do_not_take_what_was_cut_for_short() -> None:
    """Half of all are cut at 2,000 tokens. Result: the longest are predicted beyond the cut."""
    test = [
        moment
        for moment in replay(rollout())
        if moment.turn == 0 and moment.remaining_tokens > 3_000
    ]
    assert (Boosted(replay(rollout(censor_at=2_000))).predict(test)[:, 2] >= 2_000).mean() > 0.9


def test_deals_count_alike_and_a_trajectory_counts_once() -> None:
    now = told_by_the_plan(30, text=False)
    moments = replay(now)
    half = np.arange(len(moments)) % 2
    told = truth(moments)
    deals = [Asked(moments, now, {"who": said}, half) for said in (told + 1.0, told - 1.0)]
    both = pool(deals)
    assert np.unique(both.parts).tolist() == [0, 1, 2, 3]
    above, below, each = (rows("made", asked, with_intervals=False) for asked in (*deals, both))
    for over, under, row in zip(above, below, each, strict=True):
        assert row["trajectories"] == over["trajectories"]
        assert (over["below_p50"], under["below_p50"], row["below_p50"]) == (1.0, 0.0, 0.5)
        assert row["pinball"] == pytest.approx((over["pinball"] + under["pinball"]) / 2)
