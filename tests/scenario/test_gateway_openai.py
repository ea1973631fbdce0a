"""OpenAI's HTTP surface in front of the mesh: chats, completions and responses, whole and as
streams."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from support.fake_chat import render, text_of, tokens_of
from support.fake_sglang import END_TOKEN, expected
from support.gateway import MODEL, FrontDoor, chat_door, front_door
from treadle_cli.certs import make_certificates

pytestmark = pytest.mark.asyncio(loop_scope="module")

KEY = "correct-horse-battery-staple"
USER = {"role": "user", "content": "What is 6 * 7?"}
TOOL = {
    "type": "function",
    "function": {"name": "multiply", "parameters": {"type": "object", "properties": {}}},
}
CALLING = '<think>I multiply</think> Well: call multiply {"a": 6, "b": 7};'


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared_door(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[FrontDoor]:
    async with chat_door(tmp_path_factory.mktemp("door")) as door:
        yield door


@pytest.fixture
def door(shared_door: FrontDoor) -> FrontDoor:
    """One whose engines sample what they do by themselves."""
    shared_door.script([])
    return shared_door


def say(door: FrontDoor, text: str) -> list[int]:
    """What all engines sample from now on; returns its tokens, with the one that ends it."""
    tokens = tokens_of(text)
    door.script(tokens)
    return [*tokens, END_TOKEN]


def chat(messages: list[Any], **more: Any) -> dict[str, Any]:
    """A body of /v1/chat/completions."""
    return {
        "model": MODEL,
        "messages": messages,
        "max_tokens": 100,
        "return_token_ids": True,
        **more,
    }


async def test_in_a_session_what_was_sampled_keeps_its_token_ids_though_the_template_changes_the_text(
    door: FrontDoor,
) -> None:
    sampled = say(door, "  It is 42.  ")
    first = (await door.post("/v1/chat/completions", chat([USER]), X_Session_ID="s"))["choices"][0]
    assert first["message"]["content"] == "It is 42." and first["finish_reason"] == "stop"
    assert (
        first["prompt_token_ids"] == tokens_of(render({"messages": [USER]}))
        and first["token_ids"] == sampled
    )
    said = {"role": "assistant", "content": "  It is 42.  "}
    follow = [USER, said, {"role": "user", "content": "Sure?"}]
    again = await door.post("/v1/chat/completions", chat(follow), X_Session_ID="s")
    # This template strips texts, so the tokens of the whole text differ: a new trajectory with the
    # text as it is.
    assert again["choices"][0]["prompt_token_ids"] == tokens_of(render({"messages": follow}))


async def test_a_turn_goes_on_from_the_tokens_of_the_one_before(door: FrontDoor) -> None:
    for engine in door.engines.values():
        engine.script = [*tokens_of("4"), 500, *tokens_of("2")]
    first = (
        await door.post("/v1/chat/completions", chat([USER], no_stop_trim=True), X_Session_ID="s")
    )["choices"][0]
    assert first["token_ids"] == [*tokens_of("4"), 500, *tokens_of("2"), END_TOKEN]
    said = {"role": "assistant", "content": text_of(first["token_ids"])}
    follow = [USER, said, {"role": "user", "content": "Sure?"}]
    again = await door.post("/v1/chat/completions", chat(follow), X_Session_ID="s")
    prompt = again["choices"][0]["prompt_token_ids"]
    assert prompt[: len(first["prompt_token_ids"])] == first["prompt_token_ids"]
    assert prompt[len(first["prompt_token_ids"]) :][: len(first["token_ids"])] == first["token_ids"]
    assert text_of(prompt) == render({"messages": follow})


async def test_a_chat_has_reasoning_and_tool_calls_in_their_fields_also_as_a_stream(
    door: FrontDoor,
) -> None:
    sampled = say(door, CALLING)
    whole = await door.post("/v1/chat/completions", chat([USER], tools=[TOOL], logprobs=True))
    [choice] = whole["choices"]
    assert choice["finish_reason"] == "tool_calls" and choice["message"]["content"] == "Well:"
    assert choice["message"]["reasoning_content"] == "I multiply"
    [call] = choice["message"]["tool_calls"]
    assert call["function"] == {"name": "multiply", "arguments": '{"a": 6, "b": 7}'}
    assert len(choice["logprobs"]["content"]) == len(sampled) == whole["usage"]["completion_tokens"]
    events = await door.stream("/v1/chat/completions", chat([USER], tools=[TOOL]))
    deltas = [event["choices"][0] for event in events]
    assert "".join(each["delta"].get("content") or "" for each in deltas) == "Well:"
    assert [
        each["delta"]["tool_calls"][0]["function"]
        for each in deltas
        if "tool_calls" in each["delta"]
    ] == [call["function"]]
    assert [token for each in deltas for token in each.get("token_ids", ())] == sampled
    assert deltas[-1]["finish_reason"] == "tool_calls"


@pytest.mark.parametrize("more", [{}, {"tools": [TOOL]}, {"stream_reasoning": False}])
@pytest.mark.parametrize(
    ("text", "kwargs", "reasoning"),
    [
        (CALLING, {}, "I multiply"),
        ("I multiply, since six and seven are numbers</think> Well: 42", {}, ""),
        (
            "I multiply, since six and seven are numbers</think> Well: 42",
            {"enable_thinking": True},
            "I multiply, since six and seven are numbers",
        ),
        ("<think>I multiply for ever and ever, without an end", {}, "I multiply for ever"),
    ],
)
async def test_a_streamed_chat_says_what_a_whole_one_says(
    door: FrontDoor, text: str, kwargs: dict[str, Any], reasoning: str, more: dict[str, Any]
) -> None:
    """Reasoning begins in the answer or in the prompt, and may have no end."""
    say(door, text)
    body = chat([USER], chat_template_kwargs=kwargs, logprobs=True, **more)
    whole = (await door.post("/v1/chat/completions", body))["choices"][0]
    assert (whole["message"]["reasoning_content"] or "").startswith(reasoning)
    assert bool(whole["message"]["reasoning_content"]) == bool(reasoning)
    assert_same(whole, await door.stream("/v1/chat/completions", body))
    as_it_is = body | {"separate_reasoning": False, "tools": None}
    whole = (await door.post("/v1/chat/completions", as_it_is))["choices"][0]
    assert whole["message"]["content"] == text and not whole["message"]["reasoning_content"]
    assert_same(whole, await door.stream("/v1/chat/completions", as_it_is))


def assert_same(whole: dict[str, Any], events: list[dict[str, Any]], at: int = 0) -> None:
    """A streamed choice of a chat has what a whole one has."""
    choices = [each for event in events for each in event["choices"] if each["index"] == at]
    message, deltas = whole["message"], [each["delta"] for each in choices]
    for name in ("content", "reasoning_content"):
        assert "".join(delta.get(name) or "" for delta in deltas) == (message[name] or ""), name
    calls = [call for delta in deltas for call in delta.get("tool_calls") or ()]
    assert [call["function"] for call in calls] == [
        call["function"] for call in message["tool_calls"] or ()
    ]
    logprobs = [each for one in choices for each in (one.get("logprobs") or {}).get("content", ())]
    assert logprobs == whole["logprobs"]["content"]
    assert [token for each in choices for token in each.get("token_ids", ())] == whole["token_ids"]
    assert choices[0]["prompt_token_ids"] == whole["prompt_token_ids"]
    assert choices[-1]["finish_reason"] == whole["finish_reason"]


async def test_reasoning_is_streamed_while_it_comes(door: FrontDoor) -> None:
    """Also beside tools, whose calls are known at the end."""
    say(door, f"<think>{'I multiply. ' * 60}</think> Well")
    events = await door.stream("/v1/chat/completions", chat([USER], tools=[TOOL], max_tokens=900))
    assert sum("reasoning_content" in event["choices"][0]["delta"] for event in events) > 3


async def test_each_copy_of_a_stream_is_that_of_the_whole_answer(door: FrontDoor) -> None:
    say(door, CALLING)
    body = chat([USER], n=3, tools=[TOOL], logprobs=True)
    body["stream_options"] = {"include_usage": True, "continuous_usage_stats": True}
    whole = await door.post("/v1/chat/completions", body)
    events = await door.stream("/v1/chat/completions", body)
    for at, choice in enumerate(whole["choices"]):
        assert choice["index"] == at and choice["finish_reason"] == "tool_calls"
        assert_same(choice, events, at)
    usages = [event["usage"] for event in events if "usage" in event]
    assert usages[-1]["completion_tokens"] == whole["usage"]["completion_tokens"]
    assert usages[-1]["prompt_tokens"] == usages[0]["prompt_tokens"]
    prompts = {"model": MODEL, "prompt": ["ab", "cd"], "n": 2, "max_tokens": 5}
    texts = [each["text"] for each in (await door.post("/v1/completions", prompts))["choices"]]
    pieces = ["", "", "", ""]
    for event in await door.stream("/v1/completions", prompts):
        [choice] = event["choices"]
        pieces[choice["index"]] += choice["text"]
    assert pieces == texts


async def test_a_response_streams_the_items_of_the_whole_one(door: FrontDoor) -> None:
    say(door, CALLING)
    function = {"type": "function", "name": "multiply", "parameters": {"type": "object"}}
    for tools in ([], [function]):
        body = {"model": MODEL, "input": [USER], "tools": tools}
        whole = (await door.post("/v1/responses", body))["output"]
        events = await door.stream("/v1/responses", body)
        streamed = events[-1]["response"]["output"]
        done = [each for each in events if each["type"] == "response.output_item.done"]
        assert [each["item"] for each in done] == streamed
        assert [each["output_index"] for each in done] == list(range(len(streamed)))
        for item in (*whole, *streamed):
            del item["id"]
            item.pop("call_id", None)
        assert streamed == whole
        deltas = [each["delta"] for each in events if each["type"] == "response.output_text.delta"]
        assert "".join(deltas) == whole[1]["content"][0]["text"]


async def test_an_answer_that_was_cut_short_says_so_though_it_calls_a_tool(door: FrontDoor) -> None:
    say(door, f"{CALLING} And then")
    limit = len(tokens_of(CALLING)) + 2
    body = chat([USER], tools=[TOOL], max_tokens=limit, logprobs=True)
    [whole] = (await door.post("/v1/chat/completions", body))["choices"]
    assert whole["message"]["tool_calls"] and whole["finish_reason"] == "length"
    assert_same(whole, await door.stream("/v1/chat/completions", body))


async def test_logprobs_name_tokens_by_their_text_or_where_asked_by_their_id(
    door: FrontDoor,
) -> None:
    say(door, "Hi")
    body = chat([USER], logprobs=True)
    [choice] = (await door.post("/v1/chat/completions", body))["choices"]
    assert [(each["token"], each["bytes"]) for each in choice["logprobs"]["content"]][:2] == [
        ("H", [72]),
        ("i", [105]),
    ]
    by_id = body | {"return_tokens_as_token_ids": True}
    [choice] = (await door.post("/v1/chat/completions", by_id))["choices"]
    names = [each["token"] for each in choice["logprobs"]["content"]]
    assert names == ["token_id:72", "token_id:105", f"token_id:{END_TOKEN}"]


async def test_a_text_that_keeps_its_stop_string_ends_with_it(door: FrontDoor) -> None:
    """Also where the last token has more text."""
    say(door, "one <500>two")
    body = {"model": MODEL, "prompt": "Count", "max_tokens": 30, "stop": ["<5"]}
    body["no_stop_trim"] = True
    [whole] = (await door.post("/v1/completions", body))["choices"]
    assert (whole["text"], whole["matched_stop"]) == ("one <5", "<5")
    pieces = [event["choices"][0]["text"] for event in await door.stream("/v1/completions", body)]
    assert "".join(pieces) == "one <5"


async def test_a_stream_has_the_text_tokens_and_usage_of_the_whole_answer(door: FrontDoor) -> None:
    body = {
        "model": MODEL,
        "prompt": "Once",
        "max_tokens": 30,
        "return_token_ids": True,
        "logprobs": 0,
    }
    whole = await door.post("/v1/completions", body)
    [choice] = whole["choices"]
    assert (
        choice["token_ids"] == expected(tokens_of("Once"), 30)
        and choice["finish_reason"] == "length"
    )
    assert choice["text"] == text_of(choice["token_ids"])
    events = await door.stream(
        "/v1/completions", body | {"stream_options": {"include_usage": True}}
    )
    choices = [each for event in events for each in event["choices"]]
    assert "".join(each["text"] for each in choices) == choice["text"]
    assert [token for each in choices for token in each["token_ids"]] == choice["token_ids"]
    assert [each for one in choices for each in one["logprobs"]["token_logprobs"]] == choice[
        "logprobs"
    ]["token_logprobs"]
    assert (
        events[-1]["usage"]["completion_tokens"] == 30 and choices[-1]["finish_reason"] == "length"
    )


async def test_a_stop_string_is_never_sent_and_ends_the_text(door: FrontDoor) -> None:
    for engine in door.engines.values():
        engine.script = tokens_of("one two STOP three")
    body = {"model": MODEL, "prompt": "Count", "max_tokens": 30, "stop": ["STOP"]}
    choices = [event["choices"][0] for event in await door.stream("/v1/completions", body)]
    assert "".join(each["text"] for each in choices) == "one two "
    assert (choices[-1]["finish_reason"], choices[-1]["matched_stop"]) == ("stop", "STOP")


async def test_copies_of_a_prompt_are_answered_one_by_one(door: FrontDoor) -> None:
    answer = await door.post(
        "/v1/completions", {"model": MODEL, "prompt": ["ab", "cd"], "n": 2, "max_tokens": 5}
    )
    assert [each["index"] for each in answer["choices"]] == [0, 1, 2, 3]
    texts = [each["text"] for each in answer["choices"]]
    assert texts == [text_of(expected(tokens_of(prompt), 5)) for prompt in ("ab", "ab", "cd", "cd")]


async def test_a_response_calls_a_function_and_goes_on_with_its_output(door: FrontDoor) -> None:
    sampled = say(door, CALLING)
    tool = {
        "type": "function",
        "name": "multiply",
        "parameters": {"type": "object", "properties": {}},
    }
    asked = {
        "model": MODEL,
        "instructions": "Be brief.",
        "input": "What is 6 * 7?",
        "tools": [tool],
    }
    first = await door.post("/v1/responses", asked | {"return_token_ids": True})
    assert (
        first["status"] == "completed"
        and first["object"] == "response"
        and first["tools"] == [tool]
    )
    kinds = [item["type"] for item in first["output"]]
    assert kinds == ["reasoning", "message", "function_call"] and first["token_ids"] == sampled
    call = first["output"][2]
    assert (call["name"], call["arguments"]) == ("multiply", '{"a": 6, "b": 7}')
    say(door, "42")
    output = {"type": "function_call_output", "call_id": call["call_id"], "output": "42"}
    by_id = asked | {
        "previous_response_id": first["id"],
        "input": [output],
        "return_token_ids": True,
    }
    second = await door.post("/v1/responses", by_id)
    assert second["output"][0]["content"][0]["text"] == "42"
    by_items = asked | {"input": [USER, *first["output"], output], "return_token_ids": True}
    assert text_of((await door.post("/v1/responses", by_items))["prompt_token_ids"]).endswith(
        "[tool]42[assistant]"
    )
    assert text_of(second["prompt_token_ids"]).endswith("[tool]42[assistant]")


async def test_the_events_of_a_response_are_those_of_openai_in_their_order(door: FrontDoor) -> None:
    say(door, "It is 42.")
    events = await door.stream(
        "/v1/responses", {"model": MODEL, "input": [USER], "temperature": 0.5}
    )
    kinds = [event["type"] for event in events]
    deltas = kinds.count("response.output_text.delta")
    assert kinds == [
        *(
            "response.created",
            "response.in_progress",
            "response.output_item.added",
            "response.content_part.added",
        ),
        *["response.output_text.delta"] * deltas,
        *("response.output_text.done", "response.content_part.done", "response.output_item.done"),
        "response.completed",
    ]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert (
        "".join(each["delta"] for each in events if each["type"] == "response.output_text.delta")
        == "It is 42."
    )
    last = events[-1]["response"]
    assert last["output"][0]["content"][0]["text"] == "It is 42." and last["temperature"] == 0.5
    assert last["usage"]["output_tokens"] == len(tokens_of("It is 42.")) + 1


@pytest.mark.parametrize(
    ("path", "body", "status", "field"),
    [
        ("/v1/chat/completions", {"messages": []}, 400, "messages"),
        ("/v1/chat/completions", chat([USER], n=0), 400, "n:"),
        ("/v1/chat/completions", chat([USER], max_tokens=-1), 400, "max_tokens"),
        ("/v1/completions", {"prompt": [[]]}, 400, "prompt"),
        ("/v1/completions", {"prompt": "a", "temperature": "hot"}, 400, "temperature"),
        ("/v1/responses", {"input": []}, 400, "input"),
        ("/v1/responses", {"input": [{"type": "item_reference", "id": "x"}]}, 400, "input[0].type"),
        ("/v1/responses", {"input": "a", "tools": [{"type": "web_search"}]}, 400, "tools[0]"),
        (
            "/v1/responses",
            {"input": "a", "previous_response_id": "resp_0"},
            404,
            "previous_response_id",
        ),
        ("/v1/responses", {"input": "a", "conversation": "c"}, 400, "conversation"),
    ],
)
async def test_a_bad_request_is_refused_and_the_field_named(
    door: FrontDoor, path: str, body: dict[str, Any], status: int, field: str
) -> None:
    answer = await door.post(path, body, status=status)
    assert field in answer["error"]["message"]


async def test_with_certificates_it_speaks_https_and_with_a_key_it_answers_who_has_it(
    tmp_path: Path,
) -> None:
    certificates = make_certificates(tmp_path / "certificates")
    async with front_door(tmp_path, certificates=certificates, api_key=KEY) as door:
        assert door.url.startswith("https://")
        body = {
            "input_ids": [5, 6, 7],
            "sampling_params": {"max_new_tokens": 4, "temperature": 0.0},
        }
        for refused in ({}, {"Authorization": "Bearer other"}):
            answer = await door.post("/generate", body, 401, **refused)
            assert "Authorization" in answer["error"]["message"]
        answer = await door.post("/generate", body, Authorization=f"Bearer {KEY}")
        assert (
            answer["output_ids"] == expected([5, 6, 7], 4) and answer["meta_info"]["trajectory_id"]
        )
