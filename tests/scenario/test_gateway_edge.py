"""What a stranger sends to a gateway: other hosts, pages, methods and sizes."""

import asyncio
import io
import json
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest
import pytest_asyncio
from support.conditions import until
from support.fake_sglang import expected
from support.gateway import GREEDY, MODEL, PROMPT, FrontDoor, ask, chat_door
from treadle_gateway import calls, order
from treadle_gateway.http import openai_api

pytestmark = pytest.mark.asyncio(loop_scope="module")

ONE = {"max_new_tokens": 1, "temperature": 0.0}
CHANGES: dict[str, dict[str, Any]] = {
    "/pause_generation": {},
    "/abort_request": {"abort_all": True},
    "/update_weights_from_disk": {"model_path": "/evil"},
    "/init_weights_update_group": {"master_address": "evil.example", "world_size": 3},
    "/flush_cache": {},
    "/reset_prefix_cache": {},
    "/release_memory_occupation": {},
    "/resume_memory_occupation": {},
    "/sleep": {},
    "/wake_up": {},
    "/generate": ask(),
}
COMPLETION = {"model": MODEL, "prompt": PROMPT, "max_tokens": 1}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def door(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[FrontDoor]:
    async with chat_door(tmp_path_factory.mktemp("door")) as door:
        yield door


def called(door: FrontDoor) -> list[Any]:
    return [(list(engine.called), engine.steps) for engine in door.engines.values()]


async def test_what_a_page_can_send_without_asking_changes_nothing(door: FrontDoor) -> None:
    """And each refusal says what would be right."""
    before = called(door)
    foreign = {"Origin": "https://evil.example"}
    for path, body in CHANGES.items():
        for place in (path, f"/engines/e0{path}"):
            for status, word, headers in (
                (415, "Content-Type", {"Content-Type": "text/plain"}),
                (415, "Content-Type", {"Content-Type": "application/x-www-form-urlencoded"}),
                (403, "Origin", {"Content-Type": "application/json", **foreign}),
                (
                    403,
                    "Sec-Fetch-Site",
                    {"Content-Type": "application/json", "Sec-Fetch-Site": "same-site"},
                ),
                (400, "Host", {"Content-Type": "application/json", "Host": "rebound.evil.example"}),
            ):
                async with door.http.post(
                    f"{door.url}{place}", data=json.dumps(body), headers=headers
                ) as response:
                    said = (await response.json())["error"]["message"]
                    assert response.status == status and word in said, (place, headers, said)
    assert called(door) == before
    assert not (await door.get("/engines/e0/health"))["paused"]


async def test_what_changes_a_mesh_is_posted(door: FrontDoor) -> None:
    """A GET, which any page may cause, is refused with the method that is right. /flush_cache
    answers slime, which waits with it until the engines run nothing, and flushes nothing."""
    before = called(door)
    for path in CHANGES:
        for place in (path, f"/engines/e0{path}"):
            async with door.http.get(f"{door.url}{place}") as response:
                said = await response.json()
                if path == "/flush_cache":
                    assert response.status == 200 and "POST" in said["message"]
                elif response.status == 404:
                    assert place in said["error"]["message"]
                else:
                    assert response.status == 405 and "use P" in said["error"]["message"], place
    for path in ("weights_checker", "start_profile", "stop_profile", "freeze_gc"):
        async with door.http.get(f"{door.url}/engines/e0/{path}") as response:
            assert response.status == 405
    assert called(door) == before
    await door.post("/flush_cache", {})
    assert called(door) != before


async def test_urls_of_workers_name_no_foreign_host(door: FrontDoor) -> None:
    for host in ("rebound.evil.example", "127.0.0.1@evil.example", "evil.example#127.0.0.1"):
        async with door.http.get(f"{door.url}/workers", headers={"Host": host}) as response:
            assert response.status == 400
            assert "TREADLE_GATEWAY_HTTP_HOSTS" in (await response.json())["error"]["message"]
    port = door.url.rpartition(":")[2]
    async with door.http.get(
        f"{door.url}/workers", headers={"Host": f"localhost:{port}"}
    ) as response:
        assert (await response.json())["urls"][0] == f"http://localhost:{port}/engines/e0"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/generate", {"input_ids": [[5]] * 24, "sampling_params": {"n": 1024}}),
        ("/generate", {"input_ids": [[5]] * 24, "sampling_params": {"n": 1024}, "stream": True}),
        ("/generate", {"text": ["a"] * 300, "sampling_params": [{"n": 1024}] * 300}),
        ("/generate", {"input_ids": [[5]] * 5_000, "sampling_params": ONE}),
        (
            "/generate",
            {
                "input_ids": [[5]] * 24,
                "sampling_params": {"n": 1024},
                "logprob_start_len": 0,
                "return_logprob": True,
            },
        ),
        ("/engines/e0/generate", {"input_ids": [[5]] * 24, "sampling_params": {"n": 1024}}),
        ("/v1/completions", {"model": MODEL, "prompt": ["a"] * 24, "n": 1024}),
        ("/v1/completions", {"model": MODEL, "prompt": [[5]] * 24, "best_of": 1024}),
        ("/v1/completions", {"model": MODEL, "prompt": [[5]] * 5_000, "stream": True}),
    ],
)
async def test_more_answers_than_a_request_may_have_are_refused(
    door: FrontDoor, path: str, body: dict[str, Any]
) -> None:
    before = called(door)
    error = (await door.post(path, body, 400))["error"]["message"]
    assert error.startswith("n: ") and str(order.MOST_ANSWERS) in error
    assert called(door) == before


async def test_a_list_of_no_sampling_is_refused(door: FrontDoor) -> None:
    body = ask() | {"input_ids": [[10, 11], [12, 13]], "sampling_params": []}
    error = (await door.post("/generate", body, 400))["error"]["message"]
    assert error == "sampling_params: must have one entry for each of 2 prompts"


async def test_answers_of_a_large_request_take_turns(
    door: FrontDoor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whole, streamed, and with `n`. Result: no more of them run than may, each is answered, and a
    lone request passes those that wait."""
    monkeypatch.setattr(calls, "AT_ONCE", 2)  # for each of two engines
    monkeypatch.setattr(order, "MOST_ANSWERS", 16)
    for engine in door.engines.values():
        engine.most_running = 0
    prompts = [[number, *PROMPT] for number in range(16)]
    body = {"input_ids": prompts, "sampling_params": ONE}
    answers = await door.post("/generate", body)
    assert [each["output_ids"] for each in answers] == [expected(each, 1) for each in prompts]
    events = await door.stream(
        "/generate", {"input_ids": PROMPT, "sampling_params": ONE | {"n": 8}}
    )
    assert {event["index"] for event in events if event["meta_info"]["finish_reason"]} == set(
        range(8)
    )
    answer = await door.post("/v1/completions", COMPLETION | {"n": 8})
    assert len(answer["choices"]) == 8
    answer = await door.post(
        "/inference/v1/generate",
        {"token_ids": PROMPT, "sampling_params": {"max_tokens": 1, "temperature": 0.0, "n": 8}},
    )
    assert len(answer["choices"]) == 8
    assert 0 < max(engine.most_running for engine in door.engines.values()) <= 4
    for engine in door.engines.values():
        engine.token_s = 0.02
    async with asyncio.TaskGroup() as group:
        # which lasts for longer than a slow machine takes until the abort
        long = GREEDY | {"max_new_tokens": 2000, "ignore_eos": True}
        large = group.create_task(door.post("/generate", body | {"sampling_params": long}))
        await until(lambda: any(engine.running for engine in door.engines.values()))
        assert (await door.post("/generate", ask()))["output_ids"] == expected(PROMPT, 12)
        assert not large.done()
        await door.post("/abort_request", {"abort_all": True})
    found = [each["meta_info"]["finish_reason"]["type"] for each in large.result()]
    assert set(found) == {"abort"}, "those that wait end too"
    for engine in door.engines.values():
        engine.token_s = 0.002


async def test_names_have_a_most_length(door: FrontDoor) -> None:
    """Each is kept, or repeated in each part of an answer."""
    long = "s" * 5_000
    for field, path, body in (
        ("rid", "/generate", ask(rid=long)),
        ("rid", "/generate", ask() | {"input_ids": [[5], [6]], "rid": ["a", long]}),
        ("session_id", "/generate", ask(session_id=long)),
        ("model", "/v1/completions", COMPLETION | {"model": long}),
        (
            "session_id",
            "/v1/completions",
            COMPLETION | {"nvext": {"agent_context": {"trajectory_id": long}}},
        ),
    ):
        error = (await door.post(path, body, 400))["error"]["message"]
        assert field in error and len(error) < 1_000
    error = (await door.post("/generate", ask(), 400, X_Session_ID=long))["error"]["message"]
    assert "x-session-id" in error
    assert (
        len((await door.post("/generate", ask(rid=["a" * 2**19]), 400))["error"]["message"]) < 1_000
    )


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("stop", "a" * 5_000),
        ("stop", ["a", "a" * 5_000]),
        ("stop_token_ids", [1] * 5_000),
        ("stop_regex", "(" * 5_000),
        ("stop_regex", "(" * 900),
        ("stop_regex", ["a", "(a|b)*" * 50_000]),
        ("logit_bias", {"9" * 5_000: 0.5}),
        ("temperature", 10**400),
        ("max_new_tokens", 10**400),
        ("n", 10**400),
    ],
)
async def test_values_that_are_too_long_are_refused_and_the_field_named(
    door: FrontDoor, field: str, value: object
) -> None:
    error = (await door.post("/generate", ask(sampling_params={field: value}), 400))["error"]
    assert field in error["message"] and len(error["message"]) < 2_000


async def test_a_body_too_deep_or_too_long_is_refused_on_every_path(door: FrontDoor) -> None:
    deep = b'{"nvext": ' + b'{"a":' * 100_000
    nested = b'{"input_ids": [5], "nvext": ' + b"[" * 300 + b"]" * 300 + b"}"
    kind = {"Content-Type": "application/json"}
    async with aiohttp.ClientSession() as http:
        for path in (
            "/generate",
            "/v1/chat/completions",
            "/v1/completions",
            "/v1/responses",
            "/inference/v1/generate",
            "/tokenize",
            "/pause_generation",
            "/engines/e0/update_weights_from_disk",
        ):
            for raw in (deep, nested, b"[" * 200_000):
                async with http.post(f"{door.url}{path}", data=raw, headers=kind) as response:
                    assert response.status == 400
                    assert "JSON" in (await response.json())["error"]["message"]
            long = io.BytesIO(b'{"a": "' + b"a" * 17 * 2**20 + b'"}')
            async with http.post(f"{door.url}{path}", data=long, headers=kind) as response:
                assert response.status == 413
                assert "bytes" in (await response.json())["error"]["message"]


async def test_conversations_that_are_remembered_take_no_more_memory_than_they_may(
    door: FrontDoor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(openai_api, "REMEMBERED_BYTES", 70_000)
    said = "a" * 3_000
    ids = []
    for _ in range(3):
        body = {"model": MODEL, "instructions": said, "input": "hi", "max_output_tokens": 1}
        ids.append((await door.post("/v1/responses", body))["id"])
    more = {"model": MODEL, "input": "more", "max_output_tokens": 1}
    await door.post("/v1/responses", more | {"previous_response_id": ids[0]}, 404)
    await door.post("/v1/responses", more | {"previous_response_id": ids[-1]})
