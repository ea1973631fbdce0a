"""What a judge is asked, and the score in what it says."""

import json

import pytest
from treadle_tools.remote import Judge
from treadle_tools.replies import Reply
from treadle_tools.rewards.judges import NoScore, chat_request, read_answer, read_score

JUDGE = Judge(
    name="j",
    prompt="Q: $question\nA: ${answer} costs $$5. $question",
    system="Be $mood.",
    model="m",
    low=1,
    high=5,
    service="s",
)


def test_a_template_names_its_arguments_once_each() -> None:
    assert JUDGE.arguments == ["mood", "question", "answer"]


def test_arguments_stand_where_they_are_named_and_are_no_templates_themselves() -> None:
    body = chat_request(JUDGE, {"question": "what is $answer?", "answer": ["x", 1], "mood": "fair"})
    assert body["messages"] == [
        {"role": "system", "content": "Be fair."},
        {"role": "user", "content": 'Q: what is $answer?\nA: ["x", 1] costs $5. what is $answer?'},
    ]
    assert (body["model"], body["temperature"]) == ("m", 0.0)
    assert (
        chat_request(JUDGE, {"question": "", "answer": "", "mood": ""}, again=True)["temperature"]
        > 0
    )


@pytest.mark.parametrize(
    ("text", "score"),
    [
        ("Score: 5", 1.0),
        ("**Score:** 3", 0.5),
        ("I would first say score 1, but on reflection:\nSCORE = 2", 0.25),
        ("score: 4.0 of 5", 0.75),
        ("Score - 4", 0.75),
        ("<think>Score: 1?</think>Score: 5", 1.0),
    ],
)
def test_the_last_score_counts(text: str, score: float) -> None:
    assert read_score(JUDGE, text) == score


@pytest.mark.parametrize(
    "text",
    ["", "no idea", "Score: 0", "Score: 6", "Score: -1", "Score: many", "<think>Score: 5, as it"],
)
def test_what_is_no_score_in_range_is_none(text: str) -> None:
    with pytest.raises(NoScore):
        read_score(JUDGE, text)


@pytest.mark.parametrize(
    "reply", [{}, [], None, {"choices": []}, {"choices": [{"message": {"content": None}}]}]
)
def test_what_is_no_completion_has_no_answer(reply: object) -> None:
    with pytest.raises(NoScore):
        read_answer(Reply(json.dumps(reply).encode(), "application/json"))
