"""SGLang's HTTP surface in front of the mesh: what a framework sends is answered as an engine would
answer it."""

import asyncio
import json
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from support.conditions import until, until_said
from support.fake_sglang import Failure, FakeSglang, expected
from support.gateway import FrontDoor, front_door
from support.scheduler import scheduler_client
from treadle.scheduler.v1 import scheduler_pb2 as pb

KEY = "correct-horse-battery-staple"
PROMPT = list(range(10, 40))
GREEDY = {"max_new_tokens": 12, "temperature": 0.0}


@pytest.fixture
async def door(tmp_path: Path) -> AsyncIterator[FrontDoor]:
    async with front_door(tmp_path) as door:
        yield door


def ask(prompt: list[int], **more: Any) -> dict[str, Any]:
    """A body of /generate."""
    return {"input_ids": prompt, "sampling_params": GREEDY, "return_logprob": True, **more}


async def test_turns_of_a_session_are_one_trajectory_and_equal_to_a_direct_call(
    door: FrontDoor,
) -> None:
    context, found = list(PROMPT), []
    for _ in range(3):
        answer = await door.post("/generate", ask(context), X_Session_ID="s1")
        async with door.http.post(
            f"{door.engines['e0'].url}/generate",
            json=ask(context, rid=f"direct-{len(context)}", stream=True),
        ) as direct:
            last = [
                json.loads(line[6:]) async for line in direct.content if line.startswith(b"data: {")
            ]
        assert (
            answer["output_ids"]
            == expected(context, 12)
            == [i for each in last for i in each["output_ids"]]
        )
        entries = [entry for each in last for entry in each["meta_info"]["output_token_logprobs"]]
        assert [entry[1] for entry in answer["meta_info"]["output_token_logprobs"]] == [
            entry[1] for entry in entries
        ]
        assert [
            entry[0] for entry in answer["meta_info"]["output_token_logprobs"]
        ] == pytest.approx([entry[0] for entry in entries], rel=1e-6)
        assert answer["meta_info"]["weight_versions"] == last[-1]["meta_info"]["weight_versions"]
        assert answer["meta_info"]["finish_reason"] == {"type": "length", "length": 12}
        found.append(answer["meta_info"]["trajectory_id"])
        context += answer["output_ids"] + [7, 8, 9]
    assert len(set(found)) == 1


async def test_without_a_session_the_trajectory_is_found_by_its_tokens(door: FrontDoor) -> None:
    first = await door.post("/generate", ask(PROMPT))
    sibling = await door.post("/generate", ask(PROMPT))
    context = PROMPT + first["output_ids"] + [7]
    second = await door.post("/generate", ask(context))
    names = [each["meta_info"]["trajectory_id"] for each in (first, sibling, second)]
    assert len(set(names)) == 2 and names[2] in names[:2]


async def test_a_session_that_rewrites_its_context_gets_another_trajectory(door: FrontDoor) -> None:
    first = await door.post("/generate", ask(PROMPT), X_SMG_Routing_Key="s2")
    other = await door.post("/generate", ask([5, *PROMPT]), X_SMG_Routing_Key="s2")
    assert other["output_ids"] == expected([5, *PROMPT], 12)
    assert other["meta_info"]["trajectory_id"] != first["meta_info"]["trajectory_id"]
    async with door.http.delete(f"{door.url}/sessions/s2") as closed:
        assert await closed.json() == {"closed": 2}


async def test_a_trajectory_that_the_scheduler_has_closed_is_followed_by_another_one_in_the_mesh(
    door: FrontDoor,
) -> None:
    """As after a lease that had run out. Result: the session goes on in the mesh, and not on an
    engine straight."""
    first = await door.post("/generate", ask(PROMPT), X_Session_ID="s4")
    closed = first["meta_info"]["trajectory_id"]
    closing = pb.CloseTrajectoryRequest(
        request_id="c", trajectory_id=closed, outcome=pb.OUTCOME_FAILED
    )
    async with scheduler_client(door.scheduler) as calls:
        await calls.call("CloseTrajectory", closing)
    context, found = PROMPT + first["output_ids"], []
    for _ in range(2):
        answer = await door.post("/generate", ask(context), X_Session_ID="s4")
        assert answer["output_ids"] == expected(context, 12)
        found.append(answer["meta_info"]["trajectory_id"])
        context += answer["output_ids"]
    assert found[0] == found[1] not in ("", closed)


@pytest.mark.parametrize("incremental", [True, False])
async def test_a_stream_has_the_form_of_the_engines_own_whichever_way_it_takes(
    tmp_path: Path, incremental: bool
) -> None:
    def teach(engine: FakeSglang) -> None:
        engine.incremental = engine.arguments["incremental_streaming_output"] = incremental

    async with front_door(tmp_path, teach=teach) as door:
        for more in ({}, {"return_entropy": True}):  # the mesh does not carry it
            body = ask(PROMPT, stream=True, return_logprob=True, **more)
            async with door.http.post(f"{door.url}/generate", json=body) as response:
                lines = [line async for line in response.content if line.startswith(b"data: ")]
            assert lines.pop() == b"data: [DONE]\n"
            tokens, logprobs = list[int](), list[Any]()
            for event in (json.loads(line[6:]) for line in lines):
                new, entries = event["output_ids"], event["meta_info"]["output_token_logprobs"]
                tokens = tokens + new if incremental else new
                logprobs = logprobs + entries if incremental else entries
                assert len(tokens) == len(logprobs) == event["meta_info"]["completion_tokens"]
            assert tokens == expected(PROMPT, 12)


async def test_a_batch_brings_the_tokens_of_each_prompt(door: FrontDoor) -> None:
    batch = await door.post("/generate", ask(PROMPT) | {"input_ids": [PROMPT, [3, 4, 5]]})
    assert [each["output_ids"] for each in batch] == [expected(PROMPT, 12), expected([3, 4, 5], 12)]


async def test_a_request_is_aborted_by_its_rid_and_keeps_its_tokens(tmp_path: Path) -> None:
    long = {"max_new_tokens": 400, "temperature": 0.0}
    async with front_door(tmp_path, token_s=0.02) as door:
        body = ask(PROMPT, rid="mine", sampling_params=long, stream=True)
        async with door.http.post(f"{door.url}/generate", json=body) as response:
            first = await response.content.readline()  # the gateway has a token
            assert (await door.post("/abort_request", {"rid": "mine"}))["aborted"] == 1
            later = [line async for line in response.content if line.startswith(b"data: {")]
        events = [json.loads(line[6:]) for line in (first, *later)]
        assert events[-1]["meta_info"]["finish_reason"] == {"type": "abort"}
        tokens = [token for event in events for token in event["output_ids"]]
        assert 0 < len(tokens) < 400
        assert tokens == expected(PROMPT, len(tokens))
        await until(lambda: not any(engine.running for engine in door.engines.values()))


async def test_a_caller_that_hangs_up_leaves_nothing_running(tmp_path: Path) -> None:
    long = {"max_new_tokens": 400, "temperature": 0.0}
    async with front_door(tmp_path, token_s=0.02) as door:
        asked = asyncio.ensure_future(door.post("/generate", ask(PROMPT, sampling_params=long)))
        await until(lambda: any(engine.running for engine in door.engines.values()))
        asked.cancel()
        await until(lambda: not any(engine.running for engine in door.engines.values()))


async def test_what_the_mesh_does_not_carry_goes_to_an_engine_as_it_is(door: FrontDoor) -> None:
    body = ask(PROMPT, rid="whole", return_routed_experts=True, stream=True)
    async with door.http.post(
        f"{door.url}/generate", json=body, headers={"X-Session-ID": "s3"}
    ) as response:
        lines = [
            json.loads(line[6:]) async for line in response.content if line.startswith(b"data: {")
        ]
    assert [token for each in lines for token in each["output_ids"]] == expected(PROMPT, 12)
    sent = [
        request
        for engine in door.engines.values()
        for request in engine.requests
        if request.get("rid") == "whole"
    ]
    assert [request["return_routed_experts"] for request in sent] == [True]


async def test_engines_with_a_key_are_called_with_it_and_nobody_is_told_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Engines of --api-key. Result: steps, forwarded requests and questions reach them; the key is
    in no answer, though SGLang reports it."""
    monkeypatch.setenv("TREADLE_ENGINE_KEY", KEY)

    def teach(engine: FakeSglang) -> None:
        engine.key = KEY
        engine.arguments |= {"api_key": KEY, "states": [{"admin_api_key": KEY, "port": 1}]}
        engine.arguments["launch_command"] = f"--api-key {KEY} --port 1 --admin-api-key={KEY}"

    async with front_door(tmp_path, teach=teach, engine_key=KEY) as door:
        body = ask(PROMPT)
        assert (await door.post("/generate", body))["output_ids"]
        forwarded = {**body, "sampling_params": {**body["sampling_params"], "regex": "a+"}}
        assert (await door.post("/generate", forwarded))["output_ids"]
        assert len((await door.get("/v1/loads"))["loads"]) == 2
        engine_id, url = next(iter(door.urls.items()))
        for path in ("/server_info", f"/engines/{engine_id}/server_info"):
            told = await door.get(path)
            assert told["states"] == [{"port": 1}] and KEY not in str(told)
            assert told["launch_command"] == "--api-key *** --port 1 --admin-api-key ***"
        async with door.http.get(f"{url}/server_info") as response:
            assert response.status == 401, "without the key"


async def test_a_drained_engine_gets_no_request_of_the_gateway_itself(tmp_path: Path) -> None:
    """Requests that go to an engine as they are, and all while the mesh is away. Result: also a
    session that was there goes on at the other engine."""
    async with front_door(tmp_path, away_after_s=2.0) as door:
        asked = 0

        async def engine_of(session: str, **more: Any) -> str:
            nonlocal asked
            asked += 1
            rid = f"asked{asked}"
            await door.post("/generate", ask(PROMPT, rid=rid, **more), X_Session_ID=session)
            (found,) = {
                name
                for name, e in door.engines.items()
                for each in e.requests
                if rid in str(each.get("rid"))
            }
            return found

        async def forwarded() -> str:
            return await engine_of(f"s{asked}", return_routed_experts=True)

        assert await engine_of("kept", return_routed_experts=True) == "e0"
        async with scheduler_client(door.scheduler) as calls:
            await calls.call("DrainEngine", pb.DrainEngineRequest(request_id="d", engine_id="e0"))
        await until_said(forwarded, lambda name: name == "e1")
        assert await engine_of("kept", return_routed_experts=True) == "e1"
        await door.kill_mesh(signal.SIGKILL)
        await door.until_mesh("away")
        assert [await engine_of(f"away{number}") for number in range(3)] == ["e1"] * 3


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
async def test_every_request_ends_where_the_mesh_dies_in_its_midst_and_later_ones_use_it_again(
    tmp_path: Path, number: signal.Signals
) -> None:
    sampling = {"max_new_tokens": 150, "temperature": 0.0}
    prompts = [[10 + number, 20, 30] for number in range(8)]
    async with front_door(tmp_path, token_s=0.02, away_after_s=2.0) as door:
        async with asyncio.TaskGroup() as group:
            asked = [
                group.create_task(door.post("/generate", ask(each, sampling_params=sampling)))
                for each in prompts
            ]
            await until(lambda: sum(engine.sampled for engine in door.engines.values()) > 100)
            await door.kill_mesh(number)
        for prompt, task in zip(prompts, asked, strict=True):
            answer = task.result()
            assert answer["output_ids"] == expected(prompt, 150)
            assert len(answer["meta_info"]["output_token_logprobs"]) == 150
        await door.until_mesh("away")
        door.engines["e0"].failure = Failure("http", 503)
        for _ in range(3):  # it fails at once, and so has the fewest requests
            assert (await door.post("/generate", ask(PROMPT)))["output_ids"] == expected(PROMPT, 12)
        door.engines["e1"].failure = Failure("event", 500)
        await door.post("/generate", ask(PROMPT), 503)
        for engine in door.engines.values():
            engine.failure = None
        await door.start_mesh()
        await door.until_mesh("there")
        answer = await door.post("/generate", ask(PROMPT))
        assert answer["output_ids"] == expected(PROMPT, 12) and answer["meta_info"]["trajectory_id"]


async def test_a_pause_by_the_trainer_ends_steps_or_keeps_them(tmp_path: Path) -> None:
    sampling = {"max_new_tokens": 60, "temperature": 0.0}
    async with front_door(tmp_path, token_s=0.2) as door, asyncio.TaskGroup() as group:
        ended = group.create_task(door.post("/generate", ask(PROMPT, sampling_params=sampling)))
        await until(lambda: any(engine.running for engine in door.engines.values()))
        await door.post("/pause_generation", {})
        assert (await ended)["meta_info"]["finish_reason"]["type"] == "abort"
        await door.post("/continue_generation", {})
        kept = group.create_task(
            door.post("/generate", ask([9, *PROMPT], sampling_params=sampling))
        )
        await until(lambda: any(engine.running for engine in door.engines.values()))
        await door.post("/pause?mode=keep", {})
        await until(lambda: not any(engine.running for engine in door.engines.values()))
        assert not kept.done()
        for engine in door.engines.values():
            engine.token_s = 0.002
        await door.post("/resume", {})
        assert (await kept)["output_ids"] == expected([9, *PROMPT], 60)
