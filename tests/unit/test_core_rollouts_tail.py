"""The wait for the longest sample: who ends when, who is aborted or cut, and what it says of the
batch."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from treadle_core.compiled import Floats
from treadle_core.rollouts.redundancy import LatencyCurve, rollout_cost_s
from treadle_core.rollouts.tail import TailQuestion, lengths_of, log_sigma, play_tail

CURVE = LatencyCurve((1.0, 2.0), (0.01, 0.011))
PLAIN = TailQuestion(4, 8, 8, 500.0, 1.0, 1.0, CURVE)


def draws(question: TailQuestion, seed: int = 0) -> Floats:
    return np.random.default_rng(seed).standard_normal((question.prompts, question.started))


def test_lengths_have_the_mean_and_the_variation_that_were_asked_for() -> None:
    lengths = lengths_of(np.random.default_rng(1).standard_normal(400_000), 0.8)
    assert lengths.mean() == pytest.approx(1.0, rel=0.01)
    assert lengths.std() == pytest.approx(0.8, rel=0.03)
    assert log_sigma(0.8) == pytest.approx(np.log(lengths).std(), rel=0.01)


@given(st.integers(0, 1000))
def test_without_patches_the_batch_takes_what_the_cost_of_the_core_says_and_all_is_kept(
    seed: int,
) -> None:
    normals = draws(PLAIN, seed)
    tail = play_tail(PLAIN, normals)
    lengths = 500.0 * lengths_of(normals, 1.0).ravel()
    assert tail.makespan_s == pytest.approx(rollout_cost_s(CURVE, [lengths.tolist()]), rel=1e-9)
    assert tail.tokens.sum() == pytest.approx(lengths.sum())
    assert not tail.aborted.any() and not tail.cut.any()
    assert tail.kept.value == 1.0
    assert np.all(np.diff(tail.ends_s) >= 0.0)
    assert tail.tax == pytest.approx(1.0 / tail.utilization - 1.0)
    # the 29th of 32 ends nine tenths
    assert tail.last_tenth == pytest.approx(1.0 - tail.ends_s[28] / tail.makespan_s)


def test_a_cap_cuts_what_is_longer_and_nothing_else() -> None:
    capped = replace(PLAIN, cap_percentile=0.9)
    normals = draws(PLAIN)
    tail = play_tail(capped, normals)
    lengths = 500.0 * lengths_of(normals, 1.0).ravel()
    assert capped.cap_tokens == pytest.approx(
        500.0 * math.exp(log_sigma(1.0) * 1.2815515655446004 - math.log(2.0) / 2)
    )
    assert tail.cut.sum() == (lengths > capped.cap_tokens).sum() > 0
    assert tail.tokens.max() == pytest.approx(capped.cap_tokens)


def test_of_more_samples_the_last_are_aborted_when_their_prompt_has_enough() -> None:
    """Of one prompt with lengths 1, 2, 3 and 4, two are trained. Result: the others are aborted at
    2."""
    lengths = np.array([[4.0, 1.0, 3.0, 2.0]])
    s = log_sigma(0.5)
    tail = play_tail(
        TailQuestion(1, 4, 2, 1.0, 0.5, 1.0, CURVE), (np.log(lengths) + 0.5 * s * s) / s
    )
    assert tail.tokens.tolist() == pytest.approx([1.0, 2.0, 2.0, 2.0])
    assert tail.aborted.tolist() == [False, False, True, True] or sorted(
        tail.aborted.tolist()[1:]
    ) == [False, True, True]
    assert tail.kept.value == 0.5


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("prompts", 0),
        ("trained", 9),
        ("trained", 0),
        ("mean_tokens", 0.0),
        ("variation", math.inf),
        ("cap_percentile", 0.0),
    ],
)
def test_a_bad_question_names_its_field(field: str, value: float) -> None:
    with pytest.raises(ValueError, match=field):
        replace(PLAIN, **{field: value})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="shape"):
        play_tail(PLAIN, np.zeros((1, 1)))
