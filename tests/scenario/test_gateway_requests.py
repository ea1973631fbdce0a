"""Requests through a gateway of their own: hang-ups, lost engines and meshes, models' files."""

import asyncio
import json
import signal
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from support.byte_tokens import ids_of, write_byte_tokenizer
from support.conditions import until, until_said
from support.fake_chat import teach_chat, tokens_of, write_tokenizer
from support.fake_sglang import END_TOKEN, FakeSglang, expected
from support.gateway import GREEDY, MODEL, PROMPT, ask, front_door
from treadle_cli.mesh.processes import is_free
from treadle_gateway.text import TextModel

LONG = {"max_new_tokens": 400, "temperature": 0.0}
TEXT = "Grüße, 世界! 👩‍👩‍👧 naïve — done. " * 5


async def test_the_text_of_a_stream_grows_by_whole_characters_and_is_decoded_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoded, decode = 0, TextModel.decode

    def count(model: TextModel, token_ids: list[int], **how: Any) -> str:
        nonlocal decoded
        decoded += len(token_ids)
        return decode(model, token_ids, **how)

    sampled = ids_of(TEXT)
    folder = write_byte_tokenizer(tmp_path / "model")
    async with front_door(tmp_path, token_s=0.02, tokenizer=str(folder)) as door:
        monkeypatch.setattr(TextModel, "decode", count)
        door.script(sampled)
        sampling = {"max_new_tokens": 1000, "skip_special_tokens": False}
        events = await door.stream("/generate", ask(sampling_params=sampling))
        texts = [event["text"] for event in events]
        assert len(texts) > 50 and "".join(texts) == TEXT
        assert not any("\ufffd" in text for text in texts)
        assert [token for event in events for token in event["output_ids"]] == [*sampled, END_TOKEN]
        assert decoded < 20 * len(sampled)
        copies = await door.stream("/generate", ask(sampling_params=sampling | {"n": 2}))
        for at in (0, 1):
            assert "".join(event["text"] for event in copies if event["index"] == at) == TEXT
        body = {"model": MODEL, "prompt": PROMPT, "max_tokens": 1000}
        pieces = [
            event["choices"][0]["text"] for event in await door.stream("/v1/completions", body)
        ]
        assert "".join(pieces) == TEXT and not any("\ufffd" in piece for piece in pieces)


async def test_a_caller_that_hangs_up_ends_its_request_at_the_engine(tmp_path: Path) -> None:
    """Streams, and a request that an engine gets as it is. Result: none of them runs on."""
    arrived, gone = asyncio.Event(), asyncio.Event()

    async def until_gone(request: web.Request) -> web.Response:
        arrived.set()
        assert await request.json()
        await until(lambda: request.transport is None or request.transport.is_closing())
        gone.set()
        return web.Response()

    def teach(engine: FakeSglang) -> None:
        engine.more_routes += [web.post("/v1/completions", until_gone)]

    folder = write_tokenizer(tmp_path / "model")
    async with front_door(tmp_path, token_s=0.02, tokenizer=str(folder), teach=teach) as door:
        completion = {"model": MODEL, "prompt": PROMPT, "max_tokens": 400, "stream": True}
        bodies = [
            ("/generate", ask(sampling_params=LONG, stream=True)),
            ("/v1/completions", completion),
        ]
        bodies.append(("/generate", ask(sampling_params=LONG | {"n": 3}, stream=True)))
        for path, body in bodies:
            async with door.http.post(f"{door.url}{path}", json=body) as response:
                await response.content.readline()
                assert any(engine.running for engine in door.engines.values())
            await until(lambda: not any(engine.running for engine in door.engines.values()))
        asked = asyncio.ensure_future(
            door.post("/v1/completions", completion | {"echo": True, "stream": False})
        )
        await asyncio.wait_for(arrived.wait(), 30)
        asked.cancel()
        await asyncio.wait_for(gone.wait(), 10)
        # Nothing of it is left that an update of the weights would wait for.
        assert (
            await door.post(
                "/update_weights_from_disk", {"model_path": "/w", "weight_version": "1"}
            )
        )["success"]


async def test_requests_that_wait_for_weights_that_no_engine_can_load_get_the_reason(
    tmp_path: Path,
) -> None:
    """Both engines refuse weights. Result: health and requests say so; the next weights end it.
    After a part of weights, forwarded requests wait as well."""
    folder = write_tokenizer(tmp_path / "model")
    async with front_door(
        tmp_path, teach=teach_chat, tokenizer=str(folder), no_weights_s=1.0
    ) as door:
        for engine in door.engines.values():
            engine.refuse_weights = True
        load = {"model_path": "/weights/7", "weight_version": "7"}
        await door.post("/update_weights_from_disk", load, 400)
        carried = ask()
        forwarded = ask(sampling_params=GREEDY | {"frequency_penalty": 0.5})
        error = (await door.post("/generate", carried, 503))["error"]["message"]
        assert "'7'" in error and "no such file" in error
        await door.post("/generate", forwarded)  # by the weights that the engines still have
        async with door.http.get(f"{door.url}/health") as response:
            assert response.status == 503
            assert "no such file" in (await response.json())["weights"]
        for engine in door.engines.values():
            engine.refuse_weights = False
        await door.post("/update_weights_from_disk", load | {"weight_version": "8"})
        assert (await door.post("/generate", carried))["meta_info"]["weight_version"] == "8"
        await until_said(lambda: door.get("/health"), lambda said: "weights" not in said)
        await door.post("/pause_generation", {})
        for engine in door.engines.values():
            engine.refuse_push, engine.push_s = True, 60.0
        part = asyncio.create_task(
            door.post("/update_weights_from_tensor", {"weight_version": "9"}, 400)
        )
        # The first refusal ends it for all: until then both have the part.
        await until(lambda: all(engine.pushing for engine in door.engines.values()))
        for engine in door.engines.values():
            engine.push_s = 0.0
        await part
        await door.post("/continue_generation", {}, 400)
        for body in (carried, forwarded):
            error = (await door.post("/generate", body, 503))["error"]["message"]
            assert "'9'" in error


@pytest.mark.parametrize("defaults", ["model", "openai"])
async def test_a_chat_is_sampled_as_the_engine_would_sample_it(
    tmp_path: Path, defaults: str
) -> None:
    """The model's files name values, one of which the mesh does not carry. Result: chats take them,
    and are forwarded, unless SGLang ignores them; other forms never take them."""
    folder = write_tokenizer(tmp_path / "model")
    named = {"top_k": 7, "temperature": 0.3, "repetition_penalty": 1.1, "top_p": None}
    (folder / "generation_config.json").write_text(json.dumps(named))

    def teach(engine: FakeSglang) -> None:
        teach_chat(engine).arguments["sampling_defaults"] = defaults

    messages = [{"role": "user", "content": "a"}]
    body = {"model": MODEL, "messages": messages, "max_tokens": 5, "temperature": 0.5}
    async with front_door(tmp_path, teach=teach, tokenizer=str(folder)) as door:

        async def sampled(path: str, body: dict[str, Any]) -> dict[str, Any]:
            for engine in door.engines.values():
                engine.requests.clear()
            await door.post(path, body)
            sent = [each for engine in door.engines.values() for each in engine.requests]
            return {
                name: value
                for name, value in sent[-1]["sampling_params"].items()
                if name in ("temperature", "top_k", "top_p")
            }

        fills = defaults == "model"
        answer = await door.post("/v1/chat/completions", body)
        assert ("forwarded" in answer) == fills
        asked = {"temperature": 0.5} | ({"top_k": 7} if fills else {})
        neutral = body | {"repetition_penalty": 1.0}
        assert await sampled("/v1/chat/completions", neutral) == asked
        completion = {"model": MODEL, "prompt": "a", "max_tokens": 5}
        assert await sampled("/v1/completions", completion) == {}
        answer = await door.post("/v1/responses", {"input": "a"}, 400 if fills else 200)
        assert not fills or "repetition_penalty" in answer["error"]["message"]


async def test_a_token_that_only_the_tokenizer_names_as_its_end_ends_an_answer(
    tmp_path: Path,
) -> None:
    folder = write_tokenizer(tmp_path / "model")
    (folder / "config.json").write_text("{}")
    named = {"eos_token": f"<{END_TOKEN}>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(named))
    async with front_door(tmp_path, teach=teach_chat, tokenizer=str(folder)) as door:
        door.script(tokens_of("end"))
        body = {"model": MODEL, "prompt": "Count", "max_tokens": 30}
        choice = (await door.post("/v1/completions", body))["choices"][0]
        assert (choice["text"], choice["matched_stop"]) == ("end", END_TOKEN)
        pieces = [
            event["choices"][0]["text"] for event in await door.stream("/v1/completions", body)
        ]
        assert "".join(pieces) == "end"


async def test_what_would_end_an_engine_is_refused_before_it_is_forwarded(tmp_path: Path) -> None:
    """Each of these ends SGLang, or is for its own parts. Result: a refusal with the field's name,
    and no engine gets it; a request without it is forwarded as before."""
    beyond = [5, 1_000_000]
    penalty = {"frequency_penalty": 0.1}
    bad: list[tuple[str, dict[str, Any], str]] = [
        ("/generate", {"text": "", "return_logprob": True, "logprob_start_len": 0}, "text"),
        ("/generate", {"text": ["a", ""], "sampling_params": penalty}, "text"),
        ("/generate", {"input_ids": beyond, "sampling_params": penalty}, "input_ids"),
        ("/generate", {"input_ids": [[5], beyond], "sampling_params": penalty}, "input_ids[1]"),
        ("/generate", ask(positional_embed_overrides=[1]), "positional_embed_overrides"),
        ("/generate", ask(top_logprobs_num=1_000_000), "top_logprobs_num"),
        ("/generate", ask(sampling_params=GREEDY | penalty | {"is_normalized": True}), "is_norm"),
        ("/generate", ask(sampling_params=penalty | {"stop_token_ids": beyond}), "stop_token_ids"),
        ("/generate", ask(sampling_params={"logit_bias": {"1000000": 1}}), "logit_bias"),
        ("/generate", ask(sampling_params=penalty | {"n": 2, "sampling_seed": 7}), "n"),
        ("/v1/completions", {"prompt": beyond, **penalty}, "prompt"),
        ("/v1/completions", {"prompt": "", "echo": True, "logprobs": 1}, "prompt"),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "a"}], "input_ids": beyond, **penalty},
            "input_ids",
        ),
        ("/inference/v1/generate", {"token_ids": beyond, "sampling_params": penalty}, "token_ids"),
    ]
    forwarded: list[dict[str, Any]] = []

    @web.middleware
    async def note(request: web.Request, handler: Any) -> web.StreamResponse:
        body = await request.json() if request.path == "/generate" else {}
        if "frequency_penalty" in body.get("sampling_params", {}):
            forwarded.append(body)
            return web.json_response({"output_ids": [1]})
        answer: web.StreamResponse = await handler(request)
        return answer

    def teach(engine: FakeSglang) -> None:
        teach_chat(engine).middlewares.append(note)

    folder = write_tokenizer(tmp_path / "model")
    async with front_door(tmp_path, teach=teach, tokenizer=str(folder)) as door:
        for path, body, field in bad:
            answer = await door.post(path, body, status=400)
            assert field in answer["error"]["message"], (path, body, answer)
        assert not forwarded
        good = {"text": "Count", "sampling_params": GREEDY | penalty}
        assert (await door.post("/generate", good))["output_ids"] == [1]
        assert [each["text"] for each in forwarded] == ["Count"]


async def test_a_request_during_which_an_engine_ended_goes_to_no_other(tmp_path: Path) -> None:
    ended: list[str] = []
    stops: list[asyncio.Future[None]] = []

    def teach(engine: FakeSglang) -> None:
        @web.middleware
        async def die(request: web.Request, handler: Any) -> web.StreamResponse:
            if request.path == "/generate" and (await request.json()).get("return_entropy"):
                ended.append(engine.url)
                stops.append(asyncio.ensure_future(engine.stop()))
                await until(lambda: is_free(engine.port))
                assert request.transport is not None
                request.transport.abort()
            answer: web.StreamResponse = await handler(request)
            return answer

        engine.middlewares.append(die)

    async with front_door(tmp_path, teach=teach) as door:
        await door.post("/generate", ask(return_entropy=True, rid="a"), status=503)
        refused = await door.post("/generate", ask(return_entropy=True, rid="b"), status=400)
        assert "an engine ended while it ran this same request" in refused["error"]["message"]
        assert len(ended) == 1
        await asyncio.gather(*stops)
        assert (await door.post("/generate", ask(return_routed_experts=True)))["output_ids"]


async def test_an_engine_that_comes_back_gets_requests_again(tmp_path: Path) -> None:
    """Requests that the mesh does not carry, of sessions that have no engine yet."""
    async with front_door(tmp_path) as door:
        e0 = door.engines["e0"]
        await e0.stop()
        for number in range(3):
            await door.post("/generate", ask(rid=f"r{number}", return_routed_experts=True))
        await e0.start()

        async def asked() -> int:
            await door.post("/generate", ask(return_routed_experts=True))
            return sum(bool(each.get("return_routed_experts")) for each in e0.requests)

        await until_said(asked, bool)


async def test_a_pause_ends_a_forwarded_request_that_its_engine_gets_after_the_abort(
    tmp_path: Path,
) -> None:
    arrived = asyncio.Event()

    @web.middleware
    async def hold(request: web.Request, handler: Any) -> web.StreamResponse:
        if request.path == "/generate" and (await request.json()).get("return_routed_experts"):
            arrived.set()
            await asyncio.sleep(0.5)
        answer: web.StreamResponse = await handler(request)
        return answer

    def teach(engine: FakeSglang) -> None:
        engine.middlewares.append(hold)

    async with (
        front_door(tmp_path, token_s=0.05, teach=teach) as door,
        asyncio.TaskGroup() as group,
    ):
        body = ask(sampling_params=LONG, return_routed_experts=True)
        asked = group.create_task(door.stream("/generate", body))
        await arrived.wait()
        await door.post("/pause_generation", {})
        events = await asked
        assert events[-1]["meta_info"]["finish_reason"]["type"] == "abort" and len(events) < 100
        await door.post("/continue_generation", {})


async def test_where_the_mesh_dies_within_a_stop_string_the_text_ends_there(tmp_path: Path) -> None:
    folder = write_tokenizer(tmp_path / "model")
    async with front_door(
        tmp_path, token_s=0.3, teach=teach_chat, tokenizer=str(folder), away_after_s=2.0
    ) as door:
        door.script(tokens_of("one two STOP three"))
        body = {"model": MODEL, "prompt": "Count", "max_tokens": 60, "stop": ["STOP"]}
        async with asyncio.TaskGroup() as group:
            asked = group.create_task(door.post("/v1/completions", body))
            await until(lambda: max(engine.sampled for engine in door.engines.values()) >= 10)
            for engine in door.engines.values():
                engine.hang()  # so that the stop string is not whole before the mesh is dead
            await door.kill_mesh(signal.SIGKILL)
            for engine in door.engines.values():
                engine.go_on()
        choice = asked.result()["choices"][0]
        assert (choice["text"], choice["finish_reason"]) == ("one two ", "stop")


async def test_where_the_mesh_dies_between_the_last_token_and_the_end_no_token_is_added(
    tmp_path: Path,
) -> None:
    def teach(engine: FakeSglang) -> None:
        engine.lose_end = True

    folder = write_tokenizer(tmp_path / "model")
    made = front_door(tmp_path, token_s=0.1, teach=teach, tokenizer=str(folder), away_after_s=2.0)
    async with made as door, asyncio.TaskGroup() as group:
        door.script(tokens_of("end"))
        asked = group.create_task(door.post("/generate", ask()))
        await until(lambda: any(engine.sampled == 4 for engine in door.engines.values()))
        await asyncio.sleep(0.5)  # until the gateway has them
        for engine in door.engines.values():
            engine.lose_end = False  # of later streams
        await door.kill_mesh(signal.SIGKILL)
        answer = await asked
        assert answer["output_ids"] == [*tokens_of("end"), END_TOKEN]
        assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": END_TOKEN}


async def test_a_stream_of_an_engine_that_breaks_goes_on_there(tmp_path: Path) -> None:
    """SGLang refuses a request whose id it still runs, until it has noticed that nobody reads
    it."""
    async with front_door(tmp_path, token_s=0.5, away_after_s=2.0) as door:
        await door.kill_mesh(signal.SIGKILL)
        await door.until_mesh("away")
        await door.engines["e1"].stop()
        e0 = door.engines["e0"]
        async with asyncio.TaskGroup() as group:
            asked = group.create_task(door.post("/generate", ask(rid="mine")))
            await until(lambda: e0.sampled == 2)
            e0.break_streams()
        assert asked.result()["output_ids"] == expected(PROMPT, 12)


async def test_an_abort_ends_a_request_at_an_engine_that_is_silent(tmp_path: Path) -> None:
    async with front_door(tmp_path, token_s=0.02, away_after_s=2.0) as door:
        await door.kill_mesh(signal.SIGKILL)
        await door.until_mesh("away")
        await door.post("/generate", ask())  # which reads what the engine survives
        for engine in door.engines.values():
            engine.hang()
        async with asyncio.TaskGroup() as group:
            asked = group.create_task(door.post("/generate", ask(rid="mine")))
            await until(
                lambda: (
                    "mine"
                    in [e.get("rid") for each in door.engines.values() for e in each.requests]
                )
            )
            assert (await door.post("/abort_request", {"rid": "mine"}))["aborted"] == 1
            answer = await asyncio.wait_for(asked, 10)
        assert answer["meta_info"]["finish_reason"] == {"type": "abort"}
