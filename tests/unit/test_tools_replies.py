"""What the service makes of answers that nobody can trust: every answer is a Result, and every
Result can be stored."""

import json
import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from treadle_tools import convert
from treadle_tools.builtin import FROZEN_LAKE, PYTHON
from treadle_tools.replies import (
    CUT_MARK_BYTES,
    MOST_DATA_BYTES,
    MOST_ERROR_BYTES,
    MOST_NAME_BYTES,
    Reply,
    result_of,
    result_of_function,
)
from treadle_tools.rewards import PYTHON_TESTS
from treadle_tools.tool import Kind, Result, Status, Tool

OUTPUT_BYTES = 1000
STATELESS = Tool("t", Kind.STATELESS, "", "m:f", {})
REWARD = Tool("r", Kind.REWARD, "", "m:f", {})
TOOLS = (PYTHON, FROZEN_LAKE, PYTHON_TESTS, STATELESS, REWARD)
FIELDS = (
    "status",
    "output",
    "error",
    "reward",
    "done",
    "data_json",
    "invalid",
    "retry_after_s",
    "alive",
    "soiled",
)

texts = st.text(st.characters(exclude_categories=()), max_size=20) | st.sampled_from(
    ["é" * 400_000, "\ud800", "\0"]
)
numbers = st.floats() | st.integers() | st.sampled_from([10**500, -(10**500), 1e300, 2**63])
values = st.recursive(
    st.none()
    | st.booleans()
    | numbers
    | texts
    | st.sampled_from(["ok", "crashed", "{}", "[" * 100_000, "NaN"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=5,
)
replies = st.dictionaries(st.sampled_from(FIELDS), values) | st.dictionaries(
    texts, values, max_size=3
)


def require_sound(result: Result, tool: Tool) -> None:
    """Types, sizes and ranges; and what is sent and stored of it."""
    low, high = tool.reward_range
    assert isinstance(result.status, Status)
    assert len(result.output.encode("utf-8", "surrogatepass")) <= OUTPUT_BYTES + CUT_MARK_BYTES
    assert len(result.error.encode("utf-8", "surrogatepass")) <= MOST_ERROR_BYTES
    assert len(result.data_json.encode("utf-8", "surrogatepass")) <= MOST_DATA_BYTES
    assert result.reward is None or (math.isfinite(result.reward) and low <= result.reward <= high)
    if result.data_json:
        json.loads(result.data_json)
    if result.invalid is not None:
        assert all(
            len(each.encode("utf-8", "surrogatepass")) <= MOST_ERROR_BYTES
            for each in result.invalid
        )
    if tool.runs_code:
        assert (result.reward, result.done, result.data_json, result.invalid) == (
            None,
            False,
            "",
            None,
        )
    convert.result_message(result).SerializeToString()


@given(reply=replies, tool=st.sampled_from(TOOLS))
def test_whatever_a_sandbox_answers_is_a_sound_result(reply: dict[str, Any], tool: Tool) -> None:
    require_sound(result_of(reply, tool, OUTPUT_BYTES), tool)


@given(
    value=values | replies,
    tool=st.sampled_from([STATELESS, REWARD, PYTHON_TESTS]),
    cut_at=st.integers(0, 50),
)
def test_whatever_a_function_answers_is_a_sound_result(value: Any, tool: Tool, cut_at: int) -> None:
    body = json.dumps(value).encode()
    for each in (body, body[:cut_at], body[cut_at:]):
        require_sound(result_of_function(Reply(each, "application/json"), tool, OUTPUT_BYTES), tool)


@given(
    body=st.binary(max_size=200), content_type=st.sampled_from(["application/json", "text/plain"])
)
def test_bytes_that_are_nothing_are_a_sound_result(body: bytes, content_type: str) -> None:
    require_sound(result_of_function(Reply(body, content_type), REWARD, OUTPUT_BYTES), REWARD)


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("status", "fine", "status must be one of ok"),
        ("status", ["ok"], "status must be one of ok"),
        ("output", 1, "output must be text"),
        ("reward", "abc", "reward must be a number"),
        ("reward", True, "reward must be a number"),
        ("reward", 10**500, "reward must be finite"),
        ("reward", math.nan, "reward must be finite"),
        ("reward", 1.5, "reward must be from 0 to 1, is 1.5"),
        ("done", 1, "done must be true or false"),
        ("data_json", "{", "data_json must be JSON"),
        ("data_json", "NaN", "data_json must be JSON"),
        ("data_json", "[" * 100_000, "data_json must be JSON"),
        ("data_json", '"' + "x" * MOST_DATA_BYTES + '"', "data_json must have at most"),
        ("invalid", ["x"], "invalid must be an argument's name and what is wrong with it"),
        ("retry_after_s", "soon", "retry_after_s must be a number"),
    ],
)
def test_a_field_that_is_wrong_is_named(field: str, value: Any, says: str) -> None:
    result = result_of({"status": "ok", "alive": True, field: value}, FROZEN_LAKE, OUTPUT_BYTES)
    assert result.status is Status.CRASHED
    assert result.error.startswith(f"the tool's answer is not valid: {says}")
    assert result.alive, "the environment goes on"


def test_long_texts_are_cut() -> None:
    refusal = ["n" * 10_000, "w" * 10_000]
    reply = {
        "status": "tool_error",
        "output": "é" * 10_000,
        "error": "e" * 10_000,
        "invalid": refusal,
    }
    result = result_of(reply, STATELESS, OUTPUT_BYTES)
    assert result.invalid is not None
    assert [len(each) for each in result.invalid] == [MOST_NAME_BYTES, MOST_ERROR_BYTES]
    assert (len(result.error), result.output) == (
        MOST_ERROR_BYTES,
        "é" * ((OUTPUT_BYTES + CUT_MARK_BYTES) // 2),
    )


def test_a_tool_without_a_provider_has_nobody_who_could_be_left_alone() -> None:
    """A refusal of its provider is an error of the tool, and a caller is not told to wait."""
    asks = {"status": "ok", "retry_after_s": 5.0}
    without = result_of(asks, STATELESS, OUTPUT_BYTES)
    with_one = result_of(asks, replace(STATELESS, provider="p"), OUTPUT_BYTES)
    assert (without.status, without.refused_s) == (Status.TOOL_ERROR, None)
    assert (with_one.status, with_one.refused_s) == (Status.TOOL_ERROR, 5.0)
