"""What the backbone reads of a trajectory."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from treadle_learned.reading import Bounds, Reader, shorten, windows
from treadle_learned.transcript import Transcript, Turn

SMALL = Bounds(prompt_tokens=6, plan_tokens=4, step_tokens=3, obs_tokens=2, window_tokens=26)
TEXTS = st.text("abcdefgh", max_size=12)
TURNS = st.lists(
    st.builds(Turn, st.integers(1, 9), st.integers(0, 9), TEXTS, TEXTS), min_size=1, max_size=25
)


def letters(text: str) -> list[int]:
    return [ord(letter) for letter in text]


def transcript(prompt: str, turns: list[Turn]) -> Transcript:
    return Transcript("t", "r", "p", 10, tuple(turns), prompt=prompt)


@settings(deadline=None)
@given(TEXTS, TURNS)
def test_each_question_is_asked_once_and_step_by_step_reads_the_same(
    prompt: str, turns: list[Turn]
) -> None:
    found = windows(transcript(prompt, turns), letters, SMALL)
    assert [turn for window in found for turn, _ in window.ends] == list(range(len(turns)))

    reader = Reader(SMALL, tuple(letters(prompt)))
    read = [reader.ids]
    observation = ""
    for turn in turns[:-1]:
        reader.step(tuple(letters(observation)), tuple(letters(turn.text)))
        read.append(reader.ids)
        observation = turn.obs_text
    assert read == [window.ids[:end] for window in found for _, end in window.ends]


@settings(deadline=None)
@given(TEXTS, TURNS)
def test_a_window_holds_its_bound_and_only_grows_at_its_end(prompt: str, turns: list[Turn]) -> None:
    for window in windows(transcript(prompt, turns), letters, SMALL):
        ends = [end for _, end in window.ends]
        assert ends == sorted(ends) and ends[-1] == len(window.ids)
        assert 1 <= len(window.ids) <= SMALL.window_tokens


def test_a_full_window_is_followed_by_prompt_plan_and_the_steps_since_it_was_half_full() -> None:
    turns = [Turn(1, 1, text, "zz") for text in ("plan", "aaa", "bbb", "ccc", "ddd", "eee")]
    first, second = windows(transcript("prompt", turns), letters, SMALL)
    assert "".join(map(chr, first.ids)) == "promptplanzzaaazzbbbzzccc"
    assert first.ends == ((0, 6), (1, 10), (2, 15), (3, 20), (4, 25))
    assert "".join(map(chr, second.ids)) == "promptplanzzccczzddd"
    assert second.ends == ((5, 20),)


@settings(deadline=None)
@given(TEXTS, TURNS)
def test_the_next_window_begins_as_was_said_before_it_was_due(
    prompt: str, turns: list[Turn]
) -> None:
    reader = Reader(SMALL, tuple(letters(prompt)))
    for turn in turns:
        number, said = reader.number, reader.next_ids
        reader.step(tuple(letters(turn.obs_text)), tuple(letters(turn.text)))
        if reader.number == number:
            assert reader.next_ids[: len(said)] == said, "it only grows"
        else:
            assert reader.ids[: len(said)] == said
            assert not reader.next_ids


def test_what_the_running_tool_will_say_is_not_read_yet() -> None:
    turns = [Turn(1, 1, "plan", "xx"), Turn(1, 1, "aaa", "yy"), Turn(1, 1, "bbb", "zz")]
    (window,) = windows(transcript("prompt", turns), letters, SMALL)
    assert ["".join(map(chr, window.ids[:end])) for _, end in window.ends] == [
        "prompt",
        "promptplan",
        "promptplanxxaaa",
    ]


def test_what_is_long_keeps_its_head_and_its_end() -> None:
    assert shorten((1, 2, 3, 4, 5), 3) == (1, 2, 5)
    assert shorten((1, 2, 3), 1) == (1,)
    assert shorten((1, 2, 3), 3) == (1, 2, 3)


def test_bounds_without_room_for_two_steps_are_refused() -> None:
    with pytest.raises(ValueError, match="window_tokens must be >= 384 for these parts, is 383"):
        Bounds(window_tokens=383)
    with pytest.raises(ValueError, match="step_tokens must be >= 1, is 0"):
        Bounds(step_tokens=0)
