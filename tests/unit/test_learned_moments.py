"""Transcripts as questions: what was known, and what was left."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from treadle_core.ranking.estimator import Source
from treadle_learned.examples import Part, fold_of, part_of, split
from treadle_learned.moments import FEATURES, Moment, replay, replay_apart
from treadle_learned.transcript import Transcript, Turn


def made(
    prompt: str, sample: int, steps: list[int], *, censored: bool = False, rollout: str = "now"
) -> Transcript:
    turns = tuple(Turn(tokens, 7) for tokens in steps)
    return Transcript(f"{rollout}/{prompt}#{sample}", rollout, prompt, 50, turns, censored)


def feature(moment: Moment, name: str) -> float:
    return float(moment.features[FEATURES.index(name)])


STEPS = st.lists(st.integers(1, 400), min_size=1, max_size=6)


@settings(deadline=None, max_examples=30)
@given(st.lists(st.tuples(st.sampled_from("abc"), STEPS), min_size=1, max_size=8))
def test_what_was_sampled_and_what_is_left_add_up(rows: list[tuple[str, list[int]]]) -> None:
    transcripts = [made(prompt, sample, steps) for sample, (prompt, steps) in enumerate(rows)]
    moments = replay(transcripts)
    assert sorted((m.index, m.turn) for m in moments) == [
        (index, turn) for index, (_, steps) in enumerate(rows) for turn in range(len(steps))
    ]
    for moment in moments:
        transcript = transcripts[moment.index]
        assert moment.gen_tokens + moment.remaining_tokens == transcript.gen_tokens
        assert moment.turn + moment.remaining_turns == len(transcript.turns)
        assert np.isfinite(moment.features).all()


def test_a_sibling_is_known_of_once_it_has_ended_and_not_before() -> None:
    moments = replay([made("p", 0, [100]), made("p", 1, [50, 100, 100])])
    of_long = [moment for moment in moments if moment.index == 1]
    assert [feature(moment, "ended_siblings") > 0 for moment in of_long] == [False, False, True]
    assert of_long[2].forecast.source is Source.SIBLINGS
    assert np.isclose(feature(of_long[2], "ended_siblings_mean_tokens"), np.log1p(100))


def test_what_the_running_tool_will_add_is_not_counted_yet() -> None:
    moments = replay([made("p", 0, [100, 100, 100])])
    context = [round(float(np.expm1(feature(moment, "context_tokens")))) for moment in moments]
    assert context == [50, 150, 257]
    assert [round(float(np.expm1(feature(moment, "last_obs_tokens")))) for moment in moments] == [
        0,
        0,
        7,
    ]


def test_what_ended_earlier_is_history_and_what_was_cut_says_so() -> None:
    (moment,) = replay(
        [made("p", 0, [10], censored=True)], [made("q", 0, [500, 500], rollout="before")]
    )
    assert moment.forecast.source is Source.HISTORY and moment.censored


def test_training_moments_have_the_other_prompts_for_history_and_not_their_own() -> None:
    transcripts = [made(f"p{number}", 0, [100 + number, 50]) for number in range(12)]
    moments = replay_apart(transcripts, [number % 4 for number in range(12)])
    assert sorted((m.index, m.turn) for m in moments) == [
        (index, turn) for index in range(12) for turn in range(2)
    ]
    for moment in moments:
        assert moment.gen_tokens in (0, 100 + moment.index)
        assert moment.forecast.source is Source.HISTORY


def test_a_prompt_is_in_one_part_whoever_else_is_there() -> None:
    transcripts = [made(f"p{number % 100}", number, [10]) for number in range(300)]
    parts = split(transcripts, seed=3)
    assert sum(map(len, parts.values())) == 300
    for part, own in parts.items():
        assert {part_of(each.prompt_id, 3) for each in own} == {part}
    assert len(parts[Part.TRAIN]) > len(parts[Part.TEST]) > len(parts[Part.VALIDATION]) > 0
    for part, folds in ((Part.TEST, {-2, -1}), (Part.VALIDATION, {0}), (Part.TRAIN, {1, 2, 3, 4})):
        assert {fold_of(each.prompt_id, 3) for each in parts[part]} == folds
