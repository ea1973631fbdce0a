"""What the environments read in a policy's words: actions, answers, tool calls; and the tools that
it is shown."""

import json
from typing import Annotated, Literal

import pytest
from treadle.environments import answer_of, first_of, read_tool_calls, tool

MOVES = {"left": 0, "right": 2, "right hand": 7, "use": 9}


@pytest.mark.parametrize(
    ("said", "action"),
    [
        ("I go LEFT, not right.", 0),
        ("rightly so", None),
        ("The right hand!", 7),
        ("<think>left or right?</think> right", 2),
        ("<think>left, and then it was cut", None),
        ("left or right?</think> right", 2),  # its template has written <think>
        ("u\u017fe", 9),  # the long s is an s to a search that ignores case
        ("", None),
    ],
)
def test_the_first_word_that_names_an_action_counts(said: str, action: int | None) -> None:
    assert first_of(MOVES)(said) == action


def test_there_must_be_a_word() -> None:
    with pytest.raises(ValueError, match="at least"):
        first_of({})


@pytest.mark.parametrize(
    ("said", "answer"),
    [
        ("so <answer> 41 </answer>, no: <answer>42\n</answer>", "42"),
        ("<think>40?</think> 42 ", "42"),
        ("40?</think> 42 ", "42"),
        ("so <answer> 41, no: <answer>42</answer>, or", "42"),
        ("<think><answer>41</answer>?</think> <answer>42</answer>", "42"),
        ("<answer>42</answer> <think><answer>41</answer>?", "42"),
        ("<think><answer>41</answer>, and then it was cut", ""),
        ("42", "42"),
    ],
)
def test_the_last_answer_counts_and_reasoning_does_not(said: str, answer: str) -> None:
    assert answer_of(said) == answer


@pytest.mark.parametrize(
    "said",
    [
        *("<answer>", "<think>", "</think>", "<tool_call>", "<answer></answer", "left "),
        *("<think></think>", "<tool_call>{", '<tool_call>{"', "<tool_call>[]"),
    ],
)
def test_a_reply_that_repeats_itself_is_read_in_time(said: str) -> None:
    """A policy that has broken down says one thing until its tokens are spent. Reading it takes the
    event loop's time: a search that begins anew at each place would take minutes."""
    for read in (answer_of, first_of(MOVES), read_tool_calls):
        read(said * 100_000)


CALL = {"name": "look", "arguments": {"at": "a; b"}}


@pytest.mark.parametrize(
    "said",
    [
        f"Let me see. <tool_call>\n{json.dumps(CALL)}\n</tool_call>",
        f"<tool_call>{json.dumps(CALL)}",  # cut at its end tag, which some engines take as a stop
        f"<|python_tag|>{json.dumps({'name': 'look', 'parameters': CALL['arguments']})}",
        f" {json.dumps({'name': 'look', 'arguments': json.dumps(CALL['arguments'])})} ",
    ],
)
def test_a_call_is_read_in_each_form(said: str) -> None:
    [call] = read_tool_calls(said)
    assert (call.name, call.arguments, call.error) == ("look", CALL["arguments"], "")


def tagged(name: str, **arguments: str) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


A, B = tagged("a"), tagged("b")


@pytest.mark.parametrize(
    ("said", "names"),
    [
        (f"<think>Perhaps {A}? No.</think>{B}", ["b"]),
        (f"Perhaps {A}? No.</think>{B}", ["b"]),  # its template has written <think>
        (f"<think>Perhaps {A}", []),
        (f"<think>I use <tool_call> now.</think>{B}", ["b"]),
        (f"I use <tool_call> now.</think>{B}", ["b"]),
        (f"{A}<think>and {B}</think>{A}", ["a", "a"]),
        (f"<think>x</think>{A}</think>{B}", ["a", "b"]),
        (f"<think>{json.dumps(CALL)}</think>{json.dumps(CALL)}", ["look"]),
        (f"<think>{json.dumps(CALL)}</think>I know it.", []),
        (f"<think>{json.dumps(CALL)}", []),
    ],
)
def test_calls_within_reasoning_do_not_count(said: str, names: list[str]) -> None:
    assert [call.name for call in read_tool_calls(said)] == names


@pytest.mark.parametrize("text", ["<think>", "</think>", "</tool_call>", "<tool_call>{}"])
def test_tags_within_the_arguments_of_a_call_belong_to_them(text: str) -> None:
    [first, second] = read_tool_calls(tagged("write", text=text) + B)
    assert (first.arguments, first.error, second.name) == ({"text": text}, "", "b")
    [bare] = read_tool_calls(json.dumps({"name": "write", "parameters": {"text": text}}))
    assert (bare.arguments, bare.error) == ({"text": text}, "")


def test_a_call_whose_end_tag_is_missing_ends_before_the_next_call() -> None:
    first, second = read_tool_calls(A.removesuffix("</tool_call>") + B)
    assert ([first.name, second.name], first.error + second.error) == (["a", "b"], "")


@pytest.mark.parametrize(
    "said",
    [
        "I need no tool.",
        "",
        '{"answer": 3}',
        '{"name": "Ada Lovelace", "born": 1815}',
        '{"name": "Ada Lovelace"}',
        '{"name": "look", "arguments": {}, "born": 1815}',
        '{"name": {"first": "Ada"}, "arguments": {}}',
        '{"person": {"name": "look", "arguments": {}}}',
        '[{"name": "look", "arguments": {}}]',
        '```json\n{"name": "look", "arguments": {}}\n```',
        'The call is {"name": "look", "arguments": {}}',
        '{"name": "Ada Lovelace", "born',
        "<tool_response>x</tool_response>",
    ],
)
def test_a_reply_without_a_call_has_none(said: str) -> None:
    assert read_tool_calls(said) == []
    assert read_tool_calls(said, ["look"]) == []


@pytest.mark.parametrize(
    "said",
    [
        '{"name": "Ada Lovelace", "arguments": {}}',
        '{"name": "Ada Lovelace", "parameters": {"born": 1815}}',
        '{"name": "Ada Lovelace", "arguments": {"born": 18',
    ],
)
def test_json_alone_is_a_call_of_a_tool_that_there_is_and_an_answer_otherwise(said: str) -> None:
    assert read_tool_calls(said, ["look"]) == []
    assert len(read_tool_calls(said, ["look", "Ada Lovelace"])) == 1
    assert len(read_tool_calls(said)) == 1  # the tools are not known
    [python_tag] = read_tool_calls(f"<|python_tag|>{said}", ["look"])
    assert python_tag.name == "Ada Lovelace" or "no JSON" in python_tag.error


def test_json_alone_calls_a_known_tool_without_arguments() -> None:
    [call] = read_tool_calls('{"name": "look"}', ["look"])
    assert (call.name, call.arguments, call.error) == ("look", {}, "")


def test_a_tagged_call_of_an_unknown_tool_is_a_call() -> None:
    [call] = read_tool_calls(A, ["look"])
    assert (call.name, call.error) == ("a", "")


def test_ids_of_calls_are_as_templates_of_mistral_require_them() -> None:
    ids = [call.call_id for call in read_tool_calls(A * 3)]
    assert len(set(ids)) == 3
    assert all(len(each) == 9 and each.isalnum() for each in ids)


@pytest.mark.parametrize(
    ("body", "error"),
    [
        ('{"name": "look", ', "no JSON"),
        ('{"arguments": {}}', "must be"),
        ('{"name": "look", "arguments": "{"}', "arguments are no JSON"),
        ('{"name": "look", "arguments": {"at": ' + "9" * 5_000 + "}}", "no JSON"),
        ('{"name": "look", "arguments": ' + json.dumps("9" * 5_000) + "}", "arguments are no JSON"),
        ('{"name": "look", "arguments": ' + "[" * 100_000 + "]" * 100_000 + "}", "no JSON"),
        ('{"name": "look", "arguments": [1]}', "JSON object"),
    ],
)
def test_a_call_that_cannot_be_read_says_why_and_the_others_are_read(body: str, error: str) -> None:
    wrong, right = read_tool_calls(
        f"<tool_call>{body}</tool_call><tool_call>{json.dumps(CALL)}</tool_call>"
    )
    assert error in wrong.error
    assert (right.error, wrong.call_id != right.call_id) == ("", True)


def find(
    text: Annotated[str, "what to look for"],
    kind: Literal["all", "one"] = "all",
    most: int | None = None,
    *,
    where: list[str],
) -> str:
    """Find things."""
    return text


def test_a_function_is_shown_to_the_policy_as_it_is_declared() -> None:
    function = tool(find).schema["function"]
    assert (function["name"], function["description"]) == ("find", "Find things.")
    assert function["parameters"] == {
        "type": "object",
        "properties": {
            "text": {"type": "string", "description": "what to look for"},
            "kind": {"enum": ["all", "one"]},
            "most": {"type": "integer"},
            "where": {"type": "array", "items": {"type": "string"}},
        },
        "required": ["text", "where"],
    }


def test_a_function_whose_arguments_have_no_names_is_no_tool() -> None:
    with pytest.raises(TypeError, match=r"\*rest"):
        tool(lambda *rest: rest)
