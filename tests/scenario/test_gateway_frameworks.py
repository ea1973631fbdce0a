"""Frameworks that speak HTTP, through the gateway: SkyRL's and prime-rl's own clients, OpenAI's,
and what slime sends.

Each runs a batch of several turns. Result: tokens, logprobs and weight versions are those of a
direct call, and the turns of a session are one trajectory.
"""

import asyncio
import json
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc.aio
import openai
import pytest
from support.conditions import until
from support.fake_chat import text_of, write_tokenizer
from support.fake_sglang import EXPERTS_PER_TOKEN, LAYERS, FakeSglang, expected
from support.frameworks.packages import run_rollouts
from support.frameworks.prime_rl import PrimeRl
from support.frameworks.settings import shown_settings
from support.frameworks.slime import Sample, Slime
from support.gateway import FrontDoor, ask_directly, front_door
from treadle.scheduler.v1 import scheduler_pb2
from treadle.scheduler.v1.scheduler_pb2_grpc import SchedulerServiceStub

MODEL = "fake/model"
PROMPTS = [list(range(10, 40)), list(range(50, 70)), list(range(80, 120))]
SESSIONS = ["s0", "s1", "s2"]
NEW_TOKENS, TURNS, OBSERVATION = 12, 3, [7, 8, 9]
# Bodies of /inference/v1/generate that are refused: the status, and a part of what is said.
REFUSED: list[tuple[dict[str, Any], int, str]] = [
    ({"sampling_params": {}}, 400, "token_ids"),
    ({"token_ids": [], "sampling_params": {}}, 400, "token_ids"),
    ({"token_ids": [2**40], "sampling_params": {}}, 400, "token ids"),
    ({"token_ids": [1], "sampling_params": {"temperature": "warm"}}, 400, "temperature"),
    ({"token_ids": [1], "sampling_params": {"stop": [3]}}, 400, "stop"),
    ({"token_ids": [1], "sampling_params": {"max_tokens": 0}}, 400, "max_tokens"),
    ({"token_ids": [1], "sampling_params": {"n": 0.5}}, 400, "n:"),
    ({"token_ids": [1], "sampling_params": {"logprobs": 5}}, 501, "logprobs"),
    ({"token_ids": [1], "sampling_params": {"bad_words": ["no"]}}, 501, "bad_words"),
    ({"token_ids": [1], "sampling_params": {}, "model": "skyrl-lora"}, 404, MODEL),
    ({"token_ids": [1], "sampling_params": {}, "features": {"mm_hashes": {}}}, 501, "features"),
]


@pytest.fixture
async def door(tmp_path: Path) -> AsyncIterator[FrontDoor]:
    folder = write_tokenizer(tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(
        json.dumps(config | {"num_experts_per_tok": EXPERTS_PER_TOKEN})
    )
    async with front_door(tmp_path, teach=lend, tokenizer=str(folder)) as door:
        yield door


def lend(engine: FakeSglang) -> None:
    """Let an engine give memory away."""
    engine.arguments["enable_memory_saver"] = True


def address_of(door: FrontDoor) -> str:
    """host:port."""
    return door.url.removeprefix("http://")


async def check_turn(
    door: FrontDoor, context: list[int], token_ids: list[int], logprobs: list[float]
) -> None:
    """An answer is that of a direct call."""
    direct = await ask_directly(door.http, door.engines["e0"].url, context, NEW_TOKENS)
    assert token_ids == direct.token_ids == expected(context, NEW_TOKENS)
    assert logprobs == pytest.approx(direct.logprobs, rel=1e-6)


async def check_turns(door: FrontDoor, turns: list[dict[str, Any]]) -> None:
    """All answers of a batch are those of direct calls."""
    assert len(turns) == TURNS
    for turn in turns:
        assert turn["stop_reasons"] == ["length"] * len(PROMPTS)
        for context, ids, logprobs in zip(
            turn["contexts"], turn["response_ids"], turn["response_logprobs"], strict=True
        ):
            await check_turn(door, context, ids, logprobs)
    assert turns[1]["contexts"] == [
        [*prompt, *ids, *OBSERVATION]
        for prompt, ids in zip(PROMPTS, turns[0]["response_ids"], strict=True)
    ]


def options(url: str, **sampling: Any) -> dict[str, Any]:
    return {
        "url": url,
        "model": MODEL,
        "prompts": PROMPTS,
        "sessions": SESSIONS,
        "turns": TURNS,
        "observation": OBSERVATION,
        "sampling": {"temperature": 0.0, "max_tokens": NEW_TOKENS, **sampling},
    }


@pytest.mark.full  # it needs the packages of `make frameworks`
async def test_skyrls_client_rolls_out_a_batch_of_several_turns(door: FrontDoor) -> None:
    """SkyRL 0.3.0's RemoteInferenceClient, with the sampling that its generator sends. Its weights
    cannot come, as SGLang's processes cannot join vLLM's group, and it is told what to do."""
    sampling = {
        "min_tokens": 1,
        "skip_special_tokens": True,
        "include_stop_str_in_output": True,
        "top_p": 1.0,
        "top_k": -1,
        "min_p": 0.0,
        "logprobs": 1,
        "stop": None,
    }
    shown = shown_settings("skyrl", address_of(door))
    assert shown["generator.inference_engine.run_engines_locally"] == "false"
    url = shown["generator.inference_engine.external_proxy_url"]
    answer = await run_rollouts("skyrl", options(url, **sampling))
    await check_turns(door, answer["turns"])
    assert answer["world_size"] == [2, 2]
    assert "/update_weights_from_disk" in answer["refusal"]
    assert await open_trajectories(door) == 0  # its sessions were finished


@pytest.mark.full
async def test_prime_rls_client_rolls_out_a_batch_of_several_turns(door: FrontDoor) -> None:
    """renderers 0.1.12, through which verifiers 0.4.0 sends. It refuses logprobs that do not name
    their tokens."""
    shown = shown_settings("prime-rl", address_of(door))
    [url] = shown["orchestrator"]["client"]["base_url"]
    assert shown["weight_broadcast"]["type"] == "filesystem"
    await check_turns(door, await run_rollouts("prime-rl", options(url.removesuffix("/v1"))))
    assert await open_trajectories(door) == len(SESSIONS)


async def test_an_unmodified_openai_client_runs_a_batch_of_several_turns(door: FrontDoor) -> None:
    made, asked = shown_settings("openai", address_of(door))["code"].splitlines()
    assert 'extra_headers={"X-Session-ID": trajectory_id}' in asked
    async with eval(made.partition("=")[2], {"openai": openai}) as client:

        async def play(prompt: list[int], session: str) -> None:
            context = list(prompt)
            for _ in range(TURNS):
                answer = await client.completions.create(
                    model=MODEL,
                    prompt=context,
                    max_tokens=NEW_TOKENS,
                    temperature=0.0,
                    logprobs=0,
                    extra_headers={"X-Session-ID": session},
                    extra_body={"return_token_ids": True},
                )
                choice = answer.choices[0]
                assert choice.logprobs is not None and choice.logprobs.token_logprobs is not None
                token_ids: list[int] = choice.model_extra["token_ids"] if choice.model_extra else []
                await check_turn(door, context, token_ids, choice.logprobs.token_logprobs)
                assert choice.text == text_of(token_ids)
                context += token_ids + OBSERVATION

        await asyncio.gather(*map(play, PROMPTS, SESSIONS))
        assert [model.id async for model in client.models.list()] == [MODEL]
    assert await open_trajectories(door) == len(SESSIONS)


async def test_what_slime_sends_runs_a_batch_of_several_turns(door: FrontDoor) -> None:
    shown = shown_settings("slime", address_of(door))
    router = f"http://{shown['--sglang-router-ip']}:{shown['--sglang-router-port']}"
    slime = Slime(door.http, router, [f"http://{shown['--rollout-external-engine-addrs']}"])
    assert await slime.discover() == [2]

    async def play(prompt: list[int], session: str) -> None:
        sample = Sample(session, list(prompt), NEW_TOKENS)
        for _ in range(TURNS):
            before = list(sample.tokens)
            sample.left, sample.logprobs = NEW_TOKENS, []
            await slime.generate(sample)
            await check_turn(door, before, sample.tokens[len(before) :], sample.logprobs)
            sample.tokens = sample.tokens + OBSERVATION
        assert sample.weight_versions == ["default"] * TURNS

    await asyncio.gather(*map(play, PROMPTS, SESSIONS))
    assert await open_trajectories(door) == len(SESSIONS)


async def test_slime_aborts_every_worker_and_goes_on_from_the_tokens_that_it_has(
    tmp_path: Path,
) -> None:
    """A partial rollout: more samples than the engines have room for run and wait. Result: all of
    them end at once, with their tokens, and later requests go on from there."""
    async with front_door(tmp_path, token_s=0.02) as door:
        slime = Slime(door.http, door.url, [door.url])
        samples = [Sample(f"s{number}", [10 + number, 20, 30], 300) for number in range(20)]
        async with asyncio.TaskGroup() as group:
            for sample in samples:
                group.create_task(slime.generate(sample))
            await until(lambda: sum(engine.sampled for engine in door.engines.values()) > 600)
            await slime.abort()
        assert {sample.finish for sample in samples} == {"abort"}
        assert 0 < sum(len(sample.response) for sample in samples) < 20 * 300
        await until(lambda: not any(engine.running for engine in door.engines.values()))
        for sample in samples:
            sample.left = 5
        await asyncio.gather(*map(slime.generate, samples))
        for sample in samples:
            assert sample.response == expected(sample.tokens[:3], len(sample.response))


async def test_an_abort_at_one_worker_ends_what_runs_there_and_nothing_else(tmp_path: Path) -> None:
    async with front_door(tmp_path, token_s=0.2) as door:
        slime = Slime(door.http, door.url, [door.url])
        samples = [Sample(f"s{number}", [10 + number, 20, 30], 120) for number in range(4)]
        async with asyncio.TaskGroup() as group:
            for sample in samples:
                group.create_task(slime.generate(sample))
            e0, e1 = door.engines["e0"], door.engines["e1"]
            await until(lambda: e0.running + e1.running == 4 and min(e0.sampled, e1.sampled) > 5)
            there = e0.running
            answer = await slime.post(f"{door.url}/engines/e0/abort_request", {"abort_all": True})
            assert answer["aborted"] == there
            await until(lambda: not e0.running)
            assert e1.running == 4 - there
            e1.token_s = 0.002
        assert sorted(sample.finish for sample in samples) == ["abort"] * there + ["length"] * (
            4 - there
        )


async def test_an_abort_ends_what_was_handed_to_an_engine_as_it_was(tmp_path: Path) -> None:
    """With routing replay slime asks for experts, which the mesh does not carry."""
    async with front_door(tmp_path, token_s=0.02) as door:
        sampling = {"max_new_tokens": 300, "temperature": 0.0}
        body = {
            "input_ids": PROMPTS[0],
            "sampling_params": sampling,
            "stream": True,
            "return_routed_experts": True,
        }
        async with door.http.post(f"{door.url}/engines/e0/generate", json=body) as response:
            assert response.status == 200
            await until(lambda: any(engine.sampled > 5 for engine in door.engines.values()))
            assert (await door.post("/abort_request", {"abort_all": True}))["aborted"] == 1
            text = await response.text()
        assert '"type": "abort"' in text and text.count("output_ids") < 300


async def test_what_was_handed_to_an_engine_does_not_run_while_the_engine_is_paused(
    tmp_path: Path,
) -> None:
    """The sidecar does not know of such requests. Result: the pause ends those that run, later ones
    wait for its end, and then are answered whole."""
    async with front_door(tmp_path, token_s=0.02) as door, asyncio.TaskGroup() as group:

        async def ask(new_tokens: int) -> str:
            sampling = {"max_new_tokens": new_tokens, "temperature": 0.0}
            body = {
                "input_ids": PROMPTS[0],
                "sampling_params": sampling,
                "stream": True,
                "return_routed_experts": True,
            }
            async with door.http.post(f"{door.url}/generate", json=body) as response:
                return await response.text()

        running = group.create_task(ask(300))
        await until(lambda: any(engine.sampled > 5 for engine in door.engines.values()))
        await door.post("/pause_generation", {})
        assert '"type": "abort"' in await running
        waiting = group.create_task(ask(10))
        await asyncio.sleep(0.5)
        assert not any(engine.running for engine in door.engines.values()) and not waiting.done()
        await door.post("/continue_generation", {})
        assert '"type": "length"' in await waiting


@pytest.mark.parametrize("engines", ["workers", "fleet"])
async def test_slimes_weights_reach_every_engine_and_the_mesh_knows_of_them(
    door: FrontDoor, engines: str
) -> None:
    """By the URL of each worker, and with the gateway named as the one engine that slime did not
    start. Result: both engines join the group with ranks of their own, take both buckets under the
    name of incomplete weights, and serve the version that later samples say."""
    workers = [worker["url"] for worker in (await door.get("/workers"))["workers"]]
    slime = Slime(door.http, door.url, workers if engines == "workers" else [door.url])
    counts = await slime.discover()
    assert counts == ([1, 1] if engines == "workers" else [2])
    await slime.connect(counts)
    fakes = list(door.engines.values())
    assert sorted(fake.groups[0]["rank_offset"] for fake in fakes) == [1, 2]
    assert {fake.groups[0]["world_size"] for fake in fakes} == {3}
    for version in (1, 2):
        await slime.update_weights(version, [["a", "b"], ["c"]])
        assert await slime.versions() == [str(version)] * len(slime.engines)
        sample = Sample("s", [10, 20, 30], 5)
        await slime.generate(sample)
        assert sample.weight_versions == [str(version)]
    for fake in fakes:
        assert [body["names"] for _, body in fake.pushes] == [["a", "b"], ["c"]] * 2
        assert [what for what in fake.called if what.startswith("name")] == [
            *("name incomplete-1", "name 1", "name incomplete-2", "name 2")
        ]
        assert {request["cache_salt"] for request in fake.requests if request.get("stream")} <= {
            "default",
            "1",
            "2",
        }
    assert (await door.get("/model_info"))["weight_version"] == "2"
    await slime.lend_memory()
    assert not any(fake.asleep for fake in fakes)


async def test_a_bucket_that_one_engine_refuses_makes_no_version(door: FrontDoor) -> None:
    """Result: slime hears of it, no engine serves the version, and the same one can be pushed anew
    after a pause."""
    slime = Slime(door.http, door.url, [door.url])
    door.engines["e1"].refuse_push = True
    with pytest.raises(AssertionError, match="partially updated"):
        await slime.update_weights(1, [["a"], ["b"]])
    body = {"names": ["b"], "dtypes": ["bfloat16"], "shapes": [[2]], "weight_version": "1"}
    answer = await door.post("/update_weights_from_distributed", body, status=400)
    assert "has failed" in answer["error"]["message"]
    assert "has failed" in (await door.post("/continue_generation", {}, status=400))["message"]
    # The refusal of e1 ends the push on e0 too, which may not have begun there.
    assert (door.engines["e1"].weight_version, door.engines["e0"].weight_version == "1") == (
        "incomplete-1",
        False,
    )
    door.engines["e1"].refuse_push = False
    await slime.update_weights(1, [["a"], ["b"]])
    assert [fake.weight_version for fake in door.engines.values()] == ["1", "1"]


async def test_prime_rls_weights_are_loaded_while_what_runs_is_kept(tmp_path: Path) -> None:
    """Result: the request that runs meanwhile is one answer, whose spans say which version sampled
    what."""
    async with front_door(tmp_path, token_s=0.2) as door:
        prime = PrimeRl(door.http, door.url)
        await prime.wait_for_ready(MODEL)
        body = {
            "token_ids": PROMPTS[0],
            "model": MODEL,
            "sampling_params": {"temperature": 0.0, "max_tokens": 60},
        }
        async with asyncio.TaskGroup() as group:
            asked = group.create_task(door.post("/inference/v1/generate", body, X_Session_ID="s0"))
            await until(lambda: any(engine.sampled > 10 for engine in door.engines.values()))
            await prime.update_weights("/ckpt/broadcasts/step_1")
            for engine in door.engines.values():
                engine.token_s = 0.002
        [choice] = asked.result()["choices"]
        assert choice["token_ids"] == expected(PROMPTS[0], 60) and choice["logprobs"] is None
        first, second = choice["weight_versions"]
        assert (first["version"], second["version"]) == ("default", "step_1")
        assert (first["start"], second["end"]) == (0, 60) and first["end"] == second["start"] > 10
        assert [engine.weight_version for engine in door.engines.values()] == ["step_1", "step_1"]
        with pytest.raises(AssertionError, match=r"501.*SGLang engines cannot join"):
            await prime.init_broadcaster()


async def test_sampling_that_the_mesh_does_not_carry_is_asked_of_one_engine(
    door: FrontDoor,
) -> None:
    sampling = {"max_tokens": 5, "frequency_penalty": 0.5, "min_tokens": 3, "logprobs": 1}
    answer = await door.post(
        "/inference/v1/generate", {"token_ids": PROMPTS[0], "sampling_params": sampling}
    )
    assert answer["choices"][0]["token_ids"] == expected(PROMPTS[0], 5)
    assert len(answer["choices"][0]["logprobs"]["content"]) == 5
    asked = [
        request["sampling_params"]
        for engine in door.engines.values()
        for request in engine.requests
    ]
    assert [
        (each["frequency_penalty"], each["min_new_tokens"])
        for each in asked
        if "frequency_penalty" in each
    ] == [(0.5, 3)]


async def test_skyrl_gets_the_experts_of_each_token_and_layer(door: FrontDoor) -> None:
    body = {"token_ids": [5, 6, 7], "sampling_params": {"max_tokens": 4}, "model": MODEL}
    [choice] = (await door.post("/skyrl/v1/generate", body))["choices"]
    rows = choice["routed_experts"]
    assert [len(rows), len(rows[0]), len(rows[0][0])] == [3 + 4 - 1, LAYERS, EXPERTS_PER_TOKEN]
    assert [expert for row in rows for layer in row for expert in layer] == list(
        range(6 * LAYERS * EXPERTS_PER_TOKEN)
    )


async def test_skyrl_is_refused_before_an_engine_generates_that_returns_no_experts(
    door: FrontDoor,
) -> None:
    for engine in door.engines.values():
        engine.arguments["enable_return_routed_experts"] = False
        engine.requests.clear()
    body = {"token_ids": [5, 6, 7], "sampling_params": {"max_tokens": 4}}
    answer = await door.post("/skyrl/v1/generate", body, status=501)
    assert "--enable-return-routed-experts" in answer["error"]["message"]
    assert not any(5 in each["input_ids"] for e in door.engines.values() for each in e.requests)


async def test_a_token_request_that_cannot_be_served_as_it_is_says_why(door: FrontDoor) -> None:
    for body, status, said in REFUSED:
        answer = await door.post("/inference/v1/generate", body, status=status)
        assert said in answer["error"]["message"]


async def test_paths_of_workers_say_what_they_do_not_carry(door: FrontDoor) -> None:
    assert (await door.get("/engines/e0/health_generate"))["healthy"] is True
    assert (await door.get("/engines/e0/server_info"))["tp_size"] == 1
    answer = await door.post("/engines/e9/flush_cache", {}, status=404)
    assert "e9" in answer["error"]["message"] and "/workers" in answer["error"]["message"]
    answer = await door.post("/engines/e0/set_internal_state", {}, status=404)
    assert "set_internal_state" in answer["error"]["message"]
    known = {"url": door.engines["e0"].url, "worker_type": "regular"}
    assert (await door.post("/workers", known, status=202))["worker_id"] == "e0"
    answer = await door.post("/workers", {"url": "http://127.0.0.1:1"}, status=409)
    assert "sidecar" in answer["error"]["message"]


async def test_while_the_mesh_is_away_weights_wait_and_tokens_come(tmp_path: Path) -> None:
    async with front_door(tmp_path, away_after_s=2.0) as door:
        await door.kill_mesh(signal.SIGKILL)
        await door.until_mesh("away")
        slime = Slime(door.http, door.url, [door.url])
        with pytest.raises(AssertionError, match="the mesh is away"):
            await slime.update_weights(1, [["a"]])
        assert not any(fake.pushes for fake in door.engines.values())
        body = {"token_ids": PROMPTS[0], "sampling_params": {"max_tokens": 5, "temperature": 0.0}}
        answer = await door.post("/inference/v1/generate", body)
        assert answer["choices"][0]["token_ids"] == expected(PROMPTS[0], 5)


async def open_trajectories(door: FrontDoor) -> int:
    """That the scheduler knows."""
    request = scheduler_pb2.ListTrajectoriesRequest(open_only=True)
    async with grpc.aio.insecure_channel(door.scheduler) as channel:
        answer = await SchedulerServiceStub(channel).ListTrajectories(request, timeout=10.0)
    return len(answer.trajectories)
