"""Requests through one gateway: what is refused, copies, stop strings."""

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
from support.fake_chat import tokens_of
from support.fake_sglang import expected
from support.gateway import GREEDY, MODEL, PROMPT, FrontDoor, ask, chat_door
from support.scheduler import scheduler_client
from treadle.client import CALL_TOKENS
from treadle.scheduler.v1 import scheduler_pb2 as pb

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared_door(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[FrontDoor]:
    async with chat_door(tmp_path_factory.mktemp("door")) as door:
        yield door


@pytest.fixture
def door(shared_door: FrontDoor) -> FrontDoor:
    """One whose engines sample what they do by themselves."""
    shared_door.script([])
    return shared_door


async def test_a_stream_never_sends_a_part_of_a_stop_string(door: FrontDoor) -> None:
    """The last token of the stop string has more text behind it."""
    door.script([*tokens_of("one "), 500, *tokens_of("two")])  # its text is <500>
    body = {"model": MODEL, "prompt": "Count", "max_tokens": 30, "stop": ["<5"]}
    whole = (await door.post("/v1/completions", body))["choices"][0]
    assert (whole["text"], whole["finish_reason"], whole["matched_stop"]) == ("one ", "stop", "<5")
    choices = [event["choices"][0] for event in await door.stream("/v1/completions", body)]
    assert (
        "".join(each["text"] for each in choices) == "one "
        and choices[-1]["finish_reason"] == "stop"
    )
    sampling = {"max_new_tokens": 30, "stop": ["<5"]}
    texts = [
        event["text"] for event in await door.stream("/generate", ask(sampling_params=sampling))
    ]
    assert "".join(texts) == "one "


async def test_a_stream_with_tools_has_the_reasoning_of_the_whole_answer(door: FrontDoor) -> None:
    door.script(tokens_of('<think>I multiply</think> Well: call multiply {"a": 6};'))
    tool = {
        "type": "function",
        "function": {"name": "multiply", "parameters": {"type": "object", "properties": {}}},
    }
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "6 * 7?"}],
        "tools": [tool],
        "max_tokens": 90,
    }
    whole = (await door.post("/v1/chat/completions", body))["choices"][0]["message"]
    deltas = [
        event["choices"][0]["delta"] for event in await door.stream("/v1/chat/completions", body)
    ]
    assert whole["reasoning_content"] == "I multiply"
    for name in ("reasoning_content", "content"):
        assert "".join(delta.get(name) or "" for delta in deltas) == whole[name]


async def test_what_the_mesh_does_not_carry_is_not_left_out(door: FrontDoor) -> None:
    answer = await door.post("/generate", ask(return_prompt_token_ids=True))
    assert answer["prompt_token_ids"] == PROMPT and answer["meta_info"]["trajectory_id"]
    for more in ({"logprob_start_len": 0}, {"return_text_in_logprobs": True}):
        await door.post("/generate", ask(rid="whole", **more))
        sent = [
            each
            for engine in door.engines.values()
            for each in engine.requests
            if each.get("rid") == "whole"
        ]
        assert [each[name] for each in sent for name in more] == list(more.values())
        for engine in door.engines.values():
            engine.requests.clear()
    answer = await door.post("/generate", ask(logprob_start_len=0, return_logprob=False))
    assert answer["meta_info"]["trajectory_id"]


BAD: list[tuple[str, dict[str, Any], str]] = [
    ("/generate", {"sampling_params": GREEDY}, "input_ids"),
    ("/generate", {"input_ids": [], "sampling_params": GREEDY}, "input_ids"),
    ("/generate", {"input_ids": ["a"], "sampling_params": GREEDY}, "input_ids"),
    ("/generate", ask(sampling_params={"max_new_tokens": -1}), "max_new_tokens"),
    ("/generate", ask(sampling_params={"top_p": 2.0}), "top_p"),
    ("/generate", ask(sampling_params=GREEDY | {"stop": 5}), "stop"),
    ("/generate", ask(sampling_params=GREEDY | {"stop_token_ids": 5}), "stop_token_ids"),
    ("/generate", ask(rid=5), "rid"),
    ("/generate", ask(rid=[5]), "rid"),
    ("/generate", ask(rid={"a": 1}, return_routed_experts=True), "rid"),
    ("/generate", ask(rid=[5], return_routed_experts=True), "rid"),
    # Lists for several prompts, of which SGLang reads others as they come, or dies.
    *(("/generate", ask() | {name: [1]}, name) for name in ("top_logprobs_num", "return_logprob")),
    *(("/generate", ask() | {name: ["a"]}, name) for name in ("rid", "cache_salt", "extra_key")),
    *(
        ("/generate", ask() | {"input_ids": [PROMPT, PROMPT], name: value}, name)
        for name, value in (
            *(("return_logprob", []), ("logprob_start_len", [0]), ("top_logprobs_num", [0] * 3)),
            *(("token_ids_logprob", [[5]]), ("rid", ["a", "a"]), ("cache_salt", ["a"])),
            ("sampling_params", [{"n": 2}, {"n": 1}]),
        )
    ),
    ("/generate", {"input_ids": PROMPT, "text": "a"}, "text"),
    ("/generate", {"text": ["a", ""]}, "text[1]"),
    ("/generate", ask(sampling_params={"stop_regex": "("}), "stop_regex"),
    ("/generate", ask(sampling_params={"max_new_tokens": 10**6}), "max_new_tokens"),
    ("/generate", ask([5, 1_000_000]), "input_ids"),
    ("/generate", ask(custom_labels={"a": "b"}), "custom_labels"),
    ("/generate", ask(positional_embed_overrides=0), "positional_embed_overrides"),
    ("/generate", ask(watermark=[]), "watermark"),
    ("/pause_generation", {"mode": ["a"]}, "mode"),
    ("/v1/completions", {"prompt": PROMPT, "seed": []}, "seed"),
    ("/v1/completions", {"prompt": PROMPT, "ignore_eos": "maybe"}, "ignore_eos"),
    ("/v1/completions", {"prompt": PROMPT, "stop": ""}, "stop"),
    ("/v1/completions", {"prompt": PROMPT, "max_tokens": 10**6}, "max_tokens"),
    ("/v1/completions", {"prompt": [PROMPT, [-1]]}, "prompt[1]"),
    ("/v1/completions", {"prompt": PROMPT, "min_tokens": 3, "max_tokens": 2}, "min_tokens"),
    ("/v1/chat/completions", {"messages": 5}, "messages"),
    (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": "a"}], "max_completion_tokens": 10**6},
        "max_completion_tokens",
    ),
    (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": "a"}], "input_ids": []},
        "input_ids",
    ),
    ("/v1/responses", {"input": [{"type": "reasoning"}]}, "input"),
    ("/inference/v1/generate", {"token_ids": [5, 1_000_000]}, "token_ids"),
    ("/detokenize", {"tokens": [-1]}, "tokens"),
    ("/detokenize", {"tokens": [[5], [2**63]]}, "tokens"),
    ("/inference/v1/generate", {"token_ids": [1], "sampling_params": {"stop": 5}}, "stop"),
    (
        "/inference/v1/generate",
        {"token_ids": [1], "sampling_params": {"stop_token_ids": 5}},
        "stop_token_ids",
    ),
    ("/v1/completions", {"prompt": "a", "max_tokens": 0}, "max_tokens"),
    ("/v1/completions", {"prompt": "a", "stop_token_ids": ["b"]}, "stop_token_ids"),
    (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": "a"}], "input_ids": "abc"},
        "input_ids",
    ),
    (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": "a"}], "input_ids": [1.5]},
        "input_ids",
    ),
    (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": "a"}], "input_ids": 5},
        "input_ids",
    ),
    ("/v1/responses", {"input": "a", "text": "b"}, "text"),
    ("/v1/responses", {"input": "a", "text": {"format": "b"}}, "text"),
    ("/v1/responses", {"input": "a", "reasoning": "b"}, "reasoning"),
    ("/v1/responses", {"input": "a", "tools": 5}, "tools"),
    ("/v1/responses", {"input": "a", "previous_response_id": ["b"]}, "previous_response_id"),
    ("/v1/responses", {"input": "a", "max_output_tokens": 0}, "max"),
]


async def test_values_of_the_wrong_kind_are_refused_and_the_field_named(door: FrontDoor) -> None:
    for path, body, field in BAD:
        async with door.http.post(f"{door.url}{path}", json=body) as response:
            text = await response.text()
        assert response.status == 400, (path, body, text)
        assert field in json.loads(text)["error"]["message"]
    assert (await door.post("/abort_request", {"rid": "nobody"}))["aborted"] == 0


async def test_tokens_are_limited_as_the_servers_of_each_form_limit_them(door: FrontDoor) -> None:
    longest = (await door.get("/v1/models"))["data"][0]["max_model_len"]
    room = longest - len(PROMPT)
    assert room > CALL_TOKENS
    for path, body, limit in (
        ("/v1/completions", {"prompt": PROMPT}, 16),
        ("/v1/completions", {"prompt": PROMPT, "max_tokens": None}, 16),
        ("/generate", {"input_ids": PROMPT}, 128),
        ("/generate", {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": None}}, room),
        ("/inference/v1/generate", {"token_ids": PROMPT, "sampling_params": {}}, room),
        (
            "/inference/v1/generate",
            {"token_ids": PROMPT, "sampling_params": {"max_tokens": longest}},
            room,
        ),
    ):
        for engine in door.engines.values():
            engine.requests.clear()
            engine.script = [1]
        await door.post(path, body)
        sent = [each for engine in door.engines.values() for each in engine.requests]
        params = [each["sampling_params"] for each in sent if each["input_ids"] == PROMPT]
        # The mesh asks an engine for so many tokens at a time.
        assert [each["max_new_tokens"] for each in params] == [min(limit, CALL_TOKENS)], (
            path,
            body,
        )


@pytest.mark.parametrize(
    "path",
    [
        "/generate",
        "/v1/completions",
        "/v1/chat/completions",
        "/v1/responses",
        "/inference/v1/generate",
    ],
)
async def test_a_prompt_longer_than_the_context_is_refused_in_the_words_that_agents_read(
    door: FrontDoor, path: str
) -> None:
    longest = (await door.get("/v1/models"))["data"][0]["max_model_len"]
    prompt = [65] * longest
    text = "A" * longest
    bodies: dict[str, dict[str, Any]] = {
        "/generate": {"input_ids": prompt},
        "/v1/completions": {"prompt": prompt},
        "/v1/chat/completions": {"messages": [{"role": "user", "content": text}]},
        "/v1/responses": {"input": text},
        "/inference/v1/generate": {"token_ids": prompt},
    }
    for more in ({}, {"stream": True}):
        if more and path.startswith("/inference"):
            continue
        answer = await door.post(path, bodies[path] | more, status=400)
        assert "maximum context length" in answer["error"]["message"]
        assert answer["error"]["code"] == "context_length_exceeded"


async def test_each_copy_of_a_seeded_request_has_a_seed_of_its_own(door: FrontDoor) -> None:
    """One seed makes equal samples. Result: each copy adds its number to the seed."""
    for path, body in (
        ("/generate", {"input_ids": PROMPT, "sampling_params": {"n": 3, "sampling_seed": 7}}),
        ("/v1/completions", {"prompt": PROMPT, "n": 3, "seed": 7, "max_tokens": 5}),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "a"}], "n": 3, "seed": 7, "max_tokens": 5},
        ),
        (
            "/inference/v1/generate",
            {"token_ids": PROMPT, "sampling_params": {"n": 3, "seed": 7, "max_tokens": 5}},
        ),
    ):
        for engine in door.engines.values():
            engine.requests.clear()
        await door.post(path, body)
        sent = [each for engine in door.engines.values() for each in engine.requests]
        params = [each["sampling_params"] for each in sent if "input_ids" in each]
        seeds = [each["sampling_seed"] for each in params if each.get("sampling_seed") is not None]
        assert sorted(seeds) == [7, 8, 9], path


async def test_copies_of_a_session_go_on_each_by_itself_and_end_with_it(door: FrontDoor) -> None:
    body = ask(sampling_params={"max_new_tokens": 12, "n": 2})
    first = await door.post("/generate", body, X_Session_ID="s")
    follow = [PROMPT + each["output_ids"] + [7 + at] for at, each in enumerate(first)]
    second = [await door.post("/generate", ask(prompt), X_Session_ID="s") for prompt in follow]
    names = {each["meta_info"]["trajectory_id"] for each in first}
    assert {each["meta_info"]["trajectory_id"] for each in second} == names and len(names) == 2
    for path, more in (
        ("/v1/completions", {"prompt": PROMPT, "max_tokens": 5, "n": 2}),
        (
            "/inference/v1/generate",
            {"token_ids": PROMPT, "sampling_params": {"max_tokens": 5, "n": 2}},
        ),
    ):
        await door.post(path, {"model": MODEL, **more}, X_Session_ID="s")
    async with door.http.delete(f"{door.url}/sessions/s") as closed:
        assert await closed.json() == {"closed": 6}


async def test_a_trajectory_that_the_scheduler_has_closed_is_followed_by_a_new_one(
    door: FrontDoor,
) -> None:
    first = await door.post("/generate", ask(), X_Session_ID="s")
    name = first["meta_info"]["trajectory_id"]
    async with scheduler_client(door.scheduler) as calls:
        request = pb.CloseTrajectoryRequest(
            request_id="c", trajectory_id=name, outcome=pb.OUTCOME_CANCELLED
        )
        await calls.call("CloseTrajectory", request)
    context = PROMPT + first["output_ids"]
    second = await door.post("/generate", ask([*context, 7]), X_Session_ID="s")
    assert second["output_ids"] == expected([*context, 7], 12)
    assert second["meta_info"].get("trajectory_id") not in (None, name)
